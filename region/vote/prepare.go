package vote

import (
	"context"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

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
