package state

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func cmdConfigPromise(version, round uint64) *pb.Command {
	return &pb.Command{Kind: &pb.Command_ConfigPromise{ConfigPromise: &pb.ConfigPromiseCommand{
		ClusterId: "c1", Version: version, Ballot: &pb.ConfigBallot{Round: round, Proposer: "x"},
	}}}
}

func cmdConfigAccept(version, round uint64, next *pb.ClusterConfiguration) *pb.Command {
	return &pb.Command{Kind: &pb.Command_ConfigAccept{ConfigAccept: &pb.ConfigAcceptCommand{
		ClusterId: "c1", Version: version, Ballot: &pb.ConfigBallot{Round: round, Proposer: "x"}, Proposed: next,
	}}}
}

func withW2(c *pb.ClusterConfiguration) *pb.ClusterConfiguration {
	return config.WithVoter(c, &pb.Voter{Id: "witness/w2", Incarnation: 6})
}

func TestH9NextConfigurationIsPromisedAcceptedAndStored(t *testing.T) {
	h := newOwner(t, "a")
	next := withW2(testConfiguration())
	if r := h.ok(cmdConfigPromise(1, 5)).GetConfigVote(); !r.GetDone() {
		t.Fatal(r)
	}
	if r := h.ok(cmdConfigPromise(1, 4)).GetConfigVote(); r.GetDone() || r.GetRegister().GetPromised().GetRound() != 5 {
		t.Fatalf("a ballot below the promised one: %v", r)
	}
	if r := h.ok(cmdConfigAccept(1, 4, next)).GetConfigVote(); r.GetDone() {
		t.Fatalf("a ballot below the promised one: %v", r)
	}
	if r := h.ok(cmdConfigAccept(1, 5, next)).GetConfigVote(); !r.GetDone() || !proto.Equal(r.GetRegister().GetProposed(), next) {
		t.Fatal(r)
	}
	if v := h.m.View().Configuration().GetVersion(); v != 1 {
		t.Fatalf("configuration %d is in force before it is decided", v)
	}
	h.refusedAs(cmdConfigPromise(2, 9), errOtherCluster(testConfiguration()))

	h.ok(cmdRecordVoters(&pb.VoterRecord{Voter: &pb.Voter{Id: "witness/w9", Incarnation: 3}, Life: 1, Writes: 1}))
	h.ok(cmdConfigure(next))
	h.wantEvents(Configured{Configuration: next})
	view := h.m.View()
	if !view.ConfigRegister().Equal(config.Register{}) {
		t.Error("the register of the next decision is not fresh")
	}
	if _, ok := view.Voter("witness/w9"); ok {
		t.Error("what was seen of a voter that is none any more is kept")
	}
	if p, _ := view.Partition("p"); !p.Live() {
		t.Error("the change of the configuration ended an epoch")
	}
	h.refusedAs(cmdConfigPromise(1, 9), errOtherCluster(next))
	if !h.ok(cmdConfigure(testConfiguration())).GetConfigure().GetAlready() {
		t.Error("an older configuration was stored")
	}
}

// TestH10VotesJudgedUnderAnotherVersionAreRefused: a promise or a value that
// was checked under c must not take effect after c+1 is stored.
func TestH10VotesJudgedUnderAnotherVersionAreRefused(t *testing.T) {
	h := newOwner(t, "a")
	h.ok(cmdConfigure(withW2(testConfiguration())))
	rec := h.record("q")
	ballot := &pb.Ballot{Round: rec.Promised.Round + 9, Region: "us", Incarnation: 1}
	value := &pb.Value{Owner: "us", OwnerIncarnation: 1, Epoch: 9, DNs: 1}
	for version, want := range map[uint64]bool{1: false, 2: true, 3: false} {
		promise := cmdPromise("q", rec.Guard().Proto(), ballot)
		promise.GetPromise().ConfigVersion = version
		accept := cmdAccepted("q", rec.Guard().Proto(), ballot, value)
		accept.GetAccepted().ConfigVersion = version
		if want {
			continue
		}
		for _, c := range []*pb.Command{promise, accept} {
			if it := h.ok(c).GetItems().GetItems()[0]; it.GetDone() || register.RecordOf(it.GetRegister()) != rec {
				t.Errorf("version %d: %v", version, it)
			}
		}
	}
	promise := cmdPromise("q", rec.Guard().Proto(), ballot)
	promise.GetPromise().ConfigVersion = 2
	if !h.ok(promise).GetItems().GetItems()[0].GetDone() {
		t.Error("refused under the version in force")
	}
}

