package replica

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// markBytes is how finely the log's size is known.
	markBytes = 256 << 10
	// entryOverhead is about what an entry costs beside its data, in bytes.
	entryOverhead = 32
	// trimPiece is how many entries one removal takes. Appends wait for it: with
	// bbolt about as long as the entries are many [F36], with the write-ahead log
	// for two fsyncs whatever their number, and for the removal of files.
	trimPiece = 4096
)

// logStore is Raft's log: the newest entries in memory, all of them on disk, or, of
// a leader, on their way there (lateLog), with their size known. Raft itself
// removes entries only when they conflict with a leader's and when a snapshot is
// installed; the prefix behind a snapshot is removed by trim.
type logStore struct {
	*raft.LogCache
	late *lateLog
	disk raft.LogStore

	mu sync.Mutex
	// marks rise: the entries below index take up bytes, counted from an arbitrary
	// start. The last one is the log's end.
	marks []logMark
}

type logMark struct{ index, bytes uint64 }

var (
	_ raft.LogStore          = (*logStore)(nil)
	_ raft.MonotonicLogStore = (*logStore)(nil)
)

// newLogStore wraps a log whose present entries take up old bytes, and keeps the
// newest cached ones in memory.
func newLogStore(disk raft.LogStore, cached int, old uint64) (*logStore, error) {
	late, err := newLateLog(disk)
	if err != nil {
		return nil, err
	}
	cache, err := raft.NewLogCache(cached, late)
	if err != nil {
		return nil, err
	}
	l := &logStore{LogCache: cache, late: late, disk: disk}
	first, err := disk.FirstIndex()
	if err != nil {
		return nil, err
	}
	last, err := disk.LastIndex()
	if err != nil {
		return nil, err
	}
	if last > 0 {
		l.marks = []logMark{{first, 0}, {last + 1, old}}
	}
	return l, nil
}

// sealedBytes is the size of the log's files but for the one that is being
// filled, whose size says nothing.
func sealedBytes(dir string, segment int64) (uint64, error) {
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	var sum int64
	for _, e := range list {
		info, err := e.Info()
		if err != nil {
			return 0, err
		}
		if info.Size() >= segment {
			sum += info.Size()
		}
	}
	return uint64(max(sum-segment, 0)), nil
}

// GetLog reads an entry.
func (l *logStore) GetLog(index uint64, log *raft.Log) error {
	if err := l.late.seen(index); err != nil {
		return err
	}
	return l.LogCache.GetLog(index, log)
}

// StoreLog stores an entry.
func (l *logStore) StoreLog(e *raft.Log) error { return l.StoreLogs([]*raft.Log{e}) }

// StoreLogs stores entries.
func (l *logStore) StoreLogs(entries []*raft.Log) error {
	if err := l.LogCache.StoreLogs(entries); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range entries {
		n := len(l.marks)
		if n == 0 {
			l.marks = append(l.marks, logMark{index: e.Index})
			n = 1
		}
		end := logMark{e.Index + 1, l.marks[n-1].bytes + uint64(len(e.Data)+len(e.Extensions)) + entryOverhead}
		if n > 1 && end.bytes-l.marks[n-2].bytes < markBytes {
			l.marks[n-1] = end
		} else {
			l.marks = append(l.marks, end)
		}
	}
	return nil
}

// DeleteRange is Raft's: a suffix that conflicts with the leader's log, or
// everything after an installed snapshot. Entries that are gone must not be found
// in memory.
func (l *logStore) DeleteRange(first, last uint64) error {
	if err := l.LogCache.DeleteRange(first, last); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	end := logMark{first, l.below(first)}
	n := len(l.marks)
	for n > 0 && l.marks[n-1].index >= first {
		n--
	}
	if l.marks = l.marks[:n]; n > 0 {
		l.marks = append(l.marks, end)
	}
	return nil
}

// below is about how many bytes the entries below index take up.
func (l *logStore) below(index uint64) uint64 {
	n := len(l.marks)
	if n == 0 || index <= l.marks[0].index {
		return l.start().bytes
	}
	for i := n - 1; i > 0; i-- {
		m, from := l.marks[i], l.marks[i-1]
		if index >= m.index {
			return m.bytes
		}
		if index > from.index {
			return from.bytes + (m.bytes-from.bytes)*(index-from.index)/(m.index-from.index)
		}
	}
	return l.end().bytes
}

func (l *logStore) start() logMark {
	if len(l.marks) == 0 {
		return logMark{}
	}
	return l.marks[0]
}

func (l *logStore) end() logMark {
	if len(l.marks) == 0 {
		return logMark{}
	}
	return l.marks[len(l.marks)-1]
}

// bytesFrom is about how many bytes the entries from index on take up.
func (l *logStore) bytesFrom(index uint64) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.end().bytes - l.below(index)
}

// newestWithin returns the lowest index from which on the entries take up at most
// so many bytes; 0 if all do.
func (l *logStore) newestWithin(bytes uint64) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end().bytes-l.start().bytes <= bytes {
		return 0
	}
	floor := l.end().bytes - bytes // entries are to begin at or above it
	for i := 1; i < len(l.marks); i++ {
		from, m := l.marks[i-1], l.marks[i]
		if m.bytes < floor {
			continue
		}
		if m.bytes == from.bytes {
			return m.index
		}
		return from.index + ((floor-from.bytes)*(m.index-from.index)+m.bytes-from.bytes-1)/(m.bytes-from.bytes)
	}
	return l.end().index
}

// trim removes the entries below to, in pieces, the oldest first, so that a crash
// at any point leaves a log without a gap. It always leaves the newest entry.
// Entries that it removes stay readable in memory for a while, which is right:
// they are committed.
func (l *logStore) trim(ctx context.Context, to uint64) (removed uint64, err error) {
	for {
		first, err := l.disk.FirstIndex()
		if err != nil {
			return removed, err
		}
		last, err := l.disk.LastIndex()
		if err != nil {
			return removed, err
		}
		end := min(to, last) // exclusive
		if first == 0 || first >= end {
			return removed, nil
		}
		end = min(end, first+trimPiece)
		began := time.Now()
		if err := l.disk.DeleteRange(first, end-1); err != nil {
			return removed, fmt.Errorf("remove log entries %d to %d: %w", first, end-1, err)
		}
		removed += end - first
		l.mu.Lock()
		bytes := l.below(end)
		i := 0
		for i < len(l.marks) && l.marks[i].index <= end {
			i++
		}
		if i > 0 {
			l.marks = slices.Delete(l.marks, 0, i-1)
			l.marks[0] = logMark{end, bytes}
		}
		l.mu.Unlock()
		// Appends that waited go first.
		select {
		case <-ctx.Done():
			return removed, nil
		case <-time.After(max(time.Millisecond, time.Since(began))):
		}
	}
}
