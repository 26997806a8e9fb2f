package history

import (
	"slices"
	"time"
)

// What happens to a lock besides the clients' calls.
const (
	expires  Kind = "expires"  // sessions do
	ends     Kind = "ends"     // a session is closed by a call without answer
	lapses   Kind = "lapses"   // an offer that was not confirmed is revoked
	passes   Kind = "passes"   // a revoked lease passes on
	drops    Kind = "drops"    // the session says that the request is not open any more
	holds    Kind = "holds"    // a stream said that a session holds a token
	ended    Kind = "ended"    // a stream said that a session has ended
	resumes  Kind = "resumes"  // a lock delay is over
	drains   Kind = "drains"   // the partition's drain begins
	aborts   Kind = "aborts"   // it is over
	finishes Kind = "finishes" // the history is over
)

// terms of a request: what it wants beside the lock.
type terms struct {
	value string
	delay time.Duration
	slots int
}

// input of a step of the model.
type input struct {
	*Op
	// place that it is about, or anySlot.
	place int
	// maybe: it may take effect or not; only after the end may it be seen not to.
	maybe bool
	// forced: it took effect, whatever was answered, if anything.
	forced bool
	// quiet: if it took effect, then one that no queue and no holder shows.
	quiet bool
	// unnoticed numbers the quiet requests of which nobody else speaks; 0: it is
	// none of them.
	unnoticed int
	// maybeClosed: a call without answer may have closed the request before.
	maybeClosed bool
	// maybeBelow: the request may have been below the lowest open one when it
	// came; surelyBelow: it was, when it was sent.
	maybeBelow, surelyBelow bool
	// sessions that expire by one command, in its order.
	sessions []string
	// again are the requests that come more than once: only of those need
	// anything be remembered.
	again map[request]bool
	terms map[request]terms
}

func (in *input) request() request { return request{in.Session, in.Request} }

// at is the place that is meant; that of the request where none is named.
func (l *lock) at(in *input) int {
	if in.place == anySlot {
		return l.held(in.request())
	}
	return in.place
}

// step is the model: whether the lock can answer so, and what it is then.
func step(l *lock, in *input) (bool, *lock) {
	if in.maybe {
		if l.finished {
			return true, l
		}
		next, ok := l.effect(in)
		if in.quiet && ok && l.shows(next) {
			return false, nil
		}
		if !ok || next.equal(l) {
			return false, nil // it does nothing now; it may later, or never
		}
		return true, next
	}
	if l.finished {
		return false, nil
	}
	if in.forced {
		next, ok := l.effect(in)
		return ok && !next.equal(l), next
	}
	switch in.Kind {
	case finishes:
		return true, l.edit(func(c *lock) { c.finished = true })
	case ended:
		return l.isGone(in.Session), l
	case drains:
		return true, l.edit(func(c *lock) { c.draining = true })
	case aborts:
		return true, l.edit(func(c *lock) { c.draining = false; c.handOverAll(in) })
	case holds:
		i := l.at(in)
		if i < 0 || l.places[i].by.session != in.Session || !l.places[i].isToken(in.Token) || in.Request != 0 && l.places[i].by.id != in.Request {
			return false, nil
		}
		return true, l.learn(i, in.Token)
	case Get:
		return l.get(in)
	}
	if in.Answer.Code == SessionExpired {
		return l.isGone(in.Session), l
	}
	switch in.Kind {
	case Acquire:
		return l.acquire(in)
	case Release:
		return l.release(in)
	case Cancel:
		return l.cancel(in)
	case Revoke:
		return l.revoke(in)
	case Close:
		if l.isGone(in.Session) { // it has ended meanwhile: nothing to do
			return true, l
		}
	}
	next, ok := l.effect(in)
	return ok, next
}

// shows tells whether a queue or a holder is another one.
func (l *lock) shows(next *lock) bool {
	return len(l.queue) != len(next.queue) || !slices.EqualFunc(l.places, next.places, func(a, b place) bool {
		return a.by.session == b.by.session && len(a.queue) == len(b.queue)
	})
}

