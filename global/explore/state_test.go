package explore

import (
	"fmt"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// The world: voters 0 and 1 are the regions a and b, voter 2 is a witness.
// Each region has two leader slots, 2r and 2r+1: the current leader, and the
// one before it, which has not noticed.
const (
	regions = 2
	voters  = 3
	slots   = 2 * regions
	witness = 2
	// dv is how many ticks D lasts on a voter's clock, and the hold on the
	// owner's: the worst case that the bound on clock rates allows.
	dv = 2
	// maxRounds bounds all ballots' rounds.
	maxRounds = 4
)

const d = 4 * time.Second

var regionName = [regions]string{"a", "b"}

// state is one state of the world, small and comparable. Numbers for voters,
// leaders and values are those of the explorer's tables; zero is none.
type state struct {
	slot  [slots]uint32
	voter [voters]uint16
	// hold is what a slot believes: ticks left, under epoch.
	hold, epoch [slots]uint8
	cur         [regions]uint8
	live, floor [regions]uint8
	// reserved is the highest round reserved, ballots how many there were.
	reserved, ballots [regions]uint8
	// dropped is the highest epoch dropped; the checks alone use it.
	dropped [regions]uint8
	// soup has the value of every Accept ever sent, by ballot: it may arrive
	// at any time.
	soup                 [2 * maxRounds]uint8
	lastEpoch, lastOwner uint8
	// upsets counts changes of leader and restarts, when they are bounded.
	upsets uint8
}

// voterState is a voter's register without absolute time.
type voterState struct {
	rec register.Record
	// age is the time since the value was accepted or renewed, up to dv.
	age uint8
	// pending is a promise of a region's voter that was checked and is not
	// committed yet, with what it was checked against.
	pending register.Ballot
	guard   register.Guard
}

// node is a leader in one state, with its own notion of now.
type node struct {
	l    *campaign.Leader
	now  instant.Instant
	fast bool // its clock runs at the upper bound
	prep struct {
		round  uint64
		ballot register.Ballot // zero: no open Prepare
		yes    uint8
	}
	rounds []openRound
	// adopt and drop are commands proposed and not committed.
	adopt campaign.Adopt
	drop  campaign.Drop
}

// openRound is an Accept round whose answers can still have an effect.
type openRound struct {
	id     uint64
	ballot uint8 // its place in the soup
	votes  uint8
	// late are voters whose answer is under way.
	late uint8
}

func (n *node) key() string {
	b := n.l.AppendState(nil)
	for _, r := range n.rounds {
		b = append(b, r.late)
	}
	b = append(b, byte(n.adopt.Epoch), byte(n.adopt.Ballot.Round), byte(n.drop.Epoch), n.prep.yes)
	if n.fast {
		b = append(b, 1)
	}
	return string(b)
}

// option is what one search explores.
type option struct {
	rules rules
	// ballots bounds each region's ballots, the one in force at the start
	// included.
	ballots uint8
	// release adds planned transfers.
	release bool
	// raise adds an owner's raises of its epoch.
	raise bool
	// late lets answers to Accepts arrive later than the vote.
	late bool
	// rates gives clocks at the bounds of rho = 1/3, per role: owners slow or
	// fast, voters fast. Without, all clocks are exact.
	rates bool
	// upsets bounds changes of leader and restarts, plus one; zero: no bound.
	upsets uint8
	// oneStep commits a region's promise in the step that checks it.
	oneStep bool
	// only, if set, keeps the named steps, and guide, if set, those it passes:
	// a slice of the space.
	only  map[string]bool
	guide func(s *state, a action) bool
	// states stops the search; zero: no bound.
	states int
	limit  time.Duration
}

// explorer holds the tables of one search.
type explorer struct {
	opt  option
	cfg  [regions]campaign.Config
	tick [2]time.Duration // one tick on an owner's clock: slow, fast
	vt   time.Duration    // one tick on a voter's clock

	voterIDs map[voterState]uint16
	voters   []voterState
	valueIDs map[register.Value]uint8
	values   []register.Value
	nodeIDs  map[string]uint32
	nodes    []*node
	memo     map[input]outcome
	votes    map[vote]voted
	// wants has, per voter state, the ballots (by place in the soup) that the
	// voter could still newly accept; bare is the number of the same record
	// with nothing volatile.
	wants []uint8
	bare  []uint16
	terms map[term]uint32
}

// vote is a message or event at a voter; with the voter's number it decides
// what becomes of it, which is remembered.
type vote struct {
	voter      uint16
	who        uint8 // which voter
	kind, at   uint8 // at: the ballot's place in the soup
	from, what uint8 // the candidate, the value
}

type voted struct {
	voter    uint16
	ok, done bool // done: answered at once
}

type term struct {
	voter          uint16
	r, live, floor uint8
	fast           bool
}

type never struct{}

func (never) Int64N(int64) int64 { return 0 }

func region(r int) register.Region { return register.Region{Name: regionName[r], Incarnation: 1} }

func newExplorer(opt option) *explorer {
	x := &explorer{
		opt: opt, vt: d / dv, tick: [2]time.Duration{d / dv, d / dv},
		voterIDs: map[voterState]uint16{}, valueIDs: map[register.Value]uint8{{}: 0}, values: make([]register.Value, 1),
		nodeIDs: map[string]uint32{}, nodes: make([]*node, 1), memo: map[input]outcome{},
		votes: map[vote]voted{}, terms: map[term]uint32{},
	}
	rho := 0.0
	if opt.rates {
		// A voter's clock counts D = 4 s in 3 s of real time, a tick is half of that.
		rho = 1.0 / 3
		x.tick = [2]time.Duration{d / 4, d / 2}
	}
	for r := range regions {
		x.cfg[r] = campaign.Config{
			Self: region(r), OwnVoter: voterID(r),
			// No voter counts as a witness: promotions of the shipped rules need more.
			Voters:     []campaign.Voter{{ID: voterID(0), Incarnation: 1}, {ID: voterID(1), Incarnation: 1}, {ID: voterID(2), Incarnation: 1}},
			Partitions: []campaign.Partition{{Name: "p", Prefer: []string{"a", "b"}}},
			D:          d, Rho: rho, GiveUp: 1 << 50, Manual: true, Rand: never{},
		}
		if opt.rules.ownVoteElsewhere {
			x.cfg[r].OwnVoter = voterID(witness)
		}
	}
	return x
}

func voterID(v int) string {
	return [voters]string{"region/a", "region/b", "witness/w"}[v]
}

func (x *explorer) putVoter(v voterState) uint16 {
	v.age = min(v.age, dv)
	if v.rec.Accepted.IsZero() {
		v.age = 0
	}
	id, ok := x.voterIDs[v]
	if !ok {
		id = uint16(len(x.voters))
		x.voterIDs[v] = id
		x.voters = append(x.voters, v)
		wants := uint8(0)
		for at := range uint8(2 * maxRounds) {
			if b := ballotAt(at); v.rec.Accepted != b && !b.Less(v.rec.Promised) {
				wants |= 1 << at
			}
		}
		x.wants, x.bare = append(x.wants, wants), append(x.bare, id)
		if bare := (voterState{rec: v.rec}); bare != v {
			x.bare[id] = x.putVoter(bare)
		}
	}
	return id
}

func (x *explorer) putValue(v register.Value) uint8 {
	id, ok := x.valueIDs[v]
	if !ok {
		id = uint8(len(x.values))
		x.valueIDs[v] = id
		x.values = append(x.values, v)
	}
	return id
}

func (x *explorer) putNode(n *node) uint32 {
	k := n.key()
	id, ok := x.nodeIDs[k]
	if !ok {
		id = uint32(len(x.nodes))
		x.nodeIDs[k] = id
		x.nodes = append(x.nodes, n)
	}
	return id
}

// epochStart is when voters' clocks stand; ages are counted back from it.
const epochStart = instant.Instant(1 << 40)

// register is the voter as the shipped code sees it.
func (x *explorer) register(v voterState) register.Register {
	return register.Register{
		Record: v.rec, Since: epochStart.Add(-time.Duration(v.age) * x.vt), Pending: !v.pending.IsZero(),
	}
}

// fromRegister puts a register's volatile part back.
func (x *explorer) fromRegister(v voterState, r register.Register) voterState {
	v.rec = r.Record
	v.age = uint8(min(epochStart.Sub(r.Since)/x.vt, dv))
	return v
}

// soupAt is a ballot's place in the soup.
func soupAt(b register.Ballot) uint8 {
	r := uint8(0)
	if b.Region == regionName[1] {
		r = 1
	}
	return uint8(b.Round-1)*regions + r
}

func ballotAt(i uint8) register.Ballot {
	return register.Ballot{Round: uint64(i/regions) + 1, Region: regionName[i%regions], Incarnation: 1}
}

// start returns the two initial states: region a holds epoch 1, accepted by
// itself and by b or the witness; the third voter never heard of it.
func (x *explorer) start() []state {
	first := register.Ballot{Round: 1, Region: "a", Incarnation: 1}
	v := register.Value{Owner: region(0), Epoch: 1, D: d}
	rec := register.Record{Promised: first, Accepted: first, Value: v}
	var out []state
	for _, other := range []int{1, witness} {
		if other == 1 && x.opt.rules.ownVoteElsewhere {
			continue
		}
		var s state
		for i := range voters {
			vs := voterState{}
			if i == 0 || i == other {
				vs.rec = rec
			}
			s.voter[i] = x.putVoter(vs)
		}
		s.live[0], s.floor[0], s.lastEpoch, s.lastOwner = 1, 1, 1, 1
		s.reserved[0], s.ballots[0] = 1, 1
		s.soup[soupAt(first)] = x.putValue(v)
		s.slot[0] = x.newLeader(0, s.voter[0], 1, 1, false)
		s.slot[2] = x.newLeader(1, s.voter[1], 0, 0, false)
		for _, v := range []int{0, other} {
			var bad string
			if s, bad = x.apply(s, 0, x.step(s.slot[0], input{kind: inAccept, voter: uint8(v)})); bad != "" {
				panic(bad)
			}
		}
		if s.hold[0] < dv {
			panic(fmt.Sprintf("start: region a holds for %d ticks", s.hold[0]))
		}
		out = append(out, s)
	}
	return out
}

// newLeader is the first step of a term.
func (x *explorer) newLeader(r int, voter uint16, live, floor uint8, fast bool) uint32 {
	k := term{x.bare[voter], uint8(r), live, floor, fast}
	id, ok := x.terms[k]
	if !ok {
		id = x.firstStep(r, x.voters[voter].rec, fence.Epoch(live), fence.Epoch(floor), fast)
		x.terms[k] = id
	}
	return id
}

func (x *explorer) firstStep(r int, rec register.Record, live, floor fence.Epoch, fast bool) uint32 {
	n := &node{now: epochStart, fast: fast}
	var err error
	n.l, err = campaign.New(x.cfg[r], []campaign.Own{{Record: rec, Live: live, Floor: floor}}, n.now)
	if err != nil {
		panic(err)
	}
	if !x.opt.release && !x.opt.raise || x.opt.rules.youngLeaders {
		// No leader's age matters: make it old, so that all ages are one state.
		n.l, _ = campaign.New(x.cfg[r], []campaign.Own{{Record: rec, Live: live, Floor: floor}}, n.now.Add(-d))
	}
	x.absorb(n, n.l.Tick(n.now), &outcome{})
	return x.putNode(n)
}
