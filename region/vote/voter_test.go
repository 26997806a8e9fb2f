package vote

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const d = 4 * time.Second

var errLost = errors.New("leadership lost: outcome unknown")

// group is a region's Raft group of one, over the shipped state machine, whose
// commits and checks the test can hold back.
type group struct {
	mu      sync.Mutex
	machine *state.Machine
	index   uint64
	term    uint64
	voter   *Voter
	hold    chan struct{} // commits wait for it; nil: they do not
	fate    error         // what a held commit comes to; nil: it commits
	checks  chan struct{} // checks wait for it; nil: they pass
	stale   bool
}

func (g *group) ProposeUrgent(_ context.Context, cmd *pb.Command) (*pb.CommandResult, error) {
	g.mu.Lock()
	hold := g.hold
	g.mu.Unlock()
	if hold != nil {
		<-hold
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fate != nil && hold != nil {
		return nil, g.fate
	}
	return g.apply(cmd), nil
}

func (g *group) apply(cmd *pb.Command) *pb.CommandResult {
	g.index++
	res, events := g.machine.Apply(g.index, g.term, cmd)
	g.voter.Applied(events)
	return res
}

func (g *group) Check(ctx context.Context) (uint64, error) {
	g.mu.Lock()
	wait := g.checks
	g.mu.Unlock()
	if wait != nil {
		select {
		case <-wait:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.term, nil
}

func (g *group) PulseFresh(instant.Instant) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.stale
}

func (g *group) View() state.View {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.machine.View()
}

// elect begins the next term: tables are built anew.
func (g *group) elect() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.voter.Deposed(g.term)
	g.term++
	g.apply(&pb.Command{Term: g.term, Kind: &pb.Command_BeginTerm{BeginTerm: &pb.BeginTermCommand{Server: "eu-1"}}})
	g.voter.Begin(g.term, g.machine.View())
}

type verdicts map[string]register.Verdict

func (v verdicts) Verdict(region string) register.Verdict { return v[region] }

const own, rival = 7, 8

func conf() *pb.ClusterConfiguration {
	return &pb.ClusterConfiguration{
		ClusterId: "c", ClusterName: "c", Version: 1, Shards: 1, DNs: int64(d),
		Voters:     []*pb.Voter{{Id: "region/eu", Incarnation: own}, {Id: "region/us", Incarnation: rival}, {Id: "witness/w", Incarnation: 9}},
		Partitions: []*pb.PartitionSpec{{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 0}}, Prefer: []string{"eu", "us"}}},
	}
}

// newGroup returns a configured group that leads, in a synctest bubble.
func newGroup(t *testing.T, v verdicts) *group {
	t.Helper()
	g := &group{machine: state.New(), term: 0}
	g.voter = New(Config{
		Region: "eu", Raft: g, Detector: v, Clock: clock.NewRuntime(),
		NeverApplied: func(err error) bool { return !errors.Is(err, errLost) },
	})
	for _, cmd := range []*pb.Command{
		{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: "eu", Incarnation: own}}},
		{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: conf()}}},
		{Kind: &pb.Command_RaiseLevel{RaiseLevel: &pb.RaiseLevelCommand{Level: state.MaxLevel}}},
	} {
		if res := g.apply(cmd); res.GetError() != nil {
			t.Fatal(res)
		}
	}
	g.elect()
	return g
}

func header(region string, inc uint64) *pb.VoteHeader {
	return &pb.VoteHeader{ClusterId: "c", ConfigVersion: 1, Candidate: region, CandidateIncarnation: inc, Round: 1}
}

func ballot(round uint64, region string, inc uint64) *pb.Ballot {
	return &pb.Ballot{Round: round, Region: region, Incarnation: inc}
}

func value(region string, inc uint64, epoch uint32) *pb.Value {
	return &pb.Value{Owner: region, OwnerIncarnation: inc, Epoch: epoch, DNs: int64(d)}
}

