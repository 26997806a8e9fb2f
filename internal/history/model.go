package history

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"strings"

	"github.com/anishathalye/porcupine"
)

// request names an Acquire: ids rise per session.
type request struct {
	session string
	id      uint64
}

func (r request) String() string { return fmt.Sprintf("%s/%d", short(r.session), r.id) }

func short(session string) string { return session[:min(4, len(session))] }

// lock is the model's state: one exclusive lock as the design describes it, or
// one semaphore. It is immutable; edit makes a copy.
type lock struct {
	// places are what can be held: the lock itself, or the slots of a semaphore.
	places []place
	// queue are the requests that wait for any slot.
	queue []request
	// draining: nobody gets anything of the partition.
	draining bool
	// floor is below any token to come.
	floor uint64
	// closed are requests that were answered for good, given up, or cancelled
	// before they came. Sorted.
	closed []request
	// gone are the sessions that have ended. Sorted.
	gone []string
	// unnoticed requests of those sessions that hold something. Sorted.
	unnoticed []asks
	// finished: nothing takes effect any more.
	finished bool
}

// place is what one request at a time can hold.
type place struct {
	// by is the holder's newest request for it; empty session: nobody holds it.
	by request
	// token of the holder. 0 while it was handed over and nobody has said yet
	// with which token: any from least to most, 0: without end.
	token, least, most uint64
	// value beside the lease.
	value string
	// offered: handed over from the queue, so it may lapse. revoked: it is about
	// to pass on. delay: nobody gets it for a while if it ends without its
	// holder's word.
	offered, revoked, delay bool
	// delayed: nobody holds it, and nobody gets it for a while.
	delayed bool
	// queue are the requests that wait for this very one.
	queue []request
}

func (p *place) equal(o *place) bool {
	return p.by == o.by && p.token == o.token && p.least == o.least && p.most == o.most && p.value == o.value && p.offered == o.offered &&
		p.revoked == o.revoked && p.delay == o.delay && p.delayed == o.delayed && slices.Equal(p.queue, o.queue)
}

func (p *place) String() string {
	var b strings.Builder
	switch {
	case p.by.session == "":
		b.WriteString("free")
	case p.token == 0:
		fmt.Fprintf(&b, "%v holds some token", p.by)
	default:
		fmt.Fprintf(&b, "%v holds %d", p.by, p.token)
	}
	if p.offered {
		b.WriteString(", offered")
	}
	if p.revoked {
		b.WriteString(", revoked")
	}
	if p.delayed {
		b.WriteString(", delayed")
	}
	if len(p.queue) > 0 {
		fmt.Fprintf(&b, ", queue %v", p.queue)
	}
	return b.String()
}

// free: a request for any slot gets it.
func (p *place) free() bool { return p.by.session == "" && !p.delayed && len(p.queue) == 0 }

// isToken tells whether a token said to be the holder's can be it.
func (p *place) isToken(token uint64) bool {
	if p.token == 0 {
		return token >= p.least && (p.most == 0 || token <= p.most)
	}
	return token == p.token
}

func (l *lock) String() string {
	var b strings.Builder
	for i := range l.places {
		fmt.Fprintf(&b, "%d: %v; ", i, &l.places[i])
	}
	if l.draining {
		b.WriteString("draining; ")
	}
	fmt.Fprintf(&b, "no token below %d; queue %v; closed %v; %d sessions gone", l.floor, l.queue, l.closed, len(l.gone))
	return b.String()
}

func (l *lock) equal(o *lock) bool {
	return l == o || l.draining == o.draining && l.floor == o.floor && l.finished == o.finished &&
		slices.EqualFunc(l.places, o.places, func(a, b place) bool { return a.equal(&b) }) &&
		slices.Equal(l.queue, o.queue) && slices.Equal(l.closed, o.closed) && slices.Equal(l.unnoticed, o.unnoticed) && slices.Equal(l.gone, o.gone)
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
	for i := range l.places {
		p := &l.places[i]
		id(p.by)
		id(request{id: p.token})
		for _, q := range p.queue {
			id(q)
		}
	}
	for _, q := range l.queue {
		id(q)
	}
	id(request{id: l.floor<<1 ^ uint64(len(l.closed))<<40 ^ uint64(len(l.gone))<<50})
	return h.Sum64()
}

