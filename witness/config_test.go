package witness

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func prepareConfigOf(version, round uint64) *pb.PrepareConfigRequest {
	return &pb.PrepareConfigRequest{ClusterId: "c", Version: version, Ballot: &pb.ConfigBallot{Round: round, Proposer: "x"}}
}

func acceptConfigOf(version, round uint64, next *pb.ClusterConfiguration) *pb.AcceptConfigRequest {
	return &pb.AcceptConfigRequest{ClusterId: "c", Version: version, Ballot: &pb.ConfigBallot{Round: round, Proposer: "x"}, Proposed: next}
}

func withW2(c *pb.ClusterConfiguration) *pb.ClusterConfiguration {
	return config.WithVoter(c, &pb.Voter{Id: "witness/w2", Incarnation: 9})
}

// mismatch is what a refusal says about versions.
func mismatch(err error) *pb.VersionMismatch {
	for _, d := range status.Convert(err).Details() {
		if m, ok := d.(*pb.VersionMismatch); ok {
			return m
		}
	}
	return nil
}

// TestH9PromisesAndProposalsOutliveARestart: what a voter has promised and
// accepted for the next configuration is on disk before it is answered.
func TestH9PromisesAndProposalsOutliveARestart(t *testing.T) {
	r := newRig(t)
	next := withW2(r.configuration())
	if a, err := r.prepareConfig(t.Context(), prepareConfigOf(1, 3)); err != nil || !a.GetPromised() || a.GetVoter().GetIncarnation() == 0 {
		t.Fatal(a, err)
	}
	if a, err := r.acceptConfig(t.Context(), acceptConfigOf(1, 3, next)); err != nil || !a.GetAccepted() {
		t.Fatal(a, err)
	}
	if a, err := r.prepareConfig(t.Context(), prepareConfigOf(1, 7)); err != nil || !a.GetPromised() || !proto.Equal(a.GetRegister().GetProposed(), next) {
		t.Fatalf("a later proposer does not learn the accepted one: %v %v", a, err)
	}
	again := start(t, copyData(t, r.dir), &disk{})
	defer func() { _ = again.store.close() }()
	if a, err := again.prepareConfig(t.Context(), prepareConfigOf(1, 5)); err != nil || a.GetPromised() || a.GetRegister().GetPromised().GetRound() != 7 {
		t.Errorf("the promise was forgotten: %v %v", a, err)
	}
	if a, err := again.acceptConfig(t.Context(), acceptConfigOf(1, 3, next)); err != nil || a.GetAccepted() {
		t.Errorf("taken below the promise: %v %v", a, err)
	}
	d, err := again.describe(t.Context())
	if err != nil || d.GetConfiguration().GetVersion() != 1 || !proto.Equal(d.GetConfigRegister().GetProposed(), next) {
		t.Errorf("%v %v: a proposal is no configuration before it is decided", d, err)
	}
}

func TestH8AProposalThatIsNoStepIsRefused(t *testing.T) {
	r := newRig(t)
	two := withW2(r.configuration())
	two.Voters = append(two.Voters, &pb.Voter{Id: "witness/w3", Incarnation: 10})
	writes := r.self.writes
	_, err := r.acceptConfig(t.Context(), acceptConfigOf(1, 3, two))
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "one step adds or removes one member") {
		t.Error(err)
	}
	if r.self.writes != writes {
		t.Error("a refusal was written")
	}
}

