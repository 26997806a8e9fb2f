package watch

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// overhead of an event in memory, beside its content.
const overhead = 128

// Watcher is one consumer's place in the hub.
type Watcher struct {
	hub         *Hub
	query       Query
	connection  string
	incarnation uint64
	more        chan struct{}

	mu sync.Mutex
	// queue holds the events that were handed on and not taken yet, behind the
	// backlog: those from before the watcher came.
	backlog, queue list
	// lost is why the consumer must begin again; empty: it need not.
	lost string

	// Next's own:

	// begin: a snapshot comes next. during one, state is it and page where it
	// goes on.
	begin bool
	state State
	page  string
	// from is the revision up to which the consumer has everything: the
	// snapshot's, or the one that it goes on after.
	from uint64
}

func size(e *pb.WatchEvent) int { return overhead + proto.Size(e) }

// list of events, and what they take. Each of a watcher's two is bounded for
// itself, and all lists of a server together.
type list struct {
	events []*pb.WatchEvent
	bytes  int
}

const (
	tooSlow = "the consumer is too slow"
	tooMuch = "more has happened since the revision than waits for one watcher"
	noRoom  = "too much waits for slow consumers on this server"
	// Of events that this server encoded itself: never, as far as is known.
	unreadable = "this server cannot read what it remembers"
)

// add appends an event, or says why it may not. w.mu is held.
func (w *Watcher) add(l *list, e *pb.WatchEvent, full string) (why string) {
	n := size(e)
	c := &w.hub.cfg
	if len(l.events) >= c.QueueEvents || len(l.events) > 0 && l.bytes+n > c.QueueBytes {
		return full
	}
	if w.hub.queued.Add(int64(n)) > c.QueuedBytes {
		w.hub.queued.Add(-int64(n))
		return noRoom
	}
	l.events = append(l.events, e)
	l.bytes += n
	return ""
}

// put queues an event; never waits.
func (w *Watcher) put(e *pb.WatchEvent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lost != "" {
		return
	}
	if why := w.add(&w.queue, e, tooSlow); why != "" {
		w.loseLocked(why)
		w.hub.metric.slow.Inc()
		return
	}
	wake.Up(w.more)
}

// recall puts what the ring knows of the time before the watcher came into the
// backlog, up to the revision from which on the queue has it. If that is too
// much, the consumer begins again.
func (w *Watcher) recall(parts []part, told uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, part := range parts {
		for _, e := range part.entries {
			if e.revision > told {
				return
			}
			events, err := part.decode(e)
			if err != nil {
				w.loseLocked(unreadable)
				return
			}
			for _, ev := range events {
				if !w.query.matches(ev) {
					continue
				}
				if why := w.add(&w.backlog, ev, tooMuch); why != "" {
					w.loseLocked(why)
					return
				}
			}
		}
	}
}

func (w *Watcher) lose(why string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.loseLocked(why)
}

// loseLocked drops the queue: the consumer begins again. w.mu is held.
func (w *Watcher) loseLocked(why string) {
	if w.lost == "" {
		w.lost = why
	}
	w.clear()
	wake.Up(w.more)
}

// clear the queue. w.mu is held.
func (w *Watcher) clear() {
	w.hub.queued.Add(-int64(w.backlog.bytes + w.queue.bytes))
	w.backlog, w.queue = list{}, list{}
}

// Next returns the next response: a part of a snapshot, events, or, when
// nothing has happened for so long, a progress. It fails when ctx ends.
func (w *Watcher) Next(ctx context.Context, progress time.Duration) (*pb.WatchResponse, error) {
	timer := time.NewTimer(progress)
	defer timer.Stop()
	for {
		told := w.hub.told.Load() // before the queue is looked at
		w.mu.Lock()
		lost := w.lost
		if lost != "" {
			w.lost = ""
			w.clear()
		}
		w.mu.Unlock()
		switch {
		case lost != "":
			w.begin, w.state = true, nil
			w.hub.metric.resyncs.Inc()
			return w.response(0, &pb.WatchResponse{Kind: &pb.WatchResponse_Resync{Resync: &pb.WatchResync{Reason: lost}}}), nil
		case w.begin:
			return w.snapshot(), nil
		}
		if events, complete := w.take(told); len(events) > 0 {
			w.hub.metric.events.Add(float64(len(events)))
			return w.response(complete, &pb.WatchResponse{Kind: &pb.WatchResponse_Events{Events: &pb.WatchEvents{Events: events}}}), nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-w.more:
		case <-timer.C:
			told = w.hub.told.Load()
			if w.idle() {
				return w.response(told, &pb.WatchResponse{Kind: &pb.WatchResponse_Progress{Progress: &pb.WatchProgress{}}}), nil
			}
		}
	}
}

// idle reports whether nothing waits.
func (w *Watcher) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost == "" && len(w.backlog.events)+len(w.queue.events) == 0
}

// response says up to where everything has been told: never less than the
// consumer knows.
func (w *Watcher) response(complete uint64, r *pb.WatchResponse) *pb.WatchResponse {
	w.from = max(w.from, complete)
	r.Revision, r.Incarnation = w.from, w.incarnation
	return r
}

// take returns the next events that the consumer does not have, and up to which
// revision that is all, given that all up to told is in the queue.
func (w *Watcher) take(told uint64) (events []*pb.WatchEvent, complete uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := &w.hub.cfg
	bytes := 0
	for {
		from := &w.backlog
		if len(from.events) == 0 {
			from = &w.queue
		}
		if len(from.events) == 0 {
			w.clear() // their arrays
			return events, told
		}
		e := from.events[0]
		n := size(e)
		old := e.GetRevision() <= w.from
		if !old && len(events) > 0 && (len(events) >= c.ResponseEvents || bytes+n > c.ResponseBytes) {
			return events, min(told, e.GetRevision()-1)
		}
		from.events, from.bytes = from.events[1:], from.bytes-n
		w.hub.queued.Add(-int64(n))
		if !old {
			events = append(events, e)
			bytes += n
		}
	}
}

// snapshot returns its next part.
func (w *Watcher) snapshot() *pb.WatchResponse {
	s := &pb.WatchSnapshot{}
	if w.state == nil {
		w.state, w.page = w.hub.cfg.State(), ""
		w.incarnation, w.from = w.state.Incarnation(), w.state.Revision()
		s.First, s.Partitions = true, w.state.Partitions()
		w.hub.metric.snapshots.Inc()
	}
	if w.query.Resource != "" {
		if l := w.state.Lease(w.query.Resource); l != nil {
			s.Leases = append(s.Leases, l)
		}
		s.Last = true
	} else {
		w.nextPage(s)
	}
	if s.GetLast() {
		w.begin, w.state = false, nil
	}
	return w.response(0, &pb.WatchResponse{Kind: &pb.WatchResponse_Snapshot{Snapshot: s}})
}

// pageItems are read from the state at a time: with the largest values they are
// well under what a client takes in one message.
const pageItems = 8

func (w *Watcher) nextPage(s *pb.WatchSnapshot) {
	c := &w.hub.cfg
	bytes := 0
	for len(s.GetLeases()) < c.ResponseEvents && bytes < c.ResponseBytes {
		page, next := w.state.Leases(w.query.Prefix, w.page, min(pageItems, c.ResponseEvents-len(s.GetLeases())))
		for _, l := range page {
			s.Leases = append(s.Leases, l)
			bytes += overhead + proto.Size(l)
		}
		if w.page = next; next == "" {
			s.Last = true
			return
		}
	}
}
