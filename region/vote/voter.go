package vote

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/telemetry"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// Raft is what the voter needs of its region's replica.
type Raft interface {
	// ProposeUrgent commits one command and returns Apply's result.
	ProposeUrgent(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error)
	// Check is a leadership check begun after the call; it returns the term in
	// which it passed.
	Check(ctx context.Context) (term uint64, err error)
	// PulseFresh reports whether the disk of a quorum moves.
	PulseFresh(now instant.Instant) bool
	View() state.View
}

// Detector is the voter's own failure detector: a hint for V3.
type Detector interface {
	Verdict(region string) register.Verdict
}

// Config of a Voter. All fields but Logger are needed.
type Config struct {
	Region   string
	Raft     Raft
	Detector Detector
	Clock    clock.Clock
	// Registerer of the voter's metrics; may be nil.
	Registerer prometheus.Registerer
	Logger     *slog.Logger
	// NeverApplied reports whether a proposal's error means that the command
	// surely did not and will not take effect.
	NeverApplied func(error) bool
}

// Voter answers votes for a region while its server leads. It is safe for
// concurrent use.
type Voter struct {
	cfg     Config
	metrics *telemetry.Votes

	mu   sync.Mutex
	term uint64 // of the tables; 0: not leading
	conf *pb.ClusterConfiguration
	// stop, if set: the region met another era, and answers nothing [F16].
	stop *pb.EraStop
	regs map[string]register.Register
	// cleared is closed, and made anew, when promises' fates become known.
	cleared chan struct{}
}

// pendingWait is how long an Accept waits for the fate of a promise at most. It
// mostly comes right after its own Prepare, whose promise others have counted
// before it was committed here.
const pendingWait = 200 * time.Millisecond

// New returns a voter that does not lead yet.
func New(cfg Config) *Voter {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Voter{cfg: cfg, metrics: telemetry.NewVotes(cfg.Registerer), cleared: make(chan struct{})}
}

