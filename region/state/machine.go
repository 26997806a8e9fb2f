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
}

// root is the state proper. A View has a copy of it that nobody changes.
type root struct {
	region        string
	incarnation   register.Incarnation
	configuration *pb.ClusterConfiguration
	// configRegister decides on the version after configuration.
	configRegister config.Register
	ballotRound    uint64
	applied        uint64
	pulse          uint64
	waiting        int
	leased         int

	partitions *btree.Map[string, *partition]
	voters     *btree.Map[string, VoterRecord]
	sessions   *btree.Map[string, *session]
	resources  *btree.Map[string, *resource]
	// closing: sessions closed by a command that could not remove all their
	// leases.
	closing *btree.Map[string, struct{}]
	// stalled: resources without a holder whose queue could not be served (a
	// draining partition, used-up tokens).
	stalled *btree.Map[string, struct{}]
}

// New returns the empty, uninitialised state.
func New() *Machine {
	return &Machine{gen: 1, root: root{
		partitions: newTree[*partition](),
		voters:     newTree[VoterRecord](),
		sessions:   newTree[*session](),
		resources:  newTree[*resource](),
		closing:    newTree[struct{}](),
		stalled:    newTree[struct{}](),
	}}
}

// degree of the trees: nodes of at most 2*degree-1 entries. Small nodes make
// the copy on the first write after a View cheap.
const degree = 16

func newTree[V any]() *btree.Map[string, V] { return btree.NewMap[string, V](degree) }

// Poisoned returns why the machine can apply no more, wrapping
// ErrUnknownCommand, or nil. A poisoned machine is unchanged by Apply.
func (m *Machine) Poisoned() error { return m.poison }

// View returns the state as it is now, in constant time. Owner only; the View
// may then be read by any goroutine, at any time.
func (m *Machine) View() View {
	if m.view == nil {
		r := m.root
		r.partitions = m.partitions.Copy()
		r.voters = m.voters.Copy()
		r.sessions = m.sessions.Copy()
		r.resources = m.resources.Copy()
		r.closing = m.closing.Copy()
		r.stalled = m.stalled.Copy()
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
}

func (p *partition) live() bool {
	return p.phase == pb.PartitionPhase_PARTITION_PHASE_ACTIVE || p.phase == pb.PartitionPhase_PARTITION_PHASE_DRAINING
}

// session is a client process.
type session struct {
	gen        uint64
	id         string
	secretHash []byte
	ttlMillis  int64
	identity   string
	labels     map[string]string
	closing    bool
	// lowest request id that may still be open: all below are refused.
	lowest uint64
	waits  int
	// seen holds the request ids from lowest up that were ever answered,
	// queued or cancelled, as ranges first → last [F17].
	seen btree.Map[uint64, uint64]
	// open holds the requests that wait or whose grant is still held.
	open btree.Map[uint64, request]
	// held resources.
	held btree.Map[string, struct{}]
}

// request is an open request: waiting at a place, or granted.
type request struct {
	resource string
	// token is zero while waiting.
	token fence.Token
	place uint64
}

// resource exists while it is held or waited for.
type resource struct {
	gen       uint64
	name      string
	partition string
	// session is empty and token zero if nobody holds it.
	session string
	token   fence.Token
	// request that the holder's token answered last.
	request      uint64
	offered      bool
	revoked      bool
	revokeReason string
	nextPlace    uint64
	queue        btree.Map[uint64, waiter]
}

type waiter struct {
	session string
	request uint64
}

// editPartition returns an entry that may be changed in place.
func (m *Machine) editPartition(p *partition) *partition {
	if p.gen == m.gen {
		return p
	}
	c := *p
	c.gen = m.gen
	m.partitions.Set(c.name, &c)
	return &c
}

// editSession returns an entry that may be changed in place.
func (m *Machine) editSession(s *session) *session {
	if s.gen == m.gen {
		return s
	}
	c := *s
	c.gen = m.gen
	c.seen, c.open, c.held = *c.seen.Copy(), *c.open.Copy(), *c.held.Copy()
	m.sessions.Set(c.id, &c)
	return &c
}

// editResource returns an entry that may be changed in place.
func (m *Machine) editResource(r *resource) *resource {
	if r.gen == m.gen {
		return r
	}
	c := *r
	c.gen = m.gen
	c.queue = *c.queue.Copy()
	m.resources.Set(c.name, &c)
	return &c
}
