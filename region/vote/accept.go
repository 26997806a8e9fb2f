package vote

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// pendingWait is how long an Accept waits for the fate of a promise at most. It
// mostly comes right after its own Prepare, whose promise others have counted
// before it was committed here.
const pendingWait = 200 * time.Millisecond

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
