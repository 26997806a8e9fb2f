package run

import (
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// drain is a planned transfer: a drain that is committed. It goes on in every
// term until the partition is dropped or the drain is aborted.
type drain struct {
	epoch     fence.Epoch
	successor string
	// keeping: an abort is under way, so that nothing is released.
	keeping bool
}

// findTransfers takes what the view says of drains and of epochs whose sequence
// numbers run out. s.mu is held.
func (s *Shell) findTransfers(view state.View) {
	clear(s.draining)
	for p := range view.Partitions() {
		if p.Draining() {
			s.draining[p.Name] = &drain{epoch: p.Epoch, successor: p.Successor}
		}
		if p.Live() && p.Seq >= fence.RaiseSeq {
			s.perform(s.leader.Raise(s.cfg.Clock.Now(), p.Name))
		}
	}
}

// followTransfer takes an event that bears on a drain, or on the end of an
// epoch's sequence numbers [F47]. s.mu is held.
func (s *Shell) followTransfer(e state.Event) {
	switch e := e.(type) {
	case state.PartitionDraining:
		s.draining[e.Partition] = &drain{epoch: e.Epoch, successor: e.Successor}
		s.kick()
	case state.DrainAborted:
		delete(s.draining, e.Partition)
	case state.PartitionDropped:
		delete(s.draining, e.Partition)
	case state.PartitionAdopted:
		if !e.Resumed {
			delete(s.draining, e.Partition)
		}
	case state.LeaseGranted:
		if e.Token.Seq() >= fence.RaiseSeq && s.leader != nil {
			s.perform(s.leader.Raise(s.cfg.Clock.Now(), e.Partition))
			s.kick()
		}
	}
}

// releaseDrained releases what has drained. The proposer may not be ready for
// it, or may have had to give it up; so it is told at each tick, and knows what it
// has been told before. s.mu is held.
func (s *Shell) releaseDrained(now instant.Instant) {
	if s.cfg.Drained == nil {
		return
	}
	for partition, d := range s.draining {
		if d.keeping {
			continue
		}
		settled, drained := s.cfg.Drained(partition, d.epoch)
		if !drained {
			continue
		}
		reason := register.ReasonDelayed
		if settled {
			reason = register.ReasonDrained
		}
		s.perform(s.leader.Release(now, partition, d.successor, reason))
	}
}

// Wake lets the shell look at once: something has drained, or a pulse was
// committed. It does not block.
func (s *Shell) Wake() { s.kick() }

// KeepOn ends the release of a draining partition, so that its drain may be
// aborted: nothing is released until the abort is applied or forget is called,
// which the caller does when it knows that the abort will not be. ok is false
// when it is too late, since the release is proposed, or when this server does
// not lead.
func (s *Shell) KeepOn(partition string) (forget func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.draining[partition]
	if s.leader == nil {
		return nil, false
	}
	effects, ok := s.leader.KeepOn(s.cfg.Clock.Now(), partition)
	s.perform(effects)
	s.kick()
	if !ok || d == nil {
		return func() {}, ok
	}
	d.keeping = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		d.keeping = false
		s.kick()
	}, true
}

// Releasing reports whether a release of the partition is proposed, or was by a
// leader before.
func (s *Shell) Releasing(partition string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leader != nil && s.leader.Releasing(partition)
}

// failbackGrace is how long holders may go on in a failback.
const failbackGrace = 10 * time.Second

// handBack begins the transfers of partitions with automatic failback to regions
// that are back. s.mu is held.
func (s *Shell) handBack(now instant.Instant) {
	if s.cfg.Grace == nil {
		return
	}
	var held map[string]campaign.Status
	for _, spec := range s.config.GetPartitions() {
		name := spec.GetName()
		if !spec.GetAutoFailback() || s.draining[name] != nil {
			continue
		}
		if held == nil {
			held = s.held(now)
		}
		st, ok := held[name]
		p, known := s.cfg.Raft.View().Partition(name)
		if !ok || !known || p.Epoch != st.Held {
			continue
		}
		to, due := s.failback.Due(now, campaign.FailbackInput{
			Partition: name, Value: p.Register.Value, Self: s.self.Name, Prefer: spec.GetPrefer(), Reachable: s.reachable,
		})
		if !due {
			continue
		}
		s.cfg.Logger.Info("handing a partition back to a region that is steady again", "partition", name, "epoch", st.Held, "successor", to)
		s.cfg.Grace(name, failbackGrace)
		nothing := func(*campaign.Leader, instant.Instant) []campaign.Effect { return nil }
		s.propose(&pb.Command{Term: s.term, Kind: &pb.Command_StartDrain{StartDrain: &pb.StartDrainCommand{
			Partition: name, Epoch: uint32(st.Held), Successor: to, By: "failback",
		}}}, func(l *campaign.Leader, now instant.Instant, _ *pb.CommandResult) []campaign.Effect {
			return nothing(l, now)
		}, nothing)
	}
}

// held is what the leader holds now. s.mu is held.
func (s *Shell) held(now instant.Instant) map[string]campaign.Status {
	held := map[string]campaign.Status{}
	for _, st := range s.leader.Holds(now) {
		held[st.Partition] = st
	}
	return held
}

// reachable reports whether a region is a member whose votes come and count.
// s.mu is held.
func (s *Shell) reachable(region string) bool {
	id := config.RegionVoter(region)
	_, problem := s.problems[id]
	return !problem && config.VoterIncarnation(s.config, id) != 0
}
