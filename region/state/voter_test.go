package state

import (
	"strings"
	"testing"

	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestF6ReserveBallotNeverTwice(t *testing.T) {
	h := newHarness(t)
	seen := map[uint64]bool{}
	last := uint64(0)
	for _, above := range []uint64{0, 0, 10, 3, 0, 11, 12, 12, maxAbove} {
		b := h.ok(cmdReserve(above)).GetReserved().GetBallot()
		if b.GetRegion() != "eu" || b.GetIncarnation() != testInc {
			t.Fatalf("ballot %v", b)
		}
		if b.GetRound() <= above || b.GetRound() <= last || seen[b.GetRound()] {
			t.Fatalf("round %d, above %d, after %d", b.GetRound(), above, last)
		}
		last, seen[b.GetRound()] = b.GetRound(), true
		if got := h.m.View().BallotRound(); got != last {
			t.Fatalf("view shows round %d, want %d", got, last)
		}
	}
	h.refusedAs(cmdReserve(maxAbove+1), errInvalid("", ""))
	for _, p := range []string{"p", "q"} {
		if !h.record(p).Promised.IsZero() {
			t.Fatalf("%s: reserving promised a ballot [F6 H1]", p)
		}
	}
}

func item(t *testing.T, r *pb.CommandResult) *pb.ItemResult {
	t.Helper()
	if n := len(r.GetItems().GetItems()); n != 1 {
		t.Fatalf("%d items", n)
	}
	return r.GetItems().GetItems()[0]
}

func ballot(round uint64, region string) *pb.Ballot {
	return &pb.Ballot{Round: round, Region: region, Incarnation: 1}
}

// H3: a promise and an accept take effect only on the register that they were
// checked against.
func TestH3GuardOfPromiseAndAccept(t *testing.T) {
	h := newHarness(t)
	empty := h.guard("p")
	b1, b2, b3 := ballot(1, "us"), ballot(2, "ap"), ballot(3, "us")
	v := &pb.Value{Owner: "us", OwnerIncarnation: 1, Epoch: 1, DNs: 4e9}

	// Nothing accepted under no ballot is no renewal.
	if r := item(t, h.ok(cmdAccepted("p", empty, nil, nil))); r.GetDone() || len(h.events) > 0 {
		t.Fatalf("accept of nothing: %v, events %v", r, h.events)
	}
	r := item(t, h.ok(cmdPromise("p", empty, b1)))
	if !r.GetDone() || register.RecordOf(r.GetRegister()) != h.record("p") || h.record("p").Promised != register.BallotOf(b1) {
		t.Fatalf("promise: %v", r)
	}
	h.wantEvents(RegisterChanged{Partition: "p", Record: h.record("p")})

	stale := func(c *pb.Command) {
		t.Helper()
		before := h.record("p")
		r := item(t, h.ok(c))
		if r.GetDone() || len(h.events) > 0 || h.record("p") != before || register.RecordOf(r.GetRegister()) != before {
			t.Fatalf("took effect on another register: %v, events %v", r, h.events)
		}
	}
	stale(cmdPromise("p", empty, b2))
	stale(cmdAccepted("p", empty, b2, v))
	stale(cmdPromise("p", h.guard("p"), b1))      // promised already
	stale(cmdPromise("p", h.guard("p"), nil))     // no ballot
	stale(cmdAccepted("p", h.guard("p"), nil, v)) // no ballot: must not meet the register's empty one
	stale(cmdAccepted("p", h.guard("p"), &pb.Ballot{}, v))

	if r = item(t, h.ok(cmdAccepted("p", h.guard("p"), b2, v))); !r.GetDone() {
		t.Fatalf("accept: %v", r)
	}
	rec := h.record("p")
	if rec.Promised != register.BallotOf(b2) || rec.Accepted != rec.Promised || rec.Value != register.ValueOf(v) {
		t.Fatalf("record %+v", rec)
	}
	h.wantEvents(RegisterChanged{Partition: "p", Record: rec})
	stale(cmdAccepted("p", h.guard("p"), b1, v)) // below the promise

	// The same ballot and value again is a success that changes nothing ...
	r = item(t, h.ok(cmdAccepted("p", empty, b2, v)))
	if !r.GetDone() || len(h.events) > 0 {
		t.Fatalf("accepted again: %v, events %v", r, h.events)
	}
	// ... until a higher ballot is promised.
	if !item(t, h.ok(cmdPromise("p", h.guard("p"), b3))).GetDone() {
		t.Fatal("promise refused")
	}
	stale(cmdAccepted("p", h.guard("p"), b2, v))
	if got := h.record("q"); got != (register.Record{}) {
		t.Fatalf("the other partition changed: %+v", got)
	}
}

func TestOneBallotWithTwoValuesAlarms(t *testing.T) {
	h := newHarness(t)
	b := ballot(1, "us")
	v := &pb.Value{Owner: "us", OwnerIncarnation: 1, Epoch: 1, DNs: 4e9}
	old := h.guard("p")
	h.ok(cmdAccepted("p", old, b, v))
	other := &pb.Value{Owner: "us", OwnerIncarnation: 1, Epoch: 2, DNs: 4e9}
	r := item(t, h.ok(cmdAccepted("p", old, b, other)))
	rec := h.record("p")
	if r.GetDone() || rec.Alarm == "" || rec.Value != register.ValueOf(v) || r.GetRegister().GetAlarm() != rec.Alarm {
		t.Fatalf("result %v, record %+v", r, rec)
	}
	h.wantEvents(RegisterChanged{Partition: "p", Record: rec})
	// Nothing more until an operator clears it, also for its own value.
	for _, c := range []*pb.Command{
		cmdAccepted("p", h.guard("p"), b, v), cmdAccepted("p", h.guard("p"), ballot(5, "us"), v),
		cmdPromise("p", h.guard("p"), ballot(5, "us")), cmdAccepted("p", h.guard("p"), b, other),
	} {
		if item(t, h.ok(c)).GetDone() || h.record("p") != rec || len(h.events) > 0 {
			t.Fatalf("an alarmed register answered %v", c)
		}
	}
	restored := restore(t, h.m)
	if p, _ := restored.View().Partition("p"); p.Register != rec {
		t.Fatal("the alarm is not durable")
	}
}

func TestItemsAreJudgedOneByOne(t *testing.T) {
	h := newHarness(t)
	b := ballot(1, "us")
	long := &pb.Ballot{Round: 9, Region: strings.Repeat("x", maxName+1)}
	res := h.ok(&pb.Command{Term: testTerm, Kind: &pb.Command_Promise{Promise: &pb.PromiseCommand{Items: []*pb.PromiseItem{
		{Partition: "nowhere", Ballot: b}, {Partition: "p", Guard: &pb.RegisterGuard{Promised: b}, Ballot: b},
		{Partition: "q", Ballot: b}, {Partition: "p", Ballot: long}, {},
	}}}}).GetItems().GetItems()
	want := []bool{false, false, true, false, false}
	for i, r := range res {
		if r.GetDone() != want[i] {
			t.Errorf("item %d: done %v", i, r.GetDone())
		}
	}
	if len(res) != len(want) || res[0].GetRegister() != nil || res[1].GetRegister() == nil {
		t.Fatalf("results %v", res)
	}
	res = h.ok(&pb.Command{Term: testTerm, Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{Items: []*pb.AcceptedItem{
		{Partition: "nowhere", Ballot: b}, {}, {Partition: "p", Ballot: b, Value: &pb.Value{Reason: long.GetRegion()}},
	}}}}).GetItems().GetItems()
	for i, r := range res {
		if r.GetDone() {
			t.Errorf("accept item %d done", i)
		}
	}
}

