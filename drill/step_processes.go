package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/pause"
)

// namesOf returns the processes' names, and whose words are missed when they
// are silent: theirs and their regions'.
func namesOf(processes []clusterfile.Process) (names, silences []string) {
	for _, q := range processes {
		names = append(names, q.Name)
		silences = append(silences, q.Name)
		if q.Region != "" && !slices.Contains(silences, q.Region) {
			silences = append(silences, q.Region)
		}
	}
	return names, silences
}

func (p *player) setDown(name string, down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down[name] = down
}

func (p *player) setPaused(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused[name] = true
}

func (p *player) isDown(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.down[name]
}

// signal kills, stops or restarts processes.
func (p *player) signal(ctx context.Context, i int, s plan.Step, lasts time.Duration) error {
	processes, err := p.world().processes(s.Target)
	if err != nil {
		return err
	}
	p.rig.rand.Shuffle(len(processes), func(i, j int) { processes[i], processes[j] = processes[j], processes[i] })
	names, silences := namesOf(processes)
	f := p.begin(i, s, names, silences)
	f.Effect = fmt.Sprintf("%v", names)
	switch s.Do {
	case plan.Pause:
		for _, name := range names {
			if err := p.rig.processes.Signal(ctx, name, syscall.SIGSTOP, lasts+healAfter); err != nil {
				return err
			}
			p.setPaused(name)
		}
		f.Full = p.rig.clock.Now()
		p.background(ctx, f, func(ctx context.Context) error {
			waited := pause.For(ctx, lasts)
			f.Until = p.rig.clock.Now()
			for _, name := range names {
				if n := p.rig.watch.heardIn(name, f.Full.Add(faultSlack/2), f.Until); n > 0 && lasts > faultSlack {
					f.NoEffect = fmt.Sprintf("%s answered while it was stopped", name)
				}
			}
			return errors.Join(waited, p.resume(context.WithoutCancel(ctx), names))
		})
		return nil
	case plan.Restart:
		defer p.end(f)
		return p.restart(ctx, names)
	default:
	}
	heals := healAfter + lasts
	if lasts == 0 {
		heals = time.Hour
	}
	for _, name := range names {
		if err := p.rig.processes.Signal(ctx, name, syscall.SIGKILL, heals); err != nil {
			return err
		}
		p.setDown(name, true)
	}
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	for _, name := range names {
		if err := p.rig.processes.Ended(limited, name); err != nil {
			return err
		}
	}
	f.Full = p.rig.clock.Now()
	if lasts == 0 {
		f.Until = instant.Instant(1<<62) - 1 // mend says when
		p.end(f)
		return nil
	}
	p.background(ctx, f, func(ctx context.Context) error {
		return p.startAfter(ctx, f, lasts, names)
	})
	return nil
}

func (p *player) resume(ctx context.Context, names []string) error {
	var errs []error
	for _, name := range names {
		p.mu.Lock()
		paused := p.paused[name]
		delete(p.paused, name)
		p.mu.Unlock()
		if paused {
			errs = append(errs, p.rig.processes.Signal(ctx, name, syscall.SIGCONT, 0))
		}
	}
	return errors.Join(errs...)
}

// restart ends processes in order and starts them again.
func (p *player) restart(ctx context.Context, names []string) error {
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	for _, name := range names {
		if err := p.rig.processes.Signal(ctx, name, syscall.SIGTERM, healAfter); err != nil {
			return err
		}
		p.setDown(name, true)
	}
	for _, name := range names {
		if err := p.rig.processes.Ended(limited, name); err != nil {
			return err
		}
		if err := p.start(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// rolling restarts a region's servers, one after the other, each when the one
// before follows again.
func (p *player) rolling(ctx context.Context, i int, s plan.Step) error {
	processes, err := p.world().processes(s.Target)
	if err != nil {
		return err
	}
	names, silences := namesOf(processes)
	f := p.begin(i, s, names, silences)
	f.Effect = fmt.Sprintf("%v, one after the other", names)
	p.background(ctx, f, func(ctx context.Context) error {
		for _, q := range processes {
			if err := p.restart(ctx, []string{q.Name}); err != nil {
				return err
			}
			if err := p.following(ctx, q); err != nil {
				return err
			}
			if err := pause.For(ctx, s.Pause); err != nil {
				return err
			}
		}
		return nil
	})
	return nil
}

// following waits until a server follows its leader, or leads, and has applied
// what the others have.
func (p *player) following(ctx context.Context, q clusterfile.Process) error {
	limited, cancel := context.WithTimeoutCause(ctx, stepLimit, fmt.Errorf("%s does not follow within %v of its start", q.Name, stepLimit))
	defer cancel()
	for {
		own, err := p.rig.admin.DescribeServer(limited, q)
		st, errStatus := p.rig.admin.ServerStatus(limited, q)
		if err == nil && errStatus == nil && own.GetLeader() != "" && own.GetAppliedIndex()+100 > st.GetAppliedIndex() {
			return nil
		}
		if err := pause.For(limited, retell); err != nil {
			return err
		}
	}
}

// startAfter starts processes when a fault has lasted so long, and ends it there.
func (p *player) startAfter(ctx context.Context, f *check.Fault, lasts time.Duration, names []string) error {
	if err := pause.For(ctx, p.until(f.From.Add(lasts))); err != nil {
		return err
	}
	f.Until = p.rig.clock.Now()
	for _, name := range names {
		if err := p.start(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// start starts a process, and tells it the faults that it has to carry still.
func (p *player) start(ctx context.Context, name string) error {
	limited, cancel := context.WithTimeoutCause(ctx, serveLimit, fmt.Errorf("%s: not started within %v", name, serveLimit))
	defer cancel()
	if err := p.rig.processes.Ended(limited, name); err != nil {
		return err
	}
	if err := p.rig.processes.Start(limited, name); err != nil {
		return err
	}
	p.setDown(name, false)
	process, _ := p.rig.file().Process(name)
	for {
		req := p.carried.left(name, p.rig.clock.Now())
		if len(req.GetFaults())+len(req.GetDiskFaults())+len(req.GetClockFaults()) == 0 || p.rig.admin.SetFaults(limited, process, req) == nil {
			return nil
		}
		if err := pause.For(limited, retell); err != nil {
			return err
		}
	}
}
