package state

import (
	"crypto/sha256"
	"fmt"
	"maps"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Bounds of one session's description.
const (
	// MaxSessions of the region, closing ones included.
	MaxSessions = 1_000_000
	// MaxTTLMillis is the longest time to live of a session.
	MaxTTLMillis = 600_000
	// MaxLabels of a session, and their bytes in all.
	MaxLabels     = 64
	MaxLabelBytes = 16 << 10
)

func (m *Machine) openSession(c *pb.OpenSessionCommand) *pb.CommandResult {
	if e := checkSession(c); e != nil {
		return failed(e)
	}
	if _, ok := m.sessions.Get(c.GetSessionId()); ok {
		return failed(errRefused("a session of that id exists; choose another random id"))
	}
	if m.sessions.Len() >= MaxSessions {
		return failed(errOverloaded(fmt.Sprintf("the region has %d sessions; close some", m.sessions.Len())))
	}
	s := &session{
		gen: m.gen, id: c.GetSessionId(), secretHash: [sha256.Size]byte(c.GetSecretHash()), ttlMillis: c.GetTtlMs(),
		identity: c.GetIdentity(), labels: maps.Clone(c.GetLabels()), lowest: 1, dirty: true,
	}
	s.fixedHash = s.hashFixed()
	m.dirtySessions = append(m.dirtySessions, s)
	m.sessions.Set(s.id, s)
	m.emit(SessionOpened{Session: s.export()})
	return &pb.CommandResult{}
}

func checkSession(c *pb.OpenSessionCommand) *pb.ErrorDetail {
	size := 0
	for k, v := range c.GetLabels() { // a sum: the order does not show
		size += len(k) + len(v)
	}
	switch {
	case c.GetSessionId() == "" || len(c.GetSessionId()) > maxName:
		return errInvalid("session_id", fmt.Sprintf("choose a random id of 1 to %d bytes", maxName))
	case len(c.GetSecretHash()) != sha256.Size:
		return errInvalid("secret_hash", "give the SHA-256 of the secret")
	case c.GetTtlMs() <= 0 || c.GetTtlMs() > MaxTTLMillis:
		return errInvalid("ttl_ms", fmt.Sprintf("%d is out of range; use up to %d", c.GetTtlMs(), MaxTTLMillis))
	case len(c.GetIdentity()) > maxName:
		return errInvalid("identity", fmt.Sprintf("use at most %d bytes", maxName))
	case len(c.GetLabels()) > MaxLabels || size > MaxLabelBytes:
		return errInvalid("labels", fmt.Sprintf("use at most %d labels of %d bytes in all", MaxLabels, MaxLabelBytes))
	}
	return nil
}

// endSessions closes the listed sessions and removes up to MaxRemovals of
// their leases; a session with leases left stays closing and is emptied by
// later commands. Unknown sessions have ended before: nothing to do.
//
// All leases and waiters go first, and only then each resource is handed over,
// once: otherwise a resource would pass from one ended session to the next,
// with a token and a notification each [F22].
func (m *Machine) endSessions(ids []string, reason EndReason) {
	for _, id := range ids {
		if s, ok := m.sessions.Get(id); ok && !s.closing {
			m.closeSession(s, reason)
		}
	}
	var freed []string
	for _, id := range ids {
		s, ok := m.sessions.Get(id)
		if !ok {
			continue
		}
		reason := reason
		if s.orderly {
			reason = EndClosed
		}
		for s.held.Len() > 0 && len(freed) < MaxRemovals {
			name, _, _ := s.held.Min()
			r, _ := m.resources.Get(name)
			m.endLease(r, reason)
			freed = append(freed, name)
			s, _ = m.sessions.Get(id)
		}
		if s.held.Len() == 0 {
			m.removeSession(s)
		}
	}
	for _, name := range freed {
		m.handOver(name)
	}
}

// closeSession ends a session's waiters at once; its leases follow.
func (m *Machine) closeSession(s *session, reason EndReason) {
	s = m.editSession(s)
	s.closing = true
	s.orderly = reason == EndClosed && m.level >= 2
	m.closing.Set(s.id, struct{}{})
	m.emit(SessionClosed{ID: s.id, Reason: reason})
	var waits []request
	s.open.Scan(func(_ uint64, q request) bool {
		if q.token == 0 {
			waits = append(waits, q)
		}
		return true
	})
	for _, q := range waits {
		m.dequeue(q, errSessionExpired(s.id))
	}
}

// sawRequest reports whether a request id was answered, queued or cancelled.
func (s *session) sawRequest(id uint64) bool {
	_, last, ok := s.seenFloor(id)
	return ok && last >= id
}

// seenFloor returns the range of seen ids that begins at or before id.
func (s *session) seenFloor(id uint64) (first, last uint64, ok bool) { return s.seen.Floor(id) }

// remember adds a request id to the seen ones, or reports that there is no
// room: the ids have too many gaps. s must be editable.
func (s *session) remember(id uint64) bool {
	first, last, ok := s.seenFloor(id)
	if ok && last >= id {
		return true
	}
	if !ok || last+1 != id { // last < id: no overflow
		first = id
	}
	end := id
	if next, ok := s.seen.Get(id + 1); ok { // 0 after the highest id: never there
		s.deleteSeen(id + 1)
		end = next
	} else if first == id && s.seen.Len() >= MaxSeenRanges {
		return false
	}
	s.setSeen(first, end)
	return true
}

func (s *session) setSeen(first, last uint64) {
	if old, ok := s.seen.Set(first, last); ok {
		s.seenSum -= seenDigest(first, old)
	}
	s.seenSum += seenDigest(first, last)
}

func (s *session) deleteSeen(first uint64) {
	if last, ok := s.seen.Delete(first); ok {
		s.seenSum -= seenDigest(first, last)
	}
}

func (s *session) setOpen(id uint64, q request) {
	if old, ok := s.open.Set(id, q); ok {
		s.openSum -= old.digest(id)
	}
	s.openSum += q.digest(id)
}

func (s *session) deleteOpen(id uint64) {
	if q, ok := s.open.Delete(id); ok {
		s.openSum -= q.digest(id)
	}
}

// raiseLowest forgets all requests below lowest: they are refused from now on
// without being remembered. One that still waits is given up.
func (m *Machine) raiseLowest(s *session, lowest uint64) *session {
	if lowest <= s.lowest {
		return s
	}
	s = m.editSession(s)
	s.lowest = lowest
	for s.seen.Len() > 0 {
		first, last, _ := s.seen.Min()
		if first >= lowest {
			break
		}
		s.deleteSeen(first)
		if last >= lowest {
			s.setSeen(lowest, last)
		}
	}
	for s.open.Len() > 0 {
		id, q, _ := s.open.Min()
		if id >= lowest {
			break
		}
		if q.token == 0 {
			m.dequeue(q, errStaleRequest(id))
		} else {
			s.deleteOpen(id)
		}
	}
	return s
}
