package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/region/state"
)

// maxPool is how many idle connections the transport keeps per server. 0 would
// mean a dial, and a TLS handshake, per call.
const maxPool = 5

// Server is a member of the region's Raft group.
type Server struct {
	Name string
	// RaftID is "name/uuid".
	RaftID string
	Voter  bool
}

// Replica is this server's part in its region's Raft group. All methods are
// safe for concurrent use.
type Replica struct {
	cfg     Config
	log     *slog.Logger
	hlog    hclog.Logger
	id      raft.ServerID
	dir     *dataDir
	stores  *stores
	layer   *streams
	fsm     *fsm
	lead    *leadership
	prop    *proposer
	check   *checker
	pulse   *pulse
	metric  *metrics
	compact *compactor

	raft atomic.Pointer[raft.Raft]

	// ready is closed when the directory is initialised.
	ready   chan struct{}
	failure chan error // the first fatal error
	// stopped is closed when Raft has stopped: nothing will be answered any more.
	stopped  chan struct{}
	stopping atomic.Bool

	futures tally // waiters on Raft futures
	asking  tally // questions of leadership checks

	mu       sync.Mutex // guards what follows and initialisation
	isReady  bool
	joining  bool     // Run does not wait for Bootstrap
	booted   []Server // what Bootstrap was told
	running  bool
	released bool
}

// Open checks, locks and opens the data directory. It starts nothing; call Run,
// or Close to give the directory back. A refusal changes nothing on disk.
func Open(ctx context.Context, cfg Config) (*Replica, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	dir, err := openDataDir(cfg.DataDir, meta{Cluster: cfg.Cluster, Region: cfg.Region, Server: cfg.Name})
	if err != nil {
		return nil, err
	}
	r := &Replica{
		cfg: cfg, log: cfg.Logger, hlog: newHlog(cfg.Logger, "raft"),
		id: idOf(cfg.Name, dir.meta.UUID), dir: dir,
		lead: &leadership{gained: make(chan struct{}, 1)}, pulse: newPulse(), metric: newMetrics(cfg.Registerer),
		ready: make(chan struct{}), failure: make(chan error, 1), stopped: make(chan struct{}),
	}
	r.layer = newStreams(cfg.Stream, r.id, cfg)
	r.fsm = newFSM(cfg.Name, cfg.Observer, r.lead, r.fatal)
	r.prop = newProposer(r, cfg.QueueLimit, cfg.EntriesInFlight)
	r.check = newChecker(r)
	r.compact = newCompactor(r)
	r.stores, err = openStores(storeOptions{
		dir: cfg.DataDir, segmentSize: cfg.segmentSize, boltLog: cfg.boltLog, logCache: cfg.logCache,
		guard: newGuard(cfg.Disk, r.fatal, r.metric.stored), logger: r.hlog, log: r.log,
	})
	if err == nil {
		r.isReady, err = r.stores.initialised()
	}
	if err != nil {
		err = fmt.Errorf("data directory %s: %w", cfg.DataDir, err)
		if r.stores != nil {
			err = errors.Join(err, r.stores.close())
		}
		return nil, errors.Join(err, dir.close())
	}
	r.stores.snaps.leading = func() bool {
		rf := r.raft.Load()
		return rf != nil && rf.State() == raft.Leader
	}
	if !cfg.StoreFirst {
		r.stores.logs.late.leads, r.stores.logs.late.failed = r.commitsWithOthers, r.resign
	}
	if r.isReady {
		close(r.ready)
	}
	return r, nil
}

// fatal records the first error that must end this server; Run returns it.
func (r *Replica) fatal(err error) {
	select {
	case r.failure <- err:
		r.log.Error("stopping", "reason", err)
	default:
	}
}

// RaftID is this server's Raft id, "name/uuid".
func (r *Replica) RaftID() string { return string(r.id) }

// View is the state as of the newest entry applied here. A follower's may be
// old. It may wait while an entry is applied.
func (r *Replica) View() state.View { return r.fsm.View() }

// Initialised reports whether this server belongs to a group.
func (r *Replica) Initialised() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.joined()
}

// Bootstrap makes this server a voter of the group of these servers; every one
// of them must be told the same. It is idempotent while the group still has
// these servers, may be repeated after a crash, and lets Run start Raft. The own
// entry must carry this directory's Raft id: a list made for another data
// directory of the same name is refused [F3].
func (r *Replica) Bootstrap(servers []Server) error {
	conf, err := r.configuration(servers)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.released {
		return ErrClosed
	}
	if r.joining && !r.joined() {
		return fmt.Errorf("server %s waits to be added to a group; to make it one of a new group, start it without --join", r.cfg.Name)
	}
	if r.isReady {
		have := r.booted
		if r.raft.Load() != nil {
			have = r.Servers()
		}
		switch {
		case have == nil:
			return ErrStarting
		case slices.Equal(sorted(have), sorted(servers)):
			return nil
		}
		return fmt.Errorf("server %s is already a member of a group of other servers (%v); "+
			"to add or replace a server, change that group", r.cfg.Name, have)
	}
	if err := r.stores.bootstrap(conf); err != nil {
		return fmt.Errorf("bootstrap: %w", err)
	}
	r.isReady, r.booted = true, slices.Clone(servers)
	close(r.ready)
	r.log.Info("bootstrapped", "raft-id", string(r.id), "servers", len(servers))
	return nil
}

