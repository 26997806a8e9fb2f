package check

import (
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

func token(epoch, seq uint64) fence.Token { return fence.Token(epoch<<32 | seq) }

// quiet is a record of ten seconds in which eu holds p, and one worker a lock in
// it, with a cut that changed nothing.
func quiet() *Record {
	r := &Record{
		D: 2 * time.Second, RTT: 100 * time.Millisecond, TTL: 5 * time.Second, Partitions: []string{"p"},
		Began: at(1000), Ended: at(11000), SettledAt: at(9000),
		Faults: []Fault{{Step: 0, Title: "cut", Kind: plan.Cut, Of: []string{"eu", "us"}, From: at(2000), Full: at(2010), Until: at(8000), Effect: "felt"}},
	}
	eu, us := Watched{Name: "eu"}, Watched{Name: "us"}
	w := Actor{Name: "w", Lock: "lock/x", Partition: "p", Events: []Event{
		{Kind: Acquired, Sent: at(500), At: at(520), Token: token(1, 1), Until: at(1800), Region: "eu"},
	}}
	for t := int64(0); t <= 11000; t += 100 {
		r.Answers = append(r.Answers, Answer{Region: "eu", Asked: at(t), Answered: at(t + 5), Says: []Said{{Partition: "p", Epoch: 1, Left: 1900 * time.Millisecond}}})
		r.Answers = append(r.Answers, Answer{Region: "us", Asked: at(t), Answered: at(t + 5), Says: []Said{{Partition: "p", Epoch: 0, Left: 0}}})
		eu.Heard, us.Heard = append(eu.Heard, at(t)), append(us.Heard, at(t))
		if t > 600 {
			w.Events = append(w.Events, Event{Kind: Wrote, Sent: at(t), At: at(t + 10), Token: token(1, 1), Until: at(t + 1000)})
			r.Journal = append(r.Journal, Entry{N: uint64(len(r.Journal) + 1), Op: "write", Resource: "lock/x", Writer: "w", Token: token(1, 1), Accepted: true})
		}
	}
	r.Actors, r.Watched = []Actor{w}, []Watched{eu, us}
	return r
}

func expect(t *testing.T, texts ...string) []plan.Expectation {
	t.Helper()
	var out []plan.Expectation
	for _, text := range texts {
		e, err := plan.ParseExpectation(text)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, e)
	}
	return out
}

var all = []string{
	"no promotion", "no lapse", "no lease lost", "no write refused", "at least 20 writes", "max write < 50ms", "unavailable <= 500ms",
	"settled within 2s",
}

func TestAQuietDrillIsOK(t *testing.T) {
	v := Check(quiet(), expect(t, all...))
	if !v.OK() || v.Word() != "ok" {
		t.Errorf("%+v", v)
	}
}

// later adds a worker that holds the lock of the quiet one from then on.
func later(r *Record, from int64, tok fence.Token) {
	r.Actors = append(r.Actors, Actor{Name: "v", Lock: "lock/x", Partition: "p", Events: []Event{
		{Kind: Acquired, Sent: at(from - 10), At: at(from), Token: tok, Until: at(from + 500), Region: "eu"},
	}})
}

