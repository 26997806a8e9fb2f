package simulation

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
	"github.com/headlease/headlease/region/state"
)

// contended is how many partitions have a lock that clients contend for.
const contended = 4

// clients are the believers of a world: each has a session in every region, and
// they contend for one lock per partition, wherever it can be had.
type clients struct {
	all     []*client
	streams map[lessor.StreamID]*stream
	last    lessor.StreamID
}

type client struct {
	name  string
	at    int // the site whose links it shares
	clock clock
	homes []*home
}

// home is a client's side of one region.
type home struct {
	c       *client
	r       *region
	table   *validity.Table
	session string
	ttl     time.Duration
	serial  int
	opening bool
	request uint64
	// asks is the open request of a lock, by partition.
	asks   [contended]uint64
	stream *stream
	timer  time.Duration
}

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

func lockName(i int) string { return fmt.Sprintf("lock/x%d", i) }

func newClients(w *world) *clients {
	cs := &clients{streams: map[lessor.StreamID]*stream{}}
	for k := range w.believers {
		c := &client{name: fmt.Sprintf("c%d", k), at: w.rnd.IntN(len(w.sites)), clock: w.clock()}
		for _, r := range w.regions {
			h := &home{c: c, r: r, table: validity.New(validity.Config{DriftPPM: rhoPPM}), ttl: w.between(2*time.Second, 10*time.Second)}
			c.homes = append(c.homes, h)
			w.after(w.upTo(time.Second), func() { w.live(h) })
		}
		cs.all = append(cs.all, c)
		w.after(w.upTo(2*time.Second), func() { w.want(c) })
	}
	// Leaders elected before had no tables of sessions.
	for _, r := range w.regions {
		r.cur.lessor = w.newLessor(r.cur, r.m.View())
		for i, hd := range r.cur.holds {
			if hd != nil {
				r.cur.lessor.HeadLease(r.cur.clock.read(w.now), w.names[i], hd.epoch, r.cur.clock.read(hd.until))
			}
		}
	}
	return cs
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
	ld := h.r.cur
	there, ok := w.reaches(h.c, h.r)
	if !ok || ld == nil || ld.gone || ld.lessor == nil {
		return
	}
	now := h.c.clock.read(w.now)
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

// want is what a client does from time to time: ask for a lock that it does
// not have, or let one go.
func (w *world) want(c *client) {
	w.after(w.between(200*time.Millisecond, 3*time.Second), func() { w.want(c) })
	i := w.rnd.IntN(min(contended, w.partitions))
	now := c.clock.read(w.now)
	for _, h := range c.homes {
		if h.session == "" {
			continue
		}
		token, ok := h.table.Lease(h.session, lockName(i))
		switch {
		case ok && h.table.Valid(now, h.session, lockName(i), token):
			if w.chance(50) {
				w.letGoOf(h, i, token)
			}
			return
		case h.asks[i] != 0:
			return
		}
	}
	h := c.homes[w.rnd.IntN(len(c.homes))]
	for _, o := range c.homes { // usually where the partition is
		if w.owns(o.r, i) && w.chance(90) {
			h = o
		}
	}
	if h.session == "" {
		return
	}
	h.request++
	h.asks[i] = h.request
	h.table.RequestBegun(h.session, h.request, lockName(i))
	w.ask(h, i, h.session, h.request, 3)
}

func (w *world) owns(r *region, i int) bool {
	for _, h := range w.parts[i].holds {
		if h.ld.region == r && h.until > w.now {
			return true
		}
	}
	return false
}

func (h *home) over(i int, session string, request uint64) {
	h.table.RequestOver(session, request)
	if h.session == session && h.asks[i] == request {
		h.asks[i] = 0
	}
}

// ask sends an Acquire, and sends it again if no answer comes.
func (w *world) ask(h *home, i int, session string, request uint64, tries int) {
	if h.session != session || h.asks[i] != request {
		return
	}
	if tries == 0 {
		h.over(i, session, request)
		return
	}
	sent := h.c.clock.read(w.now)
	answered := false
	w.after(w.between(2*time.Second, 4*time.Second), func() {
		if !answered {
			w.ask(h, i, session, request, tries-1)
		}
	})
	there, ok := w.reaches(h.c, h.r)
	ld := h.r.cur
	if !ok || ld == nil || ld.gone || ld.lessor == nil {
		return
	}
	reply := func(a *pb.AcquireResponse) {
		back, ok := w.reaches(h.c, h.r)
		if !ok {
			return
		}
		w.after(back, func() {
			answered = true
			now := h.c.clock.read(w.now)
			switch {
			case a == nil:
				h.over(i, session, request)
			case a.GetGranted() != nil:
				w.count.grants++
				w.take(h, now, h.table.AcquireAnswered(now, sent, session, request, a))
				h.over(i, session, request)
				w.believe(h.c)
				w.keepalive(h)
			}
		})
	}
	lowest := h.table.LowestOpenRequest(session)
	w.after(there, func() {
		if ld.gone || ld.frozen > w.now {
			return
		}
		arrived := ld.clock.read(w.now)
		epoch, _, ok := ld.lessor.Hold(arrived, w.names[i])
		if !ok {
			reply(nil)
			return
		}
		w.propose(ld, &pb.Command{Term: ld.term, Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
			SessionId: session, RequestId: request, LowestOpenRequest: lowest, Resource: lockName(i), Partition: w.names[i], Epoch: uint32(epoch), Wait: true,
		}}}, func(res *pb.CommandResult) {
			g := res.GetAcquire().GetGranted()
			switch {
			case res.GetError() != nil:
				reply(nil)
			case g == nil:
				reply(&pb.AcquireResponse{Term: ld.term, ReceivedAt: int64(arrived)})
			default:
				w.answerGrant(ld, session, lockName(i), fence.Token(g.GetToken()), arrived, 40, reply)
			}
		})
	})
}

