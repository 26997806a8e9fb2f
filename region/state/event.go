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
}

// LeaseRevoked: the lease passes on once its last sent validity is over.
type LeaseRevoked struct {
	Session   string
	Resource  string
	Partition string
	Token     fence.Token
	Reason    string
}

// LeaseEnded: nobody holds that token any more.
type LeaseEnded struct {
	Session   string
	Resource  string
	Partition string
	Token     fence.Token
	Reason    EndReason
}

// WaiterEnqueued: the request took a queue place.
type WaiterEnqueued struct {
	Session   string
	Request   uint64
	Resource  string
	Partition string
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
	// Resumed: the epoch was live before and keeps its leases and its seq.
	Resumed bool
}

// PartitionDropped: the epoch is over here and can never be adopted again. It
// comes before the end of its leases and waiters.
type PartitionDropped struct {
	Partition string
	Epoch     fence.Epoch
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

// PulseCommitted: the disks of a quorum moved.
type PulseCommitted struct {
	Index uint64
}

func (TermBegun) event()        {}
func (SessionOpened) event()    {}
func (SessionClosed) event()    {}
func (LeaseGranted) event()     {}
func (LeaseRevoked) event()     {}
func (LeaseEnded) event()       {}
func (WaiterEnqueued) event()   {}
func (WaiterEnded) event()      {}
func (PartitionAdopted) event() {}
func (PartitionDropped) event() {}
func (RegisterChanged) event()  {}
func (Initialised) event()      {}
func (Configured) event()       {}
func (PulseCommitted) event()   {}

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
