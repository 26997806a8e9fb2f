package drill

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/drill/worker"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/pause"
)

const (
	oldWorker = "old worker"
	newWorker = "new worker"
	// beforeThaw is how long the new worker works before the old one wakes up.
	beforeThaw = 300 * time.Millisecond
)

// pair is two worker processes on one lock: one that holds it, and is to
// freeze between its check and its send, and one that would like to.
type pair struct {
	rig       *rig
	partition string
	old, new  *workerProcess
	frozen    worker.Event
	thawed    instant.Instant
	written   worker.Event // the new worker's first
}

// startPair starts both for the first freeze of a scenario.
func (r *rig) startPair(ctx context.Context, w world, part plan.Part, resourceAddress string, taken map[string]bool) (*pair, error) {
	partition, err := w.partition(part)
	if err != nil {
		return nil, err
	}
	p := &pair{rig: r, partition: partition.Name}
	lock, err := r.lockIn(partition.Name, taken)
	if err != nil {
		return nil, err
	}
	owner, err := w.region(plan.Target{Who: plan.TheRegion, Role: plan.Owner, Partition: part})
	if err != nil {
		return nil, err
	}
	next, err := w.region(plan.Target{Who: plan.TheRegion, Role: plan.Next, Partition: part})
	if err != nil {
		return nil, err
	}
	if p.old, err = r.startWorker(workerSpec{oldWorker, owner, lock, resourceAddress}); err != nil {
		return nil, err
	}
	if _, err := p.old.await(ctx, stepLimit, worker.Written); err != nil {
		return nil, err
	}
	if p.new, err = r.startWorker(workerSpec{newWorker, next, lock, resourceAddress}); err != nil {
		return nil, err
	}
	_, err = p.new.await(ctx, stepLimit, worker.Waiting)
	return p, err
}

// freeze stops the old worker at the worst place there is.
func (p *pair) freeze(ctx context.Context) error {
	if err := p.old.Signal(syscall.SIGUSR1); err != nil {
		return err
	}
	var err error
	if p.frozen, err = p.old.await(ctx, stepLimit, worker.Freezing); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	return p.old.WaitStopped(limited)
}

// thaw wakes the old worker up when the new one has written. It returns why
// that could not be.
func (p *pair) thaw(ctx context.Context) (without string, err error) {
	p.written, err = p.new.await(ctx, stepLimit, worker.Written)
	if err != nil && ctx.Err() == nil {
		without = "no other worker has written meanwhile: " + err.Error()
	} else if err != nil {
		return "", err
	}
	if err := pause.For(ctx, beforeThaw); err != nil {
		return "", err
	}
	if err := p.old.Signal(syscall.SIGCONT); err != nil {
		return "", err
	}
	resumed, err := p.old.await(ctx, stepLimit, worker.Resumed)
	if err != nil {
		return "", err
	}
	p.thawed = resumed.At
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	return without, p.old.Wait(limited)
}

// stop ends both.
func (p *pair) stop(ctx context.Context) error {
	var errs []error
	for _, w := range []*workerProcess{p.new, p.old} {
		// It has ended already if it could not be signalled.
		_ = w.Signal(syscall.SIGTERM)
		_ = w.Signal(syscall.SIGCONT)
		limited, cancel := context.WithTimeout(ctx, serveLimit)
		errs = append(errs, w.Wait(limited))
		cancel()
	}
	return errors.Join(errs...)
}

var kinds = map[worker.Kind]check.Kind{
	worker.Waiting: check.Asked, worker.Acquired: check.Acquired, worker.Written: check.Wrote, worker.Freezing: check.Frozen,
	worker.Resumed: check.Thawed, worker.Refused: check.Refused, worker.Lost: check.Lost, worker.Failed: check.Failed,
}

func (p *pair) records() []check.Actor {
	var out []check.Actor
	for _, w := range []*workerProcess{p.old, p.new} {
		a := check.Actor{Name: w.spec.name, Lock: w.spec.lock, Partition: p.partition, Freezes: w == p.old}
		for _, e := range w.all() {
			kind, ok := kinds[e.Kind]
			if !ok {
				continue
			}
			c := check.Event{Kind: kind, At: e.At, Token: e.Token, Region: e.Region, Until: e.Until, Reason: e.Reason, Waited: true}
			switch kind {
			case check.Lost:
				c.Sent = e.At
			case check.Refused:
				if e.Mark != 0 {
					c.Reason = "it is below " + e.Mark.String()
				}
			default:
			}
			a.Events = append(a.Events, c)
		}
		out = append(out, a)
	}
	return out
}

// late finds the frozen worker's write in the journal.
func (p *pair) late(journal []resource.Entry) check.Late {
	late := check.Late{Sent: p.thawed != 0}
	for _, e := range journal {
		if e.Op == resource.OpWrite && e.Writer == oldWorker && p.frozen.Value != "" && e.Value == p.frozen.Value {
			late.Seen, late.Accepted, late.Token, late.Mark = true, e.Outcome == resource.Accepted, e.Token, e.Mark
		}
	}
	return late
}

func (p *pair) String() string { return fmt.Sprintf("workers on %s", p.old.spec.lock) }
