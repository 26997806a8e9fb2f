package histories

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	campaignrun "github.com/headlease/headlease/global/campaign/run"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/history"
	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/api"
	lessorrun "github.com/headlease/headlease/region/lessor/run"
	"github.com/headlease/headlease/region/mux"
	"github.com/headlease/headlease/region/replica"
	"github.com/headlease/headlease/region/state"
	"github.com/headlease/headlease/region/vote"
)

const regionName = "eu"

var errKilled = errors.New("killed")

// server is one machine of the region: its disk's content and its clock stay
// while processes come and go.
type server struct {
	w     *world
	name  string
	dir   string
	clock *machineClock

	mu      sync.Mutex
	process *process // nil: down
	stopped int      // by faults, several of which may want it down
	kills   int
}

// process is one life of a server.
type process struct {
	s        *server
	disk     *disk
	replica  *replica.Replica
	seam     *seam
	lessor   *lessorrun.Shell
	voter    *vote.Voter
	campaign *campaignrun.Shell
	edge     *mux.Edge
	grpc     *grpc.Server
	api      *listener
	cancel   context.CancelFunc
	ended    chan struct{}
	// dead: killed, and its goroutines are yet to end. What they do to the disk and
	// say of it has not happened.
	dead atomic.Bool

	mu    sync.Mutex
	conns map[string]*grpc.ClientConn // nil: ended
}

func (s *server) running() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process
}

// open opens the data and listens; run follows.
func (s *server) open() *process {
	p := &process{s: s, disk: &disk{}, ended: make(chan struct{}), conns: map[string]*grpc.ClientConn{}}
	w := s.w
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("HISTORIES_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("server", s.name)
	}
	r, err := replica.Open(context.Background(), replica.Config{
		Name: s.name, Cluster: "histories", Region: regionName, DataDir: s.dir, Stream: w.net.listen(s.name, "raft"),
		Timing: replica.TimingLAN(), Clock: s.clock, Observer: p, Terms: terms{w, s.name}, Disk: p.disk, Logger: log,
		Exit: func(error) {
			w.counts.add("watchdog ended a process")
			w.work.Go(func() { s.bounce(time.Second) })
		},
		SnapshotInterval: 500 * time.Millisecond, SnapshotThreshold: 100, TrailingLogs: 50,
		StoreFirst: w.seed%2 == 0,
	})
	if err != nil {
		panic(fmt.Sprintf("open %s: %v", s.name, err))
	}
	p.replica = r
	p.seam = &seam{Replica: r, rng: rand.New(rand.NewPCG(w.seed, uint64(s.name[len(s.name)-1])))}
	p.voter = vote.New(vote.Config{Region: regionName, Raft: p.seam, Detector: healthy{}, Clock: s.clock, Logger: log, NeverApplied: neverApplied})
	p.lessor = lessorrun.New(lessorrun.Config{Raft: p.seam, Clock: s.clock, Logger: log})
	p.campaign = campaignrun.New(campaignrun.Config{
		Region: regionName, Own: p.voter, Remote: nobody{}, Raft: p.seam, Heads: p.lessor,
		Verdict: func(string) register.Verdict { return register.VerdictHealthy }, Clock: s.clock, Rho: rho, Logger: log,
		Rand: rand.New(rand.NewPCG(w.seed, 77)), NeverApplied: neverApplied,
	})
	p.serve(log)
	s.mu.Lock()
	s.process = p
	s.mu.Unlock()
	return p
}

func (p *process) serve(log *slog.Logger) {
	identify := api.Identify(regionName, callerOf)
	rules := &policy.Enforcer{Table: api.Policy(), Identify: identify}
	forward := &api.Forwarder{Leader: p.leader, Conn: p.conn, Identify: identify, Local: api.Local()}
	options := append(rules.ServerOptions(), grpc.ChainUnaryInterceptor(forward.Unary), grpc.ChainStreamInterceptor(forward.Stream))
	p.grpc = grpc.NewServer(options...)
	prove := api.Prove(p.seam)
	p.edge = mux.NewEdge(mux.Config{Server: p.s.name, Leader: p.leader, Shell: p.lessor, Conn: p.conn, Prove: prove, Logger: log})
	pb.RegisterSessionServiceServer(p.grpc, &api.Sessions{Region: regionName, Raft: p.seam, Edge: p.edge, Identify: identify})
	pb.RegisterMuxServiceServer(p.grpc, &mux.Server{Region: regionName, Shell: p.lessor, Prove: prove, Identify: identify})
	pb.RegisterLeaseServiceServer(p.grpc, &api.Leases{
		Region: regionName, Raft: p.seam, Lessor: p.lessor, Clock: p.s.clock, Identify: identify, Addresses: func(string) []string { return nil },
	})
	p.api = p.s.w.net.listen(p.s.name, "api")
}

