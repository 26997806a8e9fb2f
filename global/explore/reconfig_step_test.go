package explore

import (
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/register"
)

func clockTicks(n uint8) time.Duration { return time.Duration(n) }

const inSwitch = inDeposed + 1

// cfgInput is one call of a leader, remembered with its outcome.
type cfgInput struct {
	node  uint32
	kind  kind
	voter uint8
	round uint8
	mask  uint8 // who answers the dry Prepare
	recs  [cVoters]uint16
	// reserved is the highest round reserved; to the version switched to.
	reserved, to, live, floor uint8
}

const (
	cTick uint8 = iota
	cCampaign
	cPrepare
	cAccept
	cLate
	cAdopt
	cDrop
	cStore
	cSwitch
	cStored
	cResend
	cTake
	cDecide
	cKinds
)

var cName = [cKinds]string{"tick", "campaign", "prepare", "accept", "late", "adopt", "drop", "store", "switch", "stored", "resend", "take", "decide"}

func (x *cfgExplorer) actions(s *cfgState, yield func(action)) {
	act := func(kind uint8, a, b, c int) {
		if x.opt.only != nil && !x.opt.only[cName[kind]] {
			return
		}
		if next := (action{kind, uint8(a), uint8(b), uint8(c)}); x.opt.guide == nil || x.opt.guide(s, next) {
			yield(next)
		}
	}
	act(cTick, 0, 0, 0)
	act(cDecide, 0, 0, 0)
	act(cStored, 0, 0, 0)
	for v := range cVoters {
		act(cTake, v, 0, 0)
		if next := x.voters[s.voter[v]].version + 1; next <= s.dec {
			for to := next; to <= s.dec; to++ {
				act(cStore, v, int(to), 0)
			}
		}
	}
	for at := range s.soup {
		if s.soup[at] == 0 {
			continue
		}
		act(cResend, at, 0, 0)
		for version := uint8(1); version <= s.dec; version++ {
			for v := range cVoters {
				if s.under[at]>>version&1 == 1 && x.member(version, v) {
					act(cLate, at, v, int(version))
				}
			}
		}
	}
	for r := range regions {
		n := x.nodes[s.node[r]]
		for to := n.version + 1; to <= s.dec; to++ {
			act(cSwitch, r, int(to), 0)
		}
		if s.tried[r] < x.opt.ballots {
			act(cCampaign, r, 0, 0)
		}
		if n.adopt.Epoch != 0 {
			act(cAdopt, r, 0, 0)
		}
		if n.drop.Epoch != 0 {
			act(cDrop, r, 0, 0)
		}
		for v := range cVoters {
			if !x.member(n.version, v) {
				continue
			}
			if !n.prep.ballot.IsZero() && n.prep.yes>>v&1 == 0 {
				act(cPrepare, r, v, 0)
			}
			for k, q := range n.rounds {
				last := k == len(n.rounds)-1
				if n.l.Open(q.id) && (q.votes>>v&1 == 0 || last) && (last || q.votes>>r&1 == 1) {
					act(cAccept, r, k, v)
				}
			}
		}
	}
}

