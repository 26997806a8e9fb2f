package state

import (
	"crypto/sha256"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	testTerm = 7
	testInc  = 0xabc
)

// harness drives one machine as a replica would: every command in an entry of
// its own, in testTerm.
type harness struct {
	t     testing.TB
	m     *Machine
	index uint64
	// events of the last command.
	events []Event
}

// newHarness returns a configured machine at the highest feature level.
func newHarness(t testing.TB) *harness {
	h := newHarness1(t)
	h.ok(cmdRaise(MaxLevel))
	return h
}

// newHarness1 returns one at feature level 1.
func newHarness1(t testing.TB) *harness {
	h := &harness{t: t, m: New()}
	h.ok(cmdInit("eu", testInc))
	h.ok(cmdConfigure(testConfiguration()))
	return h
}

// newOwner returns a harness whose region has adopted epoch 1 of "p" and "q".
func newOwner(t testing.TB, sessions ...string) *harness {
	h := newHarness(t)
	h.own("p", 1)
	h.own("q", 1)
	for _, id := range sessions {
		h.ok(cmdOpen(id))
	}
	return h
}

func testConfiguration() *pb.ClusterConfiguration {
	return &pb.ClusterConfiguration{
		ClusterId: "c1", ClusterName: "test", Version: 1, Shards: 256, DNs: 4e9,
		Voters: []*pb.Voter{{Id: "region/eu", Incarnation: testInc}, {Id: "witness/w1", Incarnation: 5}},
		Partitions: []*pb.PartitionSpec{
			{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 127}}, Prefer: []string{"eu", "us"}},
			{Name: "q", Shards: []*pb.ShardRange{{First: 128, Last: 255}}, Prefer: []string{"eu"}},
		},
	}
}

func (h *harness) do(c *pb.Command) *pb.CommandResult {
	h.t.Helper()
	h.index++
	var res *pb.CommandResult
	res, h.events = h.m.Apply(h.index, testTerm, c)
	if err := h.m.Poisoned(); err != nil {
		h.t.Fatalf("%v: poisoned: %v", c, err)
	}
	return res
}

func (h *harness) ok(c *pb.Command) *pb.CommandResult {
	h.t.Helper()
	res := h.do(c)
	if res.GetError() != nil {
		h.t.Fatalf("%v: refused: %v", c, res.GetError())
	}
	return res
}

// refused applies a command that must be refused with want and change nothing.
func (h *harness) refused(c *pb.Command, want *pb.ErrorDetail) {
	h.t.Helper()
	before := h.content()
	if got := h.do(c).GetError(); !proto.Equal(got, want) {
		h.t.Fatalf("%v: error %v, want %v", c, got, want)
	}
	h.unchanged(c, before)
}

// refusedAs is refused with any text of the error's kind that want has.
func (h *harness) refusedAs(c *pb.Command, want *pb.ErrorDetail) {
	h.t.Helper()
	before := h.content()
	if got := h.do(c).GetError(); errKind(got) != errKind(want) {
		h.t.Fatalf("%v: error %v, want kind %s", c, got, errKind(want))
	}
	h.unchanged(c, before)
}

func errKind(e *pb.ErrorDetail) string {
	m := e.ProtoReflect()
	if f := m.WhichOneof(m.Descriptor().Oneofs().ByName("kind")); f != nil {
		return string(f.Name())
	}
	return ""
}

func (h *harness) unchanged(c *pb.Command, before uint64) {
	h.t.Helper()
	if len(h.events) > 0 {
		h.t.Fatalf("%v: refused, with events %v", c, h.events)
	}
	if h.content() != before {
		h.t.Fatalf("%v: refused, and changed the state", c)
	}
}

// content is the state's hash without the indices.
func (h *harness) content() uint64 {
	r := *h.m.View().r
	r.applied = 0
	if r.sweep != (sweep{}) {
		h.t.Fatal("a sweep runs: every command changes something")
	}
	if r.hash(r.sum) != r.fullHash() {
		h.t.Fatal("the hash kept differs from the content's")
	}
	return View{&r}.StateHash()
}

