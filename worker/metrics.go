package worker

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/headlease/headlease/internal/telemetry"
)

type metrics struct {
	done, parked, failures, stale prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, w *worker) *metrics {
	make := promauto.With(reg)
	gauge := func(name, help string, value func() float64) {
		make.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	counter := func(name, help string) prometheus.Counter {
		return make.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge(telemetry.WorkerShards, "Shards that this worker holds and works on.", func() float64 {
		w.mu.Lock()
		defer w.mu.Unlock()
		return float64(len(w.chains))
	})
	gauge(telemetry.WorkerShardsStalled, "Shards whose batch fails, or is in work for longer than it should.", func() float64 {
		n := 0
		w.eachBatch(func(failing bool, age time.Duration) {
			if failing || age > w.cfg.StallAfter {
				n++
			}
		})
		return float64(n)
	})
	gauge(telemetry.WorkerOldestBatch, "How long the batch is in work that was begun first.", func() float64 {
		oldest := time.Duration(0)
		w.eachBatch(func(_ bool, age time.Duration) { oldest = max(oldest, age) })
		return oldest.Seconds()
	})
	return &metrics{
		done:     counter(telemetry.WorkerMessages, "Messages handled and acknowledged."),
		parked:   counter(telemetry.WorkerParked, "Messages parked."),
		failures: counter(telemetry.WorkerFailures, "Batches whose handler failed."),
		stale:    counter(telemetry.WorkerStale, "Shards given up because a store refused a write as stale."),
	}
}

func (w *worker) eachBatch(f func(failing bool, age time.Duration)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.chains {
		age := time.Duration(0)
		if !c.since.IsZero() {
			age = time.Since(c.since)
		}
		f(c.failing, age)
	}
}