// Begin builds the tables of a term from the view at its first own entry. It
// is called from the FSM goroutine, before any Applied of that term.
func (v *Voter) Begin(term uint64, view state.View) {
	now := v.cfg.Clock.Now()
	regs := make(map[string]register.Register)
	for p := range view.Partitions() {
		regs[p.Name] = register.Restart(p.Register, now)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.term, v.conf, v.stop, v.regs = term, view.Configuration(), view.EraStop(), regs
}

// Deposed ends the tables of a term.
func (v *Voter) Deposed(term uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.term <= term {
		v.term, v.conf, v.stop, v.regs = 0, nil, nil, nil
	}
}

// Applied feeds the events of an applied entry, in order, from the FSM
// goroutine: a register's clock starts in the same step in which its new
// record becomes visible here.
func (v *Voter) Applied(events []state.Event) {
	now := v.cfg.Clock.Now()
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.term == 0 {
		return
	}
	for _, e := range events {
		switch e := e.(type) {
		case state.RegisterChanged:
			v.regs[e.Partition] = v.regs[e.Partition].Written(now, e.Record)
		case state.EraStopped:
			v.stop = e.Stop
		case state.EraBegun:
			v.stop = nil
		case state.Configured:
			v.conf = e.Configuration
			for _, p := range e.Configuration.GetPartitions() {
				if _, ok := v.regs[p.GetName()]; !ok {
					v.regs[p.GetName()] = register.Register{}
				}
			}
		}
	}
}

// ClockGap restarts the clocks of all registers at full D, as after a restart
// [F19].
func (v *Voter) ClockGap() {
	now := v.cfg.Clock.Now()
	v.mu.Lock()
	defer v.mu.Unlock()
	for name, r := range v.regs {
		r.Since = now
		v.regs[name] = r
	}
}

// ErrNotLeading is returned while this server does not lead its region or has
// not applied its first entry of the term.
var ErrNotLeading = errors.New("this server does not lead its region now; ask another one")

// errDeposed: the term ended while a message was being judged.
var errDeposed = errors.New("leadership was lost while voting; ask again")

// Prepare judges a Prepare for each partition; the caller has checked what it
// says (config.CheckPrepare). It returns ErrNotLeading, the errors of
// config.CheckHeader, or an error when an answer could not be had in time; what
// was proposed by then may still commit.
func (v *Voter) Prepare(ctx context.Context, req *pb.PrepareRequest) (*pb.PrepareResponse, error) {
	in := register.PrepareInput{Candidate: register.CandidateOf(req.GetHeader()), Ballot: register.BallotOf(req.GetBallot()), Dry: req.GetDry()}
	check := func(conf *pb.ClusterConfiguration) error { return config.CheckHeader(conf, req.GetHeader()) }
	answers, err := v.prepare(ctx, check, in.Ballot, req.GetPartitions(), func(r register.Register, now instant.Instant, verdict register.Verdict) register.Decision {
		in.Verdict = verdict
		return r.Prepare(now, in)
	})
	if err != nil {
		return nil, err
	}
	v.metrics.Prepared(answers)
	return &pb.PrepareResponse{State: v.State(req.GetHeader()), Answers: answers}, nil
}

// PrepareAgain judges by V1 alone, see register.PrepareAgain; errors as of
// Prepare.
func (v *Voter) PrepareAgain(ctx context.Context, req *pb.PrepareAgainRequest) (*pb.PrepareAgainResponse, error) {
	ballot := register.BallotOf(req.GetBallot())
	answers, err := v.prepare(ctx, underVersion(req), ballot, req.GetPartitions(), func(r register.Register, _ instant.Instant, _ register.Verdict) register.Decision {
		return r.PrepareAgain(ballot)
	})
	if err != nil {
		return nil, err
	}
	return &pb.PrepareAgainResponse{Voter: v.State(nil).GetVoter(), Answers: answers}, nil
}

// underVersion checks a message that has no header.
func underVersion(m interface {
	GetClusterId() string
	GetEra() *pb.Era
	GetVersion() uint64
}) func(*pb.ClusterConfiguration) error {
	return func(conf *pb.ClusterConfiguration) error {
		return config.CheckVersion(conf, m.GetClusterId(), register.EraOf(m.GetEra()), m.GetVersion())
	}
}

type judge func(r register.Register, now instant.Instant, verdict register.Verdict) register.Decision

func (v *Voter) prepare(ctx context.Context, check func(*pb.ClusterConfiguration) error, ballot register.Ballot, partitions []string, judge judge) ([]*pb.PrepareAnswer, error) {
	answers := make([]*pb.PrepareAnswer, len(partitions))
	verdicts := make([]register.Verdict, len(answers))
	write := &batch{}

	now := v.cfg.Clock.Now()
	v.mu.Lock()
	term, err := v.enter(check)
	if err != nil {
		v.mu.Unlock()
		return nil, err
	}
	write.version = v.stamp()
	for i, name := range partitions {
		r, ok := v.regs[name]
		if !ok {
			answers[i] = register.PrepareAnswerOf(name, register.Register{}, now, register.RuleUnknownPartition, register.VerdictUnknown)
			continue
		}
		verdicts[i] = v.cfg.Detector.Verdict(r.Value.Owner.Name)
		d := judge(r, now, verdicts[i])
		if d.Action == register.Write {
			// A partition named twice finds its own promise pending.
			r.Pending = true
			v.regs[name] = r
			write.add(i, name)
			write.promises = append(write.promises, &pb.PromiseItem{Partition: name, Guard: d.Change.Guard.Proto(), Ballot: ballot.Proto()})
			continue
		}
		answers[i] = register.PrepareAnswerOf(name, r, now, d.Rule, verdicts[i])
	}
	v.mu.Unlock()

	if len(write.promises) > 0 {
		items, err := v.commitPromises(ctx, term, write)
		if err != nil {
			return nil, err
		}
		now = v.cfg.Clock.Now()
		for k, i := range write.index {
			rec := register.RecordOf(items[k].GetRegister())
			rule := register.RuleNone
			if !items[k].GetDone() {
				rule = register.RuleRetry
			}
			answers[i] = register.PrepareAnswerOf(write.names[k], v.seen(write.names[k], rec), now, rule, verdicts[i])
		}
	}
	return answers, nil
}

// stamp is the version that goes into commands. At feature level 1, where there
// is only the first, servers may not know the field. v.mu is held.
func (v *Voter) stamp() uint64 {
	if version := v.conf.GetVersion(); version > 1 {
		return version
	}
	return 0
}

// enter returns the term, or why nothing is answered. v.mu is held.
func (v *Voter) enter(check func(*pb.ClusterConfiguration) error) (term uint64, err error) {
	if v.term == 0 {
		return 0, ErrNotLeading
	}
	if v.stop != nil {
		return 0, &config.StoppedError{Own: config.EraOf(v.conf), Stop: v.stop}
	}
	return v.term, check(v.conf)
}

// commitPromises commits the promises and clears the registers' pending marks
// when their fate is known. The proposal outlives ctx: giving up on the answer
// must not lose sight of the promise [H3].
func (v *Voter) commitPromises(ctx context.Context, term uint64, w *batch) ([]*pb.ItemResult, error) {
	cmd := &pb.Command{Term: term, Kind: &pb.Command_Promise{Promise: &pb.PromiseCommand{Items: w.promises, ConfigVersion: w.version}}}
	type outcome struct {
		res *pb.CommandResult
		err error
	}
	done := make(chan outcome, 1)
	go func() { // ends with the proposal: the replica resolves every one, at the latest at its own stop
		res, err := v.cfg.Raft.ProposeUrgent(context.WithoutCancel(ctx), cmd)
		if err == nil || v.cfg.NeverApplied(err) {
			v.clearPending(term, w.names)
		}
		done <- outcome{res, err}
	}()
	select {
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case o := <-done:
		return itemsOf(o.res, o.err, len(w.promises))
	}
}

func (v *Voter) clearPending(term uint64, names []string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	close(v.cleared)
	v.cleared = make(chan struct{})
	if v.term != term {
		return
	}
	for _, name := range names {
		r := v.regs[name]
		r.Pending = false
		v.regs[name] = r
	}
}

// Accept judges an Accept for each item; the caller has checked what it says:
// first ones are committed, renewals answered after a leadership check. Errors
// as of Prepare.
func (v *Voter) Accept(ctx context.Context, req *pb.AcceptRequest) (*pb.AcceptResponse, error) {
	check := func(conf *pb.ClusterConfiguration) error { return config.CheckHeader(conf, req.GetHeader()) }
	answers, err := v.accept(ctx, check, req.GetItems())
	if err != nil {
		return nil, err
	}
	v.metrics.Accepted(answers)
	return &pb.AcceptResponse{State: v.State(req.GetHeader()), Answers: answers}, nil
}

// AcceptAgain takes values that were proposed before, under the configuration
// in force, as Accept does; it restarts their clocks at full D.
func (v *Voter) AcceptAgain(ctx context.Context, req *pb.AcceptAgainRequest) (*pb.AcceptAgainResponse, error) {
	answers, err := v.accept(ctx, underVersion(req), req.GetItems())
	if err != nil {
		return nil, err
	}
	return &pb.AcceptAgainResponse{Voter: v.State(nil).GetVoter(), Answers: answers}, nil
}

func (v *Voter) accept(ctx context.Context, check func(*pb.ClusterConfiguration) error, all []*pb.AcceptItem) ([]*pb.AcceptAnswer, error) {
	answers := make([]*pb.AcceptAnswer, len(all))
	write := &batch{}
	var renew []int
	v.awaitPromises(ctx, all)

	now := v.cfg.Clock.Now()
	v.mu.Lock()
	term, err := v.enter(check)
	if err != nil {
		v.mu.Unlock()
		return nil, err
	}
	write.version = v.stamp()
	for i, it := range all {
		r, ok := v.regs[it.GetPartition()]
		if !ok {
			answers[i] = register.AcceptAnswerOf(it.GetPartition(), register.Register{}, now, register.RuleUnknownPartition)
			continue
		}
		d := r.Accept(register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue()))
		switch {
		case d.Action == register.Renew:
			renew = append(renew, i)
		case d.Action == register.Write || d.Action == register.WriteAlarm:
			write.add(i, it.GetPartition())
			write.accepts = append(write.accepts, &pb.AcceptedItem{
				Partition: it.GetPartition(), Guard: d.Change.Guard.Proto(), Ballot: it.GetBallot(), Value: it.GetValue(),
			})
			if d.Action == register.WriteAlarm {
				v.cfg.Logger.Error("register alarmed: one ballot came with two values", "partition", it.GetPartition(), "ballot", r.Accepted)
			}
		default:
			answers[i] = register.AcceptAnswerOf(it.GetPartition(), r, now, d.Rule)
		}
	}
	v.mu.Unlock()

	if len(write.accepts) > 0 {
		cmd := &pb.Command{Term: term, Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{Items: write.accepts, ConfigVersion: write.version}}}
		res, err := v.cfg.Raft.ProposeUrgent(ctx, cmd)
		items, err := itemsOf(res, err, len(write.accepts))
		if err != nil {
			return nil, err
		}
		for k, i := range write.index {
			it := all[i]
			rec := register.RecordOf(items[k].GetRegister())
			rule := register.RuleNone
			switch {
			case rec.Alarm != "":
				rule = register.RuleAlarm
			case !items[k].GetDone() || rec.Accepted != register.BallotOf(it.GetBallot()):
				rule = register.RuleRetry
			}
			answers[i] = register.AcceptAnswerOf(write.names[k], v.seen(write.names[k], rec), v.cfg.Clock.Now(), rule)
		}
	}
	if len(renew) > 0 {
		if err := v.renew(ctx, term, check, all, renew, answers); err != nil {
			return nil, err
		}
	}
	return answers, nil
}

