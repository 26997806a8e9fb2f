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
			if got := old.view.r.fullHash(); got != old.hash {
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
	small := piece{removals: rapid.IntRange(1, 4).Draw(t, "removals"), looks: rapid.IntRange(1, 6).Draw(t, "looks")}
	r := &randomRun{t: t, m: New(), n: newNaive(small), o: newObserver(t)}
	r.m.piece = small
	r.do(cmdInit("eu", testInc))
	r.do(cmdConfigure(testConfiguration()))
	if r.chance(80, "level 2") {
		r.do(cmdRaise(2))
	}
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
	if got, want := r.m.root.hash(r.m.sum), r.m.fullHash(); got != want {
		r.t.Fatalf("%v: the hash kept, %x, differs from the content's, %x", given, got, want)
	}
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
	switch k := rapid.IntRange(0, 119).Draw(r.t, "kind"); {
	case k < 40:
		c = r.acquire()
	case k < 54:
		l := r.lease()
		c = cmdRelease(l.Session, l.Resource, l.Token)
	case k < 59:
		c = cmdCancel(r.session(), r.request())
	case k < 64:
		l := r.lease()
		c = cmdRevoke(l.Resource, l.Token, "random")
	case k < 70:
		l := r.lease()
		c = cmdEndRevocation(l.Resource, l.Token)
	case k < 74:
		c = cmdOpen(r.session())
	case k < 76:
		c = cmdClose(r.session())
	case k < 80:
		c = cmdExpire(r.session(), r.session(), r.session())
	case k < 87:
		r.global()
		return
	case k < 90:
		r.special()
		return
	case k < 92:
		c = pick(r, "admin", cmdPulse(), cmdBeginTerm(testTerm), cmdInit("eu", 1), cmdInit("us", 1), cmdConfigure(testConfiguration()),
			cmdRecordVoters(voterRecord("w", rapid.Uint64Range(1, 2).Draw(r.t, "inc"), 1, rapid.Uint64Range(1, 9).Draw(r.t, "writes"))))
	case k < 95:
		r.restore()
		return
	case k < 98:
		v := r.m.View()
		r.views = append(r.views, oldView{v, v.r.fullHash()})
		return
	default:
		c = r.second(k)
	}
	if r.chance(3, "wrong term") {
		c.Term = testTerm - 1
	} else if r.chance(3, "no term") {
		c.Term = 0
	}
	r.do(c)
}

// second draws a command of level 2.
func (r *randomRun) second(k int) *pb.Command {
	name := pick(r, "partition", "p", "q")
	epoch := uint32(r.n.parts[name].epoch)
	if r.chance(5, "other epoch") {
		epoch++
	}
	switch {
	case k < 101:
		l := r.lease()
		return cmdSetValue(l.Session, l.Resource, l.Token, pick(r, "value", "", "v1", "a longer one"))
	case k < 104:
		return cmdEndWait(r.session(), r.request())
	case k < 109:
		var all []Delay
		for d := range r.m.View().Delays() {
			all = append(all, d)
		}
		d := Delay{Resource: pick(r, "resource", "x", "qs#0")}
		if len(all) > 0 && !r.chance(10, "no delay") {
			d = pick(r, "delay", all...)
		}
		return cmdEndDelay(d.Resource, d.Token)
	case k < 111:
		return cmdSettle(name, epoch)
	case k < 114:
		return cmdDrain(name, epoch, pick(r, "successor", "us", "us", "us", "ap", "eu", ""))
	case k < 117:
		return cmdAbort(name, epoch)
	default:
		return cmdRaise(rapid.Uint32Range(1, 2).Draw(r.t, "level"))
	}
}

func (r *randomRun) restore() {
	restored, err := ReadSnapshot(strings.NewReader(string(write(r.t, r.m))))
	if err != nil {
		r.t.Fatalf("restore: %v", err)
	}
	if got, want := restored.View().StateHash(), r.m.View().StateHash(); got != want {
		r.t.Fatalf("the hash is %x after a restore, %x before", got, want)
	}
	if got, want := restored.View().Counts(), r.m.View().Counts(); got != want {
		r.t.Fatalf("%+v after a restore, %+v before", got, want)
	}
	restored.piece = r.m.piece
	r.m = restored
}

func (r *randomRun) session() string { return pick(r, "session", "s0", "s1", "s2", "s3", "s4") }

func (r *randomRun) request() uint64 { return rapid.Uint64Range(0, 40).Draw(r.t, "request") }

