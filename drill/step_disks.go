package drill

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/headlease/headlease/drill/plan"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// breakDisk sets a fault of the disks of processes, which must end of it, and
// starts them again when it is over.
func (p *player) breakDisk(ctx context.Context, i int, s plan.Step, lasts time.Duration) error {
	processes, err := p.world().processes(s.Target)
	if err != nil {
		return err
	}
	names, silences := namesOf(processes)
	f := p.begin(i, s, names, silences)
	rules := map[string]*pb.SetFaultsRequest{}
	for _, q := range processes {
		rules[q.Name] = &pb.SetFaultsRequest{DiskFaults: []*pb.DiskFault{{
			Id: fmt.Sprintf("drill-%d", i+1), Store: s.Store, Stall: s.Do == plan.DiskHang, Full: s.Do == plan.DiskFull, ExpiresMs: lasts.Milliseconds(),
		}}}
	}
	for _, name := range names {
		if err := p.rig.processes.MayEnd(ctx, name, lasts+healAfter); err != nil {
			return err
		}
		p.setMayEnd(name, true)
	}
	if err := p.set(ctx, rules, lasts); err != nil {
		return err
	}
	f.Full = p.rig.clock.Now()
	p.background(ctx, f, func(ctx context.Context) error {
		var ended []string
		limited, cancel := context.WithTimeout(ctx, lasts)
		defer cancel()
		for _, q := range processes {
			if p.rig.processes.Ended(limited, q.Name) == nil {
				ended = append(ended, q.Name)
				p.setDown(q.Name, true)
				p.setMayEnd(q.Name, false)
			}
		}
		if f.Effect = fmt.Sprintf("ended by its own watch: %v", ended); len(ended) < len(processes) {
			f.NoEffect = fmt.Sprintf("of %v only %v ended; a process whose disk does that must", names, ended)
		}
		if err := p.startAfter(ctx, f, lasts, ended); err != nil {
			return err
		}
		return p.startEnded(ctx, names)
	})
	return nil
}

// endsWithin is by when a process whose disk was broken until now has ended, if it
// does.
const endsWithin = 2 * time.Second

// startEnded starts those of the processes, whose disks are whole again, that have
// ended of it or are about to.
func (p *player) startEnded(ctx context.Context, names []string) error {
	limited, cancel := context.WithTimeout(ctx, endsWithin)
	defer cancel()
	var errs []error
	for _, name := range names {
		p.mu.Lock()
		mayEnd := p.mayEnd[name] && !p.down[name]
		p.mu.Unlock()
		if !mayEnd {
			continue
		}
		_ = p.rig.processes.Ended(limited, name) // or it lives
		errs = append(errs, p.rig.processes.Start(ctx, name))
		p.setMayEnd(name, false)
	}
	return errors.Join(errs...)
}

func (p *player) setMayEnd(name string, mayEnd bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if mayEnd {
		p.mayEnd[name] = true
	} else {
		delete(p.mayEnd, name)
	}
}
