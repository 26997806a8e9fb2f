package witness

import (
	"context"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/leaktest"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestMain(m *testing.M) { leaktest.VerifyTestMain(m) }

var (
	eu = register.Region{Name: "eu", Incarnation: 11}
	us = register.Region{Name: "us", Incarnation: 22}
)

const testD = 4 * time.Second

func TestPromotionByTheRules(t *testing.T) {
	r := newRig(t)
	yes := register.RuleNone
	if got := r.mustPrepare(t, prepareOf(eu, 1, "p", "q", "nope")); !same(got, yes, yes, register.RuleUnknownPartition) {
		t.Fatalf("first prepare: %v", got)
	}
	if got := r.mustAccept(t, acceptOf(eu, 1, 1, "p", "q", "nope")); !same(got, yes, yes, register.RuleUnknownPartition) {
		t.Fatalf("first accept: %v", got)
	}
	r.clock.Advance(testD - 1)
	r.suspects["eu"] = register.VerdictHealthy
	resp, err := r.prepare(t.Context(), prepareOf(us, 2, "p"))
	if err != nil {
		t.Fatal(err)
	}
	a := resp.GetAnswers()[0]
	if a.GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_V2_RUNNING || a.GetRemainingNs() != 1 || a.GetVerdict() != pb.Verdict_VERDICT_HEALTHY || resp.GetState().GetRound() != 5 {
		t.Errorf("V2: %v", resp)
	}
	r.clock.Advance(1)
	if got := r.mustPrepare(t, prepareOf(us, 2, "p")); !same(got, register.RuleV3Alive) {
		t.Errorf("V3: %v", got)
	}
	r.suspects["eu"] = register.VerdictCrashed
	if got := r.mustPrepare(t, prepareOf(us, 2, "p")); !same(got, yes) {
		t.Errorf("promotion: %v", got)
	}
	if got := r.mustAccept(t, acceptOf(eu, 1, 1, "p", "q")); !same(got, register.RuleV1Ballot, yes) {
		t.Errorf("the old owner's renewal: %v", got)
	}
	if got := r.mustAccept(t, acceptOf(us, 2, 2, "p")); !same(got, yes) {
		t.Errorf("the new owner's accept: %v", got)
	}
	if got := r.mustPrepare(t, prepareOf(eu, 9, "p")); !same(got, register.RuleV2Running) {
		t.Errorf("eu against the new owner: %v", got)
	}
}

func TestF38OneTransactionServesAllPartitions(t *testing.T) {
	r := newRig(t)
	calls := 0
	r.disk.set(func(string) error { calls++; return nil })
	before := r.self.writes
	r.mustPrepare(t, prepareOf(eu, 1, "p", "q"))
	r.mustAccept(t, acceptOf(eu, 1, 1, "p", "q"))
	if calls != 2 || r.self.writes != before+2 {
		t.Errorf("%d transactions and %d writes for two messages", calls, r.self.writes-before)
	}
	r.mustAccept(t, acceptOf(eu, 1, 1, "p", "q"))                                                  // renewals
	r.mustPrepare(t, prepareOf(us, 0, "p"))                                                        // refused
	r.mustPrepare(t, &pb.PrepareRequest{Header: header(eu), Dry: true, Partitions: []string{"p"}}) // asks only [F31]
	if calls != 2 || r.self.writes != before+2 {
		t.Errorf("renewal, refusal and dry run wrote: %d transactions", calls)
	}
}

func TestH5EveryClockStartsAnewAfterAStartAndAGap(t *testing.T) {
	r := newRig(t)
	r.mustAccept(t, acceptOf(eu, 1, 1, "p"))
	r.clock.Advance(time.Hour)
	r.Restart()
	if got := r.mustPrepare(t, prepareOf(us, 2, "p")); !same(got, register.RuleV2Running) {
		t.Errorf("after a clock gap: %v", got)
	}
	_ = r.store.close()
	again := start(t, r.dir, &disk{})
	defer func() { _ = again.store.close() }()
	if got := again.mustPrepare(t, prepareOf(us, 2, "p")); !same(got, register.RuleV2Running) {
		t.Errorf("after a restart: %v", got)
	}
	again.clock.Advance(testD)
	if got := again.mustPrepare(t, prepareOf(us, 2, "p")); !same(got, register.RuleNone) {
		t.Errorf("D after a restart: %v", got)
	}
}

func TestTwoValuesUnderOneBallotAlarm(t *testing.T) {
	r := newRig(t)
	r.mustAccept(t, acceptOf(eu, 1, 1, "p"))
	if got := r.mustAccept(t, acceptOf(eu, 1, 2, "p")); !same(got, register.RuleConflict) {
		t.Fatalf("conflict: %v", got)
	}
	_ = r.store.close()
	again := start(t, r.dir, &disk{})
	defer func() { _ = again.store.close() }()
	if got := again.mustAccept(t, acceptOf(eu, 1, 1, "p")); !same(got, register.RuleAlarm) {
		t.Errorf("an alarmed register answered after a restart: %v", got)
	}
	if got := again.mustPrepare(t, prepareOf(eu, 8, "p", "q")); !same(got, register.RuleAlarm, register.RuleNone) {
		t.Errorf("prepare: %v", got)
	}
}

func TestHeaders(t *testing.T) {
	r := newRig(t)
	for name, c := range map[string]struct {
		change func(*pb.VoteHeader)
		want   string
	}{
		"other cluster":    {func(h *pb.VoteHeader) { h.ClusterId = "x" }, `message of cluster`},
		"older version":    {func(h *pb.VoteHeader) { h.ConfigVersion = 0 }, `configuration`},
		"newer version":    {func(h *pb.VoteHeader) { h.ConfigVersion = 2 }, `configuration`},
		"new incarnation":  {func(h *pb.VoteHeader) { h.CandidateIncarnation = 99 }, "its data was made anew"},
		"no member":        {func(h *pb.VoteHeader) { h.Candidate = "mars" }, "is no region"},
		"a witness's name": {func(h *pb.VoteHeader) { h.Candidate = "w1" }, "is no region"},
		"nothing at all":   {func(h *pb.VoteHeader) { proto.Reset(h) }, `message of cluster`},
	} {
		req, acc := prepareOf(eu, 1, "p"), acceptOf(eu, 1, 1, "p")
		c.change(req.Header)
		c.change(acc.Header)
		_, err := r.prepare(t.Context(), req)
		_, err2 := r.accept(t.Context(), acc)
		for _, err := range []error{err, err2} {
			if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if r.registers["p"].Record != (register.Record{}) {
		t.Errorf("a refused message left %v", r.registers["p"].Record)
	}
}

func TestConfigure(t *testing.T) {
	r := start(t, t.TempDir(), &disk{})
	defer func() { _ = r.store.close() }()
	if _, err := r.prepare(t.Context(), prepareOf(eu, 1, "p")); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "headlease init") {
		t.Errorf("a vote without configuration: %v", err)
	}
	for name, c := range map[string]struct {
		change func(*pb.ClusterConfiguration)
		want   string
	}{
		"no id":             {func(c *pb.ClusterConfiguration) { c.ClusterId = "" }, "cluster_id"},
		"other name":        {func(c *pb.ClusterConfiguration) { c.ClusterName = "other" }, "cluster_name"},
		"not a member":      {func(c *pb.ClusterConfiguration) { c.Voters = c.Voters[:2] }, "voters"},
		"other incarnation": {func(c *pb.ClusterConfiguration) { c.Voters[2].Incarnation++ }, "remove the old member"},
	} {
		bad := r.configuration()
		c.change(bad)
		if _, err := r.configure(t.Context(), bad, "admin"); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if resp, err := r.configure(t.Context(), r.configuration(), "admin"); err != nil || resp.GetAlready() {
		t.Fatalf("configure: %v, %v", resp, err)
	}
	writes := r.self.writes
	if resp, err := r.configure(t.Context(), r.configuration(), "admin"); err != nil || !resp.GetAlready() || r.self.writes != writes {
		t.Errorf("again: %v, %v", resp, err)
	}
	other := r.configuration()
	other.ClusterId = "another"
	if _, err := r.configure(t.Context(), other, "admin"); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), `belongs to cluster "c" already`) {
		t.Errorf("another cluster: %v", err)
	}
	changed := r.configuration()
	changed.DNs++
	if _, err := r.configure(t.Context(), changed, "admin"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the same version with another D: %v", err)
	}
	d, err := r.describe(t.Context())
	if err != nil || !proto.Equal(d.GetConfiguration(), r.configuration()) || len(d.GetRegisters()) != 2 || len(d.GetPeers()) != 1 || len(d.GetRoundTrips()) != 1 || d.GetVersion() != "v" {
		t.Errorf("describe: %v, %v", d, err)
	}
	_ = r.store.close()
	again := start(t, r.dir, &disk{})
	defer func() { _ = again.store.close() }()
	if !proto.Equal(again.voter.configuration, r.configuration()) {
		t.Errorf("the configuration did not survive: %v", again.voter.configuration)
	}
}

// TestAgainstTheModel plays random messages, pauses and crashes to a voter on
// bbolt and to plain registers in memory, and compares every answer.
func TestAgainstTheModel(t *testing.T) {
	base := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp(base, "run")
		if err != nil {
			t.Fatal(err)
		}
		r := start(t, dir, &disk{})
		defer func() { _ = r.store.close() }()
		r.setUp(t)
		model := map[string]register.Register{}
		partition := rapid.SampledFrom([]string{"p", "q"})
		candidate := rapid.SampledFrom([]register.Region{eu, us})
		round := rapid.Uint64Range(1, 4)
		actions := map[string]func(*rapid.T){
			"prepare": func(t *rapid.T) {
				who, p := candidate.Draw(t, "who"), partition.Draw(t, "partition")
				req := prepareOf(who, round.Draw(t, "round"), p)
				req.Dry = rapid.Bool().Draw(t, "dry")
				for _, owner := range []string{"eu", "us"} {
					r.suspects[owner] = rapid.SampledFrom([]register.Verdict{register.VerdictHealthy, register.VerdictCrashed}).Draw(t, owner)
				}
				m, now := model[p], r.clock.Now()
				in := register.PrepareInput{Candidate: who, Ballot: register.BallotOf(req.GetBallot()), Dry: req.GetDry()}
				if !m.Accepted.IsZero() && !m.Value.Released() {
					in.Verdict = r.suspects[m.Value.Owner.Name]
				}
				d := m.Prepare(now, in)
				if d.Action == register.Write {
					rec, _ := register.Update(m.Record, d.Change)
					model[p] = m.Written(now, rec)
				}
				resp, err := r.prepare(context.Background(), req)
				if err != nil {
					t.Fatal(err)
				}
				want := register.PrepareAnswerOf(p, model[p], now, d.Rule, in.Verdict)
				if !proto.Equal(resp.GetAnswers()[0], want) {
					t.Fatalf("answered %v, want %v", resp.GetAnswers()[0], want)
				}
			},
			"accept": func(t *rapid.T) {
				who, p := candidate.Draw(t, "who"), partition.Draw(t, "partition")
				req := acceptOf(who, round.Draw(t, "round"), uint32(rapid.IntRange(1, 30).Draw(t, "epoch")/29+1), p)
				if rapid.Bool().Draw(t, "release") {
					req.Items[0].Value.Owner, req.Items[0].Value.OwnerIncarnation, req.Items[0].Value.Successor = "", 0, "us"
				}
				m, now := model[p], r.clock.Now()
				b, v := register.BallotOf(req.GetItems()[0].GetBallot()), register.ValueOf(req.GetItems()[0].GetValue())
				d := m.Accept(b, v)
				switch d.Action {
				case register.Renew:
					model[p], _ = m.Renewed(now, b, v)
				case register.Write, register.WriteAlarm:
					rec, _ := register.Update(m.Record, d.Change)
					model[p] = m.Written(now, rec)
				}
				resp, err := r.accept(context.Background(), req)
				if err != nil {
					t.Fatal(err)
				}
				if want := register.AcceptAnswerOf(p, model[p], now, d.Rule); !proto.Equal(resp.GetAnswers()[0], want) {
					t.Fatalf("answered %v, want %v", resp.GetAnswers()[0], want)
				}
			},
			"time": func(t *rapid.T) {
				r.clock.Advance(time.Duration(rapid.IntRange(0, int(3*testD)).Draw(t, "by")))
			},
			"crash": func(t *rapid.T) {
				before := r.state(0)
				crashed := copyData(t, r.dir)
				_ = r.store.close()
				r = start(t, crashed, &disk{})
				after := r.state(0)
				if after.GetPreviousLife() != before.GetLife() || after.GetWrites() != before.GetWrites()+1 || !proto.Equal(after.GetVoter(), before.GetVoter()) {
					t.Fatalf("after the crash %v, before %v", after, before)
				}
				for p, m := range model {
					model[p] = register.Restart(m.Record, r.clock.Now())
				}
			},
		}
		names := rapid.SampledFrom(slices.Sorted(maps.Keys(actions)))
		for range rapid.IntRange(1, 20).Draw(t, "steps") { // each costs a sync of the disk
			actions[names.Draw(t, "action")](t)
			for p, m := range model {
				if got := r.registers[p]; got != m {
					t.Fatalf("%s is %+v, want %+v", p, got, m)
				}
			}
		}
	})
}
