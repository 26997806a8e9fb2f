package state

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// ErrDiverged poisons a machine: at an earlier index its state was another
// than its leader's, so nothing that it applies can be relied on.
var ErrDiverged = errors.New("the state of this server differs from its leader's; move its data directory away and let it join again, and keep the directory for the report")

// HashEvery is how many log indices lie between two recorded state hashes.
const HashEvery = 1 << 14

// HashPoint is the hash of the state after all entries up to an index.
type HashPoint struct {
	Index, Hash uint64
}

// hashPoints are the newest recorded hashes, newest first. They are not part
// of the replicated state: a server has only those that it has lived through.
type hashPoints [8]HashPoint

// RecordedHash returns the newest recorded hash, for the leader to propose;
// ok is false if this server has lived through no such index yet.
func (v View) RecordedHash() (p HashPoint, ok bool) { return v.r.points[0], v.r.points[0].Index > 0 }

// StateHash is a hash of the whole content, the same on every server at the
// same index, and after a snapshot and its restore. It costs nothing: the
// machine keeps a sum of one hash per entry.
//
// An entry's hash is made of its fields one by one and not of encoded
// messages: their encoding may change with a library's version, and then
// servers of one state would seem to diverge.
func (v View) StateHash() uint64 { return v.r.hash(v.r.sum) }

// hash completes a sum over the entries.
func (r *root) hash(sum uint64) uint64 {
	return mix(
		sum, str(r.region), uint64(r.incarnation), r.configurationHash, uint64(r.level), r.ballotRound, r.applied, r.pulse,
		r.sweep.hash(), uint64(r.partitions.Len()), uint64(r.voters.Len()), uint64(r.sessions.Len()), uint64(r.resources.Len()),
	)
}

// record keeps the hash of the state before the entry at index, if an index to
// record lies between.
func (m *Machine) record(index uint64) {
	at := (index - 1) &^ (HashEvery - 1)
	if at == 0 || at < m.applied || index <= m.applied || m.points[0].Index >= at {
		return
	}
	copy(m.points[1:], m.points[:])
	m.points[0] = HashPoint{Index: at, Hash: m.hash(m.sum)}
}

// diverged returns why this server must stop if another hash was recorded here
// than the leader's. One of an index that is not recorded here says nothing.
func (m *Machine) diverged(c *pb.StateHashCommand) error {
	for _, p := range m.points {
		if p.Index == c.GetIndex() && p.Index > 0 && p.Hash != c.GetHash() {
			return fmt.Errorf("%w: at index %d the hash is %016x here and %016x there", ErrDiverged, p.Index, p.Hash, c.GetHash())
		}
	}
	return nil
}

// settleHashes brings the sum up to the entries changed since the last call.
func (m *Machine) settleHashes() {
	for _, p := range m.dirtyPartitions {
		p.dirty = false
		m.exchange(&p.hash, p.digest())
	}
	for _, s := range m.dirtySessions {
		if s.dirty = false; !s.gone {
			m.exchange(&s.hash, s.digest())
		}
	}
	for _, r := range m.dirtyResources {
		if r.dirty = false; !r.gone {
			m.exchange(&r.hash, r.digest())
		}
	}
	for _, s := range m.dirtySemaphores {
		if s.dirty = false; !s.gone {
			m.exchange(&s.hash, s.digest())
		}
	}
	m.dirtyPartitions, m.dirtySessions = emptied(m.dirtyPartitions), emptied(m.dirtySessions)
	m.dirtyResources, m.dirtySemaphores = emptied(m.dirtyResources), emptied(m.dirtySemaphores)
}

// emptied keeps the room of a short list, and no entry alive.
func emptied[T any](list []*T) []*T {
	if cap(list) > 4*MaxRemovals {
		return nil
	}
	clear(list)
	return list[:0]
}

func (m *Machine) exchange(old *uint64, now uint64) {
	m.sum += now - *old
	*old = now
}

// Tags keep entries of different kinds with equal fields apart.
const (
	tagPartition = iota + 1
	tagVoter
	tagSession
	tagResource
	tagSemaphore
	tagSeen
	tagOpen
	tagEdge
)

// mix hashes up to 24 numbers.
func mix(ns ...uint64) uint64 {
	var b [24 * 8]byte
	for i, n := range ns {
		binary.LittleEndian.PutUint64(b[8*i:], n)
	}
	return xxhash.Sum64(b[:8*len(ns)])
}

func str(s string) uint64 { return xxhash.Sum64String(s) }

func valueDigest(v string) uint64 {
	if v == "" {
		return 0
	}
	return str(v)
}

