package state

import (
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// A semaphore lock/NAME has the slots lock/NAME#0, lock/NAME#1, …, each a
// resource as any other. A request for any of its first n slots gets the
// lowest one that nobody holds, waits for, or is kept from by a lock delay;
// else it may wait in the semaphore's queue. A slot that becomes free goes to
// the first of its own queue, and if there is none, to the first of the
// semaphore's queue for whom it would do.

// semaphore is what is known of a semaphore beside its slots.
type semaphore struct {
	gen       uint64
	name      string
	dirty     bool
	gone      bool
	partition string // of the queue
	epoch     fence.Epoch
	// busy has a bit for each slot in use, up to the highest.
	busy  []uint64
	queue *queue
	hash  uint64
}

// slotOf splits the name of a slot below MaxSlots.
func slotOf(name string) (base string, slot int, ok bool) {
	i := strings.LastIndexByte(name, '#')
	if i < 0 {
		return "", 0, false
	}
	digits := name[i+1:]
	if n := len(digits); n == 0 || n > 5 || n > 1 && digits[0] == '0' {
		return "", 0, false
	}
	for _, d := range []byte(digits) {
		if d < '0' || d > '9' {
			return "", 0, false
		}
		slot = 10*slot + int(d-'0')
	}
	return name[:i], slot, slot < MaxSlots
}

func baseOf(slot string) string { return slot[:strings.LastIndexByte(slot, '#')] }

func slotName(base string, slot int) string { return base + "#" + strconv.Itoa(slot) }

// editSemaphore returns the entry of a name, made if need be, that may be
// changed in place.
func (m *Machine) editSemaphore(name string) *semaphore {
	s, ok := m.semaphores.Get(name)
	switch {
	case !ok:
		s = &semaphore{gen: m.gen, name: name}
		m.semaphores.Set(name, s)
	case s.gen != m.gen:
		c := *s
		s, c.gen = &c, m.gen
		s.busy, s.queue = slices.Clone(s.busy), s.queue.copy()
		m.semaphores.Set(name, s)
	}
	if !s.dirty {
		s.dirty = true
		m.dirtySemaphores = append(m.dirtySemaphores, s)
	}
	return s
}

// occupy marks a slot as in use.
func (m *Machine) occupy(base string, slot int) {
	s := m.editSemaphore(base)
	for len(s.busy) <= slot/64 {
		s.busy = append(s.busy, 0)
	}
	s.busy[slot/64] |= 1 << (slot % 64)
}

// vacate marks a slot as not in use.
func (m *Machine) vacate(base string, slot int) {
	s := m.editSemaphore(base)
	if slot/64 < len(s.busy) {
		s.busy[slot/64] &^= 1 << (slot % 64)
	}
	for n := len(s.busy); n > 0 && s.busy[n-1] == 0; n-- {
		s.busy = s.busy[:n-1]
	}
	m.discardSemaphore(s)
}

// discardSemaphore removes an entry that says nothing; s must be editable.
func (m *Machine) discardSemaphore(s *semaphore) {
	if len(s.busy) == 0 && s.queue.len() == 0 {
		m.sum -= s.hash
		s.gone = true
		m.semaphores.Delete(s.name)
	}
}

// lowestFree returns the lowest slot not in use.
func (s *semaphore) lowestFree() int {
	if s == nil {
		return 0
	}
	for i, w := range s.busy {
		if w != ^uint64(0) {
			return 64*i + bits.TrailingZeros64(^w)
		}
	}
	return 64 * len(s.busy)
}

// freeSlot returns the lowest slot below n that may be granted. Slots of a
// dropped epoch are free; they are looked for only while such are left.
func (m *Machine) freeSlot(s *semaphore, name string, n int) (int, bool) {
	free := s.lowestFree()
	if m.sweep.passes > 0 {
		for i := range min(n, free) {
			if r, ok := m.resources.Get(slotName(name, i)); ok && m.stale(r) {
				return i, true
			}
		}
	}
	return free, free < n
}

// staleSemaphore reports whether the epoch of the queue is dropped.
func (r *root) staleSemaphore(s *semaphore) bool {
	return r.sweep.passes > 0 && s.queue.len() > 0 && r.over(s.partition, s.epoch)
}

// queueOf returns the queue in which a request waits, and its partition; nil
// if its epoch is dropped.
func (r *root) queueOf(q request) (*queue, string) {
	if q.slots > 0 {
		if s, ok := r.semaphores.Get(q.resource); ok && !r.staleSemaphore(s) {
			return s.queue, s.partition
		}
	} else if e, ok := r.lookup(q.resource); ok {
		return e.queue, e.partition
	}
	return nil, ""
}

// acquireSlot answers a new request for any of a semaphore's slots. Each such
// request takes a slot of its own, also if its session holds one.
func (m *Machine) acquireSlot(s *session, p *partition, c *pb.AcquireCommand) *pb.CommandResult {
	name, id := c.GetResource(), c.GetRequestId()
	sem, _ := m.semaphores.Get(name)
	slot, free := m.freeSlot(sem, name, int(c.GetSlots()))
	delayed := free && p.unsettled && c.GetLockDelayMs() > 0
	switch {
	case free && !delayed:
		return m.grantFree(s, p, c, slotName(name, slot))
	case !c.GetWait():
		s = m.editSession(s)
		if !s.remember(id) {
			return failed(errTooManyGaps(s.id))
		}
		return m.busySemaphore(sem, delayed)
	}
	if e := m.roomToWait(s, c, name, sem.waiters(m)); e != nil {
		return failed(e)
	}
	if delayed && m.leased+m.delayed.Len() >= MaxLeases {
		return failed(errRegionFull(m.leased + m.delayed.Len()))
	}
	s = m.editSession(s)
	if !s.remember(id) {
		return failed(errTooManyGaps(s.id))
	}
	if sem != nil && m.staleSemaphore(sem) {
		m.purgeSemaphore(sem)
	}
	sem = m.editSemaphore(name)
	if sem.queue.len() == 0 {
		sem.partition, sem.epoch, sem.queue = p.name, p.epoch, &queue{}
	}
	res := m.enqueue(s, sem.queue, name, p.name, c)
	if delayed {
		m.beginDelay(m.newResource(p, slotName(name, slot)), uint32(c.GetLockDelayMs()), 0)
	}
	return res
}

// waiters counts the queue, without one of a dropped epoch.
func (s *semaphore) waiters(m *Machine) int {
	if s == nil || m.staleSemaphore(s) {
		return 0
	}
	return s.queue.len()
}

func (m *Machine) busySemaphore(s *semaphore, delayed bool) *pb.CommandResult {
	return busyResult(&pb.BusyLease{Waiters: uint32(s.waiters(m)), Delayed: delayed})
}

// serveSlot offers a slot that has become free to the first of the semaphore's
// queue for whom it would do.
func (m *Machine) serveSlot(base string, slot int) {
	s, ok := m.semaphores.Get(base)
	if !ok || s.queue.len() == 0 || m.staleSemaphore(s) {
		return
	}
	p, ok := m.partitions.Get(s.partition)
	if !ok || !p.grants() {
		return // serveStalled finds it later
	}
	place, w, found := uint64(0), waiter{}, false
	s.queue.scan(func(at uint64, of waiter) bool {
		place, w, found = at, of, int(of.the().slots) > slot
		return !found
	})
	if found {
		m.offerSlot(s.name, slot, p, place, w)
	}
}

func (m *Machine) offerSlot(base string, slot int, p *partition, place uint64, w waiter) {
	m.leaveSemaphore(m.editSemaphore(base), place, w)
	m.grant(w.session, p, m.newResource(p, slotName(base, slot)), w.request, w.terms, true)
}

// serveSemaphore offers the free slots of a semaphore whose queue could not be
// served before. In an unsettled partition a slot that was not in use is free
// only after the lock delay that the waiter names.
func (m *Machine) serveSemaphore(name string) {
	s, ok := m.semaphores.Get(name)
	if !ok || m.staleSemaphore(s) {
		return
	}
	type entry struct {
		place uint64
		waiter
	}
	var all []entry
	s.queue.scan(func(place uint64, w waiter) bool {
		all = append(all, entry{place, w})
		return true
	})
	for _, e := range all {
		p, ok := m.partitions.Get(s.partition)
		if !ok || !p.grants() {
			return
		}
		s, _ = m.semaphores.Get(name)
		t := e.the()
		slot, free := m.freeSlot(s, name, int(t.slots))
		switch {
		case !free:
		case p.unsettled && t.lockDelay > 0:
			m.beginDelay(m.newResource(p, slotName(name, slot)), t.lockDelay, 0)
		default:
			m.offerSlot(name, slot, p, e.place, e.waiter)
		}
	}
}

// leaveSemaphore removes a place; s must be editable.
func (m *Machine) leaveSemaphore(s *semaphore, place uint64, w waiter) {
	s.queue.remove(place)
	m.left(w)
	if s.queue.len() == 0 {
		s.queue, s.partition, s.epoch = nil, "", 0
	}
	m.discardSemaphore(s)
}

// endSlotWaiter takes a waiter out of a semaphore's queue and tells it why.
func (m *Machine) endSlotWaiter(name string, place uint64, w waiter, told *pb.ErrorDetail) {
	s := m.editSemaphore(name)
	partition := s.partition
	m.leaveSemaphore(s, place, w)
	m.emit(WaiterEnded{Session: w.session, Request: w.request, Resource: name, Partition: partition, Error: told})
}

// purgeSemaphore ends the queue of a dropped epoch.
func (m *Machine) purgeSemaphore(s *semaphore) {
	m.emptySemaphore(s, m.errOver(s.partition), MaxQueue)
}

// emptySemaphore ends up to budget waiters, and returns how many.
func (m *Machine) emptySemaphore(s *semaphore, told *pb.ErrorDetail, budget int) (ended int) {
	for ended < budget {
		place, w, ok := s.queue.min()
		if !ok {
			break
		}
		m.endSlotWaiter(s.name, place, w, told)
		if s, ok = m.semaphores.Get(s.name); !ok {
			return ended + 1
		}
		ended++
	}
	return ended
}