// run runs the process's parts until it is killed or fails.
func (p *process) run() {
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	var parts sync.WaitGroup
	parts.Go(func() { _ = p.lessor.Run(ctx) })
	parts.Go(func() { _ = p.campaign.Run(ctx) })
	parts.Go(func() { _ = p.edge.Run(ctx) })
	parts.Go(func() { _ = p.grpc.Serve(p.api) })
	parts.Go(func() {
		_ = clock.Watch(ctx, clock.WatchConfig{Clock: p.s.clock, Wall: p.s.clock.wall, Restarted: func(string) {
			p.s.w.counts.add("clock gap seen by a server")
			p.campaign.ClockGap()
			p.voter.ClockGap()
			p.lessor.ClockGap()
		}})
	})
	go func() {
		defer close(p.ended)
		err := p.replica.Run(ctx)
		if err != nil {
			p.s.w.failed(fmt.Errorf("%s: %w", p.s.name, err))
		}
		cancel()
		p.grpc.Stop()
		p.mu.Lock()
		conns := p.conns
		p.conns = nil
		p.mu.Unlock()
		for _, c := range conns {
			_ = c.Close()
		}
		parts.Wait()
	}()
}

// kill ends the process as kill -9 does, as far as anybody else and the disk
// can see, and waits until its goroutines are gone. They end in order, and write
// what they have begun to: so the next one is given what was on the disk before.
func (s *server) kill() {
	s.mu.Lock()
	p := s.process
	s.process = nil
	s.mu.Unlock()
	if p == nil {
		return
	}
	p.s.w.net.pause(s.name, true) // nothing that it still says is heard
	p.s.w.net.kill(s.name)
	if !s.w.closing.Load() {
		p.disk.stall(true)
		s.w.still()
		if p.disk.writesThatWait() > 0 {
			s.w.counts.add("killed before something was written")
		}
		p.dead.Store(true)
		s.kills++
		old, kept := s.dir, fmt.Sprintf("%s.%d", dataDir(filepath.Dir(s.dir), s.name), s.kills)
		if err := os.CopyFS(kept, os.DirFS(old)); err != nil {
			s.w.failed(err)
		}
		s.dir = kept
		defer func() { _ = os.RemoveAll(old) }()
	}
	p.disk.release()
	p.cancel()
	<-p.ended
	p.s.w.net.kill(s.name)
	p.s.w.net.pause(s.name, false)
	p.s.w.counts.addN("writes that waited for a stalled disk", p.disk.writesThatWaited())
}

// bounce kills the server and starts it again after a while, unless another
// fault wants it down for longer.
func (s *server) bounce(down time.Duration) {
	s.mu.Lock()
	s.stopped++
	s.mu.Unlock()
	s.kill()
	time.Sleep(down) // virtual
	s.mu.Lock()
	s.stopped--
	again := s.stopped == 0 && s.process == nil && !s.w.closing.Load()
	s.mu.Unlock()
	if again {
		s.open().run()
		s.w.counts.add("server killed and started again")
	}
}

// leader is what forwarding asks for.
func (p *process) leader() (name string, ready bool) {
	if _, ok := p.replica.Leading(); ok {
		return p.s.name, true
	}
	name, _, self := p.replica.Leader()
	if self {
		return "", false
	}
	return name, false
}

// propose is what the process's own operator does.
func (p *process) propose(ctx context.Context, c *pb.Command) (*pb.CommandResult, error) {
	res, err := p.replica.Propose(ctx, c)
	if p.dead.Load() {
		return nil, errKilled // in between, and what it says is worth nothing
	}
	return res, err
}

