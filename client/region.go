package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// region is the client's part in one region: at most one session, its stream,
// its leases.
type region struct {
	client *Client
	name   string
	conns  *conns
	// opening serialises the opening of a session.
	opening chan struct{}

	mu      sync.Mutex
	table   *validity.Table
	session *session
}

// session is an open session of this client. Its stream and its sweep are
// goroutines that end with ctx.
type session struct {
	id     string
	secret []byte
	ttl    time.Duration
	// ctx ends with the session, or when it is given up.
	ctx context.Context
	end context.CancelCauseFunc
	// wake is the stream's, tick the sweep's.
	wake, tick chan struct{}

	// Under the region's lock:

	over bool
	// heard is when the last ack came; at first, when the session was opened.
	heard instant.Instant
	// acked is when the newest acknowledged keepalive was sent.
	acked instant.Instant
	// sent and answeredTo are the highest sequences of keepalives sent and
	// acknowledged.
	sent, answeredTo uint64
	// answered is closed and made anew at each ack, attached when a new stream
	// has begun to speak for the session.
	answered, attached chan struct{}
	// rtt of the newest keepalive; 0 when unknown.
	rtt time.Duration
	// soonest is when the first context ends if nothing is heard; 0 without
	// leases. span is how far off that was when it was last put off.
	soonest instant.Instant
	span    time.Duration
	// confirm asks for a keepalive at once.
	confirm bool
	request uint64
	leases  map[string]*Lease
	waiting map[uint64]chan outcome
	turns   map[string]*turn
}

// outcome of an Acquire.
type outcome struct {
	token fence.Token
	err   error
}

func newRegion(c *Client, r Region) *region {
	return &region{
		client: c, name: r.Name, conns: newConns(c.cfg.Links, r), opening: make(chan struct{}, 1),
		table: validity.New(validity.Config{}),
	}
}

func (r *region) now() instant.Instant { return r.client.cfg.Clock.Now() }

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// openSession returns the present session, or opens one and starts its stream.
func (r *region) openSession(ctx context.Context) (*session, error) {
	select {
	case r.opening <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	defer func() { <-r.opening }()
	r.mu.Lock()
	s := r.session
	r.mu.Unlock()
	if s != nil {
		return s, nil
	}
	var res *pb.OpenSessionResponse
	// A repeated call may leave a session behind that nobody knows; it expires.
	err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) (err error) {
		res, err = pb.NewSessionServiceClient(cc).OpenSession(ctx, &pb.OpenSessionRequest{
			TtlMs: r.client.cfg.TTL.Milliseconds(), Labels: r.client.cfg.Labels,
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	s = &session{
		id: res.GetSessionId(), secret: res.GetSecret(), ttl: time.Duration(res.GetTtlMs()) * time.Millisecond,
		wake: make(chan struct{}, 1), tick: make(chan struct{}, 1),
		heard: r.now(), answered: make(chan struct{}), attached: make(chan struct{}),
		leases: map[string]*Lease{}, waiting: map[uint64]chan outcome{}, turns: map[string]*turn{},
	}
	s.ctx, s.end = context.WithCancelCause(r.client.ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.table.OpenSession(s.id, s.ttl)
	r.session = s
	if !r.client.spawn(func() { r.keep(s) }) || !r.client.spawn(func() { r.sweeper(s) }) {
		r.drop(s, ErrClosed.Error())
		return nil, ErrClosed
	}
	return s, nil
}

// drop gives up a session: everything that it held is lost here. r.mu is held.
func (r *region) drop(s *session, reason string) {
	r.finish(s, fmt.Errorf("%w: %s", ErrSessionExpired, reason), func(l *Lease) error {
		return &LostError{Resource: l.resource, Token: l.token, Reason: reason}
	})
}

// finish ends a session here. Belief ends first, then the contexts. r.mu is
// held.
func (r *region) finish(s *session, cause error, why func(*Lease) error) {
	if s.over {
		return
	}
	s.over = true
	r.table.CloseSession(s.id)
	if r.session == s {
		r.session = nil
	}
	for _, l := range s.leases {
		l.over = true
		l.cancel(why(l))
	}
	for _, w := range s.waiting {
		w <- outcome{err: &Error{Text: cause.Error(), Detail: sessionExpired(s.id)}}
	}
	clear(s.leases)
	clear(s.waiting)
	s.end(cause)
}

// closeSession ends the session here and at the region.
func (r *region) closeSession(ctx context.Context) error {
	r.mu.Lock()
	s := r.session
	if s != nil {
		r.drop(s, "the client was closed")
	}
	r.mu.Unlock()
	if s == nil {
		return nil
	}
	err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) error {
		_, err := pb.NewSessionServiceClient(cc).CloseSession(ctx, &pb.CloseSessionRequest{SessionId: s.id, Secret: s.secret})
		return err
	})
	if err == nil || errors.Is(err, ErrSessionExpired) {
		return nil
	}
	return fmt.Errorf("close session %s in %s: %w; it expires within %v", s.id, r.name, err, s.ttl)
}

// leaveSession waits for the ack of a keepalive sent from now on, which starts
// the TTL anew and confirms what was handed over, and then ends the session
// here alone.
func (r *region) leaveSession(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.session
	if s == nil {
		return nil
	}
	from := s.sent
	s.confirm = true
	poke(s.wake)
	for s.answeredTo <= from && !s.over && ctx.Err() == nil {
		answered := s.answered
		r.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-s.ctx.Done():
		case <-answered:
		}
		r.mu.Lock()
	}
	over, confirmed := s.over, s.answeredTo > from
	r.finish(s, ErrLeft, func(*Lease) error { return ErrLeft })
	switch {
	case over:
		return fmt.Errorf("session %s in %s: %w", s.id, r.name, context.Cause(s.ctx))
	case !confirmed:
		return fmt.Errorf("session %s in %s was left without a last keepalive: %w", s.id, r.name, context.Cause(ctx))
	}
	return nil
}

// abandon ends whatever session there is, here alone.
func (r *region) abandon() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.session != nil {
		r.drop(r.session, "the client was closed")
	}
}

