package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/pause"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// MaxSessions of one Client: what one stream carries.
const MaxSessions = 2000

// closersAtOnce bounds the calls by which a client closes its sessions.
const closersAtOnce = 32

// SessionOptions are a session's own; zero values stand for the Client's.
type SessionOptions struct {
	// TTL, MinTTL to MaxTTL.
	TTL    time.Duration
	Labels map[string]string
}

// Session is one holder: what it holds ends with it, and its users take turns
// on a resource. It is opened in a region when it is first used there. Sessions
// of one Client share its connections and streams, and end each by itself. It is
// safe for concurrent use.
type Session struct {
	client *Client
	ttl    time.Duration
	labels map[string]string
	// phase spreads the sessions' keepalives, in [0, 1).
	phase float64
	// seats are its places in the regions, by name.
	seats map[string]*seat
}

// seat is a Session's place in one region: at most one open session.
type seat struct {
	of     *Session
	region *region
	// opening serialises the opening of a session.
	opening chan struct{}

	// Under the region's lock:

	session *session
	closed  bool
	// failed counts the tries to open a session that failed, failure is of the
	// last one: who waited for it fails with it, and does not try for itself what
	// takes a region that hangs seconds to fail.
	failed  int
	failure error
}

// NewSession returns a session of its own, beside the Client's.
func (c *Client) NewSession(o SessionOptions) (*Session, error) {
	if o.TTL == 0 {
		o.TTL = c.cfg.TTL
	}
	if err := errors.Join(checkTTL(o.TTL), checkLabels(o.Labels)); err != nil {
		return nil, fmt.Errorf("session: %w", err)
	}
	if o.Labels == nil {
		o.Labels = c.cfg.Labels
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closing:
		return nil, ErrClosed
	case len(c.sessions) >= MaxSessions:
		return nil, fmt.Errorf("session: this client has %d, which is all that it can have; close some, or use another Client", MaxSessions)
	}
	s := c.newSession(o.TTL, maps.Clone(o.Labels))
	c.sessions[s] = struct{}{}
	return s, nil
}

// newSession makes one; c.mu is held, or nobody else has c yet.
func (c *Client) newSession(ttl time.Duration, labels map[string]string) *Session {
	if ttl < CautiousTTL {
		c.cautious.Do(func() {
			c.cfg.Logger.Warn("a session with this ttl may not survive a change of leader", "ttl", ttl, "advised", CautiousTTL)
		})
	}
	s := &Session{client: c, ttl: ttl, labels: labels, seats: make(map[string]*seat, len(c.regions))}
	c.opened++
	s.phase = phase(c.phase, c.opened)
	for name, r := range c.regions {
		s.seats[name] = &seat{of: s, region: r, opening: make(chan struct{}, 1)}
	}
	return s
}

// gangs of a client's sessions are kept alive together, each in one message: a
// message costs more than what is in it.
const gangs = 4

// phase of a client's nth session, in [0, 1). Multiples of the golden ratio, modulo
// 1, spread the sessions evenly over the gangs, however many there are; where the
// gangs are is the client's own.
func phase(own float64, n int) float64 {
	_, at := math.Modf(float64(n) / math.Phi)
	return (math.Floor(at*gangs) + own) / gangs
}

func checkTTL(ttl time.Duration) error {
	if ttl < MinTTL || ttl > MaxTTL {
		return fmt.Errorf("ttl: %v is out of range; choose %v to %v", ttl, MinTTL, MaxTTL)
	}
	return nil
}

// TTL of the session.
func (s *Session) TTL() time.Duration { return s.ttl }

// Close ends the session's leases and waits, here at once and at the regions as
// far as that works before ctx ends; the rest expires.
func (s *Session) Close(ctx context.Context) error {
	return s.end(func(p *seat) error { return p.region.closeSession(ctx, p) })
}

// Leave ends the session here but not at the regions: it lives for its TTL from
// here on, and its leases can be ended with ReleaseHandle. Before that it sends
// one more keepalive, so that the TTL starts now and everything granted is
// confirmed; the error says where that did not work before ctx ended.
func (s *Session) Leave(ctx context.Context) error {
	return s.end(func(p *seat) error { return p.region.leaveSession(ctx, p) })
}

func (s *Session) end(how func(*seat) error) error {
	s.client.mu.Lock()
	delete(s.client.sessions, s)
	s.client.mu.Unlock()
	errs := make([]error, len(s.client.order))
	var wg sync.WaitGroup
	for i, name := range s.client.order {
		p := s.seats[name]
		p.region.mu.Lock()
		p.closed = true
		p.region.mu.Unlock()
		wg.Go(func() { errs[i] = how(p) })
	}
	wg.Wait()
	for _, name := range s.client.order {
		s.seats[name].abandon() // one that was being opened
	}
	return errors.Join(errs...)
}

