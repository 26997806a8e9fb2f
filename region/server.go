package region

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"

	"github.com/headlease/headlease/detector"
	"github.com/headlease/headlease/fence/cache"
	campaignrun "github.com/headlease/headlease/global/campaign/run"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/callstream"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/rungroup"
	"github.com/headlease/headlease/internal/telemetry"
	"github.com/headlease/headlease/internal/telemetry/tracing"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/admission"
	"github.com/headlease/headlease/region/api"
	"github.com/headlease/headlease/region/audit"
	"github.com/headlease/headlease/region/divergence"
	lessorrun "github.com/headlease/headlease/region/lessor/run"
	"github.com/headlease/headlease/region/mux"
	"github.com/headlease/headlease/region/replica"
	"github.com/headlease/headlease/region/vote"
	"github.com/headlease/headlease/region/watch"
)

// stopGrace is how long calls under way may last when the server stops.
const stopGrace = 500 * time.Millisecond

// Server is a region server that listens and has its data open.
type Server struct {
	cfg     Config
	process clusterfile.Process

	links    *link.Links
	peers    *peers
	remote   *campaignrun.Voters
	apiLn    net.Listener
	votesLn  net.Listener
	gossip   *link.GossipTransport
	raftLn   *link.RaftLayer[raft.ServerAddress]
	detector *detector.Detector
	replica  *replica.Replica
	voter    *vote.Voter
	lessor   *lessorrun.Shell
	edge     *mux.Edge
	forwards []*api.Forwarder // of each plane
	campaign *campaignrun.Shell
	watches  *watch.Hub
	audit    *audit.Log
	cache    *cache.Mirror // nil: the region has none
	api      *grpc.Server
	votes    *grpc.Server
	// carried serves the calls of streams; nil: they come alone.
	carried *callstream.Server
	health  *health.Server
	metrics *metrics
	shown   *telemetry.Server // nil: not served
	ready   *readiness
	control *admission.Control
	group   *api.Group
	// plan is what force-quorum left in the data; nil: nothing. met are other eras
	// to stop for; told has the voters declared destroyed that were found running,
	// and is followEras' own.
	plan *pb.EraPlan
	met  chan *pb.EraStop
	told map[string]bool
	// died gets the first panic of a call's handler, which ends the server.
	died chan error
}

// New checks everything that can be checked, in an order that changes nothing
// on disk unless all else is well: configuration, addresses, then the data.
// Run, or Close, must follow.
func New(ctx context.Context, cfg Config) (s *Server, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s = &Server{cfg: cfg.withDefaults(), died: make(chan error, 1), met: make(chan *pb.EraStop, 1), told: map[string]bool{}}
	s.process, _ = cfg.File.Process(cfg.Name)
	s.metrics = newMetrics(s.cfg.Registry)
	s.audit = audit.New(audit.Config{Dir: cfg.DataDir, Region: s.process.Region, Server: s.process.Name, Logger: s.cfg.Logger})
	limits := cfg.File.Limits
	if s.control, err = admission.New(admission.Limits{InFlight: int(limits.InFlight), Rate: float64(limits.Rate), Burst: int(limits.Burst)}); err != nil {
		return nil, fmt.Errorf("region server %s: %w", cfg.Name, err)
	}
	s.cfg.Clock = clock.WithFaults(s.cfg.Clock, s.cfg.Faults)
	defer func() {
		if err != nil {
			err = fmt.Errorf("region server %s: %w", cfg.Name, errors.Join(err, s.Close()))
			s = nil
		}
	}()
	if err := s.listen(); err != nil {
		return s, err
	}
	if err := s.show(ctx); err != nil {
		return s, err
	}
	if err := s.makeDetector(); err != nil {
		return s, err
	}
	if err := s.openReplica(ctx); err != nil {
		return s, err
	}
	if s.plan, err = replica.Plan(cfg.DataDir); err != nil {
		return s, err
	}
	s.makeShells()
	s.audit.Begin(s.replica.View())
	if err := s.makeCache(); err != nil {
		return s, err
	}
	s.cfg.Registry.MustRegister(collector{s})
	s.ready = s.readiness()
	return s, s.makeServers()
}

func (s *Server) listen() (err error) {
	if s.links, err = link.New(s.cfg.links(s.process)); err != nil {
		return err
	}
	s.peers = newPeers(s.links, s.cfg.File, s.process.Region, tracing.DialOptions(s.cfg.Traces))
	s.peers.missed = s.cfg.Files.Poke
	s.remote = campaignrun.NewVoters(s.links, s.peers.voters())
	if s.apiLn, err = s.links.Listen(link.PlaneAPI, s.process.API); err != nil {
		return err
	}
	if s.votesLn, err = s.links.Listen(link.PlaneVotes, s.process.Votes); err != nil {
		return err
	}
	s.raftLn, err = link.NewRaftLayer(s.links, link.RaftConfig[raft.ServerAddress]{
		Listen: s.process.Raft, Advertise: s.process.Name,
		Resolve: func(a raft.ServerAddress) (link.Peer, error) { return s.peers.raft(string(a)) },
	})
	if err != nil {
		return err
	}
	s.gossip, err = s.links.GossipTransport(link.GossipConfig{Listen: s.process.Gossip, Resolve: s.peers.gossip})
	return err
}

