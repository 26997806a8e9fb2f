package region

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/headlease/headlease/fence"
	campaignrun "github.com/headlease/headlease/global/campaign/run"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/telemetry"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/admission"
	"github.com/headlease/headlease/region/lessor"
	lessorrun "github.com/headlease/headlease/region/lessor/run"
	"github.com/headlease/headlease/region/replica"
	"github.com/headlease/headlease/region/state"
)

// metrics counts what this server does as its region's leader: every server
// applies every entry, and only the leader counts it, so that the sum over a
// region's servers is the region's.
type metrics struct {
	leads atomic.Bool

	terms, opened                          prometheus.Counter
	closed, ended                          [state.EndDropped + 1]prometheus.Counter
	acquired, handedOver                   prometheus.Counter
	offersExpired, revoked                 prometheus.Counter
	enqueued, unqueued                     prometheus.Counter
	campaigns, renewals                    prometheus.Counter
	promotions, resumptions, drops, lapses *prometheus.CounterVec
	forwarded                              map[link.Plane]prometheus.Counter
	refused                                map[admission.Lane]refusals
}

// refusals of one lane.
type refusals struct{ identity, server prometheus.Counter }

func (m *metrics) refusedCall(l admission.Lane, byIdentity bool) {
	if byIdentity {
		m.refused[l].identity.Inc()
	} else {
		m.refused[l].server.Inc()
	}
}

func newMetrics(reg prometheus.Registerer) *metrics {
	make := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return make.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	vec := func(name, help, label string) *prometheus.CounterVec {
		return make.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	}
	grants := vec(telemetry.Grants, "Leases granted, by the way: acquire (at once) or handover (offered to the next waiter).", telemetry.LabelVia)
	revocations := vec(telemetry.Revocations, "Revocations begun, by reason: offer_expired (an offer was not confirmed) or other.", telemetry.LabelReason)
	closed := vec(telemetry.SessionsClosed, "Sessions ended, by reason: closed by the client, or expired.", telemetry.LabelReason)
	ended := vec(telemetry.LeasesEnded, "Leases ended, by reason: released, closed, expired, revoked or dropped.", telemetry.LabelReason)
	forwarded := vec(telemetry.ForwardedCalls, "Calls and streams that this server passed on to the leader, by the plane on which they came.", telemetry.LabelPlane)
	m := &metrics{
		terms:    counter(telemetry.Terms, "Terms that this server began to lead."),
		opened:   counter(telemetry.SessionsOpened, "Sessions opened."),
		acquired: grants.WithLabelValues("acquire"), handedOver: grants.WithLabelValues("handover"),
		offersExpired: revocations.WithLabelValues("offer_expired"), revoked: revocations.WithLabelValues("other"),
		enqueued:    counter(telemetry.WaitersEnqueued, "Requests that took a queue place."),
		unqueued:    counter(telemetry.WaitersEnded, "Requests that left a queue without a grant."),
		campaigns:   counter(telemetry.Campaigns, "Ballots reserved: campaigns that went beyond asking."),
		renewals:    counter(telemetry.Renewals, "Rounds that moved the end of a head lease, one per partition."),
		promotions:  vec(telemetry.Promotions, "New epochs adopted: this region became a partition's owner, or raised its epoch.", telemetry.LabelPartition),
		resumptions: vec(telemetry.Resumptions, "Live epochs adopted again after a lapse or a new term, with their leases.", telemetry.LabelPartition),
		drops:       vec(telemetry.Drops, "Epochs dropped with their leases: another owner or a higher epoch came.", telemetry.LabelPartition),
		lapses:      vec(telemetry.Lapses, "Head leases that ended without renewal; nothing is granted until one is regained.", telemetry.LabelPartition),
		forwarded: map[link.Plane]prometheus.Counter{
			link.PlaneAPI:   forwarded.WithLabelValues(link.PlaneAPI.String()),
			link.PlaneVotes: forwarded.WithLabelValues(link.PlaneVotes.String()),
		},
		refused: map[admission.Lane]refusals{},
	}
	refused := make.NewCounterVec(prometheus.CounterOpts{
		Name: telemetry.CallsRefused, Help: "Calls answered OVERLOADED before they cost anything, by lane, and by whether the identity's own rate or share or the server was full.",
	}, []string{telemetry.LabelLane, telemetry.LabelBy})
	for _, l := range []admission.Lane{admission.Work, admission.Read} {
		m.refused[l] = refusals{refused.WithLabelValues(l.String(), "identity"), refused.WithLabelValues(l.String(), "server")}
	}
	for r := state.EndReleased; r <= state.EndDropped; r++ {
		m.ended[r] = ended.WithLabelValues(r.String())
		if r == state.EndClosed || r == state.EndExpired {
			m.closed[r] = closed.WithLabelValues(r.String())
		}
	}
	return m
}

// begin counts a term; view is the state at its first own entry.
func (m *metrics) begin(view state.View) {
	m.terms.Inc()
	m.leads.Store(true)
	m.configured(view.Configuration())
}

// configured shows the counters of every partition, as 0 before the first of
// each.
func (m *metrics) configured(c *pb.ClusterConfiguration) {
	for _, p := range c.GetPartitions() {
		for _, v := range []*prometheus.CounterVec{m.promotions, m.resumptions, m.drops, m.lapses} {
			v.WithLabelValues(p.GetName())
		}
	}
}

