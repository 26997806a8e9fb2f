package history

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// request names an Acquire: ids rise per session.
type request struct {
	session string
	id      uint64
}

func (r request) String() string { return fmt.Sprintf("%s/%d", short(r.session), r.id) }

func short(session string) string { return session[:min(4, len(session))] }

// lock is the model's state: one exclusive lock as the design describes it. It
// is immutable; edit makes a copy.
type lock struct {
	// by is the holder's newest request for it; empty session: nobody holds it.
	by request
	// token of the holder. 0 while it was handed over and nobody has said yet
	// with which token: any above floor.
	token uint64
	// value beside the lease.
	value string
	// offered: handed over from the queue, so it may lapse. revoked: it is about
	// to pass on. delay: nobody gets it for a while if it ends without its
	// holder's word.
	offered, revoked, delay bool
	// delayed: nobody holds it, and nobody gets it for a while.
	delayed bool
	// draining: nobody gets any lock of the partition.
	draining bool
	// floor is below any token to come.
	floor uint64
	queue []request
	// closed are requests that were answered for good, given up, or cancelled
	// before they came. Sorted.
	closed []request
	// gone are the sessions that have ended. Sorted.
	gone []string
	// finished: nothing takes effect any more.
	finished bool
}

func (l *lock) String() string {
	var b strings.Builder
	switch {
	case l.by.session == "":
		b.WriteString("free")
	case l.token == 0:
		fmt.Fprintf(&b, "%v holds some token", l.by)
	default:
		fmt.Fprintf(&b, "%v holds %d", l.by, l.token)
	}
	if l.offered {
		b.WriteString(", offered")
	}
	if l.revoked {
		b.WriteString(", revoked")
	}
	if l.delayed {
		b.WriteString(", delayed")
	}
	if l.draining {
		b.WriteString(", draining")
	}
	fmt.Fprintf(&b, "; no token below %d; queue %v; closed %v; %d sessions gone", l.floor, l.queue, l.closed, len(l.gone))
	return b.String()
}

func (l *lock) equal(o *lock) bool {
	return l == o || l.by == o.by && l.token == o.token && l.value == o.value && l.offered == o.offered && l.revoked == o.revoked &&
		l.delay == o.delay && l.delayed == o.delayed && l.draining == o.draining && l.floor == o.floor &&
		l.finished == o.finished && slices.Equal(l.queue, o.queue) && slices.Equal(l.closed, o.closed) && slices.Equal(l.gone, o.gone)
}

var seed = maphash.MakeSeed()

func (l *lock) hash() uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	id := func(r request) {
		_, _ = h.WriteString(r.session)
		var b [8]byte
		binary.LittleEndian.PutUint64(b[:], r.id)
		_, _ = h.Write(b[:])
	}
	id(l.by)
	for _, q := range l.queue {
		id(q)
	}
	id(request{id: l.token ^ l.floor<<1 ^ uint64(len(l.closed))<<40 ^ uint64(len(l.gone))<<50})
	return h.Sum64()
}

// edit returns a copy that f has changed.
func (l *lock) edit(f func(*lock)) *lock {
	c := *l
	f(&c)
	return &c
}

func (l *lock) isGone(session string) bool {
	_, ok := slices.BinarySearch(l.gone, session)
	return ok
}

func compare(a, b request) int {
	return cmp.Or(strings.Compare(a.session, b.session), cmp.Compare(a.id, b.id))
}

func (l *lock) isClosed(r request) bool {
	_, ok := slices.BinarySearchFunc(l.closed, r, compare)
	return ok
}

func (l *lock) close(r request, in *input) {
	if i, ok := slices.BinarySearchFunc(l.closed, r, compare); !ok && in.again[r] {
		l.closed = slices.Insert(slices.Clone(l.closed), i, r)
	}
}

