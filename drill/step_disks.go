package drill

import (
	"context"
	"fmt"
	"time"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/pause"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// breakProcess sets a fault of a disk or a clock.
func (p *player) breakProcess(ctx context.Context, i int, s plan.Step, lasts time.Duration) error {
	processes, err := p.world().processes(s.Target)
	if err != nil {
		return err
	}
	names, silences := namesOf(processes)
	if s.Do == plan.ClockStep {
		silences = nil
		lasts = time.Second
	}
	f := p.begin(i, s, names, silences)
	id := fmt.Sprintf("drill-%d", i+1)
	rules := map[string]*pb.SetFaultsRequest{}
	for _, q := range processes {
		req := &pb.SetFaultsRequest{}
		if s.Do == plan.ClockStep {
			req.ClockFaults = []*pb.ClockFault{{Id: id, StepMs: s.Step.Milliseconds(), ExpiresMs: lasts.Milliseconds()}}
		} else {
			req.DiskFaults = []*pb.DiskFault{{
				Id: id, Store: s.Store, Stall: s.Do == plan.DiskHang, Full: s.Do == plan.DiskFull, ExpiresMs: lasts.Milliseconds(),
			}}
		}
		rules[q.Name] = req
	}
	if err := p.set(ctx, rules, lasts); err != nil {
		return err
	}
	f.Full = p.rig.clock.Now()
	if s.Do == plan.ClockStep {
		f.Effect = fmt.Sprintf("the clock stepped by %v", s.Step)
		p.end(f)
		return nil
	}
	p.background(ctx, f, func(ctx context.Context) error {
		var ended []string
		limited, cancel := context.WithTimeout(ctx, lasts)
		defer cancel()
		for _, q := range processes {
			if p.rig.processes.Ended(limited, q.Name) == nil {
				ended = append(ended, q.Name)
				p.setDown(q.Name, true)
			}
		}
		if f.Effect = fmt.Sprintf("ended by its own watch: %v", ended); len(ended) < len(processes) {
			f.NoEffect = fmt.Sprintf("of %v only %v ended; a process whose disk does that must", names, ended)
		}
		if err := pause.For(ctx, p.until(f.From.Add(lasts))); err != nil {
			return err
		}
		f.Until = p.rig.clock.Now()
		for _, name := range ended {
			if err := p.start(ctx, name); err != nil {
				return err
			}
		}
		return nil
	})
	return nil
}
