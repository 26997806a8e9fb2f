package state

import (
	"fmt"
	"testing"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestAcquireFree(t *testing.T) {
	h := newOwner(t, "a")
	if got, want := h.grant("a", 1, "x"), token(1, 1); got != want {
		t.Fatalf("token %v, want %v", got, want)
	}
	h.wantEvents(LeaseGranted{Session: "a", Request: 1, Resource: "x", Partition: "p", Token: token(1, 1)})
	l, ok := h.m.View().Lease("x")
	want := Lease{Resource: "x", Partition: "p", Session: "a", Holder: "client/a", Token: token(1, 1), Request: 1, Revision: h.index}
	if !ok || l != want {
		t.Fatalf("lease %+v, want %+v", l, want)
	}
	if got, want := h.grant("a", 2, "qx"), token(1, 1); got != want {
		t.Fatalf("the other partition counts by itself: token %v, want %v", got, want)
	}
}

func TestAcquireRefusals(t *testing.T) {
	h := newOwner(t, "a")
	long := string(make([]byte, maxResource+1))
	h.refused(cmdAcquire("nobody", 1, "x"), errSessionExpired("nobody"))
	h.refusedAs(cmdAcquire("a", 0, "x"), errInvalid("", ""))
	h.refusedAs(cmdAcquire("a", 1, long), errInvalid("", ""))
	h.refusedAs(withLowest(cmdAcquire("a", 1, "x"), 2), errInvalid("", ""))
	h.refused(inEpoch(cmdAcquire("a", 1, "x"), 2), errLapsed("p"))
	h.refused(inEpoch(cmdAcquire("a", 1, "x"), 0), errLapsed("p"))
	c := cmdAcquire("a", 1, "x")
	c.GetAcquire().Partition = "nowhere"
	h.refusedAs(c, errInvalid("", ""))

	h.grant("a", 1, "x")
	c = cmdAcquire("a", 2, "x")
	c.GetAcquire().Partition = "q"
	h.refusedAs(c, errRefused("")) // held in another partition
}

func TestAcquireNotOwner(t *testing.T) {
	h := newHarness(t)
	h.ok(cmdOpen("a"))
	h.refused(cmdAcquire("a", 1, "x"), notOwner("p", "", 0))
	h.accept("p", &pb.Value{Owner: "us", OwnerIncarnation: 9, Epoch: 4, DNs: 4e9})
	h.refused(cmdAcquire("a", 1, "x"), notOwner("p", "us", 4))
}

func notOwner(partition, owner string, epoch uint32) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_NotOwner{NotOwner: &pb.NotOwner{Partition: partition, Owner: owner, Epoch: epoch}}}
}

func TestAcquireBusyAndQueue(t *testing.T) {
	h := newOwner(t, "a", "b", "c")
	h.grant("a", 1, "x")
	h.wait("b", 1, "x")
	h.wantEvents(WaiterEnqueued{Session: "b", Request: 1, Resource: "x", Partition: "p"})
	if q := h.ok(cmdWait("c", 1, "x")).GetAcquire().GetQueued(); q.GetAhead() != 1 {
		t.Fatalf("ahead %d, want 1", q.GetAhead())
	}
	busy := h.ok(cmdAcquire("c", 2, "x")).GetAcquire().GetBusy()
	if busy.GetHolder() != "client/a" || busy.GetToken() != uint64(token(1, 1)) || busy.GetWaiters() != 2 {
		t.Fatalf("busy %v", busy)
	}
	if len(h.events) != 0 {
		t.Fatalf("events %v of a try that failed", h.events)
	}
}

