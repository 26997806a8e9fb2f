package explore

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/era"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// The world of force-quorum: the regions a and b and a witness w; a owns the
// partition. At some point a and w are lost, their clients believing on, and the
// operator forces an era in which b alone votes. Later a comes back from its old
// data and tries on: its old messages may arrive at any time, too. Voters,
// leaders, the plan and the check of headers are the shipped code. D is two
// ticks; clocks are exact.

// eraRules break one rule each.
type eraRules struct {
	blind bool // eras are not compared, and do not order ballots
	level bool // the epochs do not jump
	hasty bool // the registers are free at once, without a wait of D
}

// eraWho are the voters' places.
const (
	eraA = iota
	eraB
	eraW
)

type eraNode struct {
	l     *campaign.Leader
	conf  *pb.ClusterConfiguration
	now   instant.Instant
	prep  campaign.SendPrepare // no ballot: none is open
	asked [voters]bool
	round campaign.SendAccept // the newest
	voted [voters]bool
	adopt campaign.Adopt
	drop  campaign.Drop
}

// eraSent is an Accept that may arrive at any time.
type eraSent struct {
	conf *pb.ClusterConfiguration
	from int
	item campaign.Item
}

type eraState struct {
	rec           [voters]register.Record
	age           [voters]uint8
	conf          [voters]*pb.ClusterConfiguration
	lost          [voters]bool
	lead          [regions]*eraNode
	live, floor   [regions]fence.Epoch
	reserved      [regions]uint64
	ballots       [regions]uint8
	hold          [regions]uint8 // ticks for which somebody believes
	epoch         [regions]fence.Epoch
	sent          []eraSent
	last          fence.Epoch
	lastOwner     int
	forced, again bool
}

type eraWorld struct {
	rules eraRules
	first *pb.ClusterConfiguration
	bad   string
}

func newEraWorld(rules eraRules) *eraWorld {
	w := &eraWorld{rules: rules, first: &pb.ClusterConfiguration{
		ClusterId: "c", ClusterName: "c", Version: 1, Shards: 1, DNs: int64(d),
		Partitions: []*pb.PartitionSpec{{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 0}}, Prefer: []string{"a", "b"}}},
	}}
	for v := range voters {
		w.first.Voters = append(w.first.Voters, &pb.Voter{Id: voterID(v), Incarnation: 1})
	}
	return w
}

// leader begins a term of region r by what it has on disk.
func (w *eraWorld) leader(s *eraState, r int) {
	conf := s.conf[r]
	c := campaign.Config{
		Self: region(r), OwnVoter: voterID(r), Era: config.EraOf(conf), D: d, GiveUp: 1 << 50, Manual: true, Rand: never{},
		Partitions: []campaign.Partition{{Name: "p", Prefer: []string{"a", "b"}}},
	}
	if w.rules.blind {
		c.Era = register.Era{}
	}
	for _, v := range conf.GetVoters() { // no voter counts as a witness, as in the other explorers
		c.Voters = append(c.Voters, campaign.Voter{ID: v.GetId(), Incarnation: 1})
	}
	l, err := campaign.New(c, []campaign.Own{{Record: s.rec[r], Live: s.live[r], Floor: s.floor[r]}}, epochStart.Add(-d))
	if err != nil {
		panic(err)
	}
	n := &eraNode{l: l, conf: conf, now: epochStart}
	s.lead[r] = n
	w.absorb(s, r, l.Tick(n.now))
}

func (w *eraWorld) clone(s *eraState) *eraState {
	c := *s
	for r, n := range s.lead {
		if n != nil {
			m := *n
			m.l = n.l.Clone()
			c.lead[r] = &m
		}
	}
	c.sent = slices.Clone(s.sent)
	return &c
}

func (w *eraWorld) register(s *eraState, v int) register.Register {
	return register.Register{Record: s.rec[v], Since: epochStart.Add(-time.Duration(s.age[v]) * d / dv)}
}

// hears reports whether voter v answers a message that region r sends, or sent,
// under conf.
func (w *eraWorld) hears(s *eraState, conf *pb.ClusterConfiguration, r, v int) bool {
	if s.lost[v] {
		return false
	}
	h := &pb.VoteHeader{ClusterId: "c", Era: conf.GetEra(), ConfigVersion: conf.GetVersion(), Candidate: regionName[r], CandidateIncarnation: 1}
	return w.rules.blind || config.CheckHeader(s.conf[v], h) == nil
}

func place(id string) int {
	return slices.Index([]string{voterID(0), voterID(1), voterID(2)}, id)
}

