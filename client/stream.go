package client

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// keep keeps a session alive until it ends: one stream at a time, keepalives
// on it, and the ends of leases by the clock.
func (r *region) keep(s *session) {
	for s.ctx.Err() == nil {
		r.attach(s)
		if !r.pause(s, 50*time.Millisecond) {
			return
		}
	}
}

// pause waits while it still ends leases in time; false when the session is
// over.
func (r *region) pause(s *session, d time.Duration) bool {
	select {
	case <-s.ctx.Done():
		return false
	case <-time.After(min(d, r.sweep(s))):
		return s.ctx.Err() == nil
	}
}

// received is what the reader of a stream hands over.
type received struct {
	msg *pb.AttachResponse
	err error
}

// attach runs one stream until it breaks, or until its server has answered no
// keepalive for an eighth of the TTL. One is sent at least every third, so a
// hung server is left before half the TTL is over.
func (r *region) attach(s *session) {
	cc, at, err := r.conns.current()
	if err != nil {
		return
	}
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	stream, err := r.openStream(ctx, s, cc)
	if err != nil {
		r.conns.leave(at, cc, true)
		return
	}
	r.mu.Lock()
	id := r.table.StreamOpened()
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.table.StreamBroken(id)
		r.mu.Unlock()
	}()
	messages := make(chan received, 16)
	r.client.work.Go(func() { read(ctx, stream, messages) })

	answered := r.now() // by when the newest answered keepalive was sent, or the stream began
	var asked instant.Instant
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			_ = stream.CloseSend()
			return
		case m := <-messages:
			if m.err != nil {
				r.client.cfg.Logger.Debug("stream ended", "region", r.name, "error", m.err)
				r.conns.leave(at, cc, false)
				return
			}
			now := r.now()
			r.mu.Lock()
			if m.msg.GetAck() != nil {
				answered, asked, s.heard = now, 0, now
			}
			r.handle(s, r.table.Received(now, id, m.msg))
			r.mu.Unlock()
		case <-timer.C:
		case <-r.wake:
		}
		now := r.now()
		wait := r.sweep(s)
		if s.ctx.Err() != nil {
			continue
		}
		r.mu.Lock()
		next := r.table.NextKeepalive(s.id)
		var ka *pb.Keepalive
		if next <= now {
			ka = r.table.Keepalive(now, s.id, id)
		}
		r.mu.Unlock()
		if ka != nil {
			ka.Secret = s.secret
			if asked == 0 {
				asked = now
			}
			if err := stream.Send(&pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: ka}}); err != nil {
				continue // the reader gets the reason
			}
			next = now.Add(s.ttl / 3)
		}
		if asked != 0 && now.Sub(asked) > s.ttl/8 && now.Sub(answered) > s.ttl/8 {
			r.client.cfg.Logger.Warn("server answers no keepalive; leaving it for another", "region", r.name, "server", r.conns.servers[at].Name)
			r.conns.leave(at, cc, true)
			return
		}
		timer.Reset(max(time.Millisecond, min(wait, next.Sub(now), s.ttl/16)))
	}
}

// openStream opens Attach, for no longer than a hung server may take.
func (r *region) openStream(ctx context.Context, s *session, cc *grpc.ClientConn) (grpc.BidiStreamingClient[pb.AttachRequest, pb.AttachResponse], error) {
	ctx, cancel := context.WithCancel(ctx)
	guard := time.AfterFunc(min(s.ttl/8, attemptTimeout), cancel)
	stream, err := pb.NewSessionServiceClient(cc).Attach(ctx)
	if !guard.Stop() || err != nil {
		cancel()
		if err == nil {
			err = context.DeadlineExceeded
		}
		return nil, err
	}
	context.AfterFunc(stream.Context(), cancel)
	return stream, nil
}

func read(ctx context.Context, stream grpc.BidiStreamingClient[pb.AttachRequest, pb.AttachResponse], to chan<- received) {
	for {
		msg, err := stream.Recv()
		select {
		case to <- received{msg, err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// sweep ends what has ended by the clock and returns when to look again.
func (r *region) sweep(s *session) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.session != s {
		return time.Second
	}
	now := r.now()
	r.handle(s, r.table.Poll(now))
	if r.session != s {
		return time.Second
	}
	next := now.Add(time.Second)
	for resource, l := range s.leases {
		end := r.table.ContextEnd(s.id, resource, l.token)
		if end <= now {
			// The holder has until Until to stop; only then is it given back.
			l.cancel(&LostError{Resource: resource, Token: l.token, Reason: "its validity ran out: no word from the region in time"})
			if end = r.table.Until(s.id, resource, l.token); end <= now {
				delete(s.leases, resource)
				r.client.work.Go(func() { r.releaseStranger(s, l.resource, l.token) })
				continue
			}
		}
		next = instant.Min(next, end)
	}
	// A session of which nothing was heard for its whole TTL is given up, so
	// that waiters look for another region.
	if now.Sub(s.heard) > s.ttl {
		r.dropSession(s, "no word from the region for the session's whole ttl")
		return time.Second
	}
	return next.Sub(now)
}