// A session that asks again for what it holds gets the token it has.
func TestReacquireReturnsHeldToken(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	for id, wait := range map[uint64]bool{2: false, 3: true} {
		g := h.ok(acquireCommand("a", id, "x", wait)).GetAcquire().GetGranted()
		if g.GetToken() != uint64(tok) || !g.GetRepeated() || len(h.events) != 0 {
			t.Fatalf("granted %v with events %v, want token %v again", g, h.events, tok)
		}
	}
	// Revoked, it is no answer any more: the session queues like everybody.
	h.ok(cmdRevoke("x", tok, "test"))
	if h.ok(cmdAcquire("a", 4, "x")).GetAcquire().GetBusy() == nil {
		t.Fatal("a try for one's own revoked lease is not busy")
	}
	h.wait("a", 5, "x")
	h.ok(cmdEndRevocation("x", tok))
	h.wantEvents(
		LeaseEnded{Session: "a", Resource: "x", Partition: "p", Token: tok, Reason: EndRevoked},
		LeaseGranted{Session: "a", Request: 5, Resource: "x", Partition: "p", Token: token(1, 2), Offered: true},
	)
}

// F23: a release grants the first waiter in the same command, and that is the
// only notification, however many wait.
func TestF23HandOverNotifiesOneWaiter(t *testing.T) {
	const waiters = 50
	h := newOwner(t, "holder")
	tok := h.grant("holder", 1, "x")
	for i := range waiters {
		id := fmt.Sprintf("w%02d", i)
		h.ok(cmdOpen(id))
		h.wait(id, 1, "x")
	}
	holder := "holder"
	for i := range waiters {
		h.ok(cmdRelease(holder, "x", tok))
		next := fmt.Sprintf("w%02d", i)
		nextTok := token(1, fence.Seq(i+2))
		h.wantEvents(
			LeaseEnded{Session: holder, Resource: "x", Partition: "p", Token: tok, Reason: EndReleased},
			LeaseGranted{Session: next, Request: 1, Resource: "x", Partition: "p", Token: nextTok, Offered: true},
		)
		holder, tok = next, nextTok
	}
	h.ok(cmdRelease(holder, "x", tok))
	if c := h.m.View().Counts(); c.Leases != 0 || c.Waiters != 0 || c.Resources != 0 {
		t.Fatalf("left over: %+v", c)
	}
}

func TestReleaseOnlyByCurrentToken(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	for _, c := range []*pb.Command{
		cmdRelease("b", "x", tok), cmdRelease("a", "y", tok), cmdRelease("a", "x", tok+1), cmdRelease("a", "x", 0), cmdRelease("", "", 0),
	} {
		r := c.GetRelease()
		h.refused(c, errNotHolder(r.GetResource(), fence.Token(r.GetToken())))
	}
	h.ok(cmdRelease("a", "x", tok))
	h.refused(cmdRelease("a", "x", tok), errNotHolder("x", tok))
	h.grant("a", 2, "x")
	h.refused(cmdRelease("a", "x", tok), errNotHolder("x", tok)) // a late copy must not end the next lease
}

func TestRevocation(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	h.wait("b", 1, "x")
	h.refused(cmdRevoke("x", tok+1, "r"), errNotHolder("x", tok+1))
	h.refusedAs(cmdEndRevocation("x", tok), errRefused(""))
	h.ok(cmdRevoke("x", tok, "operator"))
	h.wantEvents(LeaseRevoked{Session: "a", Resource: "x", Partition: "p", Token: tok, Reason: "operator"})
	if l, _ := h.m.View().Lease("x"); !l.Revoked || l.RevokeReason != "operator" || l.Session != "a" {
		t.Fatalf("lease %+v", l)
	}
	h.ok(cmdRevoke("x", tok, "again"))
	h.wantEvents()
	h.refused(cmdEndRevocation("x", tok+1), errNotHolder("x", tok+1))
	h.ok(cmdEndRevocation("x", tok))
	h.wantEvents(
		LeaseEnded{Session: "a", Resource: "x", Partition: "p", Token: tok, Reason: EndRevoked},
		LeaseGranted{Session: "b", Request: 1, Resource: "x", Partition: "p", Token: token(1, 2), Offered: true},
	)
	h.refused(cmdEndRevocation("x", tok), errNotHolder("x", tok))
	if l, _ := h.m.View().Lease("x"); l.Revoked || !l.Offered {
		t.Fatalf("the next holder's lease: %+v", l)
	}
}