func (r *randomRun) acquire() *pb.Command {
	c := acquireCommand(r.session(), r.request(), pick(r, "resource", "x", "y", "z", "qx", "qy", "s", "s", "qs", "s#0", "s#1", "qs#0"), r.chance(60, "wait"))
	a := c.GetAcquire()
	if a.GetResource() == "s" || a.GetResource() == "qs" {
		a.Slots = rapid.Uint32Range(0, 3).Draw(r.t, "slots")
	}
	if r.chance(30, "terms") {
		a.Value = []byte(pick(r, "value", "", "v2", "another"))
		a.LockDelayMs = int64(pick(r, "lock delay", 0, 0, 1000, 60_000))
		a.WaitMs = int64(pick(r, "wait time", 0, 5))
	}
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
	adopt := cmdAdopt(partition, uint32(epoch), b)
	adopt.GetAdopt().Planned = r.n.level >= 2 && r.chance(30, "planned")
	r.do(adopt)
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
		if r.n.level >= 2 {
			return // there is a command
		}
		mp.phase, p.phase = phaseDraining, phaseDraining
	case 1:
		p.seq = max(p.seq, fence.MaxSeq-1)
		mp.seq = p.seq
	case 2: // the operator clears an alarm
		mp.record.Alarm, p.rec.Alarm = "", ""
		mp.recordHash = recordHash(mp.record)
	}
	r.m.settleHashes()
}

// compareContent compares all that both keep.
func (r *randomRun) compareContent() {
	v := r.m.View()
	for p := range v.Partitions() {
		n := r.n.parts[p.Name]
		want := Partition{
			Name: p.Name, Register: p.Register, Epoch: n.epoch, Seq: n.seq, Phase: n.phase, Dropped: n.dropped, Unsettled: n.unsettled, Successor: n.successor,
		}
		if p != want || !sameRecord(p.Register, n.rec) {
			r.t.Fatalf("partition %+v, want %+v", p, n)
		}
	}
	sessions := 0
	waiting := 0
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
			waiting++
			queue := v.Waiters(w.Resource)
			if w.Slots > 0 {
				queue = v.SemaphoreWaiters(w.Resource)
			}
			if !slices.Contains(slices.Collect(queue), w) {
				r.t.Fatalf("waiter %+v is in no queue", w)
			}
		}
		if held != s.Held && !v.Sweeping() {
			r.t.Fatalf("session %+v lists %d leases", s, held)
		}
		sessions++
	}
	leases, delays, queued, bytes := 0, 0, 0, 0
	for name, n := range r.n.res {
		if n.lease.Token != 0 {
			leases++
			bytes += len(n.lease.Value)
			want := n.lease
			want.Holder, want.Waiters = "client/"+want.Session, len(n.waiters)
			if l, _ := v.Lease(name); l != want {
				r.t.Fatalf("lease %+v, want %+v", l, want)
			}
		}
		if n.delay.DelayMillis != 0 {
			delays++
		}
		if d, _ := v.Delay(name); d != n.delay {
			r.t.Fatalf("delay %+v, want %+v", d, n.delay)
		}
		queued += r.sameQueue(name, slices.Collect(v.Waiters(name)), n.waiters)
	}
	for name, q := range r.n.sems {
		queued += r.sameQueue(name, slices.Collect(v.SemaphoreWaiters(name)), q.waiters)
	}
	if n := len(slices.Collect(v.Leases())); n != leases || waiting != queued || len(slices.Collect(v.Delays())) != delays {
		r.t.Fatalf("%d leases, %d waiters; want %d, %d", n, waiting, leases, queued)
	}
	for _, n := range r.n.left {
		if n.lease.Token != 0 {
			leases++
			bytes += len(n.lease.Value)
		}
		if n.delay.DelayMillis != 0 {
			delays++
		}
	}
	queued = 0
	for _, q := range r.n.queues() {
		queued += len(q.waiters)
		for _, w := range q.waiters {
			bytes += len(w.value)
		}
	}
	c := v.Counts()
	want := Counts{
		Sessions: len(r.n.sessions), Leases: leases, Waiters: queued, Resources: len(r.n.res) + len(r.n.left), Delays: delays,
		Semaphores: c.Semaphores, ValueBytes: int64(bytes),
	}
	if c != want || sessions != c.Sessions {
		r.t.Fatalf("counts %+v; want %+v", c, want)
	}
	if v.BallotRound() != r.n.round || v.Level() != r.n.level || v.r.sweep != r.n.sweep {
		r.t.Fatalf("round %d, level %d, sweep %+v; want %d, %d, %+v", v.BallotRound(), v.Level(), v.r.sweep, r.n.round, r.n.level, r.n.sweep)
	}
	for id, want := range r.n.voters {
		if got, _ := v.Voter(id); got != want {
			r.t.Fatalf("voter %+v, want %+v", got, want)
		}
	}
	r.o.compare(v)
}

func (r *randomRun) sameQueue(name string, got []Waiter, want []naiveWaiter) int {
	if !slices.EqualFunc(got, want, func(w Waiter, n naiveWaiter) bool { return w == n.Waiter }) {
		r.t.Fatalf("queue of %s: %+v, want %+v", name, got, want)
	}
	return len(want)
}

func sameRecord(a, b register.Record) bool {
	same := (a.Alarm == "") == (b.Alarm == "")
	a.Alarm, b.Alarm = "", ""
	return same && a == b
}
