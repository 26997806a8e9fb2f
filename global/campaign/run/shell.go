package run

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/telemetry"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// Voter is a voter, the own one or a remote one.
type Voter interface {
	Prepare(ctx context.Context, req *pb.PrepareRequest) (*pb.PrepareResponse, error)
	Accept(ctx context.Context, req *pb.AcceptRequest) (*pb.AcceptResponse, error)
}

// RemoteVoter is a voter elsewhere, which may be behind with its configuration.
type RemoteVoter interface {
	Voter
	// Configure gives it a decided configuration.
	Configure(ctx context.Context, req *pb.ConfigureRequest) (*pb.ConfigureResponse, error)
}

// Remote reaches the voters of other regions and the witnesses by their id.
type Remote interface {
	// Voter returns the voter, or nil if the cluster file does not have it.
	Voter(id string) RemoteVoter
	// RTT is the measured round-trip time; zero: not measured.
	RTT(id string) time.Duration
}

// Raft commits commands of the region.
type Raft interface {
	ProposeUrgent(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error)
	PulseFresh(now instant.Instant) bool
	View() state.View
}

// Heads is told of the region's head leases; it must not block.
type Heads interface {
	Held(partition string, epoch fence.Epoch, until instant.Instant)
	Lapsed(partition string, epoch fence.Epoch)
}

// Config of a Shell; all fields but Registerer, Logger and Poll are needed.
type Config struct {
	Region string
	Own    Voter
	Remote Remote
	Raft   Raft
	Heads  Heads
	// Verdict is the own detector's, a hint.
	Verdict func(region string) register.Verdict
	Clock   clock.Clock
	// Rho bounds the rates of all clocks in the cluster.
	Rho  float64
	Rand campaign.Rand
	// Drained reports whether a draining partition has no lease left, so that it
	// may be released, and whether no lock delay is left either (settled); nil: a
	// draining partition is not released. It must not block.
	Drained func(partition string, epoch fence.Epoch) (settled, drained bool)
	// Grace tells the lessor how long holders may go on in a drain that this shell
	// is about to begin, for a failback; nil: partitions are not handed back by
	// themselves. It must not block.
	Grace func(partition string, grace time.Duration)
	// Steady is how long a preferred region must be healthy before a partition with
	// automatic failback is handed to it; 0: a minute.
	Steady time.Duration
	// NeverApplied reports whether a proposal's error means that the command
	// surely did not and will not take effect.
	NeverApplied func(error) bool
	// Poll is how often verdicts and the pulse are looked at; default 100 ms.
	Poll time.Duration
	// Registerer of the metrics.
	Registerer prometheus.Registerer
	Logger     *slog.Logger
}

// minPause keeps a proposer that is always due from turning into a busy loop.
const minPause = time.Millisecond

// Shell runs the campaigns of a region. It is safe for concurrent use.
type Shell struct {
	cfg  Config
	base context.Context
	stop context.CancelFunc
	wake chan struct{}
	work sync.WaitGroup

	mu     sync.Mutex
	closed bool
	term   uint64
	ctx    context.Context // of the term
	cancel context.CancelFunc
	// leader is nil while not leading, not configured yet, or while a command
	// of the term's earlier proposer is on its way.
	leader *campaign.Leader
	// restarts of the term's proposer.
	restarts uint64
	// asking is the context of the leader's questions; they end with it.
	asking   context.Context
	dismiss  context.CancelFunc
	commands int // on their way in this term
	config   *pb.ClusterConfiguration
	self     register.Region
	verdicts map[string]register.Verdict
	stale    bool
	lives    map[string]life // as seen last
	recorded map[string]life // as committed, or on their way to be; writes 0
	// problems are voters that do not answer, or are not counted, and why.
	problems map[string]Problem
	// draining are the partitions of which a drain is committed.
	draining map[string]*drain
	failback *campaign.Failback
	// learning is the version of a newer configuration that is being stored, met an
	// era that is not below the own one and is being made durable.
	learning  uint64
	met       register.Era
	uncounted *prometheus.CounterVec
}

