package plan

import (
	"errors"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const good = `
name: x
summary: something
steps:
  - {at: 1s, do: cut, between: [owner of partition 1, the next owner of eu], for: 3D + 1s}
expect: [no promotion]
`

// with returns the good scenario with one line put in the place of another.
func with(old, now string) string {
	if !strings.Contains(good, old) {
		panic(old)
	}
	return strings.Replace(good, old, now, 1)
}

func TestErrorsNameLineAndField(t *testing.T) {
	step := "  - {at: 1s, do: cut, between: [owner of partition 1, the next owner of eu], for: 3D + 1s}"
	for want, text := range map[string]string{
		`line 2: name: "X y"; use 1 to 63`:                              with("name: x", "name: X y"),
		`line 2: summary: is missing`:                                   with("summary: something\n", ""),
		`line 3: summry: unknown key; use about, `:                      with("summary", "summry"),
		`line 3: name: given twice`:                                     with("summary: something", "name: y"),
		`line 5: steps[0].do: "cutt"; use await, `:                      with("do: cut,", "do: cutt,"),
		`line 5: steps[0].for: is missing`:                              with(", for: 3D + 1s", ""),
		`line 5: steps[0].for: "3X" is not a length`:                    with("3D + 1s", "3X"),
		`line 5: steps[0].at: is missing`:                               with("at: 1s, ", ""),
		`line 5: steps[0].target: means nothing to`:                     with("for: 3D + 1s", "for: 3D, target: 1 witness"),
		`steps[0].between: must have two ends`:                          with(", the next owner of eu", ""),
		`steps[0].between[1]: target "someone": `:                       with("the next owner of eu", "someone"),
		`steps[0].between[0]: target "owner of partition 0"`:            with("owner of partition 1", "owner of partition 0"),
		`line 6: steps[1].at: 500ms is before the step`:                 with(step, step+"\n  - {at: 500ms, do: mass-redeploy}"),
		`line 5: steps[0]: nobody is frozen`:                            with(step, "  - {at: 1s, do: thaw}"),
		`line 6: expect[0]: "always": is no expectation that a drill`:   with("no promotion", "always"),
		`line 2: expect[0]: "stale write refused" needs a freeze`:       with("no promotion", "stale write refused"),
		`line 2: control: needs a freeze`:                               good + "control: true\n",
		`line 7: workload.writes: "fast"; use writes per second`:        good + "workload: {writes: fast}\n",
		`line 7: workload: must be a mapping of hold, `:                 good + "workload: [1]\n",
		`line 7: cluster.d: "1ms"; use a time from 1s to 1m0s`:          good + "cluster: {d: 1ms}\n",
		`line 2: cluster.witnesses: 2; use an odd number`:               good + "cluster: {witnesses: 2}\n",
		`steps[0].planes[0]: "udp"; use api, votes, raft, gossip`:       with("for: 3D + 1s", "for: 3D, planes: [udp]"),
		`line 5: steps[0]: write either between, or from and to`:        with(step, "  - {at: 1s, do: loss, share: 20%, for: 1s, from: owner of eu}"),
		`line 5: steps[0].add: is missing, and jitter too`:              with(step, "  - {at: 1s, do: delay, for: 1s, between: [all sites, all sites]}"),
		`line 5: steps[0].until: "dawn"; use promotion or settled`:      with(step, "  - {at: 1s, do: await, until: dawn, within: 1s}"),
		`line 5: steps[0].partition: is missing; say of which`:          with(step, "  - {at: 1s, do: await, until: promotion, within: 1s}"),
		`line 5: steps[0].target: "1 witness"; a rolling restart is of`: with(step, "  - {at: 1s, do: rolling-restart, target: 1 witness}"),
		`line 5: steps[0].share: "120%"; use a share`:                   with(step, "  - {at: 1s, do: loss, share: 120%, for: 1s, between: [all sites, all sites]}"),
		`line 5: steps[0].for: 0s; must be a millisecond or longer`:     with("3D + 1s", "0s"),
		`line 5: steps[0].for: is missing; say after how long`:          with(step, "  - {at: 1s, do: clock-step, target: 1 witness, step: 1h}"),
		`line 5: steps[0].step: -1h0m0s; a lease clock never goes`:      with(step, "  - {at: 1s, do: clock-step, target: 1 witness, step: -1h, clock: lease}"),
		`line 5: steps[0].for: means nothing to a lease clock`:          with(step, "  - {at: 1s, do: clock-step, target: 1 witness, step: 1h, clock: lease, for: 1s}"),
		`line 5: steps[0].clock: "sundial"; use wall or lease`:          with(step, "  - {at: 1s, do: clock-step, target: 1 witness, step: 1h, clock: sundial}"),
		`line 5: steps[0].target: "1 witness"; a lease cache is of`:     with(step, "  - {at: 1s, do: redis-down, target: 1 witness, for: 1s}"),
		`line 5: steps[0].how: "gently"; use kill or pause`:             with(step, "  - {at: 1s, do: redis-down, how: gently, for: 1s}"),
		`line 5: steps[0].to: "owner of p"; leadership goes to`:         with(step, "  - {at: 1s, do: hand-over, to: owner of p}"),
		`line 5: steps[0].to: "followers of owner of p"; leadership`:    with(step, "  - {at: 1s, do: hand-over, to: followers of owner of p}"),
		`line 5: steps[0]: both ends are server eu-1; there is no`:      with(step, "  - {at: 1s, do: one-way, from: server eu-1, to: server eu-1, for: 1s}"),
		`line 5: steps[0]: both ends are leader of`:                     with(step, "  - {at: 1s, do: cut, between: [leader of region eu, leader of region eu], for: 1s}"),
		`line 5: steps[0].down: 1h0m0s is longer than for, 2s; no`:      with(step, "  - {at: 1s, do: flap, between: [region eu, region us], up: 1s, down: 1h, for: 2s}"),
		`line 5: steps[0].for: 1ns; must be a millisecond or longer`:    with(step, "  - {at: 1s, do: pause, target: server eu-1, for: 1ns}"),
		`line 5: steps[0].within: 0s; must be a millisecond or`:         with(step, "  - {at: 1s, do: await, until: settled, within: 0s}"),
		`not YAML: has more than one document`:                          good + "---\nname: y\n",
	} {
		_, err := Parse([]byte(text))
		var e *Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q in %v", want, err)
		}
	}
}

