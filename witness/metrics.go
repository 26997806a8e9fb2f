package witness

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/headlease/headlease/internal/telemetry"
)

type metrics struct {
	votes                 *telemetry.Votes
	write, configure      prometheus.Observer
	writes, failures      prometheus.Counter
	registers, configured prometheus.Gauge
	era, eraStopped       prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) *metrics {
	make := promauto.With(reg)
	took := make.NewHistogramVec(prometheus.HistogramOpts{
		Name: telemetry.StoreWriteTime, Help: "Time of a write to the data directory until it is durable, by operation.",
		Buckets: telemetry.Seconds(),
	}, []string{telemetry.LabelOp})
	return &metrics{
		votes: telemetry.NewVotes(reg),
		write: took.WithLabelValues("register/write"), configure: took.WithLabelValues("register/configure"),
		failures: make.NewCounter(prometheus.CounterOpts{
			Name: telemetry.StoreWriteFailures, Help: "Failed writes to the data directory; the first one stops the server.",
		}),
		writes: make.NewCounter(prometheus.CounterOpts{
			Name: telemetry.WitnessWrites, Help: "Durable writes since the start, one transaction per message that changed a register.",
		}),
		registers: make.NewGauge(prometheus.GaugeOpts{
			Name: telemetry.WitnessRegisters, Help: "Partitions for which this witness keeps a register.",
		}),
		era: make.NewGauge(prometheus.GaugeOpts{
			Name: telemetry.Era, Help: "Era of the configuration in force: how often force-quorum has begun one.",
		}),
		eraStopped: make.NewGauge(prometheus.GaugeOpts{
			Name: telemetry.EraStopped, Help: "1 if this voter has met another era and votes no more until an operator acts.",
		}),
		configured: make.NewGauge(prometheus.GaugeOpts{
			Name: telemetry.WitnessConfigured, Help: "1 if this witness has a configuration; without one it does not vote.",
		}),
	}
}

// stored counts a store write.
func (m *metrics) stored(what string, took time.Duration, err error) {
	if err != nil {
		m.failures.Inc()
		return
	}
	m.writes.Inc()
	if what == "configure" {
		m.configure.Observe(took.Seconds())
	} else {
		m.write.Observe(took.Seconds())
	}
}
