package state

import (
	"errors"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// one command of every kind, each of which would change the state.
func everyCommand(h *harness) map[string]*pb.Command {
	tok := h.grant("a", 100, "held")
	rev := h.grant("a", 101, "revoked")
	h.ok(cmdRevoke("revoked", rev, "r"))
	rec := h.record("p")
	next := rec.Promised
	next.Round += 100
	return map[string]*pb.Command{
		"reserve":        cmdReserve(0),
		"promise":        cmdPromise("p", rec.Guard().Proto(), next.Proto()),
		"accepted":       cmdAccepted("p", rec.Guard().Proto(), next.Proto(), &pb.Value{Owner: "us", OwnerIncarnation: 1, Epoch: 9, DNs: 1}),
		"drop":           cmdDrop("q", 1),
		"record_voters":  cmdRecordVoters(&pb.VoterRecord{Voter: &pb.Voter{Id: "witness/w1", Incarnation: 5}, Life: 1, Writes: 2}),
		"open_session":   cmdOpen("new"),
		"close_session":  cmdClose("a"),
		"expire":         cmdExpire("a"),
		"acquire":        cmdAcquire("a", 102, "free"),
		"cancel":         cmdCancel("a", 103),
		"release":        cmdRelease("a", "held", tok),
		"revoke":         cmdRevoke("held", tok, "r"),
		"end_revocation": cmdEndRevocation("revoked", rev),
	}
}

// F2, H4: a command of a deposed leader, committed under its successor, does
// nothing, whatever it is.
func TestF2H4StampedCommandOnlyInItsTerm(t *testing.T) {
	for name := range everyCommand(newOwner(t, "a")) {
		t.Run(name, func(t *testing.T) {
			h := newOwner(t, "a")
			c := everyCommand(h)[name]
			for _, term := range []uint64{testTerm - 1, testTerm + 1} {
				c.Term = term
				h.refused(c, errWrongTerm(testTerm))
			}
			c.Term = testTerm
			before := h.content()
			h.ok(c)
			if h.content() == before {
				t.Fatal("the command in its own term changed nothing: the test shows nothing")
			}
		})
	}
	t.Run("adopt", func(t *testing.T) {
		h := newHarness(t)
		b := h.accept("p", &pb.Value{Owner: "eu", OwnerIncarnation: testInc, Epoch: 1, DNs: 1})
		c := cmdAdopt("p", 1, b)
		c.Term = testTerm - 1
		h.refused(c, errWrongTerm(testTerm))
		h.ok(cmdAdopt("p", 1, b))
	})
}

// H4: what rests on a leader's clock, detector or judgement must carry its
// term; the rest may.
func TestH4CommandsThatNeedATerm(t *testing.T) {
	needs := map[string]bool{
		"promise": true, "accepted": true, "drop": true, "record_voters": true, "expire": true, "revoke": true, "end_revocation": true,
	}
	for name := range everyCommand(newOwner(t, "a")) {
		t.Run(name, func(t *testing.T) {
			h := newOwner(t, "a")
			c := everyCommand(h)[name]
			c.Term = 0
			if needs[name] {
				h.refusedAs(c, errInvalid("", ""))
			} else {
				h.ok(c)
			}
		})
	}
	h := newOwner(t)
	adopt := cmdAdopt("p", 1, h.record("p").Accepted.Proto())
	adopt.Term = 0
	h.refusedAs(adopt, errInvalid("", ""))
	h.refusedAs(cmdBeginTerm(0), errInvalid("", ""))
}

func TestBeginTermAndPulse(t *testing.T) {
	m := New()
	res, events := m.Apply(5, 3, cmdBeginTerm(3))
	if res.GetError() != nil || len(events) != 1 || events[0] != (TermBegun{Term: 3, Index: 5, Server: "eu-1"}) {
		t.Fatalf("%v, %v", res, events)
	}
	if res, events = m.Apply(6, 4, cmdBeginTerm(3)); res.GetError().GetWrongTerm().GetTerm() != 4 || events != nil {
		t.Fatalf("%v, %v", res, events)
	}
	if _, events = m.Apply(7, 4, cmdPulse()); len(events) != 1 || events[0] != (PulseCommitted{Index: 7}) {
		t.Fatalf("%v", events)
	}
	m.Apply(8, 4, cmdReserve(0))
	if v := m.View(); v.AppliedIndex() != 8 || v.PulseIndex() != 7 {
		t.Fatalf("applied %d, pulse %d", v.AppliedIndex(), v.PulseIndex())
	}
}

func TestUninitialisedRefusesEverythingElse(t *testing.T) {
	commands := everyCommand(newOwner(t, "a"))
	commands["configure"] = cmdConfigure(testConfiguration())
	commands["adopt"] = cmdAdopt("p", 1, &pb.Ballot{Round: 1, Region: "eu"})
	for name, c := range commands {
		h := &harness{t: t, m: New()}
		t.Run(name, func(*testing.T) { h.refused(c, errUninitialised()) })
	}
}

func TestInitRegion(t *testing.T) {
	h := &harness{t: t, m: New()}
	h.refusedAs(cmdInit("", 1), errInvalid("", ""))
	h.refusedAs(cmdInit("eu", 0), errInvalid("", ""))
	if r := h.ok(cmdInit("eu", 5)).GetInit(); r.GetIncarnation() != 5 || r.GetAlready() {
		t.Fatalf("%v", r)
	}
	h.wantEvents(Initialised{Region: "eu", Incarnation: 5})
	if r := h.ok(cmdInit("eu", 6)).GetInit(); r.GetIncarnation() != 5 || !r.GetAlready() || len(h.events) > 0 {
		t.Fatalf("%v, %v", r, h.events)
	}
	h.refusedAs(cmdInit("us", 5), errRefused(""))
	if v := h.m.View(); v.Region() != "eu" || v.Incarnation() != 5 || !v.Initialised() {
		t.Fatal("the view does not show the region")
	}
}

func TestConfigure(t *testing.T) {
	h := &harness{t: t, m: New()}
	h.ok(cmdInit("eu", testInc))
	for name, change := range map[string]func(*pb.ClusterConfiguration){
		"no id":    func(c *pb.ClusterConfiguration) { c.ClusterId = "" },
		"no name":  func(c *pb.ClusterConfiguration) { c.Partitions[0].Name = "" },
		"twice":    func(c *pb.ClusterConfiguration) { c.Partitions[0].Name = "q" },
		"too many": func(c *pb.ClusterConfiguration) { c.Partitions = make([]*pb.PartitionSpec, MaxPartitions+1) },
		"too big":  func(c *pb.ClusterConfiguration) { c.ClusterName = string(make([]byte, maxConfiguration)) },
	} {
		c := testConfiguration()
		change(c)
		t.Run(name, func(*testing.T) { h.refusedAs(cmdConfigure(c), errInvalid("", "")) })
	}
	h.refusedAs(cmdConfigure(nil), errInvalid("", ""))

	given := testConfiguration()
	if h.ok(cmdConfigure(given)).GetConfigure().GetAlready() {
		t.Fatal("already")
	}
	h.wantEvents(Configured{Configuration: testConfiguration()})
	given.ClusterId = "changed by the caller"
	if !proto.Equal(h.m.View().Configuration(), testConfiguration()) {
		t.Fatal("the state shares its configuration with the command")
	}
	if !h.ok(cmdConfigure(testConfiguration())).GetConfigure().GetAlready() || len(h.events) > 0 {
		t.Fatal("not idempotent")
	}
	other := testConfiguration()
	other.ClusterId = "c2"
	h.refused(cmdConfigure(other), &pb.ErrorDetail{Kind: &pb.ErrorDetail_OtherCluster{OtherCluster: &pb.OtherCluster{ClusterId: "c1", Version: 1}}})
	differs := testConfiguration()
	differs.DNs++
	h.refusedAs(cmdConfigure(differs), errRefused(""))

	var names []string
	for p := range h.m.View().Partitions() {
		names = append(names, p.Name)
		if p.Phase != phaseAbsent || p.Epoch != 0 || p.Live() {
			t.Fatalf("%+v", p)
		}
	}
	if len(names) != 2 || names[0] != "p" || names[1] != "q" {
		t.Fatalf("partitions %v", names)
	}
}

func TestUnknownCommandPoisons(t *testing.T) {
	unknownField := protowire.AppendVarint(protowire.AppendTag(nil, 2000, protowire.VarintType), 1)
	inCommand := cmdPulse()
	inCommand.ProtoReflect().SetUnknown(unknownField)
	inFlat := cmdAcquire("a", 1, "x")
	inFlat.GetAcquire().ProtoReflect().SetUnknown(unknownField)
	value := &pb.Value{Owner: "eu"}
	value.ProtoReflect().SetUnknown(unknownField)
	for name, c := range map[string]*pb.Command{
		"nil": nil, "no kind": {Term: testTerm}, "field of the command": inCommand, "field of a flat command": inFlat,
		"field within a value": cmdAccepted("p", nil, &pb.Ballot{Round: 1}, value),
	} {
		t.Run(name, func(t *testing.T) {
			h := newOwner(t, "a")
			before := h.m.View().StateHash()
			res, events := h.m.Apply(1000, testTerm, c)
			if !errors.Is(h.m.Poisoned(), ErrUnknownCommand) || res == nil || res.GetError() != nil || events != nil {
				t.Fatalf("poisoned by %v, result %v, events %v", h.m.Poisoned(), res, events)
			}
			if res, _ = h.m.Apply(1001, testTerm, cmdOpen("b")); res.GetError().GetRefused() == nil {
				t.Fatal("a poisoned machine went on")
			}
			if h.m.View().StateHash() != before {
				t.Fatal("a poisoned machine changed")
			}
		})
	}
}
