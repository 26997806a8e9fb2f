package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// patience is how long a request is repeated in a region in which no server
	// can decide: a change of leader is over by then.
	patience = 3 * time.Second
	// cancelTimeout bounds what is done for a caller that has gone.
	cancelTimeout = 2 * time.Second
	// probeEvery is how often a waiter makes sure that its region still owns
	// the partition: one that is cut off cannot tell.
	probeEvery = 5 * time.Second
)

// acquire asks this region for a lease. An error of the region itself leaves
// nothing behind: what may have been granted all the same is cancelled or
// released in the background.
func (r *region) acquire(ctx context.Context, resource string, o acquireOptions) (*Lease, error) {
	s, err := r.openSession(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.takeTurn(ctx, s, resource, o.wait); err != nil {
		return nil, err
	}
	token, err := r.request(ctx, s, resource, o)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		var l *Lease
		if l, err = r.newLease(s, resource, token); err == nil {
			return l, nil // it has the turn now
		}
	}
	s.passTurn(resource)
	return nil, err
}

// request is one Acquire with its retries, all under one id, so that however
// often it is sent it is answered once [F17].
func (r *region) request(ctx context.Context, s *session, resource string, o acquireOptions) (fence.Token, error) {
	r.mu.Lock()
	if s.over {
		r.mu.Unlock()
		return 0, s.expired()
	}
	s.request++
	id := s.request
	got := make(chan outcome, 1)
	s.waiting[id] = got
	r.table.RequestBegun(s.id, id, resource)
	r.mu.Unlock()

	token, err := r.await(ctx, s, id, resource, o, got)

	r.mu.Lock()
	r.table.RequestOver(s.id, id)
	delete(s.waiting, id)
	if err != nil {
		select { // a grant that crossed with the failure
		case late := <-got:
			if late.err == nil {
				r.releaseStranger(s, resource, late.token)
			}
		default:
		}
	}
	over := s.over
	r.mu.Unlock()
	if err != nil && !over && undecided(ctx, err) {
		r.cancel(s, id)
	}
	return token, err
}

// undecided reports whether the region may still grant or queue a request that
// failed so.
func undecided(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.Is(err, ErrUnavailable) || errors.Is(err, ErrNotOwner) || errors.Is(err, ErrMoved)
}

// await asks until the request has an outcome.
func (r *region) await(ctx context.Context, s *session, id uint64, resource string, o acquireOptions, got <-chan outcome) (fence.Token, error) {
	began := r.now()
	for pause := minRetry; ; pause = min(2*pause, maxRetry) {
		r.mu.Lock()
		attached := s.attached
		r.mu.Unlock()
		res, err := r.ask(ctx, s, id, resource, o)
		select {
		case out := <-got:
			return out.token, out.err
		default:
		}
		switch {
		case ctx.Err() != nil:
			return 0, context.Cause(ctx)
		case errors.Is(err, ErrUnavailable) && r.now().Sub(began) < patience:
			select {
			case <-ctx.Done():
				return 0, context.Cause(ctx)
			case out := <-got:
				return out.token, out.err
			case <-time.After(pause):
			}
			continue
		case errors.Is(err, ErrSessionExpired):
			r.mu.Lock()
			r.drop(s, "the region does not know the session any more")
			r.mu.Unlock()
			return 0, err
		case err != nil:
			return 0, err
		case res.GetBusy() != nil:
			b := res.GetBusy()
			return 0, &BusyError{Resource: resource, Holder: b.GetHolder(), Token: fence.Token(b.GetToken()), Waiters: b.GetWaiters()}
		case res.GetQueued() == nil:
			return 0, overBefore(resource) // granted, and known to have ended already
		}
		out, done, err := r.queued(ctx, resource, got, attached)
		if err != nil {
			return 0, err
		}
		if done {
			return out.token, out.err
		}
		// A new stream: what the old one was to say of the request may be lost,
		// so it is asked again. It keeps its place.
		began, pause = r.now(), minRetry
	}
}

