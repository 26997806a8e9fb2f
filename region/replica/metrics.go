package replica

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/headlease/headlease/internal/telemetry"
)

// metrics of a replica. Everything that a proposal or a store call touches is
// resolved beforehand: one atomic addition each.
type metrics struct {
	proposals                [2]outcomes // by lane
	checkPassed, checkFailed prometheus.Counter
	checkTime                prometheus.Observer
	appendTime, compactTime  prometheus.Observer
	stableTime               prometheus.Observer
	storeFailures            prometheus.Counter
	snapshotTime             prometheus.Observer
	snapshotFailures         prometheus.Counter
}

// outcomes of proposals.
type outcomes struct{ committed, refused, unknown prometheus.Counter }

func newMetrics(reg prometheus.Registerer) *metrics {
	make := promauto.With(reg)
	proposals := make.NewCounterVec(prometheus.CounterOpts{
		Name: telemetry.Proposals,
		Help: "Commands proposed here, by lane (urgent: pulses, expiries, votes) and result: committed, refused (surely not applied) or unknown.",
	}, []string{telemetry.LabelLane, telemetry.LabelResult})
	checks := make.NewCounterVec(prometheus.CounterOpts{
		Name: telemetry.LeadershipChecks, Help: "Leadership checks run here, by result: passed or failed.",
	}, []string{telemetry.LabelResult})
	store := make.NewHistogramVec(prometheus.HistogramOpts{
		Name: telemetry.StoreWriteTime, Help: "Time of a write to the data directory until it is durable, by operation.",
		Buckets: telemetry.Seconds(),
	}, []string{telemetry.LabelOp})
	m := &metrics{
		checkPassed: checks.WithLabelValues("passed"), checkFailed: checks.WithLabelValues("failed"),
		checkTime: make.NewHistogram(prometheus.HistogramOpts{
			Name: telemetry.LeadershipCheckTime, Help: "Time of a leadership check from its first question to its result.",
			Buckets: telemetry.Seconds(),
		}),
		appendTime: store.WithLabelValues(opAppend), compactTime: store.WithLabelValues(opCompact), stableTime: store.WithLabelValues(opStable),
		storeFailures: make.NewCounter(prometheus.CounterOpts{
			Name: telemetry.StoreWriteFailures, Help: "Failed writes to the data directory; the first one stops the server.",
		}),
	}
	m.snapshotTime = make.NewHistogram(prometheus.HistogramOpts{
		Name: telemetry.SnapshotTime, Help: "Time in which a snapshot of this server's state was written.",
		Buckets: telemetry.Seconds(),
	})
	m.snapshotFailures = make.NewCounter(prometheus.CounterOpts{
		Name: telemetry.SnapshotFailures, Help: "Snapshots that could not be written; the log grows until one is.",
	})
	for lane, name := range map[int]string{urgentLane: "urgent", normalLane: "normal"} {
		m.proposals[lane] = outcomes{
			committed: proposals.WithLabelValues(name, "committed"),
			refused:   proposals.WithLabelValues(name, "refused"),
			unknown:   proposals.WithLabelValues(name, "unknown"),
		}
	}
	return m
}

// proposed counts a proposal's outcome.
func (m *metrics) proposed(lane int, err error) {
	o := &m.proposals[lane]
	switch {
	case err == nil:
		o.committed.Inc()
	case errors.Is(err, ErrUnknown):
		o.unknown.Inc()
	default:
		o.refused.Inc()
	}
}

// checked counts a leadership check; one that the stop of the server ended is
// neither.
func (m *metrics) checked(took time.Duration, err error) {
	switch {
	case errors.Is(err, context.Canceled):
		return
	case err == nil:
		m.checkPassed.Inc()
	default:
		m.checkFailed.Inc()
	}
	m.checkTime.Observe(took.Seconds())
}

// stored counts a store write.
func (m *metrics) stored(op string, took time.Duration, err error) {
	if err != nil {
		m.storeFailures.Inc()
		return
	}
	switch op {
	case opAppend:
		m.appendTime.Observe(took.Seconds())
	case opCompact:
		m.compactTime.Observe(took.Seconds())
	case opStable:
		m.stableTime.Observe(took.Seconds())
	}
}

// snapshotted counts a snapshot.
func (m *metrics) snapshotted(took time.Duration, err error) {
	if err != nil {
		m.snapshotFailures.Inc()
		return
	}
	m.snapshotTime.Observe(took.Seconds())
}
