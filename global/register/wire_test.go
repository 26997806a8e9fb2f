package register

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func drawBallot(t *rapid.T, label string) Ballot {
	if rapid.Bool().Draw(t, label+" zero") {
		return Ballot{}
	}
	return Ballot{
		Round:       rapid.Uint64().Draw(t, label+" round"),
		Region:      rapid.SampledFrom([]string{"", "eu", "us"}).Draw(t, label+" region"),
		Incarnation: Incarnation(rapid.Uint64().Draw(t, label+" incarnation")),
	}
}

func drawValue(t *rapid.T) Value {
	return Value{
		Owner:     Region{rapid.SampledFrom([]string{"", "eu", "us"}).Draw(t, "owner"), Incarnation(rapid.Uint64().Draw(t, "owner incarnation"))},
		Epoch:     fence.Epoch(rapid.Uint32().Draw(t, "epoch")),
		D:         time.Duration(rapid.Int64().Draw(t, "d")),
		Successor: rapid.StringN(0, 4, 16).Draw(t, "successor"),
		Reason:    rapid.StringN(0, 4, 16).Draw(t, "reason"),
	}
}

// through sends m over the wire and back.
func through[M proto.Message](t *rapid.T, m, empty M) M {
	raw, err := proto.Marshal(m)
	if err != nil {
		t.Fatalf("marshal: %v", err)
	}
	if err := proto.Unmarshal(raw, empty); err != nil {
		t.Fatalf("unmarshal: %v", err)
	}
	return empty
}

func TestWireRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rec := Record{
			Promised: drawBallot(t, "promised"),
			Accepted: drawBallot(t, "accepted"),
			Value:    drawValue(t),
			Alarm:    rapid.SampledFrom([]string{"", "two values"}).Draw(t, "alarm"),
		}
		if got := RecordOf(through(t, rec.Proto(), &pb.Register{})); got != rec {
			t.Fatalf("record: got %+v, want %+v", got, rec)
		}
		if got := GuardOf(through(t, rec.Guard().Proto(), &pb.RegisterGuard{})); got != rec.Guard() {
			t.Fatalf("guard: got %+v, want %+v", got, rec.Guard())
		}
	})
}

func TestWireOfNothing(t *testing.T) {
	if b := BallotOf(nil); !b.IsZero() || b.Proto() != nil {
		t.Errorf("nil ballot: %v", b)
	}
	if v := ValueOf(nil); v != (Value{}) || v.Proto() != nil {
		t.Errorf("nil value: %+v", v)
	}
	if r := RecordOf(nil); r != (Record{}) || r.Proto() == nil {
		t.Errorf("nil record: %+v", r)
	}
	if g := GuardOf(nil); g != (Guard{}) {
		t.Errorf("nil guard: %+v", g)
	}
	if c := CandidateOf(nil); c != (Region{}) {
		t.Errorf("nil header: %+v", c)
	}
}

func TestWireEnumsMatch(t *testing.T) {
	for r := RuleNone; r <= RuleUnknownPartition; r++ {
		if got := RuleOf(r.Proto()); got != r {
			t.Errorf("rule %d came back as %d", r, got)
		}
	}
	if n := len(pb.RefusalRule_name); n != int(RuleUnknownPartition)+1 {
		t.Errorf("the wire has %d rules, the voter %d", n, RuleUnknownPartition+1)
	}
	if got := RuleOf(1000); got != RuleRetry {
		t.Errorf("unknown rule became %v, want a refusal", got)
	}
	wire := map[Rule]pb.RefusalRule{
		RuleV1Ballot: pb.RefusalRule_REFUSAL_RULE_V1_BALLOT, RuleV2Running: pb.RefusalRule_REFUSAL_RULE_V2_RUNNING,
		RuleV3Alive: pb.RefusalRule_REFUSAL_RULE_V3_ALIVE, RulePending: pb.RefusalRule_REFUSAL_RULE_PENDING,
		RuleAlarm: pb.RefusalRule_REFUSAL_RULE_ALARM, RuleConflict: pb.RefusalRule_REFUSAL_RULE_CONFLICT,
		RuleRetry: pb.RefusalRule_REFUSAL_RULE_RETRY, RuleUnknownPartition: pb.RefusalRule_REFUSAL_RULE_UNKNOWN_PARTITION,
	}
	for r, want := range wire {
		if r.Proto() != want {
			t.Errorf("%v is %v on the wire, want %v", r, r.Proto(), want)
		}
	}
	for v, want := range map[Verdict]pb.Verdict{
		VerdictUnknown: pb.Verdict_VERDICT_UNSPECIFIED, VerdictHealthy: pb.Verdict_VERDICT_HEALTHY,
		VerdictSlow: pb.Verdict_VERDICT_SLOW, VerdictCrashed: pb.Verdict_VERDICT_CRASHED,
	} {
		if v.Proto() != want || VerdictOf(want) != v {
			t.Errorf("%v is %v on the wire", v, v.Proto())
		}
	}
	for _, v := range []pb.Verdict{-1, 4, 1 << 20} {
		if got := VerdictOf(v); got != VerdictUnknown {
			t.Errorf("verdict %d became %v", v, got)
		}
	}
}

