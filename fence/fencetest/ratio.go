package fencetest

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// block is how many calls of one kind a caller makes before it is the other's turn.
const block = 20

// Ratio measures what one call costs beside another one, in one run: callers make blocks of both
// in turn, and the ratio of the two medians of a call's time is reported, as "x". A median
// leaves out the calls during which this machine did something else.
func Ratio(b *testing.B, callers int, plain, other func() error) {
	b.Helper()
	var times [2][]time.Duration
	run := func(kind int, f func() error) {
		took := make([][]time.Duration, callers)
		var all sync.WaitGroup
		for c := range callers {
			all.Go(func() {
				for range block {
					began := time.Now()
					if err := f(); err != nil {
						b.Error(err)
						return
					}
					took[c] = append(took[c], time.Since(began))
				}
			})
		}
		all.Wait()
		times[kind] = append(times[kind], slices.Concat(took...)...)
	}
	run(0, plain) // connections are made, scripts loaded
	run(1, other)
	times = [2][]time.Duration{}
	for b.Loop() {
		run(0, plain)
		run(1, other)
		if b.Failed() {
			return
		}
	}
	var median [2]float64
	for kind, all := range times {
		slices.Sort(all)
		median[kind] = float64(all[len(all)/2].Nanoseconds())
	}
	b.ReportMetric(median[1]/median[0], "x")
	b.ReportMetric(median[0], "plain-p50-ns")
	b.ReportMetric(median[1], "p50-ns")
	b.ReportMetric(0, "ns/op") // of no use: an op is a pair of blocks
}
