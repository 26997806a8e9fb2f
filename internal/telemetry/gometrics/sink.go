package gometrics

import (
	"math"
	"strings"
	"sync"
	"sync/atomic"

	gometrics "github.com/hashicorp/go-metrics"
	"github.com/prometheus/client_golang/prometheus"
)

// sink keeps what the libraries count. The one of go-metrics itself joins and
// cleans a name and keeps a sliding summary with quantiles for every sample, of
// which Raft makes a dozen per entry: a tenth of what a follower did. This one
// looks a series up by the parts of its name, and keeps of samples their number
// and sum. It is safe for concurrent use.
type sink struct {
	mu     sync.RWMutex
	series map[string]*series
	kinds  map[string]prometheus.ValueType // by name: one name is of one kind
}

// maxSeries bounds what is kept; further ones are dropped.
const maxSeries = 2000

// sampled stands among the kinds for a summary without quantiles.
const sampled = prometheus.UntypedValue

type series struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	// value of a gauge, sum of a counter or of samples, as bits.
	value atomic.Uint64
	count atomic.Uint64
}

var (
	_ gometrics.MetricSink               = (*sink)(nil)
	_ gometrics.PrecisionGaugeMetricSink = (*sink)(nil)
	_ prometheus.Collector               = (*sink)(nil)
)

func newSink() *sink {
	return &sink{series: map[string]*series{}, kinds: map[string]prometheus.ValueType{}}
}

// cleaned makes a part of a name fit Prometheus.
var cleaned = strings.NewReplacer(" ", "_", ".", "_", "=", "_", "-", "_", "/", "_")

// get finds a series, or makes it; nil if it cannot be kept.
func (s *sink) get(kind prometheus.ValueType, parts []string, labels []gometrics.Label) *series {
	key := make([]byte, 0, 256) // on the stack
	for _, p := range parts {
		key = append(append(key, p...), 0)
	}
	for _, l := range labels {
		key = append(append(append(append(key, 1), l.Name...), 2), l.Value...)
	}
	s.mu.RLock()
	found := s.series[string(key)]
	s.mu.RUnlock()
	if found == nil {
		found = s.add(string(key), kind, parts, labels)
	}
	if found == nil || found.kind != kind {
		return nil
	}
	return found
}

func (s *sink) add(key string, kind prometheus.ValueType, parts []string, labels []gometrics.Label) *series {
	name := cleaned.Replace(strings.Join(parts, "_"))
	constant := prometheus.Labels{}
	for _, l := range labels {
		constant[cleaned.Replace(l.Name)] = l.Value
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if found := s.series[key]; found != nil {
		return found
	}
	if was, ok := s.kinds[name]; ok && was != kind || len(s.series) >= maxSeries {
		return nil
	}
	s.kinds[name] = kind
	added := &series{kind: kind, desc: prometheus.NewDesc(name, name, nil, constant)}
	s.series[key] = added
	return added
}

func (v *series) add(x float64) {
	for {
		old := v.value.Load()
		if v.value.CompareAndSwap(old, math.Float64bits(math.Float64frombits(old)+x)) {
			return
		}
	}
}

// SetPrecisionGaugeWithLabels is of PrecisionGaugeMetricSink.
func (s *sink) SetPrecisionGaugeWithLabels(key []string, val float64, labels []gometrics.Label) {
	if v := s.get(prometheus.GaugeValue, key, labels); v != nil {
		v.value.Store(math.Float64bits(val))
	}
}

// IncrCounterWithLabels is of MetricSink.
func (s *sink) IncrCounterWithLabels(key []string, val float32, labels []gometrics.Label) {
	if v := s.get(prometheus.CounterValue, key, labels); v != nil && val >= 0 {
		v.add(float64(val))
	}
}

// AddSampleWithLabels is of MetricSink.
func (s *sink) AddSampleWithLabels(key []string, val float32, labels []gometrics.Label) {
	if v := s.get(sampled, key, labels); v != nil {
		v.add(float64(val))
		v.count.Add(1)
	}
}

// SetPrecisionGauge is of PrecisionGaugeMetricSink.
func (s *sink) SetPrecisionGauge(key []string, val float64) {
	s.SetPrecisionGaugeWithLabels(key, val, nil)
}

// SetGauge is of MetricSink.
func (s *sink) SetGauge(key []string, val float32) {
	s.SetPrecisionGaugeWithLabels(key, float64(val), nil)
}

// SetGaugeWithLabels is of MetricSink.
func (s *sink) SetGaugeWithLabels(key []string, val float32, labels []gometrics.Label) {
	s.SetPrecisionGaugeWithLabels(key, float64(val), labels)
}

// EmitKey is of MetricSink; Prometheus has nothing like it.
func (s *sink) EmitKey([]string, float32) {}

// IncrCounter is of MetricSink.
func (s *sink) IncrCounter(key []string, val float32) { s.IncrCounterWithLabels(key, val, nil) }

// AddSample is of MetricSink.
func (s *sink) AddSample(key []string, val float32) { s.AddSampleWithLabels(key, val, nil) }

// Describe names nothing: what the libraries count shows when they count it.
func (s *sink) Describe(chan<- *prometheus.Desc) {}

// Collect is of prometheus.Collector.
func (s *sink) Collect(to chan<- prometheus.Metric) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, v := range s.series {
		value := math.Float64frombits(v.value.Load())
		if v.kind == sampled {
			to <- prometheus.MustNewConstSummary(v.desc, v.count.Load(), value, nil)
		} else {
			to <- prometheus.MustNewConstMetric(v.desc, v.kind, value)
		}
	}
}
