package callstream

import (
	"context"
	"sync"
	"time"
)

// callContext is a call's context. One of package context per call, with a
// deadline, was a twentieth of a busy leader's time: a timer and a place in a
// table of its parent each. This one is in its stream's table anyway, which
// tells it when the stream is over, and one timer per stream when the call is due.
type callContext struct {
	context.Context // the stream's, or one below it with the call's metadata: for its values

	at time.Time // the deadline; zero: none

	mu    sync.Mutex
	err   error
	done  chan struct{} // made when somebody asks
	after map[*func()]struct{}
}

// Deadline is context.Context.
func (c *callContext) Deadline() (time.Time, bool) { return c.at, !c.at.IsZero() }

// Done is context.Context.
func (c *callContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done == nil {
		c.done = make(chan struct{})
		if c.err != nil {
			close(c.done)
		}
	}
	return c.done
}

// Err is context.Context.
func (c *callContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// AfterFunc is what package context asks for, to make a child without a
// goroutine that waits for Done.
func (c *callContext) AfterFunc(f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		go f()
		return func() bool { return false }
	}
	if c.after == nil {
		c.after = map[*func()]struct{}{}
	}
	key := &f
	c.after[key] = struct{}{}
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		_, waits := c.after[key]
		delete(c.after, key)
		return waits
	}
}

// cancel ends the context, if it has not ended before.
func (c *callContext) cancel(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	if c.done != nil {
		close(c.done)
	}
	after := c.after
	c.after = nil
	c.mu.Unlock()
	for f := range after {
		go (*f)()
	}
}

// calls are those of a stream that have no answer yet, by id.
type calls struct {
	mu    sync.Mutex
	open  map[uint64]*callContext
	timer *time.Timer // of the earliest deadline, or of an earlier one
	armed time.Time   // when it fires; zero: it does not
	err   error       // the stream is over
}

// late is how much later than its deadline a call may be told, so that calls
// that are due one after the other are not looked for one by one.
const late = time.Millisecond

// add a call; false: one of that id is open.
func (s *calls) add(id uint64, c *callContext) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.open[id]; taken {
		return false
	}
	if s.open == nil {
		s.open = map[uint64]*callContext{}
	}
	s.open[id] = c
	if s.err != nil {
		c.cancel(s.err)
	} else if !c.at.IsZero() && (s.armed.IsZero() || c.at.Before(s.armed)) {
		s.arm(c.at, time.Until(c.at))
	}
	return true
}

// arm sets the timer. s.mu is held.
func (s *calls) arm(at time.Time, in time.Duration) {
	s.armed = at
	if s.timer == nil {
		s.timer = time.AfterFunc(in, s.due)
	} else {
		s.timer.Reset(in)
	}
}

// due ends the calls whose deadline has passed.
func (s *calls) due() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	next := time.Time{}
	for _, c := range s.open {
		switch {
		case c.at.IsZero():
		case !c.at.After(now):
			c.cancel(context.DeadlineExceeded)
		case next.IsZero() || c.at.Before(next):
			next = c.at
		}
	}
	s.armed = time.Time{}
	if !next.IsZero() && s.err == nil {
		s.arm(next, max(next.Sub(now), late))
	}
}

// cancel ends a call's context.
func (s *calls) cancel(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c, ok := s.open[id]; ok {
		c.cancel(context.Canceled)
	}
}

// remove forgets a call that is answered.
func (s *calls) remove(id uint64, c *callContext) {
	c.cancel(context.Canceled)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, id)
}

// end ends the contexts of all calls, also of those to come.
func (s *calls) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
	for _, c := range s.open {
		c.cancel(err)
	}
	if s.timer != nil {
		s.timer.Stop()
	}
}
