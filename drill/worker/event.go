package worker

import (
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// Kind of an Event.
type Kind string

// Kinds, in the order in which a worker's life has them.
const (
	// Waiting: somebody else holds the lock; reported once.
	Waiting Kind = "waiting"
	// Acquired, and then Claimed at the resource: the mark is raised.
	Acquired Kind = "acquired"
	Claimed  Kind = "claimed"
	// Written: a write was accepted.
	Written Kind = "written"
	// Freezing: Valid said yes, and the process stops itself before its send.
	Freezing Kind = "freezing"
	// Resumed: the process goes on; the next thing that it does is that send.
	Resumed Kind = "resumed"
	// Refused: the resource's guard refused a write or a claim.
	Refused Kind = "refused"
	// Lost: the lease has ended.
	Lost Kind = "lost"
	// Failed: a write got no answer; it may have happened.
	Failed Kind = "failed"
)

// Event is one line of JSON that a worker process prints.
type Event struct {
	Kind Kind `json:"event"`
	// At is on the machine's lease clock, which its processes share: they run
	// on one machine, and a drill does not outlive a boot.
	At    instant.Instant `json:"at"`
	Token fence.Token     `json:"token,omitempty"`
	// Region that granted the lease.
	Region string `json:"region,omitempty"`
	// Until the worker believed at At that nobody else can hold the lock; 0:
	// it does not.
	Until instant.Instant `json:"until,omitempty"`
	// Value that was, or was to be, written.
	Value string `json:"value,omitempty"`
	// Mark is the token that the resource has seen, of a refusal.
	Mark fence.Token `json:"mark,omitempty"`
	// Reason in words, of Refused, Lost and Failed.
	Reason string `json:"reason,omitempty"`
}