// edit returns a copy that f has changed.
func (l *lock) edit(f func(*lock)) *lock {
	c := *l
	c.places = slices.Clone(l.places)
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

// held returns the place that a request holds, or -1.
func (l *lock) held(r request) int {
	return slices.IndexFunc(l.places, func(p place) bool { return p.by == r })
}

// waits tells whether a request is in a queue.
func (l *lock) waits(r request) bool {
	return slices.Contains(l.queue, r) || slices.ContainsFunc(l.places, func(p place) bool { return slices.Contains(p.queue, r) })
}

// free returns the lowest free slot below n, or -1.
func (l *lock) free(n int) int {
	for i := range l.places[:min(n, len(l.places))] {
		if l.places[i].free() {
			return i
		}
	}
	return -1
}

// grant gives a free place away; token 0 is one that is not known yet.
func (l *lock) grant(i int, r request, token uint64, offered bool, in *input) {
	p := &l.places[i]
	l.floor = max(l.floor+1, token)
	p.by, p.token, p.least, p.most, p.offered, p.revoked = r, token, l.floor, 0, offered, false
	p.value, p.delay = in.terms[r].value, in.terms[r].delay > 0
	if token != 0 {
		l.bound(i)
	}
}

// bound narrows what the unknown tokens of other places may be: tokens rise with
// the grants, whatever slot they are of.
func (l *lock) bound(i int) {
	known := &l.places[i]
	for j := range l.places {
		switch p := &l.places[j]; {
		case j == i || p.by.session == "" || p.token != 0:
		case p.least < known.least && (p.most == 0 || p.most >= known.token):
			p.most = known.token - 1
		case p.least > known.least:
			p.least = max(p.least, known.token+1)
		}
	}
}

// learn notes which token a place's holder has.
func (l *lock) learn(i int, token uint64) *lock {
	if l.places[i].token == token {
		return l
	}
	return l.edit(func(c *lock) {
		c.places[i].token, c.floor = token, max(c.floor, token)
		c.bound(i)
	})
}

// take ends a holder's time, by its word or not.
func (l *lock) take(i int, in *input, byWord bool) {
	p := &l.places[i]
	l.close(p.by, in)
	*p = place{delayed: p.delay && !byWord, queue: p.queue}
}

// end is take, and the first in the queue has the place, unless something keeps
// it from all.
func (l *lock) end(i int, in *input, byWord bool) {
	l.take(i, in, byWord)
	l.handOver(i, in)
}

// handOver: first come those who asked for this very slot.
func (l *lock) handOver(i int, in *input) {
	p := &l.places[i]
	if p.by.session != "" || p.delayed || l.draining {
		return
	}
	if len(p.queue) > 0 {
		next := p.queue[0]
		p.queue = slices.Clone(p.queue[1:])
		l.grant(i, next, 0, true, in)
		return
	}
	at := slices.IndexFunc(l.queue, func(r request) bool { return in.terms[r].slots > i })
	if at >= 0 {
		next := l.queue[at]
		l.queue = slices.Delete(slices.Clone(l.queue), at, at+1)
		l.grant(i, next, 0, true, in)
	}
}

// handOverAll serves all queues that stood still.
func (l *lock) handOverAll(in *input) {
	for i := range l.places {
		if len(l.places[i].queue) > 0 {
			l.handOver(i, in)
		}
	}
	for _, r := range slices.Clone(l.queue) {
		if i := l.free(in.terms[r].slots); i >= 0 {
			l.queue = slices.DeleteFunc(slices.Clone(l.queue), func(q request) bool { return q == r })
			l.grant(i, r, 0, true, in)
		}
	}
}

// leave takes requests out of all queues.
func (l *lock) leave(who func(request) bool) {
	without := func(queue []request) []request {
		if !slices.ContainsFunc(queue, who) {
			return queue
		}
		return slices.DeleteFunc(slices.Clone(queue), who)
	}
	l.queue = without(l.queue)
	for i := range l.places {
		l.places[i].queue = without(l.places[i].queue)
	}
}

// Model is that of one lock, or of a semaphore with so many slots.
func Model(slots int) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return newLock(slots) },
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

func newLock(slots int) *lock { return &lock{places: make([]place, max(slots, 1))} }

// anySlot is the place of a request that names none.
const anySlot = -1

// placeOf is what a resource means in its part of a history: a lock of its own,
// a slot, or, of a semaphore itself, any slot.
func placeOf(resource string) int {
	_, digits, ok := strings.Cut(resource, "#")
	if !ok {
		return 0
	}
	n := 0
	for _, d := range []byte(digits) {
		if d < '0' || d > '9' || n > math.MaxInt16 {
			return anySlot
		}
		n = 10*n + int(d-'0')
	}
	if digits == "" {
		return anySlot
	}
	return n
}

// partOf names the part of a history that a resource belongs to: slots are
// judged with their semaphore, lock/NAME#.
func partOf(resource string) string {
	if base, _, ok := strings.Cut(resource, "#"); ok {
		return base + "#"
	}
	return resource
}
