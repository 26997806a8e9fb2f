package simulation

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"
)

var (
	flagSeed    = flag.Uint64("seed", 1, "the first world")
	flagHours   = flag.Float64("hours", 6, "how many hours are simulated, in worlds of one hour")
	flagRegions = flag.Int("regions", 0, "regions of every world; 0: drawn")
	flagAnswers = flag.Bool("answers", false, "note each answer to a Prepare")
)

// worldLength is how long a world lives, unless it is told less.
const worldLength = time.Hour

// cpu is the processor time that this process has used.
func cpu() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func TestMain(m *testing.M) {
	// One thread works, and leaves little garbage: collect it late.
	debug.SetGCPercent(800)
	m.Run()
}

// draw makes a world's shape of its seed.
func draw(seed uint64) shape {
	rnd := rand.New(rand.NewPCG(seed, 11))
	s := shape{
		regions: 2 + rnd.IntN(4), witnesses: []int{1, 3, 5, 1 + rnd.IntN(5)}[rnd.IntN(4)],
		partitions: []int{1, 2, 4, 8, 1 + rnd.IntN(64)}[rnd.IntN(5)],
		d:          []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 4 * time.Second, 10 * time.Second}[rnd.IntN(5)],
		spread:     rnd.IntN(2) == 0, reconfigure: rnd.IntN(2) == 0,
	}
	if rnd.IntN(3) == 0 {
		s.believers = 2 + rnd.IntN(3)
	}
	s.reach = []time.Duration{2 * time.Millisecond, 20 * time.Millisecond, 100 * time.Millisecond}[rnd.IntN(3)]
	s.dup, s.late = rnd.IntN(4), rnd.IntN(20)
	if *flagRegions > 0 {
		s.regions = *flagRegions
	}
	return s
}

// simulate runs a world, and fails with what is needed to see it again.
func simulate(t *testing.T, s shape, seed uint64, length time.Duration) *world {
	t.Helper()
	w := newWorld(s, seed)
	w.run(length)
	if w.bad != "" {
		t.Fatalf("VIOLATION, SEED=%d (%v), after %v: %s\n%s", seed, s, w.now, w.bad, w.tail())
	}
	return w
}

// TestWorlds runs the worlds of the seeds from -seed on.
func TestWorlds(t *testing.T) {
	began, events := cpu(), 0
	var total counts
	left := time.Duration(*flagHours * float64(time.Hour))
	for seed := *flagSeed; left > 0; seed++ {
		length := min(left, worldLength)
		left -= length
		s := draw(seed)
		w := simulate(t, s, seed, length)
		if *flagHours <= 1 || testing.Verbose() && *flagHours < 50 {
			t.Logf("seed %d (%v): %v, hash %016x", seed, s, w.count, w.hash)
		}
		events += w.events
		total.add(w.count)
	}
	took := max(cpu()-began, time.Millisecond)
	t.Logf("%.1f hours: %v\n%d events, %.0f a second of processor time, %.0f hours a minute of it",
		*flagHours, total, events, float64(events)/took.Seconds(), *flagHours/took.Minutes())
	if *flagHours >= 6 && (total.promotions == 0 || total.resumes == 0 || total.drops == 0 || total.configurations == 0 || total.i7 == 0 || total.believed == 0 || total.releases == 0 || total.drains == 0 || total.aborts == 0 || total.wipes == 0) {
		t.Errorf("the worlds see too little: %v", total)
	}
}

func (c counts) String() string {
	return fmt.Sprintf("%d messages (%d lost), %d faults, %d terms, %d promotions, %d resumptions, %d lapses, %d drops, %d drains (%d aborted), %d releases, %d wiped regions, %d configurations (%d times settled), I7 looked at %d times, %d grants, %d leases lost, %d looks at beliefs",
		c.messages, c.lost, c.faults, c.elections, c.promotions, c.resumes, c.lapses, c.drops, c.drains, c.aborts, c.releases, c.wipes, c.configurations, c.settled, c.i7, c.grants, c.leasesLost, c.believed)
}

// usual is the cluster by which the simulation's speed is told.
var usual = shape{regions: 3, witnesses: 3, partitions: 4, d: 4 * time.Second, spread: true, reach: 40 * time.Millisecond, dup: 2, late: 10}

// TestReplaysBitForBit: a seed is all that a world depends on.
func TestReplaysBitForBit(t *testing.T) {
	for seed := uint64(1); seed <= 3; seed++ {
		s := draw(seed)
		s.believers, s.reconfigure = int(seed%2)*3, seed > 1
		a, b := newWorld(s, seed), newWorld(s, seed)
		a.run(4 * time.Minute)
		runtime.GC()
		b.run(4 * time.Minute)
		if a.hash != b.hash || a.events != b.events || a.tail() != b.tail() {
			t.Errorf("seed %d ran twice: %d events and hash %x, then %d and %x", seed, a.events, a.hash, b.events, b.hash)
		}
		if c := newWorld(s, seed+100); true {
			c.run(4 * time.Minute)
			if c.hash == a.hash {
				t.Errorf("seeds %d and %d are one world", seed, seed+100)
			}
		}
	}
}

// BenchmarkUsual is one simulated hour of the usual cluster, faults and all.
func BenchmarkUsual(b *testing.B) {
	events, began := 0, cpu()
	for i := range b.N {
		w := newWorld(usual, uint64(i+1))
		w.run(time.Hour)
		if w.bad != "" {
			b.Fatalf("SEED=%d: %s\n%s", i+1, w.bad, w.tail())
		}
		events += w.events
	}
	took := cpu() - began
	b.ReportMetric(float64(events)/took.Seconds(), "events/cpu-s")
	b.ReportMetric(float64(b.N)/took.Minutes(), "hours/cpu-min")
}

// TestTheTailShowsTheEnd: a failure shows what came last, in order.
func TestTheTailShowsTheEnd(t *testing.T) {
	w := &world{}
	for i := range maxNotes + 5 {
		w.now = time.Duration(i) * time.Second
		w.note("n%d", i)
	}
	lines := strings.Split(strings.TrimSpace(w.tail()), "\n")
	if len(lines) != maxNotes || !strings.HasSuffix(lines[0], "n5") || !strings.HasSuffix(lines[maxNotes-1], fmt.Sprintf("n%d", maxNotes+4)) {
		t.Errorf("%d lines, from %q to %q", len(lines), lines[0], lines[len(lines)-1])
	}
}