func (g *group) prepare(ctx context.Context, round uint64, dry bool) (*pb.PrepareAnswer, error) {
	res, err := g.voter.Prepare(ctx, &pb.PrepareRequest{Header: header("us", rival), Ballot: ballot(round, "us", rival), Dry: dry, Partitions: []string{"p"}})
	if err != nil {
		return nil, err
	}
	return res.GetAnswers()[0], nil
}

func (g *group) accept(ctx context.Context, round uint64, region string, inc uint64, epoch uint32) (*pb.AcceptAnswer, error) {
	res, err := g.voter.Accept(ctx, &pb.AcceptRequest{Header: header(region, inc), Items: []*pb.AcceptItem{
		{Partition: "p", Ballot: ballot(round, region, inc), Value: value(region, inc, epoch)},
	}})
	if err != nil {
		return nil, err
	}
	return res.GetAnswers()[0], nil
}

func TestPromiseAcceptRenew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		p, err := g.prepare(t.Context(), 5, false)
		if err != nil || p.GetRefusal() != nil || p.GetRegister().GetPromised().GetRound() != 5 {
			t.Fatalf("promise: %v, %v", p, err)
		}
		for range 2 { // the first one writes, the second is a renewal
			a, err := g.accept(t.Context(), 5, "us", rival, 1)
			if err != nil || a.GetRefusal() != nil {
				t.Fatalf("accept: %v, %v", a, err)
			}
			time.Sleep(d / 2)
		}
		// Renewed d/2 ago: a rival's head lease is running for d/2 more.
		res, err := g.voter.Prepare(t.Context(), &pb.PrepareRequest{Header: header("eu", own), Ballot: ballot(6, "eu", own), Partitions: []string{"p"}})
		if err != nil {
			t.Fatal(err)
		}
		r := res.GetAnswers()[0].GetRefusal()
		if r.GetRule() != pb.RefusalRule_REFUSAL_RULE_V2_RUNNING || time.Duration(r.GetRemainingNs()) != d/2 {
			t.Fatalf("want V2 for %v, have %v", d/2, r)
		}
	})
}

func TestDryPrepareWritesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		before := g.View().AppliedIndex()
		p, err := g.prepare(t.Context(), 0, true)
		if err != nil || p.GetRefusal() != nil {
			t.Fatalf("%v, %v", p, err)
		}
		if after := g.View().AppliedIndex(); after != before {
			t.Fatalf("a dry Prepare wrote: index %d after %d", after, before)
		}
	})
}

// TestH5ANewTermCountsEverythingAsAcceptedNow: clocks are full at the start of
// each term, also this server's second one, and after a clock gap.
func TestH5ANewTermCountsEverythingAsAcceptedNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		if _, err := g.accept(t.Context(), 3, "eu", own, 1); err != nil {
			t.Fatal(err)
		}
		for _, restart := range []func(){g.elect, g.elect, g.voter.ClockGap} {
			time.Sleep(2 * d)
			if p, _ := g.prepare(t.Context(), 0, true); p.GetRefusal() != nil {
				t.Fatalf("after 2 D: %v", p)
			}
			restart()
			p, err := g.prepare(t.Context(), 0, true)
			if err != nil || p.GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_V2_RUNNING || time.Duration(p.GetRemainingNs()) != d {
				t.Fatalf("after a restart of the clocks: %v, %v", p, err)
			}
		}
	})
}

func TestV3AsksTheOwnDetector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := verdicts{"eu": register.VerdictHealthy}
		g := newGroup(t, v)
		if _, err := g.accept(t.Context(), 3, "eu", own, 1); err != nil {
			t.Fatal(err)
		}
		time.Sleep(d)
		if p, _ := g.prepare(t.Context(), 5, false); p.GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_V3_ALIVE {
			t.Fatalf("the owner is heard: %v", p)
		}
		v["eu"] = register.VerdictCrashed
		if p, _ := g.prepare(t.Context(), 5, false); p.GetRefusal() != nil {
			t.Fatalf("the owner is silent: %v", p)
		}
	})
}

