package region

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headlease/headlease/internal/telemetry"
	"github.com/headlease/headlease/region/admission"
)

// The gauges that are read when they are gathered. None of them waits for the
// disk or for another process.
var (
	descLeader      = telemetry.Desc(telemetry.RaftLeader, "1 if this server leads its region and serves.")
	descTerm        = telemetry.Desc(telemetry.RaftTerm, "Raft's current term here.")
	descCommit      = telemetry.Desc(telemetry.RaftCommitIndex, "Newest log entry that this server knows to be committed.")
	descApplied     = telemetry.Desc(telemetry.RaftAppliedIndex, "Newest log entry applied to the state machine here.")
	descLast        = telemetry.Desc(telemetry.RaftLastIndex, "Newest entry of the log here.")
	descContact     = telemetry.Desc(telemetry.RaftContactSeconds, "Time since this follower heard its leader; 0 on the leader, -1: never.")
	descVoters      = telemetry.Desc(telemetry.RaftVoters, "Voters of the region's Raft group as configured here.")
	descInitialised = telemetry.Desc(telemetry.RaftInitialised, "1 if this server belongs to a group.")
	descQueued      = telemetry.Desc(telemetry.ProposalsQueued, "Commands that wait to be proposed.")
	descInFlight    = telemetry.Desc(telemetry.ProposalsInFlight, "Log entries proposed here and not yet answered.")
	descInside      = telemetry.Desc(telemetry.CallsInside, "Calls under way, by lane: work (acquire, open a session, set a value) or read.", telemetry.LabelLane)
	descPulseAge    = telemetry.Desc(telemetry.PulseAge, "Time since the newest committed pulse was proposed; on the leader only. Over min(D/2, 1.5 s) nothing is acknowledged.")
	descSessions    = telemetry.Desc(telemetry.Sessions, "Sessions in the state as applied here, closing ones included.")
	descLeases      = telemetry.Desc(telemetry.Leases, "Leases in the state as applied here.")
	descWaiters     = telemetry.Desc(telemetry.Waiters, "Queue places in the state as applied here.")
	descResources   = telemetry.Desc(telemetry.Resources, "Resources with a lease or a queue in the state as applied here.")
	descHeld        = telemetry.Desc(telemetry.HeadLeaseHeld, "1 if this server, as leader, holds a running head lease on the partition.", telemetry.LabelPartition)
	descLeft        = telemetry.Desc(telemetry.HeadLeaseSecondsLeft, "What is left of the head lease on this server's clock; 0 if it is not held here.", telemetry.LabelPartition)
	descEpoch       = telemetry.Desc(telemetry.PartitionEpoch, "Highest epoch of the partition that this region ever adopted.", telemetry.LabelPartition)
)

var (
	descEra        = telemetry.Desc(telemetry.Era, "Era of the configuration in force: how often force-quorum has begun one.")
	descEraStopped = telemetry.Desc(telemetry.EraStopped, "1 if this voter has met another era and votes no more until an operator acts.")
)

type collector struct{ s *Server }

func (c collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descLeader, descTerm, descCommit, descApplied, descLast, descContact, descVoters, descInitialised, descQueued, descInFlight, descInside,
		descPulseAge, descSessions, descLeases, descWaiters, descResources, descHeld, descLeft, descEpoch, descEra, descEraStopped,
	} {
		out <- d
	}
}

func (c collector) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	now := c.s.cfg.Clock.Now()
	term, leads := c.s.replica.Leading()
	st := c.s.replica.Stats()
	gauge(descLeader, telemetry.Bool(leads))
	gauge(descTerm, float64(st.Term))
	gauge(descCommit, float64(st.Commit))
	gauge(descApplied, float64(st.Applied))
	gauge(descLast, float64(st.Last))
	contact := st.LastContact.Seconds()
	if st.LastContact < 0 {
		contact = -1
	}
	gauge(descContact, contact)
	votes := 0
	for _, s := range st.Servers {
		if s.Voter {
			votes++
		}
	}
	gauge(descVoters, float64(votes))
	gauge(descInitialised, telemetry.Bool(st.Initialised))
	gauge(descQueued, float64(st.Queued))
	gauge(descInFlight, float64(st.InFlight))
	for _, l := range []admission.Lane{admission.Work, admission.Read} {
		gauge(descInside, float64(c.s.control.Inside(l)), l.String())
	}
	if of, proposed, ok := c.s.replica.LastPulse(); ok && leads && of == term {
		gauge(descPulseAge, now.Sub(proposed).Seconds())
	}

	view := c.s.replica.View()
	gauge(descEra, float64(view.Configuration().GetEra().GetCounter()))
	gauge(descEraStopped, telemetry.Bool(view.EraStop() != nil))
	n := view.Counts()
	gauge(descSessions, float64(n.Sessions))
	gauge(descLeases, float64(n.Leases))
	gauge(descWaiters, float64(n.Waiters))
	gauge(descResources, float64(n.Resources))
	left := map[string]float64{}
	parts, _ := c.s.campaign.Explain()
	for _, p := range parts {
		if p.Held != 0 {
			left[p.Partition] = max(0, p.HeldUntil.Sub(now).Seconds())
		}
	}
	for p := range view.Partitions() {
		gauge(descHeld, telemetry.Bool(left[p.Name] > 0), p.Name)
		gauge(descLeft, left[p.Name], p.Name)
		gauge(descEpoch, float64(p.Epoch), p.Name)
	}
}
