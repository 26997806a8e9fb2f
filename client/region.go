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
	wake    chan struct{}
}

// session is an open session of this client.
type session struct {
	id     string
	secret []byte
	ttl    time.Duration
	// heard is when the last ack came; at first, when the session was opened.
	heard instant.Instant
	// ctx ends with the session, or when it is given up.
	ctx     context.Context
	end     context.CancelCauseFunc
	request uint64
	leases  map[string]*Lease
	waiting map[uint64]chan outcome
}

// outcome of a waiting Acquire.
type outcome struct {
	token fence.Token
	err   error
}

func newRegion(c *Client, r Region) *region {
	return &region{
		client: c, name: r.Name, conns: newConns(c.cfg.Links, r), opening: make(chan struct{}, 1),
		table: validity.New(validity.Config{}), wake: make(chan struct{}, 1),
	}
}

func (r *region) now() instant.Instant { return r.client.cfg.Clock.Now() }

func (r *region) kick() {
	select {
	case r.wake <- struct{}{}:
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
	err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) (err error) {
		res, err = pb.NewSessionServiceClient(cc).OpenSession(ctx, &pb.OpenSessionRequest{
			TtlMs: r.client.cfg.TTL.Milliseconds(), Labels: r.client.cfg.Labels,
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	if r.client.ctx.Err() != nil {
		return nil, ErrClosed
	}
	s = &session{
		id: res.GetSessionId(), secret: res.GetSecret(), ttl: time.Duration(res.GetTtlMs()) * time.Millisecond,
		heard: r.now(), leases: map[string]*Lease{}, waiting: map[uint64]chan outcome{},
	}
	s.ctx, s.end = context.WithCancelCause(r.client.ctx)
	r.mu.Lock()
	r.table.OpenSession(s.id, s.ttl)
	r.session = s
	r.mu.Unlock()
	r.client.work.Go(func() { r.keep(s) })
	return s, nil
}

// give up a session: everything that it held is lost here. r.mu is held.
func (r *region) dropSession(s *session, reason string) {
	if r.session != s {
		return
	}
	r.table.CloseSession(s.id)
	r.session = nil
	for _, l := range s.leases {
		l.cancel(&LostError{Resource: l.resource, Token: l.token, Reason: reason})
	}
	for _, w := range s.waiting {
		w <- outcome{err: &Error{Text: reason, Detail: &pb.ErrorDetail{Kind: &pb.ErrorDetail_SessionExpired{SessionExpired: &pb.SessionExpired{SessionId: s.id}}}}}
	}
	s.leases, s.waiting = nil, nil
	s.end(fmt.Errorf("%w: %s", ErrSessionExpired, reason))
}

// closeSession ends the session here and at the region.
func (r *region) closeSession(ctx context.Context) error {
	r.mu.Lock()
	s := r.session
	if s != nil {
		r.dropSession(s, "the client was closed")
	}
	r.mu.Unlock()
	if s == nil {
		return nil
	}
	return r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) error {
		_, err := pb.NewSessionServiceClient(cc).CloseSession(ctx, &pb.CloseSessionRequest{SessionId: s.id, Secret: s.secret})
		return err
	})
}

func (r *region) clockGap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.table.ClockGap(r.now())
	r.kick()
}

