package watch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// ErrTooMany is returned when a bound on watchers is reached.
var ErrTooMany = errors.New("too many watchers")

// State is the region's state at one revision. It does not change.
type State interface {
	Revision() uint64
	Incarnation() uint64
	// Lease on a resource; nil if nobody holds it.
	Lease(resource string) *pb.LeaseInfo
	// Leases on up to limit resources with the prefix after the one named, in
	// order, and the name to go on after; empty at the end.
	Leases(prefix, after string, limit int) (page []*pb.LeaseInfo, next string)
	// Partitions that are live.
	Partitions() []*pb.WatchPartition
}

// Config of a Hub. Zero values stand for the defaults.
type Config struct {
	// State returns the newest state. At Applied it has the entry's events
	// already. Needed.
	State func() State
	// RingEvents and RingBytes bound what a watcher can go on from; default
	// 65,536 and 16 MiB.
	RingEvents, RingBytes int
	// QueueEvents and QueueBytes bound what waits for one watcher; default
	// 1,024 and 256 KiB. One event fits always.
	QueueEvents, QueueBytes int
	// ResponseEvents and ResponseBytes bound one response, also a snapshot's;
	// default 256 and 512 KiB. One item fits always.
	ResponseEvents, ResponseBytes int
	// QueuedBytes bounds what waits for all of them; default 64 MiB.
	QueuedBytes int64
	// Watchers bounds them; default 50,000. PerConnection of one connection;
	// default 1,000.
	Watchers, PerConnection int
	// Registerer of the hub's metrics; may be nil.
	Registerer prometheus.Registerer
	Logger     *slog.Logger
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field *int
		value int
	}{
		{&c.RingEvents, 1 << 16},
		{&c.RingBytes, 16 << 20},
		{&c.QueueEvents, 1 << 10},
		{&c.QueueBytes, 256 << 10},
		{&c.ResponseEvents, 256},
		{&c.ResponseBytes, 512 << 10},
		{&c.Watchers, 50_000},
		{&c.PerConnection, 1_000},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.QueuedBytes == 0 {
		c.QueuedBytes = 64 << 20
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Hub hands what applied entries did to its watchers. It is safe for
// concurrent use.
type Hub struct {
	cfg    Config
	metric *metrics
	more   chan struct{}
	// queued are the bytes that wait for all watchers.
	queued atomic.Int64

	// in is what was applied; its lock is all that the FSM goroutine takes.
	in struct {
		sync.Mutex
		ring ring
		// restored counts the times that the state was replaced.
		restored uint64
		// watched: somebody watches, so that there is something to hand on.
		watched bool
	}

	// out is who watches. It is locked before in.
	out struct {
		sync.Mutex
		index *index
		// told is the revision up to which everything is in the queues.
		told        uint64
		restored    uint64
		connections map[string]int
	}
	// told is out.told, to be read without its lock.
	told atomic.Uint64
}

// New returns a hub that begins at the present state.
func New(cfg Config) *Hub {
	h := &Hub{cfg: cfg.withDefaults(), more: make(chan struct{}, 1)}
	h.in.ring.maxEvents, h.in.ring.maxBytes = h.cfg.RingEvents, h.cfg.RingBytes
	h.out.index, h.out.connections = newIndex(), map[string]int{}
	revision := h.cfg.State().Revision()
	h.in.ring.restart(revision)
	h.out.told = revision
	h.told.Store(revision)
	h.metric = newMetrics(cfg.Registerer, h)
	return h
}

// add takes an entry's events; revisions rise. It waits for nobody.
func (h *Hub) add(revision uint64, encode func(data []byte) ([]byte, int)) {
	h.in.Lock()
	h.in.ring.add(revision, encode)
	watched := h.in.watched
	h.in.Unlock()
	if watched {
		wake.Up(h.more)
	}
}

// Restored follows a snapshot that replaced the state: all watchers begin
// again.
func (h *Hub) Restored() {
	revision := h.cfg.State().Revision()
	h.in.Lock()
	h.in.ring.restart(revision)
	h.in.restored++
	h.in.Unlock()
	wake.Up(h.more)
}

// Run hands events to the watchers until ctx ends.
func (h *Hub) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-h.more:
		}
		for more := true; more && ctx.Err() == nil; {
			more = h.dispatch()
		}
	}
}

