package explore

import (
	"fmt"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
)

// action is one step of the world. What a, b and c are is told by do.
type action struct{ kind, a, b, c uint8 }

const (
	actCampaign uint8 = iota
	actRelease
	actPrepare
	actPromise
	actAccept
	actLate
	actArrive
	actLost
	actAdopt
	actDrop
	actLeader
	actRestart
	actTick
	actHearsay
	actRaise
	actKinds
)

var actName = [actKinds]string{
	"campaign", "release", "prepare", "promise", "accept", "late", "arrive", "lost",
	"adopt", "drop", "leader", "restart", "tick", "hearsay", "raise",
}

func (a action) String() string { return fmt.Sprintf("%s(%d,%d,%d)", actName[a.kind], a.a, a.b, a.c) }

func (s *state) current(slot int) bool { return int(s.cur[slot/2]) == slot%2 }

// actions yields every step that may be possible in s.
func (x *explorer) actions(s *state, yield func(action)) {
	act := func(kind uint8, a, b, c int) {
		if x.opt.only != nil && !x.opt.only[actName[kind]] {
			return
		}
		if next := (action{kind, uint8(a), uint8(b), uint8(c)}); x.opt.guide == nil || x.opt.guide(s, next) {
			yield(next)
		}
	}
	upset := x.opt.upsets == 0 || s.upsets+1 < x.opt.upsets
	act(actTick, 0, 0, 0)
	if upset {
		act(actRestart, 0, 0, 0)
	}
	for r := range regions {
		if upset {
			act(actLeader, r, 0, 0)
		}
		if upset && x.opt.rates {
			act(actLeader, r, 1, 0)
		}
		if x.opt.rules.hearsayDrop {
			act(actHearsay, r, 0, 0)
		}
		if !x.voters[s.voter[r]].pending.IsZero() {
			act(actPromise, r, 0, 0)
			act(actPromise, r, 1, 0)
		}
	}
	for slot := range slots {
		n := x.nodes[s.slot[slot]]
		if n == nil {
			continue
		}
		if s.current(slot) {
			for _, mask := range []int{3, 5, 6, 7} {
				if s.ballots[slot/2] >= x.opt.ballots || mask>>(slot/2)&1 == 0 && !x.opt.rules.ownVoteElsewhere {
					continue
				}
				act(actCampaign, slot, mask, 0)
				if x.opt.raise {
					act(actRaise, slot, mask, 0)
				}
				if x.opt.release {
					act(actRelease, slot, mask, 0)
					act(actRelease, slot, mask, 2-slot/2)
				}
			}
			if n.adopt.Epoch != 0 {
				act(actAdopt, slot, 0, 0)
			}
			if n.drop.Epoch != 0 {
				act(actDrop, slot, 0, 0)
			}
		}
		for v := range voters {
			own := v == slot/2
			if !n.prep.ballot.IsZero() && n.prep.yes>>v&1 == 0 && (!own || s.current(slot)) {
				act(actPrepare, slot, v, 0)
			}
			for k, r := range n.rounds {
				if r.late>>v&1 == 1 {
					act(actArrive, slot, k, v)
				}
				if own && !s.current(slot) || !n.l.Open(r.id) || r.votes>>v&1 == 1 && k != len(n.rounds)-1 {
					continue
				}
				// An older round without the own vote is never better than the newest.
				if k != len(n.rounds)-1 && r.votes>>(slot/2)&1 == 0 && !x.opt.rules.keepAll {
					continue
				}
				act(actAccept, slot, k, v)
				if x.opt.late && r.late>>v&1 == 0 {
					act(actLate, slot, k, v)
				}
			}
		}
	}
	for at := range s.soup {
		for v := range voters {
			if s.soup[at] != 0 {
				act(actLost, at, v, 0)
			}
		}
	}
}

