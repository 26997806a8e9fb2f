package explore

import (
	"fmt"
	"slices"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/register"
)

type kind uint8

const (
	inTick kind = iota
	inCampaign
	inRelease
	inRaise
	inPromise
	inAccept
	inLateVote
	inArrive
	inAdopted
	inAdoptFailed
	inDropped
	inDeposed
)

// input is one call of a leader; with the leader's number it decides the
// outcome, which is remembered.
type input struct {
	node  uint32
	kind  kind
	voter uint8
	round uint8 // place among the open rounds
	// mask, recs and reserved: which voters answer the dry Prepare, with what,
	// and the highest round reserved so far.
	mask      uint8
	recs      [voters]uint16
	reserved  uint8
	successor uint8
}

// outcome is what a call of a leader did.
type outcome struct {
	none     bool // not possible
	node     uint32
	reserved uint8
	sent     []sent
	holds    []held
	lapsed   bool
}

type sent struct{ at, value uint8 }

type held struct{ epoch, ticks uint8 }

// step runs the shipped leader on one input.
func (x *explorer) step(id uint32, in input) outcome {
	in.node = id
	if o, ok := x.memo[in]; ok {
		return o
	}
	old := x.nodes[id]
	n := &node{l: old.l.Clone(), now: old.now, fast: old.fast, prep: old.prep, rounds: slices.Clone(old.rounds), adopt: old.adopt, drop: old.drop}
	var o outcome
	x.run(n, in, &o)
	if !o.none {
		o.node = x.putNode(n)
	}
	x.memo[in] = o
	return o
}

func (x *explorer) run(n *node, in input, o *outcome) {
	l := n.l
	switch in.kind {
	case inTick:
		i := 0
		if n.fast {
			i = 1
		}
		n.now = n.now.Add(x.tick[i])
		x.absorb(n, l.Tick(n.now), o)
		x.strip(n, in.mask == 1)
	case inDeposed:
		x.strip(n, true)
	case inCampaign:
		x.campaign(n, l.Hurry(n.now, "p"), in, o)
	case inRelease:
		x.campaign(n, l.Release(n.now, "p", []string{"", "a", "b"}[in.successor], ""), in, o)
	case inRaise:
		x.campaign(n, l.Raise(n.now, "p"), in, o)
	case inPromise:
		n.prep.yes |= 1 << in.voter
		x.absorb(n, l.PrepareAnswered(n.now, voterID(int(in.voter)), 1, n.prep.round, x.answer(in.recs[0])), o)
	case inLateVote:
		n.rounds[in.round].late |= 1 << in.voter
	case inArrive, inAccept:
		k := int(in.round)
		if in.kind == inArrive {
			n.rounds[k].late &^= 1 << in.voter
		}
		if x.opt.rules.oldRoundCounts {
			k = len(n.rounds) - 1
		}
		n.rounds[k].votes |= 1 << in.voter
		x.absorb(n, l.AcceptAnswered(n.now, voterID(int(in.voter)), 1, n.rounds[k].id, []campaign.AcceptAnswer{{Partition: "p"}}), o)
	case inAdopted:
		e := n.adopt.Epoch
		n.adopt = campaign.Adopt{}
		x.absorb(n, l.Adopted(n.now, "p", e), o)
	case inAdoptFailed:
		e := n.adopt.Epoch
		n.adopt = campaign.Adopt{}
		x.absorb(n, l.AdoptFailed(n.now, "p", e), o)
	case inDropped:
		e := n.drop.Epoch
		n.drop = campaign.Drop{}
		x.absorb(n, l.Dropped(n.now, "p", e), o)
	}
}

// strip lets go of rounds that can never be complete: without the own vote
// all those of a stale leader, and in a current one, those before the newest,
// which would serve it better. It is the same as losing their messages.
func (x *explorer) strip(n *node, stale bool) {
	if x.opt.rules.keepAll || x.opt.rules.ownVoteElsewhere || x.opt.rules.oldRoundCounts {
		return
	}
	own := uint8(1)
	if n.l.Self().Name == regionName[1] {
		own = 2
	}
	for k, r := range n.rounds {
		if (r.votes|r.late)&own == 0 && (stale || k != len(n.rounds)-1) {
			n.l.Forget(r.id)
			n.rounds[k].late = 0
		}
	}
	x.absorb(n, nil, &outcome{})
}

func (x *explorer) answer(voter uint16) []campaign.PrepareAnswer {
	return []campaign.PrepareAnswer{{Partition: "p", Record: x.voters[voter].rec}}
}

// campaign answers the dry Prepare among effects, if there is one, with yes by
// the voters of in.mask (an answer that no voter would give can break nothing: a
// dry Prepare only decides whether one begins), and reserves the ballot, all in
// one step.
func (x *explorer) campaign(n *node, effects []campaign.Effect, in input, o *outcome) {
	dry := uint64(0)
	var reserve *campaign.Reserve
	for _, e := range effects {
		switch e := e.(type) {
		case campaign.SendPrepare:
			if e.Dry {
				dry = e.Round
			}
		case campaign.Reserve:
			reserve = &e
		}
	}
	if dry == 0 && reserve == nil {
		o.none = true
		return
	}
	n.prep.ballot, n.prep.yes = register.Ballot{}, 0
	x.absorb(n, effects, o)
	for v := range voters {
		if reserve != nil || in.mask>>v&1 == 0 {
			continue
		}
		out := n.l.PrepareAnswered(n.now, voterID(v), 1, dry, x.answer(in.recs[v]))
		x.absorb(n, out, o)
		for _, e := range out {
			if r, ok := e.(campaign.Reserve); ok {
				reserve = &r
			}
		}
	}
	if reserve == nil {
		o.none = true
		return
	}
	round := max(uint64(in.reserved), reserve.Above) + 1
	if round > maxRounds {
		o.none = true
		return
	}
	o.reserved = uint8(round)
	self := x.selfOf(n)
	x.absorb(n, n.l.Reserved(n.now, reserve.ID, register.Ballot{Round: round, Region: self, Incarnation: 1}), o)
}

