package state

import (
	"errors"
	"strings"
	"testing"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// second are the commands and fields that need level 2, on a machine on which
// all but their level is right.
func second(h *harness) map[string]*pb.Command {
	h.t.Helper()
	tok := h.grant("a", 1, "x")
	h.wait("b", 1, "x")
	planned := cmdAdopt("p", 2, h.accept("p", euValue(2)))
	planned.GetAdopt().Planned = true
	return map[string]*pb.Command{
		"set value":      cmdSetValue("a", "x", tok, "v"),
		"end wait":       cmdEndWait("b", 1),
		"end delay":      cmdEndDelay("x", 0),
		"settle":         cmdSettle("p", 1),
		"start drain":    cmdDrain("p", 1, "us"),
		"abort drain":    cmdAbort("p", 1),
		"state hash":     cmdStateHash(1, 1),
		"value":          withValue(cmdAcquire("a", 2, "y"), "v"),
		"lock delay":     withDelay(cmdAcquire("a", 2, "y"), 1),
		"wait time":      withWait(cmdWait("a", 2, "y"), 1),
		"slots":          withSlots(cmdAcquire("a", 2, "y"), 1),
		"planned":        planned,
		"config promise": cmdConfigPromise(1, 5),
		"config accept":  cmdConfigAccept(1, 5, withW2(testConfiguration())),
		"configure":      cmdConfigure(withW2(testConfiguration())),
	}
}

func newOwner1(t testing.TB, sessions ...string) *harness {
	h := newHarness1(t)
	h.own("p", 1)
	h.own("q", 1)
	for _, id := range sessions {
		h.ok(cmdOpen(id))
	}
	return h
}

func TestLevel1RefusesWhatLevel2Brings(t *testing.T) {
	for name := range second(newOwner1(t, "a", "b")) {
		t.Run(name, func(t *testing.T) {
			h := newOwner1(t, "a", "b")
			c := second(h)[name]
			before := h.content()
			res := h.do(c)
			if e := res.GetError().GetRefused().GetReason(); !strings.Contains(e, "feature level 2") || !strings.Contains(e, "at level 1") {
				t.Fatalf("%v", res)
			}
			h.unchanged(c, before)
			h.ok(cmdRaise(2))
			if e := h.do(c).GetError().GetRefused().GetReason(); strings.Contains(e, "feature level") {
				t.Fatalf("at level 2: %v", e)
			}
		})
	}
}

func TestLevelRisesOnly(t *testing.T) {
	h := newHarness1(t)
	if l := h.m.View().Level(); l != 1 {
		t.Fatalf("level %d", l)
	}
	h.refusedAs(cmdRaise(0), errInvalid("", ""))
	h.ok(cmdRaise(1))
	h.wantEvents()
	h.ok(cmdRaise(2))
	h.wantEvents(LevelRaised{Level: 2})
	h.ok(cmdRaise(1))
	h.wantEvents()
	if l := restore(t, h.m).View().Level(); l != 2 {
		t.Fatalf("level %d", l)
	}
}

// A level that this version does not know stops it, as an unknown command
// does: the next command may be one.
func TestUnknownLevelPoisons(t *testing.T) {
	h := newHarness(t)
	before := h.content()
	h.m.Apply(h.index+1, testTerm, cmdRaise(MaxLevel+1))
	if err := h.m.Poisoned(); !errors.Is(err, ErrUnknownCommand) || !strings.Contains(err.Error(), "knows level 3") {
		t.Fatalf("%v", err)
	}
	if h.content() != before {
		t.Fatal("the poisoned machine changed")
	}
}

// At level 1 the snapshot is that of the first version: format 1, and none of
// the fields after it.
func TestLevel1WritesFormat1(t *testing.T) {
	h := newOwner1(t, "a", "b")
	h.grant("a", 1, "lock/s#3")
	h.wait("b", 1, "lock/s#3")
	cs := chunks(t, write(t, h.m))
	head, r := cs[0].GetHeader(), cs[2].GetResources().GetResources()[0]
	if head.GetFormat() != 1 || head.GetLevel() != 0 || head.GetSweep() != nil || r.GetEpoch() != 0 || r.GetRevision() != 0 || len(cs) != 4 {
		t.Fatalf("%v, %v", head, r)
	}
	h.m = restore(t, h.m)
	if c := h.m.View().Counts(); c.Semaphores != 1 {
		t.Fatalf("%+v", c)
	}
	h.ok(cmdRaise(2))
	if got := h.slot("a", 2, 1); got != "s#0" {
		t.Fatalf("%q", got)
	}
	if g := h.ok(withSlots(cmdAcquire("b", 3, "lock/s"), 4)).GetAcquire().GetGranted(); g.GetResource() != "lock/s#0" {
		t.Fatalf("%v", g)
	}
}

// Servers that came to level 2 by different ways have the same hash: by all
// commands, or by a snapshot of format 1.
func TestHashAfterTheRaiseIsThatOfEveryServer(t *testing.T) {
	h := newOwner1(t, "a", "b", "c")
	tok := h.grant("a", 1, "x")
	h.grant("a", 2, "y")
	h.wait("b", 1, "x")
	h.wait("c", 1, "x")
	h.own("p", 2)
	h.ok(cmdCancel("b", 1))
	h.ok(cmdEndRevocation("x", tok))
	h.ok(inEpoch(cmdWait("b", 2, "x"), 2))
	other := &harness{t: t, m: restore(t, h.m), index: h.index}
	for _, c := range []*pb.Command{cmdRaise(2), withValue(inEpoch(cmdAcquire("a", 7, "z"), 2), "v"), cmdExpire("c")} {
		h.ok(c)
		other.ok(c)
		if a, b := h.m.View().StateHash(), other.m.View().StateHash(); a != b {
			t.Fatalf("%v: %x and %x", c, a, b)
		}
	}
}

func TestStateHashIsRecordedAndCompared(t *testing.T) {
	h := newOwner(t, "a")
	if p, ok := h.m.View().RecordedHash(); ok {
		t.Fatalf("%+v", p)
	}
	h.index = HashEvery - 1
	h.grant("a", 1, "x") // the last command up to the index
	hash := h.m.View().StateHash()
	h.index += 10
	h.grant("a", 2, "y")
	p, ok := h.m.View().RecordedHash()
	if !ok || p != (HashPoint{Index: HashEvery, Hash: hash}) {
		t.Fatalf("%+v, want %x", p, hash)
	}
	h.ok(cmdStateHash(p.Index, p.Hash))
	h.ok(cmdStateHash(p.Index+1, 7)) // not recorded here
	h.ok(cmdStateHash(0, 7))         // neither
	other := restore(t, h.m)         // it has not lived through the index
	other.Apply(h.index+1, testTerm, cmdStateHash(p.Index, p.Hash+1))
	if err := other.Poisoned(); err != nil {
		t.Fatal(err)
	}
	wrong := cmdStateHash(p.Index, p.Hash+1)
	wrong.Term = testTerm - 1
	h.refused(wrong, errWrongTerm(testTerm))
	before := h.content()
	_, events := h.m.Apply(h.index+1, testTerm, cmdStateHash(p.Index, p.Hash+1))
	if err := h.m.Poisoned(); !errors.Is(err, ErrDiverged) || len(events) > 0 || h.content() != before {
		t.Fatalf("%v, %v", err, events)
	}
	if res, _ := h.m.Apply(h.index+2, testTerm, cmdPulse()); res.GetError().GetRefused() == nil {
		t.Fatalf("a diverged machine went on: %v", res)
	}
}

func TestStateHashPointsAreTheNewest(t *testing.T) {
	h := newHarness(t)
	for i := range uint64(20) {
		h.index = (i + 1) * HashEvery
		h.ok(cmdPulse())
	}
	if n := len(h.m.points); h.m.points[0].Index != 20*HashEvery || h.m.points[n-1].Index != uint64(20-n+1)*HashEvery {
		t.Fatalf("%+v", h.m.points)
	}
}
