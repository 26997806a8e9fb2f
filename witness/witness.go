// Package witness is one small process in a third-party zone: a voter of the
// global quorum. It keeps one register per partition on bbolt and no log, no
// lease and no session; package register judges, this package makes durable.
//
// What it guarantees, on a disk that keeps what it has synced:
//   - a promise or an accepted value is on disk before it is answered; one
//     transaction per message serves all its partitions [F38];
//   - after a failed write it answers nothing more and Run returns an error;
//     one that hangs over 1.5 s ends the process [F30];
//   - after a start or a clock gap every accepted value counts as accepted just
//     now [F19 H5];
//   - every answer carries the incarnation of its data, the line of its lives
//     and its count of writes, by which regions see data that went back [F5];
//   - it votes only when configured, and only for members of its cluster under
//     its version; a newer decided configuration is on disk before anything is
//     answered under it, and nothing is answered under an older one [H10];
//   - one that met another era, not below its own, votes no more, also after a
//     restart, until an operator has acted [F16].
//
// Goroutines: Run owns the gRPC server's, the detector's, the clock's watch and
// the follower of the peers;
// all end before it returns.
package witness

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/headlease/headlease/detector"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/internal/policy"
	"github.com/headlease/headlease/internal/rungroup"
	"github.com/headlease/headlease/internal/telemetry"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// exitDiskHangs is the exit code of the watchdog.
	exitDiskHangs = 3
	// maxCalls bounds the calls of one connection that wait for the voter's turn.
	maxCalls = 256
	// stopTimeout is how long calls under way may last when the witness stops.
	stopTimeout = 2 * time.Second
)

// Peer is another configured process of the cluster.
type Peer struct {
	Name string
	Role pki.Role
	// Region is set for region servers.
	Region string
	// Gossip is host:port.
	Gossip string
}

// Config of a witness.
type Config struct {
	// Cluster and Name of this witness, as in the cluster file.
	Cluster, Name string
	// DataDir is this witness's alone; made if it does not exist.
	DataDir string
	// Votes and Gossip are host:port to listen on.
	Votes, Gossip string
	// Metrics is HOST:PORT or "unix:PATH" to serve metrics and health on; empty:
	// nowhere.
	Metrics string
	// Registry of the process's metrics; nil: the witness makes one.
	Registry *prometheus.Registry
	// Peers are all other region servers and witnesses.
	Peers []Peer
	// Follow calls its argument with each new list of peers until ctx ends (the
	// cluster file changed); nil: they never change.
	Follow func(ctx context.Context, changed func([]Peer)) error
	// D is the head lease's length.
	D time.Duration
	// Credentials with the gossip key; nil only with Insecure.
	Credentials *pki.Credentials
	// Insecure is plain text on loopback, for development.
	Insecure bool
	// Faults is set for a process started for drills; then an admin may set
	// more of them.
	Faults *fault.Table
	// Clock is the lease clock; faults of the table are applied to it here.
	Clock clock.Clock
	// Version of the build, for DescribeVoter.
	Version string
	// Logger defaults to slog.Default.
	Logger *slog.Logger
	// Exit ends the process when its disk hangs; os.Exit if nil.
	Exit func(code int)
}

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Registry == nil {
		c.Registry = telemetry.NewRegistry(c.Version)
	}
	if c.Exit == nil {
		c.Exit = os.Exit
	}
	return c
}

func (c Config) identity() link.Identity {
	return link.Identity{Cluster: c.Cluster, Role: pki.RoleWitness, Name: c.Name}
}

func (c Config) links() link.Config {
	return link.Config{Identity: c.identity(), Credentials: c.Credentials, Insecure: c.Insecure, Faults: c.Faults, Logger: c.Logger}
}

// Validate reports all faults at once.
func (c Config) Validate() error {
	c = c.withDefaults()
	errs := []error{c.links().Validate()}
	if c.DataDir == "" {
		errs = append(errs, errors.New("data_dir: is empty; name a directory for this witness alone"))
	}
	if c.Votes == "" {
		errs = append(errs, errors.New("votes: is empty; give host:port to listen on"))
	}
	if c.Gossip == "" {
		errs = append(errs, errors.New("gossip: is empty; give host:port to listen on"))
	}
	if c.Clock == nil {
		errs = append(errs, errors.New("clock: is missing"))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("witness: %w", err)
	}
	return nil
}

// Witness is a witness that listens and has its data open.
type Witness struct {
	cfg      Config
	links    *link.Links
	listener net.Listener
	gossip   *link.GossipTransport
	detector *detector.Detector
	voter    *voter
	server   *grpc.Server
	health   *health.Server
	metrics  *telemetry.Server // nil: not served
	broken   chan error
	peers    atomic.Pointer[[]Peer]
	// clusterID is the configured one; nil before.
	clusterID atomic.Pointer[string]
}

