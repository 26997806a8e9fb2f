package witness

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/detector/phi"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// storeLimit is how long one write may take: a disk that hangs longer is a
// failed one, and a voter on it must not seem alive [F30].
const storeLimit = 1500 * time.Millisecond

// Suspecter is what the voter asks of its failure detector.
type Suspecter interface {
	Suspicion(region string) phi.Suspicion
	Reports() []*pb.PeerReport
	RoundTrips() []*pb.RoundTrip
}

// durable is the store of a voter. A call returns when what it wrote is
// durable; after an error every later one fails.
type durable interface {
	write(records map[string]register.Record, writes uint64) error
	configure(v config.Voter, writes uint64) error
	decide(r config.Register, writes uint64) error
	stop(s *pb.EraStop, writes uint64) error
	close() error
}

// voter holds a witness's registers: the durable records, and the clocks over
// them, which are volatile. It takes one message at a time.
//
// Once a write has failed it answers nothing more: what the disk then holds is
// unknown, so the process must end and read it afresh.
type voter struct {
	id      string
	name    string
	cluster string
	version string
	clock   clock.Clock
	// metrics may be nil; load then makes some for nobody.
	metrics  *metrics
	suspects Suspecter
	logger   *slog.Logger
	// exit ends the process when a write hangs.
	exit func(code int)
	// failed is told when a write has failed. It must not block.
	failed func(error)
	// configured is told of the configuration that is in force. It must not
	// block.
	configured func(*pb.ClusterConfiguration)

	// turn is the lock over everything below, a channel so that a caller whose
	// deadline passes while the disk is slow goes away.
	turn          chan struct{}
	store         durable
	self          identity
	configuration *pb.ClusterConfiguration
	// known are the configuration's partitions.
	known map[string]bool
	// configRegister decides on the version after configuration.
	configRegister config.Register
	// eraStop, if set: it met another era, and votes no more [F16].
	eraStop   *pb.EraStop
	registers map[string]register.Register
	broken    error
	// stopped is why it votes no more, for those without the turn; nil: it votes.
	stopped atomic.Pointer[error]
}

func (v *voter) load(s durable, c contents) {
	v.turn = make(chan struct{}, 1)
	if v.metrics == nil {
		v.metrics = newMetrics(nil)
	}
	v.store, v.self, v.configRegister = s, c.identity, c.configRegister
	v.setConfiguration(c.configuration)
	v.stopIn(c.eraStop)
	v.registers = map[string]register.Register{}
	for partition, rec := range c.registers {
		v.registers[partition] = register.Register{Record: rec}
	}
	v.metrics.registers.Set(float64(len(v.registers)))
	v.restart(v.clock.Now())
}

// Restart makes every accepted value count as accepted just now, after a clock
// gap [F19 H5]. The start of the process did the same.
func (v *voter) Restart() {
	v.turn <- struct{}{}
	defer v.leave()
	v.restart(v.clock.Now())
}

func (v *voter) restart(now instant.Instant) {
	for partition, r := range v.registers {
		v.registers[partition] = register.Restart(r.Record, now)
	}
}

// enter waits for the voter's turn; leave ends it.
func (v *voter) enter(ctx context.Context) error {
	select {
	case v.turn <- struct{}{}:
	case <-ctx.Done():
		return refusal(codes.DeadlineExceeded, nil, "witness %s is busy with its disk; ask again", v.name)
	}
	if v.broken != nil {
		<-v.turn
		return refusal(codes.Unavailable, nil, "witness %s has stopped voting after a failed write; see its log", v.name)
	}
	return nil
}

func (v *voter) leave() { <-v.turn }

// setConfiguration installs c and tells who follows it.
func (v *voter) setConfiguration(c *pb.ClusterConfiguration) {
	v.configuration = c
	v.known = make(map[string]bool, len(c.GetPartitions()))
	for _, p := range c.GetPartitions() {
		v.known[p.GetName()] = true
	}
	if c != nil {
		v.metrics.configured.Set(1)
		v.metrics.era.Set(float64(c.GetEra().GetCounter()))
		v.configured(c)
	}
}

// guard runs one store call under the watchdog, and stops the voter for ever
// when it fails.
func (v *voter) guard(what string, call func() error) error {
	stop := v.watch(what)
	started := time.Now()
	err := call()
	stop()
	v.metrics.stored(what, time.Since(started), err)
	if err == nil {
		return nil
	}
	v.broken = err
	v.logger.Error("the witness's disk failed; it stops voting", "error", err)
	v.failed(fmt.Errorf("witness store: %w", err))
	return refusal(codes.Unavailable, nil, "witness %s could not store its vote and has stopped; see its log", v.name)
}