// effect is what an operation does if it does something, whatever was
// answered.
func (l *lock) effect(in *input) (*lock, bool) {
	r := in.request()
	switch in.Kind {
	case Acquire:
		switch {
		case l.isGone(in.Session) || l.isClosed(r):
			return l, false
		case in.unnoticed > 0:
			return l.askUnnoticed(in)
		}
		return l.request(in)
	case Cancel:
		return l.giveUp(in), !l.isGone(in.Session)
	case Close, ends, expires:
		return l.endSessions(in)
	case drops:
		return l.giveUp(in), l.waits(r)
	}
	i := l.at(in)
	if i < 0 {
		return l, false
	}
	p := &l.places[i]
	switch in.Kind {
	case Release:
		if p.by.session != in.Session || !p.isToken(in.Token) || l.isGone(in.Session) {
			return l, false
		}
		return l.learn(i, in.Token).edit(func(c *lock) { c.end(i, in, true) }), true
	case Revoke:
		if p.by.session == "" || !p.isToken(in.Token) || p.revoked {
			return l, false
		}
		return l.learn(i, in.Token).edit(func(c *lock) { c.places[i].revoked = true }), true
	case lapses:
		if p.by != r || !p.offered || p.revoked {
			return l, false
		}
		return l.edit(func(c *lock) { c.places[i].revoked = true }), true
	case passes:
		if p.by.session != in.Session || !p.revoked || in.Token != 0 && !p.isToken(in.Token) || in.Request != 0 && p.by.id != in.Request {
			return l, false
		}
		return l.edit(func(c *lock) { c.end(i, in, false) }), true
	case resumes:
		if !p.delayed {
			return l, false
		}
		return l.edit(func(c *lock) { c.places[i].delayed = false; c.handOver(i, in) }), true
	}
	return l, false
}

// endSessions: all that they hold and wait for goes first, and only then is each
// place handed over [F22].
func (l *lock) endSessions(in *input) (*lock, bool) {
	sessions := in.sessions
	if sessions == nil {
		sessions = []string{in.Session}
	}
	if slices.ContainsFunc(sessions, l.isGone) {
		return l, false
	}
	return l.edit(func(c *lock) {
		c.gone = slices.Sorted(slices.Values(slices.Concat(c.gone, sessions)))
		c.unnoticed = slices.DeleteFunc(slices.Clone(c.unnoticed), func(a asks) bool { return slices.Contains(sessions, a.session) })
		over := func(q request) bool { return slices.Contains(sessions, q.session) }
		c.leave(over)
		if slices.ContainsFunc(c.closed, over) {
			c.closed = slices.DeleteFunc(slices.Clone(c.closed), over)
		}
		var freed []int
		for _, session := range sessions {
			for i := range c.places {
				if c.places[i].by.session == session {
					c.take(i, in, in.Kind != expires)
					freed = append(freed, i)
				}
			}
		}
		for _, i := range freed {
			c.handOver(i, in)
		}
	}), true
}

// request is an Acquire of an id that was not seen before, or is open.
func (l *lock) request(in *input) (*lock, bool) {
	r, i := in.request(), in.place
	if l.held(r) >= 0 || l.waits(r) {
		return l, true
	}
	if l.draining {
		return l, false
	}
	if i == anySlot {
		i = l.free(int(in.Slots))
		switch {
		case i >= 0:
			return l.requestFree(i, in)
		case in.Wait:
			return l.edit(func(c *lock) { c.queue = append(slices.Clone(c.queue), r) }), true
		}
		return l.edit(func(c *lock) { c.close(r, in) }), true
	}
	switch p := &l.places[i]; {
	case p.by.session == "" && !p.delayed:
		return l.requestFree(i, in)
	case p.by.session == in.Session && !p.revoked: // it holds it: the same token, for the newest request
		return l.edit(func(c *lock) {
			p := &c.places[i]
			c.close(p.by, in)
			p.by = r
			p.delay = p.delay || in.terms[r].delay > 0
			if v := in.terms[r].value; v != "" {
				p.value = v
			}
		}), true
	case in.Wait:
		return l.edit(func(c *lock) { c.places[i].queue = append(slices.Clone(c.places[i].queue), r) }), true
	}
	return l.edit(func(c *lock) { c.close(r, in) }), true
}

// requestFree gets the place, if that fits what is said of slot and token.
func (l *lock) requestFree(i int, in *input) (*lock, bool) {
	a := in.Answer
	if a.Token != 0 && a.Token <= l.floor || a.Resource != "" && placeOf(a.Resource) != i {
		return l, false
	}
	return l.edit(func(c *lock) { c.grant(i, in.request(), a.Token, false, in) }), true
}

