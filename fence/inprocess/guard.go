// Package inprocess is a fence guard for effects of one process: the highest token
// seen of each resource is kept here, and an effect with a lower token is
// refused.
//
// What it guarantees, whatever clocks and pauses do:
//   - no effect of a lower token begins once a higher one was seen, and one that was
//     running has returned before Claim returns nil or an effect of the higher token
//     begins [F15];
//   - a resource that nobody claimed takes no effect (*fence.UnclaimedError).
//
// It holds as long as the process lives and all effects on the data go through one guard.
// Marks in memory end with the process, so that afterwards every resource is unclaimed and
// the older of two holders may be the first to claim: use it where the data guarded
// ends with the process too, or with a Marks that outlives it, as fence/filemark does.
package inprocess

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/headlease/headlease/fence"
)

// MaxResource bounds a resource's name, in bytes.
const MaxResource = 1024

// DefaultMaxResources bounds the marks in memory.
const DefaultMaxResources = 1_000_000

// ErrClosed is returned once Close was called, and is the cancellation cause
// of the effects that Close found running.
var ErrClosed = errors.New("guard is closed")

// Marks keeps marks. A guard calls it from one goroutine at a time.
type Marks interface {
	// Mark of a resource; 0: there is none.
	Mark(resource string) fence.Token
	// Raise sets a higher mark; if it outlives the process, then before it returns.
	Raise(resource string, token fence.Token) error
	// Usable returns why no mark can be relied on any more; nil: they can.
	Usable() error
}

// Options of a guard.
type Options struct {
	// Marks defaults to memory.
	Marks Marks
	// MaxResources bounds the marks in memory: beyond it new resources are refused, since
	// no mark may be forgotten. Default DefaultMaxResources.
	MaxResources int
	// UnguardedForDrill lets every write pass, whatever its token: the
	// control run of a drill, which shows that the guard is what refuses.
	// Marks are still kept. Never set it on data that matters.
	UnguardedForDrill bool
}

// Guard is safe for concurrent use.
type Guard struct {
	opts Options

	// mu guards all below. It is held over Raise, so that
	// nobody is admitted on a mark that may be lost; never over an effect.
	mu      sync.Mutex
	marks   Marks
	running map[string]map[*effect]struct{}
	closed  bool
}

// effect is a call of Do whose function has not returned.
type effect struct {
	token  fence.Token
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// New returns a guard.
func New(opts Options) *Guard {
	if opts.MaxResources == 0 {
		opts.MaxResources = DefaultMaxResources
	}
	if opts.Marks == nil {
		opts.Marks = &memory{max: opts.MaxResources, marks: map[string]fence.Token{}}
	}
	return &Guard{opts: opts, marks: opts.Marks, running: map[string]map[*effect]struct{}{}}
}

// memory is Marks that end with the process.
type memory struct {
	max   int
	marks map[string]fence.Token
}

func (m *memory) Mark(resource string) fence.Token { return m.marks[resource] }
func (m *memory) Usable() error                    { return nil }

func (m *memory) Raise(resource string, token fence.Token) error {
	if _, known := m.marks[resource]; !known && len(m.marks) >= m.max {
		return fmt.Errorf("mark of %s: %d resources have one, which is all that are kept in memory; raise MaxResources", resource, m.max)
	}
	m.marks[resource] = token
	return nil
}

// Shared is false: the marks are this process's own.
func (g *Guard) Shared() bool { return false }

// Mark returns the highest token seen of a resource; 0 if nobody claimed it.
func (g *Guard) Mark(resource string) fence.Token {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.marks.Mark(resource)
}

// Claim raises the resource's mark to the token and then waits until no effect
// of a lower token is running, having cancelled them: after a nil return the
// new holder reads a state that no earlier holder changes any more [F15]. It is
// repeatable. A holder calls it once before its first read, and only while
// lease.Valid().
//
// It fails with a *fence.StaleError if a higher token was seen. If ctx ends
// while lower effects are running the mark stays raised; claim again.
func (g *Guard) Claim(ctx context.Context, resource string, token fence.Token) error {
	if err := check(ctx, resource, token); err != nil {
		return err
	}
	g.mu.Lock()
	lower, err := g.raise(resource, token)
	g.mu.Unlock()
	if err != nil {
		return err
	}
	if err := wait(ctx, lower); err != nil {
		return fmt.Errorf("claim of %s: the mark is raised to %s, but an effect of a lower token is still running: %w", resource, token, err)
	}
	return nil
}

// Do runs the effect if the token is not below the resource's mark, and
// returns its error. A higher token raises the mark first and waits for lower
// effects as Claim does. The effect's ctx is cancelled, with a
// *fence.StaleError as cause, as soon as a higher token arrives, which then
// waits for the effect's return; effects of one token run side by side.
//
// It fails with a *fence.StaleError below the mark and with a
// *fence.UnclaimedError without one, the effect not run.
func (g *Guard) Do(ctx context.Context, resource string, token fence.Token, run func(context.Context) error) error {
	if err := check(ctx, resource, token); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	e := &effect{token: token, cancel: cancel, done: make(chan struct{})}
	for {
		lower, err := g.admit(resource, e)
		if err != nil {
			return err
		}
		if len(lower) == 0 {
			break
		}
		// While this waits a still higher token may come: asked again.
		if err := wait(ctx, lower); err != nil {
			return fmt.Errorf("write to %s: an effect of a lower token is still running: %w", resource, err)
		}
	}
	defer g.leave(resource, e)
	return run(ctx)
}

// Close cancels running effects and waits for them; nothing is admitted any more. It
// returns false if the guard was closed before.
func (g *Guard) Close() bool {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return false
	}
	g.closed = true
	var all []*effect
	for _, effects := range g.running {
		for e := range effects {
			e.cancel(ErrClosed)
			all = append(all, e)
		}
	}
	g.mu.Unlock()
	for _, e := range all {
		<-e.done
	}
	return true
}