// watch ends the process if stop is not called in time: the goroutine that
// hangs in the disk cannot. A timer that fires very late means that the whole
// process was paused, and then the disk gets its time again.
func (v *voter) watch(what string) (stop func()) {
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			armed := time.Now()
			timer := time.NewTimer(storeLimit)
			select {
			case <-done:
				timer.Stop()
				return
			case <-timer.C:
			}
			if time.Since(armed) < 2*storeLimit {
				v.logger.Error("the witness's disk hangs; the process ends", "call", what, "limit", storeLimit)
				v.exit(exitDiskHangs)
				return
			}
		}
	}()
	return func() { close(done); <-ended }
}

func (v *voter) state(round uint64) *pb.VoterState {
	return &pb.VoterState{
		Voter:        v.voter(),
		Round:        round,
		Life:         v.self.life,
		PreviousLife: v.self.previous,
		Writes:       v.self.writes,
	}
}

// answering is the state with what a candidate asks about this data's line.
func (v *voter) answering(h *pb.VoteHeader) *pb.VoterState {
	st := v.state(h.GetRound())
	st.Continues = h.GetSeenLife() != 0 && slices.Contains(v.self.lives, h.GetSeenLife())
	return st
}

// outcome is what became of one partition's item.
type outcome struct {
	partition string
	rule      register.Rule
	verdict   register.Verdict
}

func (v *voter) verdict(r register.Register) register.Verdict {
	if r.Accepted.IsZero() || r.Value.Released() {
		return register.VerdictUnknown
	}
	return v.suspects.Suspicion(r.Value.Owner.Name).Verdict
}

// prepare judges a Prepare for all its partitions, with one transaction.
func (v *voter) prepare(ctx context.Context, req *pb.PrepareRequest) (*pb.PrepareResponse, error) {
	if err := v.enter(ctx); err != nil {
		return nil, err
	}
	defer v.leave()
	if err := v.checkStopped(); err != nil {
		return nil, err
	}
	if err := config.CheckHeader(v.configuration, req.GetHeader()); err != nil {
		return nil, v.refuse(err, config.RegionVoter(req.GetHeader().GetCandidate()))
	}
	in := register.PrepareInput{
		Candidate: register.CandidateOf(req.GetHeader()),
		Ballot:    register.BallotOf(req.GetBallot()),
		Dry:       req.GetDry(),
	}
	now := v.clock.Now()
	answers, err := v.judgePrepare(req.GetPartitions(), func(r register.Register, verdict register.Verdict) register.Decision {
		in.Verdict = verdict
		return r.Prepare(now, in)
	})
	if err != nil {
		return nil, err
	}
	v.metrics.votes.Prepared(answers)
	return &pb.PrepareResponse{State: v.answering(req.GetHeader()), Answers: answers}, nil
}

// judgePrepare judges each partition's register, makes what follows durable in
// one transaction, and answers. The caller has the turn.
func (v *voter) judgePrepare(partitions []string, judge func(register.Register, register.Verdict) register.Decision) ([]*pb.PrepareAnswer, error) {
	outcomes := make([]outcome, 0, len(partitions))
	changes := map[string]register.Change{}
	for _, partition := range partitions {
		o := outcome{partition: partition, rule: register.RuleUnknownPartition}
		if v.knows(partition) {
			r := v.registers[partition]
			o.verdict = v.verdict(r)
			d := judge(r, o.verdict)
			o.rule = d.Rule
			if d.Action == register.Write {
				changes[partition] = d.Change
			}
		}
		outcomes = append(outcomes, o)
	}
	if err := v.commit(changes); err != nil {
		return nil, err
	}
	answers := make([]*pb.PrepareAnswer, 0, len(outcomes))
	now := v.clock.Now()
	for _, o := range outcomes {
		answers = append(answers, register.PrepareAnswerOf(o.partition, v.registers[o.partition], now, o.rule, o.verdict))
	}
	return answers, nil
}