// awaitPromises waits until no register of the items has a promise on its way,
// for a bounded time: what is still on its way then is refused.
func (v *Voter) awaitPromises(ctx context.Context, items []*pb.AcceptItem) {
	var late <-chan time.Time
	for {
		v.mu.Lock()
		cleared := v.cleared
		pending := slices.ContainsFunc(items, func(it *pb.AcceptItem) bool { return v.regs[it.GetPartition()].Pending })
		v.mu.Unlock()
		if !pending {
			return
		}
		if late == nil {
			t := time.NewTimer(pendingWait)
			defer t.Stop()
			late = t.C
		}
		select {
		case <-cleared:
		case <-late:
			return
		case <-ctx.Done():
			return
		}
	}
}

// renew answers renewals after a leadership check begun now, that is after
// they arrived; a promise that came meanwhile refuses them, and so does another
// configuration.
func (v *Voter) renew(ctx context.Context, term uint64, check func(*pb.ClusterConfiguration) error, all []*pb.AcceptItem, renew []int, answers []*pb.AcceptAnswer) error {
	checked, err := v.cfg.Raft.Check(ctx)
	if err != nil {
		return err
	}
	now := v.cfg.Clock.Now()
	if checked != term {
		return errDeposed
	}
	if !v.cfg.Raft.PulseFresh(now) {
		return errors.New("the region's disk does not move (stale pulse); it answers no renewal until it does")
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.term != term {
		return errDeposed
	}
	if _, err := v.enter(check); err != nil {
		return err
	}
	for _, i := range renew {
		it := all[i]
		b, val := register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue())
		r := v.regs[it.GetPartition()]
		rule := register.RuleNone
		if renewed, ok := r.Renewed(now, b, val); ok {
			r = renewed
			v.regs[it.GetPartition()] = r
		} else if rule = r.Accept(b, val).Rule; rule == register.RuleNone {
			rule = register.RuleRetry
		}
		answers[i] = register.AcceptAnswerOf(it.GetPartition(), r, now, rule)
	}
	return nil
}