func check(ctx context.Context, resource string, token fence.Token) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if resource == "" || len(resource) > MaxResource {
		return fmt.Errorf("resource of a guarded write: has %d bytes; 1 to %d are allowed", len(resource), MaxResource)
	}
	if _, err := fence.TokenOf(uint64(token)); err != nil {
		return fmt.Errorf("token of a guarded write to %s: %w", resource, err)
	}
	return nil
}

// raise makes the token the resource's mark unless it is already, and returns
// the effects of lower tokens, cancelled. Called under mu.
func (g *Guard) raise(resource string, token fence.Token) ([]*effect, error) {
	if g.closed {
		return nil, ErrClosed
	}
	if err := g.marks.Usable(); err != nil {
		return nil, err
	}
	mark := g.marks.Mark(resource)
	if token < mark {
		return nil, &fence.StaleError{Resource: resource, Seen: mark, Given: token}
	}
	if token > mark {
		if err := g.marks.Raise(resource, token); err != nil {
			return nil, err
		}
	}
	if g.opts.UnguardedForDrill {
		return nil, nil
	}
	var lower []*effect
	for e := range g.running[resource] {
		if e.token < token {
			e.cancel(&fence.StaleError{Resource: resource, Seen: token, Given: e.token})
			lower = append(lower, e)
		}
	}
	return lower, nil
}

// admit registers the effect if it may run now; otherwise it returns the lower
// ones to wait for.
func (g *Guard) admit(resource string, e *effect) ([]*effect, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, ErrClosed
	}
	mark, off := g.marks.Mark(resource), g.opts.UnguardedForDrill
	if mark == 0 && !off {
		return nil, &fence.UnclaimedError{Resource: resource}
	}
	if e.token >= mark || !off {
		lower, err := g.raise(resource, e.token)
		if err != nil || len(lower) > 0 {
			return lower, err
		}
	}
	if g.running[resource] == nil {
		g.running[resource] = map[*effect]struct{}{}
	}
	g.running[resource][e] = struct{}{}
	return nil, nil
}

func (g *Guard) leave(resource string, e *effect) {
	g.mu.Lock()
	delete(g.running[resource], e)
	if len(g.running[resource]) == 0 {
		delete(g.running, resource)
	}
	g.mu.Unlock()
	close(e.done)
}

func wait(ctx context.Context, effects []*effect) error {
	for _, e := range effects {
		select {
		case <-e.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}