// New checks everything that can be checked, in an order that changes nothing
// on disk unless all else is well: configuration, addresses, then the data.
// Run, or Close, must follow.
func New(cfg Config) (w *Witness, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	w = &Witness{cfg: cfg.withDefaults(), broken: make(chan error, 1)}
	w.peers.Store(&w.cfg.Peers)
	w.cfg.Clock = clock.WithFaults(w.cfg.Clock, w.cfg.Faults)
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close())
			w = nil
		}
	}()
	if w.links, err = link.New(w.cfg.links()); err != nil {
		return w, fmt.Errorf("witness: %w", err)
	}
	listener, err := w.links.Listen(link.PlaneVotes, w.cfg.Votes)
	if err != nil {
		return w, fmt.Errorf("witness: %w", err)
	}
	w.listener = listener
	if w.cfg.Metrics != "" {
		w.metrics, err = telemetry.Listen(context.Background(), telemetry.ServerConfig{
			Address: w.cfg.Metrics, Gatherer: w.cfg.Registry, Ready: w.ready, Logger: w.cfg.Logger,
		})
		if err != nil {
			return w, fmt.Errorf("witness: %w", err)
		}
	}
	if w.gossip, err = w.links.GossipTransport(link.GossipConfig{Listen: w.cfg.Gossip, Resolve: w.resolve}); err != nil {
		return w, fmt.Errorf("witness: %w", err)
	}
	w.voter = &voter{
		id: "witness/" + w.cfg.Name, name: w.cfg.Name, cluster: w.cfg.Cluster, version: w.cfg.Version,
		clock: w.cfg.Clock, logger: w.cfg.Logger, exit: w.cfg.Exit,
		metrics: newMetrics(w.cfg.Registry),
		failed: func(err error) {
			select {
			case w.broken <- err:
			default:
			}
		},
		configured: w.follow,
	}
	if err = w.makeDetector(); err != nil {
		return w, fmt.Errorf("witness: %w", err)
	}
	w.voter.suspects = w.detector
	if err = w.makeServer(); err != nil {
		return w, fmt.Errorf("witness: %w", err)
	}
	store, got, err := openStore(storeConfig{dir: w.cfg.DataDir, name: w.cfg.Name, cluster: w.cfg.Cluster, disk: w.cfg.Faults})
	if err != nil {
		return w, fmt.Errorf("witness: %w", err)
	}
	w.voter.load(store, got)
	return w, nil
}

// resolve tells whom a gossip name or address means.
func (w *Witness) resolve(name, address string) (link.Peer, bool) {
	for _, p := range *w.peers.Load() {
		if p.Name == name || (name == "" && p.Gossip == address) {
			return link.Peer{Name: p.Name, Region: p.Region, Role: p.Role, Address: p.Gossip}, true
		}
	}
	return link.Peer{}, false
}

func (w *Witness) makeDetector() error {
	c := detector.Config{
		Name: w.cfg.Name, Cluster: w.cfg.Cluster, Insecure: w.cfg.Insecure,
		Transport: w.gossip, D: w.cfg.D, Clock: w.cfg.Clock, Registerer: w.cfg.Registry, Logger: w.cfg.Logger,
		// Not from the voter: its turn may be held by a slow disk, and
		// heartbeats must not wait for that.
		ClusterID: func() string {
			if id := w.clusterID.Load(); id != nil {
				return *id
			}
			return ""
		},
	}
	if w.cfg.Credentials != nil {
		c.Key = w.cfg.Credentials.GossipKey
	}
	c.Peers = toDetector(w.cfg.Peers)
	var err error
	w.detector, err = detector.New(c)
	return err
}

func toDetector(peers []Peer) []detector.Peer {
	out := make([]detector.Peer, len(peers))
	for i, p := range peers {
		out[i] = detector.Peer{Name: p.Name, Region: p.Region, Gossip: p.Gossip}
	}
	return out
}

// followPeers takes new peers as they come.
func (w *Witness) followPeers(ctx context.Context) error {
	if w.cfg.Follow == nil {
		<-ctx.Done()
		return nil
	}
	return w.cfg.Follow(ctx, func(peers []Peer) {
		if err := w.detector.SetPeers(toDetector(peers)); err != nil {
			w.cfg.Logger.Error("new peers refused; those before stay", "error", err)
			return
		}
		w.peers.Store(&peers)
		w.cfg.Logger.Info("peers changed", "peers", len(peers))
	})
}

