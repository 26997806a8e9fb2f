package register

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

const d = 4 * time.Second

var (
	eu = Region{"eu", 1}
	us = Region{"us", 1}
	t0 = instant.Instant(1000 * time.Second)
)

func ballot(round uint64, r Region) Ballot {
	return Ballot{Round: round, Region: r.Name, Incarnation: r.Incarnation}
}

func owned(by Region, epoch fence.Epoch) Value { return Value{Owner: by, Epoch: epoch, D: d} }

// held is a register that accepted {eu, 3} at ballot 2.eu at t0.
func held() Register {
	b := ballot(2, eu)
	return Register{Record: Record{Promised: b, Accepted: b, Value: owned(eu, 3)}, Since: t0}
}

func TestBallotOrder(t *testing.T) {
	first := Era{}
	in := []Ballot{
		{}, {1, "a", 1, first}, {1, "a", 2, first}, {1, "b", 1, first}, {2, "a", 1, first}, {10, "a", 1, first},
		{1, "a", 1, Era{1, 5}}, {9, "a", 1, Era{1, 5}}, {1, "a", 1, Era{1, 6}}, {1, "a", 1, Era{2, 1}}, // F16: eras order before rounds
	}
	for i, a := range in {
		for j, b := range in {
			if a.Less(b) != (i < j) {
				t.Errorf("%v < %v is %v", a, b, a.Less(b))
			}
		}
	}
}

func TestPrepareRules(t *testing.T) {
	released := held()
	released.Value = Value{Epoch: 3, D: d}
	toUS := held()
	toUS.Value = Value{Epoch: 3, D: d, Successor: "us"}
	pending := held()
	pending.Pending = true
	alarmed := held()
	alarmed.Alarm = "two values"
	ap := Region{"ap", 1}
	for _, c := range []struct {
		name    string
		reg     Register
		at      time.Duration // after t0
		cand    Region
		round   uint64
		dry     bool
		verdict Verdict
		action  Action
		rule    Rule
	}{
		{name: "nothing accepted", reg: Register{}, cand: us, round: 1, action: Write},
		{name: "nothing accepted, dry", reg: Register{}, cand: us, dry: true, action: Answer},
		{name: "V1 lower round", reg: held(), at: 9 * d, cand: us, round: 1, rule: RuleV1Ballot},
		{name: "V1 same round, region above", reg: held(), at: 9 * d, cand: us, round: 2, action: Write},
		{name: "V1 same round, region below", reg: held(), at: 9 * d, cand: ap, round: 2, rule: RuleV1Ballot},
		{name: "V1 retransmission by the same candidate, though V2 and V3 would refuse another", reg: held(), cand: eu, round: 2, verdict: VerdictHealthy, action: Answer},
		{name: "V1 equal ballot of another incarnation", reg: held(), at: 9 * d, cand: Region{"eu", 0}, round: 2, rule: RuleV1Ballot},
		{name: "V1 is not asked of a dry one", reg: held(), at: d, cand: us, dry: true, action: Answer},
		{name: "V2 running", reg: held(), at: d - 1, cand: us, round: 3, rule: RuleV2Running},
		{name: "V2 running, dry", reg: held(), at: d - 1, cand: us, dry: true, rule: RuleV2Running},
		{name: "V2 over", reg: held(), at: d, cand: us, round: 3, action: Write},
		{name: "V2 the owner itself", reg: held(), cand: eu, round: 3, verdict: VerdictHealthy, action: Write},
		{name: "V2 the owner under a new incarnation is another", reg: held(), cand: Region{"eu", 2}, round: 3, rule: RuleV2Running},
		{name: "V2 released, to any", reg: released, cand: us, round: 3, action: Write},
		{name: "V2 released, to the successor", reg: toUS, cand: us, round: 3, action: Write},
		{name: "V2 released, to another", reg: toUS, at: d - 1, cand: ap, round: 3, rule: RuleV2Running},
		{name: "V2 released, to another after D", reg: toUS, at: d, cand: ap, round: 3, verdict: VerdictHealthy, action: Write},
		{name: "V3 healthy", reg: held(), at: d, cand: us, round: 3, verdict: VerdictHealthy, rule: RuleV3Alive},
		{name: "V3 slow is alive", reg: held(), at: d, cand: us, round: 3, verdict: VerdictSlow, rule: RuleV3Alive},
		{name: "V3 crashed", reg: held(), at: d, cand: us, round: 3, verdict: VerdictCrashed, action: Write},
		{name: "V3 alive but over for almost 2D", reg: held(), at: 3*d - 1, cand: us, round: 3, verdict: VerdictHealthy, rule: RuleV3Alive},
		{name: "V3 alive but over for 2D", reg: held(), at: 3 * d, cand: us, round: 3, verdict: VerdictHealthy, action: Write},
		{name: "V3 released", reg: released, cand: us, round: 3, verdict: VerdictHealthy, action: Write},
		{name: "H3 a promise in flight", reg: pending, at: 9 * d, cand: us, round: 3, rule: RulePending},
		{name: "alarm", reg: alarmed, at: 9 * d, cand: us, round: 3, rule: RuleAlarm},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := PrepareInput{Candidate: c.cand, Dry: c.dry, Verdict: c.verdict}
			if !c.dry {
				in.Ballot = ballot(c.round, c.cand)
			}
			before := c.reg
			dec := c.reg.Prepare(t0.Add(c.at), in)
			if dec.Action != c.action || dec.Rule != c.rule {
				t.Fatalf("have action %v rule %q, want %v %q", dec.Action, dec.Rule, c.action, c.rule)
			}
			if c.reg != before {
				t.Error("a judgement changed the register")
			}
			if c.action != Write {
				return
			}
			rec, ok := Update(c.reg.Record, dec.Change)
			if !ok || rec.Promised != in.Ballot || rec.Accepted != before.Accepted || rec.Value != before.Value {
				t.Errorf("update: %v %+v", ok, rec)
			}
			if after := c.reg.Written(t0.Add(c.at), rec); after.Since != before.Since {
				t.Error("a promise moved the clock")
			}
		})
	}
}