// do takes one step; ok is false when it is not possible. A text in bad is a
// violation.
func (x *explorer) do(s state, a action) (out state, ok bool, bad string) {
	switch a.kind {
	case actTick:
		return x.doTick(s)
	case actCampaign, actRelease, actRaise:
		// slot a asks; the voters in mask b answer the dry Prepare; c: successor
		in := input{kind: inCampaign, mask: a.b, reserved: s.reserved[a.a/2]}
		if a.kind == actRelease {
			in.kind, in.successor = inRelease, a.c
		}
		if a.kind == actRaise {
			in.kind = inRaise
		}
		for v := range voters {
			if a.b>>v&1 == 1 {
				in.recs[v] = x.bare[s.voter[v]]
			}
		}
		return x.after(s, int(a.a), in)
	case actPrepare: // slot a's Prepare arrives at voter b
		return x.doPrepare(s, int(a.a), int(a.b))
	case actPromise: // region a commits its promise; b: the answer is received
		return x.doPromise(s, int(a.a), a.b == 1)
	case actAccept, actLate: // slot a's round b arrives at voter c, answered now or later
		n := x.nodes[s.slot[a.a]]
		if s, ok = x.take(s, int(n.rounds[a.b].ballot), int(a.c)); !ok {
			return s, false, ""
		}
		in := input{kind: inAccept, round: a.b, voter: a.c}
		if a.kind == actLate {
			in.kind = inLateVote
		}
		return x.after(s, int(a.a), in)
	case actArrive: // the answer of voter c to slot a's round b arrives
		return x.after(s, int(a.a), input{kind: inArrive, round: a.b, voter: a.c})
	case actLost: // an Accept of ballot a arrives at voter b, the answer is lost
		if x.voters[s.voter[a.b]].rec.Accepted == ballotAt(a.a) {
			return s, false, "" // only a renewal
		}
		s, ok = x.take(s, int(a.a), int(a.b))
		return x.normal(s), ok, ""
	case actAdopt: // slot a's Adopt commits
		r := a.a / 2
		n := x.nodes[s.slot[a.a]]
		m := machine{fence.Epoch(s.live[r]), fence.Epoch(s.floor[r])}
		in := input{kind: inAdoptFailed}
		if m.adopt(x.voters[s.voter[r]].rec, n.adopt.Epoch, n.adopt.Ballot) {
			in.kind = inAdopted
			s.live[r], s.floor[r] = uint8(m.live), uint8(m.floor)
		}
		return x.after(s, int(a.a), in)
	case actDrop: // slot a's Drop commits
		r := int(a.a / 2)
		n := x.nodes[s.slot[a.a]]
		if bad := x.commitDrop(&s, r, n.drop.Epoch); bad != "" {
			return s, true, bad
		}
		m := machine{fence.Epoch(s.live[r]), fence.Epoch(s.floor[r])}
		m.drop(n.drop.Epoch)
		s.live[r], s.floor[r] = uint8(m.live), uint8(m.floor)
		return x.after(s, int(a.a), input{kind: inDropped})
	case actLeader:
		x.upset(&s)
		return x.doLeader(s, int(a.a), a.b == 1), true, ""
	case actRestart:
		was := s.voter[witness]
		x.upset(&s)
		s.voter[witness] = x.restarted(witness, was)
		return x.normal(s), was != s.voter[witness], ""
	case actHearsay: // a seeded bug: Drop on one voter's word, and forgotten
		r := int(a.a)
		live := fence.Epoch(s.live[r])
		if live == 0 || s.hold[2*r+int(s.cur[r])] > 0 || fence.Epoch(s.dropped[r]) >= live {
			return s, false, ""
		}
		for v := range voters {
			if rec := x.voters[s.voter[v]].rec; rec.Value.Epoch > live {
				bad := x.commitDrop(&s, r, live)
				return s, true, bad
			}
		}
		return s, false, ""
	}
	panic("unknown action")
}

func (x *explorer) upset(s *state) {
	if x.opt.upsets > 0 {
		s.upsets++
	}
}

