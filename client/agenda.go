package client

import (
	"container/heap"

	"github.com/headlease/headlease/internal/instant"
)

// entry is when something is to be done for a session.
type entry struct {
	session *session
	at      instant.Instant
	// place in the agenda, from 1; 0: not in it.
	place int
}

// agenda orders entries by time.
type agenda struct{ entries []*entry }

// set puts an entry in, or moves it.
func (a *agenda) set(e *entry, at instant.Instant) {
	e.at = at
	if e.place == 0 {
		heap.Push((*agendaHeap)(a), e)
		return
	}
	heap.Fix((*agendaHeap)(a), e.place-1)
}

func (a *agenda) remove(e *entry) {
	if e.place != 0 {
		heap.Remove((*agendaHeap)(a), e.place-1)
	}
}

// first is the earliest entry; nil: there is none.
func (a *agenda) first() *entry {
	if len(a.entries) == 0 {
		return nil
	}
	return a.entries[0]
}

type agendaHeap agenda

func (h *agendaHeap) Len() int           { return len(h.entries) }
func (h *agendaHeap) Less(i, j int) bool { return h.entries[i].at < h.entries[j].at }

func (h *agendaHeap) Swap(i, j int) {
	h.entries[i], h.entries[j] = h.entries[j], h.entries[i]
	h.entries[i].place, h.entries[j].place = i+1, j+1
}

func (h *agendaHeap) Push(x any) {
	e, _ := x.(*entry) // only set pushes
	h.entries = append(h.entries, e)
	e.place = len(h.entries)
}

func (h *agendaHeap) Pop() any {
	n := len(h.entries) - 1
	e := h.entries[n]
	h.entries[n] = nil
	h.entries = h.entries[:n]
	e.place = 0
	return e
}
