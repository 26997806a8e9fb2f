package explore

import (
	"fmt"
	"slices"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/reconfigure"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// The world of changes, as in spec/reconfig.pml: the shipped voter, leader,
// version check and rules of reconfigure; regions a and b, a witness w, and a
// voter x that joins. Configurations follow each other along a chain; each is
// decided once (reconfig_decide_test.go explores that). Leaders do not change
// here; D is one tick. Every voter and leader learns of a decided configuration
// at any time, or never, and messages are late under any version.
const (
	cVoters   = 4
	cVersions = 3
	cRounds   = 3
	joiner    = 3
)

// chains are the members of successive configurations, as bit sets of voters.
var (
	chainReplace = []uint8{0b0111, 0b0011, 0b1011} // w is wiped, x is its new incarnation
	chainGrow    = []uint8{0b0111, 0b1111, 0b1011} // x joins, then w leaves
	chainSwap    = []uint8{0b0111, 0b1011}         // both in one step
)

// cfgRules break one rule each.
type cfgRules struct {
	oldVersions bool // a voter answers under versions below its own
	mixCounts   bool // answers under c are counted under c+1
	noStore     bool // rule 4 (a) is skipped
	noSettle    bool // rule 4 (b) is skipped
	readOnly    bool // rule 4 (b) is taken as done when a majority is read to have one ballot
	copyClock   bool // a joining voter copies register and clock of another, and that counts as its accept
}

type cfgOption struct {
	chain   []uint8
	rules   cfgRules
	ballots uint8
	only    map[string]bool
	guide   func(s *cfgState, a action) bool
	states  int
}

type cfgVoter struct {
	rec     register.Record
	age     uint8 // up to 1: the head lease is over here
	version uint8 // decided configuration stored; 0: none
}

// cfgState is one state, small and comparable.
type cfgState struct {
	voter           [cVoters]uint16
	node            [regions]uint32
	hold, epoch     [regions]uint8
	live, floor     [regions]uint8
	reserved, tried [regions]uint8
	// soup has the value of every Accept ever sent, by ballot, and the versions
	// under which it was.
	soup, under [2 * cRounds]uint8
	// dec is the newest decided version, settled whether the next may be.
	dec     uint8
	settled bool
	// stored is set when the operator has found dec stored (rule 4 a); resend is
	// the ballot (place + 1) that it has since sent again, got who took it.
	stored               bool
	resend, got          uint8
	lastEpoch, lastOwner uint8
}

type cfgNode struct {
	*node
	version uint8
}

type cfgExplorer struct {
	opt   cfgOption
	confs [cVersions + 1]*pb.ClusterConfiguration // by version, from 1
	cfg   [regions][cVersions + 1]campaign.Config

	voterIDs map[cfgVoter]uint16
	voters   []cfgVoter
	values   []register.Value
	valueIDs map[register.Value]uint8
	nodes    []*cfgNode
	nodeIDs  map[string]uint32
	memo     map[cfgInput]outcome
}

var cVoterIDs = [cVoters]string{"region/a", "region/b", "witness/w", "witness/x"}

func newCfgExplorer(opt cfgOption) *cfgExplorer {
	x := &cfgExplorer{
		opt: opt, voterIDs: map[cfgVoter]uint16{}, values: make([]register.Value, 1), valueIDs: map[register.Value]uint8{{}: 0},
		nodes: make([]*cfgNode, 1), nodeIDs: map[string]uint32{}, memo: map[cfgInput]outcome{},
	}
	for i, members := range opt.chain {
		x.confs[i+1] = x.configuration(uint64(i+1), members)
		if i > 0 {
			x.confs[i+1].PreviousVoters = x.confs[i].GetVoters()
		}
		for r := range regions {
			c := campaign.Config{
				Self: region(r), OwnVoter: cVoterIDs[r], D: d, GiveUp: 1 << 50, Manual: true, Rand: never{},
				Partitions: []campaign.Partition{{Name: "p", Prefer: []string{"a", "b"}}},
			}
			for _, v := range x.confs[i+1].GetVoters() { // no voter counts as a witness, as in the other explorer
				c.Voters = append(c.Voters, campaign.Voter{ID: v.GetId(), Incarnation: 1})
			}
			x.cfg[r][i+1] = c
		}
	}
	return x
}

func (x *cfgExplorer) configuration(version uint64, members uint8) *pb.ClusterConfiguration {
	c := &pb.ClusterConfiguration{
		ClusterId: "c", ClusterName: "c", Version: version, Shards: 1, DNs: int64(d),
		Partitions: []*pb.PartitionSpec{{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 0}}, Prefer: []string{"a", "b"}}},
	}
	for v, id := range cVoterIDs {
		if members>>v&1 == 1 {
			c.Voters = append(c.Voters, &pb.Voter{Id: id, Incarnation: 1})
		}
	}
	return c
}

func (x *cfgExplorer) member(version uint8, v int) bool { return x.opt.chain[version-1]>>v&1 == 1 }

func (x *cfgExplorer) majority(version, mask uint8) bool {
	n := 0
	for v := range cVoters {
		if mask>>v&1 == 1 && x.member(version, v) {
			n++
		}
	}
	return n >= config.QuorumOf(x.confs[version]).Voters
}