func (x *explorer) selfOf(n *node) string { return n.l.Self().Name }

// absorb takes a leader's effects into the node and the outcome.
func (x *explorer) absorb(n *node, effects []campaign.Effect, o *outcome) {
	for _, e := range effects {
		switch e := e.(type) {
		case campaign.SendPrepare:
			if !e.Dry {
				n.prep.round, n.prep.ballot, n.prep.yes = e.Round, e.Ballot, 0
			}
		case campaign.SendAccept:
			it := e.Items[0]
			at := soupAt(it.Ballot)
			if k := len(n.rounds); k > 0 && n.rounds[k-1].id == e.Round {
				continue // the same round to the next voter
			}
			n.rounds = append(n.rounds, openRound{id: e.Round, ballot: at})
			o.sent = append(o.sent, sent{at, x.putValue(it.Value)})
		case campaign.Adopt:
			n.adopt = e
		case campaign.Drop:
			n.drop = e
		case campaign.Held:
			o.holds = append(o.holds, held{uint8(e.Epoch), x.ticks(n, e)})
		case campaign.Lapsed:
			o.lapsed = true
		}
	}
	n.rounds = slices.DeleteFunc(n.rounds, func(r openRound) bool { return !n.l.Open(r.id) && r.late == 0 })
	if !n.prep.ballot.IsZero() && !n.l.Open(n.prep.round) {
		n.prep.ballot, n.prep.yes = register.Ballot{}, 0
	}
}

// ticks is how many ticks a leader believes in a hold.
func (x *explorer) ticks(n *node, e campaign.Held) uint8 {
	if x.opt.rules.holdFromReply {
		return dv
	}
	t := x.tick[0]
	if n.fast {
		t = x.tick[1]
	}
	left := e.Until.Sub(n.now)
	if x.opt.rules.holdWholeD {
		left += d - campaign.Hold(d, x.cfg[0].Rho)
	}
	return uint8((left + t - 1) / t)
}

// apply puts an outcome into the state, and checks what it brought.
func (x *explorer) apply(s state, slot int, o outcome) (state, string) {
	r := slot / 2
	s.slot[slot] = o.node
	if o.reserved != 0 {
		s.ballots[r]++
		if !x.opt.rules.sharedBallot {
			s.reserved[r] = o.reserved
		}
	}
	if o.lapsed {
		s.hold[slot], s.epoch[slot] = 0, 0
	}
	for _, m := range o.sent {
		if old := s.soup[m.at]; old != 0 && old != m.value {
			return s, fmt.Sprintf("one value per ballot: %v has %+v and %+v", ballotAt(m.at), x.values[old], x.values[m.value])
		}
		s.soup[m.at] = m.value
	}
	for _, h := range o.holds {
		if s.hold[slot] < h.ticks || s.epoch[slot] != h.epoch {
			s.hold[slot] = h.ticks
		}
		s.epoch[slot] = h.epoch
		if bad := s.check(slot); bad != "" {
			return s, bad
		}
		s.lastEpoch, s.lastOwner = h.epoch, uint8(r+1)
	}
	return s, ""
}

// check is what must be true when a slot begins or prolongs a hold.
func (s *state) check(slot int) string {
	r, e := slot/2, s.epoch[slot]
	for t := range slots {
		switch {
		case t == slot || s.hold[t] == 0:
		case t/2 != r:
			return fmt.Sprintf("I1: region %s (epoch %d) and region %s (epoch %d) hold at once", regionName[t/2], s.epoch[t], regionName[r], e)
		case s.epoch[t] != e:
			return fmt.Sprintf("I1e: two leaders of region %s hold epochs %d and %d", regionName[r], s.epoch[t], e)
		}
	}
	switch {
	case e < s.lastEpoch || e == s.lastEpoch && s.lastOwner != uint8(r+1):
		return fmt.Sprintf("I2: region %s holds epoch %d after epoch %d of region %s", regionName[r], e, s.lastEpoch, regionName[s.lastOwner-1])
	case s.dropped[r] >= e:
		return fmt.Sprintf("region %s holds epoch %d after its Drop", regionName[r], e)
	}
	return ""
}

// commitDrop is a Drop's commit and its check.
func (x *explorer) commitDrop(s *state, r int, epoch fence.Epoch) string {
	for t := 2 * r; t < 2*r+2; t++ {
		if s.hold[t] > 0 && fence.Epoch(s.epoch[t]) == epoch {
			return fmt.Sprintf("region %s drops epoch %d while one of its leaders holds it", regionName[r], epoch)
		}
	}
	s.dropped[r] = max(s.dropped[r], uint8(epoch))
	return ""
}