// accept judges an Accept for all its items, with one transaction.
func (v *voter) accept(ctx context.Context, req *pb.AcceptRequest) (*pb.AcceptResponse, error) {
	if err := v.enter(ctx); err != nil {
		return nil, err
	}
	defer v.leave()
	if err := v.checkStopped(); err != nil {
		return nil, err
	}
	if err := config.CheckHeader(v.configuration, req.GetHeader()); err != nil {
		return nil, v.refuse(err, config.RegionVoter(req.GetHeader().GetCandidate()))
	}
	answers, err := v.judgeAccept(req.GetItems())
	if err != nil {
		return nil, err
	}
	v.metrics.votes.Accepted(answers)
	return &pb.AcceptResponse{State: v.answering(req.GetHeader()), Answers: answers}, nil
}

// judgeAccept judges each item, makes what follows durable in one transaction,
// and answers. The caller has the turn.
func (v *voter) judgeAccept(items []*pb.AcceptItem) ([]*pb.AcceptAnswer, error) {
	outcomes := make([]outcome, 0, len(items))
	changes := map[string]register.Change{}
	for _, item := range items {
		partition := item.GetPartition()
		o := outcome{partition: partition, rule: register.RuleUnknownPartition}
		if v.knows(partition) {
			ballot, value := register.BallotOf(item.GetBallot()), register.ValueOf(item.GetValue())
			r := v.registers[partition]
			d := r.Accept(ballot, value)
			o.rule = d.Rule
			switch d.Action {
			case register.Renew:
				renewed, ok := r.Renewed(v.clock.Now(), ballot, value)
				if !ok {
					o.rule = register.RuleRetry
					break
				}
				v.registers[partition] = renewed
			case register.Write:
				changes[partition] = d.Change
			case register.WriteAlarm:
				changes[partition] = d.Change
				v.logger.Error("one ballot came with two values: the register is alarmed until an operator clears it",
					"partition", partition, "alarm", d.Change.Alarm)
			}
		}
		outcomes = append(outcomes, o)
	}
	if err := v.commit(changes); err != nil {
		return nil, err
	}
	answers := make([]*pb.AcceptAnswer, 0, len(outcomes))
	now := v.clock.Now()
	for _, o := range outcomes {
		answers = append(answers, register.AcceptAnswerOf(o.partition, v.registers[o.partition], now, o.rule))
	}
	return answers, nil
}

// commit makes changes durable and then, and only then, installs them.
func (v *voter) commit(changes map[string]register.Change) error {
	if len(changes) == 0 {
		return nil
	}
	records := make(map[string]register.Record, len(changes))
	for partition, c := range changes {
		rec, ok := register.Update(v.registers[partition].Record, c)
		if !ok { // judged in this very turn against this very record
			return refusal(codes.Internal, nil, "partition %s: a judged change does not apply", partition)
		}
		records[partition] = rec
	}
	writes := v.self.writes + 1
	if err := v.guard("write", func() error { return v.store.write(records, writes) }); err != nil {
		return err
	}
	v.self.writes = writes
	now := v.clock.Now() // after the write: a voter may count too late, never too early
	for partition, rec := range records {
		v.registers[partition] = v.registers[partition].Written(now, rec)
	}
	v.metrics.registers.Set(float64(len(v.registers)))
	return nil
}

func (v *voter) knows(partition string) bool { return v.known[partition] }

// describe tells what the voter is and knows.
func (v *voter) describe(ctx context.Context) (*pb.DescribeVoterResponse, error) {
	if err := v.enter(ctx); err != nil {
		return nil, err
	}
	defer v.leave()
	now := v.clock.Now()
	resp := &pb.DescribeVoterResponse{
		State:      v.state(0),
		Peers:      v.suspects.Reports(),
		RoundTrips: v.suspects.RoundTrips(),
		Version:    v.version,
	}
	if v.eraStop != nil {
		resp.EraStop = proto.CloneOf(v.eraStop)
	}
	if v.configuration != nil {
		resp.Configuration = proto.CloneOf(v.configuration)
	}
	if v.configRegister != (config.Register{}) {
		resp.ConfigRegister = v.configRegister.Proto()
	}
	for _, partition := range v.partitions() {
		r := v.registers[partition]
		resp.Registers = append(resp.Registers, &pb.RegisterStatus{Partition: partition, Register: r.Proto(), RemainingNs: int64(r.Remaining(now))})
	}
	return resp, nil
}

// partitions are the configured ones and those with a record, by name.
func (v *voter) partitions() []string {
	names := slices.Collect(maps.Keys(v.registers))
	for _, p := range v.configuration.GetPartitions() {
		names = append(names, p.GetName())
	}
	slices.Sort(names)
	return slices.Compact(names)
}
