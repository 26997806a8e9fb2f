package detector

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/telemetry"
)

var (
	descPhi       = telemetry.Desc(telemetry.DetectorPhi, "Suspicion of a region: -log10 of the probability that a heartbeat still comes; 8 and more is crashed.", telemetry.LabelRegion)
	descVerdict   = telemetry.Desc(telemetry.DetectorVerdict, "1 for what this process thinks of a region now, 0 for the other verdicts.", telemetry.LabelRegion, telemetry.LabelVerdict)
	descSilence   = telemetry.Desc(telemetry.DetectorSilence, "Time since the last heartbeat of a region; -1: never heard.", telemetry.LabelRegion)
	descMembers   = telemetry.Desc(telemetry.DetectorMembers, "Other processes that the gossip pool holds alive.")
	descRoundTrip = telemetry.Desc(telemetry.DetectorRoundTrip, "Smoothed round-trip time to a peer by gossip probes.", telemetry.LabelPeer)
	descHeard     = telemetry.Desc(telemetry.HeartbeatsHeard, "Heartbeats heard of a region that were news, a leader's own included.", telemetry.LabelRegion)
	descSent      = telemetry.Desc(telemetry.HeartbeatsSent, "Heartbeats sent by this process as its region's leader, each to every configured peer.")
	descIgnored   = telemetry.Desc(telemetry.GossipIgnored, "Gossip messages that were no heartbeat of a configured server of this cluster.")
)

// collector reads a Detector when it is gathered.
type collector struct{ d *Detector }

func (c collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descPhi, descVerdict, descSilence, descMembers, descRoundTrip, descHeard, descSent, descIgnored} {
		out <- d
	}
}

func (c collector) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, n uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	for _, r := range c.d.Reports() {
		gauge(descPhi, r.GetPhi(), r.GetRegion())
		silence := -1.0
		if r.GetSilentNs() >= 0 {
			silence = float64(r.GetSilentNs()) / 1e9
		}
		gauge(descSilence, silence, r.GetRegion())
		for _, v := range []register.Verdict{register.VerdictUnknown, register.VerdictHealthy, register.VerdictSlow, register.VerdictCrashed} {
			gauge(descVerdict, telemetry.Bool(v.Proto() == r.GetVerdict()), r.GetRegion(), v.String())
		}
	}
	for _, r := range c.d.RoundTrips() {
		gauge(descRoundTrip, float64(r.GetRttNs())/1e9, r.GetPeer())
	}
	gauge(descMembers, float64(len(c.d.Members())))

	c.d.mu.Lock()
	sent, ignored := c.d.seq, c.d.ignored
	beats := make(map[string]uint64, len(c.d.regions))
	for region := range c.d.regions {
		beats[region] = c.d.beats[region]
	}
	c.d.mu.Unlock()
	for region, n := range beats {
		count(descHeard, n, region)
	}
	count(descSent, sent)
	count(descIgnored, ignored)
}