// fullHash computes the state's hash from the content alone.
func (r *root) fullHash() uint64 {
	sum := uint64(0)
	r.partitions.Scan(func(_ string, p *partition) bool {
		c := *p
		c.recordHash = recordHash(c.record)
		sum += c.digest()
		return true
	})
	r.voters.Scan(func(_ string, v VoterRecord) bool { sum += v.digest(); return true })
	r.sessions.Scan(func(_ string, s *session) bool {
		c := *s
		c.fixedHash, c.seenSum, c.openSum = c.hashFixed(), 0, 0
		c.seen.Scan(func(first, last uint64) bool { c.seenSum += seenDigest(first, last); return true })
		c.open.Scan(func(id uint64, q request) bool { c.openSum += q.digest(id); return true })
		sum += c.digest()
		return true
	})
	r.resources.Scan(func(_ string, e *resource) bool {
		c := *e
		c.valueHash, c.queue = valueDigest(c.value), c.queue.copy()
		c.queue.rehash()
		sum += c.digest()
		return true
	})
	r.semaphores.Scan(func(_ string, s *semaphore) bool {
		c := *s
		c.queue = c.queue.copy()
		c.queue.rehash()
		sum += c.digest()
		return true
	})
	c := *r
	c.configurationHash = c.hashConfiguration()
	return c.hash(sum)
}

func (h *harness) wantEvents(want ...Event) {
	h.t.Helper()
	if !slices.EqualFunc(h.events, want, sameEvent) {
		h.t.Fatalf("events\n%+v\nwant\n%+v", h.events, want)
	}
}

// sameEvent compares an event with the one wanted, of which the holder's
// identity and the revision need not be given.
func sameEvent(a, b Event) bool {
	switch want := b.(type) {
	case LeaseGranted:
		if got, ok := a.(LeaseGranted); ok && want.Holder == "" {
			want.Holder, want.Revision = "client/"+want.Session, got.Revision
			b = want
		}
	case LeaseRevoked:
		want.Holder = "client/" + want.Session
		b = want
	case LeaseEnded:
		want.Holder = "client/" + want.Session
		b = want
	case ValueChanged:
		if got, ok := a.(ValueChanged); ok && want.Holder == "" {
			want.Holder, want.Revision = "client/"+want.Session, got.Revision
			b = want
		}
	}
	switch a := a.(type) {
	case WaiterEnded:
		b, ok := b.(WaiterEnded)
		same := proto.Equal(a.Error, b.Error)
		a.Error, b.Error = nil, nil
		return ok && same && a == b
	case SessionOpened:
		b, ok := b.(SessionOpened)
		return ok && a.Session.ID == b.Session.ID
	case Configured:
		b, ok := b.(Configured)
		return ok && proto.Equal(a.Configuration, b.Configuration)
	}
	return a == b
}

// own runs the region's own vote and adopts an epoch.
func (h *harness) own(partition string, epoch uint32) *pb.Ballot {
	h.t.Helper()
	b := h.accept(partition, &pb.Value{Owner: "eu", OwnerIncarnation: testInc, Epoch: epoch, DNs: 4e9})
	h.ok(cmdAdopt(partition, epoch, b))
	return b
}

// accept runs reserve, promise and accept of a value.
func (h *harness) accept(partition string, v *pb.Value) *pb.Ballot {
	h.t.Helper()
	b := h.ok(cmdReserve(0)).GetReserved().GetBallot()
	if !h.ok(cmdPromise(partition, h.guard(partition), b)).GetItems().GetItems()[0].GetDone() {
		h.t.Fatalf("promise of %v refused", b)
	}
	if !h.ok(cmdAccepted(partition, h.guard(partition), b, v)).GetItems().GetItems()[0].GetDone() {
		h.t.Fatalf("accept of %v refused", b)
	}
	return b
}

func (h *harness) guard(partition string) *pb.RegisterGuard {
	p, _ := h.m.View().Partition(partition)
	return p.Register.Guard().Proto()
}