func (p *process) conn(to string) (*grpc.ClientConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns == nil {
		return nil, errRefused
	}
	if c := p.conns[to]; c != nil {
		return c, nil
	}
	c, err := dialGRPC(p.s.w.net, p.s.name, to)
	if err == nil {
		p.conns[to] = c
	}
	return c, err
}

// dialGRPC connects two places of the fabric.
func dialGRPC(f *fabric, from, to string, extra ...grpc.DialOption) (*grpc.ClientConn, error) {
	options := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDisableServiceConfig(), grpc.WithIdleTimeout(0),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return f.dial(ctx, from, to, "api") }),
	}, extra...)
	return grpc.NewClient("passthrough:///"+to, options...)
}

// callerOf reads who calls from the connection's address.
func callerOf(ctx context.Context) (policy.Caller, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return policy.Caller{}, false
	}
	name := p.Addr.String()
	if strings.HasPrefix(name, regionName+"-") {
		return policy.Caller{Role: policy.Region, Name: "region/" + regionName + "/" + name}, true
	}
	return policy.Caller{Role: policy.Client, Name: name}, true
}

// Applied, Restored and Deposed are the replica's observer, as in package
// region.
func (p *process) Applied(index, _ uint64, events []state.Event) {
	if !p.dead.Load() {
		p.s.w.recorder.Applied(index, facts(events))
	}
	for _, e := range events {
		switch e := e.(type) {
		case state.TermBegun:
			if !p.dead.Load() {
				p.s.w.begun(e.Term, e.Server)
			}
			p.edge.LeaderChanged()
			if e.Server == p.s.name && p.replica.Begins(e.Term) {
				view := p.replica.View()
				p.configured(view.Configuration())
				p.voter.Begin(e.Term, view)
				p.lessor.Begin(e.Term, view)
				p.campaign.Begin(e.Term, view)
				return
			}
		case state.Configured:
			p.configured(e.Configuration)
		}
	}
	p.voter.Applied(events)
	p.lessor.Applied(events)
	p.campaign.Applied(events)
}

// facts are what an applied entry did to locks.
func facts(events []state.Event) []history.Fact {
	var out []history.Fact
	for _, e := range events {
		switch e := e.(type) {
		case state.TermBegun:
			out = append(out, history.Fact{Kind: history.TermBegun})
		case state.LeaseGranted:
			out = append(out, history.Fact{
				Kind: history.Granted, Session: e.Session, Request: e.Request, Resource: e.Resource, Token: uint64(e.Token), Offered: e.Offered,
			})
		case state.LeaseRevoked:
			out = append(out, history.Fact{Kind: history.Revoked, Session: e.Session, Resource: e.Resource, Token: uint64(e.Token)})
		case state.LeaseEnded:
			reason := history.ByOther
			switch e.Reason {
			case state.EndReleased:
				reason = history.ByRelease
			case state.EndRevoked:
				reason = history.ByRevocation
			case state.EndExpired, state.EndClosed:
				reason = history.BySession
			}
			out = append(out, history.Fact{Kind: history.Ended, Session: e.Session, Resource: e.Resource, Token: uint64(e.Token), Reason: reason})
		case state.WaiterEnqueued:
			out = append(out, history.Fact{Kind: history.Queued, Session: e.Session, Request: e.Request, Resource: e.Resource})
		case state.WaiterEnded:
			out = append(out, history.Fact{Kind: history.LeftQueue, Session: e.Session, Request: e.Request, Resource: e.Resource})
		case state.SessionClosed:
			reason := history.ByClose
			if e.Reason == state.EndExpired {
				reason = history.ByExpiry
			}
			out = append(out, history.Fact{Kind: history.SessionClosed, Session: e.ID, Reason: reason})
		case state.DelayBegun:
			out = append(out, history.Fact{
				Kind: history.DelayBegun, Resource: e.Resource, Token: uint64(e.Token), Delay: time.Duration(e.DelayMillis) * time.Millisecond,
			})
		case state.DelayEnded:
			out = append(out, history.Fact{Kind: history.DelayEnded, Resource: e.Resource, Token: uint64(e.Token)})
		case state.PartitionDraining:
			out = append(out, history.Fact{Kind: history.DrainBegun})
		case state.DrainAborted:
			out = append(out, history.Fact{Kind: history.DrainEnded})
		case state.PartitionAdopted:
			if !e.Resumed {
				out = append(out, history.Fact{Kind: history.DrainEnded})
			}
		}
	}
	return out
}