// acquire asks this region once: it returns a lease, or an error that says
// whether to look elsewhere.
func (r *region) acquire(ctx context.Context, resource string, o acquireOptions) (*Lease, error) {
	s, err := r.openSession(ctx)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	if r.session != s {
		r.mu.Unlock()
		return nil, &Error{Text: "the session ended", Detail: &pb.ErrorDetail{Kind: &pb.ErrorDetail_SessionExpired{}}}
	}
	s.request++
	id := s.request
	wait := make(chan outcome, 1)
	s.waiting[id] = wait
	r.table.RequestBegun(s.id, id, resource)
	r.mu.Unlock()
	defer r.requestOver(s, id)

	res, err := r.ask(ctx, s, id, resource, o)
	if err != nil {
		if ctx.Err() != nil {
			r.cancel(s, id) // the outcome is unknown; a grant must not be left behind
		}
		if errors.Is(err, ErrSessionExpired) {
			r.mu.Lock()
			r.dropSession(s, "the region does not know the session any more")
			r.mu.Unlock()
		}
		return nil, err
	}
	if b := res.GetBusy(); b != nil {
		return nil, &BusyError{Resource: resource, Holder: b.GetHolder(), Token: fence.Token(b.GetToken()), Waiters: b.GetWaiters()}
	}
	select {
	case w := <-wait:
		if w.err != nil {
			return nil, w.err
		}
		return r.newLease(s, resource, w.token)
	case <-ctx.Done():
		r.cancel(s, id)
		return nil, context.Cause(ctx)
	}
}

// ask sends the Acquire, again under the same id while no server can decide.
func (r *region) ask(ctx context.Context, s *session, id uint64, resource string, o acquireOptions) (*pb.AcquireResponse, error) {
	var res *pb.AcquireResponse
	err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) (err error) {
		r.mu.Lock()
		lowest := r.table.LowestOpenRequest(s.id)
		r.mu.Unlock()
		sent := r.now() // before this very attempt leaves
		res, err = pb.NewLeaseServiceClient(cc).Acquire(ctx, &pb.AcquireRequest{
			SessionId: s.id, Secret: s.secret, RequestId: id, LowestOpenRequest: lowest, Resource: resource, Wait: o.wait,
		})
		if err == nil {
			r.mu.Lock()
			r.handle(s, r.table.AcquireAnswered(r.now(), sent, s.id, id, res))
			r.mu.Unlock()
		}
		return err
	})
	return res, err
}

func (r *region) requestOver(s *session, id uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.table.RequestOver(s.id, id)
	delete(s.waiting, id)
}

// cancelTimeout bounds what is done for a caller that has gone.
const cancelTimeout = 2 * time.Second

// cancel gives a request up in the background: its queue place, or the lease
// that it has got meanwhile.
func (r *region) cancel(s *session, id uint64) {
	r.client.work.Go(func() {
		ctx, stop := context.WithTimeout(s.ctx, cancelTimeout)
		defer stop()
		var res *pb.CancelAcquireResponse
		err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) (err error) {
			res, err = pb.NewLeaseServiceClient(cc).CancelAcquire(ctx, &pb.CancelAcquireRequest{SessionId: s.id, Secret: s.secret, RequestId: id})
			return err
		})
		if err == nil && res.GetGrantedToken() != 0 {
			r.releaseStranger(s, res.GetResource(), fence.Token(res.GetGrantedToken()))
		}
	})
}

// newLease makes the lease of a granted token. Its context ends by the clock
// from the first moment on.
func (r *region) newLease(s *session, resource string, token fence.Token) (*Lease, error) {
	ctx, cancel := context.WithCancelCause(s.ctx)
	l := &Lease{region: r, session: s.id, resource: resource, token: token, ctx: ctx, cancel: cancel}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.session != s || r.table.ContextEnd(s.id, resource, token) <= r.now() {
		lost := &LostError{Resource: resource, Token: token, Reason: "its validity was over before it could be used"}
		cancel(lost)
		if r.session == s {
			r.client.work.Go(func() { r.releaseStranger(s, resource, token) })
		}
		return nil, &Error{Text: lost.Error(), Detail: &pb.ErrorDetail{Kind: &pb.ErrorDetail_Lapsed{Lapsed: &pb.Lapsed{}}}}
	}
	if old := s.leases[resource]; old != nil && old.token != token {
		old.cancel(&LostError{Resource: resource, Token: old.token, Reason: "superseded by token " + token.String()})
	}
	s.leases[resource] = l
	r.kick()
	return l, nil
}