// New returns a shell that leads nothing yet.
func New(cfg Config) *Shell {
	if cfg.Poll == 0 {
		cfg.Poll = 100 * time.Millisecond
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	base, stop := context.WithCancel(context.Background())
	return &Shell{
		cfg: cfg, base: base, stop: stop, wake: make(chan struct{}, 1), problems: map[string]Problem{},
		draining: map[string]*drain{},
		uncounted: promauto.With(cfg.Registerer).NewCounterVec(prometheus.CounterOpts{
			Name: telemetry.VotesNotCounted, Help: "Votes of others that were not counted: the voter's data was made anew, copied or rolled back.",
		}, []string{telemetry.LabelVoter}),
	}
}

// Begin makes the proposer of a term from the view at its first own entry. It
// is called from the FSM goroutine.
func (s *Shell) Begin(term uint64, view state.View) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
	if s.closed {
		return
	}
	s.term, s.commands, s.learning, s.restarts, s.met = term, 0, 0, 0, register.Era{}
	s.ctx, s.cancel = context.WithCancel(s.base)
	s.lives, _ = livesOf(view)
	s.build(view)
}

// build makes the proposer if the region is configured. It reads what is live
// from the view, so nothing may be on its way that changes that behind its
// back. s.mu is held.
func (s *Shell) build(view state.View) {
	conf := view.Configuration()
	if conf == nil || !view.Initialised() || s.commands > 0 || view.EraStop() != nil {
		return
	}
	s.config = conf
	s.self = register.Region{Name: view.Region(), Incarnation: view.Incarnation()}
	c, own := s.campaignOf(view)
	leader, err := campaign.New(c, own, s.cfg.Clock.Now())
	if err != nil {
		s.cfg.Logger.Error("this region cannot campaign under its configuration", "error", err)
		return
	}
	s.leader = leader
	s.asking, s.dismiss = context.WithCancel(s.ctx)
	s.verdicts = map[string]register.Verdict{}
	s.problems = map[string]Problem{}
	s.stale = false
	_, s.recorded = livesOf(view)
	s.failback = campaign.NewFailback(s.cfg.Steady)
	s.findTransfers(view)
	s.kick()
}

// campaignOf is what the proposer has to know of the view's configuration and
// partitions.
func (s *Shell) campaignOf(view state.View) (campaign.Config, []campaign.Own) {
	conf := view.Configuration()
	c := campaign.Config{
		Self: s.self, OwnVoter: config.RegionVoter(s.self.Name), Era: config.EraOf(conf),
		D: time.Duration(conf.GetDNs()), Rho: s.cfg.Rho, Rand: s.cfg.Rand,
	}
	for _, v := range conf.GetVoters() {
		c.Voters = append(c.Voters, campaign.Voter{
			ID: v.GetId(), Incarnation: register.Incarnation(v.GetIncarnation()), Witness: config.IsWitness(v.GetId()),
		})
		if v.GetId() != c.OwnVoter {
			s.uncounted.WithLabelValues(v.GetId()) // shown as 0
		}
	}
	var own []campaign.Own
	for _, spec := range conf.GetPartitions() {
		c.Partitions = append(c.Partitions, campaign.Partition{Name: spec.GetName(), Prefer: spec.GetPrefer()})
		p, _ := view.Partition(spec.GetName())
		o := campaign.Own{Record: p.Register, Floor: max(p.Epoch, p.Dropped)}
		if p.Live() {
			o.Live = p.Epoch
		}
		own = append(own, o)
	}
	return c, own
}

// reconfigure lets the proposer go on under a newer configuration: its head
// leases run on. Without a proposer, or when the region is no member any more,
// it is made anew, or not at all. s.mu is held.
func (s *Shell) reconfigure(conf *pb.ClusterConfiguration) {
	s.learning = 0
	if s.leader == nil {
		s.build(s.cfg.Raft.View())
		return
	}
	c, own := s.campaignOf(s.cfg.Raft.View())
	effects, err := s.leader.Reconfigure(s.cfg.Clock.Now(), c, own)
	if err != nil {
		s.renew()
		return
	}
	s.cfg.Logger.Info("going on under a newer configuration", "version", conf.GetVersion(), "before", s.config.GetVersion())
	s.config = conf
	for id := range s.problems {
		if config.VoterIncarnation(conf, id) == 0 {
			delete(s.problems, id)
		}
	}
	s.perform(effects)
	s.kick()
}

// Deposed ends a term.
func (s *Shell) Deposed(term uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term <= term {
		s.end()
	}
}

