package fencetest

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// block is how many calls are timed together.
const block = 50

// Ratio measures what one call costs beside another one, in one run: blocks of both take
// turns, and the median of the ratios of their times is reported, as "x". callers make calls
// at once.
func Ratio(b *testing.B, callers int, plain, other func() error) {
	b.Helper()
	run := func(f func() error) time.Duration {
		began := time.Now()
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				for range block {
					if err := f(); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
		return time.Since(began)
	}
	run(plain) // connections are made, scripts loaded
	run(other)
	var ratios []float64
	var times [2]time.Duration
	calls := 0
	for b.Loop() {
		p := run(plain)
		o := run(other)
		times[0], times[1] = times[0]+p, times[1]+o
		ratios = append(ratios, float64(o)/float64(p))
		calls += block * callers
		if b.Failed() {
			return
		}
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/2], "x")
	b.ReportMetric(float64(times[0].Nanoseconds())/float64(calls), "plain-ns/call")
	b.ReportMetric(float64(times[1].Nanoseconds())/float64(calls), "ns/call")
	b.ReportMetric(0, "ns/op") // of no use: an op is a pair of blocks
}
