package state

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"
)

// filled holds n leases in 100 per session, as clients make them: names of
// their own for every request, no string shared by the caller.
func filled(t testing.TB, n int) *harness {
	h := newOwner(t)
	for i := range n {
		s := fmt.Sprintf("session-%016x", i/100)
		if i%100 == 0 {
			h.ok(cmdOpen(s))
		}
		c := cmdAcquire(s, uint64(i%100)+1, fmt.Sprintf("lock/orders/customer-%08d", i))
		if g := h.ok(c).GetAcquire().GetGranted(); g == nil {
			t.Fatalf("lease %d: not granted", i)
		}
	}
	return h
}

// heapOf returns the bytes that stay allocated after build, and what keeps them.
func heapOf(build func() *harness) (uint64, *harness) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	h := build()
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&after)
	return after.HeapAlloc - before.HeapAlloc, h
}

// TestALeaseTakesUnderAKilobyte also after a restore, and beside a View, whose
// nodes the machine shares.
func TestALeaseTakesUnderAKilobyte(t *testing.T) {
	const n = 100_000
	bytes, h := heapOf(func() *harness { return filled(t, n) })
	if per := bytes / n; per == 0 || per > 700 {
		t.Errorf("%d bytes a lease", per)
	} else {
		t.Logf("%d bytes a lease", per)
	}
	data := write(t, h.m)
	bytes, restored := heapOf(func() *harness { return &harness{t: t, m: readBack(t, data)} })
	if per := bytes / n; per == 0 || per > 700 {
		t.Errorf("%d bytes a lease after a restore", per)
	} else {
		t.Logf("%d bytes a lease after a restore", per)
	}
	runtime.KeepAlive(restored)
	runtime.KeepAlive(h)
}

// BenchmarkMillionLeases builds a million leases, measures their heap, a View,
// a snapshot and its restore, and drops them, in pieces and (as level 1 does) at
// once: a single Apply is what everybody else waits.
func BenchmarkMillionLeases(b *testing.B) {
	const n = 1_000_000
	for b.Loop() {
		bytes, h := heapOf(func() *harness { return filled(b, n) })
		b.ReportMetric(float64(bytes)/n, "heap-B/lease")
		start := time.Now()
		data := write(b, h.m)
		b.ReportMetric(float64(len(data))/1e6/time.Since(start).Seconds(), "write-MB/s")
		start = time.Now()
		readBack(b, data)
		b.ReportMetric(float64(len(data))/1e6/time.Since(start).Seconds(), "read-MB/s")
		start = time.Now()
		h.m.view = nil
		h.m.View()
		b.ReportMetric(float64(time.Since(start).Nanoseconds()), "ns/View")
		at1 := readBack(b, data)
		at1.level = 1
		start = time.Now()
		at1.Apply(h.index+1, testTerm, cmdDrop("p", 1))
		b.ReportMetric(time.Since(start).Seconds()*1e3, "ms/drop-at-once")
		var pieces []time.Duration
		for c := cmdDrop("p", 1); len(pieces) == 0 || h.m.View().Sweeping(); c = cmdPulse() {
			start = time.Now()
			h.index++
			h.m.Apply(h.index, testTerm, c)
			pieces = append(pieces, time.Since(start))
		}
		if h.m.leased != 0 {
			b.Fatalf("%d leases left", h.m.leased)
		}
		slices.Sort(pieces)
		b.ReportMetric(pieces[len(pieces)/2].Seconds()*1e3, "median-ms/drop-piece")
		b.ReportMetric(pieces[len(pieces)*99/100].Seconds()*1e3, "p99-ms/drop-piece")
		b.ReportMetric(float64(len(pieces)), "pieces/drop")
	}
}