// absorb takes a leader's effects.
func (w *eraWorld) absorb(s *eraState, r int, effects []campaign.Effect) {
	n := s.lead[r]
	for _, e := range effects {
		switch e := e.(type) {
		case campaign.SendPrepare:
			if !e.Dry {
				n.prep, n.asked = e, [voters]bool{}
			}
		case campaign.SendAccept:
			if e.Round != n.round.Round {
				n.l.Forget(n.round.Round)
				n.voted = [voters]bool{}
				if x := (eraSent{n.conf, r, e.Items[0]}); !slices.Contains(s.sent, x) {
					s.sent = append(s.sent, x)
				}
			}
			n.round = e
		case campaign.Adopt:
			n.adopt = e
		case campaign.Drop:
			n.drop = e
		case campaign.Held:
			left := uint8(e.Until.Sub(n.now) / (d / dv))
			s.hold[r], s.epoch[r] = max(left, s.hold[r]), e.Epoch
			switch {
			case s.hold[1-r] > 0 && left > 0:
				w.bad = fmt.Sprintf("I1: %s holds epoch %d, and %s epoch %d", regionName[r], e.Epoch, regionName[1-r], s.epoch[1-r])
			case e.Epoch < s.last || e.Epoch == s.last && s.lastOwner != r:
				w.bad = fmt.Sprintf("I2: %s holds epoch %d after epoch %d of %s", regionName[r], e.Epoch, s.last, regionName[s.lastOwner])
			}
			s.last, s.lastOwner = e.Epoch, r
		case campaign.Lapsed: // the leader lets go; who was told goes on until the end that it was told
		}
	}
}

func (w *eraWorld) start(other int) *eraState {
	b := register.Ballot{Round: 3, Region: "a", Incarnation: 1}
	s := &eraState{lastOwner: eraA}
	for v := range voters {
		s.conf[v] = w.first
		if v == eraA || v == other {
			s.rec[v] = register.Record{Promised: b, Accepted: b, Value: register.Value{Owner: region(0), Epoch: 1, D: d}}
		}
	}
	s.live[0], s.floor[0], s.reserved[0] = 1, 1, 3
	w.leader(s, 0)
	w.leader(s, 1)
	for _, v := range []int{eraA, other} {
		s = w.accept(s, 0, v)
	}
	if s == nil || s.hold[0] != dv {
		panic("start: region a does not hold")
	}
	return s
}

// prepare lets voter v judge region r's open Prepare.
func (w *eraWorld) prepare(s *eraState, r, v int) *eraState {
	n := s.lead[r]
	if n == nil || n.prep.Ballot.IsZero() || !n.l.Open(n.prep.Round) || n.asked[v] || !w.hears(s, n.conf, r, v) || config.VoterIncarnation(n.conf, voterID(v)) == 0 {
		return nil
	}
	s = w.clone(s)
	n = s.lead[r]
	dec := w.register(s, v).Prepare(epochStart, register.PrepareInput{Candidate: region(r), Ballot: n.prep.Ballot})
	if dec.Action == register.Write {
		s.rec[v], _ = register.Update(s.rec[v], dec.Change)
	}
	n.asked[v] = true
	w.absorb(s, r, n.l.PrepareAnswered(n.now, voterID(v), 1, n.prep.Round, []campaign.PrepareAnswer{{Partition: "p", Rule: dec.Rule, Record: s.rec[v]}}))
	return s
}

// take lets voter v judge an Accept.
func (w *eraWorld) take(s *eraState, v int, item campaign.Item) register.Rule {
	r := w.register(s, v)
	dec := r.Accept(item.Ballot, item.Value)
	switch dec.Action {
	case register.Write:
		s.rec[v], _ = register.Update(s.rec[v], dec.Change)
		s.age[v] = 0
	case register.Renew:
		s.age[v] = 0
	}
	return dec.Rule
}

// accept lets voter v judge region r's newest Accept.
func (w *eraWorld) accept(s *eraState, r, v int) *eraState {
	n := s.lead[r]
	if n == nil || n.round.Round == 0 || !n.l.Open(n.round.Round) || n.voted[v] || !w.hears(s, n.conf, r, v) || config.VoterIncarnation(n.conf, voterID(v)) == 0 {
		return nil
	}
	s = w.clone(s)
	n = s.lead[r]
	n.voted[v] = true
	rule := w.take(s, v, n.round.Items[0])
	w.absorb(s, r, n.l.AcceptAnswered(n.now, voterID(v), 1, n.round.Round, []campaign.AcceptAnswer{{Partition: "p", Rule: rule, Record: s.rec[v]}}))
	return s
}

