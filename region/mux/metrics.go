package mux

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/headlease/headlease/internal/telemetry"
)

type metrics struct {
	attached, broken, ended, slow prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, e *Edge) *metrics {
	make := promauto.With(reg)
	make.NewGaugeFunc(prometheus.GaugeOpts{
		Name: telemetry.ClientStreams, Help: "Attach streams that clients have open at this server, whoever leads.",
	}, func() float64 {
		e.mu.Lock()
		defer e.mu.Unlock()
		return float64(len(e.clients))
	})
	return &metrics{
		attached: make.NewCounter(prometheus.CounterOpts{
			Name: telemetry.ClientStreamsAttached, Help: "Times that a client's stream was given to a leader, each term anew.",
		}),
		ended: make.NewCounter(prometheus.CounterOpts{
			Name: telemetry.ClientStreamsEnded, Help: "Client streams ended by this server: no leader, or the mux broke within a term.",
		}),
		slow: make.NewCounter(prometheus.CounterOpts{
			Name: telemetry.ClientStreamsSlow, Help: "Client streams through this follower closed because the client read too slowly.",
		}),
		broken: make.NewCounter(prometheus.CounterOpts{
			Name: telemetry.MuxBroken, Help: "Muxes to a leader that broke: the leader ended, fell silent or lost its term.",
		}),
	}
}
