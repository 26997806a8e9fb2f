package group_test

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/internal/regiontest"
)

// Of each shard that a stopped member gives up: the time from the end of the
// work on it to the beginning of the next holder's. In real time, with the
// region's shipped code but for Raft's log.
func BenchmarkPlannedHandOver(b *testing.B) {
	n := regiontest.NewNetwork(b)
	n.Region(regiontest.Config{Name: "eu"}).Own(1)
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	var mu sync.Mutex
	ended, worst, sum, moved := map[uint32]time.Time{}, time.Duration(0), time.Duration(0), 0
	working := map[string]int{}
	start := func(name string) (stop func()) {
		c, err := client.New(client.Config{Cluster: "test", Regions: n.Regions(), Links: n.Links(name), Logger: quiet})
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() {
			done <- group.Run(ctx, group.Config{
				Client: c, Name: "orders", Member: name, Shards: group.Shards(256), Logger: quiet,
				Work: func(ctx context.Context, s *group.Shard) error {
					mu.Lock()
					if at, ok := ended[s.Number]; ok {
						d := time.Since(at)
						worst, sum, moved = max(worst, d), sum+d, moved+1
						delete(ended, s.Number)
					}
					working[name]++
					mu.Unlock()
					select {
					case <-s.Drain():
					case <-ctx.Done():
					}
					mu.Lock()
					ended[s.Number] = time.Now()
					working[name]--
					mu.Unlock()
					return nil
				},
			})
		}()
		return func() {
			cancel()
			if err := <-done; err != nil {
				b.Error(err)
			}
			end, finish := context.WithTimeout(context.Background(), time.Second)
			defer finish()
			_ = c.Close(end)
		}
	}
	even := func(most int) {
		for end := time.Now().Add(time.Minute); ; {
			mu.Lock()
			total, highest := 0, 0
			for _, n := range working {
				total, highest = total+n, max(highest, n)
			}
			mu.Unlock()
			if total == 256 && highest <= most {
				return
			}
			if time.Now().After(end) {
				b.Fatal("the shards are not divided after a minute")
			}
			<-time.After(5 * time.Millisecond)
		}
	}
	defer start("a")()
	defer start("b")()
	even(128)
	for b.Loop() {
		stop := start("c")
		even(86)
		mu.Lock()
		clear(ended)
		worst, sum, moved = 0, 0, 0
		mu.Unlock()
		stop()
		even(128)
	}
	if moved > 0 {
		b.ReportMetric(float64(worst.Microseconds())/1000, "worst-ms")
		b.ReportMetric(float64(sum.Microseconds())/1000/float64(moved), "mean-ms")
		b.ReportMetric(float64(moved), "shards")
	}
}
