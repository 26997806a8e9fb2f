// Package bench measures a running cluster.
package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

// connect returns a client of the development cluster in the directory that
// HEADLEASE_BENCH_DEV names: one started with
// 'headlease dev --regions 1 --witnesses 1 --rtt off'.
func connect(b *testing.B) *client.Client {
	b.Helper()
	dir := os.Getenv("HEADLEASE_BENCH_DEV")
	if dir == "" {
		b.Skip("HEADLEASE_BENCH_DEV names no development cluster's directory")
	}
	f, _, err := load.File(filepath.Join(dir, "cluster.yaml"))
	if err != nil {
		b.Fatal(err)
	}
	id := pki.Identity{Cluster: f.Cluster, Role: pki.RoleAdmin}
	creds, err := pki.Load(pki.LoadConfig{Dir: filepath.Join(dir, "certs"), Want: id})
	if err != nil {
		b.Fatal(err)
	}
	l, err := link.New(link.Config{Identity: id, Credentials: creds})
	if err != nil {
		b.Fatal(err)
	}
	cfg := client.Config{Cluster: f.Cluster, Links: l}
	for _, r := range f.Regions {
		region := client.Region{Name: r.Name}
		for _, s := range r.Servers {
			region.Servers = append(region.Servers, client.Server{Name: s.Name, API: s.API})
		}
		cfg.Regions = append(cfg.Regions, region)
	}
	c, err := client.New(cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil {
			b.Error(err)
		}
		_ = l.Close()
	})
	return c
}

// BenchmarkGrant acquires and releases one lock after another and reports the
// time of the Acquire alone: a session, mutual TLS, a commit on a majority's
// disks, and a leadership check. Beside it, in the same run, is the floor under
// it: one write and fsync on this disk.
func BenchmarkGrant(b *testing.B) {
	c := connect(b)
	ctx := b.Context()
	acquire := func(i int) time.Duration {
		began := time.Now()
		l, err := c.Acquire(ctx, fmt.Sprintf("lock/bench-%d", i))
		took := time.Since(began)
		if err != nil {
			b.Fatal(err)
		}
		if err := l.Release(ctx); err != nil {
			b.Fatal(err)
		}
		return took
	}
	acquire(0) // opens the session
	file, err := os.Create(filepath.Join(b.TempDir(), "floor"))
	if err != nil {
		b.Fatal(err)
	}
	defer file.Close()
	var grants, reads, syncs []time.Duration
	for i := 0; b.Loop(); i++ {
		grants = append(grants, acquire(i))
		began := time.Now()
		if _, err := c.Get(ctx, "lock/bench-0"); err != nil {
			b.Fatal(err)
		}
		reads = append(reads, time.Since(began))
		began = time.Now()
		if _, err := file.Write(make([]byte, 256)); err != nil {
			b.Fatal(err)
		}
		if err := file.Sync(); err != nil {
			b.Fatal(err)
		}
		syncs = append(syncs, time.Since(began))
	}
	report(b, "grant", grants)
	report(b, "get", reads)
	report(b, "fsync", syncs)
}

func report(b *testing.B, what string, d []time.Duration) {
	slices.Sort(d)
	b.ReportMetric(float64(d[len(d)/2].Microseconds()), what+"-p50-µs")
	b.ReportMetric(float64(d[len(d)*99/100].Microseconds()), what+"-p99-µs")
}