// queued waits for the hand-over; done is false when it is time to ask again.
func (r *region) queued(ctx context.Context, resource string, got <-chan outcome, attached <-chan struct{}) (out outcome, done bool, err error) {
	probe := time.NewTicker(probeEvery)
	defer probe.Stop()
	for {
		select {
		case <-ctx.Done():
			return outcome{}, false, context.Cause(ctx)
		case out := <-got:
			return out, true, nil
		case <-attached:
			return outcome{}, false, nil
		case <-probe.C:
			if err := r.stillOwner(ctx, resource); err != nil {
				return outcome{}, false, err
			}
		}
	}
}

// stillOwner returns an error if another region owns the resource's partition.
func (r *region) stillOwner(ctx context.Context, resource string) error {
	err := r.get(ctx, resource, nil)
	switch {
	case errors.Is(err, ErrNotOwner), errors.Is(err, ErrMoved):
		return err
	case errors.Is(err, ErrLapsed), errors.Is(err, ErrUnavailable):
		for _, name := range r.client.order {
			if o := r.client.regions[name]; o != r && o.get(ctx, resource, nil) == nil {
				return &Error{Text: fmt.Sprintf("region %s owns %s now", name, resource), Detail: &pb.ErrorDetail{
					Kind: &pb.ErrorDetail_NotOwner{NotOwner: &pb.NotOwner{Owner: name}},
				}}
			}
		}
	}
	return nil // also when nobody could be asked: the place in the queue is worth keeping
}

// get reads a resource here.
func (r *region) get(ctx context.Context, resource string, to **pb.LeaseInfo) error {
	return r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) error {
		res, err := pb.NewLeaseServiceClient(cc).GetLease(ctx, &pb.GetLeaseRequest{Resource: resource})
		if err == nil && to != nil {
			*to = res.GetLease()
		}
		return err
	})
}

// ask sends the Acquire once, at one server after the other while none can
// decide.
func (r *region) ask(ctx context.Context, s *session, id uint64, resource string, o acquireOptions) (*pb.AcquireResponse, error) {
	var res *pb.AcquireResponse
	err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) (err error) {
		r.mu.Lock()
		lowest, over := r.table.LowestOpenRequest(s.id), s.over
		r.mu.Unlock()
		switch {
		case over:
			return s.expired()
		case lowest > id:
			return overBefore(resource) // the stream has answered it meanwhile
		}
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

// cancel gives a request up in the background: its queue place, or the lease
// that it has got meanwhile.
func (r *region) cancel(s *session, id uint64) {
	r.client.spawn(func() {
		ctx, stop := context.WithTimeout(s.ctx, cancelTimeout)
		defer stop()
		var res *pb.CancelAcquireResponse
		err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) (err error) {
			res, err = pb.NewLeaseServiceClient(cc).CancelAcquire(ctx, &pb.CancelAcquireRequest{SessionId: s.id, Secret: s.secret, RequestId: id})
			return err
		})
		if err != nil {
			// The next keepalive's lowest open request gives the place up, and a
			// grant that comes is a stranger's.
			r.client.cfg.Logger.Debug("cancel of a request failed", "region", r.name, "request", id, "error", err)
			return
		}
		if token := fence.Token(res.GetGrantedToken()); token != 0 {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.releaseStranger(s, res.GetResource(), token)
		}
	})
}

// newLease makes the lease of a granted token. Its context ends by the clock
// from the first moment on. r.mu is held.
func (r *region) newLease(s *session, resource string, token fence.Token) (*Lease, error) {
	if s.over {
		return nil, s.expired()
	}
	if r.table.ContextEnd(s.id, resource, token) <= r.now() {
		r.releaseStranger(s, resource, token)
		return nil, overBefore(resource)
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	l := &Lease{region: r, session: s, resource: resource, token: token, ctx: ctx, cancel: cancel}
	s.leases[resource] = l
	poke(s.tick)
	return l, nil
}

// overBefore: a grant came too late to be used. It is asked for again.
func overBefore(resource string) error {
	return &Error{
		Text:   fmt.Sprintf("the grant of %s was over before it could be used", resource),
		Detail: &pb.ErrorDetail{Kind: &pb.ErrorDetail_Lapsed{Lapsed: &pb.Lapsed{}}},
	}
}