func flags(bs ...bool) (n uint64) {
	for _, b := range bs {
		n <<= 1
		if b {
			n |= 1
		}
	}
	return n
}

func (p *partition) digest() uint64 {
	return mix(tagPartition, str(p.name), p.recordHash, uint64(p.epoch), uint64(p.seq), uint64(p.phase), uint64(p.dropped),
		flags(p.unsettled), str(p.successor))
}

func recordHash(r register.Record) uint64 {
	h := hasher{d: xxhash.New()}
	h.record(r)
	return h.d.Sum64()
}

func (r *root) hashConfiguration() uint64 {
	h := hasher{d: xxhash.New()}
	h.configuration(r.configuration)
	h.configRegister(r.configRegister)
	h.era(r.configuration)
	if e := r.eraStop; e != nil {
		h.strs("stopped", e.GetBy())
		h.nums(e.GetEra().GetCounter(), e.GetEra().GetId())
	}
	return h.d.Sum64()
}

func (v VoterRecord) digest() uint64 {
	return mix(tagVoter, str(v.ID), uint64(v.Incarnation), v.Life, v.Writes)
}

func (s *session) digest() uint64 {
	return mix(tagSession, s.fixedHash, s.lowest, flags(s.closing, s.orderly), uint64(s.seen.Len()), s.seenSum, uint64(s.open.Len()), s.openSum)
}

// hashFixed hashes what never changes of a session.
func (s *session) hashFixed() uint64 {
	h := hasher{d: xxhash.New()}
	h.strs(s.id, string(s.secretHash[:]), s.identity)
	h.nums(uint64(s.ttlMillis), uint64(len(s.labels)))
	for _, k := range slices.Sorted(maps.Keys(s.labels)) {
		h.strs(k, s.labels[k])
	}
	return h.d.Sum64()
}

func seenDigest(first, last uint64) uint64 { return mix(tagSeen, first, last) }

func (q request) digest(id uint64) uint64 {
	return mix(tagOpen, id, str(q.resource), uint64(q.token), uint64(q.slots))
}

func (r *resource) digest() uint64 {
	var queued uint64
	if r.queue != nil {
		queued = r.queue.sum
	}
	return mix(
		tagResource, str(r.name), str(r.partition), str(r.session), uint64(r.token), r.request, r.revision,
		uint64(r.delayToken), uint64(r.lockDelay)<<32|uint64(r.delay), uint64(r.epoch), flags(r.offered, r.revoked),
		str(r.revokeReason), r.valueHash, uint64(r.queue.len()), queued,
	)
}

// digest is 0 without a queue: slots in use are known from the resources.
func (s *semaphore) digest() uint64 {
	if s.queue.len() == 0 {
		return 0
	}
	return mix(tagSemaphore, str(s.name), str(s.partition), uint64(s.epoch), uint64(s.queue.len()), s.queue.sum)
}

// edge hashes two neighbours of a queue; before the first is the zero waiter.
func edge(before, w waiter) uint64 {
	t := w.the()
	return mix(tagEdge, str(before.session), before.request, str(w.session), w.request,
		str(t.value), uint64(t.lockDelay), uint64(t.waitMillis), uint64(t.slots))
}

// rehash sets the hashes of all entries and their sum anew, of a state that no
// View shows.
func (m *Machine) rehash() {
	m.sum, m.configurationHash = 0, m.hashConfiguration()
	m.partitions.Scan(func(_ string, p *partition) bool {
		p.recordHash = recordHash(p.record)
		p.hash = p.digest()
		m.sum += p.hash
		return true
	})
	m.voters.Scan(func(_ string, v VoterRecord) bool { m.sum += v.digest(); return true })
	m.sessions.Scan(func(_ string, s *session) bool {
		s.fixedHash, s.seenSum, s.openSum = s.hashFixed(), 0, 0
		s.seen.Scan(func(first, last uint64) bool { s.seenSum += seenDigest(first, last); return true })
		s.open.Scan(func(id uint64, q request) bool { s.openSum += q.digest(id); return true })
		s.hash = s.digest()
		m.sum += s.hash
		return true
	})
	m.resources.Scan(func(_ string, r *resource) bool {
		r.queue.rehash()
		r.valueHash = valueDigest(r.value)
		r.hash = r.digest()
		m.sum += r.hash
		return true
	})
	m.semaphores.Scan(func(_ string, s *semaphore) bool {
		s.queue.rehash()
		s.hash = s.digest()
		m.sum += s.hash
		return true
	})
}

func (q *queue) rehash() {
	if q == nil {
		return
	}
	q.sum = 0
	var before waiter
	q.places.Scan(func(_ uint64, w waiter) bool {
		q.sum += edge(before, w)
		before = w
		return true
	})
}
