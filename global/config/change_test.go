package config

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestCheckChange(t *testing.T) {
	w4 := &pb.Voter{Id: "witness/w4", Incarnation: 9}
	prev := good(t)
	for name, next := range map[string]*pb.ClusterConfiguration{
		"added":           WithVoter(prev, w4),
		"removed":         WithoutVoter(prev, "witness/w1"),
		"a region leaves": WithoutVoter(prev, "region/us"), // partitions may go on preferring it, until it is back
		"settings": func() *pb.ClusterConfiguration {
			n := Next(prev)
			n.DNs, n.AllowEvenWitnesses = 5e9, true
			slices.Reverse(n.Partitions[0].Prefer)
			n.Exceptions, n.LastDedicated = []*pb.ShardException{{Key: "hot", Shard: FirstException, Since: n.Version}}, FirstException
			n.Partitions = append(n.Partitions, &pb.PartitionSpec{Name: "new", Prefer: []string{"eu"}})
			return n
		}(),
	} {
		if err := CheckChange(prev, next); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if len(Diff(prev, next)) == 0 || len(Diff(prev, prev)) != 0 {
			t.Errorf("%s: diff %q, of nothing %q", name, Diff(prev, next), Diff(prev, prev))
		}
	}
	for name, c := range map[string]struct {
		bend func(*pb.ClusterConfiguration)
		want string
	}{
		"version":  {func(n *pb.ClusterConfiguration) { n.Version++ }, "the one after 1 is 2"},
		"cluster":  {func(n *pb.ClusterConfiguration) { n.ClusterId = "x" }, "it never changes"},
		"name":     {func(n *pb.ClusterConfiguration) { n.ClusterName = "x" }, "it never changes"},
		"previous": {func(n *pb.ClusterConfiguration) { n.PreviousVoters = n.PreviousVoters[1:] }, "previous_voters must be those of version 1"},
		"H8 two added": {func(n *pb.ClusterConfiguration) {
			n.Voters = append(n.Voters, w4, &pb.Voter{Id: "witness/w5", Incarnation: 1})
		}, "2 added and 0 removed"},
		"H8 a swap":    {func(n *pb.ClusterConfiguration) { n.Voters[4] = w4 }, "1 added and 1 removed"},
		"H8 made anew": {func(n *pb.ClusterConfiguration) { n.Voters[4] = &pb.Voter{Id: "witness/w3", Incarnation: 1} }, "1 added and 1 removed"},
		"both at once": {func(n *pb.ClusterConfiguration) { n.Voters, n.DNs = append(n.Voters, w4), 9e9 }, "changes nothing else"},
		"shorter d":    {func(n *pb.ClusterConfiguration) { n.DNs = 2e9 }, "it can only grow"},
		"shards":       {func(n *pb.ClusterConfiguration) { n.Shards, n.Partitions[1].Shards[0].Last = 512, 511 }, "shards is 512, was 256"},
		"moved": {func(n *pb.ClusterConfiguration) {
			n.Partitions[0].Shards[0].Last--
			n.Partitions[1].Shards[0].First--
		}, "a shard keeps its partition"},
		"gone": {func(n *pb.ClusterConfiguration) {
			n.Partitions[0].Shards[0].Last, n.Partitions = 255, n.Partitions[:1]
		}, `partition "west" is gone`},
		"stranger":      {func(n *pb.ClusterConfiguration) { n.Partitions[0].Prefer = []string{"moon"} }, "add the region first"},
		"retired":       {func(n *pb.ClusterConfiguration) { n.RetiredPartitions = []string{"x"} }, `there was no partition "x"`},
		"exception low": {func(n *pb.ClusterConfiguration) { n.Exceptions = []*pb.ShardException{{Key: "a", Shard: 255}} }, "numbered from 16777216"},
		"exception key": {func(n *pb.ClusterConfiguration) {
			n.Exceptions = []*pb.ShardException{{Key: "a b", Shard: FirstException}}
		}, `exception "a b" is not a key`},
		"exception slot": {func(n *pb.ClusterConfiguration) {
			n.Exceptions = []*pb.ShardException{{Key: "a#1", Shard: FirstException}}
		}, "is not a key"},
		"exception twice": {func(n *pb.ClusterConfiguration) {
			n.Exceptions = []*pb.ShardException{{Key: "a", Shard: FirstException}, {Key: "b", Shard: FirstException}}
		}, "each has its own"},
	} {
		n := Next(prev)
		c.bend(n)
		var e *InvalidError
		if err := CheckChange(prev, n); !errors.As(err, &e) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// TestExceptionsStayInTheirPartition: a key's dedicated shard is in the
// partition of its hash shard, so its tokens go on rising.
func TestExceptionsStayInTheirPartition(t *testing.T) {
	cfg := good(t)
	plain, err := NewMap(cfg)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Exceptions = []*pb.ShardException{{Key: "hot", Shard: FirstException}, {Key: "warm", Shard: FirstException + 7}}
	m, err := NewMap(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for key, dedicated := range map[string]uint32{"hot": FirstException, "warm": FirstException + 7} {
		was, _ := plain.Locate("lock/" + key)
		now, err := m.Locate("lock/" + key)
		if err != nil || now.Partition != was.Partition || now.Shard != dedicated {
			t.Errorf("%s: %+v was %+v, %v", key, now, was, err)
		}
		whole, err := m.Locate("shard/" + strconv.FormatUint(uint64(dedicated), 10))
		if err != nil || whole.Partition != was.Partition || whole.Shard != dedicated {
			t.Errorf("shard of %s: %+v, %v", key, whole, err)
		}
	}
	if _, err := m.Locate("shard/16777217"); err == nil {
		t.Error("a dedicated shard of no key was found")
	}
}

func TestVoterLearns(t *testing.T) {
	self := &pb.Voter{Id: "witness/w1", Incarnation: 102}
	one := good(t)
	two := WithVoter(one, &pb.Voter{Id: "witness/w4", Incarnation: 9})
	three := WithoutVoter(two, "witness/w1")
	var v Voter
	learn := func(c *pb.ClusterConfiguration, stored bool) {
		t.Helper()
		next, got, err := v.Learn(self, c)
		if err != nil || got != stored {
			t.Fatalf("version %d: stored %v, %v", c.GetVersion(), got, err)
		}
		v = next
	}
	if _, _, err := v.Learn(&pb.Voter{Id: "witness/w1", Incarnation: 1}, one); !errors.As(err, new(*JoinError)) {
		t.Errorf("under another incarnation: %v", err)
	}
	if _, _, err := v.Learn(self, three); !errors.As(err, new(*JoinError)) {
		t.Errorf("a first configuration without it: %v", err)
	}
	learn(one, true)
	learn(one, false)
	v.Register = Register{Promised: Ballot{Round: 1, Proposer: "p"}}
	learn(two, true)
	if v.Register != (Register{}) {
		t.Error("the register is not fresh")
	}
	learn(one, false)
	learn(three, true) // it is no member any more, and knows
	other := proto.CloneOf(three)
	other.DNs++
	if _, _, err := v.Learn(self, other); !errors.As(err, new(*ConflictError)) {
		t.Errorf("another one of the same version: %v", err)
	}
	other.ClusterId = "x"
	if _, _, err := v.Learn(self, other); !errors.As(err, new(*OtherClusterError)) {
		t.Errorf("another cluster: %v", err)
	}
}

func TestVoterJudgesByV1(t *testing.T) {
	one := good(t)
	two := WithoutVoter(one, "witness/w1")
	b := func(round uint64, who string) Ballot { return Ballot{Round: round, Proposer: who} }
	v := Voter{Decided: one}
	next, yes, err := v.Prepare("id", register.Era{}, 1, b(2, "p"))
	if err != nil || !yes || next.Promised != b(2, "p") {
		t.Fatal(next, yes, err)
	}
	v.Register = next
	for _, lower := range []Ballot{b(1, "z"), b(2, "o")} {
		if _, yes, err := v.Prepare("id", register.Era{}, 1, lower); yes || err != nil {
			t.Errorf("%v after %v: %v, %v", lower, v.Register.Promised, yes, err)
		}
		if _, yes, err := v.Accept("id", register.Era{}, 1, lower, two); yes || err != nil {
			t.Errorf("accept %v after %v: %v, %v", lower, v.Register.Promised, yes, err)
		}
	}
	if _, yes, _ := v.Prepare("id", register.Era{}, 1, b(2, "p")); !yes {
		t.Error("a retransmission is refused")
	}
	if next, yes, err = v.Accept("id", register.Era{}, 1, b(3, "q"), two); err != nil || !yes || next.Promised != b(3, "q") || next.Accepted != b(3, "q") {
		t.Fatal(next, yes, err)
	}
	v.Register = next
	if _, yes, err := v.Accept("id", register.Era{}, 1, b(3, "q"), two); !yes || err != nil {
		t.Error("a retransmission is refused", err)
	}
	if _, _, err := v.Accept("id", register.Era{}, 1, b(3, "q"), WithoutVoter(one, "witness/w2")); !errors.As(err, new(*ConflictError)) {
		t.Errorf("one ballot with two proposals: %v", err)
	}
	var version *VersionError
	if _, _, err := v.Prepare("id", register.Era{}, 0, b(9, "p")); !errors.As(err, &version) || !proto.Equal(version.Newer, one) {
		t.Errorf("a proposer that is behind: %v", err)
	}
	if _, _, err := v.Accept("id", register.Era{}, 2, b(9, "p"), two); !errors.As(err, &version) || version.Newer != nil {
		t.Errorf("a voter that is behind: %v", err)
	}
	if _, _, err := v.Prepare("x", register.Era{}, 1, b(9, "p")); !errors.As(err, new(*OtherClusterError)) {
		t.Errorf("another cluster: %v", err)
	}
	if _, _, err := (Voter{}).Prepare("id", register.Era{}, 1, b(9, "p")); !errors.Is(err, ErrUninitialised) {
		t.Errorf("no configuration: %v", err)
	}
	for _, bad := range []Ballot{{}, {Round: 1}, {Proposer: "p"}, {Round: 1 << 63, Proposer: "p"}, {Round: 1, Proposer: strings.Repeat("p", 65)}} {
		if _, _, err := v.Prepare("id", register.Era{}, 1, bad); !errors.As(err, new(*FieldError)) {
			t.Errorf("ballot %+v: %v", bad, err)
		}
	}
	if got := RegisterOf(v.Register.Proto()); !got.Equal(v.Register) {
		t.Errorf("%+v became %+v", v.Register, got)
	}
}
