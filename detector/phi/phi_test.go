package phi

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

const ms = time.Millisecond

var start = instant.Instant(0).Add(time.Hour)

func newDetector(t testing.TB, d time.Duration) *Detector {
	t.Helper()
	det, err := New(Params{D: d}, start)
	if err != nil {
		t.Fatal(err)
	}
	return det
}

// beat lets n regular heartbeats of term 1 arrive, continuing after seq, and
// returns the time and the number of the last.
func beat(d *Detector, now instant.Instant, seq uint64, n int) (instant.Instant, uint64) {
	for range n {
		now, seq = now.Add(Interval), seq+1
		d.Heard(now, 1, seq)
	}
	return now, seq
}

// crashedAfter returns the silence at which the verdict turns, to 1 ms.
func crashedAfter(t testing.TB, d *Detector, last instant.Instant) time.Duration {
	t.Helper()
	for s := time.Duration(0); s < 2*time.Minute; s += ms {
		if d.Judge(last.Add(s)).Verdict == register.VerdictCrashed {
			return s
		}
	}
	t.Fatal("never crashed")
	return 0
}

func TestF43VerdictTimes(t *testing.T) {
	for _, c := range []struct{ d, want time.Duration }{
		{4 * time.Second, 4372 * ms},
		{2 * time.Second, 2311 * ms},
		{time.Second, 1281 * ms},
	} {
		d := newDetector(t, c.d)
		last, _ := beat(d, start, 0, 400)
		if got := crashedAfter(t, d, last); (got - c.want).Abs() > 5*ms {
			t.Errorf("D %v: crashed after %v, want %v", c.d, got, c.want)
		}
	}
}

func TestF43CapHoldsWhateverTheWindow(t *testing.T) {
	d := newDetector(t, 4*time.Second)
	now, seq := start, uint64(0)
	for i := range 300 { // wildly irregular, always alive
		now, seq = now.Add([]time.Duration{100 * ms, 2900 * ms}[i%2]), seq+1
		d.Heard(now, 1, seq)
	}
	if got := crashedAfter(t, d, now); got != 4500*ms {
		t.Errorf("crashed after %v, want the cap of 4.5 s", got)
	}
}

func TestF43LossIsNotSlowness(t *testing.T) {
	d, whole := newDetector(t, 4*time.Second), newDetector(t, 4*time.Second)
	now := start
	for seq := uint64(1); seq <= 600; seq++ {
		now = now.Add(Interval)
		whole.Heard(now, 1, seq)
		if seq%3 == 0 { // two of three are lost
			d.Heard(now, 1, seq)
		}
	}
	if got, want := crashedAfter(t, d, now), crashedAfter(t, whole, now); (got - want).Abs() > 5*ms {
		t.Errorf("with loss crashed after %v, without after %v", got, want)
	}
}

func TestF43BurstsAreHeardNotSampled(t *testing.T) {
	d := newDetector(t, 4*time.Second)
	now, seq := beat(d, start, 0, 50)
	mean, _ := d.distribution()
	for range 500 { // a burst of 500 within 5 ms
		now, seq = now.Add(10*time.Microsecond), seq+1
		if !d.Heard(now, 1, seq) {
			t.Fatal("a heartbeat of the burst was not heard")
		}
	}
	if after, _ := d.distribution(); after != mean {
		t.Errorf("the burst moved the mean from %v to %v", mean, after)
	}
	if s := d.Judge(now); s.Silent != 0 || s.Verdict != register.VerdictHealthy {
		t.Errorf("after the burst: %+v", s)
	}
}

func TestF43OwnPauseResets(t *testing.T) {
	d := newDetector(t, 4*time.Second)
	now, seq := beat(d, start, 0, 300)
	woke := now.Add(time.Minute)
	d.Resume(woke)
	if s := d.Judge(woke); s.Verdict != register.VerdictUnknown || s.Silent != time.Minute {
		t.Errorf("right after the own pause: %+v", s)
	}
	if s := d.Judge(woke.Add(3 * time.Second)); s.Verdict != register.VerdictCrashed {
		t.Errorf("still not heard after the acceptable pause: %+v", s)
	}
	d.Heard(woke.Add(50*ms), 1, seq+1)
	if s := d.Judge(woke.Add(50 * ms)); !s.Verdict.Alive() {
		t.Errorf("heard again: %+v", s)
	}
	if d.n != 0 {
		t.Errorf("the gap over the own pause was sampled")
	}
	if got := crashedAfter(t, d, woke.Add(50*ms)); (got - 4372*ms).Abs() > 5*ms {
		t.Errorf("crashed after %v with an empty window", got)
	}
}