func TestValueCheck(t *testing.T) {
	good := Value{Owner: Region{"eu", 7}, Epoch: 3, D: 4 * time.Second}
	for name, c := range map[string]struct {
		change func(*Value)
		want   string
	}{
		"good":           {func(*Value) {}, ""},
		"released":       {func(v *Value) { v.Owner = Region{}; v.Successor = "us" }, ""},
		"no D":           {func(v *Value) { v.D = 0 }, "value.d_ns"},
		"negative D":     {func(v *Value) { v.D = -1 }, "value.d_ns"},
		"absurd D":       {func(v *Value) { v.D = MaxD + 1 }, "value.d_ns"},
		"epoch 0":        {func(v *Value) { v.Epoch = 0 }, "value.epoch"},
		"epoch too high": {func(v *Value) { v.Epoch = fence.MaxEpoch + 1 }, "value.epoch"},
		"no incarnation": {func(v *Value) { v.Owner.Incarnation = 0 }, "value.owner"},
		"no owner name":  {func(v *Value) { v.Owner.Name = "" }, "value.owner"},
	} {
		v := good
		c.change(&v)
		err := v.Check()
		if (err == nil) != (c.want == "") || (err != nil && !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want it to name %q", name, err, c.want)
		}
	}
	if err := (Value{Owner: Region{Name: "eu"}}).Check(); err == nil || strings.Count(err.Error(), "value.") != 3 {
		t.Errorf("not all faults are listed: %v", err)
	}
}

func TestAnswers(t *testing.T) {
	const d = 4 * time.Second
	now := instant.Instant(0).Add(10 * time.Second)
	rec := Record{
		Promised: Ballot{9, "us", 2, Era{1, 7}}, Accepted: Ballot{8, "eu", 1, Era{1, 7}},
		Value: Value{Owner: Region{"eu", 1}, Epoch: 3, D: d},
	}
	r := Register{Record: rec, Since: now.Add(-time.Second)}

	a := PrepareAnswerOf("p", r, now, RuleV2Running, VerdictSlow)
	if a.GetPartition() != "p" || a.GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_V2_RUNNING ||
		a.GetRefusal().GetRemainingNs() != int64(3*time.Second) || a.GetRemainingNs() != int64(3*time.Second) ||
		a.GetVerdict() != pb.Verdict_VERDICT_SLOW || RecordOf(a.GetRegister()) != rec || a.GetRefusal().GetText() == "" {
		t.Errorf("refused prepare: %v", a)
	}
	if a := PrepareAnswerOf("p", r, now, RuleNone, VerdictCrashed); a.GetRefusal() != nil || RecordOf(a.GetRegister()) != rec {
		t.Errorf("promise: %v", a)
	}
	if a := AcceptAnswerOf("p", r, now, RuleNone); a.GetRefusal() != nil || a.GetRegister() != nil {
		t.Errorf("accepted: %v", a)
	}
	for rule := RuleV1Ballot; rule <= RuleUnknownPartition; rule++ {
		a := AcceptAnswerOf("p", r, now, rule)
		if a.GetRefusal().GetRule() != rule.Proto() || a.GetRefusal().GetText() == "" || RecordOf(a.GetRegister()) != rec {
			t.Errorf("refused accept by %v: %v", rule, a)
		}
	}
}

// FuzzWireTotal: whatever bytes a peer sends as a register, reading it never
// panics and what was read survives its own round trip.
func FuzzWireTotal(f *testing.F) {
	seed, _ := proto.Marshal(Record{Promised: Ballot{1, "eu", 2, Era{1, 7}}, Value: Value{Epoch: 1, D: time.Second, Era: Era{1, 7}}}.Proto())
	f.Add(seed)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, raw []byte) {
		var m pb.Register
		if proto.Unmarshal(raw, &m) != nil {
			return
		}
		rec := RecordOf(&m)
		if again := RecordOf(rec.Proto()); again != rec {
			t.Fatalf("got %+v, then %+v", rec, again)
		}
		_ = rec.Value.Check()
		_ = Restart(rec, 0).Remaining(1)
	})
}
