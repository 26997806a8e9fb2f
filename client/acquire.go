package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// patience is how long a request is repeated in a region in which no server
	// can decide: a change of leader is over by then.
	patience = 3 * time.Second
	// cancelTimeout bounds what is done for a caller that has gone.
	cancelTimeout = 2 * time.Second
	// probeEvery is about how often a waiter makes sure that its region still owns
	// the partition: one that is cut off cannot tell.
	probeEvery = 5 * time.Second
	// minUnreachable is the least time between a waiter's two looks whether its region
	// can be reached.
	minUnreachable = 100 * time.Millisecond
	// waitGrace is how much longer than it has asked for a request waits when its
	// region does not say that the time is over.
	waitGrace = time.Second
	// maxUnbelieved is how long a granted token may wait for its validity.
	maxUnbelieved = 2 * time.Second
)

// Acquire takes a lease on a resource: shard/N, lock/NAME or lock/NAME#SLOT.
// Without Wait it fails with ErrBusy when somebody else holds it. It looks for
// the region that owns the resource's partition, waits out lapses and
// promotions, and gives up when ctx does.
func (s *Session) Acquire(ctx context.Context, resource string, options ...Option) (*Lease, error) {
	o, err := newAcquireOptions(resource, 0, options)
	if err != nil {
		return nil, err
	}
	return s.acquire(ctx, o)
}

// AcquireSlot takes a lease on any free slot of a semaphore with so many slots:
// of lock/NAME these are lock/NAME#0 and so on, and the lease's Resource says
// which one it is. All who use a semaphore must give the same number. A slot of
// it must not also be acquired by its own name in the same session.
func (s *Session) AcquireSlot(ctx context.Context, resource string, slots int, options ...Option) (*Lease, error) {
	if slots < 1 {
		return nil, invalidField("slots", fmt.Sprintf("%d is out of range; choose 1 to %d", slots, MaxSlots))
	}
	o, err := newAcquireOptions(resource, slots, options)
	if err != nil {
		return nil, err
	}
	return s.acquire(ctx, o)
}

func (s *Session) acquire(ctx context.Context, o acquireOptions) (lease *Lease, err error) {
	var deadline instant.Instant
	if o.atMost > 0 {
		deadline = s.client.cfg.Clock.Now().Add(o.atMost)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, o.atMost+waitGrace, waitEnded(o))
		defer cancel()
	}
	err = s.client.route(ctx, o.resource, func(ctx context.Context, r *region) (err error) {
		lease, err = r.acquire(ctx, s.seats[r.name], o, deadline)
		return err
	})
	if errors.Is(err, ErrWaitEnded) {
		err = waitEnded(o) // all of it, whichever regions it was spent in
	}
	return lease, err
}

func waitEnded(o acquireOptions) *Error {
	return errorOfDetail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_WaitEnded{WaitEnded: &pb.WaitEnded{
		Resource: o.resource, WaitedMs: o.atMost.Milliseconds(),
	}}})
}

// acquire asks this region for a lease. An error of the region itself leaves
// nothing behind: what may have been granted all the same is cancelled or
// released in the background.
func (r *region) acquire(ctx context.Context, p *seat, o acquireOptions, deadline instant.Instant) (*Lease, error) {
	s, err := p.open(ctx)
	if err != nil {
		return nil, err
	}
	// Each of a semaphore's slots is a resource of its own: nobody here is in
	// another's way.
	if o.slots == 0 {
		if err := r.takeTurn(ctx, s, o, deadline); err != nil {
			return nil, err
		}
	}
	got, err := r.request(ctx, s, o, deadline)
	r.mu.Lock()
	defer r.mu.Unlock()
	if old := s.leases[got.resource]; err == nil && o.slots != 0 && old != nil && old.token < got.token {
		// The region has handed the slot over within the session, and the answer
		// to its release is still under way.
		r.lose(old, 0, "its slot was granted anew")
	}
	if err == nil && o.slots != 0 && !s.tryTurn(got.resource) {
		r.releaseStranger(s, got.resource, got.token)
		return nil, &BusyError{Resource: got.resource, Holder: "this very session, which acquired the slot by its name"}
	}
	if err == nil {
		var l *Lease
		if l, err = r.believe(ctx, s, got.resource, got.token); err == nil {
			return l, nil // it has the turn now
		}
	}
	switch {
	case o.slots == 0:
		s.passTurn(o.resource)
	case got.resource != "":
		s.passTurn(got.resource)
	}
	return nil, err
}