// A revoked lease may still be released, and passes on then.
func TestReleaseOfRevoked(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	h.wait("b", 1, "x")
	h.ok(cmdRevoke("x", tok, "r"))
	h.ok(cmdRelease("a", "x", tok))
	if h.holder("x") != "b" {
		t.Fatalf("holder %q, want b", h.holder("x"))
	}
}

func TestCancelWaiter(t *testing.T) {
	h := newOwner(t, "a", "b", "c")
	tok := h.grant("a", 1, "x")
	h.wait("b", 1, "x")
	h.wait("c", 1, "x")
	h.ok(cmdCancel("b", 1))
	h.wantEvents(WaiterEnded{Session: "b", Request: 1, Resource: "x", Partition: "p", Error: errStaleRequest(1)})
	h.ok(cmdCancel("b", 1))
	h.wantEvents()
	h.ok(cmdRelease("a", "x", tok))
	if h.holder("x") != "c" {
		t.Fatalf("holder %q, want c", h.holder("x"))
	}
	res := h.ok(cmdCancel("c", 1)).GetCancel()
	if res.GetGrantedToken() != uint64(token(1, 2)) || res.GetResource() != "x" || h.holder("x") != "c" {
		t.Fatalf("cancel of a granted request: %v", res)
	}
	h.refused(cmdCancel("nobody", 1), errSessionExpired("nobody"))
	h.refusedAs(cmdCancel("a", 0), errInvalid("", ""))
}

// F17: cancelling an id that never arrived leaves a tombstone; the late
// Acquire grants nothing.
func TestF17CancelledUnknownRequestIsNeverGranted(t *testing.T) {
	h := newOwner(t, "a")
	h.ok(cmdCancel("a", 3))
	h.refused(cmdAcquire("a", 3, "x"), errStaleRequest(3))
	h.refused(cmdWait("a", 3, "x"), errStaleRequest(3))
	h.grant("a", 4, "x")
	h.ok(cmdCancel("a", 2))
	h.refused(cmdWait("a", 2, "y"), errStaleRequest(2))
	h.grant("a", 1, "y")
}

// F17: a remembered grant is returned only while its token is held.
func TestF17RememberedGrantOnlyWhileHeld(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	g := h.ok(cmdAcquire("a", 1, "x")).GetAcquire().GetGranted()
	if g.GetToken() != uint64(tok) || !g.GetRepeated() || len(h.events) > 0 {
		t.Fatalf("granted %v with events %v, want token %v again", g, h.events, tok)
	}
	h.refusedAs(cmdAcquire("a", 1, "y"), errInvalid("", "")) // the id asked for x
	h.ok(cmdRelease("a", "x", tok))
	h.refused(cmdAcquire("a", 1, "x"), errStaleRequest(1))
	h.refused(cmdWait("a", 1, "x"), errStaleRequest(1))

	// Held again by another request, or by another session, it stays stale.
	tok = h.grant("a", 2, "x")
	h.refused(cmdAcquire("a", 1, "x"), errStaleRequest(1))
	h.ok(cmdRelease("a", "x", tok))
	h.grant("b", 1, "x")
	h.refused(cmdWait("a", 1, "x"), errStaleRequest(1))

	// A revoked token gets no more validity, so it is no answer either.
	tok = h.grant("a", 3, "z")
	h.ok(cmdRevoke("z", tok, "r"))
	h.refused(cmdAcquire("a", 3, "z"), errStaleRequest(3))
}

// F17: an answered try is not tried again by a late copy.
func TestF17LateCopyOfATryTakesNothing(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	for range 2 {
		if h.ok(cmdAcquire("b", 1, "x")).GetAcquire().GetBusy().GetToken() != uint64(tok) {
			t.Fatal("not busy")
		}
	}
	h.ok(cmdRelease("a", "x", tok))
	h.refused(cmdAcquire("b", 1, "x"), errStaleRequest(1))
}

