package replica

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// lateLog lets a leader send its entries to the others while it writes them
// itself (docs/decisions/0175). hashicorp/raft stores an entry, counts itself
// among those that have it, and only then sends it. Here a leader's StoreLogs
// returns before the write, so that raft counts what is not on disk yet; in its
// stead the answers of the followers, without any of which nothing commits, are
// kept from raft until the entries are on the leader's disk too (transport). All
// else waits: whatever is not a leader's sees only what is on disk.
type lateLog struct {
	in raft.LogStore
	// leads reports whether this server leads a group in which its own copy alone
	// commits nothing. Raft's main loop, which stores, is also what changes that.
	leads func() bool
	// failed is called once a leader's write has failed: raft has been told that the
	// entries are stored, and learns the truth with the next ones only.
	failed func()

	mu sync.Mutex
	// pending entries, in order and without a gap, are being written, or wait for
	// it.
	pending []*raft.Log
	writing bool
	// durable is the last entry on disk.
	durable uint64
	// err ended the writing for good.
	err error
	// changed is closed, and nil again, when durable or err changes, or nothing is
	// pending any more; nil: nobody waits.
	changed chan struct{}
}

var _ raft.MonotonicLogStore = (*lateLog)(nil)

func newLateLog(in raft.LogStore) (*lateLog, error) {
	last, err := in.LastIndex()
	if err != nil {
		return nil, err
	}
	return &lateLog{in: in, leads: func() bool { return false }, failed: func() {}, durable: last}, nil
}

// StoreLog stores an entry.
func (l *lateLog) StoreLog(e *raft.Log) error { return l.StoreLogs([]*raft.Log{e}) }

// StoreLogs stores entries: of a leader, it lets them be stored. An entry that
// changes the group is on disk before it counts, as it may make this server the
// only one that votes.
func (l *lateLog) StoreLogs(entries []*raft.Log) error {
	if len(entries) == 0 {
		return nil
	}
	late := l.leads()
	for _, e := range entries {
		late = late && e.Type != raft.LogConfiguration
	}
	if late {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.err != nil {
			return l.err
		}
		l.pending = append(l.pending, entries...)
		if !l.writing {
			l.writing = true
			go l.write() // ends when nothing is pending; settle waits for it
		}
		return nil
	}
	if err := l.flush(); err != nil {
		return err
	}
	if err := l.in.StoreLogs(entries); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.durable = entries[len(entries)-1].Index
	return nil
}

// write stores what is pending, as many entries at once as have gathered.
func (l *lateLog) write() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.pending) > 0 && l.err == nil {
		batch := l.pending
		l.mu.Unlock()
		err := l.in.StoreLogs(batch)
		l.mu.Lock()
		if l.err = err; err == nil {
			l.durable = batch[len(batch)-1].Index
			if l.pending = l.pending[len(batch):]; len(l.pending) == 0 {
				l.pending = nil
			}
		}
		l.tell()
	}
	if l.err != nil {
		l.mu.Unlock()
		l.failed()
		l.mu.Lock()
	}
	l.writing = false
	l.tell()
}

// tell wakes who waits. l.mu is held.
func (l *lateLog) tell() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// wait until done says so under the lock, or stop ends it (false).
func (l *lateLog) wait(stop <-chan struct{}, done func() bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !done() {
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		changed := l.changed
		l.mu.Unlock()
		select {
		case <-changed:
			l.mu.Lock()
		case <-stop:
			l.mu.Lock()
			return false
		}
	}
	return true
}

// flush waits until nothing is pending.
func (l *lateLog) flush() (err error) {
	l.wait(nil, func() bool {
		err = l.err
		return err != nil || len(l.pending) == 0
	})
	return err
}

var (
	errLateStopped = errors.New("stopped before the entry was on the own disk")
	errLateRemoved = errors.New("the entry is not in the log any more")
)

// onDisk waits until the entry is on this server's disk. A deposed leader's may
// have been removed before the waiter looked: then nothing would wake it.
func (l *lateLog) onDisk(index uint64, stop <-chan struct{}) (err error) {
	if !l.wait(stop, func() bool {
		if err = l.err; err == nil && index > l.durable && len(l.pending) == 0 {
			err = errLateRemoved
		}
		return err != nil || l.durable >= index
	}) {
		return errLateStopped
	}
	return err
}

// settle waits until no write is under way, at most d, and reports whether none
// is.
func (l *lateLog) settle(d time.Duration) bool {
	stop := make(chan struct{})
	timer := time.AfterFunc(d, func() { close(stop) })
	defer timer.Stop()
	return l.wait(stop, func() bool { return !l.writing })
}

// seen makes an entry that is not on disk yet be so before it is shown to anybody
// but a leader: a follower answers its leader by what it finds in its log.
func (l *lateLog) seen(index uint64) error {
	l.mu.Lock()
	late := index > l.durable && len(l.pending) > 0
	l.mu.Unlock()
	if late && !l.leads() {
		return l.flush()
	}
	return nil
}

// GetLog reads an entry.
func (l *lateLog) GetLog(index uint64, log *raft.Log) error {
	l.mu.Lock()
	if n := len(l.pending); n > 0 {
		if first := l.pending[0].Index; index >= first && index-first < uint64(n) {
			*log = *l.pending[index-first]
			l.mu.Unlock()
			return nil
		}
	}
	l.mu.Unlock()
	return l.in.GetLog(index, log)
}

// FirstIndex is of what is on disk: 0 while all there is of a log that was emptied
// is pending.
func (l *lateLog) FirstIndex() (uint64, error) { return l.in.FirstIndex() }

// LastIndex counts what is pending.
func (l *lateLog) LastIndex() (uint64, error) {
	l.mu.Lock()
	if n := len(l.pending); n > 0 {
		defer l.mu.Unlock()
		return l.pending[n-1].Index, nil
	}
	l.mu.Unlock()
	return l.in.LastIndex()
}

// DeleteRange is Raft's: a suffix, or everything.
func (l *lateLog) DeleteRange(first, last uint64) error {
	if err := l.flush(); err != nil {
		return err
	}
	if err := l.in.DeleteRange(first, last); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if first > 0 && last >= l.durable {
		l.durable = min(l.durable, first-1)
	}
	return nil
}

// IsMonotonic passes on that the log takes no gaps.
func (l *lateLog) IsMonotonic() bool {
	m, ok := l.in.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// withheld waits with a follower's answer to entries until they are on the own
// disk; an answer after an error must not reach raft.
func withheld(onDisk func(uint64, <-chan struct{}) error, stop <-chan struct{}, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	if n := len(req.Entries); n > 0 && resp.Success {
		if err := onDisk(req.Entries[n-1].Index, stop); err != nil {
			return fmt.Errorf("entry %d on the own disk: %w", req.Entries[n-1].Index, err)
		}
	}
	return nil
}
