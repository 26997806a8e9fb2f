package run

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
	"github.com/headlease/headlease/region/vote"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	d   = 4 * time.Second
	rho = 0.01
	own = 7
)

// hold is how long a round's head lease lasts from its start.
var hold = campaign.Hold(d, rho)

var errLost = errors.New("the answer is lost")

// rig is the campaign of region eu with its own shipped voter over a Raft
// group of one, and two scripted witnesses.
type rig struct {
	t         *testing.T
	clock     clock.Clock
	shell     *Shell
	voter     *vote.Voter
	witnesses map[string]*witness

	mu      sync.Mutex
	machine *state.Machine
	index   uint64
	term    uint64
	gate    chan struct{} // commits wait for it; nil: they do not
	stale   bool
	heads   []head
}

// head is what Heads was told, and when; until is zero for a lapse.
type head struct {
	epoch     fence.Epoch
	at, until instant.Instant
}

// start runs a rig that leads, until the test ends.
func start(t *testing.T) *rig {
	t.Helper()
	return startWith(t, func(*pb.ClusterConfiguration, *Config) {})
}

// startWith is start with a changed configuration.
func startWith(t *testing.T, change func(*pb.ClusterConfiguration, *Config)) *rig {
	t.Helper()
	r := &rig{t: t, clock: clock.NewRuntime(), machine: state.New(), witnesses: map[string]*witness{}}
	conf := &pb.ClusterConfiguration{
		ClusterId: "c", ClusterName: "c", Version: 1, Shards: 1, DNs: int64(d),
		Voters:     []*pb.Voter{{Id: "region/eu", Incarnation: own}},
		Partitions: []*pb.PartitionSpec{{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 0}}, Prefer: []string{"eu"}}},
	}
	for i, id := range []string{"witness/w1", "witness/w2"} {
		w := &witness{id: id, clock: r.clock, incarnation: uint64(20 + i), life: 100, lives: []uint64{100}, writes: 1, regs: map[string]register.Register{}}
		r.witnesses[id] = w
		conf.Voters = append(conf.Voters, &pb.Voter{Id: id, Incarnation: w.incarnation})
	}
	never := func(err error) bool { return !errors.Is(err, context.Canceled) }
	r.voter = vote.New(vote.Config{Region: "eu", Raft: r, Detector: healthy{}, Clock: r.clock, NeverApplied: never})
	cfg := Config{
		Region: "eu", Own: r.voter, Remote: r, Raft: r, Heads: r, Clock: r.clock, Rho: rho,
		Verdict: func(string) register.Verdict { return register.VerdictUnknown },
		Rand:    rand.New(rand.NewPCG(1, 2)), NeverApplied: never,
	}
	change(conf, &cfg)
	r.shell = New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.shell.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		r.shell.Begin(99, r.View()) // a stopped shell begins nothing
		synctest.Wait()
	})
	r.must(&pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: "eu", Incarnation: own}}})
	r.must(&pb.Command{Kind: &pb.Command_RaiseLevel{RaiseLevel: &pb.RaiseLevelCommand{Level: state.MaxLevel}}})
	r.must(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: conf}}})
	r.each(func(w *witness) { w.conf = conf })
	return r
}

// Configure stores a decided configuration.
func (w *witness) Configure(_ context.Context, req *pb.ConfigureRequest) (*pb.ConfigureResponse, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	next, stored, err := config.Voter{Decided: w.conf}.Learn(&pb.Voter{Id: w.id, Incarnation: w.incarnation}, req.GetConfiguration())
	if err != nil {
		return nil, err
	}
	w.conf = next.Decided
	return &pb.ConfigureResponse{Already: !stored, Version: w.conf.GetVersion()}, nil
}

// check refuses what is of another version, as the services do; w.mu is held.
func (w *witness) check(h *pb.VoteHeader) error {
	err := config.CheckHeader(w.conf, h)
	var version *config.VersionError
	if errors.As(err, &version) {
		st, _ := status.New(codes.FailedPrecondition, err.Error()).WithDetails(version.Proto())
		return st.Err()
	}
	if errors.Is(err, config.ErrUninitialised) {
		st, _ := status.New(codes.FailedPrecondition, err.Error()).WithDetails(&pb.ErrorDetail{Kind: &pb.ErrorDetail_Uninitialised{Uninitialised: &pb.Uninitialised{}}})
		return st.Err()
	}
	return err
}

type healthy struct{}

func (healthy) Verdict(string) register.Verdict { return register.VerdictHealthy }

func (r *rig) must(cmd *pb.Command) {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if res := r.apply(cmd); res.GetError() != nil {
		r.t.Fatal(res)
	}
}

func (r *rig) apply(cmd *pb.Command) *pb.CommandResult {
	r.index++
	res, events := r.machine.Apply(r.index, r.term, cmd)
	r.mu.Unlock() // as the FSM goroutine: the tables are told without a lock of Raft's
	r.voter.Applied(events)
	r.shell.Applied(events)
	r.mu.Lock()
	return res
}

// elect begins the next term.
func (r *rig) elect() {
	r.depose()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.term++
	r.apply(&pb.Command{Term: r.term, Kind: &pb.Command_BeginTerm{BeginTerm: &pb.BeginTermCommand{Server: "eu-1"}}})
	term, view := r.term, r.machine.View()
	r.mu.Unlock()
	r.voter.Begin(term, view)
	r.shell.Begin(term, view)
	r.mu.Lock()
}

