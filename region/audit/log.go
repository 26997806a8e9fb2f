package audit

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/headlease/headlease/internal/fsync"
	"github.com/headlease/headlease/internal/wake"
	"github.com/headlease/headlease/region/state"
)

// Defaults and bounds.
const (
	// DefaultMaxBytes is where a file is full; there are two.
	DefaultMaxBytes = 16 << 20
	// FileName within the data directory; the older file has Older appended.
	FileName = "audit.jsonl"
	Older    = ".1"
	// maxQueue bounds the records that wait for a disk that is slow.
	maxQueue = 4096
	// retry after the disk refused.
	retry = time.Second
	// maxLine bounds a line that is read.
	maxLine = 1 << 20
)

// Config of a Log.
type Config struct {
	Dir, Region, Server string
	// MaxBytes of one file; 0: 16 MiB.
	MaxBytes int64
	// Now is the wall clock; nil: time.Now.
	Now    func() time.Time
	Logger *slog.Logger
}

// Log is the audit file of one server. Applied and Restored are called from the
// FSM goroutine and wait for nothing; Run writes. Safe for concurrent use.
type Log struct {
	cfg  Config
	path string
	wake chan struct{}

	mu    sync.Mutex
	words *translator
	queue []Record
	lost  int
	// file serialises writes and rotation with exports.
	file sync.RWMutex
}

// New returns the log of a data directory. It touches no file before there is a
// record.
func New(cfg Config) *Log {
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = DefaultMaxBytes
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Log{cfg: cfg, path: filepath.Join(cfg.Dir, FileName), wake: make(chan struct{}, 1), words: newTranslator()}
}

// Begin takes the state that the server starts with.
func (l *Log) Begin(view state.View) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.words.learn(view)
}

// Applied records the events of an entry.
func (l *Log) Applied(index, term uint64, events []state.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.put(l.words.records(index, term, events))
}

// Restored notes that a snapshot replaced the state: what led to it is not here.
func (l *Log) Restored(view state.View) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.words.learn(view)
	l.put([]Record{{Kind: Gap, Index: view.AppliedIndex(), Text: "a snapshot replaced the state; other servers have what led to it"}})
}

// put queues records. l.mu is held.
func (l *Log) put(records []Record) {
	if len(records) == 0 {
		return
	}
	for _, r := range records {
		if len(l.queue) >= maxQueue {
			l.lost++
			continue
		}
		r.Time, r.Region, r.Server = l.cfg.Now().UTC(), l.cfg.Region, l.cfg.Server
		l.queue = append(l.queue, r)
	}
	wake.Up(l.wake)
}

// Run writes what is recorded until ctx ends, and what is left then. A disk that
// refuses is logged and tried again; it stops nothing.
func (l *Log) Run(ctx context.Context) error {
	last, err := l.last()
	if err != nil {
		l.cfg.Logger.Error("the audit file cannot be read; records may come twice", "file", l.path, "error", err)
	}
	for {
		var again <-chan time.Time
		if err := l.flush(&last); err != nil {
			l.cfg.Logger.Error("the audit file cannot be written", "file", l.path, "error", err)
			again = time.After(retry)
		}
		select {
		case <-ctx.Done():
			_ = l.flush(&last) // what failed was logged before
			return nil
		case <-l.wake:
		case <-again:
		}
	}
}

// mark is the last record in the file. Entries applied again after a restart are
// not written again.
type mark struct {
	index uint64
	n     int
}

func (m mark) before(r Record) bool { return r.Index > m.index || r.Index == m.index && r.N > m.n }

// flush writes and syncs what is queued; on an error it stays queued.
func (l *Log) flush(last *mark) error {
	l.mu.Lock()
	batch, lost := l.queue, l.lost
	l.mu.Unlock()
	if len(batch) == 0 && lost == 0 {
		return nil
	}
	var buf bytes.Buffer
	at := *last
	out := json.NewEncoder(&buf)
	for _, r := range batch {
		if !at.before(r) {
			continue
		}
		at = mark{r.Index, r.N}
		if err := out.Encode(r); err != nil {
			return err
		}
	}
	if lost > 0 {
		gap := Record{
			Time: l.cfg.Now().UTC(), Region: l.cfg.Region, Server: l.cfg.Server, Kind: Gap, Index: at.index, N: at.n + 1,
			Text: fmt.Sprintf("%d records were lost while the disk did not take them; other servers have them", lost),
		}
		at.n++
		if err := out.Encode(gap); err != nil {
			return err
		}
	}
	if err := l.write(buf.Bytes()); err != nil {
		return err
	}
	*last = at
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append([]Record(nil), l.queue[len(batch):]...)
	l.lost -= lost
	return nil
}

// write appends lines, durably, and makes room for them.
func (l *Log) write(lines []byte) (err error) {
	if len(lines) == 0 {
		return nil
	}
	l.file.Lock()
	defer l.file.Unlock()
	made := false
	switch info, err := os.Stat(l.path); {
	case errors.Is(err, fs.ErrNotExist):
		made = true
	case err != nil:
		return err
	case info.Size() > 0 && info.Size()+int64(len(lines)) > l.cfg.MaxBytes:
		if err := os.Rename(l.path, l.path+Older); err != nil {
			return err
		}
		made = true
	}
	f, err := os.OpenFile(l.path, os.O_APPEND|os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if end > 0 { // a line that a crash cut off stays a line of its own
		var tail [1]byte
		if _, err := f.ReadAt(tail[:], end-1); err != nil {
			return err
		}
		if tail[0] != '\n' {
			lines = append([]byte{'\n'}, lines...)
		}
	}
	if _, err := f.Write(lines); err != nil {
		return errors.Join(err, f.Truncate(end)) // or the next attempt would write a part twice
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if made {
		return fsync.Dir(l.cfg.Dir)
	}
	return nil
}

// last is the mark of the newest whole record.
func (l *Log) last() (m mark, err error) {
	err = l.Export(func(line []byte) error {
		var r Record
		if json.Unmarshal(line, &r) == nil && m.before(r) {
			m = mark{r.Index, r.N}
		}
		return nil
	})
	return m, err
}

// Export gives out all lines, oldest first, without their ends. Lines that are
// no JSON, which a crash has cut off, are left out. What is written meanwhile is
// not in it, and does not wait for it.
func (l *Log) Export(take func(line []byte) error) error {
	parts, err := l.open()
	for _, p := range parts {
		if err == nil {
			err = p.each(take)
		}
		err = errors.Join(err, p.file.Close())
	}
	return err
}

// part is a file as it was when it was opened: it is appended to, and renamed.
type part struct {
	file *os.File
	size int64
}

func (l *Log) open() (parts []part, err error) {
	l.file.RLock()
	defer l.file.RUnlock()
	for _, path := range []string{l.path + Older, l.path} {
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return parts, err
		}
		info, err := f.Stat()
		if err != nil {
			return parts, errors.Join(err, f.Close())
		}
		parts = append(parts, part{f, info.Size()})
	}
	return parts, nil
}

func (p part) each(take func(line []byte) error) error {
	lines := bufio.NewScanner(io.LimitReader(p.file, p.size))
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 || !json.Valid(lines.Bytes()) {
			continue
		}
		if err := take(lines.Bytes()); err != nil {
			return err
		}
	}
	return lines.Err()
}