func (h *harness) record(partition string) register.Record {
	p, _ := h.m.View().Partition(partition)
	return p.Register
}

// grant acquires a free resource.
func (h *harness) grant(session string, id uint64, resource string) fence.Token {
	h.t.Helper()
	g := h.ok(cmdAcquire(session, id, resource)).GetAcquire().GetGranted()
	if g == nil || g.GetRepeated() {
		h.t.Fatalf("%s of %s: not granted: %v", resource, session, g)
	}
	return fence.Token(g.GetToken())
}

// wait takes a queue place.
func (h *harness) wait(session string, id uint64, resource string) {
	h.t.Helper()
	if q := h.ok(cmdWait(session, id, resource)).GetAcquire().GetQueued(); q == nil {
		h.t.Fatalf("%s of %s: not queued", resource, session)
	}
}

func (h *harness) holder(resource string) string {
	l, _ := h.m.View().Lease(resource)
	return l.Session
}

func cmdInit(region string, inc uint64) *pb.Command {
	return &pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: region, Incarnation: inc}}}
}

func cmdConfigure(c *pb.ClusterConfiguration) *pb.Command {
	return &pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: c}}}
}

func cmdReserve(above uint64) *pb.Command {
	return &pb.Command{Kind: &pb.Command_ReserveBallot{ReserveBallot: &pb.ReserveBallotCommand{Above: above}}}
}

func cmdPromise(partition string, g *pb.RegisterGuard, b *pb.Ballot) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_Promise{Promise: &pb.PromiseCommand{
		Items: []*pb.PromiseItem{{Partition: partition, Guard: g, Ballot: b}},
	}}}
}

func cmdAccepted(partition string, g *pb.RegisterGuard, b *pb.Ballot, v *pb.Value) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{
		Items: []*pb.AcceptedItem{{Partition: partition, Guard: g, Ballot: b, Value: v}},
	}}}
}

func cmdAdopt(partition string, epoch uint32, b *pb.Ballot) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_Adopt{Adopt: &pb.AdoptCommand{Partition: partition, Epoch: epoch, Ballot: b}}}
}

func cmdDrop(partition string, epoch uint32) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_Drop{Drop: &pb.DropCommand{Partition: partition, Epoch: epoch}}}
}

func cmdRecordVoters(v ...*pb.VoterRecord) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_RecordVoters{RecordVoters: &pb.RecordVotersCommand{Voters: v}}}
}

func cmdOpen(id string) *pb.Command {
	hash := sha256.Sum256([]byte(id))
	return &pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{
		SessionId: id, SecretHash: hash[:], TtlMs: 10_000, Identity: "client/" + id, Labels: map[string]string{"pod": id, "zone": "a"},
	}}}
}

func cmdClose(id string) *pb.Command {
	return &pb.Command{Kind: &pb.Command_CloseSession{CloseSession: &pb.CloseSessionCommand{SessionId: id}}}
}

func cmdExpire(ids ...string) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_Expire{Expire: &pb.ExpireCommand{SessionIds: ids}}}
}

func acquireCommand(session string, id uint64, resource string, wait bool) *pb.Command {
	partition := "p"
	if resource[0] == 'q' {
		partition = "q"
	}
	return &pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
		SessionId: session, RequestId: id, Resource: resource, Partition: partition, Epoch: 1, Wait: wait,
	}}}
}

// cmdAcquire tries; resources that begin with q are in partition q.
func cmdAcquire(session string, id uint64, resource string) *pb.Command {
	return acquireCommand(session, id, resource, false)
}

func cmdWait(session string, id uint64, resource string) *pb.Command {
	return acquireCommand(session, id, resource, true)
}

func inEpoch(c *pb.Command, epoch uint32) *pb.Command {
	c.GetAcquire().Epoch = epoch
	return c
}

func withLowest(c *pb.Command, lowest uint64) *pb.Command {
	c.GetAcquire().LowestOpenRequest = lowest
	return c
}

func cmdCancel(session string, id uint64) *pb.Command {
	return &pb.Command{Kind: &pb.Command_Cancel{Cancel: &pb.CancelCommand{SessionId: session, RequestId: id}}}
}