// One thing that is wrong is enough, and named by its rule.
func TestOneViolationIsEnoughToFail(t *testing.T) {
	for name, c := range map[string]struct {
		want   string
		change func(r *Record)
	}{
		"I1 two owners": {"I1: p: eu (epoch 1) and us (epoch 2) both hold it", func(r *Record) {
			r.Answers = append(r.Answers, Answer{Region: "us", Asked: at(5000), Answered: at(5005), Says: []Said{{Partition: "p", Epoch: 2, Left: time.Second}}})
		}},
		"I2 an epoch used twice": {"I2: p: us holds it with epoch 1", func(r *Record) {
			r.Answers = append(r.Answers, Answer{Region: "us", Asked: at(13500), Answered: at(13505), Says: []Said{{Partition: "p", Epoch: 1, Left: time.Second}}})
		}},
		"I3 a belief beyond the head lease": {"I3: w believes", func(r *Record) {
			for i := range r.Answers {
				if a := &r.Answers[i]; a.Region == "eu" && a.Asked > at(5000) && a.Asked < at(5200) {
					a.Says[0].Left = 500 * time.Millisecond
				}
			}
		}},
		"I3 a belief beyond any head lease": {"I3: w believes", func(r *Record) { r.Actors[0].Events[20].Until = r.Actors[0].Events[20].At.Add(r.D + 1) }},
		"I3 a belief after the lapse": {"I3: w believes", func(r *Record) {
			for i := range r.Answers {
				if a := &r.Answers[i]; a.Region == "eu" && a.Asked > at(5000) && a.Asked < at(5200) {
					a.Says[0].Left = 0
				}
			}
		}},
		"I4 two holders":                {"I4: lock/x: w (token 4294967297) and v (token 4294967298) both hold it", func(r *Record) { later(r, 5000, token(1, 2)) }},
		"I2 a token that does not rise": {"I2: lock/x: v holds it with token 4294967297 after w had it", func(r *Record) { later(r, 12500, token(1, 1)) }},
		"I5 a late write":               {"I5: entry 22: a write to lock/x by w", func(r *Record) { r.Journal[20].Token, r.Journal[20].Writer = token(2, 1), "v" }},
		"I2 one token for two":          {"I2: entry 21: w and v wrote to lock/x with one token", func(r *Record) { r.Journal[20].Writer = "v" }},
		"I6 of a history":               {"I6: eu: a grant was lost", func(r *Record) { r.Histories = []History{{Region: "eu", Violations: []string{"a grant was lost"}}} }},
		"a rule of a history":           {"F9: eu: not named", func(r *Record) { r.Histories = []History{{Region: "eu", Violations: []string{"F9: not named"}}} }},
		"I7 it does not settle":         {"I7: with all faults over the cluster did not settle: no owner", func(r *Record) { r.SettledAt, r.Unsettled = 0, "no owner" }},
	} {
		t.Run(name, func(t *testing.T) {
			r := quiet()
			c.change(r)
			v := Check(r, nil)
			if !v.Failed() || v.Word() != "FAILED" || !slices.ContainsFunc(v.Violations, func(x Violation) bool { return strings.HasPrefix(x.String(), c.want) }) {
				t.Errorf("want %q in %v", c.want, v.Violations)
			}
		})
	}
}

func TestBrokenExpectations(t *testing.T) {
	for text, change := range map[string]func(r *Record){
		"no promotion": func(r *Record) {
			r.Answers = append(r.Answers, Answer{Region: "us", Asked: at(13500), Answered: at(13505), Says: []Said{{Partition: "p", Epoch: 2, Left: time.Second}}})
		},
		"no lapse": func(r *Record) {
			r.Answers = append(r.Answers, Answer{Region: "eu", Asked: at(12950), Answered: at(12999), Says: []Said{{Partition: "p", Epoch: 1, Left: 0}}})
		},
		"no lease lost":    func(r *Record) { r.Actors[0].Events[50].Kind = Lost },
		"no write refused": func(r *Record) { r.Actors[0].Events[50].Kind = Refused },
		"max write < 50ms": func(r *Record) { r.Actors[0].Events[50].Sent = r.Actors[0].Events[50].At.Add(-time.Second) },
		"unavailable <= 500ms": func(r *Record) {
			r.Actors[0].Events = slices.Delete(r.Actors[0].Events, 40, 50)
		},
		"settled within 2s":             func(r *Record) { r.SettledAt = at(10001) },
		"promoted within D + 4RTT + 1s": func(*Record) {},
		"stale write refused":           func(r *Record) { r.Late = Late{Sent: true, Seen: true, Accepted: true} },
	} {
		r := quiet()
		change(r)
		if v := Check(r, expect(t, text)); v.Results[0].State != Broken || v.OK() {
			t.Errorf("%s: %+v", text, v.Results[0])
		}
	}
	// What broke when the machine stood still says nothing, unless it does not
	// rest on time.
	for text, want := range map[string]State{"no lease lost": Inconclusive, "no write refused": Broken} {
		r := quiet()
		r.Actors[0].Events[50].Kind = map[string]Kind{"no lease lost": Lost, "no write refused": Refused}[text]
		if want == Inconclusive {
			r.Stalls = []Stall{{at(5000), time.Second}}
		} else {
			r.Pressure = []Pressure{{"a processor", 0.97}}
		}
		v := Check(r, expect(t, text))
		if v.Results[0].State != want || v.OK() || v.Stalled != (want == Inconclusive) {
			t.Errorf("%s on a stalled machine: %+v, stalled %v", text, v.Results[0], v.Stalled)
		}
	}
}

