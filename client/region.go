package client

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// region is the client's part in one region: its connections, and one stream
// for all sessions that are open there.
type region struct {
	client *Client
	name   string
	conns  *conns
	// wake is the stream's, tick the sweep's.
	wake, tick chan struct{}

	mu       sync.Mutex
	table    *validity.Table
	sessions map[string]*session
	// running: there are goroutines for the stream and the sweep.
	running bool
	// sends is when keepalives are due, looks when sessions are looked at.
	sends, looks agenda
	// polled is when the table was last polled, sweeps when the sweep comes by next.
	polled, sweeps instant.Instant
	// rtt of the newest keepalive; 0 when unknown.
	rtt    time.Duration
	stream streamState
	moves  moves
	// heard is when anything last came from the region on a stream.
	heard instant.Instant
	// detaching are sessions that the stream is to be told of.
	detaching []string
}

// session is an open session in one region.
type session struct {
	id     string
	secret []byte
	ttl    time.Duration
	region *region
	seat   *seat
	// ctx ends with the session, or when it is given up.
	ctx context.Context
	end context.CancelCauseFunc

	// Under the region's lock:

	over       bool
	send, look entry
	// heard is when the last ack came; at first, when the session was opened.
	heard instant.Instant
	// acked is when the newest acknowledged keepalive was sent.
	acked instant.Instant
	// sent and answeredTo are the highest sequences of keepalives sent and
	// acknowledged, unanswered those of the present stream in between.
	sent, answeredTo uint64
	unanswered       []sentKeepalive
	// begun is the stream, and its term, that speaks for the session.
	begun spokesman
	// answered is closed and made anew at each ack, attached when a new stream,
	// or a new term on it, has begun to speak for the session.
	answered, attached chan struct{}
	// soonest is when the first context ends if nothing is heard; 0 without
	// leases. span is how far off that was when something was last heard.
	soonest instant.Instant
	span    time.Duration
	// urgent asks for a keepalive at once.
	urgent  bool
	request uint64
	leases  map[string]*Lease
	waiting map[uint64]chan outcome
	turns   map[string]*turn
}

type spokesman struct {
	stream validity.StreamID
	term   uint64
}

// outcome of an Acquire.
type outcome struct {
	resource string
	token    fence.Token
	err      error
}

func newRegion(c *Client, r Region) *region {
	out := &region{
		client: c, name: r.Name, conns: newConns(c.cfg.Links, r, c.cfg.random),
		wake: make(chan struct{}, 1), tick: make(chan struct{}, 1),
		table: validity.New(validity.Config{}), sessions: map[string]*session{},
	}
	out.conns.logger = c.cfg.Logger
	out.conns.found = func() { wake.Up(out.wake) }
	return out
}

func (r *region) now() instant.Instant { return r.client.cfg.Clock.Now() }

// touch looks at a session anew: when its keepalive is due, and what has ended.
// r.mu is held.
func (r *region) touch(s *session) {
	if s.over {
		return
	}
	r.schedule(s)
	r.looks.set(&s.look, 0)
	wake.Up(r.tick)
}

// lookBy looks at a session at that instant at the latest. r.mu is held.
func (r *region) lookBy(s *session, at instant.Instant) {
	if s.over || s.look.place != 0 && s.look.at <= at {
		return
	}
	r.looks.set(&s.look, at)
	if at < r.sweeps { // else the sweep comes by before
		wake.Up(r.tick)
	}
}

// confirm asks for a keepalive of a session at once. r.mu is held.
func (r *region) confirm(s *session) {
	s.urgent = true
	r.schedule(s)
}

// schedule sets when the session's keepalive is due. r.mu is held.
func (r *region) schedule(s *session) {
	next := r.table.NextKeepalive(s.id)
	switch {
	case s.urgent:
		next = 0
	case next != 0 && next != r.table.ConfirmBy(s.id): // which is not to come sooner
		next = s.spread(next)
	}
	first := r.sends.first()
	sooner := first == nil || next < first.at
	r.sends.set(&s.send, next)
	if sooner { // a later one needs no wake-up: the stream looks again when it is due
		wake.Up(r.wake)
	}
}

// A keepalive is sent up to TTL/48 before it is due, together with others, and
// due TTL/3 after the last one at the latest. In between, each session has
// instants of its own, so that many of them do not keep alive all at once.
const (
	early = 48
	step  = 15 // of 48: a third less what is sent early
)

// spread moves an instant to the session's own one before it.
func (s *session) spread(due instant.Instant) instant.Instant {
	every := s.ttl * step / early
	offset := time.Duration(s.seat.of.phase * float64(every))
	late := (due.Sub(0) - offset) % every
	if late < 0 {
		late += every
	}
	return due.Add(-late)
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
	delete(r.sessions, s.id)
	r.sends.remove(&s.send)
	r.looks.remove(&s.look)
	for _, k := range s.unanswered {
		r.stream.forget(k.at)
	}
	s.unanswered = nil
	if s.seat.session == s {
		s.seat.session = nil
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
	if len(r.sessions) == 0 {
		wake.Up(r.wake) // the stream ends
	}
}

// maxDetaching bounds the sessions that a stream is still to be told of; one
// that it is not told of expires all the same.
const maxDetaching = MaxSessions

// detach tells the stream that a session, which has been left, is not spoken
// of any more. r.mu is held.
func (r *region) detach(s *session) {
	if len(r.detaching) < maxDetaching {
		r.detaching = append(r.detaching, s.id)
		wake.Up(r.wake)
	}
}

// clockGap: nothing is mapped any more until the next ack.
func (r *region) clockGap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.table.ClockGap(r.now())
	r.rtt = 0
	for _, s := range r.sessions {
		r.touch(s)
	}
}

// handle acts on what the table says. r.mu is held.
func (r *region) handle(events []validity.Event) {
	for _, e := range events {
		s := r.sessions[e.Session]
		if s == nil {
			continue
		}
		switch e.Kind {
		case validity.Granted:
			if !s.answer(e.Request, outcome{resource: e.Resource, token: e.Token}) {
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
		if e.Kind == validity.Granted {
			r.schedule(s) // whoever waits for it makes the lease, which is looked at in time
		} else {
			r.touch(s)
		}
	}
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

// unreachable reports whether no server of the region answers on a stream, and
// nothing has come from it for so long.
func (r *region) unreachable(d time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.stream.up && r.now().Sub(r.heard) > d
}

func sessionExpired(id string) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_SessionExpired{SessionExpired: &pb.SessionExpired{SessionId: id}}}
}