// show takes the address of metrics and health, if the cluster file has one.
func (s *Server) show(ctx context.Context) (err error) {
	if s.process.Metrics == "" {
		return nil
	}
	s.shown, err = telemetry.Listen(ctx, telemetry.ServerConfig{
		Address: s.process.Metrics, Gatherer: s.cfg.Registry, Logger: s.cfg.Logger,
		Ready: func(ctx context.Context) error { return s.ready.check(ctx) },
	})
	return err
}

func (s *Server) makeDetector() (err error) {
	c := detector.Config{
		Name: s.process.Name, Region: s.process.Region, Cluster: s.cfg.File.Cluster, Insecure: s.cfg.Insecure,
		Transport: s.gossip, D: s.cfg.File.D, Clock: s.cfg.Clock, Registerer: s.cfg.Registry, Logger: s.cfg.Logger,
		ClusterID: func() string { return s.replica.View().Configuration().GetClusterId() },
		Heard: func(process string) {
			s.remote.Heard(process)
			s.peers.heard(process)
		},
	}
	if s.cfg.Credentials != nil {
		c.Key = s.cfg.Credentials.GossipKey
	}
	c.Peers = detectorPeers(s.cfg.File, s.process.Name)
	s.detector, err = detector.New(c)
	if err == nil {
		s.detector.SetBeat(s.beat)
	}
	return err
}

// beat is this region's heartbeat, while this server leads and the disks of a
// quorum move; otherwise silence, which means "the region cannot decide".
func (s *Server) beat() (*pb.Heartbeat, bool) {
	term, ok := s.replica.Leading()
	if !ok || !s.replica.PulseFresh(s.cfg.Clock.Now()) {
		return nil, false
	}
	view := s.replica.View()
	return &pb.Heartbeat{
		Region: s.process.Region, Server: s.process.Name, Term: term, Pulse: view.PulseIndex(),
		ClusterId: view.Configuration().GetClusterId(),
	}, true
}

func (s *Server) openReplica(ctx context.Context) error {
	timing, err := replica.ParseTiming(string(s.cfg.File.Timing))
	if err != nil {
		return err
	}
	s.replica, err = replica.Open(ctx, replica.Config{
		Name: s.process.Name, Cluster: s.cfg.File.Cluster, Region: s.process.Region, DataDir: s.cfg.DataDir,
		Stream: s.raftLn, Timing: timing, Clock: s.cfg.Clock, Observer: s, Terms: s.peers, Progress: s.peers,
		Pulsed:       func() { s.campaign.Wake() },
		FeatureLevel: s.cfg.MaxLevel,
		Disk:         s.cfg.Faults, Registerer: s.cfg.Registry, Logger: s.cfg.Logger, Exit: s.cfg.Exit,
	})
	if err == nil && s.cfg.Join {
		err = s.replica.Join()
	}
	return err
}

// verdict is the detector's hint on a region; of the own one it is not asked.
func (s *Server) verdict(region string) register.Verdict { return s.detector.Suspicion(region).Verdict }

// detectorHint is the detector as the voter's V3 sees it.
type detectorHint func(region string) register.Verdict

// Verdict of a region.
func (f detectorHint) Verdict(region string) register.Verdict { return f(region) }

// neverApplied reports whether a proposal's error means that the command
// surely did not and will not take effect.
func neverApplied(err error) bool {
	return errors.Is(err, replica.ErrNotLeader) || errors.Is(err, replica.ErrOverloaded) || errors.Is(err, replica.ErrUninitialised)
}

