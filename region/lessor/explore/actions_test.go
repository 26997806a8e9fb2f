package explore

import (
	"fmt"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// step names what a transition did.
type step struct {
	op   string
	a, b int8
}

func (s step) String() string {
	switch {
	case s.a < 0:
		return s.op
	case s.b < 0:
		return fmt.Sprintf("%s(%d)", s.op, s.a)
	}
	return fmt.Sprintf("%s(%d,%d)", s.op, s.a, s.b)
}

// successors gives every world that one step leads to.
func (w *world) successors(emit func(step, *world)) {
	yield := func(op string, a, b int, n *world) {
		n.settle(n.cur)
		emit(step{op, int8(a), int8(b)}, n)
	}
	for l := range w.slots {
		w.leaderSteps(l, yield)
	}
	for k := range w.slots[w.cur].pending {
		n := w.fork()
		n.commit(k, true)
		yield("commit", k, -1, n)
	}
	for i := range w.clients {
		w.clientSteps(i, yield)
	}
	w.partitionSteps(yield)
	if w.term < w.o.terms {
		w.changeLeader(yield)
	}
	n := w.fork()
	n.now = n.now.Add(tick)
	if n.o.bug.keepsCommands {
		n.settle(1 - n.cur) // otherwise its commands come to nothing
	}
	yield("tick", -1, -1, n)
	if w.gaps < w.o.gaps {
		for k := range gapKinds {
			n := w.fork()
			n.gap(k)
			yield("gap", k, -1, n)
		}
	}
	w.o.bug.steps(w, yield)
}

// gapKinds of a leader's clock: the process stood still and its clock ran on; it
// jumped ahead, further than anything was promised; it stood still for a tick,
// which the wall clock has shown.
const gapKinds = 3

const jump = 5 * tick

// gap makes the leader begin anew in its term. A stale one has nothing then, as
// if it were gone.
func (w *world) gap(kind int) {
	w.gaps++
	s := &w.slots[w.cur]
	switch kind {
	case 1:
		s.skew += jump
	case 2:
		w.now = w.now.Add(tick)
		s.skew -= tick
	}
	w.lessor(w.cur).ClockGap(w.clock(w.cur))
	s.arrived = [2]bool{}
	w.drain(w.cur)
	w.o.bug.gapped(w)
}

// leaderSteps are what a slot, leading or stale, does with its streams.
func (w *world) leaderSteps(l int, yield func(string, int, int, *world)) {
	s := &w.slots[l]
	for i := range w.clients {
		if n := min(len(s.queues[i]), w.o.bug.window); n > 0 {
			for k := range n {
				f := w.fork()
				f.deliver(l, i, k)
				yield("get", l, i, f)
			}
		}
		if w.breaks < w.o.breaks {
			n := w.fork()
			n.breakStream(l, i)
			yield("break", l, i, n)
		}
	}
	if s.l == nil {
		return
	}
	stale := l != w.cur
	for i := range w.clients {
		if w.o.quiet[i] {
			continue
		}
		if !s.arrived[i] && !s.ended[i] && (!stale || w.o.split || w.o.bug.staleKeepalives) && w.believable(l, i) {
			n := w.fork()
			n.keepalive(l, i)
			yield("keepalive", l, i, n)
		}
		if len(s.queues[i]) < w.o.queue {
			n := w.fork()
			n.lessor(l).Push(n.clock(l), streamID(i, s.streams[i]))
			n.drain(l)
			if len(n.slots[l].queues[i]) > len(s.queues[i]) {
				yield("push", l, i, n)
			}
			if w.o.replies && w.reply[i] == nil {
				if n := w.fork(); n.answer(l, i) {
					yield("answer", l, i, n)
				}
			}
		}
	}
	room := true
	for i := range w.clients {
		room = room && (!s.arrived[i] || len(s.queues[i]) < w.o.queue)
	}
	switch {
	case !w.o.split:
		if s.l.CheckWanted() && room && (!stale || w.o.bug.staleChecks) {
			n := w.fork()
			n.check(l)
			yield("check", l, -1, n)
		}
	case s.ticket != nil:
		n := w.fork()
		w.o.bug.passed(n, l)
		yield("check passed", l, -1, n)
	case !stale && s.l.CheckWanted():
		n := w.fork()
		t := n.lessor(l).CheckBegun(n.clock(l))
		n.slots[l].ticket, n.slots[l].arrived = &t, [2]bool{}
		yield("check begun", l, -1, n)
	}
}

// believable: the session exists for the slot, so its keepalive does something.
func (w *world) believable(l, i int) bool {
	_, _, ok := w.slots[l].l.Deadlines(sessionIDs[i])
	return ok
}

func passTicket(w *world, l int) {
	t := *w.slots[l].ticket
	w.slots[l].ticket = nil
	w.lessor(l).CheckPassed(w.clock(l), t)
	w.drain(l)
}

func (w *world) breakStream(l, i int) {
	w.breaks++
	s := &w.slots[l]
	if w.o.bug.muxGoesOn { // the client hears nothing of it
		s.queues[i] = nil
		if s.l == nil {
			return
		}
		w.lessor(l).StreamClosed(w.clock(l), streamID(i, s.streams[i]))
		w.lessor(l).StreamOpened(w.clock(l), streamID(i, s.streams[i]))
		w.drain(l)
		return
	}
	w.reopen(l, i)
}

// reopen: the client's stream has ended, and it opens a new one.
func (w *world) reopen(l, i int) {
	s := &w.slots[l]
	if !w.o.bug.keepsStreams {
		w.client(i).StreamBroken(s.streams[i])
	}
	id := w.client(i).StreamOpened()
	for k := range w.slots {
		if k != l && !w.o.muxed {
			continue
		}
		s := &w.slots[k]
		s.streams[i], s.queues[i], s.ended[i] = id, nil, false
		if s.l != nil { // it does not learn that the old one is gone
			w.lessor(k).StreamOpened(w.clock(k), streamID(i, id))
			w.drain(k)
		}
	}
}

// answer sends the answer to the session's granted Acquire, perhaps again.
func (w *world) answer(l, i int) bool {
	h, err := w.o.bug.answer(w, l, i)
	if err != nil || h == nil {
		return false
	}
	term := w.lessor(l).Term()
	w.drain(l)
	w.reply[i] = &reply{request: w.request[i], at: w.now, skew: w.slots[l].skew, m: &pb.AcquireResponse{
		Term: term, ReceivedAt: int64(w.clock(l)), Outcome: &pb.AcquireResponse_Granted{Granted: h},
	}}
	return true
}

func honestAnswer(w *world, l, i int) (*pb.Held, error) {
	token, ok := w.slots[l].l.Held(sessionIDs[i], resource)
	if !ok {
		return nil, nil
	}
	return w.lessor(l).Answer(w.clock(l), sessionIDs[i], resource, token)
}

// clientSteps are a session's own.
func (w *world) clientSteps(i int, yield func(string, int, int, *world)) {
	if r := w.reply[i]; r != nil {
		n := w.fork()
		n.reply[i] = nil
		n.events(i, n.client(i).AcquireAnswered(n.now, r.at, sessionIDs[i], r.request, r.m))
		yield("answered", i, -1, n)
	}
	lease, isHeld := w.st.lease()
	p, _ := w.st.view.Partition(partition)
	if w.o.acquire && w.st.alive(i) && w.open[i] == 0 && w.request[i] < w.o.requests && w.taken != 2 && w.rel[i] == 0 &&
		(!isHeld || lease.Session != sessionIDs[i]) && p.Seq < w.o.grants {
		n := w.fork()
		n.acquireBy(i)
		yield("acquire", i, -1, n)
	}
	if token, ok := w.clients[i].Lease(sessionIDs[i], resource); w.o.release && ok && w.rel[i] == 0 {
		n := w.fork()
		n.client(i).Releasing(n.now, sessionIDs[i], resource, token)
		n.rel[i] = token
		yield("release", i, -1, n)
	}
	if w.rel[i] != 0 {
		n := w.fork()
		n.apply(&pb.Command{Kind: &pb.Command_Release{Release: &pb.ReleaseCommand{
			SessionId: sessionIDs[i], Resource: resource, Token: uint64(w.rel[i]),
		}}}, true)
		n.rel[i] = 0
		if n.within() {
			yield("released", i, -1, n)
		}
		n = w.fork()
		n.rel[i] = 0
		yield("release lost", i, -1, n)
	}
}

// within: the bounds on tokens hold.
func (w *world) within() bool {
	p, _ := w.st.view.Partition(partition)
	return p.Seq <= w.o.grants
}

// partitionSteps are the head lease's, and revocations.
func (w *world) partitionSteps(yield func(string, int, int, *world)) {
	if w.taken == 0 {
		if _, until, ok := w.slots[w.cur].l.Hold(w.clock(w.cur), partition); !ok || until < w.clock(w.cur).Add(w.o.d) {
			n := w.fork()
			n.renew()
			yield("renew", -1, -1, n)
		}
	}
	if lease, ok := w.st.lease(); w.o.revoke && ok && !lease.Revoked {
		n := w.fork()
		n.apply(&pb.Command{Term: w.term, Kind: &pb.Command_Revoke{Revoke: &pb.RevokeCommand{
			Resource: resource, Token: uint64(lease.Token), Reason: "operator",
		}}}, true)
		w.o.bug.revoked(n)
		yield("revoke", -1, -1, n)
	}
	if !w.o.drop {
		return
	}
	switch epoch := w.st.epoch(); {
	case w.taken == 0 && w.headRight <= w.now:
		n := w.fork()
		n.taken = 1
		n.lessor(n.cur).Lapsed(n.clock(n.cur), partition, epoch)
		n.drain(n.cur)
		yield("taken", -1, -1, n)
	case w.taken == 1:
		n := w.fork()
		n.apply(&pb.Command{Term: w.term, Kind: &pb.Command_Drop{Drop: &pb.DropCommand{Partition: partition, Epoch: uint32(epoch)}}}, true)
		n.taken = 2
		yield("drop", -1, -1, n)
	case w.taken == 2:
		if p, _ := w.st.view.Partition(partition); p.Epoch < w.o.epochs {
			n := w.fork()
			n.st = n.rs.adopt(n.st, n.term, p.Epoch+1, n.o.d)
			n.lessor(n.cur).Applied(n.clock(n.cur), []state.Event{state.PartitionAdopted{Partition: partition, Epoch: p.Epoch + 1}})
			n.drain(n.cur)
			n.taken = 0
			yield("adopt", -1, -1, n)
		}
	}
}

// commit takes a command of the current leader out of flight.
func (w *world) commit(k int, feed bool) {
	s := &w.slots[w.cur]
	c := s.pending[k]
	s.pending = append(append(s.pending[:0:0], s.pending[:k]...), s.pending[k+1:]...)
	cmd := w.o.bug.restamp(c.Command, w.term)
	result := w.apply(cmd, feed)
	w.o.bug.committed(w, cmd, feed)
	if feed {
		w.lessor(w.cur).CommandDone(w.clock(w.cur), c.ID, result, nil)
		w.drain(w.cur)
	}
	if !w.within() {
		w.broken = "" // cut off by the caller's bound on grants
	}
}

// changeLeader elects the other slot. What the old leader had proposed commits
// before the new tables are built, or is lost; the old leader sees neither.
func (w *world) changeLeader(yield func(string, int, int, *world)) {
	pending := len(w.slots[w.cur].pending)
	for set := range 1 << min(pending, 2) {
		n := w.fork()
		for k := min(pending, 2) - 1; k >= 0; k-- {
			if set&(1<<k) != 0 {
				n.commit(k, false)
			}
		}
		if !w.o.bug.keepsCommands {
			n.slots[n.cur].pending = nil
		}
		n.cur, n.term = 1-n.cur, n.term+1
		n.lead()
		w.o.bug.elected(n)
		yield("leader", n.cur, set, n)
	}
}