func (r *Replica) configuration(servers []Server) (raft.Configuration, error) {
	var conf raft.Configuration
	var errs []error
	self := false
	for _, s := range servers {
		id := raft.ServerID(s.RaftID)
		switch {
		case s.Name == "" || nameOf(id) != s.Name || len(s.RaftID) <= len(s.Name)+1:
			errs = append(errs, fmt.Errorf("server %q: raft id %q is not %q with a uuid; ask the server for it", s.Name, s.RaftID, s.Name+"/"))
		case s.Name == r.cfg.Name && id != r.id:
			errs = append(errs, fmt.Errorf("server %q: its raft id is %s, not %s: the list was made for another data directory; "+
				"ask the server again, and if its data was lost, remove the old member first", s.Name, r.id, id))
		case s.Name == r.cfg.Name && !s.Voter:
			errs = append(errs, fmt.Errorf("server %q: is to be a voter to bootstrap", s.Name))
		case s.Name == r.cfg.Name:
			self = true
		}
		suffrage := raft.Nonvoter
		if s.Voter {
			suffrage = raft.Voter
		}
		for _, o := range conf.Servers {
			if o.ID == id || o.Address == raft.ServerAddress(s.Name) {
				errs = append(errs, fmt.Errorf("server %q: listed twice", s.Name))
			}
		}
		conf.Servers = append(conf.Servers, raft.Server{Suffrage: suffrage, ID: id, Address: raft.ServerAddress(s.Name)})
	}
	if !self && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("servers: %s is not among them", r.id))
	}
	if err := errors.Join(errs...); err != nil {
		return conf, fmt.Errorf("bootstrap: %w", err)
	}
	return conf, nil
}

func sorted(s []Server) []Server {
	s = slices.Clone(s)
	slices.SortFunc(s, func(a, b Server) int {
		switch {
		case a.RaftID < b.RaftID:
			return -1
		case a.RaftID > b.RaftID:
			return 1
		}
		return 0
	})
	return s
}

// Servers returns the latest Raft configuration known here; nil while Raft
// does not run.
func (r *Replica) Servers() []Server {
	rf := r.raft.Load()
	if rf == nil {
		return nil
	}
	f := rf.GetConfiguration()
	if f.Error() != nil {
		return nil
	}
	var out []Server
	for _, s := range f.Configuration().Servers {
		out = append(out, Server{Name: string(s.Address), RaftID: string(s.ID), Voter: s.Suffrage == raft.Voter})
	}
	return out
}

// commitsWithOthers reports whether this server leads a group in which an entry
// commits only with another server's answer.
func (r *Replica) commitsWithOthers() bool {
	rf := r.raft.Load()
	if rf == nil || rf.State() != raft.Leader {
		return false
	}
	f := rf.GetConfiguration()
	if f.Error() != nil {
		return false
	}
	voters := 0
	for _, s := range f.Configuration().Servers {
		if s.Suffrage == raft.Voter {
			voters++
		}
	}
	return voters > 1
}

// resign makes Raft store an entry, so that a leader whose disk has failed steps
// down, answers what is in flight, and does not keep the others calm until it is
// stopped.
func (r *Replica) resign() {
	if rf := r.raft.Load(); rf != nil {
		rf.Barrier(r.cfg.StoreLimit) // its answer tells nobody anything
	}
}

// Stats is what status shows of this server.
type Stats struct {
	Initialised bool
	RaftID      string
	State       string
	Term        uint64
	Leader      string
	// Applied is the newest entry applied to the state machine, Commit the newest
	// known to be committed, Last the newest in the log.
	Applied, Commit, Last uint64
	// Snapshot is where the newest snapshot ends, First the oldest entry in the log,
	// LogBytes about the size of the log's entries.
	Snapshot, First, LogBytes uint64
	// LastContact is the time since this follower heard its leader; 0 on a leader,
	// negative if never.
	LastContact time.Duration
	Servers     []Server
	// InFlight entries and Queued commands of the proposer.
	InFlight, Queued int
}

// Stats returns numbers of this moment.
func (r *Replica) Stats() Stats {
	s := Stats{Initialised: r.Initialised(), RaftID: r.RaftID(), State: "stopped", Servers: r.Servers()}
	s.Applied = r.fsm.applied.Load()
	s.Snapshot = r.stores.snaps.newest.Load()
	r.prop.mu.Lock()
	s.InFlight = r.prop.inFlight
	for i := range r.prop.lanes {
		s.Queued += len(r.prop.lanes[i].items)
	}
	r.prop.mu.Unlock()
	rf := r.raft.Load()
	if rf == nil {
		return s
	}
	s.State = rf.State().String()
	s.Leader, s.Term, _ = r.Leader()
	s.Commit, s.Last = rf.CommitIndex(), rf.LastIndex()
	if first, err := r.stores.logs.FirstIndex(); err == nil {
		s.First, s.LogBytes = first, r.stores.logs.bytesFrom(first)
	}
	switch at := rf.LastContact(); {
	case rf.State() == raft.Leader:
	case at.IsZero():
		s.LastContact = -1
	default:
		s.LastContact = time.Since(at)
	}
	return s
}

// whenDone calls do once with the future's response or error, from a goroutine
// of its own. A future that Raft never answers, because it stopped first, holds
// that goroutine: Run waits for all of them while Raft still answers.
func (r *Replica) whenDone(f raft.ApplyFuture, do func(resp any, err error)) {
	r.futures.run(func() {
		if err := f.Error(); err != nil {
			do(nil, err)
			return
		}
		do(f.Response(), nil)
	})
}
