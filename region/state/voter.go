package state

import (
	"fmt"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// maxAbove bounds what ReserveBallot goes above: a corrupt answer must not use
// up the rounds.
const maxAbove = 1 << 62

// reserveBallot allocates the next round and nothing more: the region's own
// vote is an ordinary promise and accept [F6 H1].
func (m *Machine) reserveBallot(above uint64) *pb.CommandResult {
	if above > maxAbove {
		return failed(errInvalid("above", fmt.Sprintf("round %d is no round that counting reached; find the voter that answered it", above)))
	}
	m.ballotRound = max(m.ballotRound, above) + 1
	b := register.Ballot{Era: config.EraOf(m.configuration), Round: m.ballotRound, Region: m.region, Incarnation: m.incarnation}
	return &pb.CommandResult{Kind: &pb.CommandResult_Reserved{Reserved: &pb.ReservedBallot{Ballot: b.Proto()}}}
}

func (m *Machine) promise(c *pb.PromiseCommand) *pb.CommandResult {
	results := make([]*pb.ItemResult, 0, len(c.GetItems()))
	for _, it := range c.GetItems() {
		p, ok := m.partitions.Get(it.GetPartition())
		if !ok {
			results = append(results, &pb.ItemResult{Partition: it.GetPartition()})
			continue
		}
		done := m.underVersion(c.GetConfigVersion()) && fits(it.GetBallot(), nil) && m.update(p, register.Change{Guard: register.GuardOf(it.GetGuard()), Ballot: register.BallotOf(it.GetBallot())})
		results = append(results, m.itemResult(it.GetPartition(), done))
	}
	return itemResults(results)
}

func (m *Machine) accepted(c *pb.AcceptedCommand) *pb.CommandResult {
	results := make([]*pb.ItemResult, 0, len(c.GetItems()))
	for _, it := range c.GetItems() {
		p, ok := m.partitions.Get(it.GetPartition())
		if !ok {
			results = append(results, &pb.ItemResult{Partition: it.GetPartition()})
			continue
		}
		results = append(results, m.itemResult(it.GetPartition(), m.underVersion(c.GetConfigVersion()) && m.acceptItem(p, it)))
	}
	return itemResults(results)
}

func (m *Machine) acceptItem(p *partition, it *pb.AcceptedItem) bool {
	rec, ballot, value := p.record, register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue())
	if ballot.IsZero() || rec.Alarm != "" || !fits(it.GetBallot(), it.GetValue()) {
		return false
	}
	if ballot == rec.Accepted {
		if value == rec.Value {
			return rec.Promised == ballot // taken already: a renewal's condition
		}
		// One ballot with two values: no guard makes that harmless.
		alarm := fmt.Sprintf("ballot %v came with two values: %+v and %+v", ballot, rec.Value, value)
		m.update(p, register.Change{Guard: rec.Guard(), Ballot: ballot, Alarm: alarm})
		return false
	}
	return m.update(p, register.Change{Guard: register.GuardOf(it.GetGuard()), Ballot: ballot, Accept: true, Value: value})
}

// fits bounds the names that a register would have to keep.
func fits(b *pb.Ballot, v *pb.Value) bool {
	return len(b.GetRegion()) <= maxName && len(v.GetOwner()) <= maxName && len(v.GetSuccessor()) <= maxName && len(v.GetReason()) <= maxName
}

// update takes a durable step of a register, or reports that its guard does
// not hold [H3].
func (m *Machine) update(p *partition, c register.Change) bool {
	if c.Ballot.IsZero() {
		return false
	}
	rec, ok := register.Update(p.record, c)
	if !ok {
		return false
	}
	p = m.editPartition(p)
	p.record, p.recordHash = rec, recordHash(rec)
	m.emit(RegisterChanged{Partition: p.name, Record: rec})
	return true
}

func (m *Machine) itemResult(name string, done bool) *pb.ItemResult {
	p, _ := m.partitions.Get(name)
	return &pb.ItemResult{Partition: name, Done: done, Register: p.record.Proto()}
}

func itemResults(items []*pb.ItemResult) *pb.CommandResult {
	return &pb.CommandResult{Kind: &pb.CommandResult_Items{Items: &pb.ItemResults{Items: items}}}
}

// recordVoters keeps the last life and count of durable writes seen of each
// voter; the count of one incarnation never goes down [F5].
func (m *Machine) recordVoters(c *pb.RecordVotersCommand) *pb.CommandResult {
	added := make(map[string]struct{})
	for _, v := range c.GetVoters() {
		id := v.GetVoter().GetId()
		if id == "" || len(id) > maxName {
			return failed(errInvalid("voters.voter.id", "write region/NAME or witness/NAME"))
		}
		if _, known := m.voters.Get(id); !known {
			added[id] = struct{}{}
		}
	}
	if m.voters.Len()+len(added) > MaxVoters {
		return failed(errInvalid("voters", fmt.Sprintf("at most %d voters are recorded", MaxVoters)))
	}
	for _, v := range c.GetVoters() {
		r := VoterRecord{
			ID: v.GetVoter().GetId(), Incarnation: register.Incarnation(v.GetVoter().GetIncarnation()),
			Life: v.GetLife(), Writes: v.GetWrites(),
		}
		if old, ok := m.voters.Get(r.ID); ok && old.Incarnation == r.Incarnation {
			r.Writes = max(r.Writes, old.Writes)
		}
		if old, ok := m.voters.Set(r.ID, r); ok {
			m.sum -= old.digest()
		}
		m.sum += r.digest()
	}
	return &pb.CommandResult{}
}
