package explore

import (
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// rules are the seams at which a seeded bug breaks the shipped code. The zero
// value of each bool is the shipped behaviour.
type rules struct {
	prepare func(own bool, r register.Register, now instant.Instant, in register.PrepareInput) register.Decision
	accept  func(r register.Register, b register.Ballot, v register.Value) register.Decision
	update  func(register.Record, register.Change) (register.Record, bool)
	// restart is a voter's start: a witness's, or the term of a region's leader.
	restart func(rec register.Record, now instant.Instant, witness bool) register.Register

	// ownVoteElsewhere makes every leader take the witness's vote for its own,
	// so that the own one is not required [H2].
	ownVoteElsewhere bool
	// holdFromReply counts the hold from the answer, not from T0.
	holdFromReply bool
	// holdWholeD counts D itself on the owner's clock.
	holdWholeD bool
	// oldRoundCounts takes every answer for one to the newest round.
	oldRoundCounts bool
	// sharedBallot forgets what was reserved at a change of leader.
	sharedBallot bool
	// hearsayDrop commits Drop on one voter's word, and forgets it [H6].
	hearsayDrop bool
	// youngLeaders lets a leader release or raise before it has led for D.
	youngLeaders bool
	// keepAll switches normal forms off whose reasons a broken rule voids.
	keepAll bool
}

// shipped are the rules of the shipped code.
func shipped() rules {
	return rules{
		prepare: func(_ bool, r register.Register, now instant.Instant, in register.PrepareInput) register.Decision {
			return r.Prepare(now, in)
		},
		accept: register.Register.Accept,
		update: register.Update,
		restart: func(rec register.Record, now instant.Instant, _ bool) register.Register {
			return register.Restart(rec, now)
		},
	}
}

// machine is what the explorer needs of a region's state machine.
type machine struct {
	live, floor fence.Epoch
}

// adopt is Apply of an Adopt [H7].
func (m *machine) adopt(rec register.Record, epoch fence.Epoch, ballot register.Ballot) bool {
	if rec.Accepted != ballot || (epoch <= m.floor && epoch != m.live) || (m.live != 0 && m.live != epoch && m.live+1 != epoch) {
		return false
	}
	m.live, m.floor = epoch, max(m.floor, epoch)
	return true
}

// drop is Apply of a Drop.
func (m *machine) drop(epoch fence.Epoch) {
	if m.live == epoch {
		m.live = 0
	}
	m.floor = max(m.floor, epoch)
}
