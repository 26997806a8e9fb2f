package plan

import (
	"slices"
	"time"
)

// Kind of a step: what it does.
type Kind string

// The kinds of steps.
const (
	Cut            Kind = "cut"
	OneWay         Kind = "one-way"
	Isolate        Kind = "isolate"
	Delay          Kind = "delay"
	Loss           Kind = "loss"
	Flap           Kind = "flap"
	Kill           Kind = "kill"
	Pause          Kind = "pause"
	Restart        Kind = "restart"
	DiskHang       Kind = "disk-hang"
	DiskFull       Kind = "disk-full"
	ClockStep      Kind = "clock-step"
	RedisDown      Kind = "redis-down"
	Transfer       Kind = "transfer"
	HandOver       Kind = "hand-over"
	RollingRestart Kind = "rolling-restart"
	MassRedeploy   Kind = "mass-redeploy"
	Herd           Kind = "herd"
	Freeze         Kind = "freeze"
	Thaw           Kind = "thaw"
	Await          Kind = "await"
)

// Scenario is a drill as its file says it.
type Scenario struct {
	Name, Summary string
	// About says for people what is shown and why it should hold.
	About    string
	Cluster  Shape
	Workload Workload
	Steps    []Step
	// After is how long the drill goes on watching when the last step is over.
	After  Span
	Expect []Expectation
	// Control has the drill played a second time with the resource's guard
	// off, which must let a violation through: so that the drill can fail.
	Control bool
}

// Shape of the private cluster; a running cluster has its own.
type Shape struct {
	D                           time.Duration
	Regions, Servers, Witnesses int
	// RTT as `headlease dev --rtt` reads it.
	RTT string
	// Redis: each region has a lease cache.
	Redis bool
}

// Workload beside the steps.
type Workload struct {
	// Sessions, spread over the regions.
	Sessions int
	// Locks, spread over the partitions; each has one holder and Waiters in
	// its queue.
	Locks, Waiters int
	// Writes per second under each held lock, fenced.
	Writes float64
	// Reads per second at each region server, of who holds the locks; 0: none.
	Reads float64
	// Hold is how long a lease is held before it is released; 0: as long as it
	// lasts.
	Hold time.Duration
	// TTL of the sessions.
	TTL time.Duration
}

// Step is one thing that is done to the cluster.
type Step struct {
	// Line of the file.
	Line int
	Do   Kind
	// At is counted from the first moment of the quiet, working cluster.
	At Span
	// For is how long the fault lasts, or how long a process stays dead; 0
	// with a kill: until the drill is over.
	For Span
	// Target of a fault of processes.
	Target Target
	// From and To of a fault of links; with Both also the other way. To alone:
	// the region that gets a partition, or the server that is to lead its region.
	From, To Target
	Both     bool
	// Planes that a fault of links concerns; none: all.
	Planes []string
	// Add and Jitter of a delay, Share of a loss (0 to 1), Up and Down of a
	// flapping link, Step of a clock.
	Add, Jitter time.Duration
	Share       float64
	Up, Down    time.Duration
	Step        time.Duration
	// Clock that steps: WallClock or LeaseClock.
	Clock string
	// How a Redis is down: KillIt or PauseIt.
	How string
	// Store that a disk fault concerns; empty: all.
	Store string
	// Clients of a herd.
	Clients int
	// Pause between the servers of a rolling restart.
	Pause time.Duration
	// Partition of a transfer, a freeze, a herd or an awaited promotion.
	Partition Part
	// Until is what an await waits for, Within how long at most.
	Until  string
	Within Span
}

// Processes reports whether the step signals or starts processes.
func (s Step) Processes() bool {
	return slices.Contains([]Kind{Kill, Pause, Restart, RollingRestart}, s.Do)
}

// Links reports whether the step breaks links.
func (s Step) Links() bool {
	return slices.Contains([]Kind{Cut, OneWay, Isolate, Delay, Loss, Flap}, s.Do)
}

// The clocks of a process.
const (
	// WallClock is what a time server sets, LeaseClock what leases are counted on.
	WallClock  = "wall"
	LeaseClock = "lease"
)

// How a process is taken down.
const (
	KillIt  = "kill"
	PauseIt = "pause"
)

// What an await may wait for.
const (
	UntilPromotion = "promotion"
	UntilSettled   = "settled"
)

// Part names a partition: by name, or by its number in the cluster file, from 1.
type Part struct {
	Name   string
	Number int
}

// IsZero reports whether nothing is named.
func (p Part) IsZero() bool { return p == Part{} }

// Who is the kind of a target.
type Who int

// The kinds of targets.
const (
	Nobody Who = iota
	// TheRegion is a whole region, by name or by role.
	TheRegion
	// TheLeader is the server that leads a region, TheFollowers are the others,
	// AFollower is one of them.
	TheLeader
	TheFollowers
	AFollower
	// TheServer and TheWitness are processes by name.
	TheServer
	TheWitness
	// SomeWitnesses are so many of them; AllWitnesses every one.
	SomeWitnesses
	AllWitnesses
	// AllRegions is every region.
	AllRegions
	// AllSites is every region and every witness.
	AllSites
)

// Role of a region towards a partition.
type Role int

// The roles.
const (
	// Named regions have a name and no role.
	Named Role = iota
	// Owner of the partition.
	Owner
	// Next in its preference list beside the owner.
	Next
	// Bystander is the last in the list that is neither owner nor next.
	Bystander
)

// Target is whom a step concerns.
type Target struct {
	Who Who
	// Name of the region, the server or the witness.
	Name string
	// Count of witnesses.
	Count int
	// Role and Partition of the region, if it has no name.
	Role      Role
	Partition Part
	// Text as it was written.
	Text string
}

func (t Target) String() string { return t.Text }

// Defaults of what a file leaves out.
const (
	DefaultD       = 2 * time.Second
	DefaultTTL     = 5 * time.Second
	DefaultServers = 3
)
