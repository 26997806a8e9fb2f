// Package state is the region's replicated state machine: sessions, leases,
// queues, partitions, the region's registers as a voter, and its ballots.
//
// It is pure and deterministic. The commands of the Raft log go in, results
// and events come out, the same on every server: no clock, no I/O, no
// randomness, no map iteration that shows.
//
// What it guarantees, whatever commands it is given:
//   - a resource has at most one holder;
//   - {epoch, seq} of a partition never goes down and is never deleted, so
//     that no token is ever given twice (I2);
//   - leases of an epoch exist only between its Adopt and its Drop [H7];
//   - a queue is first come, first served, and a place is lost only with its
//     session, its partition's epoch, or by its owner's wish;
//   - a command stamped with a term takes effect only in an entry of that
//     term [F2 H4];
//   - Apply never panics on the content of a command.
//
// What it does not know is time: deadlines and validity are the leader's
// (region/lessor), which proposes Expire, Revoke and EndRevocation.
package state

import (
	"crypto/sha256"
	"errors"

	"github.com/tidwall/btree"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Bounds of the state. They are part of the replicated behaviour: a change
// needs a feature level.
const (
	// MaxQueue is how many requests may wait for one resource.
	MaxQueue = 10_000
	// MaxWaiters is how many requests may wait in the whole region.
	MaxWaiters = 1_000_000
	// MaxSessionLeases is how many leases and queue places a session may have.
	MaxSessionLeases = 10_000
	// MaxSeenRanges is how many gaps a session's request ids may have above
	// its lowest open one.
	MaxSeenRanges = 1024
	// MaxRemovals is how many leases one Expire or CloseSession removes.
	MaxRemovals = 500
	// MaxPartitions of a configuration.
	MaxPartitions = 4096
	// MaxVoters recorded.
	MaxVoters = 256
	// MaxValue is the size of a value beside a lease, and MaxValueBytes that of
	// all values of the region, those of waiters included, in bytes.
	MaxValue      = 64 << 10
	MaxValueBytes = 256 << 20
	// MaxLockDelayMillis is the longest lock delay.
	MaxLockDelayMillis = 60_000
	// MaxWaitMillis is the longest time to wait that a request may name.
	MaxWaitMillis = 24 * 3600 * 1000
	// MaxSlots of a semaphore.
	MaxSlots = 10_000
)

// ErrUnknownCommand poisons a machine: the log holds what this version cannot
// apply, and skipping it would make its state diverge. The server must stop.
var ErrUnknownCommand = errors.New("unknown command in the raft log: this server is older than the cluster's feature level; upgrade it")

// Machine is the state. One goroutine owns it; others read a View.
type Machine struct {
	root
	// gen tells entries made since the last View, which may be changed in
	// place, from those that a View may show.
	gen    uint64
	view   *root
	poison error
	events []Event
	// piece bounds the work of one command on a sweep.
	piece piece
	// Entries changed by the command being applied: their hashes are due.
	dirtyPartitions []*partition
	dirtySessions   []*session
	dirtyResources  []*resource
	dirtySemaphores []*semaphore
}

// root is the state proper. A View has a copy of it that nobody changes.
type root struct {
	region        string
	incarnation   register.Incarnation
	configuration *pb.ClusterConfiguration
	// configRegister decides on the version after configuration.
	configRegister config.Register
	// eraStop, if set: the region met another era, and votes no more.
	eraStop     *pb.EraStop
	level       uint32
	ballotRound uint64
	applied     uint64
	pulse       uint64
	waiting     int
	leased      int
	valueBytes  int64
	sweep       sweep

	partitions *btree.Map[string, *partition]
	voters     *btree.Map[string, VoterRecord]
	sessions   *btree.Map[string, *session]
	resources  *btree.Map[string, *resource]
	// semaphores with a slot in use or a queue.
	semaphores *btree.Map[string, *semaphore]
	// closing: sessions closed by a command that could not remove all their
	// leases.
	closing *btree.Map[string, struct{}]
	// stalled: resources without a holder whose queue could not be served (a
	// draining partition, used-up tokens).
	stalled *btree.Map[string, struct{}]
	// delayed: resources in a lock delay.
	delayed *btree.Map[string, struct{}]

	// sum of the hashes of all entries, and the configuration's.
	sum, configurationHash uint64
	points                 hashPoints
}

// New returns the empty, uninitialised state, at feature level 1.
func New() *Machine {
	return &Machine{gen: 1, piece: defaultPiece, root: root{
		level:      1,
		partitions: newTree[*partition](),
		voters:     newTree[VoterRecord](),
		sessions:   newTree[*session](),
		resources:  newTree[*resource](),
		semaphores: newTree[*semaphore](),
		closing:    newTree[struct{}](),
		stalled:    newTree[struct{}](),
		delayed:    newTree[struct{}](),

		configurationHash: (&root{}).hashConfiguration(),
	}}
}

// degree of the trees: nodes of at most 2*degree-1 entries. Small nodes make
// the copy on the first write after a View cheap.
const degree = 16

func newTree[V any]() *btree.Map[string, V] { return btree.NewMap[string, V](degree) }

// Poisoned returns why the machine can apply no more, wrapping
// ErrUnknownCommand or ErrDiverged, or nil. A poisoned machine is unchanged by
// Apply.
func (m *Machine) Poisoned() error { return m.poison }

// View returns the state as it is now, in constant time. Owner only; the View
// may then be read by any goroutine, at any time.
func (m *Machine) View() View {
	if m.view == nil {
		m.settleHashes()
		r := m.root
		r.partitions = m.partitions.Copy()
		r.voters = m.voters.Copy()
		r.sessions = m.sessions.Copy()
		r.resources = m.resources.Copy()
		r.semaphores = m.semaphores.Copy()
		r.closing = m.closing.Copy()
		r.stalled = m.stalled.Copy()
		r.delayed = m.delayed.Copy()
		m.view = &r
		m.gen++
	}
	return View{m.view}
}

func (m *Machine) emit(e Event) { m.events = append(m.events, e) }

// partition is what the region keeps of a partition.
type partition struct {
	gen     uint64
	name    string
	record  register.Record
	epoch   fence.Epoch
	seq     fence.Seq
	phase   pb.PartitionPhase
	dropped fence.Epoch
	// unsettled: lock delays of another region may run; see adopt.
	unsettled bool
	successor string

	dirty            bool
	hash, recordHash uint64
}

func (p *partition) live() bool {
	return p.phase == phaseActive || p.phase == phaseDraining
}

// session is a client process.
type session struct {
	gen        uint64
	id         string
	secretHash [sha256.Size]byte
	ttlMillis  int64
	identity   string
	labels     map[string]string
	closing    bool
	// orderly: closed by its client, so that its leases end without a lock
	// delay also when they are removed by later commands.
	orderly bool
	dirty   bool
	gone    bool
	// lowest request id that may still be open: all below are refused.
	lowest uint64
	waits  int
	// seen holds the request ids from lowest up that were ever answered,
	// queued or cancelled, as ranges first → last [F17].
	seen few[uint64, uint64]
	// open holds the requests that wait or whose grant is still held.
	open few[uint64, request]
	// held resources.
	held few[string, struct{}]

	// hash of the whole, of what never changes, and sums over seen and open.
	hash, fixedHash, seenSum, openSum uint64
}

// request is an open request: waiting at a place, or granted.
type request struct {
	// resource granted or waited for; of one that waits for any slot, the
	// semaphore.
	resource string
	// token is zero while waiting.
	token fence.Token
	place uint64
	// slots that the request named; 0: the resource itself.
	slots uint32
}

// resource exists while it is held, waited for, or in a lock delay.
type resource struct {
	gen       uint64
	name      string
	partition string
	// session is empty and token zero if nobody holds it.
	session string
	token   fence.Token
	// request that the holder's token answered last.
	request  uint64
	revision uint64
	// delayToken is the token whose end began the delay that runs, or 0.
	delayToken fence.Token
	// lockDelay of the lease, and the delay that runs or 0, in milliseconds.
	lockDelay, delay uint32
	// epoch in which it was granted or its delay began: it is over once that
	// epoch is dropped.
	epoch fence.Epoch
	// slot of a semaphore, or -1.
	slot                          int32
	offered, revoked, dirty, gone bool
	revokeReason, value           string
	// queue is nil if nobody waits.
	queue           *queue
	hash, valueHash uint64
}

// editPartition returns an entry that may be changed in place.
func (m *Machine) editPartition(p *partition) *partition {
	if p.gen != m.gen {
		c := *p
		p, c.gen = &c, m.gen
		m.partitions.Set(p.name, p)
	}
	if !p.dirty {
		p.dirty = true
		m.dirtyPartitions = append(m.dirtyPartitions, p)
	}
	return p
}

// editSession returns an entry that may be changed in place.
func (m *Machine) editSession(s *session) *session {
	if s.gen != m.gen {
		c := *s
		s, c.gen = &c, m.gen
		s.seen, s.open, s.held = s.seen.Copy(), s.open.Copy(), s.held.Copy()
		m.sessions.Set(s.id, s)
	}
	if !s.dirty {
		s.dirty = true
		m.dirtySessions = append(m.dirtySessions, s)
	}
	return s
}

// editResource returns an entry that may be changed in place.
func (m *Machine) editResource(r *resource) *resource {
	if r.gen != m.gen {
		c := *r
		r, c.gen = &c, m.gen
		r.queue = r.queue.copy()
		m.resources.Set(r.name, r)
	}
	if !r.dirty {
		r.dirty = true
		m.dirtyResources = append(m.dirtyResources, r)
	}
	return r
}

// newResource adds an entry that may be changed in place. One of that name
// whose epoch is dropped goes first.
func (m *Machine) newResource(p *partition, name string) *resource {
	if old, ok := m.resources.Get(name); ok {
		m.purge(old)
	}
	r := &resource{gen: m.gen, name: name, partition: p.name, epoch: p.epoch, slot: -1, dirty: true}
	m.dirtyResources = append(m.dirtyResources, r)
	m.resources.Set(name, r)
	if base, slot, ok := slotOf(name); ok {
		r.slot = int32(slot)
		m.occupy(base, slot)
	}
	return r
}

// removeResource deletes an entry.
func (m *Machine) removeResource(r *resource) {
	m.sum -= r.hash
	if r.gen == m.gen {
		r.gone = true
	}
	m.resources.Delete(r.name)
	m.stalled.Delete(r.name)
	m.delayed.Delete(r.name)
	if r.slot >= 0 {
		m.vacate(baseOf(r.name), int(r.slot))
	}
}

// removeSession deletes an entry.
func (m *Machine) removeSession(s *session) {
	m.sum -= s.hash
	if s.gen == m.gen {
		s.gone = true
	}
	m.sessions.Delete(s.id)
	m.closing.Delete(s.id)
}

// stale reports whether the resource's epoch is dropped: nobody holds it or
// waits for it any more, and a sweep will remove it.
func (r *root) stale(e *resource) bool {
	return r.sweep.passes > 0 && r.over(e.partition, e.epoch)
}

// over reports whether an epoch of a partition is dropped.
func (r *root) over(partition string, epoch fence.Epoch) bool {
	p, ok := r.partitions.Get(partition)
	return !ok || epoch <= p.dropped
}

// lookup returns a resource that is held, waited for, or in a delay.
func (r *root) lookup(name string) (*resource, bool) {
	e, ok := r.resources.Get(name)
	if !ok || r.stale(e) {
		return nil, false
	}
	return e, true
}