func (r *region) valid(l *Lease) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.table.Valid(r.now(), l.session, l.resource, l.token)
}

func (r *region) remaining(l *Lease) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return max(0, r.table.Until(l.session, l.resource, l.token).Sub(r.now()))
}

func (r *region) release(ctx context.Context, l *Lease) error {
	r.mu.Lock()
	s := r.session
	if s == nil || s.id != l.session || s.leases[l.resource] != l {
		r.mu.Unlock()
		l.cancel(ErrReleased)
		return nil // ended already, and nothing of it is left at the region
	}
	delete(s.leases, l.resource)
	r.table.Releasing(r.now(), s.id, l.resource, l.token) // belief ends first
	r.mu.Unlock()
	l.cancel(ErrReleased)
	// The region must hear of it, or the resource stays held as long as the
	// session lives: told on in the background when ctx ends first.
	told := make(chan struct{})
	r.client.work.Go(func() {
		defer close(told)
		r.releaseStranger(s, l.resource, l.token)
	})
	select {
	case <-told:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("release %s (token %s): the region could not be told yet; it is told in the background: %w", l.resource, l.token, context.Cause(ctx))
	}
}

func (r *region) sendRelease(ctx context.Context, s *session, resource string, token fence.Token) error {
	err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) error {
		_, err := pb.NewLeaseServiceClient(cc).Release(ctx, &pb.ReleaseRequest{
			SessionId: s.id, Secret: s.secret, Resource: resource, Token: uint64(token),
		})
		return err
	})
	if err == nil || errors.Is(err, ErrNotHolder) || errors.Is(err, ErrSessionExpired) {
		r.mu.Lock()
		r.table.Released(r.now(), s.id, resource, token)
		r.mu.Unlock()
		return nil
	}
	return fmt.Errorf("release %s (token %s): %w", resource, token, err)
}

// releaseStranger releases a token that nobody here asked for or wants any
// more, until that works or the session is over [F17].
func (r *region) releaseStranger(s *session, resource string, token fence.Token) {
	r.mu.Lock()
	r.table.Releasing(r.now(), s.id, resource, token)
	r.mu.Unlock()
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		err := r.sendRelease(s.ctx, s, resource, token)
		if err == nil {
			return
		}
		r.client.cfg.Logger.Debug("release of an unwanted lease failed", "resource", resource, "token", token.String(), "error", err)
		select {
		case <-s.ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// handle acts on what the table says. r.mu is held.
func (r *region) handle(s *session, events []validity.Event) {
	for _, e := range events {
		if s == nil || e.Session != s.id {
			continue
		}
		switch e.Kind {
		case validity.Granted:
			w, ok := s.waiting[e.Request]
			if !ok {
				r.client.work.Go(func() { r.releaseStranger(s, e.Resource, e.Token) })
				continue
			}
			delete(s.waiting, e.Request)
			w <- outcome{token: e.Token}
		case validity.RequestFailed:
			if w, ok := s.waiting[e.Request]; ok {
				delete(s.waiting, e.Request)
				w <- outcome{err: errorOfDetail(e.Err)}
			}
		case validity.Stranger:
			r.client.work.Go(func() { r.releaseStranger(s, e.Resource, e.Token) })
		case validity.Withdrawn:
			r.loseLease(s, e, "withdrawn by the region ("+e.Withdrawal.String()+")")
		case validity.Lost:
			r.loseLease(s, e, "the region holds it for this session no more")
		case validity.SessionEnded:
			r.dropSession(s, "the region ended the session: "+e.Reason)
		}
	}
	if len(events) > 0 {
		r.kick()
	}
}

func (r *region) loseLease(s *session, e validity.Event, reason string) {
	if l := s.leases[e.Resource]; l != nil && l.token == e.Token {
		delete(s.leases, e.Resource)
		l.cancel(&LostError{Resource: l.resource, Token: l.token, Reason: reason})
	}
}
