package drill

import (
	"context"
	"fmt"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/clusterfile"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func (p *player) herd(ctx context.Context, i int, s plan.Step) error {
	part := plan.Part{Number: 1}
	if !s.Partition.IsZero() {
		part = s.Partition
	}
	partition, err := p.world().partition(part)
	if err != nil {
		return err
	}
	f := p.begin(i, s, []string{partition.Name}, nil)
	p.background(ctx, f, func(ctx context.Context) error {
		served, err := p.load.herd(ctx, s.Clients, partition.Name)
		f.Effect = fmt.Sprintf("%d of %d clients had the lock after %.1f s", served, s.Clients, p.rig.clock.Now().Sub(f.From).Seconds())
		if served < s.Clients {
			f.NoEffect = f.Effect
		}
		return err
	})
	return nil
}

// transfer hands a partition over on purpose, and returns when that is done.
func (p *player) transfer(ctx context.Context, i int, s plan.Step) error {
	w := p.world()
	partition, err := w.partition(s.Partition)
	if err != nil {
		return err
	}
	to, err := w.region(s.To)
	if err != nil {
		return err
	}
	f := p.begin(i, s, []string{partition.Name}, nil)
	defer p.end(f)
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	done, err := p.rig.admin.Transfer(limited, admin.Transfer{Partition: partition.Name, To: to, Drain: p.d})
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		f.NoEffect = err.Error()
	case done.Already:
		f.NoEffect = fmt.Sprintf("%s owned it already", to)
	default:
		f.Effect = fmt.Sprintf("%s has it with epoch %d; it was without an owner for %d ms at most", to, done.Epoch, done.Unowned.Milliseconds())
	}
	return nil
}

// handOver has a server lead its region, and returns when it does.
func (p *player) handOver(ctx context.Context, i int, s plan.Step) error {
	to, err := p.world().processes(s.To)
	if err != nil {
		return err
	}
	q := to[0]
	f := p.begin(i, s, []string{q.Name}, nil)
	defer p.end(f)
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	already, err := p.rig.admin.HandOver(limited, q.Region, q.Name)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		f.NoEffect = err.Error()
	case already:
		f.NoEffect = q.Name + " led already"
	default:
		f.Effect = fmt.Sprintf("%s leads %s", q.Name, q.Region)
	}
	return nil
}

// await waits for what a step names. What does not come is for the
// expectations to judge.
func (p *player) await(ctx context.Context, i int, s plan.Step) error {
	f := p.begin(i, s, nil, nil)
	defer p.end(f)
	within := s.Within.Of(p.d, p.rtt)
	var err error
	if s.Until == plan.UntilSettled {
		p.work.Wait() // of a cluster that is still broken it would be no news
		err = p.rig.settled(ctx, within)
	} else {
		var part clusterfile.Partition
		if part, err = p.world().partition(s.Partition); err != nil {
			return err
		}
		was := p.owners[part.Name]
		err = p.rig.watch.await(ctx, within, s.Until, func(l *check.Ledger, _ map[string]*pb.StatusResponse) bool {
			c, ok := l.Owners[part.Name]
			return ok && c.By != was
		})
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if f.Effect = "it came"; err != nil {
		f.Effect = "it did not come: " + err.Error()
		p.rig.o.progress("%s: %v", s.Title(), err)
	}
	return nil
}
