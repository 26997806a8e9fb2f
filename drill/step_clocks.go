package drill

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/pause"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// takeStep is how long the rule of a lease clock's step lasts: a process reads
	// its clock all the time, and takes the step once.
	takeStep = time.Second
	// afterStep is by when a leader has noticed a step, and has been asked since.
	afterStep = time.Second
)

// stepClock steps a clock of processes: the wall clock for a while, or the
// lease clock for good.
func (p *player) stepClock(ctx context.Context, i int, s plan.Step, lasts time.Duration) error {
	processes, err := p.world().processes(s.Target)
	if err != nil {
		return err
	}
	names, _ := namesOf(processes)
	f := p.begin(i, s, names, nil)
	rule := &pb.ClockFault{Id: fmt.Sprintf("drill-%d", i+1)}
	if s.Clock == plan.WallClock {
		rule.WallStepMs = s.Step.Milliseconds()
	} else {
		rule.StepMs, lasts = s.Step.Milliseconds(), takeStep
	}
	rule.ExpiresMs = lasts.Milliseconds()
	rules := map[string]*pb.SetFaultsRequest{}
	for _, name := range names {
		rules[name] = &pb.SetFaultsRequest{ClockFaults: []*pb.ClockFault{rule}}
	}
	// A clock that jumps ahead, at the step or when it is set right, counts as
	// restarted; that shows at the leader of a region.
	var leads []string
	for _, q := range processes {
		if q.Region != "" && p.rig.watch.leader(q.Region) == q.Name {
			leads = append(leads, q.Region)
		}
	}
	if err := p.set(ctx, rules, lasts); err != nil {
		return err
	}
	f.Full = p.rig.clock.Now()
	p.background(ctx, f, func(ctx context.Context) error {
		if err := pause.For(ctx, lasts/2); err != nil {
			return err
		}
		for _, q := range processes {
			if err := p.inForce(ctx, q, rules[q.Name]); err != nil && ctx.Err() == nil && !p.isDown(q.Name) {
				f.NoEffect = err.Error()
			}
		}
		if err := pause.For(ctx, p.until(f.From.Add(lasts))); err != nil {
			return err
		}
		f.Until = p.rig.clock.Now()
		if err := pause.For(ctx, afterStep); err != nil {
			return err
		}
		slices.Sort(leads)
		for _, region := range slices.Compact(leads) {
			if p.rig.watch.beganAnew(region, f.From, f.Until.Add(afterStep)) {
				f.Effect = fmt.Sprintf("the leader of %s noticed a gap, and began anew", region)
			} else if f.NoEffect == "" {
				f.NoEffect = fmt.Sprintf("the leader of %s noticed no gap", region)
			}
		}
		if f.Effect == "" && f.NoEffect == "" {
			f.Effect = "every process listed the fault; nothing measures this one"
		}
		return nil
	})
	return nil
}
