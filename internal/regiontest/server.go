package regiontest

import (
	"context"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/api"
	"github.com/headlease/headlease/region/mux"
)

// Server is one server of a region.
type Server struct {
	region *Region
	name   string
	gate   gate

	mu    sync.Mutex
	grpc  *grpc.Server
	in    *listener
	done  chan struct{}
	peers map[string]*grpc.ClientConn
	// edge has the streams of the server's clients until stop ends it.
	edge *mux.Edge
	stop func()
	// forward is the present one's way to the leader.
	forward *api.Forwarder
}

func newServer(r *Region, name string) *Server {
	return &Server{region: r, name: name, peers: map[string]*grpc.ClientConn{}}
}

// Name of the server.
func (s *Server) Name() string { return s.name }

// Freeze lets nothing pass to or from the server; connections stay open.
func (s *Server) Freeze() { s.gate.set(true) }

// Thaw ends a Freeze: what was held passes now.
func (s *Server) Thaw() { s.gate.set(false) }

// Start makes the server answer, if it does not.
func (s *Server) Start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.grpc != nil {
		return
	}
	r := s.region
	identify := api.Identify(r.cfg.Name, callerOf)
	rules := &policy.Enforcer{Table: api.Policy(), Identify: identify}
	forward := &api.Forwarder{Leader: s.leader, Conn: s.peer, Identify: identify, Local: api.Local()}
	s.forward = forward
	options := append(link.ServerWindows(), rules.ServerOptions()...)
	options = append(options, grpc.ChainUnaryInterceptor(forward.Unary), grpc.ChainStreamInterceptor(forward.Stream))
	s.grpc, s.in, s.done = grpc.NewServer(options...), newListener(), make(chan struct{})
	s.edge = mux.NewEdge(mux.Config{
		Server: s.name, Leader: s.leader, Shell: r.lessor, Conn: s.peer, Prove: api.Prove(r), Logger: r.cfg.Logger,
	})
	s.run(s.edge)
	pb.RegisterSessionServiceServer(s.grpc, &api.Sessions{Region: r.cfg.Name, Raft: r, Edge: s.edge, Identify: identify})
	pb.RegisterMuxServiceServer(s.grpc, &mux.Server{Region: r.cfg.Name, Shell: r.lessor, Prove: api.Prove(r), Identify: identify})
	leases := &api.Leases{
		Region: r.cfg.Name, Raft: r, Lessor: r.lessor, Clock: r.cfg.Clock, Identify: identify, Addresses: func(string) []string { return nil },
	}
	pb.RegisterLeaseServiceServer(s.grpc, leases)
	pb.RegisterWatchServiceServer(s.grpc, &api.Watches{Region: r.cfg.Name, Raft: r, Hub: r.watches, Leases: leases})
	pb.RegisterClusterServiceServer(s.grpc, table{r: r})
	if err := rules.Check(s.grpc); err != nil {
		panic(err)
	}
	go func(g *grpc.Server, in *listener, done chan struct{}) { // ended by Kill
		defer close(done)
		_ = g.Serve(in)
	}(s.grpc, s.in, s.done)
}

// table answers for the dedicated shards alone.
type table struct {
	pb.UnimplementedClusterServiceServer
	r *Region
}

func (t table) ListPartitions(context.Context, *pb.ListPartitionsRequest) (*pb.ListPartitionsResponse, error) {
	c := t.r.View().Configuration()
	return &pb.ListPartitionsResponse{ConfigurationVersion: c.GetVersion(), Shards: c.GetShards(), Exceptions: c.GetExceptions()}, nil
}

// run runs an edge until s.stop, which waits.
func (s *Server) run(e *mux.Edge) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = e.Run(ctx)
	}()
	s.stop = func() {
		cancel()
		<-done
	}
}

// Edge returns the server's client streams; nil while it is killed.
func (s *Server) Edge() *mux.Edge {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.edge
}

// Kill ends the server and its connections.
func (s *Server) Kill() {
	s.mu.Lock()
	g, done, stop := s.grpc, s.done, s.stop
	peers := s.peers
	s.grpc, s.in, s.peers, s.edge = nil, nil, map[string]*grpc.ClientConn{}, nil
	s.mu.Unlock()
	// What follows takes time, and is done without the lock: a method in
	// progress may want it.
	for _, c := range peers {
		_ = c.Close()
	}
	if g != nil {
		g.Stop()
		<-done
		stop()
	}
}

// ledBy tells it who begins to lead.
func (s *Server) ledBy(server string) {
	s.mu.Lock()
	forward := s.forward
	s.mu.Unlock()
	if forward != nil {
		forward.LedBy(server)
	}
}

func (s *Server) incoming() *listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.in
}

// leader is the region's, as all its servers know it.
func (s *Server) leader() (name string, ready bool) {
	r := s.region
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leader < 0 {
		return "", false
	}
	l := r.servers[r.leader]
	return l.name, l == s
}

func (s *Server) peer(name string) (*grpc.ClientConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.grpc == nil { // a call that outlived it; nobody would close the connection
		return nil, errRefused
	}
	if c := s.peers[name]; c != nil {
		return c, nil
	}
	l := s.region.network.ServerLinks(s.region.cfg.Name, s.name)
	c, err := l.DialGRPC(link.PlaneAPI, link.Peer{Address: name})
	if err == nil {
		s.peers[name] = c
	}
	return c, err
}

// callerOf reads who calls from the connection's address.
func callerOf(ctx context.Context) (policy.Caller, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return policy.Caller{}, false
	}
	name := p.Addr.String()
	role := policy.Client
	if strings.HasPrefix(name, "region/") {
		role = policy.Region
	}
	return policy.Caller{Role: role, Name: name}, true
}
