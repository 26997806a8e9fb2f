package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Lease is a session's hold on a resource. It is safe for concurrent use.
type Lease struct {
	region   *region
	session  *session
	resource string
	token    fence.Token
	ctx      context.Context
	cancel   context.CancelCauseFunc

	// Under the region's lock:

	// letGo is when the belief ends, whatever is heard later, because the
	// context has ended; 0 while it has not.
	letGo instant.Instant
	// releasing: belief has ended, and the region is being told.
	releasing bool
	// over: the region holds it no more, or it is not ours to tell.
	over bool
}

// Resource that is leased.
func (l *Lease) Resource() string { return l.resource }

// Token orders this holder against all others: send it with every write.
func (l *Lease) Token() fence.Token { return l.token }

// Region that granted the lease.
func (l *Lease) Region() string { return l.region.name }

// Session that holds the lease.
func (l *Lease) Session() string { return l.session.id }

// TTL of the session that holds the lease.
func (l *Lease) TTL() time.Duration { return l.session.ttl }

// Context ends when work must stop; the cause is ErrReleased, ErrLeft or a
// *LostError. It ends no later than Valid does, and earlier when the end is
// seen coming, so that work can stop in order.
func (l *Lease) Context() context.Context { return l.ctx }

// Valid reports whether nobody else can hold the resource now. It reads the
// clock at the call; call it right before an act, and fence the act all the
// same. Once the context has ended, Valid is not prolonged any more.
func (l *Lease) Valid() bool { return l.Remaining() > 0 }

// Remaining is how long Valid stays true if nothing more is heard.
func (l *Lease) Remaining() time.Duration { return l.region.remaining(l) }

// Release ends the lease here at once and at the region as soon as it can be
// told; an error means that it could not be told before ctx ended: it is tried
// again in the background until the session ends, and the lease with it. To
// release a lease that has ended is no error.
func (l *Lease) Release(ctx context.Context) error { return l.region.release(ctx, l) }

// SetValue replaces the value beside the lease, at most MaxValue bytes, trying
// until ctx ends. It fails with ErrNotHolder when the lease has ended. The
// revision is the region's at which watchers see it.
func (l *Lease) SetValue(ctx context.Context, value []byte) (revision uint64, err error) {
	if len(value) > MaxValue {
		return 0, invalidField("value", fmt.Sprintf("has %d bytes; at most %d are kept", len(value), MaxValue))
	}
	r, s := l.region, l.session
	for pause := minRetry; ; pause = min(2*pause, maxRetry) {
		if l.ctx.Err() != nil {
			return 0, fmt.Errorf("set the value of %s: %w", l.resource, notHolder(l))
		}
		err := r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) error {
			res, err := pb.NewLeaseServiceClient(cc).SetValue(ctx, &pb.SetValueRequest{
				SessionId: s.id, Secret: s.secret, Resource: l.resource, Token: uint64(l.token), Value: value,
			})
			revision = res.GetRevision()
			return err
		})
		switch {
		case err == nil:
			return revision, nil
		case !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrOverloaded) && !errors.Is(err, ErrLapsed):
			return 0, fmt.Errorf("set the value of %s: %w", l.resource, err)
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("set the value of %s: %w (last: %w)", l.resource, context.Cause(ctx), err)
		case <-l.ctx.Done():
		case <-time.After(pause):
		}
	}
}

func notHolder(l *Lease) *Error {
	return &Error{
		Code:   codes.FailedPrecondition,
		Text:   fmt.Sprintf("the lease (token %s) has ended: %v", l.token, context.Cause(l.ctx)),
		Detail: &pb.ErrorDetail{Kind: &pb.ErrorDetail_NotHolder{NotHolder: &pb.NotHolder{Resource: l.resource, Token: uint64(l.token)}}},
	}
}

func (r *region) remaining(l *Lease) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l.over || l.releasing {
		return 0
	}
	now := r.now() // under the lock, after whatever it took to get it
	if !r.table.Valid(now, l.session.id, l.resource, l.token) {
		return 0
	}
	until := r.table.Until(l.session.id, l.resource, l.token)
	if l.letGo != 0 {
		until = instant.Min(until, l.letGo)
	}
	return max(0, until.Sub(now))
}

// lose ends a lease's context. The holder has until the given instant to stop
// (now or never: it has ended); the sweep gives it back then. r.mu is held.
func (r *region) lose(l *Lease, until instant.Instant, reason string) {
	l.cancel(&LostError{Resource: l.resource, Token: l.token, Reason: reason})
	if until <= r.now() {
		r.forget(l)
		return
	}
	if l.letGo == 0 || until < l.letGo {
		l.letGo = until
	}
}

// forget a lease that the region does not hold any more. r.mu is held.
func (r *region) forget(l *Lease) {
	if l.over {
		return
	}
	l.over = true
	if s := l.session; s.leases[l.resource] == l {
		delete(s.leases, l.resource)
		s.passTurn(l.resource)
	}
}