func cmdRelease(session, resource string, token fence.Token) *pb.Command {
	return &pb.Command{Kind: &pb.Command_Release{Release: &pb.ReleaseCommand{SessionId: session, Resource: resource, Token: uint64(token)}}}
}

func cmdRevoke(resource string, token fence.Token, reason string) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_Revoke{Revoke: &pb.RevokeCommand{Resource: resource, Token: uint64(token), Reason: reason}}}
}

func cmdEndRevocation(resource string, token fence.Token) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_EndRevocation{EndRevocation: &pb.EndRevocationCommand{Resource: resource, Token: uint64(token)}}}
}

func cmdPulse() *pb.Command {
	return &pb.Command{Kind: &pb.Command_Pulse{Pulse: &pb.PulseCommand{}}}
}

func cmdBeginTerm(term uint64) *pb.Command {
	return &pb.Command{Term: term, Kind: &pb.Command_BeginTerm{BeginTerm: &pb.BeginTermCommand{Server: "eu-1"}}}
}

// token of an epoch's seq-th grant.
func token(epoch fence.Epoch, seq fence.Seq) fence.Token {
	t, err := fence.NewToken(epoch, seq)
	if err != nil {
		panic(err)
	}
	return t
}

func voterRecord(id string, inc, life, writes uint64) *pb.VoterRecord {
	return &pb.VoterRecord{Voter: &pb.Voter{Id: id, Incarnation: inc}, Life: life, Writes: writes}
}

func cmdRaise(level uint32) *pb.Command {
	return &pb.Command{Kind: &pb.Command_RaiseLevel{RaiseLevel: &pb.RaiseLevelCommand{Level: level}}}
}

func cmdSetValue(session, resource string, token fence.Token, value string) *pb.Command {
	return &pb.Command{Kind: &pb.Command_SetValue{SetValue: &pb.SetValueCommand{SessionId: session, Resource: resource, Token: uint64(token), Value: []byte(value)}}}
}

func cmdEndWait(session string, id uint64) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_EndWait{EndWait: &pb.EndWaitCommand{SessionId: session, RequestId: id}}}
}

func cmdEndDelay(resource string, token fence.Token) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_EndDelay{EndDelay: &pb.EndDelayCommand{Resource: resource, Token: uint64(token)}}}
}

func cmdSettle(partition string, epoch uint32) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_Settle{Settle: &pb.SettleCommand{Partition: partition, Epoch: epoch}}}
}

func cmdDrain(partition string, epoch uint32, successor string) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_StartDrain{StartDrain: &pb.StartDrainCommand{Partition: partition, Epoch: epoch, Successor: successor}}}
}

func cmdAbort(partition string, epoch uint32) *pb.Command {
	return &pb.Command{Term: testTerm, Kind: &pb.Command_AbortDrain{AbortDrain: &pb.AbortDrainCommand{Partition: partition, Epoch: epoch}}}
}

func cmdStateHash(index, hash uint64) *pb.Command {
	return &pb.Command{Kind: &pb.Command_StateHash{StateHash: &pb.StateHashCommand{Index: index, Hash: hash}}}
}

// with changes an Acquire.
func with(c *pb.Command, change func(*pb.AcquireCommand)) *pb.Command {
	change(c.GetAcquire())
	return c
}

func withValue(c *pb.Command, value string) *pb.Command {
	return with(c, func(a *pb.AcquireCommand) { a.Value = []byte(value) })
}

func withDelay(c *pb.Command, millis int64) *pb.Command {
	return with(c, func(a *pb.AcquireCommand) { a.LockDelayMs = millis })
}

func withWait(c *pb.Command, millis int64) *pb.Command {
	return with(c, func(a *pb.AcquireCommand) { a.WaitMs = millis })
}

func withSlots(c *pb.Command, n uint32) *pb.Command {
	return with(c, func(a *pb.AcquireCommand) { a.Slots = n })
}

func moved(name, successor string) *pb.ErrorDetail {
	return errMoved(&partition{name: name, successor: successor})
}
