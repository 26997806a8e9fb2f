package campaign

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

func failbackInput(change func(*FailbackInput)) FailbackInput {
	in := FailbackInput{
		Partition: "p", Self: "us", Prefer: []string{"eu", "us", "ap"},
		Value:     register.Value{Owner: region("us"), Epoch: 2},
		Reachable: func(string) bool { return true },
	}
	change(&in)
	return in
}

func TestFailbackWaitsForASteadyRegion(t *testing.T) {
	keep := func(*FailbackInput) {}
	for name, c := range map[string]struct {
		change func(*FailbackInput)
		events func(f *Failback)
		want   string
	}{
		"steady":                            {keep, func(*Failback) {}, "eu"},
		"transferred here":                  {func(in *FailbackInput) { in.Value.Reason = register.ReasonTransferred }, func(*Failback) {}, ""},
		"not owned":                         {func(in *FailbackInput) { in.Value.Owner = register.Region{} }, func(*Failback) {}, ""},
		"preferred here":                    {func(in *FailbackInput) { in.Prefer = []string{"us", "eu"} }, func(*Failback) {}, ""},
		"does not answer":                   {func(in *FailbackInput) { in.Reachable = func(string) bool { return false } }, func(*Failback) {}, ""},
		"second of three":                   {func(in *FailbackInput) { in.Prefer = []string{"sa", "eu", "us"} }, func(*Failback) {}, "eu"},
		"owner that is in no list any more": {func(in *FailbackInput) { in.Prefer = []string{"eu"} }, func(*Failback) {}, "eu"},
		"was slow meanwhile": {keep, func(f *Failback) {
			f.Suspicion(origin.Add(30*time.Second), "eu", register.VerdictSlow)
			f.Suspicion(origin.Add(31*time.Second), "eu", register.VerdictHealthy)
		}, ""},
		"the clock stood still": {keep, func(f *Failback) { f.Restart() }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := NewFailback(0)
			in := failbackInput(c.change)
			f.Suspicion(origin, "eu", register.VerdictHealthy)
			if to, ok := f.Due(origin, in); ok {
				t.Fatalf("at once to %q", to)
			}
			c.events(f)
			if to, ok := f.Due(origin.Add(DefaultSteady-1), in); ok {
				t.Fatalf("early to %q", to)
			}
			if to, ok := f.Due(origin.Add(DefaultSteady), in); to != c.want || ok != (c.want != "") {
				t.Fatalf("%q, %v; want %q", to, ok, c.want)
			}
		})
	}
}

func TestFailbackPausesAfterAnAttempt(t *testing.T) {
	f := NewFailback(time.Second)
	in := failbackInput(func(*FailbackInput) {})
	f.Suspicion(origin, "eu", register.VerdictHealthy)
	f.Due(origin, in)
	var at []time.Duration
	for d := time.Duration(0); d < 8*time.Hour; d += time.Second {
		if _, ok := f.Due(origin.Add(d), in); ok {
			at = append(at, d)
		}
	}
	if fmt.Sprint(at[:5]) != "[1s 2s 4s 8s 16s]" || at[len(at)-1]-at[len(at)-2] != maxFailbackPause {
		t.Errorf("attempts at %v", at)
	}
	in.Value.Epoch++ // it was away and came again
	if _, ok := f.Due(origin.Add(8*time.Hour), in); ok {
		t.Error("a new epoch is handed back at once")
	}
	if _, ok := f.Due(origin.Add(8*time.Hour+time.Second), in); !ok {
		t.Error("a new epoch has the pauses of the old one")
	}
}

// Whatever the detector says in whatever order, a region is handed to only if by
// the record of all that was said it was healthy without a break for the whole
// time before.
func TestFailbackAgainstTheRecord(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 3))
		const steady = 20 * time.Second
		f := NewFailback(steady)
		in := failbackInput(func(in *FailbackInput) { in.Prefer = []string{"eu", "ap", "us"} })
		type said struct {
			at      instant.Instant
			verdict register.Verdict
		}
		record := map[string][]said{}
		now, begun := origin, origin
		f.Due(now, in)
		for range 200 {
			now = now.Add(time.Duration(rng.Int64N(int64(4 * time.Second))))
			if rng.IntN(6) == 0 {
				r := []string{"eu", "ap"}[rng.IntN(2)]
				v := register.VerdictHealthy
				if rng.IntN(3) == 0 {
					v = register.Verdict(rng.IntN(4))
				}
				f.Suspicion(now, r, v)
				record[r] = append(record[r], said{now, v})
			}
			steadyNow := func(r string) bool {
				var since instant.Instant
				for _, s := range record[r] {
					if s.verdict != register.VerdictHealthy {
						since = 0
					} else if since == 0 {
						since = s.at
					}
				}
				return since != 0 && now.Sub(since) >= steady
			}
			to, ok := f.Due(now, in)
			if !ok {
				continue
			}
			if now.Sub(begun) < steady || !steadyNow(to) || to == "ap" && steadyNow("eu") {
				t.Fatalf("seed %d: to %s at %v, record %v", seed, to, now.Sub(origin), record)
			}
		}
	}
}