// answerGrant answers a grant as soon as the lessor says with what.
func (w *world) answerGrant(ld *leader, session, resource string, token fence.Token, arrived instant.Instant, tries int, reply func(*pb.AcquireResponse)) {
	if ld.gone || tries == 0 {
		return
	}
	if ld.frozen > w.now {
		w.at(ld.frozen, event{kind: evDo, do: func() { w.answerGrant(ld, session, resource, token, arrived, tries, reply) }})
		return
	}
	held, err := ld.lessor.Answer(ld.clock.read(w.now), session, resource, token)
	w.lessorOut(ld)
	switch {
	case errors.Is(err, lessor.ErrWait):
		w.after(25*time.Millisecond, func() { w.answerGrant(ld, session, resource, token, arrived, tries-1, reply) })
	case err != nil:
		reply(nil)
	default:
		reply(&pb.AcquireResponse{Term: ld.term, ReceivedAt: int64(arrived), Outcome: &pb.AcquireResponse_Granted{Granted: held}})
	}
}

// letGoOf releases a lease: belief ends first.
func (w *world) letGoOf(h *home, i int, token fence.Token) {
	session := h.session
	h.table.Releasing(h.c.clock.read(w.now), session, lockName(i), token)
	there, ok := w.reaches(h.c, h.r)
	ld := h.r.cur
	if !ok || ld == nil || ld.gone {
		return
	}
	w.after(there, func() {
		if ld.gone || ld.frozen > w.now {
			return
		}
		w.propose(ld, &pb.Command{Term: ld.term, Kind: &pb.Command_Release{Release: &pb.ReleaseCommand{SessionId: session, Resource: lockName(i), Token: uint64(token)}}}, func(res *pb.CommandResult) {
			if res.GetError() == nil {
				w.after(there, func() { h.table.Released(h.c.clock.read(w.now), session, lockName(i), token) })
			}
		})
	})
}

// take acts on what a table says.
func (w *world) take(h *home, now instant.Instant, events []validity.Event) {
	for _, e := range events {
		i := -1
		if n := len(e.Resource); n > 0 {
			i = int(e.Resource[n-1] - '0')
		}
		switch e.Kind {
		case validity.Granted:
			if h.asks[i] == e.Request {
				h.over(i, e.Session, e.Request)
			}
		case validity.RequestFailed:
			for i, q := range h.asks {
				if q == e.Request {
					h.over(i, e.Session, e.Request)
				}
			}
		case validity.Stranger:
			w.letGoOf(h, i, e.Token)
		case validity.SessionEnded:
			if h.session == e.Session {
				h.table.CloseSession(h.session)
				h.session, h.asks = "", [contended]uint64{}
			}
		}
	}
}

// believe looks at what a client believes after it has learnt something: I3 and
// I4.
func (w *world) believe(c *client) {
	now := c.clock.read(w.now)
	for i := range min(contended, w.partitions) {
		for _, h := range c.homes {
			token, ok := h.table.Lease(h.session, lockName(i))
			if !ok || !h.table.Valid(now, h.session, lockName(i), token) {
				continue
			}
			w.count.believed++
			until := c.clock.real(h.table.Until(h.session, lockName(i), token)) - 1 // it is over at that instant
			if have := h.r.heldUntil[i]; have.epoch != token.Epoch() || have.until < until {
				w.fail("I3: %s believes in %s, token %d.%d of region %s, for %v more, and the head lease, epoch %d, ends in %v",
					c.name, lockName(i), token.Epoch(), token.Seq(), h.r.name, until-w.now, have.epoch, have.until-w.now)
			}
			for _, o := range w.clients.all {
				if o != c {
					w.believes(o, i, c, h.r, token)
				}
			}
		}
	}
}

func (w *world) believes(o *client, i int, c *client, r *region, token fence.Token) {
	now := o.clock.read(w.now)
	for _, h := range o.homes {
		if t, ok := h.table.Lease(h.session, lockName(i)); ok && h.table.Valid(now, h.session, lockName(i), t) {
			w.fail("I4: %s (region %s, token %d.%d) and %s (region %s, token %d.%d) believe in %s at once",
				c.name, r.name, token.Epoch(), token.Seq(), o.name, h.r.name, t.Epoch(), t.Seq(), lockName(i))
		}
	}
}

// sessionClosed is the end of a session in the state machine: nobody believes
// in what it held (I3).
func (w *world) sessionClosed(id string, reason state.EndReason) {
	if w.clients == nil {
		return
	}
	for _, c := range w.clients.all {
		for _, h := range c.homes {
			if h.session != id {
				continue
			}
			for i := range min(contended, w.partitions) {
				if token, ok := h.table.Lease(id, lockName(i)); ok && h.table.Valid(c.clock.read(w.now), id, lockName(i), token) {
					w.fail("I3: session %s is over (%v), and its client believes in %s", id, reason, lockName(i))
				}
			}
		}
	}
}
