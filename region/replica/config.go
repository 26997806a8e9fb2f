package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headlease/headlease/internal/clock"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// Timing is the pace of a Raft group.
type Timing struct {
	// Heartbeat: a follower that hears nothing for so long campaigns when another
	// one does, or a third later by itself. It also bounds a leadership check.
	Heartbeat time.Duration
	// Election: a candidate tries again after once to twice this long, which is not
	// under a third more than Heartbeat.
	Election time.Duration
	// LeaderLease: a leader that no quorum has answered for this long steps down.
	LeaderLease time.Duration
	// Commit: an idle follower learns a commit after once to twice this long: the
	// leader then sends to each, whether it has something to say or not. It would
	// also drain a backlog beyond maxAppendEntries, which the bound on entries in
	// flight keeps from being there (docs/decisions/0067).
	Commit time.Duration
}

// TimingLAN suits servers within a few milliseconds of each other.
func TimingLAN() Timing {
	return Timing{
		Heartbeat: 150 * time.Millisecond, Election: 150 * time.Millisecond,
		LeaderLease: 150 * time.Millisecond, Commit: 25 * time.Millisecond,
	}
}

// TimingCalm suits many servers on few cores: development and CI.
func TimingCalm() Timing {
	return Timing{
		Heartbeat: 500 * time.Millisecond, Election: 500 * time.Millisecond,
		LeaderLease: 250 * time.Millisecond, Commit: 25 * time.Millisecond,
	}
}

// ParseTiming returns the preset called "lan" (also "") or "calm".
func ParseTiming(preset string) (Timing, error) {
	switch preset {
	case "", "lan":
		return TimingLAN(), nil
	case "calm":
		return TimingCalm(), nil
	}
	return Timing{}, fmt.Errorf("timing: unknown preset %q; choose lan or calm", preset)
}

// Observer is told what the FSM does. Applied and Restored run in the FSM
// goroutine, in log order, Deposed in the leadership goroutine; Deposed never
// runs at the same time as an Applied that brings an own TermBegun. None may
// block or call Propose, Check, Run or Close.
type Observer interface {
	// Applied follows the entry at index, of the given term. Replica.View is the
	// state just after it. On a TermBegun event, Replica.Begins tells whether it
	// begins this server's own leadership; only then are tables to be built.
	Applied(index, term uint64, events []state.Event)
	// Restored follows a snapshot that replaced the whole state. It never
	// happens to a leader after Open.
	Restored()
	// Deposed follows the end of this server's leadership of term, once for
	// every term for which Replica.Begins was true.
	Deposed(term uint64)
}

// TermAsker asks another server of the region for its current Raft term, over a
// connection that this check owns or shares with other checks, by a request
// sent after the call. The answer carries the answering server's Raft id.
type TermAsker interface {
	AskTerm(ctx context.Context, server string) (*pb.CurrentTermResponse, error)
}

// Disk is asked before each store write ("raft/append", "raft/compact",
// "raft/stable", "raft/snapshot"). It may delay the write or fail it: the seam of drills.
type Disk interface {
	Before(op string) error
}

// Config configures a Replica. Zero values take the documented defaults.
type Config struct {
	// Name of this server, unique in the cluster; no slash.
	Name string
	// Cluster and Region that this server belongs to.
	Cluster, Region string
	// DataDir is made if absent. One process at a time.
	DataDir string
	// Stream carries Raft between the servers; the Replica closes it. It is
	// asked to dial names, or what Resolve makes of them.
	Stream raft.StreamLayer
	// Resolve turns a server's name into what Stream dials, at each dial. Nil:
	// Stream dials names.
	Resolve func(name string) (string, error)
	// Timing defaults to TimingLAN.
	Timing Timing
	// Clock stamps pulses and checks.
	Clock clock.Clock
	// Observer may be nil.
	Observer Observer
	// Terms asks the other servers during a leadership check.
	Terms TermAsker
	// Progress asks the other servers how far they are; nil: nobody is asked, each
	// server writes its snapshots when it likes, and nothing is kept for laggards.
	Progress ProgressAsker
	// Pulsed is called, and must not block, when a pulse is committed: what a stale
	// one held back may go on. May be nil.
	Pulsed func()
	// FeatureLevel is the highest that this program knows: told to the leader.
	FeatureLevel uint32
	// Disk may be nil: no faults.
	Disk Disk
	// Registerer of the replica's metrics; may be nil.
	Registerer prometheus.Registerer
	// Logger defaults to slog.Default.
	Logger *slog.Logger
	// Exit ends the process at once; called by the watchdog while a store call
	// hangs, when nothing can be stopped in order any more, and when a new term
	// cannot be written. The default logs and exits with status 75.
	Exit func(reason error)

	// StoreLimit bounds one store call; default 1.5 s [F30].
	StoreLimit time.Duration
	// TransportTimeout bounds a Raft dial and each Raft call; default 1.5 s. A
	// peer that vanished silently blocks its heartbeat for this long.
	TransportTimeout time.Duration
	// StoreFirst has a leader write an entry before it sends it: for tests of what a
	// leader does whose main loop hangs in a write.
	StoreFirst bool
	// StopTimeout bounds each step of an orderly stop; default 5 s.
	StopTimeout time.Duration

	// QueueLimit bounds commands waiting to be proposed; default 8192. The urgent
	// lane has a quarter of it for itself.
	QueueLimit int
	// EntriesInFlight bounds entries proposed and not yet applied; default 8.
	EntriesInFlight int

	// SnapshotInterval is how often the log's length is looked at and a leader asks
	// the others how far they are; default 1 s.
	SnapshotInterval time.Duration
	// SnapshotThreshold is how many entries, and SnapshotBytes how many bytes of
	// them, behind the last snapshot make the next one due; defaults 20000 and 64
	// MiB. A restart reads and applies them again.
	SnapshotThreshold, SnapshotBytes uint64
	// TrailingLogs entries, but at most 32 MiB of them, stay behind a snapshot
	// whoever needs them; default 10000.
	TrailingLogs uint64
	// RetainBytes bounds the entries, in bytes, and RetainTime the time for which
	// the log is kept for a server that lags or has stopped answering; defaults 256
	// MiB and 10 min. Beyond, it is sent a snapshot.
	RetainBytes uint64
	RetainTime  time.Duration

	// segmentSize of the log store in bytes; default 16 MiB.
	segmentSize int
	// boltLog stores log entries in bbolt: for benchmarks.
	boltLog bool
	// logCache is how many entries are kept in memory; default logCacheSize.
	logCache int
}

