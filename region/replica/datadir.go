package replica

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/google/uuid"

	"github.com/headlease/headlease/internal/fsync"
)

// metaFormat is the format of a server's data directory. A directory of another
// format is refused, never converted in silence.
const metaFormat = 1

const (
	metaName   = "server.json"
	metaTemp   = "server.json.tmp-"
	stableName = "stable.db"
	logName    = "log"
	snapsName  = "snapshots"
)

// meta says whose data a directory holds. It is written once, with the
// directory, and never again: the lock is on this file.
type meta struct {
	Format  int    `json:"format"`
	Cluster string `json:"cluster"`
	Region  string `json:"region"`
	Server  string `json:"server"`
	// UUID makes the Raft id name/uuid. It must live and die with the data: a
	// server that comes back without its data must not vote as the one that
	// voted before [F3].
	UUID string `json:"uuid"`
}

// dataDir is a checked and locked data directory.
type dataDir struct {
	path string
	meta meta
	lock *os.File
}

// openDataDir checks that the directory is own's (cluster, region and server)
// and locks it, making it if it is absent or empty. A refusal changes nothing on
// disk.
func openDataDir(path string, own meta) (*dataDir, error) {
	raw, err := os.ReadFile(filepath.Join(path, metaName))
	if errors.Is(err, fs.ErrNotExist) {
		if err := createDataDir(path, own); err != nil {
			return nil, err
		}
		raw, err = os.ReadFile(filepath.Join(path, metaName))
	}
	if err != nil {
		return nil, unusable(path, err)
	}
	m, err := parseMeta(raw)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %s: %w", path, metaName, err)
	}
	switch {
	case m.Format != metaFormat:
		return nil, fmt.Errorf("data directory %s: format %d, this program reads format %d; "+
			"use the program's version that made it, or an empty directory", path, m.Format, metaFormat)
	case m.Cluster != own.Cluster:
		return nil, fmt.Errorf("data directory %s: belongs to a server of cluster %q, not %q; "+
			"give this server its own directory", path, m.Cluster, own.Cluster)
	case m.Region != own.Region:
		return nil, fmt.Errorf("data directory %s: belongs to a server of region %q, not %q; "+
			"give this server its own directory", path, m.Region, own.Region)
	case m.Server != own.Server:
		return nil, fmt.Errorf("data directory %s: belongs to server %q, not %q; "+
			"give this server its own directory", path, m.Server, own.Server)
	}
	// The meta file is never replaced, so its inode is a good lock.
	f, err := os.OpenFile(filepath.Join(path, metaName), os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w", path, err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("data directory %s: in use by another process; "+
				"stop that process, or give this server its own directory", path)
		}
		return nil, fmt.Errorf("data directory %s: lock %s: %w", path, metaName, err)
	}
	return &dataDir{path: path, meta: m, lock: f}, nil
}

// unusable is the error of a path that the system refuses.
func unusable(path string, err error) error {
	return fmt.Errorf("data directory %s: %w; name a directory that this user may write", path, err)
}

func parseMeta(raw []byte) (meta, error) {
	var m meta
	dec := json.NewDecoder(bytes.NewReader(raw))
	if err := dec.Decode(&m); err != nil {
		return m, fmt.Errorf("not readable: %w; restore it, or use an empty directory", err)
	}
	if _, err := uuid.Parse(m.UUID); m.Format == metaFormat && err != nil {
		return m, fmt.Errorf("uuid %q: %w; restore the file, or use an empty directory", m.UUID, err)
	}
	return m, nil
}

// createDataDir puts a new meta file into an absent or empty directory. Of two
// processes at the same time, one wins and the other finds its file.
func createDataDir(path string, m meta) error {
	list, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return unusable(path, err)
	}
	for _, e := range list {
		if !strings.HasPrefix(e.Name(), metaTemp) {
			return fmt.Errorf("data directory %s: not empty (%s) and without %s, so not a server's data; "+
				"give an empty directory", path, e.Name(), metaName)
		}
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return unusable(path, err)
	}
	for _, e := range list {
		_ = os.Remove(filepath.Join(path, e.Name())) // left by a crash while creating
	}
	if m.UUID == "" {
		id, err := uuid.NewRandom()
		if err != nil {
			return fmt.Errorf("data directory %s: make a uuid: %w", path, err)
		}
		m.UUID = id.String()
	}
	m.Format = metaFormat
	raw, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("data directory %s: %w", path, err)
	}
	tmp := filepath.Join(path, metaTemp+m.UUID)
	if err := writeSynced(tmp, append(raw, '\n')); err != nil {
		return fmt.Errorf("data directory %s: %w", path, err)
	}
	err = os.Link(tmp, filepath.Join(path, metaName))
	_ = os.Remove(tmp)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("data directory %s: %w", path, err)
	}
	for _, dir := range []string{path, filepath.Dir(path)} {
		if err := fsync.Dir(dir); err != nil {
			return fmt.Errorf("data directory %s: %w", path, err)
		}
	}
	return nil
}

func writeSynced(name string, data []byte) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, bytes.NewReader(data))
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// cleanSnapshots removes snapshots that a crash left half written;
// hashicorp/raft only warns of them, at each listing, for ever. The directory
// is the file snapshot store's own, "snapshots" under the base it is given.
func cleanSnapshots(dir string) error {
	dir = filepath.Join(dir, snapsName)
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range list {
		if e.IsDir() && strings.HasSuffix(e.Name(), ".tmp") {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

func (d *dataDir) close() error { return d.lock.Close() }
