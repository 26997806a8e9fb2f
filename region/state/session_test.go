package state

import (
	"fmt"
	"slices"
	"testing"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestOpenSession(t *testing.T) {
	h := newHarness(t)
	h.ok(cmdOpen("a"))
	h.wantEvents(SessionOpened{Session: Session{ID: "a"}})
	s, ok := h.m.View().Session("a")
	if !ok || s.TTLMillis != 10_000 || s.Identity != "client/a" || s.Labels["zone"] != "a" || s.LowestOpen != 1 || len(s.SecretHash) != 32 {
		t.Fatalf("%+v", s)
	}
	h.refusedAs(cmdOpen("a"), errRefused(""))
	for name, change := range map[string]func(*pb.OpenSessionCommand){
		"no id":     func(c *pb.OpenSessionCommand) { c.SessionId = "" },
		"long id":   func(c *pb.OpenSessionCommand) { c.SessionId = string(make([]byte, maxName+1)) },
		"no secret": func(c *pb.OpenSessionCommand) { c.SecretHash = nil },
		"no ttl":    func(c *pb.OpenSessionCommand) { c.TtlMs = 0 },
		"minus ttl": func(c *pb.OpenSessionCommand) { c.TtlMs = -1 },
		"long ttl":  func(c *pb.OpenSessionCommand) { c.TtlMs = MaxTTLMillis + 1 },
		"identity":  func(c *pb.OpenSessionCommand) { c.Identity = string(make([]byte, maxName+1)) },
		"label":     func(c *pb.OpenSessionCommand) { c.Labels["x"] = string(make([]byte, MaxLabelBytes)) },
		"labels": func(c *pb.OpenSessionCommand) {
			for i := range MaxLabels + 1 {
				c.Labels[fmt.Sprint(i)] = ""
			}
		},
	} {
		c := cmdOpen("b")
		change(c.GetOpenSession())
		t.Run(name, func(*testing.T) { h.refusedAs(c, errInvalid("", "")) })
	}
	given := cmdOpen("c")
	h.ok(given)
	given.GetOpenSession().Labels["zone"] = "changed by the caller"
	if s, _ := h.m.View().Session("c"); s.Labels["zone"] != "a" {
		t.Fatal("the state shares its labels with the command")
	}
}

func TestCloseSession(t *testing.T) {
	h := newOwner(t, "a", "b")
	tx, ty := h.grant("a", 1, "x"), h.grant("b", 1, "y")
	h.wait("a", 2, "y")
	h.wait("b", 2, "x")
	h.ok(cmdClose("a"))
	h.wantEvents(
		SessionClosed{ID: "a", Reason: EndClosed},
		WaiterEnded{Session: "a", Request: 2, Resource: "y", Partition: "p", Error: errSessionExpired("a")},
		LeaseEnded{Session: "a", Resource: "x", Partition: "p", Token: tx, Reason: EndClosed},
		LeaseGranted{Session: "b", Request: 2, Resource: "x", Partition: "p", Token: token(1, 3), Offered: true},
	)
	if _, ok := h.m.View().Session("a"); ok {
		t.Fatal("still there")
	}
	h.ok(cmdClose("a"))
	h.wantEvents()
	h.refused(cmdAcquire("a", 3, "z"), errSessionExpired("a"))
	h.ok(cmdRelease("b", "y", ty))
	h.wantEvents(LeaseEnded{Session: "b", Resource: "y", Partition: "p", Token: ty, Reason: EndReleased})
}

// F22: in one expiry, all leases and waiters of the listed sessions go before
// the first hand-over, so nothing passes from one ended session to another,
// and each resource is handed over once.
func TestF22ExpireRemovesAllBeforeHandingOver(t *testing.T) {
	h := newOwner(t, "a", "b", "c", "d")
	tx := h.grant("a", 1, "x")
	ty := h.grant("b", 1, "y")
	h.wait("b", 2, "x") // ended too
	h.wait("c", 1, "x") // ended too
	h.wait("d", 1, "x")
	h.wait("a", 2, "y") // ended too
	h.ok(cmdExpire("a", "b", "c", "nobody", "a"))
	gone := func(id string, req uint64, res string) WaiterEnded {
		return WaiterEnded{Session: id, Request: req, Resource: res, Partition: "p", Error: errSessionExpired(id)}
	}
	h.wantEvents(
		SessionClosed{ID: "a", Reason: EndExpired}, gone("a", 2, "y"),
		SessionClosed{ID: "b", Reason: EndExpired}, gone("b", 2, "x"),
		SessionClosed{ID: "c", Reason: EndExpired}, gone("c", 1, "x"),
		LeaseEnded{Session: "a", Resource: "x", Partition: "p", Token: tx, Reason: EndExpired},
		LeaseEnded{Session: "b", Resource: "y", Partition: "p", Token: ty, Reason: EndExpired},
		LeaseGranted{Session: "d", Request: 1, Resource: "x", Partition: "p", Token: token(1, 3), Offered: true},
	)
	if c := h.m.View().Counts(); c != (Counts{Sessions: 1, Leases: 1, Resources: 1}) {
		t.Fatalf("%+v", c)
	}
}

// F22: a session with more leases than one command removes is closed at once
// and emptied by the next ones.
func TestF22ManyLeasesAreRemovedPiecewise(t *testing.T) {
	const leases = MaxRemovals*2 + 100
	h := newOwner(t, "big", "w", "small")
	for i := range uint64(leases) {
		h.grant("big", i+1, fmt.Sprintf("r%05d", i))
	}
	h.grant("small", 1, "s")
	h.wait("w", 1, "r00000")
	h.wait("w", 2, fmt.Sprintf("r%05d", leases-1))
	h.wait("big", leases+1, "s")

	h.ok(cmdExpire("big", "small"))
	if s, ok := h.m.View().Session("big"); !ok || !s.Closing || s.Held != leases-MaxRemovals || s.Waiting != 0 {
		t.Fatalf("%+v", s)
	}
	if got := slices.Collect(h.m.View().ClosingSessions()); !slices.Equal(got, []string{"big", "small"}) {
		t.Fatalf("closing %v", got)
	}
	if h.holder("r00000") != "w" || h.holder("s") != "small" {
		t.Fatal("removed in another order than listed")
	}
	// Closed for everything new, also over a restore.
	h.m = restore(t, h.m)
	h.refused(cmdAcquire("big", leases+9, "new"), errSessionExpired("big"))
	h.refused(cmdCancel("big", leases+9), errSessionExpired("big"))
	h.refusedAs(cmdOpen("big"), errRefused(""))

	rounds := 0
	for {
		ids := slices.Collect(h.m.View().ClosingSessions())
		if len(ids) == 0 {
			break
		}
		rounds++
		h.ok(cmdExpire(ids...))
		ended := 0
		for _, e := range h.events {
			switch e.(type) {
			case LeaseEnded:
				ended++
			case SessionClosed:
				t.Fatal("closed twice")
			}
		}
		if ended == 0 || ended > MaxRemovals {
			t.Fatalf("%d leases removed by one command", ended)
		}
	}
	if rounds != 2 {
		t.Fatalf("%d more commands, want 2", rounds)
	}
	if c := h.m.View().Counts(); c != (Counts{Sessions: 1, Leases: 2, Resources: 2}) {
		t.Fatalf("%+v", c)
	}
}

func TestReleaseByAClosingSession(t *testing.T) {
	h := newOwner(t, "big", "w")
	var last fence.Token
	for i := range uint64(MaxRemovals + 1) {
		last = h.grant("big", i+1, fmt.Sprintf("r%05d", i))
	}
	name := fmt.Sprintf("r%05d", MaxRemovals)
	h.wait("w", 1, name)
	h.ok(cmdClose("big"))
	h.ok(cmdRelease("big", name, last))
	if h.holder(name) != "w" {
		t.Fatal("not handed over")
	}
	h.ok(cmdExpire("big"))
	if _, ok := h.m.View().Session("big"); ok {
		t.Fatal("an emptied session stays")
	}
}

func TestSessionBound(t *testing.T) {
	h := newHarness(t)
	s := &session{gen: h.m.gen, id: "x", lowest: 1}
	for i := range MaxSessions {
		h.m.sessions.Load(fmt.Sprintf("%07d", i), s) // in rising order
	}
	if e := h.do(cmdOpen("one more")).GetError(); errKind(e) != errKind(errOverloaded("")) {
		t.Fatalf("%v", e)
	}
}
