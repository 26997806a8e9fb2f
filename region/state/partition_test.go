package state

import (
	"testing"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func euValue(epoch uint32) *pb.Value {
	return &pb.Value{Owner: "eu", OwnerIncarnation: testInc, Epoch: epoch, DNs: 4e9}
}

func TestAdopt(t *testing.T) {
	h := newHarness(t)
	b := h.accept("p", euValue(3))
	h.ok(cmdAdopt("p", 3, b))
	h.wantEvents(PartitionAdopted{Partition: "p", Epoch: 3, Unsettled: true})
	p, _ := h.m.View().Partition("p")
	if p.Epoch != 3 || p.Seq != 0 || p.Phase != phaseActive || !p.Live() {
		t.Fatalf("%+v", p)
	}
	h.ok(cmdOpen("a"))
	if res := h.ok(inEpoch(cmdAcquire("a", 1, "x"), 3)); res.GetAcquire().GetGranted().GetToken() != uint64(token(3, 1)) {
		t.Fatalf("%v", res)
	}
	h.refusedAs(cmdAdopt("nowhere", 3, b), errInvalid("", ""))
	h.refusedAs(cmdAdopt("p", 0, b), errInvalid("", ""))
	h.refusedAs(cmdAdopt("p", uint32(fence.MaxEpoch)+1, b), errInvalid("", ""))
}

// H7: no Adopt without the own register's accepted ballot, owner and epoch.
func TestH7AdoptNeedsTheOwnRegister(t *testing.T) {
	h := newHarness(t)
	h.refusedAs(cmdAdopt("p", 1, nil), errRefused("")) // the empty register's ballot is none
	h.refusedAs(cmdAdopt("p", 1, &pb.Ballot{}), errRefused(""))
	b := h.accept("p", euValue(1))
	higher := h.ok(cmdReserve(0)).GetReserved().GetBallot()
	h.refusedAs(cmdAdopt("p", 1, higher), errRefused("")) // reserved, not accepted
	h.refusedAs(cmdAdopt("p", 2, b), errRefused(""))      // another epoch than accepted
	h.refusedAs(cmdAdopt("q", 1, b), errRefused(""))      // another partition

	// Promised higher in between is no hindrance, accepted is.
	h.ok(cmdPromise("p", h.guard("p"), higher))
	h.ok(cmdAdopt("p", 1, b))
	h.ok(cmdAccepted("p", h.guard("p"), higher, &pb.Value{Owner: "us", OwnerIncarnation: 9, Epoch: 2, DNs: 4e9}))
	h.refusedAs(cmdAdopt("p", 1, b), errRefused(""))
	h.refusedAs(cmdAdopt("p", 2, higher), errRefused("")) // another owner

	for name, v := range map[string]*pb.Value{
		"other incarnation": {Owner: "eu", OwnerIncarnation: testInc + 1, Epoch: 5, DNs: 4e9},
		"released":          {Epoch: 5, DNs: 4e9},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.refusedAs(cmdAdopt("p", 5, h.accept("p", v)), errRefused(""))
		})
	}
	t.Run("alarmed", func(t *testing.T) {
		h := newHarness(t)
		b := h.accept("p", euValue(1))
		h.ok(cmdAccepted("p", h.guard("p"), b, euValue(2)))
		h.refusedAs(cmdAdopt("p", 1, b), errRefused(""))
	})
}

// H7: an epoch that was adopted or dropped here never comes back, and what is
// live keeps its seq.
func TestH7EpochsNeverComeBack(t *testing.T) {
	h := newOwner(t, "a")
	h.grant("a", 1, "x")
	b := h.record("p").Accepted.Proto()
	h.ok(cmdAdopt("p", 1, b))
	h.wantEvents(PartitionAdopted{Partition: "p", Epoch: 1, Resumed: true})
	if h.grant("a", 2, "y") != token(1, 2) {
		t.Fatal("a resumed epoch did not keep its seq")
	}
	h.ok(cmdDrop("p", 1))
	h.refusedAs(cmdAdopt("p", 1, b), errRefused(""))
	h.ok(cmdAdopt("p", 4, h.accept("p", euValue(4))))
	for _, epoch := range []uint32{1, 2, 3} {
		h.refusedAs(cmdAdopt("p", epoch, h.accept("p", euValue(epoch))), errRefused(""))
	}
	p, _ := h.m.View().Partition("p")
	if p.Epoch != 4 || p.Dropped != 1 {
		t.Fatalf("%+v", p)
	}
}

