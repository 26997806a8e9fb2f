package witness

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/detector/phi"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/leaktest"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestMain(m *testing.M) { leaktest.VerifyTestMain(m) }

var (
	eu = register.Region{Name: "eu", Incarnation: 11}
	us = register.Region{Name: "us", Incarnation: 22}
)

const testD = 4 * time.Second

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// disk is a fault.Disk that asks a function, if set.
type disk struct {
	mu     sync.Mutex
	before func(op string) error
}

func (d *disk) Before(op string) error {
	d.mu.Lock()
	before := d.before
	d.mu.Unlock()
	if before == nil {
		return nil
	}
	return before(op)
}

func (d *disk) set(before func(op string) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.before = before
}

// suspects holds every region to be as said; unknown else.
type suspects map[string]register.Verdict

func (s suspects) Suspicion(region string) phi.Suspicion {
	return phi.Suspicion{Verdict: s[region]}
}
func (suspects) Reports() []*pb.PeerReport   { return []*pb.PeerReport{{Region: "eu"}} }
func (suspects) RoundTrips() []*pb.RoundTrip { return []*pb.RoundTrip{{Peer: "eu-1", RttNs: 7}} }

// rig is a voter on a store in a directory.
type rig struct {
	*voter
	clock    *clock.Manual
	suspects suspects
	disk     *disk
	dir      string
	failures []error
	exits    []int
}

type testing_ interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

// start opens dir's data in a new voter, as a process does.
func start(t testing_, dir string, d *disk) *rig {
	t.Helper()
	r := &rig{clock: &clock.Manual{}, suspects: suspects{}, disk: d, dir: dir}
	r.voter = &voter{
		id: "witness/w1", name: "w1", cluster: "test", version: "v", clock: r.clock, suspects: r.suspects, logger: quiet(),
		exit:       func(code int) { r.exits = append(r.exits, code) },
		failed:     func(err error) { r.failures = append(r.failures, err) },
		configured: func(*pb.ClusterConfiguration) {},
	}
	s, got, err := openStore(storeConfig{dir: dir, name: "w1", cluster: "test", disk: d})
	if err != nil {
		t.Fatal(err)
	}
	r.load(s, got)
	return r
}

func (r *rig) configuration() *pb.ClusterConfiguration {
	return &pb.ClusterConfiguration{
		ClusterId: "c", ClusterName: "test", Version: 1, Shards: 256, DNs: int64(testD),
		Voters: []*pb.Voter{
			{Id: "region/eu", Incarnation: uint64(eu.Incarnation)}, {Id: "region/us", Incarnation: uint64(us.Incarnation)},
			{Id: "witness/w1", Incarnation: uint64(r.self.incarnation)},
		},
		Partitions: []*pb.PartitionSpec{
			{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 127}}, Prefer: []string{"eu", "us"}},
			{Name: "q", Shards: []*pb.ShardRange{{First: 128, Last: 255}}, Prefer: []string{"us", "eu"}},
		},
	}
}

func (r *rig) setUp(t testing_) *rig {
	t.Helper()
	if _, err := r.configure(context.Background(), r.configuration()); err != nil {
		t.Fatal(err)
	}
	return r
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := start(t, t.TempDir(), &disk{}).setUp(t)
	t.Cleanup(func() { _ = r.store.close() })
	return r
}

func header(who register.Region) *pb.VoteHeader {
	return &pb.VoteHeader{ClusterId: "c", ConfigVersion: 1, Candidate: who.Name, CandidateIncarnation: uint64(who.Incarnation), Round: 5}
}

func ballot(round uint64, who register.Region) register.Ballot {
	return register.Ballot{Round: round, Region: who.Name, Incarnation: who.Incarnation}
}

func value(who register.Region, epoch uint32) *pb.Value {
	return &pb.Value{Owner: who.Name, OwnerIncarnation: uint64(who.Incarnation), Epoch: epoch, DNs: int64(testD)}
}

func prepareOf(who register.Region, round uint64, partitions ...string) *pb.PrepareRequest {
	return &pb.PrepareRequest{Header: header(who), Ballot: ballot(round, who).Proto(), Partitions: partitions}
}