// defaultSegmentSize of the log store, in bytes.
const defaultSegmentSize = 16 << 20

// exitStatus tells a supervisor to start the process again: EX_TEMPFAIL.
const exitStatus = 75

func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if c.Timing == (Timing{}) {
		c.Timing = TimingLAN()
	}
	if c.Observer == nil {
		c.Observer = noObserver{}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Exit == nil {
		log := c.Logger
		c.Exit = func(reason error) {
			log.Error("ending the process", "reason", reason)
			os.Exit(exitStatus)
		}
	}
	def(&c.StoreLimit, 1500*time.Millisecond)
	def(&c.TransportTimeout, 1500*time.Millisecond)
	def(&c.StopTimeout, 5*time.Second)
	def(&c.SnapshotInterval, time.Second)
	def(&c.RetainTime, 10*time.Minute)
	if c.QueueLimit == 0 {
		c.QueueLimit = 8192
	}
	if c.EntriesInFlight == 0 {
		c.EntriesInFlight = 8
	}
	if c.SnapshotThreshold == 0 {
		c.SnapshotThreshold = 20000
	}
	if c.SnapshotBytes == 0 {
		c.SnapshotBytes = 64 << 20
	}
	if c.RetainBytes == 0 {
		c.RetainBytes = 256 << 20
	}
	if c.TrailingLogs == 0 {
		c.TrailingLogs = 10000
	}
	if c.logCache == 0 {
		c.logCache = logCacheSize
	}
	if c.segmentSize == 0 {
		c.segmentSize = defaultSegmentSize
	}
	return c
}

// Validate returns all faults at once.
func (c Config) Validate() error {
	var errs []error
	bad := func(cond bool, format string, args ...any) {
		if cond {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	bad(c.Name == "", "name: empty; give the server's name from the cluster file")
	bad(strings.ContainsAny(c.Name, "/ "), "name: %q contains a slash or a space; a Raft id is name/uuid", c.Name)
	bad(c.Cluster == "", "cluster: empty; give the cluster's name from the cluster file")
	bad(c.Region == "", "region: empty; give the region's name from the cluster file")
	bad(c.DataDir == "", "data directory: empty; give a directory that this server alone uses")
	bad(c.Stream == nil, "stream: nil; give a Raft stream layer")
	bad(c.Clock == nil, "clock: nil; give the process's lease clock")
	bad(c.Terms == nil, "terms: nil; give the means to ask the other servers for their terms")
	t := c.Timing
	if t != (Timing{}) {
		bad(t.Heartbeat < 5*time.Millisecond, "timing: heartbeat %v is under 5ms", t.Heartbeat)
		bad(t.Election < t.Heartbeat, "timing: election %v is under heartbeat %v", t.Election, t.Heartbeat)
		bad(t.LeaderLease < 5*time.Millisecond, "timing: leader lease %v is under 5ms", t.LeaderLease)
		bad(t.LeaderLease > t.Heartbeat, "timing: leader lease %v is over heartbeat %v", t.LeaderLease, t.Heartbeat)
		bad(t.Commit < time.Millisecond, "timing: commit %v is under 1ms", t.Commit)
	}
	for _, f := range []struct {
		name string
		d    time.Duration
	}{
		{"store limit", c.StoreLimit}, {"transport timeout", c.TransportTimeout},
		{"stop timeout", c.StopTimeout}, {"snapshot interval", c.SnapshotInterval},
		{"retain time", c.RetainTime},
	} {
		bad(f.d < 0, "%s: %v is negative; leave it out for the default", f.name, f.d)
	}
	bad(c.QueueLimit < 0, "queue limit: %d is negative; leave it out for the default", c.QueueLimit)
	bad(c.EntriesInFlight < 0 || c.EntriesInFlight > maxAppendEntries,
		"entries in flight: %d is not in 1..%d", c.EntriesInFlight, maxAppendEntries)
	return errors.Join(errs...)
}

type noObserver struct{}

func (noObserver) Applied(uint64, uint64, []state.Event) {}
func (noObserver) Restored()                             {}
func (noObserver) Deposed(uint64)                        {}
