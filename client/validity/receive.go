package validity

import (
	"slices"
	"strings"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Received takes the next message of a stream, in the stream's order.
func (t *Table) Received(now instant.Instant, on StreamID, msg *pb.AttachResponse) []Event {
	if msg.GetTerm() == 0 || msg.GetTerm() < t.term || !t.open[on] {
		return nil // [L5]
	}
	t.sawTerm(msg.GetTerm())
	st := t.stream(key{msg.GetTerm(), on})
	switch {
	case msg.GetAck() != nil:
		return t.takeAck(now, st, msg.GetAck())
	case msg.GetPush() != nil:
		st.takeEnds(msg.GetPush().GetPartitions())
	case msg.GetGrant() != nil:
		return t.takeGrant(now, st, msg.GetGrant())
	case msg.GetWithdrawal() != nil:
		return t.takeWithdrawal(now, st, msg.GetWithdrawal())
	case msg.GetEnded() != nil:
		id := msg.GetEnded().GetSessionId()
		s, ok := t.sessions[id]
		if !ok || st.less(s.current) {
			return nil
		}
		t.CloseSession(id)
		return []Event{{Kind: SessionEnded, Session: id, Reason: msg.GetEnded().GetReason()}}
	case msg.GetFailed() != nil:
		f := msg.GetFailed()
		s, ok := t.sessions[f.GetSessionId()]
		if !ok || st.less(s.current) {
			return nil
		}
		w, open := s.requests[f.GetRequestId()]
		if !open {
			return nil
		}
		delete(s.requests, f.GetRequestId())
		return []Event{{Kind: RequestFailed, Session: s.id, Resource: w.resource, Request: f.GetRequestId(), Err: f.GetError()}}
	}
	return nil
}

// AcquireAnswered takes the answer to an Acquire; sent is our clock, read
// before that very attempt was sent. Only a grant changes anything.
func (t *Table) AcquireAnswered(now, sent instant.Instant, id string, request uint64, answer *pb.AcquireResponse) []Event {
	held := answer.GetGranted()
	s, ok := t.sessions[id]
	if held == nil || !ok {
		return nil
	}
	token, ok := parse(held)
	if !ok {
		return nil
	}
	var until instant.Instant
	if answer.GetTerm() >= t.term && t.pairs(sent) {
		t.sawTerm(answer.GetTerm())
		until = mapped(instant.Instant(held.GetUntil()), sent, instant.Instant(answer.GetReceivedAt()), t.drift)
	}
	events := s.told(now, held, token, request, false)
	if l, ok := s.leases[held.GetResource()]; ok && l.token == token {
		// A repeated answer may come before the one it repeats.
		if until > l.until && !l.revoked {
			l.until, l.sent = until, sent
		}
	} else if len(events) == 0 {
		events = append(events, Event{
			Kind: Lost, Session: id, Resource: held.GetResource(), Token: token, Request: request, Partition: held.GetPartition(),
		})
	}
	return events
}

func (t *Table) takeAck(now instant.Instant, st *stream, ack *pb.Ack) []Event {
	s, ok := t.sessions[ack.GetSessionId()]
	if !ok || st.less(s.current) || ack.GetSequence() < s.minSequence {
		return nil
	}
	v := s.view(st.key)
	if v == nil {
		if !ack.GetComplete() {
			return nil // a stream begins with an ack that names all [L1]
		}
		v = &view{st: st, named: map[string]naming{}}
		st.views++
	}
	if c, ok := s.acknowledge(st.id, ack.GetSequence()); ok {
		if !st.paired || c >= st.c {
			st.paired, st.c, st.s = true, c, instant.Instant(ack.GetReceivedAt())
		}
		if !s.acked || c > s.lastAcked {
			s.acked, s.lastAcked = true, c
		}
		s.remap = false
	}
	v.until = max(v.until, instant.Instant(ack.GetSessionUntil()))
	st.takeEnds(ack.GetPartitions())

	var events []Event
	if ack.GetComplete() {
		events = t.takeComplete(now, s, v, ack.GetHeld())
	}
	for _, h := range ack.GetHeld() {
		events = append(events, s.name(now, v, h, 0)...)
	}
	return events
}

// takeComplete ends every token that the list does not name: those named by
// this stream (withdrawn ones run to their end), and by older ones.
func (t *Table) takeComplete(now instant.Instant, s *session, v *view, held []*pb.Held) []Event {
	listed := map[string]fence.Token{}
	for _, h := range held {
		listed[h.GetResource()] = fence.Token(h.GetToken())
	}
	var events []Event
	lose := func(resource string, token fence.Token) {
		if l, ok := s.leases[resource]; ok && l.token == token && listed[resource] != token {
			events = append(events, Event{Kind: Lost, Session: s.id, Resource: resource, Token: token, Partition: l.partition})
			s.bury(now, resource, token, fateEnded)
		}
	}
	for _, old := range s.views {
		for resource, n := range old.named {
			if old == v && n.withdrawn {
				continue
			}
			lose(resource, n.token)
			if listed[resource] != n.token {
				delete(old.named, resource)
			}
		}
	}
	s.current = v.st.key
	// A leader names what is held before it has renewed the head lease, and can say
	// nothing of its end till then: a new one, and one that begins anew within its
	// term after a gap in its clock. What was promised before for the same tokens, on
	// an older stream, stays true until it runs out: whoever leads counts it as sent
	// [L3], for it cannot know when this ack arrives. Nothing is added to it.
	t.dropViews(s, func(w *view) bool { return w == v || t.speaks(now, s, w) })
	if s.view(v.st.key) == nil {
		s.views = append(s.views, v)
	}
	slices.SortFunc(events, func(a, b Event) int { return strings.Compare(a.Resource, b.Resource) })
	return events
}

func (t *Table) takeGrant(now instant.Instant, st *stream, g *pb.Grant) []Event {
	s, ok := t.sessions[g.GetSessionId()]
	if !ok {
		return nil
	}
	v := s.view(st.key)
	if v == nil || g.GetHeld() == nil {
		return nil // not begun here; the first ack names it [L1]
	}
	if g.GetPartition() != nil {
		st.takeEnds([]*pb.PartitionEnd{g.GetPartition()})
	}
	return s.name(now, v, g.GetHeld(), g.GetRequestId())
}

func (t *Table) takeWithdrawal(now instant.Instant, st *stream, w *pb.Withdrawal) []Event {
	s, ok := t.sessions[w.GetSessionId()]
	if !ok {
		return nil
	}
	v := s.view(st.key)
	if v == nil {
		return nil
	}
	resource, token := w.GetResource(), fence.Token(w.GetToken())
	until := instant.Instant(w.GetUntil())
	n, named := v.named[resource]
	named = named && n.token == token
	if named {
		if until == 0 {
			delete(v.named, resource)
		} else if !n.withdrawn {
			n.withdrawn = true
			if n.until == 0 || until < n.until {
				n.until = until
			}
			v.named[resource] = n
		}
	}
	l, known := s.leases[resource]
	if !known || l.token != token {
		// An answer that is still under way must not bring it back.
		s.bury(now, resource, token, fateEnded)
		return nil
	}
	e := Event{
		Kind: Withdrawn, Session: s.id, Resource: resource, Token: token, Partition: l.partition, Withdrawal: w.GetReason(),
	}
	if until == 0 {
		s.bury(now, resource, token, fateEnded)
		return []Event{e}
	}
	l.revoked = true
	l.until = min(l.until, st.local(until, t.drift))
	e.Until = t.Until(s.id, resource, token)
	if named {
		// A drain's end may lie beyond what is promised so far; keepalives and pushes
		// go on until then.
		e.Until = max(e.Until, st.local(until, t.drift))
	}
	return []Event{e}
}

// name takes a token as named by the stream.
func (s *session) name(now instant.Instant, v *view, h *pb.Held, request uint64) []Event {
	token, ok := parse(h)
	if !ok {
		return nil
	}
	resource := h.GetResource()
	n, again := v.named[resource]
	if again && (n.token > token || n.token == token && n.withdrawn) {
		return nil
	}
	v.named[resource] = naming{token: token, partition: h.GetPartition(), until: instant.Instant(h.GetUntil())}
	offered := h.GetUntil() != 0
	events := s.told(now, h, token, request, offered)
	if l, ok := s.leases[resource]; ok && l.token == token && offered && n.token != token {
		s.offer(now, l)
	}
	return events
}

// told makes a lease of a token that somebody here waits for.
func (s *session) told(now instant.Instant, h *pb.Held, token fence.Token, request uint64, offered bool) []Event {
	resource := h.GetResource()
	if l, ok := s.leases[resource]; ok && l.token >= token {
		return nil
	}
	if f, ok := s.floors[resource]; ok && token <= f.token {
		if token < f.token || f.fate != fateEnded {
			return nil
		}
		s.bury(now, resource, token, fateReleasing)
		return []Event{{Kind: Stranger, Session: s.id, Resource: resource, Token: token, Partition: h.GetPartition()}}
	}
	var events []Event
	if l, ok := s.leases[resource]; ok {
		events = append(events, Event{Kind: Lost, Session: s.id, Resource: resource, Token: l.token, Partition: l.partition})
		s.bury(now, resource, l.token, fateEnded)
	}
	request, wanted := s.waitsFor(resource, request)
	if !wanted {
		s.bury(now, resource, token, fateReleasing)
		return append(events, Event{Kind: Stranger, Session: s.id, Resource: resource, Token: token, Partition: h.GetPartition()})
	}
	delete(s.requests, request)
	s.floors[resource] = floor{token: token - 1, at: now}
	s.leases[resource] = &lease{token: token, partition: h.GetPartition()}
	return append(events, Event{
		Kind: Granted, Session: s.id, Resource: resource, Token: token, Request: request, Partition: h.GetPartition(), Offered: offered,
	})
}

// waitsFor returns the open request that a token of the resource answers: the
// one named, or the lowest if none is named.
func (s *session) waitsFor(resource string, request uint64) (uint64, bool) {
	if request != 0 {
		w, ok := s.requests[request]
		return request, ok && w.takes(resource)
	}
	var found uint64
	for id, w := range s.requests {
		if w.takes(resource) && (found == 0 || id < found) {
			found = id
		}
	}
	return found, found != 0
}

// acknowledge returns when the keepalive was sent, and forgets it and those
// before it on the stream.
func (s *session) acknowledge(on StreamID, sequence uint64) (at instant.Instant, ok bool) {
	keep := s.sent[:0]
	for _, k := range s.sent {
		if k.stream == on && k.sequence == sequence {
			at, ok = k.at, true
		}
		if k.stream != on || k.sequence > sequence {
			keep = append(keep, k)
		}
	}
	s.sent = keep
	return at, ok
}

// sawTerm takes a term: what was said under lower ones is dropped from now on.
func (t *Table) sawTerm(term uint64) {
	if term <= t.term {
		return
	}
	t.term = term
	for _, st := range t.streams {
		t.collect(st)
	}
	for _, s := range t.sessions {
		s.remap = true
	}
}

func (t *Table) stream(k key) *stream {
	st, ok := t.streams[k]
	if !ok {
		st = &stream{key: k, ends: map[part]instant.Instant{}}
		t.streams[k] = st
	}
	return st
}

func (st *stream) takeEnds(ends []*pb.PartitionEnd) {
	for _, e := range ends {
		st.ends[part{e.GetPartition(), fence.Epoch(e.GetEpoch())}] = instant.Instant(e.GetUntil())
	}
}

func parse(h *pb.Held) (fence.Token, bool) {
	token := fence.Token(h.GetToken())
	_, err := fence.NewToken(token.Epoch(), token.Seq())
	return token, err == nil && h.GetToken() != 0 && h.GetResource() != ""
}