func (p *process) configured(c *pb.ClusterConfiguration) {
	if c != nil {
		p.replica.SetD(time.Duration(c.GetDNs()))
	}
}

func (p *process) Restored() { p.s.w.counts.add("snapshot installed at a follower") }

func (p *process) Deposed(term uint64) {
	p.campaign.Deposed(term)
	p.voter.Deposed(term)
	p.lessor.Deposed(term)
}

type healthy struct{}

func (healthy) Verdict(string) register.Verdict { return register.VerdictHealthy }

// nobody: the region is the only voter.
type nobody struct{}

func (nobody) Voter(string) campaignrun.RemoteVoter { return nil }
func (nobody) RTT(string) time.Duration             { return 0 }

func neverApplied(err error) bool {
	return errors.Is(err, replica.ErrNotLeader) || errors.Is(err, replica.ErrOverloaded) || errors.Is(err, replica.ErrUninitialised)
}

// seam stands between the services and the replica: while lag is set, what
// passes is late, as if the goroutine had not been run.
type seam struct {
	*replica.Replica
	lag    atomic.Int64 // the longest wait
	lagged atomic.Int64 // how many calls waited
	// expiry, if set, is told of the next Expire, which then waits for the other
	// end.
	expiry atomic.Pointer[rendezvous]

	mu  sync.Mutex
	rng *rand.Rand
}

type rendezvous struct{ reached, release chan struct{} }

func (s *seam) wait() {
	longest := s.lag.Load()
	if longest == 0 {
		return
	}
	s.mu.Lock()
	d := time.Duration(s.rng.Int64N(longest))
	if s.rng.IntN(2) == 0 {
		d = 0
	}
	s.mu.Unlock()
	if d > 0 {
		s.lagged.Add(1)
		time.Sleep(d) // virtual
	}
}

func (s *seam) ProposeUrgent(ctx context.Context, c *pb.Command) (*pb.CommandResult, error) {
	if c.GetExpire() != nil || c.GetRevoke() != nil || c.GetEndRevocation() != nil {
		s.wait()
	}
	if r := s.expiry.Load(); r != nil && c.GetExpire() != nil && s.expiry.CompareAndSwap(r, nil) {
		close(r.reached)
		<-r.release
	}
	return s.Replica.ProposeUrgent(ctx, c)
}

func (s *seam) Propose(ctx context.Context, c *pb.Command) (*pb.CommandResult, error) {
	s.wait()
	return s.Replica.Propose(ctx, c)
}

func (s *seam) Check(ctx context.Context) (uint64, error) {
	term, err := s.Replica.Check(ctx)
	s.wait()
	return term, err
}

// terms asks other servers for their terms, for leadership checks.
type terms struct {
	w    *world
	from string
}

func (t terms) AskTerm(ctx context.Context, to string) (*pb.CurrentTermResponse, error) {
	if err := t.w.net.travel(ctx, t.from, to); err != nil {
		return nil, err
	}
	p := t.w.server(to).running()
	if p == nil {
		return nil, errRefused
	}
	resp, err := p.replica.PeerServer().CurrentTerm(ctx, &pb.CurrentTermRequest{})
	if err != nil {
		return nil, err
	}
	return resp, t.w.net.travel(ctx, to, t.from)
}

// dataRoot is a directory in memory, where there is one: that writes are
// durable matters, and how long an fsync takes does not.
func dataRoot(otherwise string) (string, func()) {
	dir, err := os.MkdirTemp("/dev/shm", "histories")
	if err != nil {
		return otherwise, func() {}
	}
	return dir, func() { _ = os.RemoveAll(dir) }
}

func dataDir(root, name string) string { return filepath.Join(root, name) }
