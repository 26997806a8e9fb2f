package client

import (
	"context"
	"time"

	"github.com/headlease/headlease/internal/instant"
)

// A session is one holder for the region: it would be given the token that it
// has already. So within a session the users of one resource take turns, first
// come, first served: a lease, or a request for one, has the turn until the
// region holds nothing for it any more.
type turn struct {
	taken chan struct{} // has room for one
	users int           // holder and waiters
}

// takeTurn waits for the turn (or, without wait, fails with a *BusyError) and
// fails when the session, ctx, or the time to wait ends.
func (r *region) takeTurn(ctx context.Context, s *session, o acquireOptions, deadline instant.Instant) error {
	r.mu.Lock()
	if s.over {
		r.mu.Unlock()
		return s.expired()
	}
	if s.tryTurn(o.resource) {
		r.mu.Unlock()
		return nil
	}
	if !o.wait {
		busy := &BusyError{Resource: o.resource, Holder: "this very session"}
		if l := s.leases[o.resource]; l != nil {
			busy.Token = l.token
		}
		r.mu.Unlock()
		return busy
	}
	t := s.turns[o.resource]
	t.users++
	r.mu.Unlock()
	var late <-chan time.Time
	if deadline != 0 {
		timer := time.NewTimer(deadline.Sub(r.now()))
		defer timer.Stop()
		late = timer.C
	}
	var err error
	select {
	case t.taken <- struct{}{}:
		return nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-late:
		err = waitEnded(o)
	case <-s.ctx.Done():
		err = s.expired()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s.leaveTurn(o.resource, t)
	return err
}

// tryTurn takes the turn if nobody has it. The region's lock is held.
func (s *session) tryTurn(resource string) bool {
	t := s.turns[resource]
	if t == nil {
		t = &turn{taken: make(chan struct{}, 1)}
		s.turns[resource] = t
	}
	select {
	case t.taken <- struct{}{}:
		t.users++
		return true
	default:
		return false
	}
}

// passTurn gives the turn to the next one. r.mu is held.
func (s *session) passTurn(resource string) {
	t := s.turns[resource]
	<-t.taken
	s.leaveTurn(resource, t)
}

func (s *session) leaveTurn(resource string, t *turn) {
	if t.users--; t.users == 0 {
		delete(s.turns, resource)
	}
}

func (s *session) expired() error {
	return &Error{Text: context.Cause(s.ctx).Error(), Detail: sessionExpired(s.id)}
}