func (x *cfgExplorer) do(s cfgState, a action) (out cfgState, ok bool, bad string) {
	switch a.kind {
	case cTick:
		return x.doTick(s)
	case cDecide: // rule 4: c+2 only after (a) and (b)
		if int(s.dec) == len(x.opt.chain) || !(s.settled || x.opt.rules.noSettle) {
			return s, false, ""
		}
		s.dec, s.settled, s.stored, s.resend, s.got = s.dec+1, false, false, 0, 0
		return s, true, ""
	case cStored: // the operator finds that (a) holds
		if s.stored || s.settled || !(x.opt.rules.noStore || x.storedBy(&s, s.dec)) {
			return s, false, ""
		}
		s.stored = true
		if x.opt.rules.readOnly {
			return x.read(s)
		}
		return s, true, ""
	case cResend: // the operator sends a value again, after (a)
		found := false
		for v := range cVoters {
			found = found || x.voters[s.voter[v]].rec.Accepted == ballotAt(a.a) && x.member(s.dec, v)
		}
		if !found || !s.stored || s.settled || s.resend == a.a+1 || x.opt.rules.readOnly {
			return s, false, ""
		}
		s.resend, s.got = a.a+1, 0
		s.under[a.a] |= 1 << s.dec
		if x.opt.rules.copyClock && x.member(s.dec, joiner) && x.voters[s.voter[joiner]].rec.Accepted == ballotAt(a.a) {
			s.got = 1 << joiner
		}
		return s, true, ""
	case cTake: // a voter takes it, under dec, and the operator hears of it
		v := int(a.a)
		if s.resend == 0 || s.settled || !x.member(s.dec, v) || s.got>>v&1 == 1 {
			return s, false, ""
		}
		if s, ok = x.take(s, s.resend-1, v, s.dec); !ok {
			return s, false, ""
		}
		s.got |= 1 << v
		if x.majority(s.dec, s.got) {
			s.settled, s.resend, s.got = true, 0, 0
		}
		return s, true, ""
	case cStore: // a voter stores a decided version; a joining one is empty
		v, vs := int(a.a), x.voters[s.voter[a.a]]
		if vs.version == 0 && !x.member(a.b, v) {
			return s, false, ""
		}
		if vs.version == 0 && x.opt.rules.copyClock {
			from := x.voters[s.voter[witness]]
			vs.rec, vs.age = from.rec, from.age
		}
		vs.version = a.b
		s.voter[v] = x.putVoter(vs)
		return s, true, ""
	case cSwitch:
		return x.after(s, int(a.a), cfgInput{kind: inSwitch, to: a.b, live: s.live[a.a], floor: s.floor[a.a]})
	case cCampaign:
		in := cfgInput{kind: inCampaign, reserved: s.reserved[a.a]}
		for v := range cVoters {
			if x.member(x.nodes[s.node[a.a]].version, v) {
				in.mask |= 1 << v
				in.recs[v] = s.voter[v]
			}
		}
		return x.after(s, int(a.a), in)
	case cPrepare:
		return x.doPrepare(s, int(a.a), int(a.b))
	case cAccept:
		n := x.nodes[s.node[a.a]]
		if s, ok = x.take(s, n.rounds[a.b].ballot, int(a.c), n.version); !ok {
			return s, false, ""
		}
		return x.after(s, int(a.a), cfgInput{kind: inAccept, round: a.b, voter: a.c})
	case cLate: // an Accept arrives late, its answer is lost
		if x.voters[s.voter[a.b]].rec.Accepted == ballotAt(a.a) {
			return s, false, "" // only a renewal, which makes voters refuse more
		}
		s, ok = x.take(s, a.a, int(a.b), a.c)
		return s, ok, ""
	case cAdopt:
		n := x.nodes[s.node[a.a]]
		m := machine{fence.Epoch(s.live[a.a]), fence.Epoch(s.floor[a.a])}
		in := cfgInput{kind: inAdoptFailed}
		if m.adopt(x.voters[s.voter[a.a]].rec, n.adopt.Epoch, n.adopt.Ballot) {
			in.kind = inAdopted
			s.live[a.a], s.floor[a.a] = uint8(m.live), uint8(m.floor)
		}
		return x.after(s, int(a.a), in)
	case cDrop:
		n := x.nodes[s.node[a.a]]
		if s.hold[a.a] > 0 && fence.Epoch(s.epoch[a.a]) == n.drop.Epoch {
			return s, true, fmt.Sprintf("region %s drops epoch %d while it holds it", regionName[a.a], n.drop.Epoch)
		}
		m := machine{fence.Epoch(s.live[a.a]), fence.Epoch(s.floor[a.a])}
		m.drop(n.drop.Epoch)
		s.live[a.a], s.floor[a.a] = uint8(m.live), uint8(m.floor)
		return x.after(s, int(a.a), cfgInput{kind: inDropped})
	}
	panic("unknown action")
}

// read is the broken rule 4 (b) that looks only.
func (x *cfgExplorer) read(s cfgState) (cfgState, bool, string) {
	for at := range s.soup {
		mask := uint8(0)
		for v := range cVoters {
			if vs := x.voters[s.voter[v]]; vs.version == s.dec && vs.rec.Accepted == ballotAt(uint8(at)) {
				mask |= 1 << v
			}
		}
		if x.majority(s.dec, mask) {
			s.settled = true
			return s, true, ""
		}
	}
	return s, false, ""
}

func (x *cfgExplorer) doPrepare(s cfgState, r, v int) (cfgState, bool, string) {
	n, vs := x.nodes[s.node[r]], x.voters[s.voter[v]]
	if !x.answers(vs.version, n.version) {
		return s, false, ""
	}
	reg := x.register(vs)
	dec := reg.Prepare(epochStart, register.PrepareInput{Candidate: region(r), Ballot: n.prep.ballot})
	switch dec.Action {
	case register.Write:
		rec, ok := register.Update(vs.rec, dec.Change)
		if !ok {
			panic("Update refuses what Prepare decided")
		}
		vs.rec = rec
		s.voter[v] = x.putVoter(vs)
	case register.Answer:
	default:
		return s, false, ""
	}
	in := cfgInput{kind: inPromise, voter: uint8(v)}
	in.recs[0] = s.voter[v]
	return x.after(s, r, in)
}

