package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"
)

// watchTick is how often the watchdog looks.
const watchTick = 100 * time.Millisecond

// guard stands between Raft and its stores: it passes writes through the fault
// seam, reports the first failed write, and knows which calls are running, so
// that the watchdog can end a process whose disk hangs.
//
// hashicorp/raft stays leader, with calm followers, while such a write hangs
// [F30]; the blocked goroutine cannot help itself.
type guard struct {
	disk Disk
	// failed is told the first write error. After a failed fsync nobody knows what
	// is on disk, so the server stops and never tries again.
	failed func(error)
	// stored is told of each write, its time and its error.
	stored func(op string, took time.Duration, err error)

	mu    sync.Mutex
	calls map[*call]struct{}
	err   error
}

type call struct {
	op      string
	started time.Time
	ticks   int
	// patience multiplies the limit.
	patience int
}

// piecePatience is for calls that no command waits for.
const piecePatience = 10

func newGuard(disk Disk, failed func(error), stored func(string, time.Duration, error)) *guard {
	if disk == nil {
		disk = noDisk{}
	}
	return &guard{disk: disk, failed: failed, stored: stored, calls: make(map[*call]struct{})}
}

func (g *guard) begin(op string) *call { return g.enter(op, 1) }

func (g *guard) enter(op string, patience int) *call {
	c := &call{op: op, started: time.Now(), patience: patience}
	g.mu.Lock()
	g.calls[c] = struct{}{}
	g.mu.Unlock()
	return c
}

func (g *guard) end(c *call) {
	g.mu.Lock()
	delete(g.calls, c)
	g.mu.Unlock()
}

func (g *guard) read(op string, f func() error) error {
	c := g.begin(op)
	defer g.end(c)
	return f()
}

// piece is a write that may fail and be done again later, of a snapshot: no
// command waits for it, and nothing that was promised rests on it before its end.
func (g *guard) piece(op string, f func() error) error {
	c := g.enter(op, piecePatience)
	defer g.end(c)
	if err := g.disk.Before(op); err != nil {
		return fmt.Errorf("store write %s failed: %w", op, err)
	}
	if err := f(); err != nil {
		return fmt.Errorf("store write %s failed: %w", op, err)
	}
	return nil
}

// failure is the first failed write, if any.
func (g *guard) failure() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.err
}

func (g *guard) write(op string, f func() error) error {
	err := g.failure()
	if err != nil {
		return err
	}
	c := g.begin(op)
	defer g.end(c)
	err = g.disk.Before(op)
	if err == nil {
		err = f()
	}
	g.stored(op, time.Since(c.started), err)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("store write %s failed: %w", op, err)
	if errors.Is(err, syscall.ENOSPC) {
		err = fmt.Errorf("%w; free some space and start the server again", err)
	}
	g.mu.Lock()
	first := g.err == nil
	if first {
		g.err = err
	}
	g.mu.Unlock()
	if first {
		g.failed(err)
	}
	return err
}

// watch calls exit once when a call has been running for limit. It counts its
// own ticks and not only time: a process that was stopped (SIGSTOP, a paused
// VM) in the middle of a call must not take its own pause for a hung disk.
func (g *guard) watch(ctx context.Context, limit time.Duration, exit func(error)) {
	tick := min(watchTick, limit/4)
	need := int(limit / tick)
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if err := g.overdue(limit, need); err != nil {
			exit(err)
			return
		}
	}
}

func (g *guard) overdue(limit time.Duration, need int) error {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.calls {
		c.ticks++
		limit := limit * time.Duration(c.patience)
		if ran := now.Sub(c.started); c.ticks >= need*c.patience && ran >= limit {
			return fmt.Errorf("store call %s has been running for %v, over %v: the disk hangs",
				c.op, ran.Round(time.Millisecond), limit)
		}
	}
	return nil
}
