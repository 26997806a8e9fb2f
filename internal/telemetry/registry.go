package telemetry

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// NewRegistry returns a process's registry with what every process shows: the
// Go runtime, the operating system's view of it, and the build.
func NewRegistry(version string) *prometheus.Registry {
	r := prometheus.NewRegistry()
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: BuildInfo, Help: "1; the labels name the build.",
		ConstLabels: prometheus.Labels{LabelVersion: version, "goversion": runtime.Version()},
	})
	build.Set(1)
	r.MustRegister(build, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Desc describes a metric whose values are read when it is gathered.
func Desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// Bool is 1 for true.
func Bool(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
