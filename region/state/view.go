package state

import (
	"iter"
	"strings"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// View is the state at one index. It never changes and any goroutine may read
// it. Take one from Machine.View; the zero View must not be used.
type View struct{ r *root }

// Partition is what the region keeps of a partition.
type Partition struct {
	Name string
	// Register is the region's durable record as a voter.
	Register register.Record
	// Epoch is the highest ever adopted here, Seq the grants made in it. They
	// never go down, also when the epoch is dropped.
	Epoch fence.Epoch
	Seq   fence.Seq
	Phase pb.PartitionPhase
	// Dropped is the highest epoch dropped here.
	Dropped fence.Epoch
	// Unsettled: adopted without a release of the owner before; see
	// PartitionAdopted.
	Unsettled bool
	// Successor is the region that a draining partition goes to.
	Successor string
}

// Live reports whether the epoch is adopted and not dropped.
func (p Partition) Live() bool {
	return p.Phase == pb.PartitionPhase_PARTITION_PHASE_ACTIVE || p.Phase == pb.PartitionPhase_PARTITION_PHASE_DRAINING
}

// Draining reports whether the partition is being handed to Successor: nothing
// is granted.
func (p Partition) Draining() bool { return p.Phase == pb.PartitionPhase_PARTITION_PHASE_DRAINING }

// Session is a client process as the region knows it.
type Session struct {
	ID string
	// SecretHash is SHA-256 of the secret; it must not be changed.
	SecretHash []byte
	// TTLMillis is the session's time to live in milliseconds.
	TTLMillis int64
	Identity  string
	// Labels must not be changed.
	Labels map[string]string
	// LowestOpen is the lowest request id that may be open.
	LowestOpen uint64
	// Closing: closed, with leases that the next Expire commands remove.
	Closing bool
	// Held and Waiting count leases and queue places.
	Held, Waiting int
}

// Lease is a session's hold on a resource.
type Lease struct {
	Resource  string
	Partition string
	Session   string
	// Holder is the identity of the session's client.
	Holder string
	Token  fence.Token
	// Request that was last answered with the token.
	Request uint64
	// Offered: it was handed over from the queue. Whether the client has
	// confirmed it is known to the leader only.
	Offered      bool
	Revoked      bool
	RevokeReason string
	// Waiters for the resource itself; those of a semaphore wait for no slot
	// in particular.
	Waiters int
	Value   string
	// LockDelayMillis is how long nobody gets the resource after an end
	// without a release.
	LockDelayMillis int64
	// Revision is the log index of the grant or of the newest value; 0 for a
	// grant below feature level 2.
	Revision uint64
}

// Waiter is a place in a queue.
type Waiter struct {
	Session string
	Request uint64
	// Resource waited for; with Slots, the semaphore's name without a slot.
	Resource  string
	Partition string
	// Slots is how many of the semaphore's slots would do, from slot 0; 0: the
	// resource itself.
	Slots uint32
	// WaitMillis is the longest time to wait; 0: until cancelled.
	WaitMillis int64
}

// Delay is a running lock delay: nobody is granted the resource.
type Delay struct {
	Resource  string
	Partition string
	// Token whose end began it; 0: of the partition's adoption.
	Token       fence.Token
	DelayMillis int64
}

// VoterRecord is the last life and count of durable writes seen of a voter
// [F5].
type VoterRecord struct {
	ID          string
	Incarnation register.Incarnation
	Life        uint64
	Writes      uint64
}

// Counts are the sizes of the state.
type Counts struct {
	Sessions, Leases, Waiters, Resources, Closing int
	// Delays are the running lock delays.
	Delays int
	// Semaphores with a slot in use or a queue.
	Semaphores int
	// ValueBytes are the bytes of all values, those of waiters included.
	ValueBytes int64
}

// Initialised reports whether the region's data has a name and incarnation.
func (v View) Initialised() bool { return v.r.incarnation != 0 }

// Region returns the region's name, empty if not initialised.
func (v View) Region() string { return v.r.region }

// Incarnation of the region's data, zero if not initialised.
func (v View) Incarnation() register.Incarnation { return v.r.incarnation }

// Configuration returns the cluster configuration, nil if there is none. It
// must not be changed.
func (v View) Configuration() *pb.ClusterConfiguration { return v.r.configuration }

// Level is the feature level.
func (v View) Level() uint32 { return v.r.level }

// Sweeping reports whether parts of a dropped or draining partition are still
// to be removed: each command removes some. A leader that wants it done sooner
// proposes the Drop again, or any command.
func (v View) Sweeping() bool { return v.r.sweep.passes > 0 }

// BallotRound is the highest round reserved.
func (v View) BallotRound() uint64 { return v.r.ballotRound }

// AppliedIndex is the index of the last entry applied.
func (v View) AppliedIndex() uint64 { return v.r.applied }

// PulseIndex is the index of the last committed pulse, zero if none.
func (v View) PulseIndex() uint64 { return v.r.pulse }

// Counts returns the sizes of the state.
func (v View) Counts() Counts {
	return Counts{
		Sessions: v.r.sessions.Len(), Leases: v.r.leased, Waiters: v.r.waiting,
		Resources: v.r.resources.Len(), Closing: v.r.closing.Len(),
		Delays: v.r.delayed.Len(), Semaphores: v.r.semaphores.Len(), ValueBytes: v.r.valueBytes,
	}
}

// Partition returns a partition of the configuration.
func (v View) Partition(name string) (Partition, bool) {
	p, ok := v.r.partitions.Get(name)
	if !ok {
		return Partition{}, false
	}
	return p.export(), true
}

// Partitions yields all partitions by name.
func (v View) Partitions() iter.Seq[Partition] {
	return func(yield func(Partition) bool) {
		v.r.partitions.Scan(func(_ string, p *partition) bool { return yield(p.export()) })
	}
}

// Session returns an open or closing session.
func (v View) Session(id string) (Session, bool) {
	s, ok := v.r.sessions.Get(id)
	if !ok {
		return Session{}, false
	}
	return s.export(), true
}

// Sessions yields all sessions by id, closing ones included.
func (v View) Sessions() iter.Seq[Session] {
	return func(yield func(Session) bool) {
		v.r.sessions.Scan(func(_ string, s *session) bool { return yield(s.export()) })
	}
}

// ClosingSessions yields the ids of closed sessions that still have leases:
// the leader proposes Expire for them until there is none.
func (v View) ClosingSessions() iter.Seq[string] {
	return func(yield func(string) bool) {
		v.r.closing.Scan(func(id string, _ struct{}) bool { return yield(id) })
	}
}

// SessionLeases yields what a session holds, by resource.
func (v View) SessionLeases(id string) iter.Seq[Lease] {
	return func(yield func(Lease) bool) {
		s, ok := v.r.sessions.Get(id)
		if !ok {
			return
		}
		s.held.Scan(func(name string, _ struct{}) bool {
			l, ok := v.Lease(name)
			return !ok || yield(l)
		})
	}
}

// SessionWaiters yields the queue places of a session, by request id.
func (v View) SessionWaiters(id string) iter.Seq[Waiter] {
	return func(yield func(Waiter) bool) {
		s, ok := v.r.sessions.Get(id)
		if !ok {
			return
		}
		s.open.Scan(func(_ uint64, q request) bool {
			if q.token != 0 {
				return true
			}
			queue, partition := v.r.queueOf(q)
			w, ok := queue.get(q.place)
			return !ok || yield(w.export(q.resource, partition))
		})
	}
}

// Lease returns who holds a resource.
func (v View) Lease(name string) (Lease, bool) {
	r, ok := v.r.lookup(name)
	if !ok || r.token == 0 {
		return Lease{}, false
	}
	return v.r.lease(r), true
}

// Leases yields all leases, by resource.
func (v View) Leases() iter.Seq[Lease] {
	return func(yield func(Lease) bool) {
		v.r.resources.Scan(func(_ string, r *resource) bool {
			return r.token == 0 || v.r.stale(r) || yield(v.r.lease(r))
		})
	}
}

// Delays yields the running lock delays, by resource.
func (v View) Delays() iter.Seq[Delay] {
	return func(yield func(Delay) bool) {
		v.r.delayed.Scan(func(name string, _ struct{}) bool {
			d, ok := v.Delay(name)
			return !ok || yield(d)
		})
	}
}

// Delay returns the lock delay that runs on a resource.
func (v View) Delay(name string) (Delay, bool) {
	r, ok := v.r.lookup(name)
	if !ok || r.delay == 0 {
		return Delay{}, false
	}
	return Delay{Resource: r.name, Partition: r.partition, Token: r.delayToken, DelayMillis: int64(r.delay)}, true
}

// ListLeases returns up to limit leases whose resource begins with prefix and
// comes after the resource named after, and the name to go on after: empty at
// the end.
func (v View) ListLeases(prefix, after string, limit int) (page []Lease, next string) {
	v.r.resources.Ascend(max(prefix, after), func(name string, r *resource) bool {
		switch {
		case !strings.HasPrefix(name, prefix):
			return false
		case name == after && after != "", r.token == 0, v.r.stale(r):
			return true
		case len(page) >= limit:
			if len(page) > 0 {
				next = page[len(page)-1].Resource
			}
			return false
		}
		page = append(page, v.r.lease(r))
		return true
	})
	return page, next
}

// Waiters yields a resource's queue, first come first.
func (v View) Waiters(name string) iter.Seq[Waiter] {
	return func(yield func(Waiter) bool) {
		if r, ok := v.r.lookup(name); ok {
			r.queue.scan(func(_ uint64, w waiter) bool { return yield(w.export(r.name, r.partition)) })
		}
	}
}

// SemaphoreWaiters yields the queue of requests for any slot of a semaphore,
// first come first. The name is without a slot.
func (v View) SemaphoreWaiters(name string) iter.Seq[Waiter] {
	return func(yield func(Waiter) bool) {
		if s, ok := v.r.semaphores.Get(name); ok && !v.r.staleSemaphore(s) {
			s.queue.scan(func(_ uint64, w waiter) bool { return yield(w.export(s.name, s.partition)) })
		}
	}
}

// Voter returns what was last recorded of a voter.
func (v View) Voter(id string) (VoterRecord, bool) { return v.r.voters.Get(id) }

// Voters yields the voters' records by id.
func (v View) Voters() iter.Seq[VoterRecord] {
	return func(yield func(VoterRecord) bool) {
		v.r.voters.Scan(func(_ string, r VoterRecord) bool { return yield(r) })
	}
}

func (p *partition) export() Partition {
	return Partition{
		Name: p.name, Register: p.record, Epoch: p.epoch, Seq: p.seq, Phase: p.phase, Dropped: p.dropped,
		Unsettled: p.unsettled, Successor: p.successor,
	}
}

func (s *session) export() Session {
	return Session{
		ID: s.id, SecretHash: s.secretHash[:], TTLMillis: s.ttlMillis, Identity: s.identity, Labels: s.labels,
		LowestOpen: s.lowest, Closing: s.closing, Held: s.held.Len(), Waiting: s.waits,
	}
}

func (r *root) lease(e *resource) Lease {
	return Lease{
		Resource: e.name, Partition: e.partition, Session: e.session, Token: e.token, Request: e.request,
		Offered: e.offered, Revoked: e.revoked, RevokeReason: e.revokeReason, Waiters: e.queue.len(),
		Holder: r.identity(e.session), Value: e.value, LockDelayMillis: int64(e.lockDelay), Revision: e.revision,
	}
}

// identity of a session's client, or "".
func (r *root) identity(session string) string {
	if s, ok := r.sessions.Get(session); ok {
		return s.identity
	}
	return ""
}

func (w waiter) export(resource, partition string) Waiter {
	out := Waiter{Session: w.session, Request: w.request, Resource: resource, Partition: partition}
	if t := w.terms; t != nil {
		out.Slots, out.WaitMillis = t.slots, t.waitMillis
	}
	return out
}