// Registers returns the leader's registers, or ErrNotLeading.
func (v *Voter) Registers() (map[string]register.Register, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.term == 0 {
		return nil, ErrNotLeading
	}
	out := make(map[string]register.Register, len(v.regs))
	for name, r := range v.regs {
		out[name] = r
	}
	return out, nil
}

// seen is the register with the record that a commit answered and the clock
// as it is here.
func (v *Voter) seen(name string, rec register.Record) register.Register {
	v.mu.Lock()
	defer v.mu.Unlock()
	r := v.regs[name]
	r.Record = rec
	return r
}

// State names this voter on an answer.
func (v *Voter) State(h *pb.VoteHeader) *pb.VoterState {
	view := v.cfg.Raft.View()
	return &pb.VoterState{
		Voter:  &pb.Voter{Id: "region/" + v.cfg.Region, Incarnation: uint64(view.Incarnation())},
		Round:  h.GetRound(),
		Writes: view.AppliedIndex(),
	}
}

// batch gathers the items of one message that need a commit.
type batch struct {
	index    []int
	names    []string
	promises []*pb.PromiseItem
	accepts  []*pb.AcceptedItem
	// version is the configuration's that the message was judged under.
	version uint64
}

func (b *batch) add(i int, name string) {
	b.index, b.names = append(b.index, i), append(b.names, name)
}

func itemsOf(res *pb.CommandResult, err error, n int) ([]*pb.ItemResult, error) {
	if err != nil {
		return nil, err
	}
	if res.GetError() != nil {
		return nil, errDeposed // the commands are well-formed, so only their term can be wrong
	}
	if got := len(res.GetItems().GetItems()); got != n {
		return nil, errors.New("internal: a command's result has another number of items")
	}
	return res.GetItems().GetItems(), nil
}
