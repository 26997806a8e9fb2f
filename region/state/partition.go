package state

import (
	"fmt"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	phaseAbsent   = pb.PartitionPhase_PARTITION_PHASE_ABSENT
	phaseActive   = pb.PartitionPhase_PARTITION_PHASE_ACTIVE
	phaseDraining = pb.PartitionPhase_PARTITION_PHASE_DRAINING
)

// RaisedReason is the reason of the revocations that an epoch's raise brings.
const RaisedReason = "epoch raised"

// adopt makes an epoch live: only after it may leases be granted.
//
// It is refused unless the own register still has the ballot accepted and the
// epoch is above every epoch ever adopted or dropped here, or is the live one
// [H7]. With it the value's own epoch is checked: a leader that was deposed
// between its Accept and its Adopt must not bring an old epoch to life.
func (m *Machine) adopt(c *pb.AdoptCommand) *pb.CommandResult {
	p, ok := m.partitions.Get(c.GetPartition())
	if !ok {
		return failed(errUnknownPartition(c.GetPartition()))
	}
	epoch := fence.Epoch(c.GetEpoch())
	if epoch == 0 || epoch > fence.MaxEpoch {
		return failed(errInvalid("epoch", fmt.Sprintf("%d is out of range; epochs are 1 to %d", epoch, fence.MaxEpoch)))
	}
	if reason := m.notAdoptable(p, epoch, register.BallotOf(c.GetBallot())); reason != "" {
		return failed(errRefused(reason))
	}
	if p.live() && epoch == p.epoch {
		// The same epoch, leases and seq; a drain goes on.
		m.emit(PartitionAdopted{Partition: p.name, Epoch: epoch, Resumed: true, Unsettled: p.unsettled})
		return &pb.CommandResult{}
	}
	// Before epoch 1 nobody owned the partition. An owner's own raise changes
	// nothing: no other region owned it in between.
	unsettled := m.level >= 2 && !c.GetPlanned() && epoch > 1
	if p.live() {
		if epoch == p.epoch+1 {
			unsettled = p.unsettled
			m.revokeAll(p)
		} else {
			m.dropEpoch(p, errLapsed(p.name))
		}
		p, _ = m.partitions.Get(p.name)
	}
	p = m.editPartition(p)
	p.epoch, p.seq, p.phase, p.successor, p.unsettled = epoch, 0, phaseActive, "", unsettled
	m.emit(PartitionAdopted{Partition: p.name, Epoch: epoch, Unsettled: unsettled})
	m.serveStalled(p.name)
	return &pb.CommandResult{}
}

// notAdoptable returns why an epoch must not be adopted, or "".
func (m *Machine) notAdoptable(p *partition, epoch fence.Epoch, ballot register.Ballot) string {
	rec := p.record
	self := register.Region{Name: m.region, Incarnation: m.incarnation}
	switch {
	case m.eraStop != nil:
		return (&config.StoppedError{Own: config.EraOf(m.configuration), Stop: m.eraStop}).Error()
	case rec.Alarm != "":
		return "the own register is alarmed: " + rec.Alarm
	case ballot.IsZero() || rec.Accepted != ballot:
		return fmt.Sprintf("the own register has accepted ballot %v, not %v", rec.Accepted, ballot)
	case rec.Value.Owner != self:
		return fmt.Sprintf("the own register names %q as owner, not this incarnation of %q", rec.Value.Owner.Name, m.region)
	case rec.Value.Epoch != epoch:
		return fmt.Sprintf("the own register has epoch %d, not %d", rec.Value.Epoch, epoch)
	case p.live() && epoch == p.epoch:
		return ""
	case epoch <= p.epoch || epoch <= p.dropped:
		return fmt.Sprintf("epoch %d is not above epoch %d, adopted or dropped here before", epoch, max(p.epoch, p.dropped))
	}
	return ""
}

// revokeAll marks all leases of a partition: its owner raises the epoch itself
// [F47]. No other region owned it in between (that would have taken the next
// epoch), so clients may still believe in the old tokens; those end as any
// revoked lease does, when their last sent validity is over, and the resource
// passes on under the new epoch.
func (m *Machine) revokeAll(p *partition) {
	for _, name := range m.resourcesOf(p.name) {
		if r, _ := m.resources.Get(name); r.token != 0 {
			m.markRevoked(r, RaisedReason)
		}
	}
}

// drop ends an epoch that another owner or a higher epoch has ended [H6].
func (m *Machine) drop(c *pb.DropCommand) *pb.CommandResult {
	p, ok := m.partitions.Get(c.GetPartition())
	if !ok {
		return failed(errUnknownPartition(c.GetPartition()))
	}
	epoch := fence.Epoch(c.GetEpoch())
	switch {
	case p.live() && epoch == p.epoch:
		m.dropEpoch(p, m.errNotOwner(p))
	case epoch == 0 || epoch > p.dropped:
		return failed(errRefused(fmt.Sprintf("epoch %d is not live here: epoch %d was the last adopted, %d the last dropped", epoch, p.epoch, p.dropped)))
	}
	return &pb.CommandResult{} // dropped, perhaps before
}

