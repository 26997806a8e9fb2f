package simulation

import "time"

// kind says what an event does when its time comes.
type kind uint8

const (
	evDo      kind = iota // whatever do says
	evMessage             // msg reaches its voter, or its proposer
	evTick                // a leader's timer
	evBeat                // a region's heartbeat
	evCheck               // a leadership check ends
	evHolders             // invariant I7 is looked at
)

// event is what happens at one instant of real time. Of two at one instant the
// one that was made first comes first.
type event struct {
	kind kind
	gen  uint32
	who  int32
	ld   *leader
	msg  *message
	do   func()
}

// queue is a heap with four children per node of when events come, and the
// events beside it: what the heap moves has no pointers for the collector to
// follow.
type queue struct {
	heap   []due
	events []event
	free   []int32
}

type due struct {
	at  time.Duration
	seq uint64
	i   int32
}

func (d *due) before(o *due) bool { return d.at < o.at || d.at == o.at && d.seq < o.seq }

func (q *queue) push(at time.Duration, seq uint64, e event) {
	var slot int32
	if n := len(q.free); n > 0 {
		slot = q.free[n-1]
		q.free = q.free[:n-1]
		q.events[slot] = e
	} else {
		slot = int32(len(q.events))
		q.events = append(q.events, e)
	}
	d := due{at, seq, slot}
	h := append(q.heap, d)
	i := len(h) - 1
	for i > 0 {
		up := (i - 1) / 4
		if !d.before(&h[up]) {
			break
		}
		h[i] = h[up]
		i = up
	}
	h[i] = d
	q.heap = h
}

// pop takes the next event; the queue must not be empty.
func (q *queue) pop() (time.Duration, event) {
	h := q.heap
	top := h[0]
	n := len(h) - 1
	last := h[n]
	h = h[:n]
	if n > 0 {
		i := 0
		for {
			first := 4*i + 1
			if first >= n {
				break
			}
			least := first
			for c := first + 1; c < min(first+4, n); c++ {
				if h[c].before(&h[least]) {
					least = c
				}
			}
			if !h[least].before(&last) {
				break
			}
			h[i] = h[least]
			i = least
		}
		h[i] = last
	}
	q.heap = h
	e := q.events[top.i]
	if e.kind == evDo {
		q.events[top.i].do = nil // let go of what it holds
	}
	q.free = append(q.free, top.i)
	return top.at, e
}