// after runs a leader's input and puts the outcome in.
func (x *explorer) after(s state, slot int, in input) (state, bool, string) {
	o := x.step(s.slot[slot], in)
	if o.none {
		return s, false, ""
	}
	s, bad := x.apply(s, slot, o)
	return x.normal(s), true, bad
}

func (x *explorer) doTick(s state) (state, bool, string) {
	for v := range voters {
		s.voter[v] = x.vote(vote{voter: s.voter[v], kind: actTick}, func(vs voterState) (voterState, voted) {
			vs.age++
			return vs, voted{ok: true}
		}).voter
	}
	for slot := range slots {
		if s.slot[slot] == 0 {
			continue
		}
		if s.hold[slot] > 0 {
			if s.hold[slot]--; s.hold[slot] == 0 {
				s.epoch[slot] = 0
			}
		}
		in := input{kind: inTick}
		if !s.current(slot) {
			in.mask = 1
		}
		o := x.step(s.slot[slot], in)
		if x.opt.rules.holdFromReply || x.opt.rules.holdWholeD {
			o.lapsed = false // the believed hold is longer than the Leader's
		}
		var bad string
		if s, bad = x.apply(s, slot, o); bad != "" {
			return s, true, bad
		}
	}
	return x.normal(s), true, ""
}

// vote looks up what becomes of a vote, or finds out by f.
func (x *explorer) vote(k vote, f func(voterState) (voterState, voted)) voted {
	res, ok := x.votes[k]
	if !ok {
		var vs voterState
		vs, res = f(x.voters[k.voter])
		res.voter = x.putVoter(vs)
		x.votes[k] = res
	}
	return res
}

func (x *explorer) restarted(v int, voter uint16) uint16 {
	return x.vote(vote{voter: voter, who: uint8(v), kind: actRestart}, func(vs voterState) (voterState, voted) {
		return x.fromRegister(voterState{}, x.opt.rules.restart(vs.rec, epochStart, v == witness)), voted{ok: true}
	}).voter
}

func (x *explorer) doPrepare(s state, slot, v int) (state, bool, string) {
	b := x.nodes[s.slot[slot]].prep.ballot
	k := vote{voter: s.voter[v], who: uint8(v), kind: actPrepare, at: soupAt(b), from: uint8(slot / 2)}
	res := x.vote(k, func(vs voterState) (voterState, voted) {
		reg := x.register(vs)
		dec := x.opt.rules.prepare(v == slot/2, reg, epochStart, register.PrepareInput{Candidate: region(slot / 2), Ballot: b})
		switch {
		case dec.Action == register.Answer:
			return vs, voted{ok: true, done: true}
		case dec.Action != register.Write:
			return vs, voted{} // refused: as if lost
		case v != witness && !x.opt.oneStep:
			vs.pending, vs.guard = b, dec.Change.Guard
			return vs, voted{ok: true}
		}
		rec, ok := x.opt.rules.update(vs.rec, dec.Change)
		if !ok {
			panic("Update refuses what Prepare decided")
		}
		return x.fromRegister(vs, reg.Written(epochStart, rec)), voted{ok: true, done: true}
	})
	s.voter[v] = res.voter
	if res.done {
		return x.promised(s, slot, v)
	}
	return x.normal(s), res.ok, ""
}

func (x *explorer) promised(s state, slot, v int) (state, bool, string) {
	in := input{kind: inPromise, voter: uint8(v)}
	in.recs[0] = x.bare[s.voter[v]]
	return x.after(s, slot, in)
}