// acquire that was answered.
func (l *lock) acquire(in *input) (bool, *lock) {
	a, r := in.Answer, in.request()
	if l.isGone(in.Session) {
		return false, nil
	}
	had := l.held(r)
	if a.Code == Stale {
		// Closed before, or taken back from it by now.
		return in.maybeBelow || in.maybeClosed && had < 0 && !l.waits(r) || l.isClosed(r) || had >= 0 && l.places[had].revoked, l
	}
	if in.surelyBelow {
		return false, nil
	}
	if l.isClosed(r) { // a repeated try is told again that somebody else has it
		return l.busy(in) && (in.place == anySlot || l.places[in.place].by.session != in.Session), l
	}
	next, ok := l.request(in)
	switch {
	case ok:
	case in.maybeClosed && l.draining: // so is one whose first try, of no answer, came before the drain
		return l.busy(in), l
	default:
		return false, nil
	}
	switch i := next.held(r); {
	case a.Granted:
		if i < 0 || a.Resource != "" && placeOf(a.Resource) != i || next.places[i].revoked || !next.places[i].isToken(a.Token) {
			return false, nil
		}
		return true, next.learn(i, a.Token)
	case a.Queued:
		queue := next.queue
		if in.place != anySlot {
			queue = next.places[in.place].queue
		}
		at := slices.Index(queue, r)
		return at >= 0 && at == int(a.Ahead), next
	case a.Busy:
		if i >= 0 || next.waits(r) || !l.busy(in) {
			return false, nil
		}
		if in.place != anySlot && a.Token != 0 {
			next = next.learn(in.place, a.Token)
		}
		return true, next
	}
	return false, nil
}

// busy tells whether one that does not wait can be told so that it gets nothing.
func (l *lock) busy(in *input) bool {
	a := in.Answer
	if !a.Busy || in.Wait {
		return false
	}
	if in.place == anySlot {
		return a.Token == 0 && int(a.Waiters) == len(l.queue) && l.free(int(in.Slots)) < 0
	}
	p := &l.places[in.place]
	switch {
	case int(a.Waiters) != len(p.queue):
		return false
	case p.delayed:
		return a.Token == 0
	}
	return p.by.session != "" && (p.by.session != in.Session || p.revoked) && p.isToken(a.Token)
}

func (l *lock) release(in *input) (bool, *lock) {
	next, held := l.effect(in)
	if in.Answer.Code == NotHolder {
		return !held || l.places[in.place].token == 0, l
	}
	return held, next
}

// giveUp is what a Cancel does: a waiting request leaves the queue, one that
// was not seen will be refused, one that holds the lock keeps it.
func (l *lock) giveUp(in *input) *lock {
	r := in.request()
	if l.held(r) >= 0 || l.isClosed(r) {
		return l
	}
	return l.edit(func(c *lock) {
		c.leave(func(q request) bool { return q == r })
		c.close(r, in)
	})
}

func (l *lock) cancel(in *input) (bool, *lock) {
	if l.isGone(in.Session) {
		return false, nil
	}
	i, a := l.held(in.request()), in.Answer
	if i < 0 {
		return a.Token == 0, l.giveUp(in)
	}
	if a.Token == 0 {
		return in.maybeBelow || in.maybeClosed, l
	}
	if !l.places[i].isToken(a.Token) || a.Resource != "" && placeOf(a.Resource) != i {
		return false, nil
	}
	return true, l.learn(i, a.Token)
}

func (l *lock) revoke(in *input) (bool, *lock) {
	p := &l.places[in.place]
	if p.by.session == "" || !p.isToken(in.Token) {
		return in.Answer.Code == NotHolder, l
	}
	if in.Answer.Code == NotHolder {
		return p.token == 0, l
	}
	l = l.learn(in.place, in.Token)
	if l.places[in.place].revoked {
		return true, l
	}
	return true, l.edit(func(c *lock) { c.places[in.place].revoked = true })
}

func (l *lock) get(in *input) (bool, *lock) {
	p, a := &l.places[in.place], in.Answer
	if a.Session == "" { // a queue without holder is not shown
		return p.by.session == "", l
	}
	if a.Session != p.by.session || int(a.Waiters) != len(p.queue) || a.Value != p.value || !p.isToken(a.Token) {
		return false, nil
	}
	return true, l.learn(in.place, a.Token)
}