// endAll ends all sessions of a client, some at a time.
func (c *Client) endAll(how func(*Session) error) error {
	c.mu.Lock()
	sessions := append(slices.Collect(maps.Keys(c.sessions)), c.own)
	c.mu.Unlock()
	errs := make([]error, len(sessions))
	var wg sync.WaitGroup
	turns := make(chan struct{}, closersAtOnce)
	for i, s := range sessions {
		turns <- struct{}{}
		wg.Go(func() {
			errs[i] = how(s)
			<-turns
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// open returns the present session in the seat's region, or opens one.
func (p *seat) open(ctx context.Context) (*session, error) {
	r := p.region
	r.mu.Lock()
	failed := p.failed
	r.mu.Unlock()
	select {
	case p.opening <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	defer func() { <-p.opening }()
	r.mu.Lock()
	s, closed, meanwhile, err := p.session, p.closed, p.failed != failed, p.failure
	r.mu.Unlock()
	switch {
	case closed:
		return nil, ErrClosed
	case s != nil:
		return s, nil
	case meanwhile:
		return nil, err
	}
	var res *pb.OpenSessionResponse
	// A repeated call may leave a session behind that nobody knows; it expires.
	err = r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) (err error) {
		res, err = pb.NewSessionServiceClient(cc).OpenSession(ctx, &pb.OpenSessionRequest{TtlMs: p.of.ttl.Milliseconds(), Labels: p.of.labels})
		return err
	})
	if err != nil {
		if ctx.Err() == nil {
			r.mu.Lock()
			p.failed, p.failure = p.failed+1, err
			r.mu.Unlock()
		}
		return nil, err
	}
	s = &session{
		id: res.GetSessionId(), secret: res.GetSecret(), ttl: time.Duration(res.GetTtlMs()) * time.Millisecond,
		region: r, seat: p, heard: r.now(), answered: make(chan struct{}), attached: make(chan struct{}),
		leases: map[string]*Lease{}, waiting: map[uint64]chan outcome{}, turns: map[string]*turn{},
	}
	s.send.session, s.look.session = s, s
	s.ctx, s.end = context.WithCancelCause(r.client.ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.closed {
		s.end(ErrClosed)
		return nil, ErrClosed // it expires
	}
	r.heard = s.heard
	r.table.OpenSession(s.id, s.ttl)
	p.session, r.sessions[s.id] = s, s
	r.touch(s)
	if !r.running {
		if r.running = r.client.spawn(r.run); !r.running {
			r.drop(s, ErrClosed.Error())
			return nil, ErrClosed
		}
	}
	return s, nil
}

// closeSession ends the session here and at the region: the call is repeated while
// the region cannot decide, for no longer than the session lives by itself.
func (r *region) closeSession(ctx context.Context, p *seat) error {
	r.mu.Lock()
	s := p.session
	if s != nil {
		r.drop(s, ErrClosed.Error())
	}
	r.mu.Unlock()
	if s == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.ttl)
	defer cancel()
	for wait := minRetry; ; wait = min(2*wait, maxRetry) {
		err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) error {
			_, err := pb.NewSessionServiceClient(cc).CloseSession(ctx, &pb.CloseSessionRequest{SessionId: s.id, Secret: s.secret})
			return err
		})
		if err == nil || errors.Is(err, ErrSessionExpired) {
			return nil
		}
		if !retryable(err) || pause.For(ctx, max(wait, askedToWait(err))) != nil {
			return fmt.Errorf("close session %s in %s: %w; it expires within %v", s.id, r.name, err, s.ttl)
		}
	}
}

// leaveSession waits for the ack of a keepalive sent from now on, which starts
// the TTL anew and confirms what was handed over, and then ends the session
// here alone.
func (r *region) leaveSession(ctx context.Context, p *seat) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := p.session
	if s == nil {
		return nil
	}
	over, confirmed := false, false
	for !over && !confirmed && ctx.Err() == nil {
		// An answer to Acquire may come before the stream names what it grants.
		named := r.allNamed(s)
		from := s.sent
		r.confirm(s)
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
		over, confirmed = s.over, named && s.answeredTo > from
	}
	r.finish(s, ErrLeft, func(*Lease) error { return ErrLeft })
	switch {
	case over:
		return fmt.Errorf("session %s in %s: %w", s.id, r.name, context.Cause(s.ctx))
	case !confirmed:
		return fmt.Errorf("session %s in %s was left without a last keepalive: %w", s.id, r.name, context.Cause(ctx))
	}
	r.detach(s)
	return nil
}

// allNamed: the stream has named all that the session holds. r.mu is held.
func (r *region) allNamed(s *session) bool {
	for _, l := range s.leases {
		if !l.over && !r.table.Named(s.id, l.resource, l.token) {
			return false
		}
	}
	return true
}

// abandon ends whatever session there is, here alone.
func (p *seat) abandon() {
	p.region.mu.Lock()
	defer p.region.mu.Unlock()
	p.closed = true
	if p.session != nil {
		p.region.drop(p.session, ErrClosed.Error())
	}
}
