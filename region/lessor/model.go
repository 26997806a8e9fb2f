package lessor

import (
	"encoding/binary"
	"maps"
	"slices"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// Clone returns an independent copy, for a model checker that follows both
// branches of a choice. Its Outbox is empty.
func (l *Lessor) Clone() *Lessor {
	c := *l
	c.out = Outbox{}
	c.closed = nil
	parts := make(map[*partition]*partition, len(l.parts))
	c.parts = make(map[string]*partition, len(l.parts))
	for n, p := range l.parts {
		q := *p
		c.parts[n], parts[p] = &q, &q
	}
	waiters := map[*waiter]*waiter{}
	delays := map[*delay]*delay{}
	sessions := make(map[*session]*session, len(l.sessions))
	leases := map[*lease]*lease{}
	streams := make(map[*stream]*stream, len(l.streams))
	// Commands may refer to what is gone.
	var copySession func(*session) *session
	var copyLease func(*lease) *lease
	var copyStream func(*stream) *stream
	var copyCommand func(*inflight) *inflight
	var copyWaiter func(*waiter) *waiter
	var copyDelay func(*delay) *delay
	due := make(map[*timer]*timer, len(l.timers))
	copyTimer := func(t *timer) *timer {
		if t == nil {
			return nil
		}
		if q, ok := due[t]; ok {
			return q
		}
		q := *t
		due[t] = &q
		switch of := t.of.(type) {
		case *session:
			q.of = copySession(of)
		case *stream:
			q.of = copyStream(of)
		case *lease:
			q.of = copyLease(of)
		case *inflight:
			q.of = copyCommand(of)
		case *waiter:
			q.of = copyWaiter(of)
		case *delay:
			q.of = copyDelay(of)
		case *partition:
			q.of = parts[of]
		}
		return &q
	}
	copyWaiter = func(w *waiter) *waiter {
		if w == nil {
			return nil
		}
		if q, ok := waiters[w]; ok {
			return q
		}
		q := *w
		waiters[w] = &q
		q.session, q.partition, q.timer = copySession(w.session), parts[w.partition], copyTimer(w.timer)
		return &q
	}
	copyDelay = func(d *delay) *delay {
		if d == nil {
			return nil
		}
		if q, ok := delays[d]; ok {
			return q
		}
		q := *d
		delays[d] = &q
		q.timer = copyTimer(d.timer)
		return &q
	}
	copyArrival := func(a arrival) arrival {
		a.stream = copyStream(a.stream)
		return a
	}
	copyLease = func(e *lease) *lease {
		if e == nil {
			return nil
		}
		if q, ok := leases[e]; ok {
			return q
		}
		q := *e
		leases[e] = &q
		q.session, q.partition = copySession(e.session), parts[e.partition]
		q.timer = copyTimer(e.timer)
		return &q
	}
	copyRefs := func(of *refs) (q refs) {
		for p, n := range of.all() {
			q.set(parts[p], n)
		}
		return q
	}
	copyStream = func(st *stream) *stream {
		if st == nil {
			return nil
		}
		if q, ok := streams[st]; ok {
			return q
		}
		q := &stream{id: st.id, closed: st.closed, told: st.told, refs: copyRefs(&st.refs), sessions: make(map[*session]struct{}, len(st.sessions))}
		streams[st] = q
		q.unknown, q.timer = maps.Clone(st.unknown), copyTimer(st.timer)
		for s := range st.sessions {
			q.sessions[copySession(s)] = struct{}{}
		}
		for _, e := range st.unnamed {
			q.unnamed = append(q.unnamed, copyLease(e))
		}
		return q
	}
	copySession = func(s *session) *session {
		if s == nil {
			return nil
		}
		if q, ok := sessions[s]; ok {
			return q
		}
		q := *s
		sessions[s] = &q
		q.refs = copyRefs(&s.refs)
		q.history = slices.Clone(s.history)
		q.stream = copyStream(s.stream)
		q.timer, q.newest, q.covered = copyTimer(s.timer), copyArrival(s.newest), copyArrival(s.covered)
		q.leases = small[string, *lease]{}
		for r, e := range s.leases.all() {
			q.leases.set(r, copyLease(e))
		}
		q.waiting = make(map[uint64]*waiter, len(s.waiting))
		for r, w := range s.waiting {
			q.waiting[r] = copyWaiter(w)
		}
		q.offers = make(map[*lease]struct{}, len(s.offers))
		for e := range s.offers {
			q.offers[copyLease(e)] = struct{}{}
		}
		q.rename = make([]*lease, len(s.rename))
		for i, e := range s.rename {
			q.rename[i] = copyLease(e)
		}
		return &q
	}
	copyCommand = func(f *inflight) *inflight {
		if f == nil {
			return nil
		}
		q := &inflight{
			command: f.command, lease: copyLease(f.lease), end: f.end, waiter: copyWaiter(f.waiter), delay: copyDelay(f.delay),
			settle: parts[f.settle], epoch: f.epoch, weight: f.weight,
		}
		for _, s := range f.sessions {
			q.sessions = append(q.sessions, copySession(s))
		}
		return q
	}
	c.sessions = make(map[string]*session, len(l.sessions))
	for id, s := range l.sessions {
		c.sessions[id] = copySession(s)
	}
	c.streams = make(map[StreamID]*stream, len(l.streams))
	for id, st := range l.streams {
		c.streams[id] = copyStream(st)
	}
	c.arrivals, c.strangers = slices.Clone(l.arrivals), slices.Clone(l.strangers)
	for i, s := range c.arrivals {
		c.arrivals[i] = copySession(s)
	}
	for i, st := range c.strangers {
		c.strangers[i] = copyStream(st)
	}
	for _, p := range c.parts {
		p.timer = copyTimer(p.timer)
	}
	c.delays = make(map[string]*delay, len(l.delays))
	for r, d := range l.delays {
		c.delays[r] = copyDelay(d)
	}
	c.timers = slices.Clone(l.timers)
	for i, t := range c.timers {
		c.timers[i] = copyTimer(t)
	}
	c.expiries, c.backlog = slices.Clone(l.expiries), slices.Clone(l.backlog)
	for _, q := range [][]*inflight{c.expiries, c.backlog} {
		for i, f := range q {
			q[i] = copyCommand(f)
		}
	}
	c.inflight = make(map[uint64]*inflight, len(l.inflight))
	for id, f := range l.inflight {
		c.inflight[id] = copyCommand(f)
	}
	return &c
}

// AppendState appends a canonical form of all that bears on what the Lessor
// will send or propose: two of one form behave alike for ever, but for the
// numbers of commands and the instants of pushes, while few sessions end at a time. Instants are written relative
// to now, what is over as over. A deposed one, which is never ticked again and whose commands come to
// nothing, is written without what bears on commands only. It is for a model
// checker that takes the Outbox after each call.
func (l *Lessor) AppendState(b []byte, now instant.Instant, deposed bool) []byte {
	left := func(x instant.Instant) uint64 { return uint64(max(0, x.Sub(now))) }
	u := func(x uint64) { b = binary.AppendUvarint(b, x) }
	u(l.term)
	b = append(b, flags(l.checked, l.pulse, l.over, l.wanted > l.begun, l.begun > l.passed))
	for _, n := range slices.Sorted(maps.Keys(l.parts)) {
		p := l.parts[n]
		b = append(append(b, n...), 0, flags(p.live, p.unsettled, p.draining))
		u(uint64(p.epoch))
		u(uint64(p.holdEpoch))
		u(left(p.holdUntil))
		u(left(p.sent))
		if p.draining {
			u(left(p.drainEnd))
		}
	}
	for _, id := range slices.Sorted(maps.Keys(l.sessions)) {
		s := l.sessions[id]
		b = append(append(b, id...), 0, flags(s.expiring, s.closing, s.begun, s.again, s.ackDue))
		if !deposed {
			u(left(s.deadline))
		}
		u(left(s.sendable))
		if s.stream != nil {
			u(uint64(s.stream.id))
		} else {
			u(0)
		}
		for _, r := range slices.Sorted(s.leases.keys()) {
			e, _ := s.leases.get(r)
			b = append(append(b, r...), 0, flags(e.revoked, e.proposed, e.offerEnd != 0, e.offer, slices.Contains(s.rename, e), e.unnamed && s.begun, e.moving))
			u(uint64(e.token))
			u(left(e.until))
			u(left(e.offerEnd))
			u(left(e.assumed))
			u(s.changes - e.change)
		}
		b = append(b, 0xff)
		for _, r := range slices.Sorted(maps.Keys(s.waiting)) {
			u(r)
			u(uint64(s.waiting[r].length))
		}
		b = append(b, 0xff)
		for _, p := range s.history {
			b = binary.LittleEndian.AppendUint64(b, p.hash)
			u(s.changes - p.change)
		}
		b = append(b, 0xff)
		for _, a := range [2]arrival{s.newest, s.covered} {
			if a.order == 0 {
				b = append(b, 0xff)
				continue
			}
			b = append(b, flags(a.order <= l.begun, a.order <= l.wanted))
			u(left(a.at.Add(s.ttl)))
			if a.stream != nil {
				u(uint64(a.stream.id))
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(l.streams)) {
		u(uint64(id))
		st := l.streams[id]
		for _, s := range slices.Sorted(maps.Keys(st.unknown)) {
			b = append(append(b, s...), 0, flags(st.unknown[s] <= l.begun, st.unknown[s] <= l.wanted))
		}
	}
	b = append(b, 0xff)
	if deposed {
		return b
	}
	// What is due or under way, in no order.
	var due [][]byte
	for _, t := range l.timers {
		switch t.kind {
		case timerRetry:
			due = append(due, t.of.(*inflight).form(binary.AppendUvarint([]byte{1}, left(t.due))))
		case timerRevocation:
			if e := t.of.(*lease); !e.proposed {
				due = append(due, appendLease(binary.AppendUvarint([]byte{3}, left(t.due)), e))
			}
		case timerWait:
			due = append(due, appendWaiter(binary.AppendUvarint([]byte{5}, left(t.due)), t.of.(*waiter)))
		case timerDelay:
			due = append(due, appendDelay(binary.AppendUvarint([]byte{6}, left(t.due)), t.of.(*delay)))
		case timerSettle:
			due = append(due, append(binary.AppendUvarint([]byte{7}, left(t.due)), t.of.(*partition).name...))
		case timerExpiry, timerOffer, timerPush: // follow from deadline and offerEnd; pushes: see above
		}
	}
	for _, f := range l.inflight {
		due = append(due, f.form([]byte{0}))
	}
	for _, f := range slices.Concat(l.expiries, l.backlog) {
		due = append(due, f.form([]byte{4}))
	}
	slices.SortFunc(due, slices.Compare)
	for _, d := range due {
		b = append(b, d...)
	}
	return b
}

func (f *inflight) form(b []byte) []byte {
	b = append(b, flags(f.end))
	if f.lease != nil {
		b = appendLease(b, f.lease)
	}
	for _, s := range f.sessions {
		b = append(append(b, s.id...), 0, flags(s.gone))
	}
	switch {
	case f.waiter != nil:
		b = appendWaiter(append(b, 1), f.waiter)
	case f.delay != nil:
		b = appendDelay(append(b, 2), f.delay)
	case f.settle != nil:
		b = binary.AppendUvarint(append(append(b, 3), f.settle.name...), uint64(f.epoch))
	}
	return b
}

func appendWaiter(b []byte, w *waiter) []byte {
	return binary.AppendUvarint(append(append(b, w.session.id...), 0, flags(w.gone)), w.request)
}

func appendDelay(b []byte, d *delay) []byte {
	return binary.AppendUvarint(append(append(b, d.resource...), 0, flags(d.gone)), uint64(d.token))
}

func appendLease(b []byte, e *lease) []byte {
	b = append(append(b, e.resource...), 0, flags(e.gone))
	return binary.AppendUvarint(b, uint64(e.token))
}

func flags(bits ...bool) byte {
	var f byte
	for i, b := range bits {
		if b {
			f |= 1 << i
		}
	}
	return f
}

// Deadlines returns a session's two deadlines: for expiry, and the one that
// may be sent. ok is false for an unknown session.
func (l *Lessor) Deadlines(id string) (expiry, sendable instant.Instant, ok bool) {
	s, ok := l.sessions[id]
	if !ok {
		return 0, 0, false
	}
	return s.deadline, s.sendable, true
}

// RevocationEnd returns when a revoked lease may pass on; ok is false if the
// token is not held or not revoked.
func (l *Lessor) RevocationEnd(session, resource string, token fence.Token) (until instant.Instant, ok bool) {
	e := l.lease(session, resource)
	if e == nil || e.token != token || !e.revoked {
		return 0, false
	}
	return e.until, true
}

// Held returns the token that a session holds on a resource, unless revoked.
func (l *Lessor) Held(session, resource string) (fence.Token, bool) {
	e := l.lease(session, resource)
	if e == nil || e.revoked {
		return 0, false
	}
	return e.token, true
}