// dispatchMax bounds the entries handed on under one hold of the lock.
const dispatchMax = 64

// dispatch hands on what has been applied since the last time, or some of it:
// then it returns true.
func (h *Hub) dispatch() (more bool) {
	h.out.Lock()
	defer h.out.Unlock()
	h.in.Lock()
	last, restored := h.in.ring.last, h.in.restored
	parts, ok := h.in.ring.after(h.out.told)
	h.in.Unlock()
	switch {
	case len(h.out.index.all) == 0: // the first one begins where the ring is then
		return false
	case restored != h.out.restored:
		h.out.restored = restored
		h.skip(last, "this server's state was replaced by a newer snapshot")
		return false
	case !ok:
		h.skip(last, "this server applied more than it could tell")
		return false
	}
	n := 0
	for _, part := range parts {
		for _, e := range part.entries {
			if n == dispatchMax {
				return true
			}
			n++
			events, err := part.decode(e)
			if err != nil {
				h.cfg.Logger.Error("events for watchers cannot be decoded; all watchers begin again", "revision", e.revision, "error", err)
				h.skip(last, unreadable)
				return false
			}
			for _, ev := range events {
				h.out.index.each(ev, func(w *Watcher) { w.put(ev) })
			}
			h.tell(e.revision)
		}
	}
	h.tell(last)
	return false
}

// tell: everything up to the revision is in the queues. out is locked.
func (h *Hub) tell(revision uint64) {
	h.out.told = revision
	h.told.Store(revision)
}

// skip goes on after a revision without telling what was before: everybody
// begins again. out is locked.
func (h *Hub) skip(revision uint64, why string) {
	for w := range h.out.index.all {
		w.lose(why)
	}
	h.tell(revision)
}

// Watch adds a watcher. It goes on after the revision if that is of the
// incarnation and everything since is known; otherwise, and at revision 0, it
// begins with a snapshot. The caller closes it. The error is an ErrTooMany.
func (h *Hub) Watch(q Query, connection string, incarnation, after uint64) (*Watcher, error) {
	w := &Watcher{hub: h, query: q, connection: connection, more: make(chan struct{}, 1)}
	h.out.Lock()
	switch {
	case len(h.out.index.all) >= h.cfg.Watchers:
		h.out.Unlock()
		h.metric.refused.Inc()
		return nil, fmt.Errorf("%w: this server has %d; watch on another one, or a prefix instead of many resources", ErrTooMany, h.cfg.Watchers)
	case h.out.connections[connection] >= h.cfg.PerConnection:
		h.out.Unlock()
		h.metric.refused.Inc()
		return nil, fmt.Errorf("%w: this connection has %d; watch a prefix instead of many resources", ErrTooMany, h.cfg.PerConnection)
	}
	first := len(h.out.index.all) == 0
	h.out.index.add(w)
	h.out.connections[connection]++
	h.in.Lock()
	if first { // nobody handed anything on meanwhile
		h.in.watched = true
		h.out.restored = h.in.restored
		h.tell(h.in.ring.last)
	}
	parts, known := h.in.ring.after(after)
	h.in.Unlock()
	told := h.out.told
	h.out.Unlock()

	state := h.cfg.State() // from now on nothing is missed: it is in the queue or in here
	w.incarnation = state.Incarnation()
	switch {
	case after == 0:
		w.begin = true
	case incarnation != w.incarnation:
		w.lose("the region's data is not the one that the revision is of")
	case !known:
		w.lose("the revision is older than what this server remembers")
	default:
		w.from = after
		w.recall(parts, told)
	}
	return w, nil
}

// Close ends a watcher.
func (w *Watcher) Close() {
	h := w.hub
	h.out.Lock()
	defer h.out.Unlock()
	if _, ok := h.out.index.all[w]; !ok {
		return
	}
	h.out.index.remove(w)
	if h.out.connections[w.connection]--; h.out.connections[w.connection] == 0 {
		delete(h.out.connections, w.connection)
	}
	if len(h.out.index.all) == 0 {
		h.in.Lock()
		h.in.watched = false
		h.in.Unlock()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clear()
}
