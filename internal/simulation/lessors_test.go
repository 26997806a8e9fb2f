package simulation

import (
	"cmp"
	"slices"
	"time"

	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
	"github.com/headlease/headlease/region/state"
)

// newLessor makes the tables of a term.
func (w *world) newLessor(ld *leader, view state.View) *lessor.Lessor {
	l := lessor.New(lessor.Config{}, view, ld.term, ld.clock.read(w.now))
	l.PulseFresh(ld.clock.read(w.now), ld.pulse)
	return l
}

// lessorOut does what a lessor wants done.
func (w *world) lessorOut(ld *leader) {
	if ld.lessor == nil || ld.gone || w.clients == nil {
		return
	}
	out := ld.lessor.Take()
	if out.Drained {
		w.after(0, func() { w.releaseDrained(ld) })
	}
	// It goes through its streams in a map's order, which is not the seed's; the
	// order on each stream is what counts.
	slices.SortStableFunc(out.Sends, func(a, b lessor.Send) int { return cmp.Compare(a.Stream, b.Stream) })
	slices.Sort(out.Closes)
	for _, s := range out.Sends {
		if st := w.clients.streams[s.Stream]; st != nil {
			w.downward(st, func(now instant.Instant) {
				w.take(st.h, now, st.h.table.Received(now, st.table, s.Message))
				w.believe(st.h.c)
				w.keepalive(st.h)
			})
		}
	}
	for _, id := range out.Closes {
		if st := w.clients.streams[id]; st != nil {
			st.closed = true
			delete(w.clients.streams, id)
			w.downward(st, func(instant.Instant) { w.broken(st) })
		}
	}
	for _, c := range out.Commands {
		w.propose(ld, c.Command, func(res *pb.CommandResult) {
			ld.lessor.CommandDone(ld.clock.read(w.now), c.ID, res, nil)
			w.lessorOut(ld)
		})
	}
	if ld.lessor.CheckWanted() && !ld.checking {
		w.lessorCheck(ld)
	}
	w.lessorTimer(ld)
}

// lessorCheck is a leadership check for what clients are to be told.
func (w *world) lessorCheck(ld *leader) {
	ld.checking = true
	ticket := ld.lessor.CheckBegun(ld.clock.read(w.now))
	w.after(w.between(500*time.Microsecond, 4*time.Millisecond), func() {
		passed := ld.region.cur == ld && ld.region.down == 0
		hear := func() {
			ld.checking = false
			if ld.gone {
				return
			}
			now := ld.clock.read(w.now)
			if passed {
				ld.lessor.CheckPassed(now, ticket)
				w.lessorOut(ld)
				return
			}
			ld.lessor.CheckFailed(now, ticket)
			w.after(100*time.Millisecond, func() { w.lessorOut(ld) })
		}
		switch {
		case ld.frozen > w.now:
			w.at(ld.frozen, event{kind: evDo, do: hear})
		case w.late > 0 && w.rnd.IntN(100) < w.late:
			w.after(w.upTo(time.Second), hear)
		default:
			hear()
		}
	})
}

func (w *world) lessorTimer(ld *leader) {
	next, ok := ld.lessor.Next()
	if !ok || ld.gone {
		return
	}
	at := max(ld.clock.real(next), w.now+time.Millisecond, ld.frozen)
	if ld.lessorAt > w.now && ld.lessorAt <= at {
		return
	}
	ld.lessorAt = at
	w.at(at, event{kind: evDo, do: func() {
		if ld.lessorAt != at || ld.gone {
			return
		}
		ld.lessorAt = 0
		if ld.frozen > w.now {
			w.lessorTimer(ld)
			return
		}
		ld.lessor.Tick(ld.clock.read(w.now))
		w.lessorOut(ld)
	}})
}

// lessorGone ends the streams of a leader that is no more.
func (w *world) lessorGone(ld *leader) {
	for _, c := range w.clients.all { // not the map: its order is not the seed's
		for _, h := range c.homes {
			if st := h.stream; st != nil && st.ld == ld {
				w.sever(st)
				delete(w.clients.streams, st.id)
			}
		}
	}
}
