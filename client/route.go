package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/internal/instant"
)

const (
	// minRetry and maxRetry bound the pause between two regions.
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
		if ctx.Err() != nil {
			return fmt.Errorf("%w (last: %w)", context.Cause(ctx), err)
		}
		if c.ctx.Err() != nil {
			return ErrClosed
		}
		if final(err) {
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
		name = next
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (last: %w)", context.Cause(ctx), err)
		case <-c.ctx.Done():
			return ErrClosed
		case <-time.After(pause):
		}
	}
}

// final reports whether asking again cannot help.
func final(err error) bool {
	return errors.Is(err, ErrBusy) || errors.Is(err, ErrInvalid) || errors.Is(err, ErrDenied) || errors.Is(err, ErrClosed)
}

// next decides which region is asked after an error of name, and when.
func (c *Client) next(err error, name string, attempt int, silent func(string) bool) (string, time.Duration) {
	var e *Error
	var asked time.Duration
	if errors.As(err, &e) {
		asked = e.retryAfter()
		if errors.Is(err, ErrNotOwner) || errors.Is(err, ErrMoved) {
			owner := e.Detail.GetNotOwner().GetOwner()
			if owner == "" {
				owner = e.Detail.GetMoved().GetSuccessor()
			}
			// An owner that is silent is a lost region: look around for the one
			// that is promoted.
			if c.regions[owner] != nil && owner != name && !silent(owner) {
				return owner, minRetry
			}
		}
	}
	pause := max(asked, min(minRetry<<min(attempt, 4), maxRetry))
	switch {
	case errors.Is(err, ErrOverloaded), errors.Is(err, ErrSessionExpired), errors.Is(err, ErrStaleRequest):
		return name, pause
	case errors.Is(err, ErrLapsed) && attempt%2 == 0:
		// Mostly it is regained. But a region that is cut off says so for ever,
		// so every second time the others are asked.
		return name, pause
	}
	return c.after(name), pause
}

// after is the region that follows name in the order of asking.
func (c *Client) after(name string) string {
	return c.order[(slices.Index(c.order, name)+1)%len(c.order)]
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