// believe makes the lease of a granted token, once it is valid here: a new
// leader may name it before it can say how far its head lease reaches, or before
// its clock is mapped. r.mu is held, but not while waiting.
func (r *region) believe(ctx context.Context, s *session, resource string, token fence.Token) (*Lease, error) {
	for began := r.now(); ; {
		if s.over {
			return nil, s.expired()
		}
		now := r.now()
		if r.table.ContextEnd(s.id, resource, token) > now {
			return r.newLease(s, resource, token), nil
		}
		held, ok := r.table.Lease(s.id, resource)
		if !ok || held != token || now.Sub(began) > min(s.ttl/3, maxUnbelieved) || ctx.Err() != nil {
			r.releaseStranger(s, resource, token)
			return nil, overBefore(resource)
		}
		r.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-s.ctx.Done():
		case <-time.After(minRetry):
		}
		r.mu.Lock()
	}
}

// request is one Acquire with its retries, all under one id, so that however
// often it is sent it is answered once [F17].
func (r *region) request(ctx context.Context, s *session, o acquireOptions, deadline instant.Instant) (outcome, error) {
	r.mu.Lock()
	if s.over {
		r.mu.Unlock()
		return outcome{}, s.expired()
	}
	s.request++
	id := s.request
	got := make(chan outcome, 1)
	s.waiting[id] = got
	r.table.SlotRequestBegun(s.id, id, o.resource, uint32(o.slots))
	r.mu.Unlock()

	w := waiting{region: r, session: s, id: id, acquireOptions: o, deadline: deadline, got: got}
	out, err := w.await(ctx)
	w.elsewhere.leave()

	r.mu.Lock()
	r.table.RequestOver(s.id, id)
	delete(s.waiting, id)
	if err != nil {
		select { // a grant that crossed with the failure
		case late := <-got:
			if late.err == nil {
				r.releaseStranger(s, late.resource, late.token)
			}
		default:
		}
	}
	over := s.over
	r.mu.Unlock()
	if err != nil && !over && undecided(ctx, err) {
		r.cancel(s, id)
	}
	return out, err
}

// undecided reports whether the region may still grant or queue a request that
// failed so.
func undecided(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.Is(err, ErrUnavailable) || errors.Is(err, ErrNotOwner) || errors.Is(err, ErrMoved)
}

// waiting is a request until it has an outcome.
type waiting struct {
	acquireOptions
	region   *region
	session  *session
	id       uint64
	deadline instant.Instant
	got      <-chan outcome
	// placed: it has, or had, a place in the queue.
	placed bool
	// elsewhere looks for another owner while this region cannot be reached;
	// nil: it can.
	elsewhere *lookup
}

// await asks until the request has an outcome.
func (w *waiting) await(ctx context.Context) (outcome, error) {
	r, s := w.region, w.session
	began := r.now()
	for pause := minRetry; ; pause = min(2*pause, maxRetry) {
		r.mu.Lock()
		attached := s.attached
		r.mu.Unlock()
		res, err := w.ask(ctx)
		select {
		case out := <-w.got:
			return out, out.err
		default:
		}
		switch {
		case ctx.Err() != nil:
			return outcome{}, context.Cause(ctx)
		case errors.Is(err, ErrUnavailable) && r.now().Sub(began) < patience,
			errors.Is(err, ErrLapsed) && w.placed:
			// In a lapse, as of a new leader before its first renewal, the place is
			// kept until another region is found to own the partition.
			if w.elsewhere == nil {
				w.elsewhere = r.client.lookAround(w.resource, r)
			}
			select {
			case <-ctx.Done():
				return outcome{}, context.Cause(ctx)
			case out := <-w.got:
				return out, out.err
			case <-w.elsewhere.found():
				return outcome{}, w.elsewhere.notOwner(w.resource)
			case <-time.After(r.client.cfg.random.spread(pause, askedToWait(err))):
			}
			continue
		case errors.Is(err, ErrSessionExpired):
			r.mu.Lock()
			r.drop(s, "the region does not know the session any more")
			r.mu.Unlock()
			return outcome{}, err
		case err != nil:
			return outcome{}, err
		case res.GetBusy() != nil:
			b := res.GetBusy()
			return outcome{}, &BusyError{
				Resource: w.resource, Holder: b.GetHolder(), Token: fence.Token(b.GetToken()), Waiters: b.GetWaiters(), Delayed: b.GetDelayed(),
			}
		case res.GetQueued() == nil:
			return outcome{}, overBefore(w.resource) // granted, and known to have ended already
		}
		w.elsewhere.leave()
		w.elsewhere, w.placed = nil, true
		out, done, err := w.queued(ctx, attached)
		if err != nil {
			return outcome{}, err
		}
		if done {
			return out, out.err
		}
		// A new stream: what the old one was to say of the request may be lost,
		// so it is asked again. It keeps its place.
		began, pause = r.now(), minRetry
	}
}