// follow makes the detector go by the configuration in force.
func (w *Witness) follow(c *pb.ClusterConfiguration) {
	id := c.GetClusterId()
	w.clusterID.Store(&id)
	if err := w.detector.SetD(time.Duration(c.GetDNs())); err != nil {
		w.cfg.Logger.Warn("the configuration's D is unusable for the failure detector; the one of the cluster file stays", "error", err)
	}
}

func (w *Witness) makeServer() error {
	rules := &policy.Enforcer{Table: policyTable(), Identify: policy.ByConnection}
	options := append(w.links.ServerOptions(link.PlaneVotes), rules.ServerOptions()...)
	w.server = grpc.NewServer(append(options, grpc.MaxConcurrentStreams(maxCalls))...)
	w.health = health.NewServer()
	w.health.SetServingStatus(pb.VoteService_ServiceDesc.ServiceName, healthpb.HealthCheckResponse_SERVING)
	votes := &service{voter: w.voter, caller: link.PeerIdentity}
	pb.RegisterVoteServiceServer(w.server, votes)
	pb.RegisterConfigServiceServer(w.server, votes)
	healthpb.RegisterHealthServer(w.server, w.health)
	if w.cfg.Faults != nil {
		fault.Register(w.server, fault.ServiceConfig{Table: w.cfg.Faults, Authorize: link.RequireAdmin, Logger: w.cfg.Logger})
	}
	return rules.Check(w.server)
}

// ready: configured. A witness depends on nobody else, and a failed disk ends
// it.
func (w *Witness) ready(context.Context) error {
	if w.clusterID.Load() == nil {
		return errors.New("this witness has no configuration; run `headlease init`")
	}
	if why := w.voter.stopped.Load(); why != nil {
		return *why
	}
	return nil
}

// MetricsAddr is where metrics and health are served; nil: nowhere.
func (w *Witness) MetricsAddr() net.Addr {
	if w.metrics == nil {
		return nil
	}
	return w.metrics.Addr()
}

// VotesAddr is where the VoteService listens.
func (w *Witness) VotesAddr() net.Addr { return w.listener.Addr() }

// GossipAddr is where gossip is received, on TCP and UDP.
func (w *Witness) GossipAddr() net.Addr { return w.gossip.Addr() }

// Run serves until ctx ends, which is no error, or until the disk fails. It
// closes the witness.
func (w *Witness) Run(ctx context.Context) error {
	w.cfg.Logger.Info("witness runs", "name", w.cfg.Name, "cluster", w.cfg.Cluster, "votes", w.VotesAddr().String(),
		"gossip", w.GossipAddr().String(), "configured", w.clusterID.Load() != nil)
	err := rungroup.Run(ctx,
		rungroup.Task{Name: "metrics", Run: func(stop context.Context) error { return w.metrics.Run(ctx, stop) }},
		rungroup.Task{Name: "disk", Run: w.awaitFailure},
		rungroup.Task{Name: "clock", Run: w.watchClock},
		rungroup.Task{Name: "peers", Run: w.followPeers},
		rungroup.Task{Name: "detector", Run: w.detector.Run},
		rungroup.Task{Name: "votes", Run: w.serve},
	)
	return errors.Join(err, w.Close())
}

// watchClock: nothing that was measured across a clock gap counts [F19].
func (w *Witness) watchClock(ctx context.Context) error {
	return clock.Watch(ctx, clock.WatchConfig{Clock: w.cfg.Clock, Wall: clock.WallWithFaults(w.cfg.Faults), Restarted: func(reason string) {
		w.cfg.Logger.Warn("clock gap: this process was paused or a clock jumped; every head lease counts as accepted just now", "reason", reason)
		w.detector.Resume(w.cfg.Clock.Now())
		w.voter.Restart()
	}})
}

func (w *Witness) awaitFailure(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-w.broken:
		return err
	}
}

func (w *Witness) serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, w.health.Shutdown)
	defer stop()
	if err := link.ServeGRPC(ctx, w.server, w.listener, stopTimeout); err != nil {
		return fmt.Errorf("serve votes: %w", err)
	}
	return nil
}

// Close releases what New opened; after Run it does nothing.
func (w *Witness) Close() error {
	var errs []error
	if w.server != nil {
		w.server.Stop()
	}
	if w.metrics != nil {
		errs = append(errs, w.metrics.Close())
	}
	if w.gossip != nil {
		errs = append(errs, w.gossip.Shutdown())
	}
	if w.listener != nil {
		if err := w.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	if w.links != nil {
		errs = append(errs, w.links.Close())
	}
	if w.voter != nil && w.voter.store != nil {
		errs = append(errs, w.voter.store.close())
		w.voter.store = nil
	}
	return errors.Join(errs...)
}
