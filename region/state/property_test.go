package state

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// TestRandomCommands runs random commands against the Machine and the naive
// implementation, with restores in between, and compares results, events and
// content. A third observer knows the events alone and checks what must hold
// whatever the two agree on.
func TestRandomCommands(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newRandomRun(t)
		for range rapid.IntRange(1, 150).Draw(t, "commands") {
			r.step()
		}
		r.compareContent()
		for _, old := range r.views {
			if got := old.view.StateHash(); got != old.hash {
				t.Fatalf("the View at index %d changed", old.view.AppliedIndex())
			}
		}
	})
}

type randomRun struct {
	t     *rapid.T
	m     *Machine
	n     *naive
	o     *observer
	index uint64
	views []oldView
}

type oldView struct {
	view View
	hash uint64
}

func newRandomRun(t *rapid.T) *randomRun {
	r := &randomRun{t: t, m: New(), n: newNaive(), o: newObserver(t)}
	r.do(cmdInit("eu", testInc))
	r.do(cmdConfigure(testConfiguration()))
	r.own("p", 1)
	for i := range 4 {
		r.do(cmdOpen(fmt.Sprintf("s%d", i)))
	}
	return r
}

// do applies one command to both and compares.
func (r *randomRun) do(c *pb.Command) *pb.CommandResult {
	r.index++
	given := proto.CloneOf(c)
	got, events := r.m.Apply(r.index, testTerm, c)
	want, wantEvents := r.n.apply(r.index, testTerm, given)
	if !sameResult(got, want) {
		r.t.Fatalf("%v:\nresult %v\nwant   %v", given, got, want)
	}
	if !slices.EqualFunc(events, wantEvents, sameKindOfEvent) {
		r.t.Fatalf("%v:\nevents %+v\nwant   %+v", given, events, wantEvents)
	}
	if r.m.Poisoned() != nil {
		r.t.Fatalf("%v: %v", given, r.m.Poisoned())
	}
	r.o.observe(events)
	return got
}

// sameResult compares all but the texts of errors and alarms.
func sameResult(a, b *pb.CommandResult) bool {
	a, b = proto.CloneOf(a), proto.CloneOf(b)
	for _, r := range []*pb.CommandResult{a, b} {
		if r.GetError() != nil {
			r.Error = errRefused(errKind(r.GetError()))
		}
		for _, it := range r.GetItems().GetItems() {
			if it.GetRegister().GetAlarm() != "" {
				it.Register.Alarm = "alarmed"
			}
		}
	}
	return proto.Equal(a, b)
}

func sameKindOfEvent(a, b Event) bool {
	switch x := a.(type) {
	case WaiterEnded:
		y, ok := b.(WaiterEnded)
		same := errKind(x.Error) == errKind(y.Error)
		x.Error, y.Error = nil, nil
		return ok && same && x == y
	case RegisterChanged:
		y, ok := b.(RegisterChanged)
		same := (x.Record.Alarm == "") == (y.Record.Alarm == "")
		x.Record.Alarm, y.Record.Alarm = "", ""
		return ok && same && x == y
	}
	return sameEvent(a, b)
}

func pick[T any](r *randomRun, what string, from ...T) T {
	return rapid.SampledFrom(from).Draw(r.t, what)
}

func (r *randomRun) chance(percent int, what string) bool {
	return rapid.IntRange(0, 99).Draw(r.t, what) >= 100-percent
}