// doPromise commits the pending promise of a region's voter. The answer is
// received by the candidate that still waits for it, or lost when there is
// none: a lost answer to one that waits is the same as a lost Prepare.
func (x *explorer) doPromise(s state, v int, answered bool) (state, bool, string) {
	vs := x.voters[s.voter[v]]
	to := -1
	for slot := range slots {
		n := x.nodes[s.slot[slot]]
		if n != nil && n.prep.ballot == vs.pending && n.prep.yes>>v&1 == 0 && (slot/2 != v || s.current(slot)) {
			if to < 0 || s.current(slot) {
				to = slot
			}
		}
	}
	if answered != (to >= 0) {
		return s, false, ""
	}
	res := x.vote(vote{voter: s.voter[v], kind: actPromise}, func(vs voterState) (voterState, voted) {
		rec, ok := x.opt.rules.update(vs.rec, register.Change{Guard: vs.guard, Ballot: vs.pending})
		if ok {
			vs = x.fromRegister(vs, x.register(vs).Written(epochStart, rec))
		}
		vs.pending, vs.guard = register.Ballot{}, register.Guard{}
		return vs, voted{ok: ok}
	})
	s.voter[v] = res.voter
	if !answered || !res.ok {
		return x.normal(s), true, ""
	}
	return x.promised(s, to, v)
}

// take lets voter v accept or renew the value of a ballot.
func (x *explorer) take(s state, at, v int) (state, bool) {
	k := vote{voter: s.voter[v], kind: actAccept, at: uint8(at), what: s.soup[at]}
	res := x.vote(k, func(vs voterState) (voterState, voted) {
		b, value := ballotAt(k.at), x.values[k.what]
		if k.what == 0 {
			if vs.rec.Accepted != b {
				return vs, voted{}
			}
			value = vs.rec.Value
		}
		reg := x.register(vs)
		dec := x.opt.rules.accept(reg, b, value)
		switch dec.Action {
		case register.Write:
			rec, ok := x.opt.rules.update(vs.rec, dec.Change)
			return x.fromRegister(vs, reg.Written(epochStart, rec)), voted{ok: ok}
		case register.Renew:
			vs.age = 0 // what Renewed does; a broken rule may have let it pass while a promise is pending
			return vs, voted{ok: true}
		}
		return vs, voted{}
	})
	s.voter[v] = res.voter
	return s, res.ok
}

// doLeader begins a term in region r: the leader so far becomes the stale one,
// and the stale one so far has noticed. What it proposed and was not committed
// is lost, a promise too; that it was committed first is another order of
// steps.
func (x *explorer) doLeader(s state, r int, fast bool) state {
	s.voter[r] = x.restarted(r, s.voter[r])
	if old := 2*r + int(s.cur[r]); s.slot[old] != 0 {
		s.slot[old] = x.step(s.slot[old], input{kind: inDeposed}).node
	}
	s.cur[r] = 1 - s.cur[r]
	slot := 2*r + int(s.cur[r])
	s.hold[slot], s.epoch[slot] = 0, 0
	s.slot[slot] = x.newLeader(r, s.voter[r], s.live[r], s.floor[r], fast)
	// Its first round carries what was accepted here, which the soup may have forgotten.
	for _, round := range x.nodes[s.slot[slot]].rounds {
		s.soup[round.ballot] = x.putValue(x.voters[s.voter[r]].rec.Value)
	}
	return x.normal(s)
}

// normal forgets what can make no difference: a stale leader that can neither
// hold nor propose any more, and values that no voter can accept any more.
func (x *explorer) normal(s state) state {
	if x.opt.rules.keepAll || x.opt.rules.ownVoteElsewhere {
		return s
	}
	for r := range regions {
		slot := 2*r + 1 - int(s.cur[r])
		n := x.nodes[s.slot[slot]]
		if n == nil || s.hold[slot] > 0 || n.prep.yes>>r&1 == 1 {
			continue
		}
		alive := false
		for _, round := range n.rounds {
			alive = alive || (round.votes|round.late)>>r&1 == 1 && n.l.Open(round.id)
		}
		if !alive {
			s.slot[slot] = 0
		}
	}
	wants := uint8(0)
	for _, id := range s.voter {
		wants |= x.wants[id]
	}
	for at := range s.soup {
		if wants>>at&1 == 0 {
			s.soup[at] = 0
		}
	}
	return s
}
