package simulation

import (
	"fmt"
	"time"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
)

// stream is one attachment. Messages do not overtake each other on it; when its
// connection is cut it is dead, and both ends find that out later.
type stream struct {
	h      *home
	ld     *leader
	id     lessor.StreamID
	table  validity.StreamID
	dead   bool
	closed bool
	// Arrivals on it, for their order.
	up, down time.Duration
}

// between a client and a region, now; false while the link is cut.
func (w *world) reaches(c *client, r *region) (time.Duration, bool) {
	if c.at == r.at {
		return w.upTo(time.Millisecond), true
	}
	l, back := w.link(c.at, r.at), w.link(r.at, c.at)
	return l.base + l.extra + w.upTo(l.jitter+l.noise), l.downs == 0 && back.downs == 0
}

// live keeps a home's session and stream alive.
func (w *world) live(h *home) {
	w.after(w.between(300*time.Millisecond, 1500*time.Millisecond), func() { w.live(h) })
	now := h.c.clock.read(w.now)
	w.countLost(h, now)
	ld := h.r.cur
	there, ok := w.reaches(h.c, h.r)
	if !ok || ld == nil || ld.gone || ld.lessor == nil {
		return
	}
	switch {
	case h.session == "" && !h.opening:
		h.opening = true
		h.serial++
		id := fmt.Sprintf("%s-%s-%d", h.c.name, h.r.name, h.serial)
		done := false
		w.after(there, func() {
			w.propose(ld, &pb.Command{Term: ld.term, Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{
				SessionId: id, SecretHash: make([]byte, 32), TtlMs: h.ttl.Milliseconds(),
			}}}, func(res *pb.CommandResult) {
				w.after(there, func() {
					if done || res.GetError() != nil {
						return
					}
					done = true
					h.session, h.opening, h.request = id, false, 0
					h.table.OpenSession(id, h.ttl)
					w.keepalive(h)
				})
			})
		})
		w.after(2*there+time.Second, func() {
			if !done {
				done, h.opening = true, false
			}
		})
	case h.session == "":
	case h.stream == nil:
		w.attach(h, ld)
	}
	w.take(h, now, h.table.Poll(now))
}

func (w *world) attach(h *home, ld *leader) {
	w.clients.last++
	st := &stream{h: h, ld: ld, id: w.clients.last, table: h.table.StreamOpened()}
	w.clients.streams[st.id] = st
	h.stream = st
	w.upward(st, func(now instant.Instant) { ld.lessor.StreamOpened(now, st.id) })
	w.keepalive(h)
}

// upward carries something from the client to the leader, in order.
func (w *world) upward(st *stream, do func(now instant.Instant)) {
	there, ok := w.reaches(st.h.c, st.h.r)
	if !ok {
		w.sever(st)
	}
	if st.dead {
		return
	}
	st.up = max(st.up, w.now+there)
	w.at(st.up, event{kind: evDo, do: func() {
		if st.dead || st.ld.gone {
			return
		}
		if st.ld.frozen > w.now {
			st.up = max(st.up, st.ld.frozen)
			w.at(st.up, event{kind: evDo, do: func() { w.atLeader(st, do) }})
			return
		}
		w.atLeader(st, do)
	}})
}

func (w *world) atLeader(st *stream, do func(now instant.Instant)) {
	if st.dead || st.ld.gone || st.closed {
		return
	}
	do(st.ld.clock.read(w.now))
	w.lessorOut(st.ld)
}

// downward carries something from the leader to the client, in order.
func (w *world) downward(st *stream, do func(now instant.Instant)) {
	there, ok := w.reaches(st.h.c, st.h.r)
	if !ok {
		w.sever(st)
	}
	if st.dead {
		return
	}
	if w.late > 0 && w.rnd.IntN(300) < w.late {
		there += w.upTo(w.d)
	}
	st.down = max(st.down, w.now+there)
	w.at(st.down, event{kind: evDo, do: func() {
		if !st.dead && st.h.stream == st {
			do(st.h.c.clock.read(w.now))
		}
	}})
}

// sever ends a stream's connection; each end finds out in its own time.
func (w *world) sever(st *stream) {
	if st.dead {
		return
	}
	st.dead = true
	w.after(w.upTo(3*time.Second), func() { w.broken(st) })
	w.after(w.upTo(3*time.Second), func() {
		if !st.ld.gone && !st.closed {
			st.closed = true
			delete(w.clients.streams, st.id)
			st.ld.lessor.StreamClosed(st.ld.clock.read(w.now), st.id)
			w.lessorOut(st.ld)
		}
	})
}

// broken is the client's end of a stream that is over.
func (w *world) broken(st *stream) {
	if st.h.stream == st {
		st.h.stream = nil
		st.h.table.StreamBroken(st.table)
	}
}

// keepalive sends one when it is due, and sets the timer for the next.
func (w *world) keepalive(h *home) {
	if h.session == "" || h.stream == nil {
		return
	}
	now := h.c.clock.read(w.now)
	if h.table.NextKeepalive(h.session) <= now {
		if ka := h.table.Keepalive(now, h.session, h.stream.table); ka != nil {
			st := h.stream
			w.upward(st, func(now instant.Instant) { st.ld.lessor.Keepalive(now, st.id, ka) })
		}
	}
	at := max(h.c.clock.real(h.table.NextKeepalive(h.session)), w.now+5*time.Millisecond)
	if h.timer > w.now && h.timer <= at {
		return
	}
	h.timer = at
	w.at(at, event{kind: evDo, do: func() {
		if h.timer == at {
			h.timer = 0
			w.keepalive(h)
		}
	}})
}
