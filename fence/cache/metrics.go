package cache

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/headlease/headlease/internal/telemetry"
)

type metrics struct {
	leases, tombstones, renewals prometheus.Counter
	old, late, missing           prometheus.Counter
	failures, failed, dropped    prometheus.Counter
	rebuilds                     *prometheus.CounterVec
	up                           prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer, m *Mirror) *metrics {
	make := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return make.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	writes := make.NewCounterVec(prometheus.CounterOpts{
		Name: telemetry.CacheWrites, Help: "Entries of the lease cache written, by op: lease, tombstone or renewal.",
	}, []string{telemetry.LabelOp})
	refused := make.NewCounterVec(prometheus.CounterOpts{
		Name: telemetry.CacheWritesRefused, Help: "Writes that the lease cache did not take, by reason: old (a higher token, or a tombstone, is there) or late.",
	}, []string{telemetry.LabelReason})
	make.NewGaugeFunc(prometheus.GaugeOpts{
		Name: telemetry.CacheQueued, Help: "Resources of which a change waits to be written to the lease cache.",
	}, func() float64 {
		m.mu.Lock()
		defer m.mu.Unlock()
		return float64(len(m.pending))
	})
	rebuilds := make.NewCounterVec(prometheus.CounterOpts{
		Name: telemetry.CacheRebuilds, Help: "Times that the lease cache was written anew, by reason: term, connect, failure, missing, late or overflow.",
	}, []string{telemetry.LabelReason})
	for _, why := range []string{"term", "connect", "failure", "missing", "late", "overflow"} {
		rebuilds.WithLabelValues(why)
	}
	return &metrics{
		leases: writes.WithLabelValues("lease"), tombstones: writes.WithLabelValues("tombstone"), renewals: writes.WithLabelValues("renewal"),
		old: refused.WithLabelValues("old"), late: refused.WithLabelValues("late"),
		missing:  counter(telemetry.CacheMissing, "Entries that a renewal did not find in the lease cache, and that were written anew."),
		failures: counter(telemetry.CacheFailures, "Times that the lease cache's server failed, and was then left alone for a while."),
		failed:   counter(telemetry.CacheWritesFailed, "Writes to the lease cache that its server answered with an error, or not at all."),
		dropped:  counter(telemetry.CacheDropped, "Changes dropped because too many waited to be written to the lease cache; a rebuild follows."),
		rebuilds: rebuilds,
		up:       make.NewGauge(prometheus.GaugeOpts{Name: telemetry.CacheUp, Help: "1 if this server, as leader, writes the lease cache and its server answers."}),
	}
}
