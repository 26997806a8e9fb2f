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

func (r *region) release(ctx context.Context, l *Lease) error {
	r.mu.Lock()
	if l.over || l.releasing {
		r.mu.Unlock()
		l.cancel(ErrReleased)
		return nil // nothing of it is left, or that is being seen to
	}
	r.beginRelease(l)
	r.mu.Unlock()
	l.cancel(ErrReleased)
	// Mostly the first try does it, and needs no goroutine.
	try, stop := context.WithCancel(ctx)
	ended := context.AfterFunc(l.session.ctx, stop)
	err := r.sendRelease(try, l.session, l.resource, l.token)
	ended()
	stop()
	if err == nil {
		r.mu.Lock()
		r.forget(l)
		r.mu.Unlock()
		return nil
	}
	// The region must hear of it, or the resource stays held as long as the
	// session lives: it is told on in the background when ctx ends first.
	told := make(chan struct{})
	if !r.client.spawn(func() {
		defer close(told)
		r.keepReleasing(l.session, l.resource, l.token, l, r.client.cfg.random.spread(minRetry, askedToWait(err)))
	}) {
		return ErrClosed // and the session with it
	}
	select {
	case <-told:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("release %s (token %s): the region could not be told yet; it is told in the background: %w", l.resource, l.token, context.Cause(ctx))
	}
}

// beginRelease ends the belief, before anybody is told. r.mu is held.
func (r *region) beginRelease(l *Lease) {
	l.releasing = true
	r.table.Releasing(r.now(), l.session.id, l.resource, l.token)
	r.schedule(l.session) // it may have been what a keepalive was to confirm
}

// sendRelease tells the region. Not to hold it any more is as good.
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

// keepReleasing releases, after a while, until that works or the session is over;
// then l, if given, is forgotten. While the region is not heard it waits: thousands
// of leases may have been lost with it, and a session that it hears no more ends
// them there.
func (r *region) keepReleasing(s *session, resource string, token fence.Token, l *Lease, after time.Duration) {
	for pause := 2 * minRetry; ; pause = min(2*pause, time.Second) {
		if !r.awaitHeard(s, after) {
			return
		}
		err := r.sendRelease(s.ctx, s, resource, token)
		if err == nil {
			break
		}
		r.client.cfg.Logger.Debug("release failed", "region", r.name, "resource", resource, "token", token.String(), "error", err)
		after = r.client.cfg.random.spread(pause, askedToWait(err))
	}
	if l != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.forget(l)
	}
}

// awaitHeard waits for a while and until the region answers on a stream, and not
// only since that moment, in which all others hear it too; false when the session
// is over before.
func (r *region) awaitHeard(s *session, after time.Duration) bool {
	for {
		select {
		case <-s.ctx.Done():
			return false
		case <-time.After(after):
		}
		r.mu.Lock()
		up, attached := r.stream.up, s.attached
		r.mu.Unlock()
		if up {
			return true
		}
		select {
		case <-s.ctx.Done():
			return false
		case <-attached:
		}
		after = r.client.cfg.random(giveBackWithin)
	}
}

// releaseStranger releases, in the background, a token that nobody here asked
// for or wants any more [F17]. r.mu is held.
func (r *region) releaseStranger(s *session, resource string, token fence.Token) {
	if s.over || s.lease(resource, token) != nil {
		return
	}
	r.table.Releasing(r.now(), s.id, resource, token)
	r.schedule(s)
	r.client.spawn(func() { r.keepReleasing(s, resource, token, nil, 0) })
}
