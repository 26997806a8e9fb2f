package lessor

import "github.com/headlease/headlease/internal/instant"

// ClockGap: the leader's clock stood still or jumped, and it begins anew within
// its term, as a new leader would. What was known is void. What was promised
// stands, on the clients' clocks, and by how much this clock differs from before
// nobody knows: so all of it counts as sent just now, in full [L3]. All streams
// close, because a client must not map an instant of before with a round trip of
// after.
func (l *Lessor) ClockGap(now instant.Instant) {
	l.tick(now)
	l.generation++
	l.checked = false
	for len(l.arrivals) > 0 {
		l.depart(l.arrivals[0])
	}
	l.strangers = nil // their streams close
	l.begun, l.passed, l.wanted = l.order, l.order, l.order
	for _, p := range l.parts {
		p.holdEpoch, p.holdUntil = 0, 0
		p.changed()
		if p.live {
			p.sent = max(p.sent, l.now.Add(p.d))
		}
	}
	for _, st := range l.streams {
		l.closeStream(st)
	}
	for _, s := range l.sessions {
		s.deadline = max(s.deadline, l.now.Add(s.ttl))
		s.sendable = s.deadline // gated by checked [L2]
		for _, e := range s.leases.all() {
			l.promised(e)
		}
		for e := range s.offers {
			if !e.proposed {
				l.inherit(e)
			}
		}
	}
	l.restart()
}

// promised counts what was promised for a lease before now as sent just now.
func (l *Lessor) promised(e *lease) {
	e.assumed = l.now.Add(min(e.session.ttl, e.partition.d))
	if e.revoked && !e.proposed {
		e.until = max(e.until, e.assumed)
		l.wake(e, timerRevocation, e.until)
	}
}

// restart counts anew how long requests wait and lock delays last: what the
// clock says has passed may not have.
func (l *Lessor) restart() {
	for _, s := range l.sessions {
		for _, q := range s.waiting {
			if q.timer != nil && q.timer.at != 0 {
				l.at(l.now.Add(q.length), q.timer)
			}
		}
	}
	for _, d := range l.delays {
		if d.timer.at != 0 {
			l.at(l.now.Add(d.length), d.timer)
		}
	}
	for _, p := range l.parts {
		if p.unsettled && p.timer.at != 0 {
			l.adopted(p, true)
		}
	}
}
