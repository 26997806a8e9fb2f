package replica

import (
	"errors"
	"fmt"

	"github.com/hashicorp/raft"
)

var (
	// ErrUnknown: the command may or may not be applied, now or later. The caller
	// must not propose it again unless it is idempotent.
	ErrUnknown = errors.New("outcome unknown: the command may have been applied")
	// ErrOverloaded: the queue is full; the command was not proposed.
	ErrOverloaded = errors.New("proposal queue is full; try again later")
	// ErrNotLeader is what every NotLeaderError is.
	ErrNotLeader = errors.New("not the leader")
	// ErrCheckFailed: leadership could not be proved; it may still be ours.
	ErrCheckFailed = errors.New("leadership check failed")
	// ErrUninitialised: this server's directory belongs to no region's group yet;
	// nothing was done.
	ErrUninitialised = errors.New("server is not initialised; run headlease init")
	// ErrClosed: the replica has stopped or was never run.
	ErrClosed = errors.New("replica is closed")
	// ErrStarting: Raft does not run yet, so it is not known who is in the group.
	ErrStarting = errors.New("server is starting; try again")
)

// NotLeaderError says that nothing was done here and who leads as far as this
// server knows ("" for unknown, or when this server was elected and is not
// ready).
type NotLeaderError struct {
	Leader string
	// Failed is the store write that failed, after which this server stops; nil:
	// none did, or another server leads.
	Failed error
}

func (e *NotLeaderError) Error() string {
	switch {
	case e.Failed != nil:
		return fmt.Sprintf("not the leader; this server stops: %v", e.Failed)
	case e.Leader == "":
		return "not the leader; leader unknown, try again"
	}
	return fmt.Sprintf("not the leader; ask %s", e.Leader)
}

// Is makes errors.Is(err, ErrNotLeader) true.
func (e *NotLeaderError) Is(target error) bool { return target == ErrNotLeader }

// outcome turns the error of an apply future into ours. Raft says surely not
// applied in three cases only; everything else is unknown.
func (r *Replica) outcome(err error) error {
	switch {
	case errors.Is(err, raft.ErrNotLeader),
		errors.Is(err, raft.ErrLeadershipTransferInProgress),
		errors.Is(err, raft.ErrEnqueueTimeout):
		return r.notLeader()
	}
	if failed := r.Failed(); failed != nil && !errors.Is(err, failed) { // this is why
		return fmt.Errorf("%w: %w: %w", ErrUnknown, err, failed)
	}
	return fmt.Errorf("%w: %w", ErrUnknown, err)
}

func (r *Replica) notLeader() error {
	if r.raft.Load() == nil && !r.Initialised() {
		return ErrUninitialised
	}
	name, _, self := r.Leader()
	if self {
		name = ""
	}
	if name == "" {
		return &NotLeaderError{Failed: r.Failed()}
	}
	return &NotLeaderError{Leader: name}
}

// Failed is the first store write that failed, which stops this server; nil: none
// did.
func (r *Replica) Failed() error { return r.stores.guard.failure() }