func TestAcceptRules(t *testing.T) {
	promised := held()
	promised.Promised = ballot(5, us)
	pending := held()
	pending.Pending = true
	for _, c := range []struct {
		name   string
		reg    Register
		b      Ballot
		v      Value
		action Action
		rule   Rule
	}{
		{"first", Register{}, ballot(1, us), owned(us, 1), Write, RuleNone},
		{"at the promised ballot", promised, ballot(5, us), owned(us, 4), Write, RuleNone},
		{"H5 a renewal below the promise", promised, ballot(2, eu), owned(eu, 3), Refuse, RuleV1Ballot},
		{"below the promise", promised, ballot(4, us), owned(us, 4), Refuse, RuleV1Ballot},
		{"a renewal", held(), ballot(2, eu), owned(eu, 3), Renew, RuleNone},
		{"above the promise", held(), ballot(7, us), owned(us, 4), Write, RuleNone},
		{"H3 a renewal while a promise is pending", pending, ballot(2, eu), owned(eu, 3), Refuse, RulePending},
		{"H3 an Accept while a promise is pending", pending, ballot(7, us), owned(us, 4), Refuse, RulePending},
		{"one ballot, two values", held(), ballot(2, eu), owned(eu, 4), WriteAlarm, RuleConflict},
		{"one ballot, two values, even below the promise", promised, ballot(2, eu), owned(us, 3), WriteAlarm, RuleConflict},
	} {
		t.Run(c.name, func(t *testing.T) {
			dec := c.reg.Accept(c.b, c.v)
			if dec.Action != c.action || dec.Rule != c.rule {
				t.Fatalf("have action %v rule %q, want %v %q", dec.Action, dec.Rule, c.action, c.rule)
			}
			now := t0.Add(d / 2)
			switch c.action {
			case Write:
				rec, ok := Update(c.reg.Record, dec.Change)
				if !ok || rec.Promised != c.b || rec.Accepted != c.b || rec.Value != c.v { // H5: promised := ballot
					t.Fatalf("update: %v %+v", ok, rec)
				}
				if left := c.reg.Written(now, rec).Remaining(now); left != d {
					t.Errorf("%v left after an Accept, want full D", left)
				}
			case WriteAlarm:
				rec, ok := Update(c.reg.Record, dec.Change)
				if !ok || rec.Alarm == "" || rec.Value != c.reg.Value {
					t.Fatalf("update: %v %+v", ok, rec)
				}
				reg := c.reg.Written(now, rec)
				if p := reg.Prepare(now.Add(9*d), PrepareInput{Candidate: us, Ballot: ballot(99, us)}); p.Rule != RuleAlarm {
					t.Errorf("an alarmed register answers a Prepare: %+v", p)
				}
				if a := reg.Accept(ballot(99, us), owned(us, 9)); a.Rule != RuleAlarm {
					t.Errorf("an alarmed register answers an Accept: %+v", a)
				}
				if _, ok := Update(rec, Change{Guard: rec.Guard(), Ballot: ballot(99, us)}); ok {
					t.Error("an alarmed record changes")
				}
			}
		})
	}
}

