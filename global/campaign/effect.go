package campaign

import (
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// Effect is something the caller must do; see the package's text for the
// order. The concrete types are those of this file.
type Effect interface{ effect() }

// SendPrepare is a Prepare for one voter; Dry asks only and has no ballot.
type SendPrepare struct {
	Voter  Voter
	Round  uint64
	Ballot register.Ballot
	Dry    bool
	// Partitions is shared between the effects of a round; do not change it.
	Partitions []string
}

// Item is one partition's part of an Accept.
type Item struct {
	Partition string
	Ballot    register.Ballot
	Value     register.Value
}

// SendAccept is an Accept, first or renewal, for one voter.
type SendAccept struct {
	Voter Voter
	Round uint64
	// Items is shared between the effects of a round; do not change it.
	Items []Item
}

// Reserve asks for a ballot above the round, by a commit. The answer is
// Reserved or ReserveFailed with the same ID.
type Reserve struct {
	ID    uint64
	Above uint64
}

// Adopt makes an epoch live, by a commit. The answer is Adopted or AdoptFailed.
type Adopt struct {
	Partition string
	Epoch     fence.Epoch
	Ballot    register.Ballot
	// Planned: the owner before released the partition after a drain that left
	// nothing to wait for.
	Planned bool
}

// Drop ends an epoch and its leases, by a commit. The answer is Dropped or
// DropFailed.
type Drop struct {
	Partition string
	Epoch     fence.Epoch
}

// Held is a running head lease: the region may grant under Epoch until Until
// on its own clock. A later Held of the same epoch moves the end, never back.
type Held struct {
	Partition string
	Epoch     fence.Epoch
	Until     instant.Instant
}

// Lapsed ends a Held whose time is over, or that the Leader gives up.
type Lapsed struct {
	Partition string
	Epoch     fence.Epoch
}

// Released says that a Release is chosen. The Drop that follows it ends what is
// left of the epoch.
type Released struct {
	Partition string
	Epoch     fence.Epoch
}

func (SendPrepare) effect() {}
func (SendAccept) effect()  {}
func (Reserve) effect()     {}
func (Adopt) effect()       {}
func (Drop) effect()        {}
func (Held) effect()        {}
func (Lapsed) effect()      {}
func (Released) effect()    {}

// PrepareAnswer is a voter's answer on one partition. Refusals carry the
// record too.
type PrepareAnswer struct {
	Partition string
	// Rule is RuleNone when promised (dry: when it would be).
	Rule   register.Rule
	Record register.Record
	// Remaining is what the accepted value's head lease has left on the
	// voter's clock.
	Remaining time.Duration
	// Verdict is the voter's detector on the owner.
	Verdict register.Verdict
}

// AcceptAnswer is a voter's answer on one item.
type AcceptAnswer struct {
	Partition string
	// Rule is RuleNone when accepted, durably.
	Rule register.Rule
	// Record is what stands in the way. It must be filled on a refusal.
	Record register.Record
}