func TestF43NeverHeard(t *testing.T) {
	d := newDetector(t, 4*time.Second)
	for _, c := range []struct {
		after time.Duration
		want  register.Verdict
	}{
		{0, register.VerdictUnknown}, {2999 * ms, register.VerdictUnknown}, {3 * time.Second, register.VerdictCrashed}, {time.Hour, register.VerdictCrashed},
	} {
		s := d.Judge(start.Add(c.after))
		if s.Verdict != c.want || s.Silent >= 0 {
			t.Errorf("after %v: %+v, want %v", c.after, s, c.want)
		}
	}
}

func TestOldHeartbeatsAreNoNews(t *testing.T) {
	d := newDetector(t, 4*time.Second)
	d.Heard(start, 5, 10)
	now := start.Add(time.Second)
	for _, c := range []struct {
		name      string
		term, seq uint64
		want      bool
	}{
		{"duplicate", 5, 10, false}, {"overtaken", 5, 9, false}, {"deposed leader", 4, 99, false},
		{"next", 5, 11, true}, {"new leader", 6, 1, true}, {"the leader before", 5, 12, false},
	} {
		if got := d.Heard(now, c.term, c.seq); got != c.want {
			t.Errorf("%s: heard %v, want %v", c.name, got, c.want)
		}
	}
	late := now.Add(d.p.Cap())
	if !d.Heard(late, 1, 1) {
		t.Error("a region begun anew in term 1 is never heard again")
	}
	if s := d.Judge(late); !s.Verdict.Alive() {
		t.Errorf("begun anew: %+v", s)
	}
}

func TestOutageDoesNotPoisonTheWindow(t *testing.T) {
	d := newDetector(t, 4*time.Second)
	now, seq := beat(d, start, 0, 50)
	want := crashedAfter(t, d, now)
	now = now.Add(40 * time.Second) // no quorum: no heartbeat, so seq stands still
	d.Heard(now, 1, seq+1)
	if got := crashedAfter(t, d, now); got != want {
		t.Errorf("after an outage crashed after %v, before after %v", got, want)
	}
	d.Heard(now.Add(2*time.Second), 2, 1) // an election of 2 s
	if got := crashedAfter(t, d, now.Add(2*time.Second)); got != want {
		t.Errorf("after an election crashed after %v, before after %v", got, want)
	}
}

func TestSlowHasHysteresis(t *testing.T) {
	d := newDetector(t, 4*time.Second)
	now, seq := beat(d, start, 0, 20)
	if s := d.Judge(now.Add(900 * ms)); s.Verdict != register.VerdictHealthy {
		t.Errorf("900 ms late: %v", s.Verdict)
	}
	if s := d.Judge(now.Add(1100 * ms)); s.Verdict != register.VerdictSlow {
		t.Errorf("1.1 s late: %v", s.Verdict)
	}
	now = now.Add(1100 * ms)
	d.Heard(now, 1, seq+1)
	now, seq = beat(d, now, seq+1, recovery-1)
	if s := d.Judge(now); s.Verdict != register.VerdictSlow {
		t.Errorf("healthy again after %d heartbeats: %v", recovery-1, s.Verdict)
	}
	now, seq = beat(d, now, seq, 1)
	if s := d.Judge(now); s.Verdict != register.VerdictHealthy {
		t.Errorf("after %d heartbeats on time: %v", recovery, s.Verdict)
	}
	now = now.Add(10 * time.Second)
	d.Heard(now, 1, seq+40)
	if s := d.Judge(now); s.Verdict != register.VerdictSlow {
		t.Errorf("back from crashed: %v, want slow first", s.Verdict)
	}
}

