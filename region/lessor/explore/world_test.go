package explore

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
	"github.com/headlease/headlease/region/state"
)

// tick is the world's unit of time.
const tick = time.Second

// origin keeps instants away from zero.
const origin = instant.Instant(1000 * tick)

// options are what a slice leaves in, and its bounds.
type options struct {
	ttl, d time.Duration
	// terms, grants per epoch, epochs and messages per stream at most.
	terms  uint64
	grants fence.Seq
	epochs fence.Epoch
	queue  int
	breaks int
	// gaps of the leader's clock at most; see gapKinds.
	gaps int
	// What may happen.
	drop, replies, revoke, release, acquire bool
	// split: a leadership check begins and passes in two steps, and a stale
	// leader takes keepalives.
	split bool
	// requests per session.
	requests uint64
	// muxed: a session's stream is the same to both slots, as its server carries
	// it from leader to leader [F41].
	muxed bool
	// delay is the lock delay that session 0's first lease names, wait how long
	// session 1 waits in the queue; 0: none, for ever.
	delay, wait time.Duration
	// quiet sessions send no keepalives and are pushed nothing.
	quiet [2]bool
	// start leads from the held world to where the search begins.
	start func(*world)
	bug   bug
	// limit of states, and of time if not 0.
	limit int
	time  time.Duration
}

// client is what the world needs of validity.Table.
type client interface {
	StreamOpened() validity.StreamID
	StreamBroken(validity.StreamID)
	Keepalive(now instant.Instant, session string, on validity.StreamID) *pb.Keepalive
	RequestBegun(session string, request uint64, resource string)
	AcquireAnswered(now, sent instant.Instant, session string, request uint64, a *pb.AcquireResponse) []validity.Event
	Received(now instant.Instant, on validity.StreamID, m *pb.AttachResponse) []validity.Event
	Releasing(now instant.Instant, session, resource string, token fence.Token)
	Lease(session, resource string) (fence.Token, bool)
	Valid(now instant.Instant, session, resource string, token fence.Token) bool
	Term() uint64
	AppendBelief(b []byte, now instant.Instant) []byte
	clone() client
}

type shipped struct{ *validity.Table }

func (s shipped) clone() client { return shipped{s.Clone()} }

// world is one state of everything. Successors share what they do not change.
type world struct {
	o    *options
	rs   *regionStates
	now  instant.Instant
	term uint64
	cur  int
	st   *regionState
	// headRight is how long any leader of the region may hold the partition,
	// taken what has become of it: 0 ours, 1 another region's, 2 dropped here.
	headRight instant.Instant
	taken     int
	lastToken fence.Token
	breaks    int
	gaps      int
	// delayed is when the lock delay ends at the earliest, queued when session 1
	// took its place.
	delayed, queued instant.Instant

	slots   [2]slot
	clients [2]client
	request [2]uint64 // last used
	open    [2]uint64 // open Acquire, 0: none
	reply   [2]*reply
	rel     [2]fence.Token
	x       seeded

	ownLessor, ownClient [2]bool
	broken               string
}

// slot is a server: a leader, a stale one, or none.
type slot struct {
	l       *lessor.Lessor
	pending []lessor.Command
	streams [2]validity.StreamID
	queues  [2][]queued
	// skew is what its clock is ahead of the world's, which is the clients'.
	skew time.Duration
	// ended: it has ended the stream, of which the queue's last message tells.
	ended [2]bool
	// arrived: a keepalive waits for a check that is not begun.
	arrived [2]bool
	lastArr [2]instant.Instant
	ticket  *lessor.Ticket
}

// queued was sent at an instant of the world, by a clock with that skew.
type queued struct {
	m    *pb.AttachResponse // nil: the stream's end
	at   instant.Instant
	skew time.Duration
}

type reply struct {
	m       *pb.AcquireResponse
	request uint64
	at      instant.Instant
	skew    time.Duration
}

// left is the time until an instant of the clock with that skew.
func (w *world) left(x int64, skew time.Duration) uint64 {
	return uint64(max(0, instant.Instant(x).Sub(w.now)-skew))
}

// clock is what a slot's clock says.
func (w *world) clock(l int) instant.Instant { return w.now.Add(w.slots[l].skew) }

func newWorld(o *options) *world {
	rs := newRegionStates(*o)
	w := &world{o: o, rs: rs, now: origin, term: 1, st: rs.root}
	for i := range w.clients {
		w.clients[i] = o.bug.client(i, o.ttl)
		for l := range w.slots {
			if l > 0 && o.muxed {
				w.slots[l].streams[i] = w.slots[0].streams[i]
				continue
			}
			w.slots[l].streams[i] = w.clients[i].StreamOpened()
		}
		w.ownClient[i] = true
	}
	w.lead()
	return w
}

