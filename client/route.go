package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/headlease/headlease/internal/instant"
)

const (
	// minRetry and maxRetry bound the pause between two attempts.
	minRetry = 20 * time.Millisecond
	maxRetry = 250 * time.Millisecond
	// silentFor is how long a region that did not answer is not asked again just
	// because another one names it as owner: it may be lost.
	silentFor = time.Second
	// maxHints bounds the memory of who owned what.
	maxHints = 10_000
)

// route finds the region that owns the resource and calls do there, over
// lapses, promotions and lost regions, until it succeeds, fails for good, or
// ctx ends.
func (c *Client) route(ctx context.Context, resource string, do func(context.Context, *region) error) error {
	silent := map[string]instant.Instant{} // regions that did not answer, and when
	name := c.hint(resource)
	if name == "" {
		name = c.order[0]
	}
	for attempt := 0; ; attempt++ {
		err := do(ctx, c.regions[name])
		if err == nil {
			c.setHint(resource, name)
			return nil
		}
		gaveUp := func() error { return fmt.Errorf("%w (last: %w)", context.Cause(ctx), err) }
		switch {
		case ctx.Err() != nil:
			return gaveUp()
		case c.ctx.Err() != nil:
			return ErrClosed
		case final(err):
			return err
		}
		now := c.cfg.Clock.Now()
		if errors.Is(err, ErrUnavailable) {
			silent[name] = now
		}
		next, pause := c.next(err, name, attempt, func(region string) bool {
			at, ok := silent[region]
			return ok && now.Sub(at) < silentFor
		})
		select {
		case <-ctx.Done():
			return gaveUp()
		case <-c.ctx.Done():
			return ErrClosed
		case <-time.After(c.cfg.random.spread(pause, askedToWait(err))):
		}
		if next == "" {
			l := c.lookAround(resource, nil)
			select {
			case <-ctx.Done():
			case <-c.ctx.Done():
			case <-l.found():
				next = l.owner
			}
			l.leave()
		}
		switch {
		case ctx.Err() != nil:
			return gaveUp()
		case c.ctx.Err() != nil:
			return ErrClosed
		}
		name = next
	}
}

// final reports whether asking again cannot help.
func final(err error) bool {
	for _, target := range []error{ErrBusy, ErrInvalid, ErrDenied, ErrClosed, ErrWaitEnded} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// next decides which region is asked after an error of name, and when; none:
// all are to be asked who owns it.
func (c *Client) next(err error, name string, attempt int, silent func(string) bool) (string, time.Duration) {
	var e *Error
	if errors.As(err, &e) && (errors.Is(err, ErrNotOwner) || errors.Is(err, ErrMoved)) {
		owner := e.Detail.GetNotOwner().GetOwner()
		if owner == "" {
			owner = e.Detail.GetMoved().GetSuccessor()
		}
		// An owner that is silent is a lost region: look around for the one
		// that is promoted.
		if c.regions[owner] != nil && owner != name && !silent(owner) {
			return owner, min(minRetry<<min(attempt, 4), maxRetry)
		}
	}
	pause := max(askedToWait(err), min(minRetry<<min(attempt, 4), maxRetry))
	switch {
	case errors.Is(err, ErrOverloaded), errors.Is(err, ErrSessionExpired), errors.Is(err, ErrStaleRequest):
		return name, pause
	case errors.Is(err, ErrLapsed) && attempt%2 == 0:
		// Mostly it is regained. But a region that is cut off says so for ever,
		// so every second time all are asked.
		return name, pause
	}
	return "", pause
}

func (c *Client) hint(resource string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hints[resource]
}

func (c *Client) setHint(resource, region string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.hints) >= maxHints {
		clear(c.hints)
	}
	c.hints[resource] = region
}