// take lets voter v accept or renew the value of a ballot under a version.
func (x *cfgExplorer) take(s cfgState, at uint8, v int, version uint8) (cfgState, bool) {
	vs := x.voters[s.voter[v]]
	if !x.answers(vs.version, version) {
		return s, false
	}
	value := x.values[s.soup[at]]
	dec := x.register(vs).Accept(ballotAt(at), value)
	switch dec.Action {
	case register.Write:
		rec, ok := register.Update(vs.rec, dec.Change)
		if !ok {
			return s, false
		}
		vs.rec, vs.age = rec, 0
	case register.Renew:
		vs.age = 0
	default:
		return s, false
	}
	s.voter[v] = x.putVoter(vs)
	return s, true
}

func (x *cfgExplorer) doTick(s cfgState) (cfgState, bool, string) {
	for v := range cVoters {
		vs := x.voters[s.voter[v]]
		vs.age++
		s.voter[v] = x.putVoter(vs)
	}
	for r := range regions {
		s.hold[r], s.epoch[r] = 0, 0 // one tick is all that a hold lasts
		var bad string
		if s, _, bad = x.after(s, r, cfgInput{kind: inTick}); bad != "" {
			return s, true, bad
		}
	}
	return s, true, ""
}

// after runs a leader's input and puts the outcome in.
func (x *cfgExplorer) after(s cfgState, r int, in cfgInput) (cfgState, bool, string) {
	in.node = s.node[r]
	o, ok := x.memo[in]
	if !ok {
		n := x.clone(x.nodes[in.node])
		x.run(n, in, &o)
		if !o.none {
			o.node = x.putNode(n)
		}
		x.memo[in] = o
	}
	if o.none {
		return s, false, ""
	}
	s.node[r] = o.node
	if o.reserved != 0 {
		s.tried[r]++
		s.reserved[r] = o.reserved
	}
	if o.lapsed {
		s.hold[r], s.epoch[r] = 0, 0
	}
	for _, m := range o.sent {
		if old := s.soup[m.at]; old != 0 && old != m.value {
			return s, true, fmt.Sprintf("one value per ballot: %v", ballotAt(m.at))
		}
		s.soup[m.at] = m.value
		s.under[m.at] |= 1 << x.nodes[o.node].version
	}
	for _, h := range o.holds {
		s.hold[r], s.epoch[r] = h.ticks, h.epoch
		if other := 1 - r; s.hold[other] > 0 {
			return s, true, fmt.Sprintf("I1: region %s (epoch %d) and region %s (epoch %d) hold at once", regionName[other], s.epoch[other], regionName[r], h.epoch)
		}
		if h.epoch < s.lastEpoch || h.epoch == s.lastEpoch && s.lastOwner != uint8(r+1) {
			return s, true, fmt.Sprintf("I2: region %s holds epoch %d after epoch %d of region %s", regionName[r], h.epoch, s.lastEpoch, regionName[s.lastOwner-1])
		}
		s.lastEpoch, s.lastOwner = h.epoch, uint8(r+1)
	}
	return s, true, ""
}