// held is the world in which session 0 holds and session 1 waits, both just
// acknowledged.
func held(o *options) *world {
	w := newWorld(o)
	w.renew()
	for i := range w.clients {
		w.acquireBy(i)
	}
	for i := range w.clients {
		w.keepalive(0, i)
	}
	w.check(0)
	for i := range w.clients {
		w.deliver(0, i, 0)
	}
	if _, ok := w.clients[0].Lease(sessionIDs[0], resource); !ok || !w.believes(0) {
		panic("set-up: session 0 does not believe")
	}
	if o.start != nil {
		o.start(w)
	}
	return w
}

func (w *world) fork() *world {
	n := *w
	n.ownLessor, n.ownClient = [2]bool{}, [2]bool{}
	return &n
}

func (w *world) lessor(l int) *lessor.Lessor {
	if !w.ownLessor[l] {
		w.slots[l].l, w.ownLessor[l] = w.slots[l].l.Clone(), true
	}
	return w.slots[l].l
}

func (w *world) client(i int) client {
	if !w.ownClient[i] {
		w.clients[i], w.ownClient[i] = w.clients[i].clone(), true
	}
	return w.clients[i]
}

func streamID(i int, id validity.StreamID) lessor.StreamID {
	return lessor.StreamID(uint64(i)<<32 | uint64(id))
}

// lead builds the tables of the current term at the current slot.
func (w *world) lead() {
	s := &w.slots[w.cur]
	s.l = lessor.New(lessor.Config{PushEvery: time.Hour}, w.st.view, w.term, w.clock(w.cur))
	w.ownLessor[w.cur] = true
	s.arrived, s.ticket = [2]bool{}, nil
	s.l.PulseFresh(w.clock(w.cur), true)
	for i := range s.streams {
		if !s.ended[i] {
			s.l.StreamOpened(w.clock(w.cur), streamID(i, s.streams[i]))
		}
	}
	if !w.o.bug.keepsCommands {
		s.pending = nil
	}
	w.drain(w.cur)
}

// drain takes what a lessor wants done.
func (w *world) drain(l int) {
	s := &w.slots[l]
	out := s.l.Take()
	for _, m := range out.Sends {
		i, id := int(m.Stream>>32), validity.StreamID(m.Stream&0xffffffff)
		if id != s.streams[i] || s.ended[i] {
			continue // nobody is there any more
		}
		if msg := w.o.bug.sent(w, l, i, m.Message); msg != nil {
			w.enqueue(l, i, msg)
		}
	}
	for _, c := range out.Closes {
		if i, id := int(c>>32), validity.StreamID(c&0xffffffff); id == s.streams[i] && !s.ended[i] {
			s.ended[i] = true
			w.enqueue(l, i, nil)
		}
	}
	if l == w.cur || w.o.bug.keepsCommands {
		s.pending = append(s.pending[:len(s.pending):len(s.pending)], out.Commands...)
	}
}

func (w *world) enqueue(l, i int, m *pb.AttachResponse) {
	s := &w.slots[l]
	s.queues[i] = append(s.queues[i][:len(s.queues[i]):len(s.queues[i])], queued{m, w.now, s.skew})
}

// settle lets a lessor do what is due.
func (w *world) settle(l int) {
	s := &w.slots[l]
	if s.l == nil {
		return
	}
	if w.o.bug.settle != nil && w.o.bug.settle(w, l) {
		return
	}
	if at, ok := s.l.Next(); ok && at <= w.clock(l) {
		w.lessor(l).Tick(w.clock(l))
	}
	w.drain(l)
}

// apply commits a command in the current term and feeds the leader.
func (w *world) apply(cmd *pb.Command, feed bool) *pb.CommandResult {
	a := w.rs.apply(w.st, w.term, cmd)
	w.st = a.to
	for _, ev := range a.events {
		if g, ok := ev.(state.LeaseGranted); ok {
			if g.Token <= w.lastToken {
				w.broken = "I2: tokens do not rise"
			}
			w.lastToken = g.Token
			if w.now < w.delayed {
				w.broken = "I6: granted within a lock delay"
			}
		}
		if d, ok := ev.(state.DelayBegun); ok {
			w.delayed = w.now.Add(time.Duration(d.DelayMillis) * time.Millisecond)
		}
		if _, ok := ev.(state.PartitionDropped); ok {
			w.delayed = 0 // the next epoch knows nothing of it; Unsettled is not explored
		}
		if f, ok := ev.(state.WaiterEnded); ok && f.Error.GetWaitEnded() != nil && w.now < w.queued.Add(w.o.wait) {
			w.broken = "a wait ended before its time"
		}
	}
	if feed && len(a.events) > 0 {
		w.lessor(w.cur).Applied(w.clock(w.cur), a.events)
		w.drain(w.cur)
	}
	return a.result
}

func (w *world) renew() {
	w.headRight = w.now.Add(w.o.d)
	w.lessor(w.cur).HeadLease(w.clock(w.cur), partition, w.st.epoch(), w.clock(w.cur).Add(w.o.d))
	w.drain(w.cur)
}

