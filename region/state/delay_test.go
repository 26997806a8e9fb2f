package state

import (
	"slices"
	"testing"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// delayed acquires x for a with a lock delay, and lets b wait for it.
func delayedLease(t *testing.T) *harness {
	h := newOwner(t, "a", "b")
	h.ok(withDelay(cmdAcquire("a", 1, "x"), 15_000))
	h.wait("b", 1, "x")
	return h
}

func TestLockDelayAfterAnEndWithoutRelease(t *testing.T) {
	for name, end := range map[string]struct {
		commands []*pb.Command
		delays   bool
	}{
		"expiry":         {[]*pb.Command{cmdExpire("a")}, true},
		"revocation":     {[]*pb.Command{cmdRevoke("x", token(1, 1), "r"), cmdEndRevocation("x", token(1, 1))}, true},
		"release":        {[]*pb.Command{cmdRelease("a", "x", token(1, 1))}, false},
		"late release":   {[]*pb.Command{cmdRevoke("x", token(1, 1), "r"), cmdRelease("a", "x", token(1, 1))}, false},
		"orderly close":  {[]*pb.Command{cmdClose("a")}, false},
		"closed, expire": {[]*pb.Command{cmdClose("a"), cmdExpire("a")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			h := delayedLease(t)
			for _, c := range end.commands {
				h.ok(c)
			}
			if got := h.holder("x") == ""; got != end.delays {
				t.Fatalf("holder %q", h.holder("x"))
			}
			if !end.delays {
				return
			}
			if last := h.events[len(h.events)-1]; last != (DelayBegun{Resource: "x", Partition: "p", Token: token(1, 1), DelayMillis: 15_000}) {
				t.Fatalf("%+v", last)
			}
			want := []Delay{{Resource: "x", Partition: "p", Token: token(1, 1), DelayMillis: 15_000}}
			if got := slices.Collect(h.m.View().Delays()); !slices.Equal(got, want) {
				t.Fatalf("%+v", got)
			}
			h.ok(cmdOpen("c"))
			if b := h.ok(cmdAcquire("c", 1, "x")).GetAcquire().GetBusy(); !b.GetDelayed() || b.GetWaiters() != 1 || b.GetHolder() != "" {
				t.Fatalf("%v", b)
			}
			if b := h.ok(cmdAcquire("c", 1, "x")).GetAcquire().GetBusy(); !b.GetDelayed() {
				t.Fatalf("again: %v", b)
			}
			h.wait("c", 2, "x")
			h.m = restore(t, h.m)
			h.refusedAs(cmdEndDelay("x", token(1, 2)), errRefused(""))
			h.ok(cmdEndDelay("x", token(1, 1)))
			h.wantEvents(
				DelayEnded{Resource: "x", Partition: "p", Token: token(1, 1)},
				LeaseGranted{Session: "b", Request: 1, Resource: "x", Partition: "p", Token: token(1, 2), Offered: true},
			)
			h.refusedAs(cmdEndDelay("x", token(1, 1)), errRefused(""))
		})
	}
}

// A session closed by its client with more leases than one command removes is
// emptied by Expire commands; it has stopped all the same.
func TestOrderlyCloseInPiecesDelaysNothing(t *testing.T) {
	h := newOwner(t, "a")
	for i := range uint64(MaxRemovals + 10) {
		h.ok(withDelay(cmdAcquire("a", i+1, "x"+string(rune('0'+i%10))+string(rune('a'+i/10))), 1000))
	}
	h.ok(cmdClose("a"))
	h.m = restore(t, h.m)
	h.ok(cmdExpire("a"))
	if c := h.m.View().Counts(); c.Delays != 0 || c.Resources != 0 || c.Sessions != 0 {
		t.Fatalf("%+v", c)
	}
}

func TestDelayWithoutWaitersIsForgottenAtItsEnd(t *testing.T) {
	h := newOwner(t, "a", "b")
	h.ok(withDelay(cmdAcquire("a", 1, "x"), 1))
	h.ok(cmdExpire("a"))
	h.wait("b", 1, "x")
	h.ok(cmdCancel("b", 1))
	if _, ok := h.m.View().Delay("x"); !ok {
		t.Fatal("a waiter that left took the delay along")
	}
	h.ok(cmdEndDelay("x", token(1, 1)))
	if c := h.m.View().Counts(); c.Resources != 0 {
		t.Fatalf("%+v", c)
	}
	h.grant("b", 2, "x")
}

// promoted returns a region that came to epoch 2 of p without a release.
func promoted(t *testing.T) *harness {
	h := newHarness(t)
	b := h.accept("p", euValue(2))
	h.ok(cmdAdopt("p", 2, b))
	h.wantEvents(PartitionAdopted{Partition: "p", Epoch: 2, Unsettled: true})
	h.ok(cmdOpen("a"))
	h.ok(cmdOpen("b"))
	return h
}

// I6: after a promotion without a release, a resource with a lock delay is
// granted only that long after Adopt.
func TestI6PromotionWithoutReleaseDelays(t *testing.T) {
	h := promoted(t)
	if g := h.ok(inEpoch(cmdAcquire("a", 1, "plain"), 2)).GetAcquire().GetGranted(); g == nil {
		t.Fatal("a request without a delay waits")
	}
	try := func(id uint64) *pb.Command { return withDelay(inEpoch(cmdAcquire("a", id, "x"), 2), 9000) }
	for range 2 { // the second is a retransmission
		if b := h.ok(try(2)).GetAcquire().GetBusy(); !b.GetDelayed() {
			t.Fatalf("%v", b)
		}
	}
	h.ok(withDelay(inEpoch(cmdWait("b", 1, "x"), 2), 9000))
	h.wantEvents(
		WaiterEnqueued{Session: "b", Request: 1, Resource: "x", Partition: "p"},
		DelayBegun{Resource: "x", Partition: "p", DelayMillis: 9000},
	)
	h.m = restore(t, h.m)
	h.refusedAs(cmdSettle("p", 1), errRefused(""))
	h.ok(cmdSettle("p", 2))
	h.wantEvents(PartitionSettled{Partition: "p", Epoch: 2})
	h.ok(cmdSettle("p", 2))
	h.wantEvents()
	if h.holder("x") != "" {
		t.Fatal("settling ended a running delay")
	}
	h.ok(cmdEndDelay("x", 0))
	if h.holder("x") != "b" {
		t.Fatalf("holder %q", h.holder("x"))
	}
	if g := h.ok(withDelay(inEpoch(cmdAcquire("a", 3, "y"), 2), 9000)).GetAcquire().GetGranted(); g == nil {
		t.Fatal("a settled partition delays")
	}
}

func TestI6NoDelayAfterAReleaseAResumeOrAnOwnRaise(t *testing.T) {
	unsettled := func(h *harness) bool { p, _ := h.m.View().Partition("p"); return p.Unsettled }
	h := newHarness(t)
	planned := cmdAdopt("p", 5, h.accept("p", euValue(5)))
	planned.GetAdopt().Planned = true
	h.ok(planned)
	if unsettled(h) {
		t.Error("after a release")
	}
	h.own("p", 6)
	if unsettled(h) {
		t.Error("after the owner's own raise")
	}
	if unsettled(newOwner(t)) {
		t.Error("epoch 1, which nobody owned before")
	}
	h = promoted(t)
	h.own("p", 2)
	h.wantEvents(PartitionAdopted{Partition: "p", Epoch: 2, Resumed: true, Unsettled: true})
	h.own("p", 3)
	if !unsettled(h) {
		t.Error("a raise forgot that the partition is unsettled")
	}
	h.ok(cmdDrop("p", 3))
	if unsettled(h) {
		t.Error("a dropped partition is unsettled")
	}
}

func TestEndWait(t *testing.T) {
	h := newOwner(t, "a", "b", "c")
	h.grant("a", 1, "x")
	h.ok(withWait(cmdWait("b", 1, "x"), 700))
	h.wantEvents(WaiterEnqueued{Session: "b", Request: 1, Resource: "x", Partition: "p", WaitMillis: 700})
	h.ok(withWait(cmdWait("c", 1, "x"), 800))
	h.m = restore(t, h.m)
	want := []Waiter{
		{Session: "b", Request: 1, Resource: "x", Partition: "p", WaitMillis: 700},
		{Session: "c", Request: 1, Resource: "x", Partition: "p", WaitMillis: 800},
	}
	if got := slices.Collect(h.m.View().Waiters("x")); !slices.Equal(got, want) {
		t.Fatalf("%+v", got)
	}
	h.ok(cmdEndWait("b", 1))
	h.wantEvents(WaiterEnded{Session: "b", Request: 1, Resource: "x", Partition: "p", Error: errWaitEnded("x", 700)})
	h.refused(withWait(cmdWait("b", 1, "x"), 700), errStaleRequest(1)) // F17: answered once
	h.ok(cmdRelease("a", "x", token(1, 1)))
	h.ok(cmdEndWait("c", 1)) // granted meanwhile
	h.wantEvents()
	if h.holder("x") != "c" {
		t.Fatalf("holder %q", h.holder("x"))
	}
	for _, c := range []*pb.Command{cmdEndWait("b", 1), cmdEndWait("b", 9), cmdEndWait("nobody", 1)} {
		h.ok(c)
		h.wantEvents()
	}
}

func TestTermsAreBounded(t *testing.T) {
	h := newOwner(t, "a")
	for name, c := range map[string]*pb.Command{
		"delay":          withDelay(cmdAcquire("a", 1, "x"), MaxLockDelayMillis+1),
		"negative delay": withDelay(cmdAcquire("a", 1, "x"), -1),
		"wait":           withWait(cmdAcquire("a", 1, "x"), MaxWaitMillis+1),
		"negative wait":  withWait(cmdAcquire("a", 1, "x"), -1),
		"slots":          withSlots(cmdAcquire("a", 1, "x"), MaxSlots+1),
		"a slot's name":  withSlots(cmdAcquire("a", 1, "x#1"), 2),
		"a shard":        withSlots(cmdAcquire("a", 1, "shard/1"), 2),
		"a long name":    withSlots(cmdAcquire("a", 1, string(make([]byte, maxResource-3))), 2),
	} {
		t.Run(name, func(t *testing.T) { h.refusedAs(c, errInvalid("", "")) })
	}
}