// applied counts the events of an entry applied while this server leads.
func (m *metrics) applied(events []state.Event) {
	if !m.leads.Load() {
		return
	}
	for _, e := range events {
		switch e := e.(type) {
		case state.Configured:
			m.configured(e.Configuration)
		case state.SessionOpened:
			m.opened.Inc()
		case state.SessionClosed:
			inc(m.closed[:], e.Reason)
		case state.LeaseGranted:
			if e.Offered {
				m.handedOver.Inc()
			} else {
				m.acquired.Inc()
			}
		case state.LeaseRevoked:
			if e.Reason == lessor.OfferExpired {
				m.offersExpired.Inc()
			} else {
				m.revoked.Inc()
			}
		case state.LeaseEnded:
			inc(m.ended[:], e.Reason)
		case state.WaiterEnqueued:
			m.enqueued.Inc()
		case state.WaiterEnded:
			m.unqueued.Inc()
		case state.PartitionAdopted:
			if e.Resumed {
				m.resumptions.WithLabelValues(e.Partition).Inc()
			} else {
				m.promotions.WithLabelValues(e.Partition).Inc()
			}
		case state.PartitionDropped:
			m.drops.WithLabelValues(e.Partition).Inc()
		}
	}
}

func inc(by []prometheus.Counter, r state.EndReason) {
	if int(r) < len(by) && by[r] != nil {
		by[r].Inc()
	}
}

// campaignRaft counts the ballots that campaigns reserve.
type campaignRaft struct {
	*replica.Replica
	reserved prometheus.Counter
}

func (r campaignRaft) ProposeUrgent(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error) {
	res, err := r.Replica.ProposeUrgent(ctx, cmd)
	if err == nil && res.GetReserved() != nil {
		r.reserved.Inc()
	}
	return res, err
}

// heads counts what becomes of the region's head leases.
type heads struct {
	*lessorrun.Shell
	m *metrics
}

func (h heads) Held(partition string, epoch fence.Epoch, until instant.Instant) {
	h.m.renewals.Inc()
	h.Shell.Held(partition, epoch, until)
}

func (h heads) Lapsed(partition string, epoch fence.Epoch) {
	h.m.lapses.WithLabelValues(partition).Inc()
	h.Shell.Lapsed(partition, epoch)
}

// voters measures the votes of others.
type voters struct {
	*campaignrun.Voters
	took   *prometheus.HistogramVec
	failed *prometheus.CounterVec

	mu sync.Mutex
	by map[string]*voterMeter
}

type voterMeter struct {
	prepare, accept prometheus.Observer
	failed          prometheus.Counter
}

func newVoters(reg prometheus.Registerer, v *campaignrun.Voters, ids []string) *voters {
	make := promauto.With(reg)
	took := make.NewHistogramVec(prometheus.HistogramOpts{
		Name: telemetry.VotesAskedTime, Help: "Time until another voter answered a vote of this region, by voter and method.",
		Buckets: telemetry.Seconds(),
	}, []string{telemetry.LabelVoter, telemetry.LabelMethod})
	failed := make.NewCounterVec(prometheus.CounterOpts{
		Name: telemetry.VotesAskedFailures, Help: "Votes that another voter did not answer in time, or answered with an error.",
	}, []string{telemetry.LabelVoter})
	out := &voters{Voters: v, took: took, failed: failed, by: map[string]*voterMeter{}}
	for _, id := range ids {
		out.meter(id)
	}
	return out
}

// meter of a voter; one that was not in the cluster file at the start gets its
// own when it is first asked.
func (v *voters) meter(id string) *voterMeter {
	v.mu.Lock()
	defer v.mu.Unlock()
	m := v.by[id]
	if m == nil {
		m = &voterMeter{v.took.WithLabelValues(id, "prepare"), v.took.WithLabelValues(id, "accept"), v.failed.WithLabelValues(id)}
		v.by[id] = m
	}
	return m
}

func (v *voters) Voter(id string) campaignrun.RemoteVoter {
	in := v.Voters.Voter(id)
	if in == nil {
		return nil
	}
	return meteredVoter{in, v.meter(id)}
}

type meteredVoter struct {
	in campaignrun.RemoteVoter
	m  *voterMeter
}

func (v meteredVoter) Prepare(ctx context.Context, req *pb.PrepareRequest) (*pb.PrepareResponse, error) {
	started := time.Now()
	res, err := v.in.Prepare(ctx, req)
	v.m.asked(v.m.prepare, started, err)
	return res, err
}

func (v meteredVoter) Configure(ctx context.Context, req *pb.ConfigureRequest) (*pb.ConfigureResponse, error) {
	return v.in.Configure(ctx, req)
}

func (v meteredVoter) Accept(ctx context.Context, req *pb.AcceptRequest) (*pb.AcceptResponse, error) {
	started := time.Now()
	res, err := v.in.Accept(ctx, req)
	v.m.asked(v.m.accept, started, err)
	return res, err
}

func (m *voterMeter) asked(took prometheus.Observer, started time.Time, err error) {
	if err != nil {
		m.failed.Inc()
		return
	}
	took.Observe(time.Since(started).Seconds())
}