// clockGap: nothing is mapped any more until the next ack.
func (r *region) clockGap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.table.ClockGap(r.now())
	if s := r.session; s != nil {
		s.rtt = 0
		poke(s.wake)
		poke(s.tick)
	}
}

// handle acts on what the table says. r.mu is held.
func (r *region) handle(s *session, events []validity.Event) {
	for _, e := range events {
		if s.over || e.Session != s.id {
			continue
		}
		switch e.Kind {
		case validity.Granted:
			if !s.answer(e.Request, outcome{token: e.Token}) {
				r.releaseStranger(s, e.Resource, e.Token)
			}
		case validity.RequestFailed:
			s.answer(e.Request, outcome{err: errorOfDetail(e.Err)})
		case validity.Stranger:
			r.releaseStranger(s, e.Resource, e.Token)
		case validity.Withdrawn:
			if l := s.lease(e.Resource, e.Token); l != nil {
				r.lose(l, e.Until, "withdrawn by the region ("+e.Withdrawal.String()+")")
			}
		case validity.Lost:
			if l := s.lease(e.Resource, e.Token); l != nil {
				r.lose(l, 0, "the region holds it for this session no more")
			}
		case validity.SessionEnded:
			r.drop(s, "the region ended the session: "+e.Reason)
		}
	}
	poke(s.wake)
	poke(s.tick)
}

// lease returns the present lease on a resource if it has that token.
func (s *session) lease(resource string, token fence.Token) *Lease {
	if l := s.leases[resource]; l != nil && l.token == token {
		return l
	}
	return nil
}

// answer gives a waiting Acquire its outcome, once; false if nobody waits.
func (s *session) answer(request uint64, o outcome) bool {
	w, ok := s.waiting[request]
	if !ok {
		return false
	}
	delete(s.waiting, request)
	w <- o // has room for the one outcome
	return true
}

func sessionExpired(id string) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_SessionExpired{SessionExpired: &pb.SessionExpired{SessionId: id}}}
}