func TestPromotedIsCountedFromTheFault(t *testing.T) {
	r := quiet()
	r.Answers = slices.DeleteFunc(r.Answers, func(a Answer) bool { return a.Region == "eu" && a.Asked > at(2000) })
	for ms := int64(5300); ms < 11000; ms += 100 {
		r.Answers = append(r.Answers, Answer{Region: "us", Asked: at(ms), Answered: at(ms + 5), Says: []Said{{Partition: "p", Epoch: 2, Left: time.Second}}})
	}
	// D + 4 RTT + 1 s = 3.4 s, and 3.305 s were taken.
	v := Check(r, expect(t, "promoted within D + 4RTT + 1s", "promoted within D + 4RTT + 900ms"))
	if v.Results[0].State != Held || v.Results[0].Value != 3305 || v.Results[1].State != Broken {
		t.Errorf("%+v", v.Results)
	}
}

// A machine on which something waits for a processor nearly all the time shows
// nothing that rests on time; one that is merely busy does.
func TestPressure(t *testing.T) {
	for share, want := range map[float64]State{0.5: Broken, 0.9: Inconclusive} {
		r := quiet()
		r.Actors[0].Events[50].Kind = Lost
		r.Pressure = []Pressure{{"a processor", share}, {"the disk", 0.1}}
		if v := Check(r, expect(t, "no lease lost")); v.Results[0].State != want {
			t.Errorf("%v: %+v", share, v.Results[0])
		}
	}
}

// Where something was not seen, did not break or was too little, nothing was
// shown.
func TestInconclusive(t *testing.T) {
	for want, change := range map[string]func(r *Record){
		"step 1 (cut) did not take effect: it was not felt": func(r *Record) { r.Faults[0].NoEffect = "it was not felt" },
		"us was not heard from 1.9 s to 9.1 s": func(r *Record) {
			r.Watched[1].Heard = slices.DeleteFunc(r.Watched[1].Heard, func(x instant.Instant) bool { return x > at(2900) && x < at(10100) })
		},
		"us was not heard from 0.0 s to 10.0 s":       func(r *Record) { r.Watched[1].Heard = nil },
		"the workload was too small":                  func(r *Record) { r.Actors[0].Events = r.Actors[0].Events[:10] },
		"no order of the history of lock/x was found": func(r *Record) { r.Histories = []History{{Region: "eu", Undecided: []string{"lock/x"}}} },
	} {
		r := quiet()
		change(r)
		v := Check(r, expect(t, "at least 20 writes"))
		if v.OK() || v.Failed() || v.Word() != "inconclusive" || !strings.Contains(strings.Join(v.Inconclusive, "\n"), want) || v.Stalled {
			t.Errorf("want %q: %+v", want, v)
		}
	}
}

// A silence that a fault explains is none; what outlasts the fault is one.
func TestSilenceOfAKilledProcess(t *testing.T) {
	r := quiet()
	r.Faults[0].Silences = []string{"us"}
	r.Faults[0].Until = at(4000)
	quietFrom := func(from, to int64) {
		r.Watched[1].Heard = slices.DeleteFunc(r.Watched[1].Heard, func(x instant.Instant) bool { return x > at(from) && x < at(to) })
	}
	quietFrom(2000, 9900)
	if v := Check(r, nil); len(v.Inconclusive) != 0 {
		t.Errorf("%q", v.Inconclusive)
	}
	r.Ended = at(13000)
	quietFrom(2000, 12900)
	if v := Check(r, nil); len(v.Inconclusive) == 0 {
		t.Error("a silence long after the fault is not seen")
	}
}

