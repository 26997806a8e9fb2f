package client

import (
	"time"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// sentKeepalive waits for its ack.
type sentKeepalive struct {
	sequence uint64
	at       instant.Instant
}

const (
	// maxUnanswered bounds the keepalives of a session that wait for their acks.
	maxUnanswered = 32
	// maxBurst bounds the keepalives made under one hold of the lock.
	maxBurst = 256
)

// take takes a message off a stream, which may be over by now.
func (r *region) take(from validity.StreamID, msg *pb.AttachResponse) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stream.id != from {
		return
	}
	now := r.now()
	r.stream.excuses = 0
	if msg.GetPong() != nil {
		r.stream.alive = now // which says nothing of the region
		return
	}
	r.heard, r.stream.up = now, true
	term := r.table.Term()
	events := r.table.Received(now, r.stream.id, msg)
	if r.table.Term() != term {
		// The instants of another leader need a pair of their own.
		for _, s := range r.sessions {
			r.schedule(s)
		}
	}
	if ended := r.sessions[msg.GetEnded().GetSessionId()]; ended != nil {
		r.answered(ended, ended.sent)
	}
	r.handle(events)
	ack := msg.GetAck()
	s := r.sessions[ack.GetSessionId()]
	if s == nil {
		return
	}
	s.heard, r.stream.alive = now, now
	s.answeredTo = max(s.answeredTo, ack.GetSequence())
	if sent, ok := r.answered(s, ack.GetSequence()); ok {
		s.acked = max(s.acked, sent)
		r.rtt = now.Sub(sent)
	}
	close(s.answered)
	s.answered = make(chan struct{})
	if by := (spokesman{r.stream.id, msg.GetTerm()}); s.begun != by && ack.GetComplete() {
		s.begun = by
		close(s.attached)
		s.attached = make(chan struct{})
	}
	r.touch(s)
}

// answered forgets a session's keepalives up to a sequence, and returns when
// that one was sent. r.mu is held.
func (r *region) answered(s *session, sequence uint64) (at instant.Instant, ok bool) {
	left := s.unanswered[:0]
	for _, k := range s.unanswered {
		if k.sequence > sequence {
			left = append(left, k)
			continue
		}
		r.stream.answered(k.at)
		if k.sequence == sequence {
			at, ok = k.at, true
		}
	}
	s.unanswered = left
	return at, ok
}

// outgoing is what is to be sent on the stream now, and what comes then.
type outgoing struct {
	messages []*pb.AttachRequest
	// wait until it is asked again.
	wait time.Duration
	// idle: there is no session any more.
	idle bool
	// leave the server. hung: it answers nothing at all.
	leave, hung bool
}

// due makes the keepalives that are due, and with them those that soon are.
func (r *region) due() (out outgoing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range r.detaching {
		out.messages = append(out.messages, &pb.AttachRequest{Kind: &pb.AttachRequest_Detach{Detach: &pb.Detach{SessionId: id}}})
	}
	r.detaching = nil
	now := r.now()
	r.stream.looked(now)
	if at, hung := r.stream.leaveAt(); at != 0 && at <= now {
		out.leave, out.hung = true, hung
		return out
	}
	if at := r.stream.pingAt(); at != 0 && at <= now {
		out.messages = append(out.messages, r.stream.ping(now))
	}
	next := r.sends.first()
	if next == nil {
		out.idle = true
		return out
	}
	if next.at <= now {
		for next != nil && next.at <= now.Add(next.session.ttl/early) && len(out.messages) < maxBurst {
			if m := r.keepalive(next.session, now); m != nil {
				out.messages = append(out.messages, m)
			}
			next = r.sends.first()
		}
	}
	until := next.at
	if at, _ := r.stream.leaveAt(); at != 0 {
		until = instant.Min(until, instant.Min(at, r.stream.pingAt()))
	}
	out.wait = max(time.Millisecond, min(until.Sub(now), sweepEvery))
	r.stream.look = now.Add(out.wait)
	return out
}

// keepalive makes a session's, to be sent at once. r.mu is held.
func (r *region) keepalive(s *session, now instant.Instant) *pb.AttachRequest {
	ka := r.table.Keepalive(now, s.id, r.stream.id)
	if ka == nil {
		r.sends.remove(&s.send) // the table does not know it: it is being dropped
		return nil
	}
	ka.Secret = s.secret
	s.urgent, s.sent = false, ka.GetSequence()
	if len(s.unanswered) == maxUnanswered {
		r.stream.forget(s.unanswered[0].at)
		s.unanswered = append(s.unanswered[:0], s.unanswered[1:]...)
	}
	s.unanswered = append(s.unanswered, sentKeepalive{ka.GetSequence(), now})
	r.stream.sent(now, r.patience(s))
	r.schedule(s)
	return &pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: ka}}
}

// patience with the server: with the TTL/3 between two keepalives a hung one is
// left before half of the TTL, and before the leases' partitions end. A TTL under
// 2 s, or a long way, leaves less room.
func (r *region) patience(s *session) wait {
	w := wait{s.ttl / 8, s.ttl / 4}
	if s.soonest != 0 && r.rtt != 0 {
		// It is asked when 21/40 of the span are gone at the latest: a sixth is left
		// for the next server, whatever the TTL is.
		w = wait{min(w.hung, s.span/8<<r.moves.lately(r.now()), s.span*5/16), min(w.late, s.span/2)}
	}
	w.hung = max(w.hung, min(minHung, s.ttl/4), 3*r.rtt) + time.Millisecond
	w.late = max(w.late, w.hung)
	return w
}
