package state

import (
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Event is what one command did, for the leader's tables and the watchers.
// Apply returns a command's events in the order in which they took effect: an
// observer that replays them onto the View of before has the View of after.
//
// The interface is sealed: a type switch over the types of this file is
// exhaustive.
type Event interface{ event() }

// TermBegun: a leader's first own entry of its term is applied. The leader's
// tables are built from the View at this point.
type TermBegun struct {
	Term, Index uint64
	// Server that leads the term, as it names itself.
	Server string
}

// SessionOpened: a session exists from now on.
type SessionOpened struct {
	Session Session
}

// SessionClosed: the session takes no more requests. It comes before the end
// of the session's leases and waiters; those of a session with more than
// MaxRemovals leases end in later commands.
type SessionClosed struct {
	ID     string
	Reason EndReason
}

// LeaseGranted: the session holds the resource under a new token.
type LeaseGranted struct {
	Session string
	// Request is the Acquire that is answered by this grant.
	Request   uint64
	Resource  string
	Partition string
	Token     fence.Token
	// Offered: handed over from the queue; the client has yet to confirm
	// [F23].
	Offered bool
	// Holder is the identity of the session's client.
	Holder string
	// Value beside the lease.
	Value string
	// LockDelayMillis is how long nobody gets the resource after an end
	// without a release.
	LockDelayMillis int64
	// Revision is the log index of the grant; 0 below feature level 2.
	Revision uint64
}

// ValueChanged: the holder has replaced the value on its lease.
type ValueChanged struct {
	Session   string
	Resource  string
	Partition string
	Token     fence.Token
	Holder    string
	Value     string
	// Revision is the log index of the change.
	Revision uint64
}

// LeaseRevoked: the lease passes on once its last sent validity is over.
type LeaseRevoked struct {
	Session   string
	Resource  string
	Partition string
	Token     fence.Token
	Reason    string
	Holder    string
}

// LeaseEnded: nobody holds that token any more. With a lock delay, DelayBegun
// follows in the same command.
type LeaseEnded struct {
	Session   string
	Resource  string
	Partition string
	Token     fence.Token
	Reason    EndReason
	Holder    string
}

// DelayBegun: nobody is granted the resource until EndDelay, which the leader
// proposes when the delay has passed; a new leader counts it anew in full.
type DelayBegun struct {
	Resource  string
	Partition string
	// Token whose end began it; 0: a request for the resource came while the
	// partition was unsettled, and the delay counts from the adoption.
	Token       fence.Token
	DelayMillis int64
}

// DelayEnded: the resource may be granted again; if somebody waits,
// LeaseGranted follows in the same command.
type DelayEnded struct {
	Resource  string
	Partition string
	Token     fence.Token
}

// WaiterEnqueued: the request took a queue place. A leader that finds the
// place in its View counts WaitMillis anew in full.
type WaiterEnqueued struct {
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

// WaiterEnded: the request left the queue without a grant.
type WaiterEnded struct {
	Session   string
	Request   uint64
	Resource  string
	Partition string
	// Error is what the waiting client is told; never nil.
	Error *pb.ErrorDetail
}

// PartitionAdopted: the epoch is live here; leases of it may be granted.
type PartitionAdopted struct {
	Partition string
	Epoch     fence.Epoch
	// Resumed: the epoch was live before and keeps its leases, its seq, and a
	// drain. Any other adoption ends a drain.
	Resumed bool
	// Unsettled: lock delays of leases in another region may still run. Until
	// Settle, which the leader proposes when the longest lock delay has passed
	// since this event, requests that name a lock delay wait for it.
	Unsettled bool
}

// PartitionSettled: no lock delay of before the adoption can run any more.
type PartitionSettled struct {
	Partition string
	Epoch     fence.Epoch
}

// PartitionDraining: no grant and no hand-over passes from here on [F26]; the
// waiters end, with MOVED, in this and the next commands.
type PartitionDraining struct {
	Partition string
	Epoch     fence.Epoch
	Successor string
	// By is who asked for it.
	By string
}

// DrainAborted: the partition is active again, at the same epoch.
type DrainAborted struct {
	Partition string
	Epoch     fence.Epoch
	// By is who asked for it.
	By string
}

// PartitionDropped: the epoch is over here and can never be adopted again: no
// lease of it, or of an earlier one, is held from here on. The LeaseEnded and
// WaiterEnded of a partition with more than MaxRemovals of them come in later
// commands, perhaps after the adoption of another epoch.
type PartitionDropped struct {
	Partition string
	Epoch     fence.Epoch
}

// LevelRaised: the region is at this feature level from now on.
type LevelRaised struct {
	Level uint32
}

// RegisterChanged: the region's durable record of the partition's register is
// now Record.
type RegisterChanged struct {
	Partition string
	Record    register.Record
}

// Initialised: the region's data has its name and incarnation.
type Initialised struct {
	Region      string
	Incarnation register.Incarnation
}

// Configured: the region has this configuration. It must not be changed.
type Configured struct {
	Configuration *pb.ClusterConfiguration
}

// EraBegun: force-quorum has put the region into another era. It comes after
// the Drops, the configuration and the changes of all registers that this means.
type EraBegun struct {
	// Configuration must not be changed.
	Configuration *pb.ClusterConfiguration
	Before        register.Era
}

// EraStopped: the region met another era, and votes no more until EraBegun.
type EraStopped struct {
	Stop *pb.EraStop
}

// PulseCommitted: the disks of a quorum moved.
type PulseCommitted struct {
	Index uint64
}

func (TermBegun) event()         {}
func (SessionOpened) event()     {}
func (SessionClosed) event()     {}
func (LeaseGranted) event()      {}
func (ValueChanged) event()      {}
func (LeaseRevoked) event()      {}
func (LeaseEnded) event()        {}
func (DelayBegun) event()        {}
func (DelayEnded) event()        {}
func (WaiterEnqueued) event()    {}
func (WaiterEnded) event()       {}
func (PartitionAdopted) event()  {}
func (PartitionSettled) event()  {}
func (PartitionDraining) event() {}
func (DrainAborted) event()      {}
func (PartitionDropped) event()  {}
func (LevelRaised) event()       {}
func (RegisterChanged) event()   {}
func (Initialised) event()       {}
func (Configured) event()        {}
func (EraBegun) event()          {}
func (EraStopped) event()        {}
func (PulseCommitted) event()    {}

// EndReason says why a session or a lease ended.
type EndReason int

// Reasons.
const (
	// EndReleased: by its holder.
	EndReleased EndReason = iota + 1
	// EndClosed: the session was closed by its client.
	EndClosed
	// EndExpired: the session's deadline passed.
	EndExpired
	// EndRevoked: a revocation ran out.
	EndRevoked
	// EndDropped: the region lost the epoch.
	EndDropped
)

func (r EndReason) String() string {
	switch r {
	case EndReleased:
		return "released"
	case EndClosed:
		return "closed"
	case EndExpired:
		return "expired"
	case EndRevoked:
		return "revoked"
	case EndDropped:
		return "dropped"
	}
	return "unknown"
}
