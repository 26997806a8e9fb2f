package client

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

type attachStream = grpc.BidiStreamingClient[pb.AttachRequest, pb.AttachResponse]

const (
	// minHung is the least time in which a server must answer a keepalive.
	minHung = 250 * time.Millisecond
	// maxPending messages wait between a stream's reader and its owner.
	maxPending = 16
)

// keep keeps a session alive until it ends: one stream at a time, on one
// server after the other.
func (r *region) keep(s *session) {
	for pause := minRetry; s.ctx.Err() == nil; pause = min(2*pause, maxRetry) {
		if r.attach(s) {
			pause = minRetry
		}
		select {
		case <-s.ctx.Done():
		case <-time.After(pause):
		}
	}
}

// received is what the reader of a stream hands over.
type received struct {
	msg *pb.AttachResponse
	err error
}

// attach runs one stream until it breaks, the session ends, or its server is
// found to hang. It reports whether the stream has answered anything.
func (r *region) attach(s *session) (useful bool) {
	cc, at, err := r.conns.current()
	if err != nil {
		return false
	}
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel() // ends the reader
	stream, err := openStream(ctx, cc, min(max(s.ttl/8, min(minHung, s.ttl/4)), attemptTimeout))
	if err != nil {
		if s.ctx.Err() == nil {
			r.conns.leave(at, cc, true)
		}
		return false
	}
	k := keeper{region: r, session: s, stream: stream}
	r.mu.Lock()
	k.id = r.table.StreamOpened()
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.table.StreamBroken(k.id)
		r.mu.Unlock()
	}()
	messages := make(chan received, maxPending)
	if !r.client.spawn(func() { read(ctx, stream, messages) }) {
		return false
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			_ = stream.CloseSend()
			return useful
		case m := <-messages:
			if m.err != nil {
				r.client.cfg.Logger.Debug("stream ended", "region", r.name, "error", m.err)
				r.conns.leave(at, cc, false)
				return useful
			}
			k.take(m.msg)
			useful = true
		case <-timer.C:
		case <-s.wake:
		}
		wait, hung := k.act()
		if hung {
			r.client.cfg.Logger.Warn("server answers no keepalive; leaving it for another", "region", r.name, "server", r.conns.servers[at].Name)
			r.conns.leave(at, cc, true)
			return useful
		}
		timer.Reset(wait)
	}
}

// keeper is one stream's keepalives.
type keeper struct {
	region  *region
	session *session
	stream  attachStream
	id      validity.StreamID
	// asked is when the oldest unanswered keepalive was sent; 0: none is.
	asked    instant.Instant
	sent     []sentKeepalive
	// begun is the newest term in which the stream has begun to speak for the
	// session: a server keeps the stream when the leader changes, and what the one
	// before was to say may be lost.
	begun uint64
}

// sentKeepalive waits for its ack.
type sentKeepalive struct {
	sequence uint64
	at       instant.Instant
}

// maxSent bounds the keepalives that wait for their acks.
const maxSent = 32

// take takes a message off the stream.
func (k *keeper) take(msg *pb.AttachResponse) {
	r, s := k.region, k.session
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	if s.over {
		return
	}
	r.handle(s, r.table.Received(now, k.id, msg))
	ack := msg.GetAck()
	if ack.GetSessionId() != s.id {
		return
	}
	s.heard = now
	s.answeredTo = max(s.answeredTo, ack.GetSequence())
	k.asked = 0
	left := k.sent[:0]
	for _, sent := range k.sent {
		switch {
		case sent.sequence == ack.GetSequence():
			s.acked = max(s.acked, sent.at)
			s.rtt = now.Sub(sent.at)
		case sent.sequence > ack.GetSequence():
			left = append(left, sent)
			if k.asked == 0 {
				k.asked = sent.at
			}
		}
	}
	k.sent = left
	close(s.answered)
	s.answered = make(chan struct{})
	if msg.GetTerm() > k.begun && ack.GetComplete() {
		k.begun = msg.GetTerm()
		close(s.attached)
		s.attached = make(chan struct{})
	}
}

// act sends a keepalive if one is due. It returns when to look again, and
// whether the server hangs.
func (k *keeper) act() (wait time.Duration, hung bool) {
	r, s := k.region, k.session
	r.mu.Lock()
	if s.over {
		r.mu.Unlock()
		return time.Second, false
	}
	now := r.now()
	next := r.table.NextKeepalive(s.id)
	// Half of what the leases have left has gone and nothing prolonged them: if
	// the server hangs, this keepalive shows it in time. In a lapse it answers,
	// and is not asked all the time.
	if s.soonest != 0 && k.asked == 0 {
		quiet := instant.Max(s.soonest.Add(-s.span/2), s.heard.Add(max(s.span/8, minRetry)))
		next = instant.Min(next, quiet)
	}
	if s.confirm {
		next = 0
	}
	var ka *pb.Keepalive
	if next <= now {
		if ka = r.table.Keepalive(now, s.id, k.id); ka != nil {
			s.confirm, s.sent = false, ka.GetSequence()
			if len(k.sent) == maxSent {
				k.sent = append(k.sent[:0], k.sent[1:]...)
			}
			k.sent = append(k.sent, sentKeepalive{ka.GetSequence(), now})
			if k.asked == 0 {
				k.asked = now
			}
		}
		next = now.Add(s.ttl / 3)
	}
	limit := k.limit()
	hung = k.asked != 0 && now.Sub(k.asked) > limit
	if k.asked != 0 {
		next = instant.Min(next, k.asked.Add(limit+time.Millisecond))
	}
	r.mu.Unlock()
	if ka != nil && !hung {
		ka.Secret = s.secret
		// An error is told to the reader, with its reason.
		_ = k.stream.Send(&pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: ka}})
	}
	return max(time.Millisecond, min(next.Sub(now), s.ttl/16, sweepEvery)), hung
}

// limit is how long a keepalive may go without an answer: with the TTL/3
// between two of them a hung server is left before half of the TTL, and before
// the leases' partitions end. A TTL under 2 s, or a long way, leaves less room.
func (k *keeper) limit() time.Duration {
	s := k.session
	limit := s.ttl / 8
	if s.soonest != 0 && s.rtt != 0 {
		limit = min(limit, s.span/8)
	}
	return max(limit, min(minHung, s.ttl/4), 3*s.rtt)
}

// openStream opens Attach, for no longer than a hung server may take.
func openStream(ctx context.Context, cc *grpc.ClientConn, within time.Duration) (attachStream, error) {
	ctx, cancel := context.WithCancel(ctx)
	guard := time.AfterFunc(within, cancel)
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

// read hands over a stream's messages until it breaks or ctx, its own, ends.
func read(ctx context.Context, stream attachStream, to chan<- received) {
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