func (r *randomRun) step() {
	var c *pb.Command
	switch k := rapid.IntRange(0, 99).Draw(r.t, "kind"); {
	case k < 40:
		c = r.acquire()
	case k < 58:
		l := r.lease()
		c = cmdRelease(l.Session, l.Resource, l.Token)
	case k < 64:
		c = cmdCancel(r.session(), r.request())
	case k < 68:
		l := r.lease()
		c = cmdRevoke(l.Resource, l.Token, "random")
	case k < 73:
		l := r.lease()
		c = cmdEndRevocation(l.Resource, l.Token)
	case k < 77:
		c = cmdOpen(r.session())
	case k < 80:
		c = cmdClose(r.session())
	case k < 83:
		c = cmdExpire(r.session(), r.session(), r.session())
	case k < 89:
		r.global()
		return
	case k < 92:
		r.special()
		return
	case k < 94:
		c = pick(r, "admin", cmdPulse(), cmdBeginTerm(testTerm), cmdInit("eu", 1), cmdInit("us", 1), cmdConfigure(testConfiguration()),
			cmdRecordVoters(voterRecord("w", rapid.Uint64Range(1, 2).Draw(r.t, "inc"), 1, rapid.Uint64Range(1, 9).Draw(r.t, "writes"))))
	case k < 97:
		restored, err := ReadSnapshot(strings.NewReader(string(write(r.t, r.m))))
		if err != nil {
			r.t.Fatalf("restore: %v", err)
		}
		r.m = restored
		return
	default:
		v := r.m.View()
		r.views = append(r.views, oldView{v, v.StateHash()})
		return
	}
	if r.chance(3, "wrong term") {
		c.Term = testTerm - 1
	} else if r.chance(3, "no term") {
		c.Term = 0
	}
	r.do(c)
}

func (r *randomRun) session() string { return pick(r, "session", "s0", "s1", "s2", "s3", "s4") }

func (r *randomRun) request() uint64 { return rapid.Uint64Range(0, 40).Draw(r.t, "request") }

func (r *randomRun) acquire() *pb.Command {
	c := acquireCommand(r.session(), r.request(), pick(r, "resource", "x", "y", "z", "qx", "qy"), r.chance(60, "wait"))
	a := c.GetAcquire()
	if r.chance(60, "rising id") {
		// mostly as a client does it: the next id, sometimes the bound close below
		if s := r.n.sessions[a.GetSessionId()]; s != nil {
			a.RequestId = 1
			for id := range s.asked {
				a.RequestId = max(a.RequestId, id+1)
			}
		}
		if r.chance(10, "raise lowest") {
			a.LowestOpenRequest = max(1, a.GetRequestId()-min(a.GetRequestId(), 3))
		}
	} else if r.chance(10, "any lowest") {
		a.LowestOpenRequest = r.request()
	}
	if p := r.n.parts[a.GetPartition()]; p != nil {
		a.Epoch = uint32(p.epoch)
	}
	if r.chance(2, "other epoch") {
		a.Epoch++
	}
	if r.chance(2, "other partition") {
		a.Partition = pick(r, "partition", "p", "q", "nowhere")
	}
	return c
}

// lease draws a lease that is held, or something near one.
func (r *randomRun) lease() Lease {
	var all []Lease
	for l := range r.m.View().Leases() {
		all = append(all, l)
	}
	if len(all) == 0 || r.chance(10, "no lease") {
		return Lease{Resource: pick(r, "resource", "x", "qx", "none"), Session: r.session(), Token: fence.Token(rapid.Uint64Range(0, 3).Draw(r.t, "token"))}
	}
	l := pick(r, "lease", all...)
	if r.chance(5, "other token") {
		l.Token++
	}
	if r.chance(5, "other session") {
		l.Session = r.session()
	}
	return l
}

// own runs the region's own vote for an epoch and adopts it.
func (r *randomRun) own(partition string, epoch fence.Epoch) {
	b := r.do(cmdReserve(0)).GetReserved().GetBallot()
	r.do(cmdPromise(partition, r.n.parts[partition].rec.Guard().Proto(), b))
	r.do(cmdAccepted(partition, r.n.parts[partition].rec.Guard().Proto(), b, euValue(uint32(epoch))))
	r.do(cmdAdopt(partition, uint32(epoch), b))
}