func (r *rig) depose() {
	r.mu.Lock()
	term := r.term
	r.mu.Unlock()
	r.shell.Deposed(term)
	r.voter.Deposed(term)
}

func (r *rig) ProposeUrgent(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error) {
	r.mu.Lock()
	gate := r.gate
	r.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.apply(cmd), nil
}

func (r *rig) Check(context.Context) (uint64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.term, nil
}

func (r *rig) PulseFresh(instant.Instant) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.stale
}

func (r *rig) set(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

func (r *rig) View() state.View {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.machine.View()
}

func (r *rig) Voter(id string) RemoteVoter {
	if w, ok := r.witnesses[id]; ok {
		return w
	}
	return nil
}

func (r *rig) RTT(string) time.Duration { return 0 }

func (r *rig) Held(_ string, epoch fence.Epoch, until instant.Instant) {
	r.set(func() { r.heads = append(r.heads, head{epoch, r.clock.Now(), until}) })
}

func (r *rig) Lapsed(_ string, epoch fence.Epoch) {
	r.set(func() { r.heads = append(r.heads, head{epoch: epoch, at: r.clock.Now()}) })
}

// holds returns what Heads was told since the last call.
func (r *rig) holds() []head {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.heads
	r.heads = nil
	return out
}

// held reports whether a hold runs by what Heads was told last.
func held(hs []head) bool { return len(hs) > 0 && hs[len(hs)-1].until != 0 }

// each calls f on both witnesses.
func (r *rig) each(f func(*witness)) {
	for _, w := range r.witnesses {
		w.set(func() { f(w) })
	}
}

// witness is the shipped register behind a script: script, if set, may delay an
// answer, change it, or lose it.
type witness struct {
	id    string
	clock clock.Clock

	mu          sync.Mutex
	incarnation uint64
	life        uint64
	lives       []uint64
	writes      uint64
	regs        map[string]register.Register
	asked       int
	conf        *pb.ClusterConfiguration
	script      func(ctx context.Context, st *pb.VoterState) error
}

func (w *witness) set(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *witness) questions() (n int) {
	w.set(func() { n = w.asked })
	return n
}

// restart begins a new life, with the clocks at full D [H5].
func (w *witness) restart() {
	w.set(func() {
		w.life++
		w.lives = append(w.lives, w.life)
		w.writes++
		for p, reg := range w.regs {
			w.regs[p] = register.Restart(reg.Record, w.clock.Now())
		}
	})
}

// answer names the voter; w.mu is held.
func (w *witness) answer(h *pb.VoteHeader) *pb.VoterState {
	w.asked++
	st := &pb.VoterState{Voter: &pb.Voter{Id: w.id, Incarnation: w.incarnation}, Round: h.GetRound(), Life: w.life, Writes: w.writes}
	for _, l := range w.lives {
		st.Continues = st.Continues || l == h.GetSeenLife()
	}
	return st
}

func (w *witness) write(p string, c register.Change) {
	rec, _ := register.Update(w.regs[p].Record, c)
	w.regs[p] = w.regs[p].Written(w.clock.Now(), rec)
	w.writes++
}

func (w *witness) send(ctx context.Context, st *pb.VoterState) error {
	w.mu.Lock()
	script := w.script
	w.mu.Unlock()
	if script == nil {
		return nil
	}
	return script(ctx, st)
}

func (w *witness) Prepare(ctx context.Context, req *pb.PrepareRequest) (*pb.PrepareResponse, error) {
	res := &pb.PrepareResponse{}
	var refused error
	w.set(func() {
		if refused = w.check(req.GetHeader()); refused != nil {
			w.asked++
			return
		}
		for _, p := range req.GetPartitions() {
			dec := w.regs[p].Prepare(w.clock.Now(), register.PrepareInput{
				Candidate: register.CandidateOf(req.GetHeader()), Ballot: register.BallotOf(req.GetBallot()), Dry: req.GetDry(), Verdict: register.VerdictUnknown,
			})
			if dec.Action == register.Write {
				w.write(p, dec.Change)
			}
			res.Answers = append(res.Answers, register.PrepareAnswerOf(p, w.regs[p], w.clock.Now(), dec.Rule, register.VerdictUnknown))
		}
		res.State = w.answer(req.GetHeader())
	})
	if refused != nil {
		return nil, refused
	}
	return res, w.send(ctx, res.GetState())
}

func (w *witness) Accept(ctx context.Context, req *pb.AcceptRequest) (*pb.AcceptResponse, error) {
	res := &pb.AcceptResponse{}
	var refused error
	w.set(func() {
		if refused = w.check(req.GetHeader()); refused != nil {
			w.asked++
			return
		}
		for _, it := range req.GetItems() {
			p, b, v := it.GetPartition(), register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue())
			dec := w.regs[p].Accept(b, v)
			switch dec.Action {
			case register.Write, register.WriteAlarm:
				w.write(p, dec.Change)
			case register.Renew:
				w.regs[p], _ = w.regs[p].Renewed(w.clock.Now(), b, v)
			}
			res.Answers = append(res.Answers, register.AcceptAnswerOf(p, w.regs[p], w.clock.Now(), dec.Rule))
		}
		res.State = w.answer(req.GetHeader())
	})
	if refused != nil {
		return nil, refused
	}
	return res, w.send(ctx, res.GetState())
}

// lose loses every answer at once.
func lose(context.Context, *pb.VoterState) error { return errLost }

// silent never answers: the question ends with its patience.
func silent(ctx context.Context, _ *pb.VoterState) error {
	<-ctx.Done()
	return ctx.Err()
}
