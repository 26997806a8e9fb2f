package gometrics

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	gometrics "github.com/hashicorp/go-metrics"
	"github.com/prometheus/client_golang/prometheus"
)

func TestSinkShowsWhatIsCounted(t *testing.T) {
	s := newSink()
	reg := prometheus.NewRegistry()
	reg.MustRegister(s)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				s.IncrCounter([]string{"h", "raft", "apply"}, 2)
				s.AddSampleWithLabels([]string{"h", "raft.rpc"}, 0.5, []gometrics.Label{{Name: "peer-id", Value: "eu/1"}})
			}
		})
	}
	wg.Wait()
	s.AddSampleWithLabels([]string{"h", "raft.rpc"}, 7, []gometrics.Label{{Name: "peer-id", Value: "eu/2"}})
	s.SetGauge([]string{"h", "queue"}, 3)
	s.SetGauge([]string{"h", "queue"}, 1)
	s.SetPrecisionGauge([]string{"h", "exact"}, 1<<40+1)
	s.IncrCounter([]string{"h", "queue"}, 1) // a name is of one kind
	s.IncrCounter([]string{"h_queue"}, 1)    // however it is cut
	s.IncrCounter([]string{"h", "down"}, -1) // a counter goes up
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			line := f.GetName()
			for _, l := range m.GetLabel() {
				line += " " + l.GetName() + "=" + l.GetValue()
			}
			switch {
			case m.GetGauge() != nil:
				line += fmt.Sprint(" gauge ", m.GetGauge().GetValue())
			case m.GetCounter() != nil:
				line += fmt.Sprint(" counter ", m.GetCounter().GetValue())
			default:
				line += fmt.Sprint(" summary ", m.GetSummary().GetSampleSum(), "/", m.GetSummary().GetSampleCount())
			}
			got = append(got, line)
		}
	}
	want := []string{
		"h_down counter 0", "h_exact gauge 1.099511627777e+12", "h_queue gauge 1", "h_raft_apply counter 800",
		"h_raft_rpc peer_id=eu/1 summary 200/400", "h_raft_rpc peer_id=eu/2 summary 7/1",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

func TestSinkIsBounded(t *testing.T) {
	s := newSink()
	for i := range maxSeries + 10 {
		s.IncrCounter([]string{fmt.Sprint("c", i)}, 1)
	}
	if len(s.series) != maxSeries {
		t.Errorf("%d series", len(s.series))
	}
}

func BenchmarkSample(b *testing.B) {
	c := gometrics.DefaultConfig(prefix)
	c.EnableHostname, c.EnableRuntimeMetrics = false, false
	m, err := gometrics.New(c, newSink())
	if err != nil {
		b.Fatal(err)
	}
	labels := []gometrics.Label{{Name: "peer_id", Value: "eu-1/4f2c"}}
	for b.Loop() {
		m.MeasureSinceWithLabels([]string{"raft", "replication", "appendEntries", "rpc"}, time.Now(), labels)
	}
}