func TestH3RenewalLosesToAPromiseWhileItsCheckRuns(t *testing.T) {
	reg := held()
	if reg.Accept(ballot(2, eu), owned(eu, 3)).Action != Renew {
		t.Fatal("no renewal")
	}
	pending := reg
	pending.Pending = true
	if _, ok := pending.Renewed(t0.Add(d), ballot(2, eu), owned(eu, 3)); ok {
		t.Error("renewed while a promise is pending")
	}
	rec, _ := Update(reg.Record, Change{Guard: reg.Guard(), Ballot: ballot(3, us)})
	if _, ok := reg.Written(t0, rec).Renewed(t0.Add(d), ballot(2, eu), owned(eu, 3)); ok {
		t.Error("renewed below a promise")
	}
	if again, ok := reg.Renewed(t0.Add(d/2), ballot(2, eu), owned(eu, 3)); !ok || again.Remaining(t0.Add(d/2)) != d {
		t.Error("a good renewal did not restart the clock at full D")
	}
}

func TestH3UpdateRefusesAChangedRegister(t *testing.T) {
	reg := held()
	promise := reg.Prepare(t0.Add(d), PrepareInput{Candidate: us, Ballot: ballot(9, us)})
	accept := reg.Accept(ballot(5, eu), owned(eu, 3))
	rec, ok := Update(reg.Record, accept.Change)
	if !ok {
		t.Fatal("accept refused")
	}
	if same, ok := Update(rec, promise.Change); ok || same != rec {
		t.Errorf("a promise checked before an Accept took effect after it: %+v", same)
	}
	if _, ok := Update(rec, accept.Change); ok {
		t.Error("a command took effect twice")
	}
}

func TestH5RestartCountsEveryAcceptedValueAsFresh(t *testing.T) {
	for _, v := range []Value{owned(eu, 3), {Epoch: 3, D: d, Successor: "us"}} {
		rec := held().Record
		rec.Value = v
		reg := Restart(rec, t0.Add(100*d))
		if left := reg.Remaining(t0.Add(100 * d)); left != d {
			t.Errorf("%+v: %v left after a restart, want full D", v, left)
		}
		if reg.Pending {
			t.Error("a pending promise survived a restart")
		}
	}
	if left := Restart(Record{Promised: ballot(3, us)}, t0).Remaining(t0); left != 0 {
		t.Errorf("an empty register has %v left", left)
	}
}