// campaign lets region r ask, reserve a ballot and send its Prepare.
func (w *eraWorld) campaign(s *eraState, r int) *eraState {
	if s.lead[r] == nil || !s.forced || s.ballots[r] >= 2 {
		return nil // before the loss the other explorers have it
	}
	s = w.clone(s)
	s.ballots[r]++
	n := s.lead[r]
	effects := n.l.Hurry(n.now, "p")
	for len(effects) > 0 {
		w.absorb(s, r, effects)
		var next []campaign.Effect
		for _, e := range effects {
			switch e := e.(type) {
			case campaign.SendPrepare:
				if v := place(e.Voter.ID); e.Dry && w.hears(s, n.conf, r, v) {
					dec := w.register(s, v).Prepare(epochStart, register.PrepareInput{Candidate: region(r), Dry: true})
					next = append(next, n.l.PrepareAnswered(n.now, e.Voter.ID, 1, e.Round, []campaign.PrepareAnswer{{Partition: "p", Rule: dec.Rule, Record: s.rec[v], Remaining: w.register(s, v).Remaining(epochStart)}})...)
				}
			case campaign.Reserve:
				s.reserved[r] = max(s.reserved[r], e.Above) + 1
				b := register.Ballot{Round: s.reserved[r], Region: regionName[r], Incarnation: 1, Era: config.EraOf(n.conf)}
				if w.rules.blind {
					b.Era = register.Era{}
				}
				next = append(next, n.l.Reserved(n.now, e.ID, b)...)
			}
		}
		effects = next
	}
	return s
}

// commit applies what region r has proposed.
func (w *eraWorld) commit(s *eraState, r int) *eraState {
	n := s.lead[r]
	if n == nil || n.adopt.Epoch == 0 && n.drop.Epoch == 0 {
		return nil
	}
	s = w.clone(s)
	n = s.lead[r]
	m := machine{s.live[r], s.floor[r]}
	var effects []campaign.Effect
	if e := n.drop.Epoch; e != 0 {
		n.drop = campaign.Drop{}
		m.drop(e)
		effects = n.l.Dropped(n.now, "p", e)
	} else {
		a := n.adopt
		n.adopt = campaign.Adopt{}
		if m.adopt(s.rec[r], a.Epoch, a.Ballot) {
			effects = n.l.Adopted(n.now, "p", a.Epoch)
		} else {
			effects = n.l.AdoptFailed(n.now, "p", a.Epoch)
		}
	}
	s.live[r], s.floor[r] = m.live, m.floor
	w.absorb(s, r, effects)
	return s
}

func (w *eraWorld) tick(s *eraState) *eraState {
	s = w.clone(s)
	for v := range voters {
		s.age[v] = min(s.age[v]+1, dv)
	}
	for r, n := range s.lead {
		s.hold[r] -= min(s.hold[r], 1)
		if n != nil {
			n.now = n.now.Add(d / dv)
			w.absorb(s, r, n.l.Tick(n.now))
		}
	}
	return s
}

// force: a and w are lost, and b begins the era that the operator plans.
func (w *eraWorld) force(s *eraState) *eraState {
	if s.forced {
		return nil
	}
	s = w.clone(s)
	s.forced, s.lost[eraA], s.lost[eraW], s.lead[eraA] = true, true, true, nil
	seen := max(s.rec[eraB].Value.Epoch, s.floor[eraB])
	self := &pb.Voter{Id: voterID(eraB), Incarnation: 1}
	plan, _, err := era.Plan(era.Input{ID: 7, Destroyed: []string{voterID(eraA), voterID(eraW)}, Facts: []*pb.VoterFacts{{
		Voter: self, Server: "b-1", Group: []string{"b-1"}, FeatureLevel: era.Level, Configuration: s.conf[eraB],
		Epochs: []*pb.EraEpoch{{Partition: "p", Epoch: uint32(seen), DNs: int64(d)}},
	}}})
	if err != nil {
		panic(err)
	}
	next, stored, err := config.Voter{Decided: s.conf[eraB]}.BeginEra(self, plan)
	if err != nil || !stored {
		panic(err)
	}
	rec, err := config.EraRecord(plan, "p", seen)
	if err != nil {
		panic(err)
	}
	if w.rules.level {
		rec.Value.Epoch = seen
	}
	if w.rules.hasty {
		rec.Value.Successor = ""
	}
	if w.rules.blind {
		rec.Promised.Era, rec.Accepted.Era, rec.Value.Era = register.Era{}, register.Era{}, register.Era{}
	}
	s.conf[eraB], s.rec[eraB], s.age[eraB] = next.Decided, rec, 0
	s.floor[eraB], s.live[eraB] = max(s.floor[eraB], s.live[eraB]), 0
	s.ballots = [regions]uint8{}
	w.leader(s, eraB)
	return s
}

// revive brings a back from its old data.
func (w *eraWorld) revive(s *eraState) *eraState {
	if !s.lost[eraA] || s.again {
		return nil
	}
	s = w.clone(s)
	s.again, s.lost[eraA], s.age[eraA] = true, false, 0
	w.leader(s, eraA)
	return s
}

