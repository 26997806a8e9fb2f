package resource

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/headlease/headlease/internal/fsync"
)

// journal is the file of entries, JSON lines, each fsynced before its
// operation is answered. The accepted writes in it are the resource's data.
// Safe for concurrent use.
type journal struct {
	mu      sync.Mutex
	file    *os.File
	entries []Entry
	broken  error
}

func openJournal(path string) (*journal, error) {
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("journal: %w", err)
	}
	entries, good, err := decode(path, data)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	if good < len(data) {
		err = f.Truncate(int64(good))
	}
	if err = errors.Join(err, f.Sync(), fsync.Dir(filepath.Dir(path))); err != nil {
		return nil, errors.Join(fmt.Errorf("journal: %w", err), f.Close())
	}
	return &journal{file: f, entries: entries}, nil
}

// decode reads a journal; good is its length without a last line that a crash
// cut off, of which nobody was told.
func decode(path string, data []byte) (entries []Entry, good int, err error) {
	for n := 1; good < len(data); n++ {
		end := bytes.IndexByte(data[good:], '\n')
		if end < 0 {
			break
		}
		var e Entry
		if err := json.Unmarshal(data[good:good+end], &e); err != nil {
			return nil, 0, fmt.Errorf("journal %s: line %d is damaged: %w", path, n, err)
		}
		if e.N != uint64(n) {
			return nil, 0, fmt.Errorf("journal %s: line %d is entry %d; lines are missing or out of order", path, n, e.N)
		}
		entries = append(entries, e)
		good += end + 1
	}
	return entries, good, nil
}

// append numbers the entry and makes it durable. After a failure it takes no
// more: what is on disk is then unknown.
func (j *journal) append(e Entry) (Entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.broken != nil {
		return Entry{}, j.broken
	}
	e.N = uint64(len(j.entries)) + 1
	line, err := json.Marshal(e)
	if err != nil {
		return Entry{}, fmt.Errorf("journal: %w", err)
	}
	if _, err = j.file.Write(append(line, '\n')); err == nil {
		err = j.file.Sync()
	}
	if err != nil {
		j.broken = fmt.Errorf("journal failed and takes no more until the resource is started again: %w", err)
		return Entry{}, j.broken
	}
	j.entries = append(j.entries, e)
	return e, nil
}

func (j *journal) all() []Entry {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.entries)
}

// last returns the resource's newest accepted write.
func (j *journal) last(resource string) (Entry, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range slices.Backward(j.entries) {
		if e.Resource == resource && e.Op == OpWrite && e.Outcome == Accepted {
			return e, true
		}
	}
	return Entry{}, false
}

func (j *journal) close() error { return j.file.Close() }
