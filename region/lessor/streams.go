package lessor

import (
	"errors"
	"math"
	"slices"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Errors of Answer.
var (
	// ErrWait: a leadership check must pass first, or the session's expiry is
	// under way; ask again after the next CheckPassed.
	ErrWait = errors.New("the answer waits for a leadership check")
	// ErrNotHeld: the token is not held, or is revoked.
	ErrNotHeld = errors.New("the token is not held any more; acquire again with a new request id")
	// ErrLapsed: the region's head lease does not run now. The grant stands;
	// the same request is answered when it runs again.
	ErrLapsed = errors.New("the region's head lease has lapsed; retry the same request")
)

// never is after every instant.
const never = instant.Instant(math.MaxInt64)

// StreamOpened adds an attachment, before anything is taken from it.
func (l *Lessor) StreamOpened(now instant.Instant, id StreamID) {
	l.tick(now)
	if _, ok := l.streams[id]; ok {
		return
	}
	st := &stream{id: id, sessions: map[*session]struct{}{}}
	l.streams[id] = st
	st.timer = &timer{kind: timerPush, of: st}
	l.pushNext(st)
}

// Keepalive takes a session's keepalive from an open stream; the first one
// attaches it. The caller has checked the secret. A keepalive of an unknown
// session is answered, after a check, by SessionEnded; one from a stream that
// is not open is ignored.
func (l *Lessor) Keepalive(now instant.Instant, id StreamID, ka *pb.Keepalive) {
	l.tick(now)
	st, ok := l.streams[id]
	if !ok {
		return
	}
	s, ok := l.sessions[ka.GetSessionId()]
	if !ok || s.closing {
		l.arriveUnknown(st, ka.GetSessionId())
		return
	}
	l.attach(s, st)
	if s.expiring {
		return // its command's outcome decides [F7]
	}
	s.deadline = max(s.deadline, now.Add(s.ttl))
	l.confirm(s, ka.GetTokensHash())
	l.arrive(s, arrival{at: now, stream: st, sequence: ka.GetSequence()}, true)
	l.checkBy = min(l.checkBy, now.Add(s.patience(now)))
}

// Detach takes a session off a stream at its client's wish.
func (l *Lessor) Detach(now instant.Instant, id StreamID, sessionID string) {
	l.tick(now)
	if s, ok := l.sessions[sessionID]; ok && s.stream != nil && s.stream.id == id {
		l.detach(s)
	}
}

// StreamClosed: the stream has ended, or will take nothing more.
func (l *Lessor) StreamClosed(now instant.Instant, id StreamID) {
	l.tick(now)
	if st, ok := l.streams[id]; ok {
		l.forgetStream(st)
	}
}

// confirm compares what the client knows with what the stream has told it. A
// match confirms the offers up to that point [F23]; without one the next ack
// lists all [F17].
func (l *Lessor) confirm(s *session, hash uint64) {
	upTo := s.changes
	if s.begun {
		// The set may have been the same at several points. The client knows
		// what was in it at each of them; it may be only at the first.
		first, last := -1, -1
		for i, p := range s.history {
			if p.hash == hash {
				if first < 0 {
					first = i
				}
				last = i
			}
		}
		if first < 0 {
			s.again = true
			return
		}
		upTo = s.history[last].change
		s.history = append(s.history[:0], s.history[first:]...)
	} else if hash != s.hash {
		return // the first ack is complete anyway
	}
	for e := range s.offers {
		if e.change > upTo || e.proposed {
			continue
		}
		delete(s.offers, e)
		e.offerEnd = 0
		l.stop(e.timer)
		if s.begun {
			s.rename = append(s.rename, e)
		}
	}
}

// A keepalive of a session that its stream speaks for already, and that has most
// of its time left, may wait for a check with others: maxPatience, or less of a
// short TTL. Nothing of what is sent depends on when the check runs.
const (
	maxPatience  = 50 * time.Millisecond
	patiencePart = 200 // of the TTL
)

// patience is how long the check of a keepalive that arrives now may be put off.
func (s *session) patience(now instant.Instant) time.Duration {
	if !s.begun || s.again || s.sendable.Sub(now) < s.ttl/2 {
		return 0
	}
	return min(maxPatience, s.ttl/patiencePart)
}

// arrive queues a session's arrival for a check; wanted says that somebody
// waits for it. Of those that no check covers yet the newest is enough.
func (l *Lessor) arrive(s *session, a arrival, wanted bool) {
	l.order++
	a.order = l.order
	if s.newest.order != 0 && s.newest.order <= l.begun {
		s.covered = s.newest
	}
	s.newest = a
	if s.arrivalAt == 0 {
		l.arrivals = append(l.arrivals, s)
		s.arrivalAt = len(l.arrivals)
	}
	if wanted {
		l.wanted = l.order
	}
}

// depart takes a session's arrivals out.
func (l *Lessor) depart(s *session) {
	s.newest, s.covered = arrival{}, arrival{}
	if s.arrivalAt == 0 {
		return
	}
	n := len(l.arrivals) - 1
	last := l.arrivals[n]
	l.arrivals[s.arrivalAt-1], last.arrivalAt = last, s.arrivalAt
	l.arrivals[n] = nil
	l.arrivals = l.arrivals[:n]
	s.arrivalAt = 0
}

// arriveUnknown queues the keepalive of a session that is not there.
func (l *Lessor) arriveUnknown(st *stream, id string) {
	l.order++
	switch _, again := st.unknown[id]; {
	case again: // the earlier one is answered, sooner
		return
	case len(st.unknown) >= maxUnknown:
		return
	case st.unknown == nil:
		st.unknown = map[string]uint64{}
	}
	if len(st.unknown) == 0 {
		l.strangers = append(l.strangers, st)
	}
	st.unknown[id] = l.order
	l.want()
}

// want asks for a check at once.
func (l *Lessor) want() { l.wanted, l.checkBy = l.order, 0 }

// CheckWanted reports whether something waits that only a leadership check
// begun from now on can cover.
func (l *Lessor) CheckWanted() bool { return l.pulse && !l.over && l.wanted > l.begun }

// CheckBy is when a check that is wanted is to begin at the latest, so that it
// covers what arrives until then too.
func (l *Lessor) CheckBy() (at instant.Instant, wanted bool) { return l.checkBy, l.CheckWanted() }

// CheckBegun notes that a leadership check begins now: it covers all that
// arrived before [F1].
func (l *Lessor) CheckBegun(now instant.Instant) Ticket {
	l.tick(now)
	l.begun, l.checkBy = l.order, never
	return Ticket{order: l.order, generation: l.generation}
}

// CheckPassed notes that the check has passed: sendable deadlines move and
// acks go out. While the pulse is stale it counts for nothing.
func (l *Lessor) CheckPassed(now instant.Instant, t Ticket) {
	l.tick(now)
	if t.generation != l.generation {
		return
	}
	if !l.pulse {
		l.CheckFailed(now, t)
		return
	}
	l.checked = true
	l.passed = max(l.passed, t.order)
	var due []*session
	for i := 0; i < len(l.arrivals); {
		s := l.arrivals[i]
		a := s.newest
		switch {
		case a.order <= t.order:
			l.depart(s) // another takes its place
		case s.covered.order != 0 && s.covered.order <= t.order:
			a, s.covered = s.covered, arrival{}
			i++
		default:
			i++
			continue
		}
		s.sendable = max(s.sendable, a.at.Add(s.ttl))
		if a.stream == nil || s.stream != a.stream || s.expiring {
			continue
		}
		if !s.ackDue {
			s.ackDue = true
			due = append(due, s)
		}
		s.ackSequence, s.ackAt = a.sequence, a.at
	}
	for _, s := range due {
		l.ack(s)
	}
	l.answerStrangers(t)
}

// answerStrangers tells which of the unknown sessions that the check covers are
// no more.
func (l *Lessor) answerStrangers(t Ticket) {
	left := l.strangers[:0]
	for _, st := range l.strangers {
		if st.closed {
			continue
		}
		var told []string
		for id, order := range st.unknown {
			if order <= t.order {
				told = append(told, id)
			}
		}
		slices.Sort(told)
		for _, id := range told {
			delete(st.unknown, id)
			l.tellEnded(st, id)
		}
		if len(st.unknown) > 0 {
			left = append(left, st)
		}
	}
	clear(l.strangers[len(left):])
	l.strangers = left
}

// CheckFailed notes that the check did not pass, or that its outcome is
// unknown.
func (l *Lessor) CheckFailed(now instant.Instant, t Ticket) {
	l.tick(now)
	if t.generation == l.generation && t.order >= l.begun {
		l.begun, l.checkBy = l.passed, 0
	}
}

// Answer returns what an answer to a granted Acquire may say, computed now
// [F10]: the token with an end of its own. It gives nothing more until the
// stream names the token [L1].
func (l *Lessor) Answer(now instant.Instant, id, resource string, token fence.Token) (*pb.Held, error) {
	l.tick(now)
	s, ok := l.sessions[id]
	if !ok || s.closing {
		return nil, ErrNotHeld
	}
	e, ok := s.leases.get(resource)
	if !ok || e.token != token || e.revoked {
		return nil, ErrNotHeld
	}
	p := e.partition
	switch {
	case token.Epoch() != p.epoch && p.live:
		return nil, ErrNotHeld // of an epoch that is dropped piece by piece [L6]
	case !p.held(now):
		return nil, ErrLapsed
	case !l.pulse || s.expiring:
		return nil, ErrWait
	case !l.checked || s.sendable <= now:
		l.order++
		l.want()
		return nil, ErrWait
	}
	until := min(s.sendable, p.holdUntil)
	if e.offerEnd != 0 {
		until = min(until, e.offerEnd) // [L4]
	}
	if until <= now {
		return nil, ErrNotHeld
	}
	p.sent = max(p.sent, p.holdUntil)
	return &pb.Held{Resource: resource, Token: uint64(token), Partition: p.name, Until: int64(until)}, nil
}