func TestQuantile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.SliceOfN(rapid.Int64Range(0, 1000), 1, 50).Draw(t, "n")
		q := rapid.Float64Range(0, 1).Draw(t, "q")
		var sorted []time.Duration
		for _, x := range n {
			sorted = append(sorted, time.Duration(x))
		}
		slices.Sort(sorted)
		got := Quantile(sorted, q)
		below := 0
		for _, x := range sorted {
			if x <= got {
				below++
			}
		}
		if float64(below) < q*float64(len(sorted))-1e-9 || !slices.Contains(sorted, got) {
			t.Fatalf("quantile %v of %v is %v", q, sorted, got)
		}
	})
}

func TestReignsJoinWhatIsContinuous(t *testing.T) {
	r := quiet()
	reigns := Reigns(r)
	if len(reigns) != 1 || reigns[0].From != at(5) || reigns[0].Until != at(11000+1900) {
		t.Errorf("%+v", reigns)
	}
	r.Answers = slices.DeleteFunc(r.Answers, func(a Answer) bool { return a.Asked > at(4000) && a.Asked < at(8000) })
	if reigns = Reigns(r); len(reigns) != 2 {
		t.Errorf("%+v", reigns)
	}
}

// A new leader holds nothing before its first round; what the one before has
// sent is good all the same.
func TestI3ANewLeadersWordEndsNothing(t *testing.T) {
	r := quiet()
	for i := range r.Answers {
		if a := &r.Answers[i]; a.Region == "eu" && a.Asked > at(5000) {
			a.Term = 2
			if a.Asked < at(5400) {
				a.Says[0].Left = 0
			}
		}
	}
	if v := Check(r, nil); len(v.Violations) != 0 {
		t.Errorf("%v", v.Violations)
	}
}

// A leader whose clock had a gap gives up its head lease; what it had sent is
// good to its end. Without a gap it has no reason to.
func TestI3ALeaderThatBeginsAnewEndsNothing(t *testing.T) {
	for restarts, want := range []int{1, 0} {
		r := quiet()
		for i := range r.Answers {
			if a := &r.Answers[i]; a.Region == "eu" && a.Asked >= at(5000) {
				a.Restarts = uint64(restarts)
				if a.Asked < at(5400) {
					a.Says[0].Left = 0
				}
			}
		}
		if v := Check(r, nil); len(v.Violations) != want {
			t.Errorf("%d restarts: %v", restarts, v.Violations)
		}
	}
}

// By a clock that has jumped all is over at once, and the leader notices a
// little later.
func TestI3AGapThatIsNoticedLate(t *testing.T) {
	for noticed, want := range map[int64]int{5300: 0, 8000: 1} {
		r := quiet()
		for i := range r.Answers {
			a := &r.Answers[i]
			if a.Region != "eu" || a.Asked < at(5000) {
				continue
			}
			if a.Asked >= at(noticed) {
				a.Restarts = 1
			}
			if a.Asked < at(5400) {
				a.Says[0].Left = 0
			}
		}
		if v := Check(r, nil); len(v.Violations) != want {
			t.Errorf("noticed at %d: %v", noticed, v.Violations)
		}
	}
}

// A leader that was deposed and does not know it counts down what it held, while
// another one renews and tells clients so. Without another one it is wrong.
func TestI3AnOldLeadersWordEndsNothing(t *testing.T) {
	for name, c := range map[string]struct {
		// next is the term after until, which was heard of at heard, too.
		next         uint64
		until, heard int64
		want         int
	}{
		"no other leader":                    {next: 1, until: 5300, want: 1},
		"another one":                        {next: 2, until: 5300},
		"another one, later than it is told": {next: 2, until: 5700, want: 1},
		"another one, heard of before":       {next: 2, heard: 4990, until: 5700},
		"another one, heard of long before":  {next: 2, heard: 4200, until: 5700, want: 1},
	} {
		r := quiet()
		for i := range r.Answers {
			a := &r.Answers[i]
			switch {
			case a.Region != "eu" || a.Asked < at(5000):
			case a.Asked < at(c.until):
				a.Term, a.Says[0].Left = 1, 100*time.Millisecond
			default:
				a.Term = c.next
			}
		}
		if c.heard > 0 {
			r.Answers = append(r.Answers, Answer{Region: "eu", Asked: at(c.heard), Answered: at(c.heard + 5), Term: c.next})
		}
		if v := Check(r, nil); len(v.Violations) != c.want {
			t.Errorf("%s: %v", name, v.Violations)
		}
	}
}