func TestF17WaitingRequestAsksAgain(t *testing.T) {
	h := newOwner(t, "a", "b", "c")
	tok := h.grant("a", 1, "x")
	h.wait("b", 1, "x")
	h.wait("c", 1, "x")
	for range 2 {
		if q := h.ok(cmdWait("c", 1, "x")).GetAcquire().GetQueued(); q == nil || q.GetAhead() != 1 || len(h.events) > 0 {
			t.Fatalf("queued %v, events %v", q, h.events)
		}
	}
	h.ok(cmdRelease("a", "x", tok))
	if q := h.ok(cmdWait("c", 1, "x")).GetAcquire().GetQueued(); q == nil || q.GetAhead() != 0 {
		t.Fatalf("queued %v", q)
	}
	if g := h.ok(cmdWait("b", 1, "x")).GetAcquire().GetGranted(); g.GetToken() != uint64(token(1, 2)) {
		t.Fatalf("granted %v", g)
	}
}

// F17: below the lowest open request nothing is remembered and all is refused.
func TestF17LowestOpenRequest(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	h.grant("b", 1, "y")
	h.wait("a", 2, "y")
	h.ok(withLowest(cmdAcquire("a", 5, "z"), 5))
	h.wantEvents(
		WaiterEnded{Session: "a", Request: 2, Resource: "y", Partition: "p", Error: errStaleRequest(2)},
		LeaseGranted{Session: "a", Request: 5, Resource: "z", Partition: "p", Token: token(1, 3)},
	)
	for id := uint64(1); id < 5; id++ {
		h.refused(cmdWait("a", id, "x"), errStaleRequest(id))
	}
	if h.holder("x") != "a" {
		t.Fatal("a lease ended with the memory of its request")
	}
	s, _ := h.m.sessions.Get("a")
	if s.seen.Len() != 1 || s.open.Len() != 1 || s.lowest != 5 {
		t.Fatalf("memory not pruned: %+v", s)
	}
	// A lower bound that arrives late changes nothing.
	h.ok(withLowest(cmdAcquire("a", 6, "v"), 3))
	if s, _ := h.m.View().Session("a"); s.LowestOpen != 5 {
		t.Fatalf("lowest open %d, want 5", s.LowestOpen)
	}
	h.ok(cmdRelease("a", "x", tok))
}

// A request that stays open for days does not make the session's memory grow.
func TestF17MemoryStaysSmallUnderOneOpenRequest(t *testing.T) {
	h := newOwner(t, "a", "b")
	h.grant("b", 1, "elect")
	h.wait("a", 1, "elect")
	for id := uint64(2); id < 5000; id++ {
		tok := h.grant("a", id, "x")
		h.ok(cmdRelease("a", "x", tok))
	}
	s, _ := h.m.sessions.Get("a")
	if s.seen.Len() != 1 || s.open.Len() != 1 {
		t.Fatalf("%d ranges and %d open requests, want 1 and 1", s.seen.Len(), s.open.Len())
	}
	h.refused(cmdAcquire("a", 77, "x"), errStaleRequest(77))
}

func TestF17GapsAreBounded(t *testing.T) {
	h := newOwner(t, "a")
	for i := range uint64(MaxSeenRanges) {
		h.ok(cmdCancel("a", 2*i+2))
	}
	h.refusedAs(cmdCancel("a", 1_000_000), errOverloaded(""))
	h.refusedAs(cmdAcquire("a", 1_000_000, "x"), errOverloaded(""))
	h.grant("a", 3, "x") // closes a gap
	h.ok(withLowest(cmdAcquire("a", 1_000_000, "y"), 1_000_000))
	s, _ := h.m.sessions.Get("a")
	if s.seen.Len() != 1 {
		t.Fatalf("%d ranges, want 1", s.seen.Len())
	}
}

func TestRequestIDsAtTheirEnd(t *testing.T) {
	h := newOwner(t, "a")
	const last = 1<<64 - 1
	h.grant("a", last, "x")
	h.grant("a", last-1, "y")
	h.ok(cmdCancel("a", last-2))
	s, _ := h.m.sessions.Get("a")
	if s.seen.Len() != 1 || !s.sawRequest(last) || !s.sawRequest(last-2) || s.sawRequest(last-3) {
		t.Fatal("ranges at the highest id are wrong")
	}
}

