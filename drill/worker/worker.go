// Package worker is the workload of the drills: a process that acquires a lock,
// claims the resource and writes to it for as long as its lease is valid, as a
// worker's author would do it with the SDK. It reports what it does as lines of
// JSON, and, told by SIGUSR1, it stops itself at the worst place there is:
// between its lease.Valid() check and the send of its write.
package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
)

const (
	// acquireLimit bounds one try, so that a worker that waits says so.
	acquireLimit = 30 * time.Second
	writeLimit   = 5 * time.Second
)

// Lease is what a worker needs of a client.Lease.
type Lease interface {
	Token() fence.Token
	Region() string
	Context() context.Context
	Valid() bool
	Remaining() time.Duration
}

// Resource is what it needs of a resource.Client.
type Resource interface {
	Claim(ctx context.Context, name string, token fence.Token) (resource.Entry, error)
	Write(ctx context.Context, name string, token fence.Token, value string) (resource.Entry, error)
}

// Config of a worker.
type Config struct {
	// Name is in the values that it writes.
	Name string
	// Lock to acquire; it is also the resource's name.
	Lock string
	// Acquire tries once, without waiting in the queue.
	Acquire  func(ctx context.Context, lock string) (Lease, error)
	Resource Resource
	Clock    clock.Clock
	// Freeze asks for one freeze before the next send; nil: never.
	Freeze <-chan struct{}
	// Stop freezes the process and returns when it goes on.
	Stop func() error
	// Report gets every event, from the goroutine of Run.
	Report func(Event)
	// Poll is the pause between tries while the lock is held by another;
	// default 250 ms.
	Poll time.Duration
	// Every is the pause between writes; default 100 ms.
	Every time.Duration
}

func (c Config) withDefaults() Config {
	if c.Poll == 0 {
		c.Poll = 250 * time.Millisecond
	}
	if c.Every == 0 {
		c.Every = 100 * time.Millisecond
	}
	return c
}

// Validate reports all faults at once.
func (c Config) Validate() error {
	var errs []error
	missing := func(field string, absent bool) {
		if absent {
			errs = append(errs, fmt.Errorf("%s: missing; a worker cannot do without", field))
		}
	}
	missing("name", c.Name == "")
	missing("lock", c.Lock == "")
	missing("acquire", c.Acquire == nil)
	missing("resource", c.Resource == nil)
	missing("clock", c.Clock == nil)
	missing("stop", c.Freeze != nil && c.Stop == nil)
	missing("report", c.Report == nil)
	if c.Poll < 0 || c.Every < 0 {
		errs = append(errs, errors.New("poll, every: negative; leave them out for the defaults"))
	}
	return errors.Join(errs...)
}

// Run works until ctx ends, which is no error, or until its lease is lost or a
// write refused.
func Run(ctx context.Context, c Config) error {
	c = c.withDefaults()
	if err := c.Validate(); err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	w := &worker{Config: c}
	if err := w.run(ctx); ctx.Err() == nil {
		return err
	}
	return nil
}

type worker struct {
	Config
	lease  Lease
	writes int
}

func (w *worker) run(ctx context.Context) error {
	if err := w.acquire(ctx); err != nil {
		return err
	}
	if refused, err := w.claim(ctx); refused || err != nil {
		return err
	}
	for pause := time.Duration(0); ; pause = w.Every {
		freeze := false
		select {
		case <-ctx.Done():
			return nil
		case <-w.lease.Context().Done():
			if ctx.Err() == nil {
				w.report(Event{Kind: Lost, Reason: context.Cause(w.lease.Context()).Error()})
			}
			return nil
		case <-w.Freeze:
			freeze = true
		case <-time.After(pause):
		}
		if over, err := w.write(ctx, freeze); over || err != nil {
			return err
		}
	}
}

// acquire polls, as a standby does that has other things to look after.
func (w *worker) acquire(ctx context.Context) error {
	for waiting := false; ; {
		try, cancel := context.WithTimeout(ctx, acquireLimit)
		lease, err := w.Acquire(try, w.Lock)
		late := try.Err() != nil && ctx.Err() == nil
		cancel()
		switch {
		case err == nil:
			w.lease = lease
			w.report(Event{Kind: Acquired, Region: lease.Region()})
			return nil
		case !errors.Is(err, client.ErrBusy) && !late:
			return fmt.Errorf("acquire %s: %w", w.Lock, err)
		case !waiting:
			waiting = true
			w.report(Event{Kind: Waiting, Reason: err.Error()})
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(w.Poll):
		}
	}
}

// claim raises the mark before anything is read or written.
func (w *worker) claim(ctx context.Context) (refused bool, err error) {
	limited, cancel := context.WithTimeout(ctx, writeLimit)
	defer cancel()
	_, err = w.Resource.Claim(limited, w.Lock, w.lease.Token())
	if w.refused(err, "") {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("claim %s: %w", w.Lock, err)
	}
	w.report(Event{Kind: Claimed})
	return false, nil
}

// write checks the lease and writes, with a freeze in between if asked.
func (w *worker) write(ctx context.Context, freeze bool) (over bool, err error) {
	w.writes++
	value := fmt.Sprintf("write %d of %s", w.writes, w.Name)
	if !w.lease.Valid() {
		w.report(Event{Kind: Lost, Reason: "lease.Valid() says no"})
		return true, nil
	}
	var resumed instant.Instant
	if freeze {
		w.report(Event{Kind: Freezing, Value: value})
		if err := w.Stop(); err != nil {
			return true, fmt.Errorf("freeze: %w", err)
		}
		resumed = w.Clock.Now()
	}
	limited, cancel := context.WithTimeout(ctx, writeLimit)
	defer cancel()
	_, err = w.Resource.Write(limited, w.Lock, w.lease.Token(), value)
	if freeze { // reported after the send, so that nothing comes before it
		w.Report(Event{Kind: Resumed, At: resumed, Token: w.lease.Token(), Value: value})
	}
	switch {
	case w.refused(err, value):
		return true, nil
	case err == nil:
		w.report(Event{Kind: Written, Value: value})
	case ctx.Err() == nil:
		w.report(Event{Kind: Failed, Value: value, Reason: err.Error()})
	}
	return freeze, nil
}

func (w *worker) refused(err error, value string) bool {
	e := Event{Kind: Refused, Value: value}
	var stale *fence.StaleError
	var unclaimed *fence.UnclaimedError
	switch {
	case errors.As(err, &stale):
		e.Mark = stale.Seen
	case errors.As(err, &unclaimed):
	default:
		return false
	}
	e.Reason = err.Error()
	w.report(e)
	return true
}

// report completes an event with what the worker believes at this moment.
func (w *worker) report(e Event) {
	e.At = w.Clock.Now() // before Remaining, so that At + Remaining is not too late
	if w.lease != nil {
		e.Token = w.lease.Token()
		if left := w.lease.Remaining(); left > 0 && w.lease.Valid() {
			e.Until = e.At.Add(left)
		}
	}
	w.Report(e)
}
