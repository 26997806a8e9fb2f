package drill

import (
	"context"
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
			}
		}
		if f.Effect = fmt.Sprintf("ended by its own watch: %v", ended); len(ended) < len(processes) {
			f.NoEffect = fmt.Sprintf("of %v only %v ended; a process whose disk does that must", names, ended)
		}
		return p.startAfter(ctx, f, lasts, ended)
	})
	return nil
}