// grant gives a free lock away; token 0 is one that is not known yet.
func (l *lock) grant(r request, token uint64, offered bool, in *input) {
	l.by, l.token, l.offered, l.revoked = r, token, offered, false
	l.value, l.delay = in.terms[r].value, in.terms[r].delay > 0
	l.floor = max(l.floor+1, token)
}

// end takes the lock from its holder, by its word or not, and hands it to the
// first in the queue unless something keeps it from all.
func (l *lock) end(in *input, byWord bool) {
	l.close(l.by, in)
	l.delayed = l.delay && !byWord
	l.by, l.token, l.value, l.offered, l.revoked, l.delay = request{}, 0, "", false, false, false
	l.handOver(in)
}

func (l *lock) handOver(in *input) {
	if len(l.queue) > 0 && l.by.session == "" && !l.delayed && !l.draining {
		next := l.queue[0]
		l.queue = slices.Clone(l.queue[1:])
		l.grant(next, 0, true, in)
	}
}

// isToken tells whether a token said to be the holder's can be it.
func (l *lock) isToken(token uint64) bool {
	if l.token == 0 {
		return token >= l.floor
	}
	return token == l.token
}

// learn notes which token the holder has.
func (l *lock) learn(token uint64) *lock {
	if l.token == token {
		return l
	}
	return l.edit(func(c *lock) { c.token, c.floor = token, max(c.floor, token) })
}

// What happens to a lock besides the clients' calls.
const (
	expires  Kind = "expires"  // a session does
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
}

// input of a step of the model.
type input struct {
	*Op
	// maybe: it may take effect or not; only after the end may it be seen not to.
	maybe bool
	// forced: it took effect, whatever was answered, if anything.
	forced bool
	// quiet: if it took effect, then one that no queue and no holder shows.
	quiet bool
	// maybeClosed: a call without answer may have closed the request before.
	maybeClosed bool
	// maybeBelow: the request may have been below the lowest open one when it
	// came; surelyBelow: it was, when it was sent.
	maybeBelow, surelyBelow bool
	// again are the requests that come more than once: only of those need
	// anything be remembered.
	again map[request]bool
	terms map[request]terms
}

func (in *input) request() request { return request{in.Session, in.Request} }