// F5: the last life and count of durable writes seen of a voter are kept; the
// count of one incarnation never goes down.
func TestF5RecordVoters(t *testing.T) {
	h := newHarness(t)
	rec := voterRecord
	h.ok(cmdRecordVoters(rec("witness/w1", 1, 1, 10), rec("region/us", 2, 1, 5)))
	h.ok(cmdRecordVoters(rec("witness/w1", 1, 2, 9)))
	if v, _ := h.m.View().Voter("witness/w1"); v != (VoterRecord{ID: "witness/w1", Incarnation: 1, Life: 2, Writes: 10}) {
		t.Fatalf("%+v", v)
	}
	h.ok(cmdRecordVoters(rec("witness/w1", 8, 3, 1)))
	if v, _ := h.m.View().Voter("witness/w1"); v.Incarnation != 8 || v.Writes != 1 {
		t.Fatalf("%+v", v)
	}
	n := 0
	for range h.m.View().Voters() {
		n++
	}
	if n != 2 {
		t.Fatalf("%d voters", n)
	}
	h.refusedAs(cmdRecordVoters(rec("a", 1, 1, 1), rec("", 1, 1, 1)), errInvalid("", ""))
	var many []*pb.VoterRecord
	for i := range MaxVoters {
		many = append(many, rec(string(rune('a'+i%26))+string(rune('a'+i/26)), 1, 1, 1))
	}
	h.refusedAs(cmdRecordVoters(many...), errInvalid("", ""))
}
