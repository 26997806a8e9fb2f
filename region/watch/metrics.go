package watch

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/headlease/headlease/internal/telemetry"
)

type metrics struct {
	events, snapshots, resyncs, slow, refused prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, h *Hub) *metrics {
	make := promauto.With(reg)
	make.NewGaugeFunc(prometheus.GaugeOpts{Name: telemetry.Watchers, Help: "Watchers of this server."}, func() float64 {
		h.out.Lock()
		defer h.out.Unlock()
		return float64(len(h.out.index.all))
	})
	make.NewGaugeFunc(prometheus.GaugeOpts{
		Name: telemetry.WatchQueuedBytes, Help: "Bytes of events that wait for watchers here.",
	}, func() float64 { return float64(h.queued.Load()) })
	counter := func(name, help string) prometheus.Counter {
		return make.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	return &metrics{
		events:    counter(telemetry.WatchEvents, "Events sent to watchers."),
		snapshots: counter(telemetry.WatchSnapshots, "Snapshots begun for watchers."),
		resyncs:   counter(telemetry.WatchResyncs, "Watchers that were told to begin again."),
		slow:      counter(telemetry.WatchSlow, "Watchers whose queue was full, so that they begin again."),
		refused:   counter(telemetry.WatchRefused, "Watches refused because there are too many."),
	}
}
