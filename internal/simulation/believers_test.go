package simulation

import (
	"errors"
	"fmt"
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
	asks [contended]uint64
	// had is the lease that it has believed in of late and not released.
	had    [contended]fence.Token
	stream *stream
	timer  time.Duration
}

func lockName(i int) string { return fmt.Sprintf("lock/x%d", i) }

func newClients(w *world) *clients {
	cs := &clients{streams: map[lessor.StreamID]*stream{}}
	for k := range w.believers {
		c := &client{name: fmt.Sprintf("c%d", k), at: w.rnd.IntN(len(w.sites)), clock: w.clock()}
		if w.calm {
			c.at = 0 // scenarios tell what a worker of the first owner's region gets
		}
		for _, r := range w.regions {
			h := &home{c: c, r: r, table: validity.New(validity.Config{DriftPPM: rhoPPM}), ttl: w.between(2*time.Second, 10*time.Second)}
			if w.calm {
				h.ttl = 10 * time.Second // as a client has it that asks for no other
			}
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
	if h.had[i] == token {
		h.had[i] = 0
	}
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

// countLost notes the leases that ended and were not released.
func (w *world) countLost(h *home, now instant.Instant) {
	for i := range min(contended, w.partitions) {
		token, ok := h.table.Lease(h.session, lockName(i))
		if !ok || !h.table.Valid(now, h.session, lockName(i), token) {
			token = 0
		}
		if had := h.had[i]; had != 0 && had != token {
			w.count.leasesLost++
			w.note("%s loses %s, token %d.%d of region %s (session %q)", h.c.name, lockName(i), had.Epoch(), had.Seq(), h.r.name, h.session)
		}
		h.had[i] = token
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
