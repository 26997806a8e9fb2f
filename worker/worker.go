package worker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/pause"
)

// ErrPanicked is the error of a handler that panicked.
var ErrPanicked = errors.New("the handler panicked")

// ErrNotValid: the lease of a shard is over.
var ErrNotValid = errors.New("the lease is not valid any more")

// Run is a worker until ctx ends, and then stops in order; see group.Run.
func Run(ctx context.Context, cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	cfg = cfg.withDefaults()
	w := &worker{cfg: cfg, room: make(chan struct{}, cfg.Parallel), chains: map[uint32]*chain{}}
	w.metrics = newMetrics(cfg.Registerer, w)
	cfg.Group.Work = w.work
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var beside sync.WaitGroup
	if s, ok := cfg.Source.(interface{ Run(ctx context.Context) }); ok {
		beside.Go(func() { s.Run(inner) })
	}
	err := group.Run(ctx, cfg.Group)
	cancel()
	beside.Wait()
	return err
}

type worker struct {
	cfg     Config
	metrics *metrics
	room    chan struct{} // one element per batch in Handle

	mu     sync.Mutex
	chains map[uint32]*chain
}

// chain is the work on one shard under one lease.
type chain struct {
	*worker
	shard *Shard
	feed  Feed
	// failing and since are under the worker's mu: the batch in work has failed,
	// and when it was begun; zero: none is in work.
	failing bool
	since   time.Time
}

// work is group.Config.Work.
func (w *worker) work(ctx context.Context, s *group.Shard) error {
	resource := "shard/" + strconv.FormatUint(uint64(s.Number), 10)
	if w.cfg.Group.Resource != nil {
		resource = w.cfg.Group.Resource(s.Number)
	}
	c := &chain{worker: w, shard: &Shard{Shard: s, resource: resource}}
	w.mu.Lock()
	w.chains[s.Number] = c
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.chains, s.Number)
		w.mu.Unlock()
	}()
	err := c.run(ctx)
	var stale *fence.StaleError
	if errors.As(err, &stale) {
		w.metrics.stale.Inc()
		w.cfg.Logger.Warn("worker: refused as stale; the shard has another holder", "resource", resource, "error", err)
		return nil
	}
	if ctx.Err() != nil || errors.Is(err, ErrNotValid) {
		return nil
	}
	return err
}

// run handles the shard's messages until ctx or the shard's drain ends it.
func (c *chain) run(ctx context.Context) error {
	// waiting also ends when the shard is to move: nothing new is begun then.
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	stopped := make(chan struct{})
	defer close(stopped)
	go func() {
		select {
		case <-c.shard.Drain():
			cancel()
		case <-stopped:
		}
	}()
	for waiting.Err() == nil {
		if err := c.open(waiting); err != nil {
			return c.unlessOver(waiting, err)
		}
		err := c.consume(ctx, waiting)
		c.feed.Close()
		var unclaimed *fence.UnclaimedError
		if errors.As(err, &unclaimed) && c.shard.Lease.Valid() {
			// The store has lost its marks; only who holds the lease makes new ones.
			c.cfg.Logger.Warn("worker: claims again", "resource", c.shard.resource, "error", err)
			continue
		}
		return c.unlessOver(waiting, err)
	}
	return nil
}

// unlessOver hides an error that the end of ctx explains; a refusal is none.
func (c *chain) unlessOver(ctx context.Context, err error) error {
	var stale *fence.StaleError
	if ctx.Err() != nil && !errors.As(err, &stale) {
		return nil
	}
	return err
}

// open claims the shard everywhere, before anything is read [F15].
func (c *chain) open(ctx context.Context) error {
	return c.retry(ctx, "claim the shard", func() (err error) {
		if err := c.shard.Check(); err != nil {
			return err
		}
		if c.cfg.Claim != nil {
			if err := c.cfg.Claim(ctx, c.shard); err != nil {
				return err
			}
		}
		c.feed, err = c.cfg.Source.Open(ctx, c.shard.resource, c.shard.Token())
		return err
	})
}

func (c *chain) consume(ctx, waiting context.Context) error {
	for {
		var messages []Message
		err := c.retry(waiting, "read messages", func() (err error) {
			messages, err = c.feed.Next(waiting, c.cfg.Batch)
			return err
		})
		if err != nil || waiting.Err() != nil {
			return err
		}
		for len(messages) > 0 && waiting.Err() == nil {
			n := 0 // of the run of messages that are handled alike
			for n < len(messages) && messages[n].Parked == messages[0].Parked {
				n++
			}
			if messages[0].Parked {
				err = c.park(ctx, messages[0], "a message of its key before it is parked")
				n = 1
			} else {
				n, err = c.handle(ctx, waiting, messages[:n])
			}
			if err != nil {
				return err
			}
			messages = messages[n:]
		}
	}
}

