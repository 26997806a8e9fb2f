package replica

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/internal/fsync"
)

// SeedConfig says what a data directory is made of.
type SeedConfig struct {
	// DataDir must be absent or empty.
	DataDir         string
	Cluster, Region string
	// RaftID of the server, one of Servers, which are its group.
	RaftID  string
	Servers []Server
	// Index and Term of the last entry that the state has; both over 0.
	Index, Term uint64
	// Snapshot writes the state.
	Snapshot func(io.Writer) error
}

// Seed makes the data directory of a server of a group that begins with a state:
// a snapshot, no log, and the snapshot's term as the current one. It appears under
// its name complete and synced, or not at all.
func Seed(c SeedConfig) (err error) {
	name, id, _ := strings.Cut(c.RaftID, "/")
	fail := func(err error) error { return fmt.Errorf("data directory %s: %w", c.DataDir, err) }
	if c.Index == 0 || c.Term == 0 || name == "" || id == "" {
		return fail(fmt.Errorf("seed: raft id %q, index %d, term %d: all must be given", c.RaftID, c.Index, c.Term))
	}
	path := filepath.Clean(c.DataDir)
	switch list, err := os.ReadDir(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return unusable(c.DataDir, err)
	case len(list) > 0:
		return fail(fmt.Errorf("not empty (%s); give an empty or a new directory", list[0].Name()))
	}
	parent := filepath.Dir(path)
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return unusable(c.DataDir, err)
	}
	temp, err := os.MkdirTemp(parent, "."+filepath.Base(path)+".seed-")
	if err != nil {
		return unusable(c.DataDir, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(temp))
		}
	}()
	if err := createDataDir(temp, meta{Cluster: c.Cluster, Region: c.Region, Server: name, UUID: id}); err != nil {
		return err
	}
	if err := c.fill(temp); err != nil {
		return fail(err)
	}
	if err := os.Rename(temp, path); err != nil {
		return fail(err)
	}
	return fsync.Dir(parent)
}

// fill writes the stores of a seeded directory.
func (c SeedConfig) fill(dir string) (err error) {
	conf := raft.Configuration{}
	for _, s := range c.Servers {
		suffrage := raft.Nonvoter
		if s.Voter {
			suffrage = raft.Voter
		}
		conf.Servers = append(conf.Servers, raft.Server{Suffrage: suffrage, ID: raft.ServerID(s.RaftID), Address: raft.ServerAddress(s.Name)})
	}
	quiet := slog.New(slog.DiscardHandler)
	failed := func(error) {}
	stores, err := openStores(storeOptions{
		dir: dir, segmentSize: defaultSegmentSize, logCache: logCacheSize, log: quiet, logger: newHlog(quiet, "raft"),
		guard: newGuard(nil, failed, func(string, time.Duration, error) {}),
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stores.close()) }()
	if err := stores.stable.SetUint64(keyCurrentTerm, c.Term); err != nil {
		return fmt.Errorf("store the current term: %w", err)
	}
	sink, err := stores.snaps.Create(raft.SnapshotVersionMax, c.Index, c.Term, conf, c.Index, nil)
	if err != nil {
		return err
	}
	if err := c.Snapshot(sink); err != nil {
		return errors.Join(fmt.Errorf("write the snapshot: %w", err), sink.Cancel())
	}
	if err := sink.Close(); err != nil {
		return err
	}
	return fsync.Dir(dir)
}