func TestDrop(t *testing.T) {
	h := newOwner(t, "a", "b", "c")
	tx, ty, tq := h.grant("a", 1, "x"), h.grant("b", 1, "y"), h.grant("a", 2, "qz")
	h.wait("b", 2, "x")
	h.wait("c", 3, "x")
	h.wait("b", 3, "qz")
	h.accept("p", &pb.Value{Owner: "us", OwnerIncarnation: 9, Epoch: 2, DNs: 4e9})
	h.refusedAs(cmdDrop("p", 2), errRefused("")) // not the live one
	h.refusedAs(cmdDrop("p", 0), errRefused(""))
	h.refusedAs(cmdDrop("nowhere", 1), errInvalid("", ""))

	h.ok(cmdDrop("p", 1))
	told := notOwner("p", "us", 2)
	h.wantEvents(
		PartitionDropped{Partition: "p", Epoch: 1},
		LeaseEnded{Session: "a", Resource: "x", Partition: "p", Token: tx, Reason: EndDropped},
		WaiterEnded{Session: "b", Request: 2, Resource: "x", Partition: "p", Error: told},
		WaiterEnded{Session: "c", Request: 3, Resource: "x", Partition: "p", Error: told},
		LeaseEnded{Session: "b", Resource: "y", Partition: "p", Token: ty, Reason: EndDropped},
	)
	p, _ := h.m.View().Partition("p")
	if p.Epoch != 1 || p.Seq != 2 || p.Phase != phaseAbsent || p.Dropped != 1 || p.Live() {
		t.Fatalf("epoch and seq must stay: %+v", p)
	}
	if c := h.m.View().Counts(); c.Leases != 1 || c.Waiters != 1 || h.holder("qz") != "a" {
		t.Fatalf("the other partition's leases: %+v", c)
	}
	h.ok(cmdDrop("p", 1)) // again: nothing to do
	h.wantEvents()
	h.refused(cmdAcquire("a", 9, "x"), told)
	h.refused(cmdWait("b", 2, "x"), told)
	h.ok(cmdRelease("a", "qz", tq))
	if h.holder("qz") != "b" {
		t.Fatal("the other partition's queue is broken")
	}
}

// Adopting an epoch further up than the next ends the old one: another region
// owned the partition in between, and no ended lease may be revived.
func TestH7AdoptOverALiveEpochEndsItsLeases(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	h.wait("b", 1, "x")
	h.own("p", 3)
	h.wantEvents(
		PartitionDropped{Partition: "p", Epoch: 1},
		PartitionAdopted{Partition: "p", Epoch: 3, Unsettled: true},
		LeaseEnded{Session: "a", Resource: "x", Partition: "p", Token: tok, Reason: EndDropped},
		WaiterEnded{Session: "b", Request: 1, Resource: "x", Partition: "p", Error: errLapsed("p")},
	)
	h.refusedAs(cmdDrop("p", 2), errRefused("")) // late, of an epoch in between
	p, _ := h.m.View().Partition("p")
	if p.Epoch != 3 || p.Seq != 0 || p.Dropped != 1 || !p.Live() {
		t.Fatalf("%+v", p)
	}
}

// F47: an owner's own raise is not a Drop: clients may still believe in the
// old tokens, so these are revoked and pass on when that is over.
func TestF47RaiseRevokesOldTokens(t *testing.T) {
	h := newOwner(t, "a", "b")
	tok := h.grant("a", 1, "x")
	h.wait("b", 1, "x")
	h.own("p", 2)
	h.wantEvents(
		LeaseRevoked{Session: "a", Resource: "x", Partition: "p", Token: tok, Reason: RaisedReason},
		PartitionAdopted{Partition: "p", Epoch: 2},
	)
	if h.holder("x") != "a" {
		t.Fatal("the resource is free while its holder may still believe in it")
	}
	if res := h.ok(inEpoch(cmdAcquire("a", 2, "y"), 2)); res.GetAcquire().GetGranted().GetToken() != uint64(token(2, 1)) {
		t.Fatalf("%v", res)
	}
	restore(t, h.m)
	h.ok(cmdEndRevocation("x", tok))
	h.wantEvents(
		LeaseEnded{Session: "a", Resource: "x", Partition: "p", Token: tok, Reason: EndRevoked},
		LeaseGranted{Session: "b", Request: 1, Resource: "x", Partition: "p", Token: token(2, 2), Offered: true},
	)
	h.refusedAs(cmdDrop("p", 1), errRefused(""))
}
