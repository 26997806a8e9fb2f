package state

import (
	"sort"

	"github.com/tidwall/btree"
)

// queue holds the waiters of a resource or of a semaphore by place, first come
// first. A nil queue is empty.
type queue struct {
	next   uint64
	places btree.Map[uint64, waiter]
	// sum over the pairs of neighbours: order counts, place numbers do not.
	sum uint64
}

// waiter is a request at its place.
type waiter struct {
	session string
	request uint64
	// terms are nil if the request names none.
	terms *terms
}

// terms are what a request names beside its resource. They never change.
type terms struct {
	value      string
	lockDelay  uint32 // milliseconds
	waitMillis int64
	slots      uint32
}

// the returns the terms, never nil.
func (w waiter) the() terms {
	if w.terms == nil {
		return terms{}
	}
	return *w.terms
}

func (q *queue) len() int {
	if q == nil {
		return 0
	}
	return q.places.Len()
}

func (q *queue) copy() *queue {
	if q == nil {
		return nil
	}
	return &queue{next: q.next, places: *q.places.Copy(), sum: q.sum}
}

func (q *queue) get(place uint64) (waiter, bool) {
	if q == nil {
		return waiter{}, false
	}
	return q.places.Get(place)
}

func (q *queue) min() (place uint64, w waiter, ok bool) {
	if q == nil {
		return 0, waiter{}, false
	}
	return q.places.Min()
}

func (q *queue) scan(f func(place uint64, w waiter) bool) {
	if q != nil {
		q.places.Scan(f)
	}
}

// ahead counts the places before place.
func (q *queue) ahead(place uint64) int {
	return sort.Search(q.len(), func(i int) bool {
		at, _, _ := q.places.GetAt(i)
		return at >= place
	})
}

// push adds a waiter at the end and returns its place. q must be editable.
func (q *queue) push(w waiter) uint64 {
	_, last, _ := q.places.Max()
	q.sum += edge(last, w)
	q.next++
	q.places.Set(q.next, w)
	return q.next
}

// remove takes out a place. q must be editable.
func (q *queue) remove(place uint64) {
	w, ok := q.places.Delete(place)
	if !ok {
		return
	}
	var before, after waiter
	q.places.Descend(place, func(_ uint64, w waiter) bool { before = w; return false })
	q.places.Ascend(place, func(_ uint64, w waiter) bool { after = w; return false })
	q.sum -= edge(before, w)
	if after.session != "" {
		q.sum += edge(before, after) - edge(w, after)
	}
}
