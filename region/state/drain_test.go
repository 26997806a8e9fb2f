package state

import (
	"fmt"
	"testing"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestF26DrainGrantsNothing(t *testing.T) {
	h := newOwner(t, "a", "b", "c")
	tok := h.grant("a", 1, "x")
	h.ok(withDelay(cmdAcquire("a", 2, "y"), 5))
	h.wait("b", 1, "x")
	h.ok(withSlots(cmdAcquire("a", 3, "s"), 1))
	h.ok(withSlots(cmdWait("b", 2, "s"), 1))
	h.ok(cmdRevoke("y", token(1, 2), "r"))
	h.ok(cmdEndRevocation("y", token(1, 2)))
	h.wait("c", 1, "y")
	h.ok(cmdDrain("p", 1, "us"))
	told := moved("p", "us")
	h.wantEvents(
		PartitionDraining{Partition: "p", Epoch: 1, Successor: "us"},
		WaiterEnded{Session: "b", Request: 1, Resource: "x", Partition: "p", Error: told},
		WaiterEnded{Session: "c", Request: 1, Resource: "y", Partition: "p", Error: told},
		WaiterEnded{Session: "b", Request: 2, Resource: "s", Partition: "p", Error: told},
	)
	h.m = restore(t, h.m)
	if p, _ := h.m.View().Partition("p"); p.Phase != phaseDraining || p.Successor != "us" || !p.Live() {
		t.Fatalf("%+v", p)
	}
	for _, c := range []*pb.Command{
		cmdWait("b", 5, "x"), cmdAcquire("b", 5, "free"), cmdAcquire("a", 5, "x"), withSlots(cmdWait("b", 5, "s"), 3),
	} {
		h.refused(c, told)
	}
	h.ok(cmdAcquire("b", 6, "qfree")) // the other partition goes on
	h.ok(cmdAcquire("a", 1, "x"))     // a retransmission is answered
	h.ok(cmdEndDelay("y", token(1, 2)))
	h.wantEvents(DelayEnded{Resource: "y", Partition: "p", Token: token(1, 2)})
	h.ok(cmdSetValue("a", "x", tok, "v"))
	h.ok(cmdRevoke("x", tok, "drain"))
	h.ok(cmdEndRevocation("x", tok))
	h.wantEvents(LeaseEnded{Session: "a", Resource: "x", Partition: "p", Token: tok, Reason: EndRevoked})
	h.ok(cmdExpire("a"))
	if c := h.m.View().Counts(); c.Leases != 1 || c.Resources != 1 {
		t.Fatalf("%+v", c)
	}
}

func TestStartDrainRefusals(t *testing.T) {
	h := newOwner(t)
	h.refusedAs(cmdDrain("nowhere", 1, "us"), errInvalid("", ""))
	h.refusedAs(cmdDrain("p", 2, "us"), errRefused(""))
	h.refusedAs(cmdDrain("p", 1, ""), errInvalid("", ""))
	h.refusedAs(cmdDrain("p", 1, "eu"), errInvalid("", ""))
	h.ok(cmdAbort("p", 1))
	h.wantEvents() // nothing to abort
	h.ok(cmdDrain("p", 1, "us"))
	h.ok(cmdDrain("p", 1, "us"))
	h.wantEvents()
	h.refusedAs(cmdDrain("p", 1, "ap"), errRefused(""))
	h.refusedAs(cmdAbort("p", 2), errRefused(""))
	h.ok(cmdDrop("p", 1))
	h.refusedAs(cmdAbort("p", 1), notOwner("", "", 0))
	h.refusedAs(cmdDrain("p", 1, "us"), notOwner("", "", 0))
}

// What became free in a drain is handed over when it is aborted, to those whose
// turn to be told had not come.
func TestAbortedDrainHandsOver(t *testing.T) {
	h := newOwner(t, "a", "b", "c")
	h.m.piece = piece{removals: 1, looks: 2}
	h.grant("a", 1, "x1")
	h.grant("a", 2, "x2")
	h.wait("b", 1, "x1")
	h.wait("c", 1, "x1")
	h.wait("b", 2, "x2")
	h.ok(withSlots(cmdAcquire("a", 3, "s"), 1))
	h.ok(withSlots(cmdWait("b", 3, "s"), 1))
	h.ok(cmdDrain("p", 1, "us")) // one waiter is told
	h.ok(cmdExpire("a"))         // and one more
	if v := h.m.View(); !v.Sweeping() || v.Counts().Waiters != 2 || v.Counts().Leases != 0 {
		t.Fatalf("%+v", v.Counts())
	}
	p := h.m.piece
	h.m = restore(t, h.m)
	h.m.piece = p
	h.ok(cmdAbort("p", 1))
	h.wantEvents(
		DrainAborted{Partition: "p", Epoch: 1},
		LeaseGranted{Session: "b", Request: 2, Resource: "x2", Partition: "p", Token: token(1, 4), Offered: true},
		LeaseGranted{Session: "b", Request: 3, Resource: "s#0", Partition: "p", Token: token(1, 5), Offered: true},
	)
	for range 20 {
		h.ok(cmdPulse())
	}
	if v := h.m.View(); v.Sweeping() || v.Counts().Leases != 2 {
		t.Fatalf("%+v", v.Counts())
	}
}

func TestOwnRaiseEndsADrain(t *testing.T) {
	h := newOwner(t, "a")
	h.ok(cmdDrain("p", 1, "us"))
	h.own("p", 1) // a resume does not
	if p, _ := h.m.View().Partition("p"); p.Phase != phaseDraining || p.Successor != "us" {
		t.Fatalf("%+v", p)
	}
	h.own("p", 2)
	if p, _ := h.m.View().Partition("p"); p.Phase != phaseActive || p.Successor != "" {
		t.Fatalf("%+v", p)
	}
}

// dropped drops a partition of 3 pieces' leases, each with a waiter.
func dropped(t testing.TB) *harness {
	h := newOwner(t, "a", "b", "c")
	for i := range uint64(3 * MaxRemovals / 2) {
		name := fmt.Sprintf("x%04d", i)
		h.ok(withDelay(withValue(cmdAcquire("a", i+1, name), "v"), 5))
		h.wait("b", i+1, name)
	}
	h.ok(withSlots(cmdAcquire("a", 9001, "s"), 1))
	h.ok(withSlots(cmdWait("b", 9001, "s"), 1))
	h.ok(cmdDrop("p", 1))
	return h
}

// A drop ends all leases at once for everybody, and removes them in pieces.
func TestDropInPieces(t *testing.T) {
	h := dropped(t)
	v := h.m.View()
	for range v.Leases() {
		t.Fatal("a dropped lease is listed")
	}
	for range v.SessionLeases("a") {
		t.Fatal("a dropped lease is listed")
	}
	for range v.SessionWaiters("b") {
		t.Fatal("a waiter for a dropped lease is listed")
	}
	for range v.SemaphoreWaiters("s") {
		t.Fatal("a waiter for a dropped slot is listed")
	}
	if page, _ := v.ListLeases("", "", 10); len(page) > 0 {
		t.Fatal("a dropped lease is listed")
	}
	if _, ok := v.Lease("x0700"); ok || !v.Sweeping() {
		t.Fatal("a dropped lease is held")
	}
	h.do(cmdRelease("a", "x0700", token(1, 701)))
	if ended := len(h.events); ended > MaxRemovals {
		t.Fatalf("%d events in one command", ended)
	}
	most, commands := 0, 2
	for ; h.m.View().Sweeping(); commands++ {
		if commands%2 == 0 {
			h.m = restore(t, h.m)
		}
		h.do(cmdPulse())
		most = max(most, len(h.events))
	}
	if most > MaxRemovals+1 || commands < 3 {
		t.Fatalf("%d events in one of %d commands", most, commands)
	}
	if c := h.m.View().Counts(); c != (Counts{Sessions: 3}) {
		t.Fatalf("%+v", c)
	}
}

// The epoch after a dropped one begins at once: what is left of the old one
// ends before a name of it is granted again, and is never handed over.
func TestH7NewEpochBesideTheRemainsOfADroppedOne(t *testing.T) {
	h := dropped(t)
	h.m.piece = piece{removals: 1, looks: 1}
	h.own("p", 3)
	res := h.ok(inEpoch(cmdAcquire("c", 1, "x0740"), 3))
	if res.GetAcquire().GetGranted().GetToken() != uint64(token(3, 1)) {
		t.Fatalf("%v", res)
	}
	if _, ok := h.events[0].(LeaseEnded); !ok {
		t.Fatalf("%+v", h.events)
	}
	if g := h.ok(inEpoch(withSlots(cmdAcquire("c", 2, "s"), 1), 3)).GetAcquire().GetGranted(); g.GetResource() != "s#0" {
		t.Fatalf("%v", g)
	}
	h.ok(inEpoch(withSlots(cmdWait("c", 3, "s"), 1), 3))
	if res := h.ok(cmdCancel("a", 100)).GetCancel(); res.GetGrantedToken() != 0 {
		t.Fatalf("a dropped token was given out: %v", res)
	}
	h.ok(cmdExpire("a")) // its dropped leases begin no lock delay and go to nobody
	for range h.m.View().Delays() {
		t.Fatal("a dropped lease began a lock delay")
	}
	h.ok(cmdClose("b"))
	h.m = restore(t, h.m) // with pieces of the full size again
	for h.m.View().Sweeping() || h.m.View().Counts().Closing > 0 {
		h.do(cmdExpire("a"))
	}
	if c := h.m.View().Counts(); c.Leases != 2 || c.Waiters != 1 || c.Sessions != 1 || c.Delays != 0 {
		t.Fatalf("%+v", c)
	}
}

// A closed session whose last leases a sweep removes is gone.
func TestSweepEndsAClosingSession(t *testing.T) {
	h := newOwner(t, "a")
	for i := range uint64(2 * MaxRemovals) {
		h.grant("a", i+1, fmt.Sprintf("x%04d", i))
	}
	h.ok(cmdClose("a"))
	h.ok(cmdDrop("p", 1))
	for h.m.View().Sweeping() {
		h.ok(cmdPulse())
	}
	if c := h.m.View().Counts(); c != (Counts{}) {
		t.Fatalf("%+v", c)
	}
}