// TestH10OneVersionIsAnswered: a newer decided configuration is stored before
// anything is answered under it, lower ones are refused with it attached, and
// its own messages are refused until then.
func TestH10OneVersionIsAnswered(t *testing.T) {
	r := newRig(t)
	next := withW2(r.configuration())
	newer := prepareOf(eu, 1, "p")
	newer.Header.ConfigVersion = 2
	if _, err := r.prepare(t.Context(), newer); mismatch(err) == nil || mismatch(err).GetNewer() != nil || mismatch(err).GetVersion() != 1 {
		t.Fatalf("a message of the next version, before it is stored: %v", err)
	}
	if a, err := r.configure(t.Context(), next, "admin"); err != nil || a.GetAlready() || a.GetVersion() != 2 {
		t.Fatal(a, err)
	}
	if _, err := r.prepare(t.Context(), prepareOf(eu, 1, "p")); !proto.Equal(mismatch(err).GetNewer(), next) {
		t.Errorf("a message of the version before: %v", err)
	}
	if _, err := r.prepareConfig(t.Context(), prepareConfigOf(1, 3)); !proto.Equal(mismatch(err).GetNewer(), next) {
		t.Errorf("a decision of the version before: %v", err)
	}
	if _, err := r.acceptAgain(t.Context(), &pb.AcceptAgainRequest{ClusterId: "c", Version: 1}); !proto.Equal(mismatch(err).GetNewer(), next) {
		t.Errorf("a re-accept of the version before: %v", err)
	}
	if got := r.mustPrepare(t, newer); !same(got, register.RuleNone) {
		t.Errorf("under the stored version: %v", got)
	}
	if a, err := r.configure(t.Context(), r.configuration(), "admin"); err != nil || !a.GetAlready() || a.GetVersion() != 2 {
		t.Errorf("an older configuration: %v %v", a, err)
	}
	again := start(t, copyData(t, r.dir), &disk{})
	defer func() { _ = again.store.close() }()
	if again.voter.configuration.GetVersion() != 2 || !again.configRegister.Equal(config.Register{}) {
		t.Errorf("after a restart: %v, %v", again.voter.configuration, again.configRegister)
	}
}

// TestRule5AJoiningVoterStartsEmptyAndVotesAtOnce under a version above 1.
func TestRule5AJoiningVoterStartsEmptyAndVotesAtOnce(t *testing.T) {
	r := start(t, t.TempDir(), &disk{})
	defer func() { _ = r.store.close() }()
	before := r.configuration()
	before.Voters = before.Voters[:2]
	before.AllowEvenWitnesses = true
	before.Version = 4
	if _, err := r.configure(t.Context(), before, "admin"); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "no member of configuration 4") {
		t.Errorf("a configuration without this voter: %v", err)
	}
	joined := config.WithVoter(before, r.voter.voter())
	if _, err := r.configure(t.Context(), joined, "admin"); err != nil {
		t.Fatal(err)
	}
	req := prepareOf(us, 9, "p")
	req.Header.ConfigVersion = 5
	if got := r.mustPrepare(t, req); !same(got, register.RuleNone) {
		t.Error(got)
	}
}

// TestAgainIsExemptFromV2: the value that is accepted as it is changes neither
// owner nor epoch.
func TestAgainIsExemptFromV2(t *testing.T) {
	r := newRig(t)
	r.mustAccept(t, acceptOf(eu, 1, 1, "p"))
	operator := &pb.Ballot{Round: 5, Region: config.Operator, Incarnation: 77}
	a, err := r.prepareAgain(context.Background(), &pb.PrepareAgainRequest{ClusterId: "c", Version: 1, Ballot: operator, Partitions: []string{"p", "q", "nope"}})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []register.Rule{register.RuleNone, register.RuleNone, register.RuleUnknownPartition} {
		if got := register.RuleOf(a.GetAnswers()[i].GetRefusal().GetRule()); got != want {
			t.Errorf("answer %d: %v, want %v", i, got, want)
		}
	}
	r.clock.Advance(testD)
	b, err := r.acceptAgain(context.Background(), &pb.AcceptAgainRequest{ClusterId: "c", Version: 1, Items: []*pb.AcceptItem{
		{Partition: "p", Ballot: operator, Value: value(eu, 1)},
		{Partition: "q", Ballot: operator, Value: &pb.Value{DNs: int64(testD), Reason: "never owned"}},
	}})
	if err != nil || b.GetAnswers()[0].GetRefusal() != nil || b.GetAnswers()[1].GetRefusal() != nil {
		t.Fatal(b, err)
	}
	if left := r.registers["p"].Remaining(r.clock.Now()); left != testD {
		t.Errorf("the clock has %v left; an accept starts it at full D", left)
	}
	if got := r.mustPrepare(t, prepareOf(us, 9, "q")); !same(got, register.RuleNone) {
		t.Errorf("a register that nobody has owned: %v", got)
	}
}
