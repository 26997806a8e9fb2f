package client

import "context"

// A session is one holder for the region: it would be given the token that it
// has already. So within a client the users of one resource take turns, first
// come, first served: a lease, or a request for one, has the turn until the
// region holds nothing for it any more.
type turn struct {
	taken chan struct{} // has room for one
	users int           // holder and waiters
}

// takeTurn waits for the turn (or, without wait, fails with a *BusyError) and
// fails when the session or ctx ends.
func (r *region) takeTurn(ctx context.Context, s *session, resource string, wait bool) error {
	r.mu.Lock()
	if s.over {
		r.mu.Unlock()
		return s.expired()
	}
	t := s.turns[resource]
	if t == nil {
		t = &turn{taken: make(chan struct{}, 1)}
		s.turns[resource] = t
	}
	select {
	case t.taken <- struct{}{}:
		t.users++
		r.mu.Unlock()
		return nil
	default:
	}
	if !wait {
		busy := &BusyError{Resource: resource, Holder: "this very client"}
		if l := s.leases[resource]; l != nil {
			busy.Token = l.token
		}
		r.mu.Unlock()
		return busy
	}
	t.users++
	r.mu.Unlock()
	var err error
	select {
	case t.taken <- struct{}{}:
		return nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-s.ctx.Done():
		err = s.expired()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s.leaveTurn(resource, t)
	return err
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
