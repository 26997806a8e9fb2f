package replica

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// BenchmarkPropose: three servers in this process over loopback TCP, real
// fsyncs, small commands.
func BenchmarkPropose(b *testing.B) {
	for _, store := range []string{"wal", "bolt"} {
		for _, parallel := range []int{1, 64, 1024} {
			b.Run(fmt.Sprintf("%s/%d", store, parallel), func(b *testing.B) {
				benchPropose(b, store == "bolt", parallel)
			})
		}
	}
}

func benchPropose(b *testing.B, bolt bool, parallel int) {
	c := newCluster(b, nil, three, func(cfg *Config) {
		cfg.Timing, cfg.boltLog, cfg.segmentSize = TimingCalm(), bolt, 0
	})
	c.start()
	n := c.setup()
	ctx := context.Background()
	var next atomic.Int64
	var mu sync.Mutex
	var worst time.Duration
	b.ResetTimer()
	var wg sync.WaitGroup
	for range parallel {
		wg.Go(func() {
			for next.Add(1) <= int64(b.N) {
				at := time.Now()
				if _, err := n.r.Propose(ctx, ticket(0)); err != nil {
					b.Error(err)
					return
				}
				took := time.Since(at)
				mu.Lock()
				worst = max(worst, took)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "cmds/s")
	b.ReportMetric(float64(worst.Microseconds())/1000, "worst-ms")
	c.stop()
}

// BenchmarkCheck: leadership checks, without the network.
func BenchmarkCheck(b *testing.B) {
	for _, parallel := range []int{1, 1024} {
		b.Run(fmt.Sprint(parallel), func(b *testing.B) {
			c := newCluster(b, nil, three, func(cfg *Config) { cfg.Timing = TimingCalm() })
			c.start()
			n := c.setup()
			var next atomic.Int64
			var wg sync.WaitGroup
			b.ResetTimer()
			for range parallel {
				wg.Go(func() {
					for next.Add(1) <= int64(b.N) {
						if _, err := n.r.Check(context.Background()); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			c.stop()
		})
	}
}
