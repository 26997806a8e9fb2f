package state

import (
	"strings"
	"testing"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestValueIsKeptWhileHeld(t *testing.T) {
	h := newOwner(t, "a", "b")
	h.ok(withValue(cmdAcquire("a", 1, "x"), "one"))
	granted := h.index
	h.wantEvents(LeaseGranted{Session: "a", Request: 1, Resource: "x", Partition: "p", Token: token(1, 1), Holder: "client/a", Value: "one", Revision: granted})
	h.ok(withValue(cmdWait("b", 1, "x"), "two"))
	if c := h.m.View().Counts(); c.ValueBytes != 6 {
		t.Fatalf("%+v", c)
	}
	if rev := h.ok(cmdSetValue("a", "x", token(1, 1), "three")).GetSetValue().GetRevision(); rev != h.index {
		t.Fatalf("revision %d at index %d", rev, h.index)
	}
	h.wantEvents(ValueChanged{Session: "a", Resource: "x", Partition: "p", Token: token(1, 1), Holder: "client/a", Value: "three", Revision: h.index})
	if l, _ := h.m.View().Lease("x"); l.Value != "three" || l.Revision != h.index {
		t.Fatalf("%+v", l)
	}
	h.ok(cmdRelease("a", "x", token(1, 1)))
	if l, _ := h.m.View().Lease("x"); l.Value != "two" || l.Session != "b" || l.Revision != h.index {
		t.Fatalf("the waiter's value did not come with its grant: %+v", l)
	}
	restore(t, h.m)
	h.ok(cmdRelease("b", "x", token(1, 2)))
	if c := h.m.View().Counts(); c.ValueBytes != 0 {
		t.Fatalf("%+v", c)
	}
}

func TestSetValueNeedsTheCurrentToken(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	h.refused(cmdSetValue("b", "x", tok, "v"), errNotHolder("x", tok))
	h.refused(cmdSetValue("a", "x", tok+1, "v"), errNotHolder("x", tok+1))
	h.refused(cmdSetValue("a", "x", 0, "v"), errNotHolder("x", 0))
	h.refused(cmdSetValue("a", "y", tok, "v"), errNotHolder("y", tok))
	h.refusedAs(cmdSetValue("a", "x", tok, strings.Repeat("v", MaxValue+1)), errInvalid("", ""))
	h.ok(cmdRevoke("x", tok, "operator"))
	h.ok(cmdSetValue("a", "x", tok, "believed in")) // until its validity is over
	h.ok(cmdEndRevocation("x", tok))
	h.refused(cmdSetValue("a", "x", tok, "late"), errNotHolder("x", tok))
}

func TestReacquireReplacesWhatItNames(t *testing.T) {
	h := newOwner(t, "a")
	h.ok(withDelay(withValue(cmdAcquire("a", 1, "x"), "one"), 5))
	h.ok(cmdAcquire("a", 2, "x"))
	h.wantEvents()
	if l, _ := h.m.View().Lease("x"); l.Value != "one" || l.LockDelayMillis != 5 {
		t.Fatalf("%+v", l)
	}
	h.ok(withDelay(withValue(cmdAcquire("a", 3, "x"), "two"), 7))
	h.wantEvents(ValueChanged{Session: "a", Resource: "x", Partition: "p", Token: token(1, 1), Value: "two"})
	if l, _ := h.m.View().Lease("x"); l.Value != "two" || l.LockDelayMillis != 7 {
		t.Fatalf("%+v", l)
	}
	h.refused(withValue(cmdAcquire("a", 2, "x"), "a late copy"), errStaleRequest(2))
	if l, _ := h.m.View().Lease("x"); l.Value != "two" {
		t.Fatalf("a late copy changed the value: %+v", l)
	}
}

func TestValuesAreBounded(t *testing.T) {
	h := newOwner(t, "a", "b")
	full := strings.Repeat("v", MaxValue)
	h.refusedAs(withValue(cmdAcquire("a", 1, "x"), full+"v"), errInvalid("", ""))
	h.ok(withValue(cmdAcquire("a", 1, "x"), full))
	h.m.view = nil
	h.m.valueBytes = MaxValueBytes - 10
	tooMuch := []*pb.Command{
		withValue(cmdAcquire("a", 2, "y"), "eleven byte"), withValue(cmdWait("b", 1, "x"), "eleven byte"),
		withSlots(withValue(cmdAcquire("b", 1, "s"), "eleven byte"), 1),
	}
	for _, c := range tooMuch {
		if e := h.do(c).GetError().GetOverloaded(); !strings.Contains(e.GetWhat(), "268435446 bytes in all") {
			t.Errorf("%v: %v", c, e)
		}
	}
	h.ok(withValue(cmdAcquire("a", 4, "y"), "ten bytes."))
	h.ok(cmdSetValue("a", "x", token(1, 1), full[1:])) // shorter fits
	h.refusedAs(cmdSetValue("a", "y", token(1, 2), "twelve bytes"), errOverloaded(""))
}
