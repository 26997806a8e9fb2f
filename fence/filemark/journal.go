package filemark

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/fsync"
)

// Names within the guard's directory.
const (
	journalName = "marks"
	lockName    = "marks.lock"
)

// compactAbove is the journal's size, in bytes, from which it is written anew
// once three quarters of it are marks that later ones replaced.
const compactAbove = 8 << 20

// ErrLocked is returned by Open while another guard has the directory open.
var ErrLocked = errors.New("mark journal is in use")

// writer is the journal's open file; a test gives one that fails.
type writer interface {
	io.WriteCloser
	Sync() error
}

// journal is the file of marks. It is not safe for concurrent use.
type journal struct {
	dir    string
	lock   *os.File
	file   writer
	marks  map[string]fence.Token
	size   int
	live   int
	broken error
}

func openJournal(dir string) (*journal, error) {
	if err := makeDir(dir); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock of mark journal: %w", err)
	}
	j := &journal{dir: dir, lock: lock}
	if err := j.load(); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return j, nil
}

func (j *journal) load() error {
	// The kernel drops the lock with the process, however it ends.
	if err := unix.Flock(int(j.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("%w: %s is locked by another guard; stop its process or name another directory", ErrLocked, j.dir)
		}
		return fmt.Errorf("lock mark journal %s: %w", j.dir, err)
	}
	path := filepath.Join(j.dir, journalName)
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		j.marks = map[string]fence.Token{}
	case err != nil:
		return fmt.Errorf("read mark journal: %w", err)
	default:
		if j.marks, _, err = decode(path, data); err != nil {
			return err
		}
	}
	// Always written anew: what was read may be in the page cache alone, left
	// there by an fsync that failed, and a second fsync would not say so.
	return j.rewrite()
}

// rewrite replaces the journal by one of the present marks alone.
func (j *journal) rewrite() error {
	path := filepath.Join(j.dir, journalName)
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("write mark journal: %w", err)
	}
	data := encode(j.marks)
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil {
		err = fsync.Dir(j.dir)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write mark journal: %w", err), f.Close())
	}
	if j.file != nil {
		err = j.file.Close()
	}
	j.file, j.size, j.live = f, len(data), len(data)
	return err
}

// Mark of a resource; 0: there is none.
func (j *journal) Mark(resource string) fence.Token { return j.marks[resource] }

// Usable returns the failure after which what is on disk is unknown.
func (j *journal) Usable() error { return j.broken }

// Raise makes a higher mark durable. After a failure it refuses everything:
// what is on disk is then unknown until the journal is opened again.
func (j *journal) Raise(resource string, token fence.Token) error {
	if j.broken != nil {
		return j.broken
	}
	record := appendRecord(nil, resource, token)
	err := j.append(record)
	if err == nil {
		if _, known := j.marks[resource]; !known {
			j.live += len(record)
		}
		j.marks[resource] = token
		j.size += len(record)
		if j.size > compactAbove && j.size/4 > j.live {
			err = j.rewrite()
		}
	}
	if err != nil {
		j.broken = fmt.Errorf("mark journal %s failed and takes no more marks until it is opened again: %w", j.dir, err)
	}
	return j.broken
}

func (j *journal) append(record []byte) error {
	if _, err := j.file.Write(record); err != nil {
		return err
	}
	return j.file.Sync()
}

func (j *journal) close() error {
	return errors.Join(j.file.Close(), j.lock.Close())
}

// makeDir makes a directory whose entry survives a crash.
func makeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("directory of marks: %w; make its parent first", err)
	}
	return fsync.Dir(filepath.Dir(dir))
}
