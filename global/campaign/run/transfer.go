package run

import (
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
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

// Wake lets the shell look at once at what has drained. It does not block.
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