// TestPropertiesOfRandomSchedules plays random messages against one register
// and keeps the books beside it.
func TestPropertiesOfRandomSchedules(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		now := t0
		reg := Register{}
		var promised Ballot          // the highest ever promised or accepted
		values := map[Ballot]Value{} // what was accepted under each ballot
		var renewed instant.Instant  // when it was last accepted or renewed
		regions := []Region{eu, us, {"eu", 2}}
		for range 400 {
			now = now.Add(time.Duration(rnd.Int64N(int64(d / 2))))
			who := regions[rnd.IntN(len(regions))]
			b := ballot(uint64(rnd.IntN(12)), who)
			before := reg
			switch rnd.IntN(4) {
			case 0, 1:
				dec := reg.Prepare(now, PrepareInput{Candidate: who, Ballot: b, Verdict: Verdict(rnd.IntN(4)), Dry: rnd.IntN(4) == 0})
				if dec.Action != Write {
					break
				}
				rec, ok := Update(reg.Record, dec.Change)
				if !ok || !promised.Less(b) {
					t.Fatalf("seed %d: promised %v after %v", seed, b, promised)
				}
				if !before.Accepted.IsZero() && before.Value.Owner != who && !before.Value.Released() && now.Sub(renewed) < d {
					t.Fatalf("seed %d: V2 let %v pass %v after a renewal", seed, who, now.Sub(renewed))
				}
				reg, promised = reg.Written(now, rec), b
			case 2:
				v, ok := values[b]
				if !ok {
					v = owned(who, fence.Epoch(rnd.IntN(5)))
				}
				dec := reg.Accept(b, v)
				switch dec.Action {
				case Write:
					if b.Less(promised) {
						t.Fatalf("seed %d: accepted %v below %v", seed, b, promised)
					}
					rec, ok := Update(reg.Record, dec.Change)
					if !ok {
						t.Fatalf("seed %d: update refused", seed)
					}
					reg, promised, renewed, values[b] = reg.Written(now, rec), b, now, v
				case Renew:
					if b != promised {
						t.Fatalf("seed %d: renewed %v below the promise %v", seed, b, promised)
					}
					if reg, ok = reg.Renewed(now, b, v); !ok {
						t.Fatalf("seed %d: renewal refused", seed)
					}
					renewed = now
				case WriteAlarm:
					t.Fatalf("seed %d: alarm without two values", seed)
				}
			case 3:
				reg = Restart(reg.Record, now)
				if !reg.Accepted.IsZero() {
					renewed = now
				}
			}
			if reg.Promised != promised || reg.Promised.Less(reg.Accepted) || reg.Promised.Less(before.Promised) {
				t.Fatalf("seed %d: promised went from %v to %v, books say %v", seed, before.Promised, reg.Promised, promised)
			}
			if !reg.Accepted.IsZero() {
				if want := max(0, d-now.Sub(renewed)); reg.Remaining(now) != want {
					t.Fatalf("seed %d: %v left, books say %v", seed, reg.Remaining(now), want)
				}
			}
		}
	}
}

// TestUpdateNeverPanics gives Update what a wire could carry.
func TestUpdateNeverPanics(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	pick := func() Ballot {
		return Ballot{uint64(rnd.IntN(3)), []string{"", "eu", "us"}[rnd.IntN(3)], Incarnation(rnd.IntN(2)), Era{}}
	}
	for range 20_000 {
		rec := Record{Promised: pick(), Accepted: pick(), Value: owned(eu, fence.Epoch(rnd.IntN(3))), Alarm: strings.Repeat("x", rnd.IntN(2)*rnd.IntN(2))}
		c := Change{Guard: rec.Guard(), Ballot: pick(), Accept: rnd.IntN(2) == 0, Value: owned(us, fence.Epoch(rnd.IntN(3)))}
		if rnd.IntN(3) == 0 {
			c.Guard = Guard{pick(), pick()}
		}
		out, ok := Update(rec, c)
		if !ok && out != rec {
			t.Fatalf("refused and changed: %+v to %+v", rec, out)
		}
		if ok && out.Promised.Less(rec.Promised) {
			t.Fatalf("promised fell: %+v to %+v", rec, out)
		}
	}
}
