package state

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func cmdBeginEra(p *pb.EraPlan) *pb.Command {
	return &pb.Command{Kind: &pb.Command_BeginEra{BeginEra: &pb.BeginEraCommand{Plan: p}}}
}

func cmdStopInEra(counter, id uint64) *pb.Command {
	return &pb.Command{Kind: &pb.Command_StopInEra{StopInEra: &pb.StopInEraCommand{Stop: &pb.EraStop{Era: &pb.Era{Counter: counter, Id: id}, By: "region/us"}}}}
}

// testPlan makes era 1 of the test's region alone.
func testPlan() *pb.EraPlan {
	c := config.WithoutVoter(testConfiguration(), "witness/w1")
	c.Era, c.PreviousVoters = &pb.Era{Counter: 1, Id: 7}, c.GetVoters()
	c.DestroyedVoters = []*pb.Voter{{Id: "witness/w1", Incarnation: 5}}
	p := &pb.EraPlan{Configuration: c}
	for _, s := range c.GetPartitions() {
		p.Epochs = append(p.Epochs, &pb.EraEpoch{Partition: s.GetName(), Epoch: 1030, DNs: 4e9})
	}
	return p
}

// TestF16BeginEra: the leases of before are gone, the registers are released far
// above, nothing of before is accepted or adopted, and what comes then is of the
// era. It survives a snapshot.
func TestF16BeginEra(t *testing.T) {
	h := newOwner(t, "a")
	token := h.grant("a", 1, "x")
	old := h.record("p")
	inFlight := cmdPromise("p", h.guard("p"), h.ok(cmdReserve(0)).GetReserved().GetBallot())
	p := testPlan()
	if res := h.ok(cmdBeginEra(p)); res.GetConfigure().GetAlready() {
		t.Fatal(res)
	}
	begun := false
	for _, e := range h.events {
		if e, ok := e.(EraBegun); ok {
			begun = e.Before == register.Era{} && proto.Equal(e.Configuration, p.GetConfiguration())
		}
	}
	if !begun {
		t.Errorf("%+v", h.events)
	}
	h.m = restore(t, h.m)
	if res := h.ok(cmdBeginEra(p)); !res.GetConfigure().GetAlready() {
		t.Error(res)
	}
	rec := h.record("p")
	if rec != register.EraRecord(register.Era{Counter: 1, ID: 7}, 1030, 4e9) {
		t.Errorf("%+v", rec)
	}
	if v := h.m.View(); v.Configuration().GetVersion() != 2 || h.holder("x") != "" {
		t.Errorf("%v, x is held by %q", v.Configuration(), h.holder("x"))
	}
	if h.ok(inFlight).GetItems().GetItems()[0].GetDone() {
		t.Error("a promise of before takes effect")
	}
	h.m.Apply(h.index+1, testTerm, cmdAdopt("p", 1, old.Accepted.Proto()))
	h.index++
	if q, _ := h.m.View().Partition("p"); q.Live() {
		t.Error("an epoch of before is adopted")
	}
	b := h.ok(cmdReserve(0)).GetReserved().GetBallot()
	if register.EraOf(b.GetEra()) != (register.Era{Counter: 1, ID: 7}) || !rec.Promised.Less(register.BallotOf(b)) {
		t.Errorf("%v", b)
	}
	value := &pb.Value{Owner: "eu", OwnerIncarnation: testInc, Epoch: 1031, DNs: 4e9, Era: b.GetEra()}
	accepted := cmdAccepted("p", h.guard("p"), b, value)
	accepted.GetAccepted().ConfigVersion = 2
	if !h.ok(accepted).GetItems().GetItems()[0].GetDone() {
		t.Fatal("refused")
	}
	h.ok(cmdAdopt("p", 1031, b))
	again := cmdAcquire("a", 2, "y")
	again.GetAcquire().Epoch = 1031
	if g := h.ok(again).GetAcquire().GetGranted(); g.GetToken() <= uint64(token) {
		t.Errorf("token %d after %d", g.GetToken(), token)
	}
	h.m = restore(t, h.m)
}

func TestF16BeginEraRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		bend func(h *harness, p *pb.EraPlan)
		want string
	}{
		"made without this data":    {func(_ *harness, p *pb.EraPlan) { p.Epochs[0].Epoch = 1 }, "it was made without this data"},
		"a partition is missing":    {func(_ *harness, p *pb.EraPlan) { p.Epochs = p.Epochs[1:] }, "it has no partition"},
		"declared destroyed":        {func(_ *harness, p *pb.EraPlan) { p.Configuration.Voters[0].Incarnation++ }, "is no survivor by it"},
		"an older configuration":    {func(_ *harness, p *pb.EraPlan) { p.Configuration.Version = 1 }, "this data has 1"},
		"another era of that count": {func(h *harness, p *pb.EraPlan) { h.ok(cmdBeginEra(testPlan())); p.Configuration.Era.Id++ }, "two operators have forced a quorum"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newOwner(t, "a")
			p := testPlan()
			tc.bend(h, p)
			before := h.content()
			res := h.do(cmdBeginEra(p))
			if e := res.GetError().GetRefused().GetReason(); !strings.Contains(e, tc.want) {
				t.Errorf("%v, want %q", res, tc.want)
			}
			h.unchanged(cmdBeginEra(p), before)
		})
	}
}

// TestF16ARegionThatMetAnotherEraStops for good: it promises, accepts and adopts
// nothing, after a restore too, until it is taken into a higher one.
func TestF16ARegionThatMetAnotherEraStops(t *testing.T) {
	h := newOwner(t, "a")
	h.ok(cmdStopInEra(0, 0))
	if h.m.View().EraStop() != nil {
		t.Fatal("stopped by its own era")
	}
	b := h.accept("p", euValue(2))
	h.ok(cmdStopInEra(1, 9))
	if len(h.events) != 1 || h.m.View().EraStop().GetBy() != "region/us" {
		t.Fatalf("%+v", h.events)
	}
	h.ok(cmdStopInEra(1, 9))
	if len(h.events) != 0 {
		t.Errorf("again: %+v", h.events)
	}
	h.m = restore(t, h.m)
	if res := h.do(cmdAdopt("p", 2, b)); !strings.Contains(res.GetError().GetRefused().GetReason(), "votes no more") {
		t.Error(res)
	}
	if h.ok(cmdPromise("p", h.guard("p"), h.ok(cmdReserve(0)).GetReserved().GetBallot())).GetItems().GetItems()[0].GetDone() {
		t.Error("promises")
	}
	p := testPlan()
	p.Configuration.Era.Counter = 2
	h.ok(cmdBeginEra(p))
	if h.m.View().EraStop() != nil {
		t.Error("stopped in the era that it began")
	}
	h.m = restore(t, h.m)
}

func TestF16ErasNeedLevel3(t *testing.T) {
	h := newHarness1(t)
	h.ok(cmdRaise(2))
	for _, c := range []*pb.Command{cmdBeginEra(testPlan()), cmdStopInEra(1, 9), cmdConfigure(testPlan().GetConfiguration())} {
		if e := h.do(c).GetError().GetRefused().GetReason(); !strings.Contains(e, "feature level 3") {
			t.Errorf("%v: %q", c, e)
		}
	}
}