func TestSetD(t *testing.T) {
	d := newDetector(t, 4*time.Second)
	now, _ := beat(d, start, 0, 100)
	if err := d.SetD(2 * time.Second); err != nil {
		t.Fatal(err)
	}
	if got := crashedAfter(t, d, now); (got - 2311*ms).Abs() > 5*ms {
		t.Errorf("with D 2 s crashed after %v", got)
	}
	if d.SetD(0) == nil || d.SetD(time.Hour) == nil {
		t.Error("absurd D taken")
	}
	if _, err := New(Params{}, start); err == nil {
		t.Error("D 0 taken")
	}
	if _, err := New(Params{D: time.Second, Interval: time.Second}, start); err == nil {
		t.Error("an interval of D taken")
	}
}

// TestWindowAgainstBruteForce compares the running sums with sums over the
// last 200 gaps, and phi with the integral of the normal density.
func TestWindowAgainstBruteForce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d, err := New(Params{D: 4 * time.Second}, start)
		if err != nil {
			t.Fatal(err)
		}
		d.Heard(start, 1, 1)
		now, seq := start, uint64(1)
		var gaps []float64
		for _, us := range rapid.SliceOfN(rapid.IntRange(62_500, 2_000_000), 1, 500).Draw(t, "gaps") {
			now, seq = now.Add(time.Duration(us)*time.Microsecond), seq+1
			d.Heard(now, 1, seq)
			gaps = append(gaps, float64(us)/1e6)
		}
		gaps = gaps[max(0, len(gaps)-Window):]
		var mean, sigma float64
		for _, g := range gaps {
			mean += g / float64(len(gaps))
		}
		for _, g := range gaps {
			sigma += (g - mean) * (g - mean) / float64(len(gaps))
		}
		sigma = max(math.Sqrt(sigma), 0.2)
		gotMean, gotSigma := d.distribution()
		if math.Abs(gotMean-mean) > 1e-6 || math.Abs(gotSigma-sigma) > 1e-4 {
			t.Fatalf("window has mean %v σ %v, want %v %v", gotMean, gotSigma, mean, sigma)
		}
		silence := time.Duration(rapid.IntRange(0, 4_400).Draw(t, "silence ms")) * ms
		want := -math.Log10(integrate(silence.Seconds()-3, mean, sigma))
		if got := d.Judge(now.Add(silence)).Phi; math.Abs(got-want) > 0.01*max(1, want) {
			t.Fatalf("phi %v after %v, want %v", got, silence, want)
		}
	})
}

// integrate is the tail of the normal distribution by Simpson's rule.
func integrate(x, mean, sigma float64) float64 {
	const steps = 2000
	lo, hi := x, max(x, mean)+12*sigma
	h := (hi - lo) / steps
	f := func(v float64) float64 {
		z := (v - mean) / sigma
		return math.Exp(-z*z/2) / (sigma * math.Sqrt(2*math.Pi))
	}
	sum := f(lo) + f(hi)
	for i := 1; i < steps; i++ {
		w := 4.0
		if i%2 == 0 {
			w = 2
		}
		sum += w * f(lo+float64(i)*h)
	}
	return sum * h / 3
}

// TestPhiNeverFallsInSilence: within one silence phi only rises, it is finite,
// and the verdict goes one way.
func TestPhiNeverFallsInSilence(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d, err := New(Params{D: time.Duration(rapid.IntRange(1000, 60_000).Draw(t, "D ms")) * ms}, start)
		if err != nil {
			t.Fatal(err)
		}
		now, seq := start, uint64(0)
		for _, g := range rapid.SliceOfN(rapid.IntRange(1, 800), 1, 50).Draw(t, "gaps") {
			now, seq = now.Add(time.Duration(g)*ms), seq+1
			d.Heard(now, 1, seq)
		}
		prev := d.Judge(now)
		for s := time.Duration(0); s < 70*time.Second; s += 333 * ms {
			j := d.Judge(now.Add(s))
			if j.Phi < prev.Phi || math.IsInf(j.Phi, 0) || math.IsNaN(j.Phi) || j.Verdict < prev.Verdict {
				t.Fatalf("after %v: %+v, before: %+v", s, j, prev)
			}
			prev = j
		}
		if prev.Verdict != register.VerdictCrashed {
			t.Fatalf("70 s of silence: %+v", prev)
		}
	})
}