// handle handles messages and acknowledges them; it returns how many are done
// for good. When one is parked, those behind it are to be read again.
func (c *chain) handle(ctx, waiting context.Context, messages []Message) (done int, err error) {
	size := len(messages)
	for attempt := 1; ; attempt++ {
		b := &Batch{Shard: c.shard, Messages: messages[done:min(done+size, len(messages))], Feed: c.feed, Attempt: attempt}
		err := c.try(ctx, b)
		var unclaimed *fence.UnclaimedError
		var stale *fence.StaleError
		switch {
		case err == nil:
			if !b.acked {
				if err := c.retry(ctx, "acknowledge", func() error { return c.feed.Ack(ctx, b.Messages) }); err != nil {
					return done, err
				}
			}
			c.metrics.done.Add(float64(len(b.Messages)))
			c.note(false, time.Time{})
			done += len(b.Messages)
			if done == len(messages) || over(waiting) {
				return done, nil
			}
			attempt = 0
			continue
		case ctx.Err() != nil, errors.Is(err, ErrNotValid), errors.As(err, &stale), errors.As(err, &unclaimed):
			return done, err
		}
		c.metrics.failures.Inc()
		c.note(true, time.Time{})
		c.cfg.Logger.Warn("worker: a batch failed", "resource", c.shard.resource, "messages", len(b.Messages), "first", b.Messages[0].ID, "attempt", attempt, "error", err)
		if size > 1 {
			size, attempt = 1, 0 // the bad one shall not fail its neighbours
			continue
		}
		if c.cfg.MaxAttempts > 0 && attempt >= c.cfg.MaxAttempts {
			if err := c.park(ctx, b.Messages[0], err.Error()); err != nil {
				return done, err
			}
			c.note(false, time.Time{})
			for i := range messages {
				messages[i].Parked = messages[i].Parked || messages[i].Key == b.Messages[0].Key
			}
			return done + 1, nil
		}
		_ = pause.For(waiting, c.pause(attempt))
		if over(waiting) {
			return done, nil // the next holder begins with the others
		}
	}
}

// try is one call of the handler.
func (c *chain) try(ctx context.Context, b *Batch) (err error) {
	select {
	case c.room <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-c.room }()
	c.note(b.Attempt > 1, time.Now())
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %v", ErrPanicked, p)
		}
	}()
	return c.cfg.Handle(ctx, b)
}

func (c *chain) park(ctx context.Context, m Message, reason string) error {
	err := c.retry(ctx, "park a message", func() error { return c.feed.Park(ctx, m, reason) })
	if err == nil {
		c.metrics.parked.Inc()
		c.cfg.Logger.Error("worker: a message is parked", "resource", c.shard.resource, "id", m.ID, "key", m.Key, "reason", reason)
	}
	return err
}

// retry repeats what failed for a reason that may pass, until ctx ends.
func (c *chain) retry(ctx context.Context, what string, do func() error) error {
	for attempt := 1; ; attempt++ {
		err := do()
		var unclaimed *fence.UnclaimedError
		var stale *fence.StaleError
		switch {
		case err == nil:
			if attempt > 1 {
				c.note(false, time.Time{})
			}
			return nil
		case ctx.Err() != nil:
			return err
		case errors.Is(err, group.ErrNewLease), errors.Is(err, ErrNotValid), errors.As(err, &stale), errors.As(err, &unclaimed):
			return err
		}
		c.note(true, time.Time{})
		c.cfg.Logger.Warn("worker: could not "+what, "resource", c.shard.resource, "attempt", attempt, "error", err)
		if pause.For(ctx, c.pause(attempt)) != nil {
			return err
		}
	}
}

// pause after so many failures.
func (c *chain) pause(attempt int) time.Duration {
	return min(c.cfg.RetryPause<<min(attempt-1, 10), 100*c.cfg.RetryPause)
}

// note is for the metrics of stalled shards.
func (c *chain) note(failing bool, since time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failing = failing; !failing || !since.IsZero() && c.since.IsZero() {
		c.since = since
	}
}

func over(ctx context.Context) bool { return ctx.Err() != nil }
