package replica

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"
	"github.com/hashicorp/raft-wal/types"
	"go.etcd.io/bbolt"
)

const (
	// logCacheSize is more entries than are ever on their way: a few proposed, and
	// what the followers have not been sent yet. Each may be 64 KiB.
	logCacheSize    = 512
	retainSnapshots = 2
	boltLockTimeout = time.Second // bbolt's default waits for ever
	// maxAppendEntries is how many entries go in one message, at 64 KiB each at
	// most. hashicorp/raft allocates room for as many twice per entry and server,
	// however few there are: at 1024, three quarters of all garbage with one caller.
	// The proposer has few, large entries in flight, so that more gains nothing.
	maxAppendEntries = 128
)

// keyCurrentTerm is hashicorp/raft's key of the current term.
var keyCurrentTerm = []byte("CurrentTerm")

// stores are the durable parts of a server, all guarded.
type stores struct {
	guard   *guard
	logs    *logStore
	stable  raft.StableStore
	snaps   *snapStore
	closers []func() error
}

type storeOptions struct {
	dir         string
	segmentSize int
	boltLog     bool
	logCache    int
	guard       *guard
	logger      hclog.Logger
	log         *slog.Logger
}

// openStores opens log, stable store and snapshots. Log entries are in a
// write-ahead log, the few stable values in bbolt (docs/decisions/0010).
func openStores(o storeOptions) (_ *stores, err error) {
	s := &stores{guard: o.guard}
	defer func() {
		if err != nil {
			_ = s.close()
		}
	}()
	if err := cleanSnapshots(o.dir); err != nil {
		return nil, fmt.Errorf("clean unfinished snapshots: %w", err)
	}
	bolt, err := raftboltdb.New(raftboltdb.Options{
		Path:        filepath.Join(o.dir, stableName),
		BoltOptions: &bbolt.Options{Timeout: boltLockTimeout},
	})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", stableName, err)
	}
	s.closers = append(s.closers, bolt.Close)
	s.stable = &guardedStable{guard: o.guard, in: bolt}

	var logs raft.LogStore = bolt
	if !o.boltLog {
		dir := filepath.Join(o.dir, logName)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		// The log's own Close leaves its meta store open and locked, and a second
		// open in this process would wait for ever: close it ourselves, last.
		db := &metadb.BoltMetaDB{}
		repaired, err := repairTail(dir, db, o.segmentSize)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open %s: %w", logName, err), db.Close())
		}
		if repaired {
			o.log.Info("the log's last file was full and is copied into a longer one", "path", dir)
		}
		w, err := wal.Open(dir, wal.WithMetaStore(db), wal.WithSegmentSize(o.segmentSize), wal.WithLogger(o.logger.Named("log")))
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open %s: %w", logName, err), db.Close())
		}
		s.closers = append(s.closers, db.Close, w.Close)
		logs = w
	}
	old, err := sealedBytes(filepath.Join(o.dir, logName), int64(o.segmentSize))
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", logName, err)
	}
	if s.logs, err = newLogStore(&guardedLog{guard: o.guard, in: logs}, o.logCache, old); err != nil {
		return nil, fmt.Errorf("open %s: %w", logName, err)
	}
	if s.snaps, err = openSnapStore(o.dir, o.guard, o.log); err != nil {
		return nil, fmt.Errorf("open snapshots: %w", err)
	}
	return s, nil
}

// close closes in reverse order of opening.
func (s *stores) close() error {
	var errs []error
	for i := len(s.closers) - 1; i >= 0; i-- {
		errs = append(errs, s.closers[i]())
	}
	s.closers = nil
	return errors.Join(errs...)
}

// initialised reports whether this directory belongs to a group: it has a
// Raft configuration, as an entry or in a snapshot. A term alone does not count:
// bootstrap stores it first and may have crashed after it.
func (s *stores) initialised() (bool, error) {
	last, err := s.logs.LastIndex()
	if err != nil {
		return false, fmt.Errorf("read the log's last index: %w", err)
	}
	if last > 0 {
		return true, nil
	}
	// A damaged snapshot counts too: this server has been a member.
	names, err := s.snaps.names()
	if err != nil {
		return false, fmt.Errorf("list snapshots: %w", err)
	}
	return len(names) > 0, nil
}