// global is a step of the registers and of the partitions.
func (r *randomRun) global() {
	name := pick(r, "partition", "p", "q")
	p := r.n.parts[name]
	near := fence.Epoch(max(0, int(p.epoch)+rapid.IntRange(-1, 3).Draw(r.t, "epoch")))
	guard := p.rec.Guard()
	if r.chance(10, "stale guard") {
		guard.Promised.Round++
	}
	b := register.Ballot{Round: p.rec.Promised.Round + uint64(rapid.IntRange(0, 1).Draw(r.t, "round")), Region: pick(r, "region", "eu", "us"), Incarnation: testInc}
	switch rapid.IntRange(0, 5).Draw(r.t, "global") {
	case 0, 1:
		r.own(name, near)
	case 2:
		r.do(cmdDrop(name, uint32(near)))
	case 3:
		r.do(cmdPromise(name, guard.Proto(), b.Proto()))
	case 4:
		v := euValue(uint32(near))
		v.Owner = b.Region
		r.do(cmdAccepted(name, guard.Proto(), b.Proto(), v))
	case 5:
		r.do(cmdAdopt(name, uint32(near), p.rec.Accepted.Proto()))
	}
}

// special brings both to states that no command reaches soon.
func (r *randomRun) special() {
	name := pick(r, "partition", "p", "q")
	mp, _ := r.m.partitions.Get(name)
	p := r.n.parts[name]
	if !mp.live() {
		return
	}
	r.m.view = nil
	mp = r.m.editPartition(mp)
	switch rapid.IntRange(0, 2).Draw(r.t, "special") {
	case 0:
		mp.phase, p.phase = phaseDraining, phaseDraining
	case 1:
		p.seq = max(p.seq, fence.MaxSeq-1)
		mp.seq = p.seq
	case 2: // the operator clears an alarm
		mp.record.Alarm, p.rec.Alarm = "", ""
	}
}

// compareContent compares all that both keep.
func (r *randomRun) compareContent() {
	v := r.m.View()
	for p := range v.Partitions() {
		n := r.n.parts[p.Name]
		if p.Epoch != n.epoch || p.Seq != n.seq || p.Phase != n.phase || p.Dropped != n.dropped || !sameRecord(p.Register, n.rec) {
			r.t.Fatalf("partition %+v, want %+v", p, n)
		}
	}
	waiters, sessions := 0, 0
	for s := range v.Sessions() {
		n := r.n.sessions[s.ID]
		if n == nil || s.LowestOpen != n.lowest || s.Closing != n.closing {
			r.t.Fatalf("session %+v, want %+v", s, n)
		}
		held := 0
		for range v.SessionLeases(s.ID) {
			held++
		}
		for w := range v.SessionWaiters(s.ID) {
			waiters++
			if !slices.Contains(r.n.queues[w.Resource], w) {
				r.t.Fatalf("waiter %+v is in no queue", w)
			}
		}
		if held != s.Held {
			r.t.Fatalf("session %+v lists %d leases", s, held)
		}
		sessions++
	}
	leases := 0
	for l := range v.Leases() {
		leases++
		want := r.n.leases[l.Resource]
		want.Holder, want.Waiters = "client/"+want.Session, len(r.n.queues[l.Resource])
		if l != want {
			r.t.Fatalf("lease %+v, want %+v", l, want)
		}
	}
	queued := 0
	for name, q := range r.n.queues {
		queued += len(q)
		if got := slices.Collect(v.Waiters(name)); !slices.Equal(got, q) && len(got)+len(q) > 0 {
			r.t.Fatalf("queue of %s: %+v, want %+v", name, got, q)
		}
	}
	c := v.Counts()
	if c.Leases != leases || leases != len(r.n.leases) || c.Waiters != queued || waiters != queued || c.Sessions != sessions || sessions != len(r.n.sessions) {
		r.t.Fatalf("counts %+v; %d leases, %d waiters, %d sessions; want %d, %d, %d", c, leases, waiters, sessions, len(r.n.leases), queued, len(r.n.sessions))
	}
	if v.BallotRound() != r.n.round {
		r.t.Fatalf("round %d, want %d", v.BallotRound(), r.n.round)
	}
	for id, want := range r.n.voters {
		if got, _ := v.Voter(id); got != want {
			r.t.Fatalf("voter %+v, want %+v", got, want)
		}
	}
	r.o.compare(v)
}

func sameRecord(a, b register.Record) bool {
	same := (a.Alarm == "") == (b.Alarm == "")
	a.Alarm, b.Alarm = "", ""
	return same && a == b
}