// dropEpoch ends the live epoch with all its leases and waiters; told is for
// those. From level 2 on they are removed by a sweep, and told by errOver.
func (m *Machine) dropEpoch(p *partition, told *pb.ErrorDetail) {
	p = m.editPartition(p)
	p.phase, p.dropped, p.unsettled, p.successor = phaseAbsent, max(p.dropped, p.epoch), false, ""
	m.emit(PartitionDropped{Partition: p.name, Epoch: p.epoch})
	if m.level >= 2 {
		m.startSweep()
		return
	}
	for _, name := range m.resourcesOf(p.name) {
		r, _ := m.resources.Get(name)
		if r.token != 0 {
			r = m.endLease(r, EndDropped)
		}
		_, r = m.endWaiters(r, told, MaxQueue)
		m.discard(r)
	}
}

// grants reports whether a lease may be granted or handed over.
func (p *partition) grants() bool { return p.phase == phaseActive && p.seq < fence.MaxSeq }

// liveEpoch returns a partition whose epoch is live here.
func (m *Machine) liveEpoch(name string, epoch uint32) (*partition, *pb.ErrorDetail) {
	p, ok := m.partitions.Get(name)
	switch {
	case !ok:
		return nil, errUnknownPartition(name)
	case !p.live():
		return nil, m.errNotOwner(p)
	case p.epoch != fence.Epoch(epoch):
		return nil, errRefused(fmt.Sprintf("partition %q is at epoch %d, not %d", name, p.epoch, epoch))
	}
	return p, nil
}

// startDrain begins a planned transfer: from here on no grant and no hand-over
// passes [F26], and all waiters are told where the partition goes; those of a
// long queue in the next commands. The leases are the leader's to revoke.
func (m *Machine) startDrain(c *pb.StartDrainCommand) *pb.CommandResult {
	p, e := m.liveEpoch(c.GetPartition(), c.GetEpoch())
	if e != nil {
		return failed(e)
	}
	switch n := len(c.GetSuccessor()); {
	case n == 0 || n > maxName || c.GetSuccessor() == m.region:
		return failed(errInvalid("successor", fmt.Sprintf("name another region in 1 to %d bytes", maxName)))
	case p.phase == phaseDraining && p.successor != c.GetSuccessor():
		return failed(errRefused(fmt.Sprintf("partition %q drains to %q; abort that first", p.name, p.successor)))
	case p.phase == phaseDraining:
		return &pb.CommandResult{}
	}
	p = m.editPartition(p)
	p.phase, p.successor = phaseDraining, c.GetSuccessor()
	m.emit(PartitionDraining{Partition: p.name, Epoch: p.epoch, Successor: p.successor, By: c.GetBy()})
	m.startSweep()
	return &pb.CommandResult{}
}

// abortDrain makes a draining partition active again, at the same epoch, and
// hands over what became free meanwhile.
func (m *Machine) abortDrain(c *pb.AbortDrainCommand) *pb.CommandResult {
	p, e := m.liveEpoch(c.GetPartition(), c.GetEpoch())
	if e != nil {
		return failed(e)
	}
	if p.phase == phaseDraining {
		p = m.editPartition(p)
		p.phase, p.successor = phaseActive, ""
		m.emit(DrainAborted{Partition: p.name, Epoch: p.epoch, By: c.GetBy()})
		m.serveStalled(p.name)
	}
	return &pb.CommandResult{}
}

// serveStalled hands over the resources of a partition whose queue could not
// be served before, and the free slots of its semaphores.
func (m *Machine) serveStalled(partition string) {
	var names []string
	m.stalled.Scan(func(name string, _ struct{}) bool {
		if r, ok := m.resources.Get(name); ok && r.partition == partition {
			names = append(names, name)
		}
		return true
	})
	for _, name := range names {
		m.handOver(name)
	}
	names = nil
	m.semaphores.Scan(func(name string, s *semaphore) bool {
		if s.queue.len() > 0 && s.partition == partition {
			names = append(names, name)
		}
		return true
	})
	for _, name := range names {
		m.serveSemaphore(name)
	}
}

// resourcesOf lists a partition's resources. It reads all of the region's: a
// partition is dropped rarely, and an index would cost every grant.
func (m *Machine) resourcesOf(partition string) []string {
	var names []string
	m.resources.Scan(func(name string, r *resource) bool {
		if r.partition == partition {
			names = append(names, name)
		}
		return true
	})
	return names
}

func errUnknownPartition(name string) *pb.ErrorDetail {
	return errInvalid("partition", fmt.Sprintf("%q is not in the configuration", name))
}