func acceptOf(who register.Region, round uint64, epoch uint32, partitions ...string) *pb.AcceptRequest {
	req := &pb.AcceptRequest{Header: header(who)}
	for _, p := range partitions {
		req.Items = append(req.Items, &pb.AcceptItem{Partition: p, Ballot: ballot(round, who).Proto(), Value: value(who, epoch)})
	}
	return req
}

// rules of the answers, in order.
func (r *rig) mustPrepare(t testing_, req *pb.PrepareRequest) []register.Rule {
	t.Helper()
	resp, err := r.prepare(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	var out []register.Rule
	for _, a := range resp.GetAnswers() {
		out = append(out, register.RuleOf(a.GetRefusal().GetRule()))
	}
	return out
}

func (r *rig) mustAccept(t testing_, req *pb.AcceptRequest) []register.Rule {
	t.Helper()
	resp, err := r.accept(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	var out []register.Rule
	for _, a := range resp.GetAnswers() {
		out = append(out, register.RuleOf(a.GetRefusal().GetRule()))
	}
	return out
}

func same(a []register.Rule, b ...register.Rule) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

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

func TestF5LivesAndWritesShowOldData(t *testing.T) {
	r := newRig(t)
	r.mustAccept(t, acceptOf(eu, 1, 1, "p"))
	first := r.state(0)
	copied := copyData(t, r.dir)
	r.mustAccept(t, acceptOf(eu, 2, 1, "p"))
	last := r.state(0)
	if last.GetWrites() != first.GetWrites()+1 {
		t.Errorf("writes went from %d to %d", first.GetWrites(), last.GetWrites())
	}
	old := start(t, copied, &disk{})
	defer func() { _ = old.store.close() }()
	s := old.state(0)
	if s.GetPreviousLife() != first.GetLife() || s.GetLife() == first.GetLife() || s.GetVoter().GetIncarnation() != first.GetVoter().GetIncarnation() {
		t.Errorf("the line of lives broke: %v after %v", s, first)
	}
	if s.GetWrites() != first.GetWrites()+1 {
		t.Errorf("the start is not counted: %v after %v", s, first)
	}
}

// TestF5EveryEarlierLifeIsOfTheLine: a region that last asked many restarts
// ago still finds the life it knows; a copy's later lives are strangers to the
// original.
func TestF5EveryEarlierLifeIsOfTheLine(t *testing.T) {
	r := newRig(t)
	lives := []uint64{r.state(0).GetLife()}
	dir := r.dir
	for range 3 {
		dir = copyData(t, dir)
		again := start(t, dir, &disk{})
		if err := again.store.close(); err != nil {
			t.Fatal(err)
		}
		lives = append(lives, again.state(0).GetLife())
		for _, life := range lives {
			if !again.answering(&pb.VoteHeader{SeenLife: life}).GetContinues() {
				t.Errorf("after %d starts life %x of %x is not of the line", len(lives), life, lives)
			}
		}
		for _, strange := range []uint64{0, 12345} {
			if again.answering(&pb.VoteHeader{SeenLife: strange}).GetContinues() {
				t.Errorf("life %x is of the line", strange)
			}
		}
	}
	if r.answering(&pb.VoteHeader{SeenLife: lives[3]}).GetContinues() {
		t.Error("the original knows a life of its copy")
	}
}

// copyData is what a crash at this moment leaves behind.
func copyData(t testing_, dir string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, storeFile))
	if err != nil {
		t.Fatal(err)
	}
	to, err := os.MkdirTemp(filepath.Dir(dir), "crash")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(to, storeFile), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return to
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

func TestNeverAnsweredBeforeDurable(t *testing.T) {
	r := newRig(t)
	entered, release := make(chan struct{}), make(chan struct{})
	var before string
	r.disk.set(func(string) error {
		before = copyData(t, r.dir)
		close(entered)
		<-release
		return nil
	})
	type answer struct {
		resp *pb.PrepareResponse
		err  error
	}
	answers := make(chan answer, 1)
	go func() {
		resp, err := r.prepare(context.Background(), prepareOf(eu, 3, "p"))
		answers <- answer{resp, err}
	}()
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.describe(ctx); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a caller with a dead context waits for the disk: %v", err)
	}
	select {
	case a := <-answers:
		t.Fatalf("answered before it was durable: %v", a)
	default:
	}
	close(release)
	a := <-answers
	if a.err != nil || a.resp.GetAnswers()[0].GetRefusal() != nil {
		t.Fatalf("answer: %v", a)
	}
	after := copyData(t, r.dir) // a crash right after the answer
	for dir, want := range map[string]register.Ballot{before: {}, after: ballot(3, eu)} {
		s := start(t, dir, &disk{})
		if got := s.registers["p"].Promised; got != want {
			t.Errorf("promised on disk %v, want %v", got, want)
		}
		_ = s.store.close()
	}
}