func (x *cfgExplorer) run(n *cfgNode, in cfgInput, o *outcome) {
	l := n.l
	answer := func(v uint16) []campaign.PrepareAnswer {
		return []campaign.PrepareAnswer{{Partition: "p", Record: x.voters[v].rec}}
	}
	switch in.kind {
	case inTick:
		n.now = n.now.Add(d)
		x.absorb(n, l.Tick(n.now), o)
	case inSwitch:
		r := 0
		if l.Self().Name == regionName[1] {
			r = 1
		}
		var votes uint8
		var at uint8
		if k := len(n.rounds); k > 0 {
			votes, at = n.rounds[k-1].votes, n.rounds[k-1].ballot
		}
		n.prep.ballot, n.prep.yes, n.rounds, n.version = register.Ballot{}, 0, nil, in.to
		effects, err := l.Reconfigure(n.now, x.cfg[r][in.to], []campaign.Own{{Live: fence.Epoch(in.live), Floor: fence.Epoch(in.floor)}})
		if err != nil {
			panic(err)
		}
		x.absorb(n, effects, o)
		if k := len(n.rounds) - 1; x.opt.rules.mixCounts && k >= 0 && n.rounds[k].ballot == at {
			for v := range cVoters {
				if votes>>v&1 == 1 {
					n.rounds[k].votes |= 1 << v
					x.absorb(n, l.AcceptAnswered(n.now, cVoterIDs[v], 1, n.rounds[k].id, []campaign.AcceptAnswer{{Partition: "p"}}), o)
				}
			}
		}
	case inCampaign:
		dry, reserve := uint64(0), (*campaign.Reserve)(nil)
		effects := l.Hurry(n.now, "p")
		for _, e := range effects {
			if p, ok := e.(campaign.SendPrepare); ok && p.Dry {
				dry = p.Round
			}
		}
		if dry == 0 {
			o.none = true
			return
		}
		n.prep.ballot, n.prep.yes = register.Ballot{}, 0
		x.absorb(n, effects, o)
		for v := range cVoters {
			if in.mask>>v&1 == 0 {
				continue
			}
			out := l.PrepareAnswered(n.now, cVoterIDs[v], 1, dry, answer(in.recs[v]))
			x.absorb(n, out, o)
			for _, e := range out {
				if q, ok := e.(campaign.Reserve); ok {
					reserve = &q
				}
			}
		}
		if reserve == nil {
			o.none = true
			return
		}
		round := max(uint64(in.reserved), reserve.Above) + 1
		if round > cRounds {
			o.none = true
			return
		}
		o.reserved = uint8(round)
		x.absorb(n, l.Reserved(n.now, reserve.ID, register.Ballot{Round: round, Region: l.Self().Name, Incarnation: 1}), o)
	case inPromise:
		n.prep.yes |= 1 << in.voter
		x.absorb(n, l.PrepareAnswered(n.now, cVoterIDs[in.voter], 1, n.prep.round, answer(in.recs[0])), o)
	case inAccept:
		k := int(in.round)
		n.rounds[k].votes |= 1 << in.voter
		x.absorb(n, l.AcceptAnswered(n.now, cVoterIDs[in.voter], 1, n.rounds[k].id, []campaign.AcceptAnswer{{Partition: "p"}}), o)
	case inAdopted, inAdoptFailed:
		e := n.adopt.Epoch
		n.adopt = campaign.Adopt{}
		if in.kind == inAdopted {
			x.absorb(n, l.Adopted(n.now, "p", e), o)
		} else {
			x.absorb(n, l.AdoptFailed(n.now, "p", e), o)
		}
	case inDropped:
		e := n.drop.Epoch
		n.drop = campaign.Drop{}
		x.absorb(n, l.Dropped(n.now, "p", e), o)
	}
}

// absorb takes a leader's effects into the node and the outcome, and lets go of
// rounds without the own vote that a newer one serves better than.
func (x *cfgExplorer) absorb(n *cfgNode, effects []campaign.Effect, o *outcome) {
	for _, e := range effects {
		switch e := e.(type) {
		case campaign.SendPrepare:
			if !e.Dry {
				n.prep.round, n.prep.ballot, n.prep.yes = e.Round, e.Ballot, 0
			}
		case campaign.SendAccept:
			at := soupAt(e.Items[0].Ballot)
			if k := len(n.rounds); k > 0 && n.rounds[k-1].id == e.Round {
				continue // the same round to the next voter
			}
			n.rounds = append(n.rounds, openRound{id: e.Round, ballot: at})
			o.sent = append(o.sent, sent{at, x.putValue(e.Items[0].Value)})
		case campaign.Adopt:
			n.adopt = e
		case campaign.Drop:
			n.drop = e
		case campaign.Held:
			if e.Until > n.now {
				o.holds = append(o.holds, held{uint8(e.Epoch), 1})
			}
		case campaign.Lapsed:
			o.lapsed = true
		}
	}
	own := uint8(1)
	if n.l.Self().Name == regionName[1] {
		own = 2
	}
	for k, q := range n.rounds {
		if q.votes&own == 0 && k != len(n.rounds)-1 {
			n.l.Forget(q.id)
		}
	}
	n.rounds = slices.DeleteFunc(n.rounds, func(q openRound) bool { return !n.l.Open(q.id) })
	if !n.prep.ballot.IsZero() && !n.l.Open(n.prep.round) {
		n.prep.ballot, n.prep.yes = register.Ballot{}, 0
	}
}
