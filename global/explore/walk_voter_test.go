package explore

import (
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// prepare is a Prepare's arrival.
func (w *walk) prepare(from *leaderNode, e campaign.SendPrepare) {
	verdict := register.VerdictCrashed
	if w.chance(20) {
		verdict = register.VerdictHealthy
	}
	in := register.PrepareInput{Candidate: region(from.region), Ballot: e.Ballot, Dry: e.Dry, Verdict: verdict}
	answer := func(v *voterNode, rule register.Rule) {
		now := v.clock.now(w.real)
		a := []campaign.PrepareAnswer{{Partition: "p", Rule: rule, Record: v.reg.Record, Remaining: v.reg.Remaining(now), Verdict: verdict}}
		w.send(func() {
			w.input(from, func(now instant.Instant) []campaign.Effect {
				return from.l.PrepareAnswered(now, e.Voter.ID, 1, e.Round, a)
			})
		})
	}
	if e.Voter.Witness {
		v := w.witnesses[e.Voter.ID[len(e.Voter.ID)-1]-'0']
		now := v.clock.now(w.real)
		dec := v.reg.Prepare(now, in)
		if dec.Action == register.Write {
			rec, ok := register.Update(v.reg.Record, dec.Change)
			if !ok {
				w.fail("Update refuses what Prepare decided")
			}
			v.reg = v.reg.Written(now, rec)
		}
		answer(v, dec.Rule)
		return
	}
	r, v := w.regionVoter(from, e.Voter.ID)
	if v == nil {
		return
	}
	dec := v.reg.Prepare(v.clock.now(w.real), in)
	if dec.Action != register.Write {
		answer(&v.voterNode, dec.Rule)
		return
	}
	g := w.regions[r]
	v.reg.Pending = true
	done := false
	apply := func() bool {
		done = true
		rec, ok := register.Update(g.rec, dec.Change)
		g.rec = rec
		return ok
	}
	g.fate = func(commit bool) {
		if commit && !done && apply() && w.chance(50) {
			v.reg.Record = g.rec
			answer(&v.voterNode, register.RuleNone) // the answer of a deposed leader
		}
		done = true
	}
	w.commit(v, func() {
		if done {
			return
		}
		ok := apply()
		v.reg = v.reg.Written(v.clock.now(w.real), g.rec)
		v.reg.Pending, g.fate = false, nil
		rule := register.RuleNone
		if !ok {
			rule = register.RuleRetry
		}
		answer(&v.voterNode, rule)
	})
}

// regionVoter is who answers for a region: for its own messages the sender
// itself, while it leads; else the current leader.
func (w *walk) regionVoter(from *leaderNode, id string) (int, *leaderNode) {
	r := 0
	if id == voterID(1) {
		r = 1
	}
	v := w.regions[r].cur
	if r == from.region && v != from || v.pausing > w.real {
		return r, nil
	}
	return r, v
}

// accept is an Accept's arrival.
func (w *walk) accept(from *leaderNode, e campaign.SendAccept) {
	it := e.Items[0]
	answer := func(v *voterNode, rule register.Rule) {
		a := []campaign.AcceptAnswer{{Partition: "p", Rule: rule, Record: v.reg.Record}}
		w.send(func() {
			w.input(from, func(now instant.Instant) []campaign.Effect {
				return from.l.AcceptAnswered(now, e.Voter.ID, 1, e.Round, a)
			})
		})
	}
	if e.Voter.Witness {
		v := w.witnesses[e.Voter.ID[len(e.Voter.ID)-1]-'0']
		now := v.clock.now(w.real)
		dec := v.reg.Accept(it.Ballot, it.Value)
		switch dec.Action {
		case register.Write, register.WriteAlarm:
			rec, _ := register.Update(v.reg.Record, dec.Change)
			v.reg = v.reg.Written(now, rec)
		case register.Renew:
			v.reg, _ = v.reg.Renewed(now, it.Ballot, it.Value)
		}
		if v.reg.Alarm != "" {
			w.fail("alarm: %s", v.reg.Alarm)
		}
		answer(v, dec.Rule)
		return
	}
	r, v := w.regionVoter(from, e.Voter.ID)
	if v == nil {
		return
	}
	g := w.regions[r]
	dec := v.reg.Accept(it.Ballot, it.Value)
	switch dec.Action {
	case register.Refuse, register.WriteAlarm:
		if dec.Rule == register.RuleConflict {
			w.fail("one ballot, two values: %v", it.Ballot)
		}
		answer(&v.voterNode, dec.Rule)
	case register.Renew: // a leadership check begun now
		w.commit(v, func() {
			var ok bool
			if v.reg, ok = v.reg.Renewed(v.clock.now(w.real), it.Ballot, it.Value); ok {
				answer(&v.voterNode, register.RuleNone)
			}
		})
	case register.Write:
		w.commit(v, func() {
			rec, ok := register.Update(g.rec, dec.Change)
			if !ok || v.reg.Pending {
				answer(&v.voterNode, register.RuleRetry)
				return
			}
			g.rec = rec
			v.reg = v.reg.Written(v.clock.now(w.real), rec)
			if r == from.region {
				w.input(v, func(now instant.Instant) []campaign.Effect { return v.l.RegisterChanged(now, "p", rec) })
			}
			answer(&v.voterNode, register.RuleNone)
		})
	}
}