func TestOneBallotWithTwoValuesAlarms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		if _, err := g.accept(t.Context(), 3, "eu", own, 1); err != nil {
			t.Fatal(err)
		}
		a, err := g.accept(t.Context(), 3, "eu", own, 2)
		if err != nil || a.GetRefusal() == nil {
			t.Fatalf("%v, %v", a, err)
		}
		g.elect() // the alarm is durable
		if a, _ := g.accept(t.Context(), 9, "eu", own, 3); a.GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_ALARM {
			t.Fatalf("an alarmed register answered: %v", a)
		}
	})
}

// TestH10AVoteOfTheVersionBeforeTakesNoEffect: what was judged under c and is
// proposed or checked when c+1 is stored is neither done nor answered with yes.
func TestH10AVoteOfTheVersionBeforeTakesNoEffect(t *testing.T) {
	next := config.WithVoter(conf(), &pb.Voter{Id: "witness/w2", Incarnation: 10})
	store := &pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: next}}}
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		g.mu.Lock()
		g.hold = make(chan struct{})
		hold := g.hold
		g.mu.Unlock()
		var p *pb.PrepareAnswer
		done := make(chan error, 1)
		go func() {
			var err error
			p, err = g.prepare(t.Context(), 5, false)
			done <- err
		}()
		synctest.Wait() // the promise is proposed
		g.mu.Lock()
		g.apply(store)
		g.mu.Unlock()
		close(hold)
		if err := <-done; err != nil || register.RuleOf(p.GetRefusal().GetRule()) != register.RuleRetry || p.GetRegister().GetPromised() != nil {
			t.Errorf("promise: %v, %v", p, err)
		}
		var version *config.VersionError
		if _, err := g.prepare(t.Context(), 6, true); !errors.As(err, &version) || version.Newer.GetVersion() != 2 {
			t.Errorf("a message of the version before: %v", err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		if a, err := g.accept(t.Context(), 5, "us", rival, 1); err != nil || a.GetRefusal() != nil {
			t.Fatal(a, err)
		}
		g.mu.Lock()
		g.checks = make(chan struct{})
		checks := g.checks
		g.mu.Unlock()
		done := make(chan error, 1)
		go func() {
			_, err := g.accept(t.Context(), 5, "us", rival, 1)
			done <- err
		}()
		synctest.Wait() // the renewal waits for its leadership check
		g.mu.Lock()
		g.apply(store)
		g.mu.Unlock()
		close(checks)
		if err := <-done; !errors.As(err, new(*config.VersionError)) {
			t.Errorf("renewal: %v", err)
		}
	})
}

// TestAgain: the operator's Prepare is exempt from V2, and its Accept restarts
// the clock.
func TestAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		if a, err := g.accept(t.Context(), 5, "us", rival, 1); err != nil || a.GetRefusal() != nil {
			t.Fatal(a, err)
		}
		before, err := g.voter.Registers()
		if err != nil {
			t.Fatal(err)
		}
		b := &pb.Ballot{Round: 9, Region: config.Operator, Incarnation: 1}
		p, err := g.voter.PrepareAgain(t.Context(), &pb.PrepareAgainRequest{ClusterId: "c", Version: 1, Ballot: b, Partitions: []string{"p"}})
		if err != nil || p.GetAnswers()[0].GetRefusal() != nil || p.GetVoter().GetIncarnation() != own {
			t.Fatal(p, err)
		}
		time.Sleep(d / 2) // virtual
		a, err := g.voter.AcceptAgain(t.Context(), &pb.AcceptAgainRequest{ClusterId: "c", Version: 1, Items: []*pb.AcceptItem{{Partition: "p", Ballot: b, Value: value("us", rival, 1)}}})
		if err != nil || a.GetAnswers()[0].GetRefusal() != nil {
			t.Fatal(a, err)
		}
		regs, err := g.voter.Registers()
		if err != nil {
			t.Fatal(err)
		}
		if r := regs["p"]; r.Accepted != register.BallotOf(b) || r.Value.Epoch != 1 || r.Since.Sub(before["p"].Since) != d/2 {
			t.Errorf("%+v after %+v", r, before["p"])
		}
	})
}