func TestAFailedWriteSilencesTheVoter(t *testing.T) {
	r := newRig(t)
	r.mustPrepare(t, prepareOf(eu, 1, "p"))
	broken := errors.New("input/output error")
	r.disk.set(func(string) error { return broken })
	if _, err := r.accept(t.Context(), acceptOf(eu, 1, 1, "p")); status.Code(err) != codes.Unavailable {
		t.Fatalf("accept on a broken disk: %v", err)
	}
	if len(r.failures) != 1 || !errors.Is(r.failures[0], broken) {
		t.Errorf("failures told: %v", r.failures)
	}
	r.disk.set(nil) // it works again, but nobody knows what it holds
	for name, call := range map[string]func() error{
		"accept":   func() error { _, err := r.accept(t.Context(), acceptOf(eu, 1, 1, "p")); return err },
		"prepare":  func() error { _, err := r.prepare(t.Context(), prepareOf(eu, 2, "p")); return err },
		"describe": func() error { _, err := r.describe(t.Context()); return err },
		"dry": func() error {
			_, err := r.prepare(t.Context(), &pb.PrepareRequest{Header: header(eu), Dry: true})
			return err
		},
	} {
		if err := call(); status.Code(err) != codes.Unavailable {
			t.Errorf("%s after the failure: %v", name, err)
		}
	}
	if r.registers["p"].Accepted != (register.Ballot{}) {
		t.Error("the failed value was installed")
	}
}

// slowStore is a durable that takes its time.
type slowStore struct{ takes time.Duration }

func (s slowStore) write(map[string]register.Record, uint64) error { time.Sleep(s.takes); return nil }
func (s slowStore) configure(config.Voter, uint64) error {
	time.Sleep(s.takes)
	return nil
}
func (s slowStore) decide(config.Register, uint64) error { time.Sleep(s.takes); return nil }
func (slowStore) close() error                           { return nil }

func TestF30AHangingDiskEndsTheProcess(t *testing.T) {
	for _, c := range []struct {
		takes time.Duration
		exits int
	}{{storeLimit - time.Millisecond, 0}, {storeLimit + time.Millisecond, 1}, {time.Hour, 1}} {
		synctest.Test(t, func(t *testing.T) {
			var exits []int
			v := &voter{
				id: "witness/w1", name: "w1", cluster: "test", clock: clock.NewRuntime(), suspects: suspects{}, logger: quiet(),
				exit: func(code int) { exits = append(exits, code) }, failed: func(error) {}, configured: func(*pb.ClusterConfiguration) {},
			}
			v.load(slowStore{c.takes}, contents{identity: identity{incarnation: 1}})
			r := &rig{voter: v}
			r.setUp(t)
			if len(exits) != c.exits || (c.exits == 1 && exits[0] != exitDiskHangs) {
				t.Errorf("a call of %v: exits %v, want %d", c.takes, exits, c.exits)
			}
		})
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
		if _, err := r.configure(t.Context(), bad); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if resp, err := r.configure(t.Context(), r.configuration()); err != nil || resp.GetAlready() {
		t.Fatalf("configure: %v, %v", resp, err)
	}
	writes := r.self.writes
	if resp, err := r.configure(t.Context(), r.configuration()); err != nil || !resp.GetAlready() || r.self.writes != writes {
		t.Errorf("again: %v, %v", resp, err)
	}
	other := r.configuration()
	other.ClusterId = "another"
	if _, err := r.configure(t.Context(), other); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), `belongs to cluster "c" already`) {
		t.Errorf("another cluster: %v", err)
	}
	changed := r.configuration()
	changed.DNs++
	if _, err := r.configure(t.Context(), changed); status.Code(err) != codes.FailedPrecondition {
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
