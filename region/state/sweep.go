package state

import pb "github.com/headlease/headlease/proto/headlease/v1"

// A dropped epoch may have a million leases, a draining partition a million
// waiters: to end them in one command would stop the region for seconds. So
// the command only marks the partition, from which on nothing of it counts
// (stale, lookup, grants), and a sweep removes the remains: every command that
// is admitted takes away a piece, in the order of the names.

// sweep is where the removal has come to. It is part of the replicated state.
type sweep struct {
	// passes over all names that are left; 0: no sweep runs. A drop in the
	// midst of one asks for a second: what it leaves may lie behind.
	passes uint8
	// semaphores: the pass has come to their queues.
	semaphores bool
	// at is the name to go on at.
	at string
}

func (s sweep) hash() uint64 { return mix(uint64(s.passes), flags(s.semaphores), str(s.at)) }

// piece bounds what one command removes and looks at.
type piece struct{ removals, looks int }

var defaultPiece = piece{removals: MaxRemovals, looks: 8 * MaxRemovals}

func (m *Machine) startSweep() {
	if m.sweep.passes == 0 {
		m.sweep = sweep{passes: 1}
		return
	}
	m.sweep.passes = 2
}

// sweepOn removes the next piece.
func (m *Machine) sweepOn() {
	left := m.piece
	for m.sweep.passes > 0 && left.removals > 0 && left.looks > 0 {
		var done bool
		if m.sweep.semaphores {
			done = sweepNames(m, m.semaphores.Ascend, &left, m.semaphoreRemains, m.cleanSemaphore)
		} else {
			done = sweepNames(m, m.resources.Ascend, &left, m.resourceRemains, m.cleanResource)
		}
		switch {
		case !done:
			return
		case !m.sweep.semaphores:
			m.sweep.semaphores, m.sweep.at = true, ""
		case m.sweep.passes > 1:
			m.sweep = sweep{passes: m.sweep.passes - 1}
		default:
			m.sweep = sweep{}
		}
	}
}

// sweepNames cleans the entries of one tree from the sweep's name on, and
// reports whether it has come to the end. clean returns how many removals it
// took, at least 1.
func sweepNames[V any](m *Machine, ascend func(string, func(string, V) bool), left *piece, remains func(V) bool, clean func(V, int) int) bool {
	type entry struct {
		name string
		v    V
	}
	var found []entry
	next, more := "", false
	ascend(m.sweep.at, func(name string, v V) bool {
		if left.looks == 0 || len(found) == left.removals {
			next, more = name, true
			return false
		}
		left.looks--
		if remains(v) {
			found = append(found, entry{name, v})
		}
		return true
	})
	for _, e := range found {
		if left.removals -= clean(e.v, left.removals); left.removals <= 0 {
			m.sweep.at = e.name // perhaps with remains
			return false
		}
	}
	m.sweep.at = next
	return !more
}

func (m *Machine) resourceRemains(r *resource) bool {
	return m.stale(r) || r.queue.len() > 0 && m.draining(r.partition)
}

func (m *Machine) semaphoreRemains(s *semaphore) bool {
	return m.staleSemaphore(s) || s.queue.len() > 0 && m.draining(s.partition)
}

func (m *Machine) draining(partition string) bool {
	p, ok := m.partitions.Get(partition)
	return ok && p.phase == phaseDraining
}

func (m *Machine) cleanResource(r *resource, budget int) int {
	if m.stale(r) {
		return m.purgeUpTo(r, budget)
	}
	p, _ := m.partitions.Get(r.partition)
	used, r := m.endWaiters(r, errMoved(p), budget)
	m.discard(r)
	return used
}

func (m *Machine) cleanSemaphore(s *semaphore, budget int) int {
	told := m.errOver(s.partition)
	if p, ok := m.partitions.Get(s.partition); ok && !m.staleSemaphore(s) {
		told = errMoved(p)
	}
	return m.emptySemaphore(s, told, budget)
}

// purge ends all that is left of a resource whose epoch is dropped.
func (m *Machine) purge(r *resource) { m.purgeUpTo(r, MaxQueue+2) }

func (m *Machine) purgeUpTo(r *resource, budget int) (used int) {
	if r.token != 0 {
		holder := r.session
		r = m.endLease(r, EndDropped)
		used++
		if s, ok := m.sessions.Get(holder); ok && s.closing && s.held.Len() == 0 {
			m.removeSession(s)
		}
	}
	if r.delay > 0 {
		r = m.stopDelay(r)
		used++
	}
	n, r := m.endWaiters(r, m.errOver(r.partition), budget-used)
	m.discard(r)
	return used + n
}

// endWaiters ends up to budget waiters of a resource.
func (m *Machine) endWaiters(r *resource, told *pb.ErrorDetail, budget int) (ended int, now *resource) {
	for ended < budget {
		place, w, ok := r.queue.min()
		if !ok {
			break
		}
		r = m.endWaiter(r, place, w, told)
		ended++
	}
	return ended, r
}

// errOver is what waiters of a dropped epoch are told.
func (m *Machine) errOver(partition string) *pb.ErrorDetail {
	p, ok := m.partitions.Get(partition)
	switch {
	case !ok:
		return errUnknownPartition(partition)
	case p.live():
		return errLapsed(partition)
	}
	return m.errNotOwner(p)
}
