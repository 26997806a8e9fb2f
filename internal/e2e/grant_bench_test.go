package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
)

// BenchmarkGrant acquires and releases one lock after another, as one client
// of an idle region of three servers, and reports the time of the Acquire
// alone: mutual TLS, a commit on a majority's disks, and the validity computed
// when answering. Beside it, in the same run, a linearizable read, and the
// floor under both: one write and fsync on this disk.
func BenchmarkGrant(b *testing.B) {
	o := oneRegion()
	o.Timing = "lan"
	c := start(b, o)
	cl := c.client("", 10*time.Second)
	floor, err := os.Create(filepath.Join(b.TempDir(), "floor"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = floor.Close() })
	var grants, reads, syncs []time.Duration
	timed := func(to *[]time.Duration, do func() error) {
		began := time.Now()
		if err := do(); err != nil {
			b.Fatal(err)
		}
		*to = append(*to, time.Since(began))
	}
	i := 0
	for b.Loop() {
		resource := fmt.Sprintf("lock/bench-%d", i)
		var lease *client.Lease
		timed(&grants, func() (err error) { lease, err = cl.Acquire(b.Context(), resource); return err })
		if err := lease.Release(b.Context()); err != nil {
			b.Fatal(err)
		}
		timed(&reads, func() error { _, err := cl.Get(b.Context(), resource); return err })
		timed(&syncs, func() error {
			if _, err := floor.Write(make([]byte, 256)); err != nil {
				return err
			}
			return floor.Sync()
		})
		i++
	}
	report(b, "grant", grants)
	report(b, "get", reads)
	report(b, "fsync", syncs)
}

func report(b *testing.B, what string, d []time.Duration) {
	b.Helper()
	slices.Sort(d)
	b.ReportMetric(float64(d[len(d)/2].Microseconds()), what+"-p50-µs")
	b.ReportMetric(float64(d[len(d)*99/100].Microseconds()), what+"-p99-µs")
}