// answers reports whether a voter of that stored version answers a message of
// another.
func (x *cfgExplorer) answers(has, message uint8) bool {
	if has == 0 {
		return false
	}
	if x.opt.rules.oldVersions && message < has {
		return true
	}
	return config.CheckVersion(x.confs[has], "c", register.Era{}, uint64(message)) == nil
}

func (x *cfgExplorer) putVoter(v cfgVoter) uint16 {
	v.age = min(v.age, 1)
	if v.rec.Accepted.IsZero() {
		v.age = 0
	}
	id, ok := x.voterIDs[v]
	if !ok {
		id = uint16(len(x.voters))
		x.voterIDs[v] = id
		x.voters = append(x.voters, v)
	}
	return id
}

func (x *cfgExplorer) putValue(v register.Value) uint8 {
	id, ok := x.valueIDs[v]
	if !ok {
		id = uint8(len(x.values))
		x.valueIDs[v] = id
		x.values = append(x.values, v)
	}
	return id
}

func (x *cfgExplorer) putNode(n *cfgNode) uint32 {
	k := n.key() + string(n.version)
	id, ok := x.nodeIDs[k]
	if !ok {
		id = uint32(len(x.nodes))
		x.nodeIDs[k] = id
		x.nodes = append(x.nodes, n)
	}
	return id
}

func (x *cfgExplorer) register(v cfgVoter) register.Register {
	return register.Register{Record: v.rec, Since: epochStart.Add(-d * clockTicks(v.age))}
}

// start returns the initial states: a holds epoch 1, accepted by itself and b or
// w.
func (x *cfgExplorer) start() []cfgState {
	first := register.Ballot{Round: 1, Region: "a", Incarnation: 1}
	v := register.Value{Owner: region(0), Epoch: 1, D: d}
	rec := register.Record{Promised: first, Accepted: first, Value: v}
	var out []cfgState
	for _, other := range []int{1, witness} {
		s := cfgState{dec: 1, settled: true}
		for i := range cVoters {
			vs := cfgVoter{}
			if x.member(1, i) {
				vs.version = 1
			}
			if i == 0 || i == other {
				vs.rec = rec
			}
			s.voter[i] = x.putVoter(vs)
		}
		s.live[0], s.floor[0], s.lastEpoch, s.lastOwner = 1, 1, 1, 1
		s.reserved[0], s.tried[0] = 1, 1
		s.soup[soupAt(first)], s.under[soupAt(first)] = x.putValue(v), 1<<1
		for r := range regions {
			own := campaign.Own{Record: x.voters[s.voter[r]].rec, Live: fence.Epoch(s.live[r]), Floor: fence.Epoch(s.floor[r])}
			l, err := campaign.New(x.cfg[r][1], []campaign.Own{own}, epochStart.Add(-d))
			if err != nil {
				panic(err)
			}
			n := &cfgNode{node: &node{l: l, now: epochStart}, version: 1}
			x.absorb(n, l.Tick(n.now), &outcome{})
			s.node[r] = x.putNode(n)
		}
		for _, v := range []int{0, other} {
			var bad string
			if s, _, bad = x.after(s, 0, cfgInput{kind: inAccept, voter: uint8(v)}); bad != "" {
				panic(bad)
			}
		}
		if s.hold[0] == 0 {
			panic("start: region a does not hold")
		}
		out = append(out, s)
	}
	return out
}

// storedBy are the voters that have that version or a newer one.
func (x *cfgExplorer) storedBy(s *cfgState, version uint8) bool {
	var by []*pb.Voter
	for v, id := range cVoterIDs {
		if x.voters[s.voter[v]].version >= version {
			by = append(by, &pb.Voter{Id: id, Incarnation: 1})
		}
	}
	return reconfigure.Stored(x.confs[version], by)
}

func (x *cfgExplorer) show(s cfgState) string {
	out := fmt.Sprintf("dec %d stored %v settled %v ", s.dec, s.stored, s.settled)
	for v, id := range cVoterIDs {
		vs := x.voters[s.voter[v]]
		out += fmt.Sprintf("[%s v%d p%v a%v={%s %d} left %d] ", id[len(id)-1:], vs.version, vs.rec.Promised, vs.rec.Accepted, vs.rec.Value.Owner.Name, vs.rec.Value.Epoch, 1-vs.age)
	}
	for r := range regions {
		n := x.nodes[s.node[r]]
		out += fmt.Sprintf("%s v%d", regionName[r], n.version)
		if !n.prep.ballot.IsZero() {
			out += fmt.Sprintf(" prepares %v yes %04b", n.prep.ballot, n.prep.yes)
		}
		for _, q := range n.rounds {
			out += fmt.Sprintf(" r%d@%v:%04b", q.id, ballotAt(q.ballot), q.votes)
		}
		if s.hold[r] > 0 {
			out += fmt.Sprintf(" HOLDS %d", s.epoch[r])
		}
		out += "; "
	}
	return out
}

func (x *cfgExplorer) clone(n *cfgNode) *cfgNode {
	return &cfgNode{node: &node{l: n.l.Clone(), now: n.now, prep: n.prep, rounds: slices.Clone(n.rounds), adopt: n.adopt, drop: n.drop}, version: n.version}
}