// queued waits for the hand-over; done is false when it is time to ask again.
// While the region cannot be reached it looks for another owner, and keeps its
// place: only an owner's own word that it owns the partition ends it.
func (w *waiting) queued(ctx context.Context, attached <-chan struct{}) (out outcome, done bool, err error) {
	r, s := w.region, w.session
	tick := time.NewTicker(max(s.ttl/12, minUnreachable))
	defer tick.Stop()
	probe := time.NewTimer(probeEvery - r.client.cfg.random(probeEvery/4))
	defer probe.Stop()
	for {
		select {
		case <-ctx.Done():
			return outcome{}, false, context.Cause(ctx)
		case out := <-w.got:
			return out, true, nil
		case <-attached:
			return outcome{}, false, nil
		case <-w.elsewhere.found():
			return outcome{}, false, w.elsewhere.notOwner(w.resource)
		case <-tick.C:
			switch lost := r.unreachable(s.ttl / 3); {
			case lost && w.elsewhere == nil:
				w.elsewhere = r.client.lookAround(w.resource, r)
			case !lost && w.elsewhere != nil:
				w.elsewhere.leave()
				w.elsewhere = nil
			}
		case <-probe.C:
			if w.elsewhere == nil {
				if err := w.stillOwner(ctx); err != nil {
					return outcome{}, false, err
				}
			}
			probe.Reset(probeEvery - r.client.cfg.random(probeEvery/4))
		}
	}
}

// stillOwner returns an error if another region owns the resource's partition.
func (w *waiting) stillOwner(ctx context.Context) error {
	_, err := w.region.get(ctx, w.resource)
	switch {
	case errors.Is(err, ErrNotOwner), errors.Is(err, ErrMoved):
		return err
	case errors.Is(err, ErrLapsed), errors.Is(err, ErrUnavailable):
		if other := w.region.client.ownerBeside(ctx, w.resource, w.region); other != "" {
			return notOwner(w.resource, other)
		}
	}
	return nil // also when nobody could be asked: the place in the queue is worth keeping
}

// get reads a resource here.
func (r *region) get(ctx context.Context, resource string) (lease *pb.LeaseInfo, err error) {
	err = r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) error {
		res, err := pb.NewLeaseServiceClient(cc).GetLease(ctx, &pb.GetLeaseRequest{Resource: resource})
		if err == nil {
			lease = res.GetLease()
			r.client.setPartition(resource, res.GetPartition())
		}
		return err
	})
	return lease, err
}

// ask sends the Acquire once, at one server after the other while none can
// decide.
func (w *waiting) ask(ctx context.Context) (*pb.AcquireResponse, error) {
	r, s := w.region, w.session
	var res *pb.AcquireResponse
	err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) (err error) {
		r.mu.Lock()
		lowest, over := r.table.LowestOpenRequest(s.id), s.over
		r.mu.Unlock()
		switch {
		case over:
			return s.expired()
		case lowest > w.id:
			return overBefore(w.resource) // the stream has answered it meanwhile
		}
		sent := r.now() // before this very attempt leaves
		req := &pb.AcquireRequest{
			SessionId: s.id, Secret: s.secret, RequestId: w.id, LowestOpenRequest: lowest, Resource: w.resource, Wait: w.wait,
			Value: w.value, LockDelayMs: milliseconds(w.lockDelay), Slots: uint32(w.slots),
		}
		if w.deadline != 0 {
			req.WaitMs = max(1, milliseconds(w.deadline.Sub(sent)))
		}
		res, err = pb.NewLeaseServiceClient(cc).Acquire(ctx, req)
		if err == nil {
			r.mu.Lock()
			r.handle(r.table.AcquireAnswered(r.now(), sent, s.id, w.id, res))
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
			// The lowest open request of the session's next Acquire gives the place
			// up, and a grant that comes before is a stranger's.
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
func (r *region) newLease(s *session, resource string, token fence.Token) *Lease {
	ctx, cancel := context.WithCancelCause(s.ctx)
	l := &Lease{region: r, session: s, resource: resource, token: token, ctx: ctx, cancel: cancel}
	s.leases[resource] = l
	// In time for what is done when half of its validity has gone.
	now := r.now()
	r.lookBy(s, now.Add(r.table.ContextEnd(s.id, resource, token).Sub(now)/4))
	return l
}

// overBefore: a grant came too late to be used. It is asked for again.
func overBefore(resource string) error {
	return &Error{
		Text:   fmt.Sprintf("the grant of %s was over before it could be used", resource),
		Detail: &pb.ErrorDetail{Kind: &pb.ErrorDetail_Lapsed{Lapsed: &pb.Lapsed{}}},
	}
}