// All that is wrong is told at once, in the order of the lines.
func TestAllFaultsAtOnce(t *testing.T) {
	_, err := Parse([]byte("name: 5\nsummry: x\nsteps:\n  - {at: soon, do: cut}\n"))
	if err == nil || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("%v", err)
	}
	e := &Error{Source: "f.yaml", Faults: []Fault{{3, "a.b", "is bad"}}}
	if e.Error() != "f.yaml: line 3: a.b: is bad" {
		t.Error(e)
	}
}

func TestGoodScenario(t *testing.T) {
	s, err := Parse([]byte(good))
	if err != nil {
		t.Fatal(err)
	}
	st := s.Steps[0]
	if st.Do != Cut || !st.Both || st.From.Role != Owner || st.From.Partition.Number != 1 || st.To.Role != Next || st.To.Partition.Name != "eu" ||
		st.For.Of(2*time.Second, 0) != 7*time.Second || st.Line != 5 {
		t.Errorf("%+v", st)
	}
	if got := st.Title(); got != "cut owner of partition 1 and the next owner of eu for 3D + 1s" {
		t.Error(got)
	}
	if s.Cluster.D != DefaultD || s.Workload.Sessions == 0 {
		t.Errorf("no defaults: %+v", s)
	}
}

func TestHandOverTo(t *testing.T) {
	for _, to := range []string{"server eu-2", "a follower of the owner of partition 1"} {
		s, err := Parse([]byte(with("do: cut, between: [owner of partition 1, the next owner of eu], for: 3D + 1s", "do: hand-over, to: "+to)))
		if err != nil {
			t.Errorf("%s: %v", to, err)
			continue
		}
		if got := s.Steps[0].Title(); got != "hand-over to "+to {
			t.Error(got)
		}
	}
}

func TestTargets(t *testing.T) {
	for text, want := range map[string]Target{
		"region eu":                              {Who: TheRegion, Name: "eu"},
		"owner of p":                             {Who: TheRegion, Role: Owner, Partition: Part{Name: "p"}},
		"the leader of the owner of eu-equities": {Who: TheLeader, Role: Owner, Partition: Part{Name: "eu-equities"}},
		"a follower of region eu":                {Who: AFollower, Name: "eu"},
		"followers of next owner of p":           {Who: TheFollowers, Role: Next, Partition: Part{Name: "p"}},
		"bystander of partition 2":               {Who: TheRegion, Role: Bystander, Partition: Part{Number: 2}},
		"server eu-1":                            {Who: TheServer, Name: "eu-1"},
		"witness w1":                             {Who: TheWitness, Name: "w1"},
		"2 witnesses":                            {Who: SomeWitnesses, Count: 2},
		"all witnesses":                          {Who: AllWitnesses},
		"all regions":                            {Who: AllRegions},
		"all sites":                              {Who: AllSites},
	} {
		got, err := ParseTarget(text)
		want.Text = text
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "eu", "leader", "leader of", "leader of eu", "owner of", "0 witnesses", "9 witnesses", "many witnesses", "all of them"} {
		if got, err := ParseTarget(text); err == nil {
			t.Errorf("%q is taken: %+v", text, got)
		}
	}
}

