package lessor

import (
	"time"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/region/state"
)

// open adds a session, with its full TTL.
func (l *Lessor) open(s state.Session, now instant.Instant) *session {
	q := &session{id: s.ID, ttl: time.Duration(s.TTLMillis) * time.Millisecond}
	q.deadline = now.Add(q.ttl)
	l.sessions[q.id] = q
	q.timer = &timer{kind: timerExpiry, of: q}
	l.at(q.deadline, q.timer)
	return q
}

// hold adds a lease to its session; the caller lists it, now or when the stream
// names it.
func (l *Lessor) hold(s *session, resource string, p *partition, token fence.Token) *lease {
	e := &lease{resource: resource, token: token, session: s, partition: p}
	s.leases.set(resource, e)
	p.leases++
	l.refer(s, p, 1)
	return e
}

// list counts a lease among those that the session's stream names.
func (e *lease) list() {
	e.unnamed = false
	e.session.change(validity.TokenHash(e.resource, e.token))
	e.change = e.session.changes
}

// drop removes a lease from its session.
func (l *Lessor) drop(e *lease) {
	s := e.session
	if held, _ := s.leases.get(e.resource); held == e {
		s.leases.remove(e.resource)
	}
	l.part(e)
	l.stop(e.timer)
	delete(s.offers, e)
	l.refer(s, e.partition, -1)
	if !e.revoked && !e.unnamed {
		s.change(-validity.TokenHash(e.resource, e.token))
	}
}

// part notes that a lease is gone.
func (l *Lessor) part(e *lease) {
	if e.gone {
		return
	}
	e.gone = true
	p := e.partition
	if p.leases--; p.leases == 0 && p.draining {
		l.out.Drained = true
	}
}

// unlist marks a listed lease as revoked: it is named no more.
func (l *Lessor) unlist(e *lease) {
	e.revoked = true
	delete(e.session.offers, e)
	e.session.change(-validity.TokenHash(e.resource, e.token))
}

// offer starts the time within which the client must confirm [F23].
func (l *Lessor) offer(e *lease) { l.offerFrom(e, l.now) }

// offerFrom counts that time from an instant.
func (l *Lessor) offerFrom(e *lease, from instant.Instant) {
	e.offerEnd = from.Add(min(e.session.ttl, l.cfg.ConfirmWithin))
	if e.session.offers == nil {
		e.session.offers = map[*lease]struct{}{}
	}
	e.session.offers[e] = struct{}{}
	l.wake(e, timerOffer, e.offerEnd)
}

// wake sets a lease's one timer.
func (l *Lessor) wake(e *lease, kind timerKind, due instant.Instant) {
	if e.timer == nil {
		e.timer = &timer{of: e}
	}
	e.timer.kind = kind
	l.at(due, e.timer)
}

// refer counts what a session, and so its stream, has in a partition.
func (l *Lessor) refer(s *session, p *partition, n int) {
	s.refs.count(p, n)
	if s.stream != nil {
		s.stream.refs.count(p, n)
	}
}

// refs counts what there is in each partition.
type refs struct{ small[*partition, int] }

func (r *refs) count(p *partition, n int) {
	if before, _ := r.get(p); before+n != 0 {
		r.set(p, before+n)
	} else {
		r.remove(p)
	}
}

// change moves the hash of the held set on.
func (s *session) change(by uint64) {
	s.hash += by
	s.changes++
	if !s.begun {
		return
	}
	if len(s.history) == maxHistory {
		s.history = append(s.history[:0], s.history[maxHistory/2:]...)
	}
	s.history = append(s.history, point{s.hash, s.changes})
}

// attach moves a session to a stream. Its old stream is closed: pushes there
// would go on reaching tokens whose withdrawal goes to the new one [L1].
func (l *Lessor) attach(s *session, st *stream) {
	if s.stream == st {
		return
	}
	if s.stream != nil {
		l.closeStream(s.stream)
	}
	s.stream = st
	st.sessions[s] = struct{}{}
	for p, n := range s.refs.all() {
		st.refs.count(p, n)
	}
}

func (l *Lessor) detach(s *session) {
	st := s.stream
	if st == nil {
		return
	}
	for p, n := range s.refs.all() {
		st.refs.count(p, -n)
	}
	delete(st.sessions, s)
	for _, e := range st.unnamed {
		if e.session == s && e.unnamed && !e.gone {
			e.list() // by the next stream's first ack
		}
	}
	s.stream, s.begun, s.again, s.ackDue, s.history, s.rename = nil, false, false, false, nil, nil
}

func (l *Lessor) closeStream(st *stream) {
	if st.closed {
		return
	}
	l.forgetStream(st)
	l.out.Closes = append(l.out.Closes, st.id)
}

func (l *Lessor) forgetStream(st *stream) {
	for s := range st.sessions {
		l.detach(s)
	}
	st.closed = true
	l.stop(st.timer)
	delete(l.streams, st.id)
}

// forget removes an ended session.
func (l *Lessor) forget(s *session) {
	l.detach(s)
	l.depart(s)
	l.stop(s.timer)
	for _, e := range s.leases.all() {
		l.part(e)
		l.stop(e.timer)
	}
	for _, q := range s.waiting {
		l.leaveWait(q)
	}
	s.gone = true
	delete(l.sessions, s.id)
}