func (w *world) acquireBy(i int) {
	w.request[i]++
	w.open[i] = w.request[i]
	w.client(i).RequestBegun(sessionIDs[i], w.request[i], resource)
	c := &pb.AcquireCommand{
		SessionId: sessionIDs[i], RequestId: w.request[i], Resource: resource, Partition: partition,
		Epoch: uint32(w.st.epoch()), Wait: true,
	}
	if i == 0 {
		c.LockDelayMs = w.o.delay.Milliseconds()
	} else {
		c.WaitMs, w.queued = w.o.wait.Milliseconds(), w.now
	}
	w.apply(&pb.Command{Kind: &pb.Command_Acquire{Acquire: c}}, true)
}

func (w *world) keepalive(l, i int) {
	s := &w.slots[l]
	ka := w.client(i).Keepalive(w.now, sessionIDs[i], s.streams[i])
	if ka == nil {
		return
	}
	w.lessor(l).Keepalive(w.clock(l), streamID(i, s.streams[i]), ka)
	s.arrived[i], s.lastArr[i] = true, w.clock(l)
	w.drain(l)
}

// check is a whole leadership check, begun and passed now.
func (w *world) check(l int) {
	le := w.lessor(l)
	le.CheckPassed(w.clock(l), le.CheckBegun(w.clock(l)))
	w.slots[l].arrived = [2]bool{}
	w.drain(l)
}

// deliver takes the k-th message of a stream.
func (w *world) deliver(l, i, k int) {
	q := w.slots[l].queues[i]
	m := q[k]
	left := append(q[:0:0], q[:k]...)
	w.slots[l].queues[i] = append(left, q[k+1:]...)
	if m.m == nil {
		w.reopen(l, i)
		return
	}
	w.events(i, w.o.bug.received(w, l, i, m))
}

// events does what the SDK does.
func (w *world) events(i int, events []validity.Event) {
	for _, ev := range events {
		switch ev.Kind {
		case validity.Granted, validity.RequestFailed:
			w.open[i] = 0
		case validity.Stranger:
			w.client(i).Releasing(w.now, sessionIDs[i], ev.Resource, ev.Token)
			if w.rel[i] == 0 {
				w.rel[i] = ev.Token
			}
		case validity.Withdrawn, validity.Lost, validity.SessionEnded:
		}
	}
}

func (w *world) believes(i int) bool {
	token, ok := w.clients[i].Lease(sessionIDs[i], resource)
	return ok && w.clients[i].Valid(w.now, sessionIDs[i], resource, token)
}

// violation names the invariant that does not hold, or is empty.
func (w *world) violation() string {
	if w.broken != "" {
		return w.broken
	}
	b0, b1 := w.believes(0), w.believes(1)
	if b0 && b1 {
		return "I4: two believers"
	}
	for i, b := range [2]bool{b0, b1} {
		if !b {
			continue
		}
		token, _ := w.clients[i].Lease(sessionIDs[i], resource)
		lease, ok := w.st.lease()
		switch {
		case !w.st.alive(i):
			return fmt.Sprintf("I3: session %d believes after its end", i)
		case w.taken != 0 || w.headRight <= w.now:
			return fmt.Sprintf("I3: session %d believes outside the head lease", i)
		case !ok || lease.Session != sessionIDs[i] || lease.Token != token:
			return fmt.Sprintf("ended lease revived: session %d believes in %d/%d", i, token.Epoch(), token.Seq())
		}
	}
	return ""
}

// normalise forgets what can only make a client believe less.
func (w *world) normalise() {
	stale := 1 - w.cur
	if s := &w.slots[stale]; s.l != nil && !w.o.bug.keepsStale {
		if _, _, ok := s.l.Hold(w.clock(stale), partition); !ok && (!w.o.split || s.ticket == nil) {
			s.l, s.ticket, s.arrived = nil, nil, [2]bool{}
		}
	}
	if !w.o.bug.keepsMessages {
		for l := range w.slots {
			for i := range w.clients {
				q := w.slots[l].queues[i]
				for k := 0; k < len(q); k++ {
					if w.dead(i, q[k]) {
						q = append(append(q[:0:0], q[:k]...), q[k+1:]...)
						k--
					}
				}
				w.slots[l].queues[i] = q
			}
		}
	}
	for i, r := range w.reply {
		if r != nil && w.left(r.m.GetGranted().GetUntil(), r.skew) == 0 {
			w.reply[i] = nil
		}
	}
}

// dead: the client would drop the message, or it says nothing any more.
func (w *world) dead(i int, q queued) bool {
	m := q.m
	if m == nil {
		return false
	}
	if m.GetTerm() < w.clients[i].Term() {
		return true
	}
	if p := m.GetPush(); p != nil {
		for _, e := range p.GetPartitions() {
			if w.left(e.GetUntil(), q.skew) > 0 {
				return false
			}
		}
		return true
	}
	return false
}

func cloneMessage(m *pb.AttachResponse) *pb.AttachResponse { return proto.CloneOf(m) }