func (s *Server) makeShells() {
	s.voter = vote.New(vote.Config{
		Region: s.process.Region, Raft: s.replica, Detector: detectorHint(s.verdict),
		Clock: s.cfg.Clock, Registerer: s.cfg.Registry, Logger: s.cfg.Logger, NeverApplied: neverApplied,
	})
	s.watches = watch.New(watch.Config{
		State:      func() watch.State { return watch.Of(s.process.Region, s.replica.View()) },
		Registerer: s.cfg.Registry, Logger: s.cfg.Logger,
	})
	s.lessor = lessorrun.New(lessorrun.Config{
		Raft: s.replica, Clock: s.cfg.Clock, Registerer: s.cfg.Registry, Logger: s.cfg.Logger,
		Drained: func() { s.campaign.Wake() },
	})
	s.edge = mux.NewEdge(mux.Config{
		Server: s.process.Name, Leader: s.leader, Shell: s.lessor, Conn: s.peers.mux, Prove: api.Prove(s.replica),
		Registerer: s.cfg.Registry, Logger: s.cfg.Logger,
	})
	s.campaign = campaignrun.New(campaignrun.Config{
		Region: s.process.Region, Own: s.voter, Remote: newVoters(s.cfg.Registry, s.remote, slices.Sorted(maps.Keys(s.peers.voters()))),
		Raft: campaignRaft{s.replica, s.metrics.campaigns}, Heads: heads{s.lessor, s.metrics},
		Verdict: s.verdict, Drained: s.lessor.Drained, Grace: s.lessor.Grace, Clock: s.cfg.Clock, Rho: Rho, Registerer: s.cfg.Registry, Logger: s.cfg.Logger,
		Rand: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), NeverApplied: neverApplied,
	})
}

// leader is the region's leader as this server knows it, and whether it is
// this one and ready.
func (s *Server) leader() (name string, ready bool) {
	if _, ok := s.replica.Leading(); ok {
		return s.process.Name, true
	}
	name, _, self := s.replica.Leader()
	if self {
		return "", false // elected, and not ready yet
	}
	return name, false
}

// Run serves until ctx ends, which is no error, or until a part fails. It
// closes the server.
func (s *Server) Run(ctx context.Context) error {
	s.cfg.Logger.Info("region server runs", "name", s.process.Name, "region", s.process.Region, "cluster", s.cfg.File.Cluster,
		"api", s.apiLn.Addr().String(), "votes", s.votesLn.Addr().String(), "initialised", s.replica.Initialised())
	err := rungroup.Run(ctx,
		rungroup.Task{Name: "metrics", Run: func(stop context.Context) error { return s.shown.Run(ctx, stop) }},
		rungroup.Task{Name: "clock", Run: func(ctx context.Context) error {
			return clock.Watch(ctx, clock.WatchConfig{Clock: s.cfg.Clock, Wall: clock.WallWithFaults(s.cfg.Faults), Restarted: s.clockGap})
		}},
		rungroup.Task{Name: "calls", Run: s.watchCalls},
		rungroup.Task{Name: "cluster file", Run: s.followFile},
		rungroup.Task{Name: "join", Run: s.join},
		rungroup.Task{Name: "begin era", Run: s.beginEra},
		rungroup.Task{Name: "eras", Run: s.followEras},
		rungroup.Task{Name: "feature level", Run: s.group.RaiseLevels},
		rungroup.Task{Name: "detector", Run: s.detector.Run},
		rungroup.Task{Name: "state hash", Run: (&divergence.Teller{Raft: s.replica, Logger: s.cfg.Logger}).Run},
		rungroup.Task{Name: "audit", Run: s.audit.Run},
		rungroup.Task{Name: "lessor", Run: s.lessor.Run},
		rungroup.Task{Name: "watches", Run: s.watches.Run},
		rungroup.Task{Name: "lease cache", Run: s.runCache},
		rungroup.Task{Name: "votes", Run: func(ctx context.Context) error { return link.ServeGRPC(ctx, s.votes, s.votesLn, stopGrace) }},
		rungroup.Task{Name: "api", Run: func(ctx context.Context) error { return link.ServeGRPC(ctx, s.api, s.apiLn, stopGrace) }},
		rungroup.Task{Name: "client streams", Run: s.edge.Run}, // ended before the API waits for its calls
		rungroup.Task{Name: "campaign", Run: s.campaign.Run},
		rungroup.Task{Name: "replica", Run: s.replica.Run},
		rungroup.Task{Name: "faults", Run: func(ctx context.Context) error {
			<-ctx.Done()
			s.cfg.Faults.Close() // first of all: a stop must not wait for bytes that a fault holds back
			return nil
		}},
	)
	return errors.Join(err, s.Close())
}

// Close releases what New opened; after Run it does nothing more.
func (s *Server) Close() error {
	var errs []error
	add := func(err error) {
		if err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	for _, g := range []*grpc.Server{s.api, s.votes} {
		if g != nil {
			g.Stop()
		}
	}
	for _, ln := range []net.Listener{s.apiLn, s.votesLn} {
		if ln != nil {
			add(ln.Close())
		}
	}
	if s.replica != nil {
		add(s.replica.Close())
	} else if s.raftLn != nil {
		add(s.raftLn.Close())
	}
	if s.cache != nil {
		add(s.cache.Close())
	}
	if s.shown != nil {
		add(s.shown.Close())
	}
	if s.gossip != nil {
		add(s.gossip.Shutdown())
	}
	if s.remote != nil {
		add(s.remote.Close())
	}
	if s.peers != nil {
		add(s.peers.close())
	}
	if s.links != nil {
		add(s.links.Close())
	}
	return errors.Join(errs...)
}