// TestRetiredPartitionKeepsItsRecord: the name's epochs and register must
// never begin again.
func TestRetiredPartitionKeepsItsRecord(t *testing.T) {
	h := newOwner(t, "a")
	c := config.Next(testConfiguration())
	c.Partitions = c.GetPartitions()[:1]
	c.RetiredPartitions = []string{"q"}
	before, _ := h.m.View().Partition("q")
	h.ok(cmdConfigure(c))
	if after, ok := h.m.View().Partition("q"); !ok || after != before {
		t.Errorf("%+v became %+v", before, after)
	}
}

func TestSnapshotKeepsTheConfigurationsRegister(t *testing.T) {
	h := newOwner(t, "a")
	c := withW2(testConfiguration())
	c.Exceptions = []*pb.ShardException{{Key: "hot", Shard: 1 << 24}}
	c.RetiredPartitions = []string{"old"}
	h.ok(cmdConfigure(c))
	h.ok(cmdConfigPromise(2, 3))
	h.ok(cmdConfigAccept(2, 3, config.WithoutVoter(c, "witness/w1")))
	h.ok(cmdConfigPromise(2, 4))
	var buf bytes.Buffer
	if err := h.m.View().WriteSnapshot(&buf); err != nil {
		t.Fatal(err)
	}
	m, err := ReadSnapshot(&buf)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := m.View().ConfigRegister(), h.m.View().ConfigRegister(); !got.Equal(want) || got.Promised.Round != 4 || got.Accepted.Round != 3 {
		t.Errorf("%v, want %v", got, want)
	}
	if !proto.Equal(m.View().Configuration(), c) {
		t.Error("another configuration")
	}
}

// TestStateHashSeesEveryFieldOfTheConfiguration: servers that differ in any of
// them have diverged.
func TestStateHashSeesEveryFieldOfTheConfiguration(t *testing.T) {
	hash := func(change func(*pb.ClusterConfiguration, *config.Register)) uint64 {
		h := newOwner(t)
		c := withW2(testConfiguration())
		r := config.Register{Promised: config.Ballot{Round: 2, Proposer: "x"}}
		change(c, &r)
		m := h.m
		m.configuration, m.configRegister, m.view = c, r, nil
		return m.fullHash()
	}
	base := hash(func(*pb.ClusterConfiguration, *config.Register) {})
	for name, change := range map[string]func(*pb.ClusterConfiguration, *config.Register){
		"previous voter": func(c *pb.ClusterConfiguration, _ *config.Register) { c.PreviousVoters[0].Incarnation++ },
		"exception": func(c *pb.ClusterConfiguration, _ *config.Register) {
			c.Exceptions = []*pb.ShardException{{Key: "k", Shard: 1 << 24}}
		},
		"retired":  func(c *pb.ClusterConfiguration, _ *config.Register) { c.RetiredPartitions = []string{"z"} },
		"promised": func(_ *pb.ClusterConfiguration, r *config.Register) { r.Promised.Proposer = "y" },
		"accepted": func(c *pb.ClusterConfiguration, r *config.Register) {
			r.Accepted, r.Proposed = r.Promised, config.Next(c)
		},
		"proposed": func(c *pb.ClusterConfiguration, r *config.Register) {
			r.Accepted, r.Proposed = r.Promised, config.WithoutVoter(c, "witness/w1")
		},
	} {
		if hash(change) == base {
			t.Errorf("%s: the hash is the same", name)
		}
	}
}
