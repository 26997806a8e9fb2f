package run

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/headlease/headlease/internal/telemetry"
)

type metrics struct {
	acked, slow prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, s *Shell) *metrics {
	make := promauto.With(reg)
	make.NewGaugeFunc(prometheus.GaugeOpts{
		Name: telemetry.StreamsOpen, Help: "Client streams attached to this leader, those that come through followers included.",
	}, func() float64 {
		s.mu.Lock()
		defer s.mu.Unlock()
		return float64(len(s.streams))
	})
	return &metrics{
		acked: make.NewCounter(prometheus.CounterOpts{
			Name: telemetry.KeepalivesAcked, Help: "Acks sent to sessions, each after a leadership check begun after the keepalive arrived.",
		}),
		slow: make.NewCounter(prometheus.CounterOpts{
			Name: telemetry.StreamsSlowClosed, Help: "Client streams closed because the client read too slowly.",
		}),
	}
}