func TestExpectations(t *testing.T) {
	for text, want := range map[string]Expectation{
		"no promotion":                     {Fact: Promotions},
		"at most 2 promotions of eu":       {Fact: Promotions, Most: 2, Partition: Part{Name: "eu"}},
		"no lapse":                         {Fact: Lapses},
		"no lease lost":                    {Fact: LeasesLost},
		"at most 3 leases lost":            {Fact: LeasesLost, Most: 3},
		"no write refused":                 {Fact: WritesRefused},
		"promoted within D+1s":             {Fact: Promoted, Bound: Span{D: 1, Fixed: time.Second}},
		"promoted within D + 4RTT of p":    {Fact: Promoted, Bound: Span{D: 1, RTT: 4}, Partition: Part{Name: "p"}},
		"settled within 30s":               {Fact: Settled, Bound: Span{Fixed: 30 * time.Second}},
		"p99 acquire < 50ms":               {Fact: Acquire, Quantile: 0.99, Bound: Span{Fixed: 50 * time.Millisecond}},
		"max write <= D":                   {Fact: Write, Quantile: 1, Bound: Span{D: 1}},
		"unavailable ≤ 2s":                 {Fact: Unavailable, Bound: Span{Fixed: 2 * time.Second}},
		"unavailable <= 2s of partition 1": {Fact: Unavailable, Bound: Span{Fixed: 2 * time.Second}, Partition: Part{Number: 1}},
		"stale write refused":              {Fact: StaleWrite},
		"at least 20 writes":               {Fact: Writes, Least: 20},
		"at least 1 grant":                 {Fact: Grants, Least: 1},
		"no look-up wrong":                 {Fact: LookupsWrong},
		"cached again within 5s":           {Fact: Cached, Bound: Span{Fixed: 5 * time.Second}},
		"look-up age <= 10s":               {Fact: LookupAge, Bound: Span{Fixed: 10 * time.Second}},
		"p99 look-up < 1s":                 {Fact: Lookup, Quantile: 0.99, Bound: Span{Fixed: time.Second}},
		"at least 20 look-ups":             {Fact: Lookups, Least: 20},
	} {
		got, err := ParseExpectation(text)
		want.Text = text
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "promotion", "no promotions at all", "p9 acquire < 1s", "p99 acquire < soon", "promoted within", "at least -1 writes"} {
		if got, err := ParseExpectation(text); err == nil {
			t.Errorf("%q is taken: %+v", text, got)
		}
	}
}

func TestSpans(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"1s": time.Second, "D": 2 * time.Second, "3D": 6 * time.Second, "D/4": 500 * time.Millisecond, "1.5D + 4 RTT+1s": 4400 * time.Millisecond,
	} {
		s, err := ParseSpan(text)
		if err != nil || s.Of(2*time.Second, 100*time.Millisecond) != want {
			t.Errorf("%s: %v, %v", text, s, err)
		}
	}
	for _, text := range []string{"", "x", "-1s", "D/0", "D/x", "xD", "1s+", "-1D", "9999999h", "NaND", "InfD"} {
		if s, err := ParseSpan(text); err == nil {
			t.Errorf("%q is taken: %v", text, s)
		}
	}
}

// What a span prints reads as that span.
func TestSpanText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Span{
			D: float64(rapid.IntRange(0, 40).Draw(t, "d")) / 4, RTT: float64(rapid.IntRange(0, 9).Draw(t, "rtt")),
			Fixed: time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "fixed")),
		}
		got, err := ParseSpan(s.String())
		if err != nil || got != s {
			t.Fatalf("%v: %v, %v", s, got, err)
		}
	})
}

// Whatever bytes come, a scenario is either good or refused with a reason.
func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte("steps: [{at: 1s, do: herd, clients: 10}]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := Parse(data)
		if err == nil && (len(s.Steps) == 0 || s.Name == "") {
			t.Fatalf("taken: %+v", s)
		}
		if err != nil && err.Error() == "" {
			t.Fatal("an error without words")
		}
	})
}