// bootstrap writes the first entry. Unlike raft.BootstrapCluster it can be
// repeated after a crash between its two writes: nothing but itself can have
// stored a term in a directory whose Raft has never run.
func (s *stores) bootstrap(c raft.Configuration) error {
	term, err := s.stable.GetUint64(keyCurrentTerm)
	if err != nil && !errors.Is(err, raftboltdb.ErrKeyNotFound) {
		return fmt.Errorf("read the current term: %w", err)
	}
	if term == 0 {
		if err := s.stable.SetUint64(keyCurrentTerm, 1); err != nil {
			return fmt.Errorf("store the current term: %w", err)
		}
	}
	entry := &raft.Log{Index: 1, Term: 1, Type: raft.LogConfiguration, Data: raft.EncodeConfiguration(c)}
	if err := s.logs.StoreLog(entry); err != nil {
		return fmt.Errorf("store the configuration entry: %w", err)
	}
	return nil
}

// Operations as the fault seam and the watchdog name them.
const (
	opAppend     = "raft/append"
	opCompact    = "raft/compact"
	opRead       = "raft/read"
	opStable     = "raft/stable"
	opStableRead = "raft/stable-read"
	opSnapshot   = "raft/snapshot"
)

// guardedLog watches every call and passes writes through the fault seam.
type guardedLog struct {
	guard *guard
	in    raft.LogStore
}

func (g *guardedLog) FirstIndex() (i uint64, err error) {
	err = g.guard.read(opRead, func() (err error) { i, err = g.in.FirstIndex(); return })
	return i, err
}

func (g *guardedLog) LastIndex() (i uint64, err error) {
	err = g.guard.read(opRead, func() (err error) { i, err = g.in.LastIndex(); return })
	return i, err
}

func (g *guardedLog) GetLog(index uint64, log *raft.Log) error {
	return g.guard.read(opRead, func() error { return g.in.GetLog(index, log) })
}

func (g *guardedLog) StoreLog(log *raft.Log) error {
	return g.guard.write(opAppend, func() error { return g.in.StoreLog(log) })
}

func (g *guardedLog) StoreLogs(logs []*raft.Log) error {
	return g.guard.write(opAppend, func() error {
		err := g.in.StoreLogs(logs)
		if errors.Is(err, types.ErrSealed) {
			// The log begins its next file in the background and only logs a failure.
			err = fmt.Errorf("the log's next file could not be made, as on a full or broken disk: %w", err)
		}
		return err
	})
}

func (g *guardedLog) DeleteRange(first, last uint64) error {
	return g.guard.write(opCompact, func() error { return g.in.DeleteRange(first, last) })
}

// IsMonotonic passes on that a write-ahead log takes no gaps; raft then empties
// it after installing a snapshot.
func (g *guardedLog) IsMonotonic() bool {
	m, ok := g.in.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// guardedStable does the same for term and vote.
type guardedStable struct {
	guard *guard
	in    raft.StableStore
}

func (g *guardedStable) Set(key, val []byte) error {
	return g.guard.write(opStable, func() error { return g.in.Set(key, val) })
}

func (g *guardedStable) SetUint64(key []byte, val uint64) error {
	return g.guard.write(opStable, func() error { return g.in.SetUint64(key, val) })
}

func (g *guardedStable) Get(key []byte) (val []byte, err error) {
	err = g.guard.read(opStableRead, func() (err error) { val, err = g.in.Get(key); return })
	return val, err
}

func (g *guardedStable) GetUint64(key []byte) (val uint64, err error) {
	err = g.guard.read(opStableRead, func() (err error) { val, err = g.in.GetUint64(key); return })
	return val, err
}

// lastTerm ends the process when a term cannot be written: hashicorp/raft panics
// then. That comes when a server whose disk has just failed, and which is being
// stopped for it, hears of a new term.
type lastTerm struct {
	raft.StableStore
	exit func(error)
}

func (l lastTerm) SetUint64(key []byte, val uint64) error {
	err := l.StableStore.SetUint64(key, val)
	if err != nil && bytes.Equal(key, keyCurrentTerm) {
		l.exit(err)
	}
	return err
}

// noDisk is the seam without faults.
type noDisk struct{}

func (noDisk) Before(string) error { return nil }