// next yields every state one step on.
func (w *eraWorld) next(s *eraState, yield func(string, *eraState)) {
	step := func(name string, n *eraState) {
		if n != nil {
			yield(name, n)
		}
	}
	step("tick", w.tick(s))
	step("force", w.force(s))
	step("revive", w.revive(s))
	for r := range regions {
		step("campaign "+regionName[r], w.campaign(s, r))
		step("commit "+regionName[r], w.commit(s, r))
		for v := range voters {
			step(fmt.Sprintf("prepare %s %d", regionName[r], v), w.prepare(s, r, v))
			step(fmt.Sprintf("accept %s %d", regionName[r], v), w.accept(s, r, v))
		}
	}
	for _, m := range s.sent {
		for v := range voters {
			if !s.forced || s.rec[v].Accepted == m.item.Ballot || !w.hears(s, m.conf, m.from, v) {
				continue // before the loss the other explorers have it
			}
			n := w.clone(s)
			w.take(n, v, m.item)
			step(fmt.Sprintf("late %v at %d", m.item.Ballot, v), n)
		}
	}
}

func (s *eraState) key() string {
	var b []byte
	u := func(ns ...uint64) {
		for _, n := range ns {
			b = binary.AppendUvarint(b, n)
		}
	}
	flag := func(fs ...bool) {
		for _, f := range fs {
			if f {
				b = append(b, 1)
			} else {
				b = append(b, 0)
			}
		}
	}
	for v := range voters {
		b = fmt.Appendf(b, "%v%v%v%d", s.rec[v].Promised, s.rec[v].Accepted, s.rec[v].Value, s.conf[v].GetVersion())
		u(uint64(s.age[v]))
	}
	for r, n := range s.lead {
		u(uint64(s.live[r]), uint64(s.floor[r]), s.reserved[r], uint64(s.ballots[r]), uint64(s.hold[r]), uint64(s.epoch[r]))
		if n == nil {
			continue
		}
		b = n.l.AppendState(b)
		flag(n.asked[:]...)
		flag(n.voted[:]...)
		b = fmt.Appendf(b, "%v%v", n.adopt, n.drop)
	}
	flag(s.lost[:]...)
	flag(s.forced, s.again)
	u(uint64(s.last), uint64(s.lastOwner), uint64(len(s.sent)))
	return string(b)
}

// search explores breadth first; heldAfter counts states in which the forced
// era's owner holds.
func (w *eraWorld) search(limit int) (states, heldAfter int, bad string, trace []string) {
	type from struct {
		s    *eraState
		at   int
		name string
	}
	seen := map[string]bool{}
	var queue []from
	add := func(s *eraState, at int, name string) {
		if k := s.key(); !seen[k] {
			seen[k] = true
			queue = append(queue, from{s, at, name})
		}
	}
	add(w.start(eraW), -1, "start")
	add(w.start(eraB), -1, "start, b knows")
	for i := 0; i < len(queue) && len(queue) < limit && w.bad == ""; i++ {
		s := queue[i].s
		if s.forced && s.hold[eraB] > 0 && s.epoch[eraB] > era.Jump {
			heldAfter++
		}
		w.next(s, func(name string, n *eraState) {
			if w.bad != "" && bad == "" {
				bad = w.bad
				trace = append(trace, name+": "+bad)
				for at := i; at >= 0; at = queue[at].at {
					trace = append(trace, queue[at].name)
				}
				slices.Reverse(trace)
			}
			add(n, i, name)
		})
		queue[i].s = nil
	}
	return len(queue), heldAfter, bad, trace
}

// TestF16AnEraKeepsTheInvariants whatever the lost majority did before, and
// whatever one of it does that comes back; and without each rule they break.
func TestF16AnEraKeepsTheInvariants(t *testing.T) {
	limit := 40_000 / raceShare
	if *exploreTime > 0 {
		limit = 2_000_000
	}
	states, held, bad, trace := newEraWorld(eraRules{}).search(limit)
	t.Logf("%d states, %d of them with the partition owned in the new era", states, held)
	if bad != "" || held == 0 {
		t.Fatalf("held %d, %s\n%s", held, bad, strings.Join(trace, "\n"))
	}
	for name, bug := range map[string]struct {
		rules eraRules
		want  string
	}{
		"eras are not compared, and do not order ballots": {eraRules{blind: true}, "I1:"},
		"the epochs do not jump":                          {eraRules{level: true}, "I2:"},
		"nobody waits for D":                              {eraRules{hasty: true}, "I1:"},
	} {
		t.Run(name, func(t *testing.T) {
			states, _, bad, trace := newEraWorld(bug.rules).search(100_000)
			t.Logf("%d states: %s", states, bad)
			if *showTraces {
				t.Log(strings.Join(trace, "\n"))
			}
			if !strings.HasPrefix(bad, bug.want) {
				t.Errorf("found %q, want %s", bad, bug.want)
			}
		})
	}
}