// step is the model: whether the lock can answer so, and what it is then.
func step(l *lock, in *input) (bool, *lock) {
	if in.maybe {
		if l.finished {
			return true, l
		}
		next, ok := l.effect(in)
		if in.quiet && ok && (next.by.session != l.by.session || len(next.queue) != len(l.queue)) {
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
		return true, l.edit(func(c *lock) { c.draining = false; c.handOver(in) })
	case holds:
		if l.by.session != in.Session || !l.isToken(in.Token) || in.Request != 0 && l.by.id != in.Request {
			return false, nil
		}
		return true, l.learn(in.Token)
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
		if l.isGone(in.Session) {
			return false, nil
		}
	}
	next, ok := l.effect(in)
	return ok, next
}

// effect is what an operation does if it does something, whatever was
// answered.
func (l *lock) effect(in *input) (*lock, bool) {
	r := in.request()
	switch in.Kind {
	case Acquire:
		if l.isGone(in.Session) || l.isClosed(r) {
			return l, false
		}
		return l.request(in)
	case Release:
		if l.by.session != in.Session || !l.isToken(in.Token) || l.isGone(in.Session) {
			return l, false
		}
		return l.learn(in.Token).edit(func(c *lock) { c.end(in, true) }), true
	case Cancel:
		return l.giveUp(in), !l.isGone(in.Session)
	case Revoke:
		if l.by.session == "" || !l.isToken(in.Token) || l.revoked {
			return l, false
		}
		return l.learn(in.Token).edit(func(c *lock) { c.revoked = true }), true
	case Close, ends, expires:
		if l.isGone(in.Session) {
			return l, false
		}
		return l.edit(func(c *lock) {
			i, _ := slices.BinarySearch(c.gone, in.Session)
			c.gone = slices.Insert(slices.Clone(c.gone), i, in.Session)
			c.queue = slices.DeleteFunc(slices.Clone(c.queue), func(q request) bool { return q.session == in.Session })
			c.closed = slices.DeleteFunc(slices.Clone(c.closed), func(q request) bool { return q.session == in.Session })
			if c.by.session == in.Session {
				c.end(in, in.Kind != expires)
			}
		}), true
	case lapses:
		if l.by != r || !l.offered || l.revoked {
			return l, false
		}
		return l.edit(func(c *lock) { c.revoked = true }), true
	case drops:
		at := slices.Index(l.queue, r)
		if at < 0 {
			return l, false
		}
		return l.giveUp(in), true
	case passes:
		if l.by.session != in.Session || !l.revoked || in.Token != 0 && !l.isToken(in.Token) || in.Request != 0 && l.by.id != in.Request {
			return l, false
		}
		return l.edit(func(c *lock) { c.end(in, false) }), true
	case resumes:
		if !l.delayed {
			return l, false
		}
		return l.edit(func(c *lock) { c.delayed = false; c.handOver(in) }), true
	}
	return l, false
}

// request is an Acquire of an id that was not seen before, or is open.
func (l *lock) request(in *input) (*lock, bool) {
	r := in.request()
	switch {
	case l.by == r || slices.Contains(l.queue, r):
		return l, true
	case l.draining:
		return l, false
	case l.by.session == "" && !l.delayed:
		return l.edit(func(c *lock) { c.grant(r, in.Answer.Token, false, in) }), true
	case l.by.session == in.Session && !l.revoked: // it holds it: the same token, for the newest request
		return l.edit(func(c *lock) {
			c.close(c.by, in)
			c.by = r
			c.delay = c.delay || in.terms[r].delay > 0
			if v := in.terms[r].value; v != "" {
				c.value = v
			}
		}), true
	case in.Wait:
		return l.edit(func(c *lock) { c.queue = append(slices.Clone(c.queue), r) }), true
	}
	return l.edit(func(c *lock) { c.close(r, in) }), true
}

// acquire that was answered.
func (l *lock) acquire(in *input) (bool, *lock) {
	a, r := in.Answer, in.request()
	if l.isGone(in.Session) {
		return false, nil
	}
	if a.Code == Stale {
		// Closed before, or taken back from it by now.
		return in.maybeBelow || in.maybeClosed && l.by != r && !slices.Contains(l.queue, r) || l.isClosed(r) || l.by == r && l.revoked, l
	}
	if in.surelyBelow {
		return false, nil
	}
	if l.isClosed(r) { // a repeated try is told again that somebody else has it
		if a.Busy && l.delayed {
			return !in.Wait && a.Token == 0 && int(a.Waiters) == len(l.queue), l
		}
		return a.Busy && !in.Wait && l.by.session != in.Session && l.isToken(a.Token) && int(a.Waiters) == len(l.queue), l
	}
	wasFree, wasToken := l.by.session == "", l.token
	next, ok := l.request(in)
	switch {
	case !ok:
		return false, nil
	case a.Busy && l.delayed:
		return !in.Wait && a.Token == 0 && int(a.Waiters) == len(l.queue), next
	case a.Granted && wasFree:
		return !l.delayed && a.Token > l.floor, next
	case a.Granted:
		if next.by != r || next.revoked || !next.isToken(a.Token) {
			return false, nil
		}
		return true, next.learn(a.Token)
	case a.Queued:
		at := slices.Index(next.queue, r)
		return at >= 0 && at == int(a.Ahead), next
	case a.Busy:
		if wasFree || in.Wait || next.by == r || l.by.session == in.Session && !l.revoked || slices.Contains(next.queue, r) {
			return false, nil
		}
		if int(a.Waiters) != len(l.queue) || wasToken == 0 && a.Token < l.floor || wasToken != 0 && a.Token != wasToken {
			return false, nil
		}
		return true, next.learn(a.Token)
	}
	return false, nil
}

func (l *lock) release(in *input) (bool, *lock) {
	next, held := l.effect(in)
	if in.Answer.Code == NotHolder {
		return !held || l.token == 0, l
	}
	return held, next
}

// giveUp is what a Cancel does: a waiting request leaves the queue, one that
// was not seen will be refused, one that holds the lock keeps it.
func (l *lock) giveUp(in *input) *lock {
	r := in.request()
	switch at := slices.Index(l.queue, r); {
	case at >= 0:
		return l.edit(func(c *lock) {
			c.queue = slices.Delete(slices.Clone(c.queue), at, at+1)
			c.close(r, in)
		})
	case l.by == r || l.isClosed(r):
		return l
	}
	return l.edit(func(c *lock) { c.close(r, in) })
}

func (l *lock) cancel(in *input) (bool, *lock) {
	if l.isGone(in.Session) {
		return false, nil
	}
	if l.by != in.request() {
		return in.Answer.Token == 0, l.giveUp(in)
	}
	if in.Answer.Token == 0 {
		return in.maybeBelow || in.maybeClosed, l
	}
	if !l.isToken(in.Answer.Token) {
		return false, nil
	}
	return true, l.learn(in.Answer.Token)
}

func (l *lock) revoke(in *input) (bool, *lock) {
	if l.by.session == "" || !l.isToken(in.Token) {
		return in.Answer.Code == NotHolder, l
	}
	if in.Answer.Code == NotHolder {
		return l.token == 0, l
	}
	l = l.learn(in.Token)
	if l.revoked {
		return true, l
	}
	return true, l.edit(func(c *lock) { c.revoked = true })
}

func (l *lock) get(in *input) (bool, *lock) {
	a := in.Answer
	if a.Session == "" { // a queue without holder is not shown
		return l.by.session == "", l
	}
	if a.Session != l.by.session || int(a.Waiters) != len(l.queue) || a.Value != l.value || !l.isToken(a.Token) {
		return false, nil
	}
	return true, l.learn(a.Token)
}

// Model is one lock's.
func Model() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return &lock{} },
		Step: func(state, in, _ any) (bool, any) {
			ok, next := step(state.(*lock), in.(*input))
			if !ok {
				return false, state
			}
			return true, next
		},
		Equal:             func(a, b any) bool { return a.(*lock).equal(b.(*lock)) },
		Hash:              func(s any) uint64 { return s.(*lock).hash() },
		DescribeOperation: func(in, _ any) string { return describe(in.(*input)) },
		DescribeState:     func(s any) string { return s.(*lock).String() },
	}
}

func describe(in *input) string {
	what := string(in.Kind)
	if in.Session != "" {
		what += " " + short(in.Session)
	}
	if in.Request != 0 {
		what += fmt.Sprintf("/%d", in.Request)
	}
	if in.Token != 0 {
		what += fmt.Sprintf(" token %d", in.Token)
	}
	if in.Kind == Acquire && in.Wait {
		what += " wait"
	}
	a := in.Answer
	switch {
	case in.maybe:
		return what + "?"
	case in.forced:
		return what + "!"
	case a.Granted:
		what += fmt.Sprintf(" -> token %d", a.Token)
	case a.Queued:
		what += fmt.Sprintf(" -> %d ahead", a.Ahead)
	case a.Busy:
		what += fmt.Sprintf(" -> busy, token %d, %d wait", a.Token, a.Waiters)
	case in.Kind == Get && a.Session == "":
		what += " -> free"
	case in.Kind == Get:
		what += fmt.Sprintf(" -> %s holds %d with %q, %d wait", short(a.Session), a.Token, a.Value, a.Waiters)
	case in.Kind == Cancel && a.Token != 0:
		what += fmt.Sprintf(" -> has token %d", a.Token)
	case a.Code != "":
		what += " -> " + string(a.Code)
	}
	return what
}