// end forgets the term. s.mu is held.
func (s *Shell) end() {
	if s.cancel != nil {
		s.cancel()
	}
	s.forget()
	s.term, s.ctx, s.cancel = 0, nil, nil
}

// forget gives the proposer up: what its questions bring from now on is
// nobody's. s.mu is held.
func (s *Shell) forget() {
	if s.dismiss != nil {
		s.dismiss()
	}
	s.leader, s.asking, s.dismiss = nil, nil, nil
}

// renew makes the term's proposer anew, once all commands of the present one
// have come to an end. Its head leases are given up. s.mu is held.
func (s *Shell) renew() {
	s.restarts++
	if s.leader != nil {
		for _, st := range s.leader.Explain(s.cfg.Clock.Now()) {
			if st.Held != 0 {
				s.cfg.Heads.Lapsed(st.Partition, st.Held)
			}
		}
	}
	s.forget()
	s.build(s.cfg.Raft.View())
}

// Applied feeds the events of an applied entry, in order, from the FSM
// goroutine.
func (s *Shell) Applied(events []state.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term == 0 {
		return
	}
	for _, e := range events {
		switch e := e.(type) {
		case state.Configured:
			s.reconfigure(e.Configuration)
		case state.EraStopped:
			s.cfg.Logger.Error("this region met another era: it holds and votes no more", "own", config.EraOf(s.config).String(),
				"met", register.EraOf(e.Stop.GetEra()).String(), "by", e.Stop.GetBy())
			s.renew() // gives its head leases up, and begins nothing
		case state.RegisterChanged:
			if s.leader != nil {
				s.perform(s.leader.RegisterChanged(s.cfg.Clock.Now(), e.Partition, e.Record))
			}
		default:
			s.followTransfer(e)
		}
	}
}

// ClockGap ends the term's proposer and begins it anew: after a freeze or a
// clock step nothing that was measured before counts [F19].
func (s *Shell) ClockGap() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leader == nil {
		return
	}
	s.renew()
}

// Explain says what goes on per partition, and how often in this term all that
// was held was given up to begin anew; nil while this server does not lead.
func (s *Shell) Explain() (parts []campaign.Status, restarts uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leader == nil {
		return nil, s.restarts
	}
	return s.leader.Explain(s.cfg.Clock.Now()), s.restarts
}

// Problem is what is wrong with a voter as this region's leader sees it.
type Problem struct {
	Voter, Text string
	// Uncounted: it answers, and its votes do not count [F5].
	Uncounted bool
}

// Problems are the voters that do not answer or are not counted, by id; none
// while this server does not lead.
func (s *Shell) Problems() []Problem {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Problem
	if s.leader == nil {
		return nil
	}
	for _, id := range slices.Sorted(maps.Keys(s.problems)) {
		out = append(out, s.problems[id])
	}
	return out
}

// Run drives the clock until ctx ends, then ends the term and waits for its
// goroutines.
func (s *Shell) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			s.mu.Lock()
			s.closed = true
			s.end()
			s.mu.Unlock()
			s.stop()
			s.work.Wait()
			return nil
		case <-timer.C:
		case <-s.wake:
		}
		timer.Reset(s.tick())
	}
}

// tick does what is due and returns how long nothing is.
func (s *Shell) tick() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leader == nil {
		return s.cfg.Poll
	}
	now := s.cfg.Clock.Now()
	s.look(now)
	for _, spec := range s.config.GetPartitions() {
		for _, region := range spec.GetPrefer() {
			v := s.cfg.Verdict(region)
			s.failback.Suspicion(now, region, v)
			if v != s.verdicts[region] && region != s.self.Name {
				s.verdicts[region] = v
				s.perform(s.leader.Suspicion(now, region, v))
			}
		}
	}
	s.handBack(now)
	s.releaseDrained(now)
	s.perform(s.leader.Tick(now))
	return min(s.cfg.Poll, max(minPause, s.leader.Next().Sub(now)))
}

// look tells the leader when the pulse turns stale or fresh. s.mu is held.
func (s *Shell) look(now instant.Instant) {
	if stale := !s.cfg.Raft.PulseFresh(now); stale != s.stale {
		s.stale = stale
		s.perform(s.leader.PulseStale(now, stale))
	}
}

func (s *Shell) kick() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}