// observer knows only the events. It checks the invariants that no agreement
// of two implementations can excuse.
type observer struct {
	t       *rapid.T
	last    map[string]fence.Token
	holders map[string]LeaseGranted
	queues  map[string][]WaiterEnqueued
	open    map[string]bool
	live    map[string]fence.Epoch
}

func newObserver(t *rapid.T) *observer {
	return &observer{
		t: t, last: map[string]fence.Token{}, holders: map[string]LeaseGranted{}, queues: map[string][]WaiterEnqueued{},
		open: map[string]bool{}, live: map[string]fence.Epoch{},
	}
}

func (o *observer) observe(events []Event) {
	for _, e := range events {
		switch e := e.(type) {
		case SessionOpened:
			o.open[e.Session.ID] = true
		case SessionClosed:
			delete(o.open, e.ID)
		case PartitionAdopted:
			if !e.Resumed && e.Epoch <= o.last[e.Partition].Epoch() {
				o.t.Fatalf("%+v: tokens were given in epoch %d before", e, o.last[e.Partition].Epoch())
			}
			o.live[e.Partition] = e.Epoch
		case PartitionDropped:
			delete(o.live, e.Partition)
		case LeaseGranted:
			o.granted(e)
		case LeaseEnded:
			if h, ok := o.holders[e.Resource]; !ok || h.Token != e.Token || h.Session != e.Session {
				o.t.Fatalf("%+v ended what was not held", e)
			}
			delete(o.holders, e.Resource)
		case WaiterEnqueued:
			o.queues[e.Resource] = append(o.queues[e.Resource], e)
		case WaiterEnded:
			q := o.queues[e.Resource]
			i := slices.Index(q, WaiterEnqueued{Session: e.Session, Request: e.Request, Resource: e.Resource, Partition: e.Partition})
			if i < 0 {
				o.t.Fatalf("%+v did not wait", e)
			}
			o.queues[e.Resource] = slices.Delete(q, i, i+1)
		}
	}
}

func (o *observer) granted(e LeaseGranted) {
	if h, held := o.holders[e.Resource]; held {
		o.t.Fatalf("%+v granted while %+v holds", e, h)
	}
	if e.Token <= o.last[e.Partition] {
		o.t.Fatalf("token %v after %v: not rising [I2]", e.Token, o.last[e.Partition])
	}
	if epoch, ok := o.live[e.Partition]; !ok || epoch != e.Token.Epoch() {
		o.t.Fatalf("%+v granted outside its live epoch [H7]", e)
	}
	if !o.open[e.Session] {
		o.t.Fatalf("%+v granted to an ended session [F22]", e)
	}
	q := o.queues[e.Resource]
	switch {
	case !e.Offered && len(q) > 0:
		o.t.Fatalf("%+v passed over %+v", e, q)
	case e.Offered && (len(q) == 0 || q[0].Session != e.Session || q[0].Request != e.Request):
		o.t.Fatalf("%+v offered out of turn: %+v", e, q)
	case e.Offered:
		o.queues[e.Resource] = q[1:]
	}
	o.last[e.Partition] = e.Token
	o.holders[e.Resource] = e
}

// compare checks that who knows only the events knows the state.
func (o *observer) compare(v View) {
	n := 0
	for l := range v.Leases() {
		n++
		if h := o.holders[l.Resource]; h.Token != l.Token || h.Session != l.Session {
			o.t.Fatalf("lease %+v, the events say %+v", l, h)
		}
	}
	waiting := 0
	for name, q := range o.queues {
		waiting += len(q)
		i := 0
		for w := range v.Waiters(name) {
			if i >= len(q) || WaiterEnqueued(w) != q[i] {
				o.t.Fatalf("queue of %s differs from the events", name)
			}
			i++
		}
	}
	if n != len(o.holders) || waiting != v.Counts().Waiters {
		o.t.Fatalf("%d leases and %d waiters, the events say %d and %d", n, v.Counts().Waiters, len(o.holders), waiting)
	}
}