func TestQueueBounds(t *testing.T) {
	h := newOwner(t, "a", "b", "c")
	h.grant("a", 1, "x")
	for i := range uint64(MaxQueue - 1) {
		h.wait("b", i+1, "x")
	}
	h.grant("b", MaxQueue, "y") // leases and places count together
	h.refusedAs(cmdAcquire("b", MaxQueue+1, "z"), errOverloaded(""))
	h.refusedAs(cmdWait("b", MaxQueue+1, "x"), errOverloaded(""))
	h.wait("c", 1, "x")
	h.refusedAs(cmdWait("c", 2, "x"), errOverloaded("")) // the queue is full
	h.ok(cmdCancel("b", 1))
	h.wait("c", 2, "x")
	if q := h.ok(cmdWait("c", 2, "x")).GetAcquire().GetQueued(); q.GetAhead() != MaxQueue-1 {
		t.Fatalf("ahead %d, want %d", q.GetAhead(), MaxQueue-1)
	}
}

func TestTotalBounds(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	h.m.waiting = MaxWaiters
	h.refusedAs(cmdWait("b", 1, "x"), errOverloaded(""))
	h.m.waiting = 0
	h.m.leased = MaxLeases
	h.refusedAs(cmdAcquire("b", 1, "y"), errOverloaded(""))
	h.m.leased = 1
	h.ok(cmdRelease("a", "x", tok))
}

// F26: no grant and no hand-over passes a drain; the queue stands still.
func TestF26DrainingGrantsNothing(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	h.wait("b", 1, "x")
	p, _ := h.m.partitions.Get("p")
	h.m.editPartition(p).phase = phaseDraining
	h.refused(cmdAcquire("b", 2, "free"), moved("p", ""))
	h.refused(cmdWait("b", 2, "x"), moved("p", ""))
	h.ok(cmdRelease("a", "x", tok))
	h.wantEvents(LeaseEnded{Session: "a", Resource: "x", Partition: "p", Token: tok, Reason: EndReleased})
	if c := h.m.View().Counts(); c.Leases != 0 || c.Waiters != 1 {
		t.Fatalf("counts %+v", c)
	}
	// Resumed in the same epoch it still drains; in the next one it serves.
	rec := h.record("p")
	h.ok(cmdAdopt("p", 1, rec.Accepted.Proto()))
	h.refused(cmdAcquire("b", 2, "free"), moved("p", ""))
	h.accept("p", &pb.Value{Owner: "eu", OwnerIncarnation: testInc, Epoch: 2, DNs: 4e9})
	h.ok(cmdAdopt("p", 2, h.record("p").Accepted.Proto()))
	h.wantEvents(
		PartitionAdopted{Partition: "p", Epoch: 2},
		LeaseGranted{Session: "b", Request: 1, Resource: "x", Partition: "p", Token: token(2, 1), Offered: true},
	)
}

// F47: no grant passes the last token of an epoch; the raise serves who waited.
func TestF47NoGrantPastTheLastToken(t *testing.T) {
	h := newOwner(t, "a", "b")
	p, _ := h.m.partitions.Get("p")
	h.m.editPartition(p).seq = fence.MaxSeq - 1
	tok := h.grant("a", 1, "x")
	if tok != token(1, fence.MaxSeq) {
		t.Fatalf("token %v", tok)
	}
	h.wait("b", 1, "x")
	h.refusedAs(cmdAcquire("b", 2, "free"), errOverloaded(""))
	h.ok(cmdRelease("a", "x", tok))
	if h.holder("x") != "" {
		t.Fatal("handed over past the last token")
	}
	busy := h.ok(cmdAcquire("a", 2, "x")).GetAcquire().GetBusy()
	if busy == nil || busy.GetHolder() != "" || busy.GetWaiters() != 1 {
		t.Fatalf("a waiter was passed over: %v", busy)
	}
	h.own("p", 2)
	if l, _ := h.m.View().Lease("x"); l.Session != "b" || l.Token != token(2, 1) {
		t.Fatalf("lease %+v", l)
	}
}
