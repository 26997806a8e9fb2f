package check

import (
	"time"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// Record is what was collected of one play of a scenario.
type Record struct {
	// D is the length of a head lease, RTT the longest round trip between
	// sites, TTL of the workers' sessions.
	D, RTT, TTL time.Duration
	Partitions  []string
	// Began when the steps began, Ended when the watch did.
	Began, Ended instant.Instant
	Faults       []Fault
	Answers      []Answer
	Actors       []Actor
	Journal      []Entry
	// Watched are the processes that had to be heard.
	Watched []Watched
	Stalls  []Stall
	// Pressure of the drill's time, as far as the kernel tells.
	Pressure []Pressure
	// Histories are the verdicts on the histories of single regions.
	Histories []History
	// SettledAt is when the cluster was settled after the last fault; 0: it
	// was not, and Unsettled says why.
	SettledAt instant.Instant
	Unsettled string
	// Lookups of locks that workers take, in the order in which they were answered.
	Lookups []Lookup
	// Late is what became of the frozen worker's write.
	Late Late
}

// Fault is one fault as it was played.
type Fault struct {
	Step  int
	Title string
	Kind  plan.Kind
	// Sites and processes concerned, by name; those whose words are missed
	// while it lasts are in Silences.
	Of       []string
	Silences []string
	// From is when the first part of it was in force, Full when all of it
	// was, Until when it began to end.
	From, Full, Until instant.Instant
	// Effect is what was measured, in words; NoEffect why it did not take
	// effect, empty if it did.
	Effect, NoEffect string
}

// Said is what a region says of a partition.
type Said struct {
	Partition string
	Epoch     uint64
	// Left of the head lease; 0: not held.
	Left time.Duration
	// Released: by its own word it is releasing the partition, or nobody owns it.
	Released bool
}

// Answer is a region's answer to a question about its partitions.
type Answer struct {
	Region          string
	Asked, Answered instant.Instant
	Says            []Said
	// Term of the leader that answered. A new leader holds nothing before a
	// round of its own, whatever the one before still may.
	Term uint64
	// Restarts of that leader's campaign: with each it gave up what it held,
	// while what it had sent stays good.
	Restarts uint64
}

// Kind of what a worker did.
type Kind string

// What workers do. Every event of a held lease carries what the worker
// believes at that moment.
const (
	Asked    Kind = "asked"
	Acquired Kind = "acquired"
	Wrote    Kind = "wrote"
	Refused  Kind = "refused"
	Failed   Kind = "failed" // no answer: it may have happened
	Released Kind = "released"
	Lost     Kind = "lost"
	Frozen   Kind = "frozen"
	Thawed   Kind = "thawed"
)

// Event is one thing that a worker did.
type Event struct {
	Kind Kind
	// Sent is when the call was made, At when it was over. For Acquired Sent
	// is when it was asked for.
	Sent, At instant.Instant
	Token    fence.Token
	// Region that granted.
	Region string
	// Until the worker believes at At that nobody else can hold the lock; 0: it does
	// not believe.
	Until instant.Instant
	// Waited: somebody else held it when it was asked for.
	Waited bool
	Reason string
}

// Actor is one worker on one lock.
type Actor struct {
	Name, Lock, Partition string
	// Freezes: it was to be stopped between its check and its send.
	Freezes bool
	// Probes: it only measures; its grants are not the workload's.
	Probes bool
	Events []Event
}

// Entry is an entry of the resource's journal: an accepted claim or write, or
// a refused one.
type Entry struct {
	N        uint64
	Op       string
	Resource string
	Writer   string
	Token    fence.Token
	Accepted bool
}

// Watched is a process, or a region, whose words are needed.
type Watched struct {
	Name string
	// Heard are the instants of its answers, in order.
	Heard []instant.Instant
}

// Stall is a time in which this machine did not run the drill though it was
// due.
type Stall struct {
	At  instant.Instant
	For time.Duration
}

// Pressure is the share of the time in which something on this machine waited
// for what it names.
type Pressure struct {
	For   string
	Share float64
}

// History is the verdict on what the clients of one region were told.
type History struct {
	Region string
	// Locks whose whole history was checked, and Operations in them.
	Locks, Operations int
	Violations        []string
	// Undecided are locks for which no answer was found in time.
	Undecided []string
	// Partly says what was not checked, and why.
	Partly []string
}

// Late is the frozen worker's write.
type Late struct {
	// Sent: the worker woke up and sent it; Seen: it is in the journal.
	Sent, Seen, Accepted bool
	Token, Mark          fence.Token
}
