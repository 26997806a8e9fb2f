package state

import (
	"fmt"
	"testing"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// slot asks for any of n slots of s and returns what was granted, or "".
func (h *harness) slot(session string, id uint64, n uint32) string {
	h.t.Helper()
	return h.ok(withSlots(cmdAcquire(session, id, "s"), n)).GetAcquire().GetGranted().GetResource()
}

func TestSlotsLowestFreeFirst(t *testing.T) {
	h := newOwner(t, "a", "b")
	for i, want := range []string{"s#0", "s#1"} {
		if got := h.slot("a", uint64(i+1), 3); got != want {
			t.Fatalf("%q, want %q", got, want)
		}
	}
	h.wantEvents(LeaseGranted{Session: "a", Request: 2, Resource: "s#1", Partition: "p", Token: token(1, 2)})
	h.grant("b", 1, "s#2") // by name
	if b := h.ok(withSlots(cmdAcquire("b", 2, "s"), 3)).GetAcquire().GetBusy(); b == nil {
		t.Fatal("a fourth of three slots")
	}
	if g := h.ok(withSlots(cmdAcquire("a", 2, "s"), 3)).GetAcquire().GetGranted(); g.GetResource() != "s#1" || !g.GetRepeated() || g.GetToken() != uint64(token(1, 2)) {
		t.Fatalf("again: %v", g)
	}
	h.refusedAs(withSlots(cmdAcquire("a", 2, "s"), 4), errInvalid("", "")) // another request of that id
	h.refusedAs(cmdAcquire("a", 2, "s#1"), errInvalid("", ""))
	h.ok(cmdRelease("a", "s#0", token(1, 1)))
	if got := h.slot("b", 3, 3); got != "s#0" {
		t.Fatalf("%q", got)
	}
	if got := h.slot("b", 4, 5); got != "s#3" {
		t.Fatalf("%q", got)
	}
	h.grant("b", 5, "s") // the lock of that name is another resource
}

// F23 for semaphores: first come, first served among those for whom the slot
// would do, one notification each; the slot's own queue comes first.
func TestF23SlotGoesToTheFirstForWhomItWouldDo(t *testing.T) {
	h := newOwner(t, "a", "b", "c", "d", "e")
	for i := range 3 {
		h.slot("a", uint64(i+1), 3)
	}
	wait := func(session string, n uint32) {
		if q := h.ok(withSlots(cmdWait(session, 1, "s"), n)).GetAcquire().GetQueued(); q == nil {
			t.Fatalf("%s does not wait", session)
		}
	}
	wait("b", 1)
	wait("c", 3)
	wait("d", 2)
	h.wait("e", 1, "s#1")
	if q := h.ok(withSlots(cmdWait("d", 1, "s"), 2)).GetAcquire().GetQueued(); q.GetAhead() != 2 {
		t.Fatalf("%v", q)
	}
	h.m = restore(t, h.m)
	release := func(slot int, tok fence.Token, to string, offered fence.Token) {
		t.Helper()
		h.ok(cmdRelease("a", slotName("s", slot), tok))
		if len(h.events) != 2 {
			t.Fatalf("%+v", h.events)
		}
		if g, ok := h.events[1].(LeaseGranted); !ok || g.Session != to || g.Resource != slotName("s", slot) || !g.Offered || g.Token != offered {
			t.Fatalf("%+v, want %s", h.events[1], to)
		}
	}
	release(1, token(1, 2), "e", token(1, 4)) // its own queue
	release(2, token(1, 3), "c", token(1, 5)) // b and d want a lower one
	release(0, token(1, 1), "b", token(1, 6))
	h.ok(cmdExpire("e"))
	if h.holder("s#1") != "d" {
		t.Fatalf("holder %q", h.holder("s#1"))
	}
	if c := h.m.View().Counts(); c.Waiters != 0 {
		t.Fatalf("%+v", c)
	}
}

func TestSlotInALockDelayIsNotFree(t *testing.T) {
	h := newOwner(t, "a", "b", "c")
	h.ok(withDelay(withSlots(cmdAcquire("a", 1, "s"), 2), 500))
	h.ok(cmdExpire("a"))
	if got := h.slot("b", 1, 2); got != "s#1" {
		t.Fatalf("%q", got)
	}
	h.ok(withSlots(cmdWait("c", 1, "s"), 2))
	h.m = restore(t, h.m)
	h.ok(cmdEndDelay("s#0", token(1, 1)))
	if h.holder("s#0") != "c" {
		t.Fatalf("holder %q", h.holder("s#0"))
	}
}

// I6 for semaphores: each waiting request that names a delay waits for a slot
// of its own.
func TestI6PromotionDelaysSlots(t *testing.T) {
	h := promoted(t)
	wait := func(id uint64) *pb.Command {
		return inEpoch(withDelay(withSlots(cmdWait("a", id, "s"), 2), 500), 2)
	}
	h.ok(wait(1))
	h.wantEvents(
		WaiterEnqueued{Session: "a", Request: 1, Resource: "s", Partition: "p", Slots: 2},
		DelayBegun{Resource: "s#0", Partition: "p", DelayMillis: 500},
	)
	h.ok(wait(2))
	h.ok(cmdEndDelay("s#1", 0))
	if h.holder("s#1") != "a" || h.holder("s#0") != "" {
		t.Fatal("a slot was granted in its delay")
	}
	for range 2 {
		if b := h.ok(inEpoch(withDelay(withSlots(cmdAcquire("b", 1, "t"), 2), 500), 2)).GetAcquire().GetBusy(); !b.GetDelayed() {
			t.Fatalf("%v", b)
		}
	}
}

func TestSlotRequestsAreCancelledAndTimedOut(t *testing.T) {
	h := newOwner(t, "a", "b")
	h.slot("a", 1, 1)
	h.ok(withWait(withSlots(cmdWait("b", 1, "s"), 1), 30))
	h.wantEvents(WaiterEnqueued{Session: "b", Request: 1, Resource: "s", Partition: "p", Slots: 1, WaitMillis: 30})
	h.ok(cmdEndWait("b", 1))
	h.wantEvents(WaiterEnded{Session: "b", Request: 1, Resource: "s", Partition: "p", Error: errWaitEnded("s", 30)})
	h.ok(withSlots(cmdWait("b", 2, "s"), 1))
	h.ok(cmdCancel("b", 2))
	h.ok(withSlots(cmdWait("b", 3, "s"), 1))
	h.ok(cmdExpire("b"))
	if c := h.m.View().Counts(); c.Waiters != 0 || c.Semaphores != 1 {
		t.Fatalf("%+v", c)
	}
	if res := h.ok(cmdCancel("a", 1)).GetCancel(); res.GetResource() != "s#0" || res.GetGrantedToken() != uint64(token(1, 1)) {
		t.Fatalf("%v", res)
	}
	h.ok(cmdRelease("a", "s#0", token(1, 1)))
	if c := h.m.View().Counts(); c.Semaphores != 0 || c.Resources != 0 {
		t.Fatalf("%+v", c)
	}
}

func TestSemaphoreOfTheMostSlots(t *testing.T) {
	h := newOwner(t, "a", "b")
	for i := range MaxSlots {
		if got := h.slot("a", uint64(i+1), MaxSlots); got != slotName("s", i) {
			t.Fatalf("%q, want slot %d", got, i)
		}
	}
	h.ok(withSlots(cmdWait("b", 1, "s"), MaxSlots))
	h.ok(cmdRelease("a", "s#7777", token(1, 7778)))
	if h.holder("s#7777") != "b" {
		t.Fatalf("holder %q", h.holder("s#7777"))
	}
	restore(t, h.m)
}

func TestSlotOf(t *testing.T) {
	for name, want := range map[string]int{
		"lock/x#0": 0, "lock/x#9999": 9999, "a#b#12": 12, "lock/x": -1, "lock/x#": -1, "lock/x#10000": -1, "lock/x#007": -1, "lock/x#-1": -1,
		"lock/x#1a": -1, "#5": 5, "lock/x#99999999999999999999": -1,
	} {
		base, slot, ok := slotOf(name)
		if ok != (want >= 0) || ok && (slot != want || slotName(base, slot) != name || baseOf(name) != base) {
			t.Errorf("%q: %q %d %v", name, base, slot, ok)
		}
	}
}

// BenchmarkSlots takes and releases the last of the most slots.
func BenchmarkSlots(b *testing.B) {
	h := newOwner(b, "a", "b")
	for i := range MaxSlots - 1 {
		h.slot("a", uint64(i+1), MaxSlots)
	}
	id := uint64(0)
	for b.Loop() {
		id++
		c := withSlots(cmdAcquire("b", id, "s"), MaxSlots)
		c.GetAcquire().LowestOpenRequest = id
		g := h.ok(c).GetAcquire().GetGranted()
		h.ok(cmdRelease("b", fmt.Sprint("s#", MaxSlots-1), fence.Token(g.GetToken())))
	}
}
