package main

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// looks lets a tuner look n times at what allocates so many bytes a second over
// a heap.
func (t *tuner) looks(n int, h heap, perSecond uint64) (percent int) {
	for range n {
		h.allocated = t.allocated + perSecond
		percent = t.look(h)
	}
	return percent
}

func TestACalmServerKeepsItsHeapSmall(t *testing.T) {
	var tn tuner
	look := func(perSecond uint64) int { return tn.looks(1, heap{live: 40 << 20}, perSecond) }
	for i := range calmAfter {
		if want, got := busyPercent, look(1<<20); i < calmAfter-1 && got != want {
			t.Fatalf("look %d: %d %%, want %d", i, got, want)
		} else if i == calmAfter-1 && got != calmPercent {
			t.Fatalf("look %d: %d %%, want %d", i, got, calmPercent)
		}
	}
	if got := look(10 << 20); got != calmPercent { // a collection every 2 s
		t.Errorf("at the limit: %d %%, want %d", got, calmPercent)
	}
	if got := look(11 << 20); got != busyPercent {
		t.Errorf("beyond the limit: %d %%, want %d at once", got, busyPercent)
	}
	if got := look(0); got != busyPercent {
		t.Errorf("just after: %d %%, want %d", got, busyPercent)
	}
}

func TestABusyServersHeapMayGrow(t *testing.T) {
	const mib = 1 << 20
	for _, test := range []struct {
		name        string
		live, roots uint64
		rate        uint64
		growth      uint64 // wanted, to within a percent of what lives
	}{
		{"a small heap", 5 * mib, 0, 100 * mib, busyGrowth},
		{"stacks count", 5 * mib, 3 * mib, 100 * mib, busyGrowth},
		{"less than the most in a second", 5 * mib, 0, 20 * mib, 20 * mib},
		{"a heap that doubles by itself", 70 * mib, 0, 100 * mib, 70 * mib},
		{"next to nothing lives", mib / 2, 0, 100 * mib, busyGrowth / (minLive / mib) / 2},
		{"little is allocated", 5 * mib, 0, 4 * mib, 5 * mib},
	} {
		var tn tuner
		h := heap{live: test.live, roots: test.roots}
		got := uint64(tn.looks(2, h, test.rate)) * (test.live + test.roots) / 100
		if slack := (test.live + test.roots) / 100; got > test.growth || got+slack < test.growth {
			t.Errorf("%s: it grows by %d, want %d", test.name, got, test.growth)
		}
		// A heap that has grown meanwhile: at the next collection, before the load is
		// looked at again.
		h.live *= 20
		if got := uint64(tn.percent(h)) * (h.live + h.roots) / 100; got > max(busyGrowth, h.live+h.roots) {
			t.Errorf("%s, grown: it grows by %d", test.name, got)
		}
	}
}

func TestSettingIsSpared(t *testing.T) {
	for _, test := range []struct {
		set, p int
		want   bool
	}{
		{100, 100, false}, {100, 50, true}, {50, 100, true}, {100, 110, false}, {100, 126, true}, {1280, 100, true},
		{1280, 1200, false}, {1280, 1000, true}, {110, 100, true}, {50, 1280, true},
	} {
		if got := worthSetting(test.set, test.p); got != test.want {
			t.Errorf("%d after %d: %v", test.p, test.set, got)
		}
	}
}

func TestEveryCollectionIsSeenUntilTheStop(t *testing.T) {
	stopped := make(chan struct{})
	var seen atomic.Int32
	sentinel(stopped, func() { seen.Add(1) })
	until := func(n int32) {
		for seen.Load() < n { // the test's own limit ends it
			runtime.GC()
			<-time.After(time.Millisecond)
		}
	}
	until(3)
	close(stopped)
	runtime.GC()
	<-time.After(10 * time.Millisecond) // a cleanup that was under way
	n := seen.Load()
	for range 5 {
		runtime.GC()
		<-time.After(time.Millisecond)
	}
	if seen.Load() > n {
		t.Errorf("%d collections were seen after the stop", seen.Load()-n)
	}
}
