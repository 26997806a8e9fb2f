package region

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"

	"github.com/headlease/headlease/internal/callstream"
	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/policy"
	"github.com/headlease/headlease/internal/telemetry/grpcmetrics"
	"github.com/headlease/headlease/internal/telemetry/tracing"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/api"
	"github.com/headlease/headlease/region/mux"
)

// What one connection may take of the memory, besides its windows.
const (
	// A follower passes the calls of all its clients on over one connection.
	maxCallsPerConn = 16_384
	maxHeaders      = 16 << 10
)

func limits() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxConcurrentStreams(maxCallsPerConn),
		grpc.MaxHeaderListSize(maxHeaders),
	}
}

func (s *Server) makeServers() error {
	identify := api.Identify(s.process.Region, policy.ByConnection)
	s.health = health.NewServer()
	rules := &policy.Enforcer{Table: api.Policy(), Identify: identify}
	recovered, recoveredStream := api.Recover(s.callDied)
	counted, countedStream := grpcmetrics.Interceptors(s.cfg.Registry)
	admit := &api.Admission{Control: s.control, Identify: identify, Refused: s.metrics.refusedCall}
	// The calls of a stream pass the same interceptors, each by itself. A server
	// that makes traces takes calls one by one: a span is made where gRPC begins.
	server := func(plane link.Plane) *grpc.Server {
		forward := &api.Forwarder{
			Leader: s.leader, Uninitialised: s.uninitialised, Failed: s.replica.Failed,
			Conn: func(server string) (*grpc.ClientConn, error) {
				s.metrics.forwarded[plane].Inc()
				return s.peers.conn(plane, server)
			},
			Identify: identify, Local: api.Local(),
		}
		s.forwards = append(s.forwards, forward)
		traced := tracing.ServerOptions(s.cfg.Traces)
		if plane == link.PlaneVotes {
			traced = nil // nobody's request, and dozens a second
		}
		// From the outside in: a refused call is counted, and costs no more.
		g := grpc.NewServer(slices.Concat(
			s.links.ServerOptions(plane), limits(), traced,
			[]grpc.ServerOption{
				grpc.ChainUnaryInterceptor(recovered, counted),
				grpc.ChainStreamInterceptor(recoveredStream, countedStream),
			},
			rules.ServerOptions(),
			[]grpc.ServerOption{
				grpc.ChainUnaryInterceptor(admit.Unary, forward.Unary),
				grpc.ChainStreamInterceptor(admit.Stream, forward.Stream),
			})...)
		healthpb.RegisterHealthServer(g, s.health)
		if plane == link.PlaneAPI && s.cfg.Traces == nil {
			s.carried = &callstream.Server{Interceptors: []grpc.UnaryServerInterceptor{recovered, counted, rules.Unary, admit.Unary, forward.Unary}}
			pb.RegisterCallServiceServer(g, s.carried)
		}
		return g
	}
	s.api, s.votes = server(link.PlaneAPI), server(link.PlaneVotes)
	raft := s.raft()
	sessions := &api.Sessions{Region: s.process.Region, Raft: raft, Edge: s.edge, Identify: identify, Uninitialised: s.uninitialised}
	pb.RegisterSessionServiceServer(s.api, sessions)
	leases := &api.Leases{Region: s.process.Region, Raft: raft, Lessor: s.lessor, Clock: s.cfg.Clock, Identify: identify, Addresses: s.peers.addresses}
	pb.RegisterLeaseServiceServer(s.api, leases)
	if s.carried != nil {
		pb.RegisterSessionServiceServer(s.carried, sessions)
		pb.RegisterLeaseServiceServer(s.carried, leases)
	}
	pb.RegisterWatchServiceServer(s.api, &api.Watches{Region: s.process.Region, Raft: s.replica, Hub: s.watches, Leases: leases})
	pb.RegisterClusterServiceServer(s.api, &api.Cluster{
		Region: s.process.Region, Server: s.process.Name, Version: s.cfg.Version,
		Replica: s.replica, Campaign: s.campaign, Drains: s.lessor, Detector: s.detector, Clock: s.cfg.Clock,
	})
	pb.RegisterPartitionServiceServer(s.api, &api.Partitions{
		Region: s.process.Region, Raft: raft, Leases: leases, Heads: s.lessor, Releases: s.campaign,
		Verdict: s.verdict, Identify: identify, Logger: s.cfg.Logger,
	})
	s.group = s.makeGroup()
	pb.RegisterMemberServiceServer(s.api, &api.Members{Group: s.group, Identify: identify})
	pb.RegisterBackupServiceServer(s.api, api.NewBackups(api.Backups{
		Cluster: s.cfg.File.Cluster, Region: s.process.Region, Server: s.process.Name, Version: s.cfg.Version, Raft: s.replica,
	}))
	pb.RegisterAuditServiceServer(s.api, &api.Audits{Log: s.audit})
	reflection.RegisterV1(s.api)
	if s.cfg.Drills {
		fault.Register(s.api, fault.ServiceConfig{Table: s.cfg.Faults, Authorize: link.RequireAdmin, Logger: s.cfg.Logger})
	}
	pb.RegisterVoteServiceServer(s.votes, &api.Votes{
		Voter: s.voter, Raft: s.replica, Clock: s.cfg.Clock, Detector: s.detector, Identify: identify, Version: s.cfg.Version, Met: s.metEra,
	})
	pb.RegisterConfigServiceServer(s.votes, &api.Configs{Voter: s.voter, Raft: s.replica})
	pb.RegisterPeerServiceServer(s.votes, s.replica.PeerServer())
	pb.RegisterMuxServiceServer(s.votes, &mux.Server{Region: s.process.Region, Shell: s.lessor, Prove: api.Prove(s.replica), Identify: identify})
	return errors.Join(rules.Check(s.api), rules.Check(s.votes))
}

// uninitialised returns this server's name until it belongs to a group.
func (s *Server) uninitialised() string {
	if s.replica.Initialised() {
		return ""
	}
	return s.process.Name
}

// callDied is told of a panic in a call's handler; the first one ends the server.
func (s *Server) callDied(err error) {
	select {
	case s.died <- err:
	default:
	}
}

// watchCalls fails when a call's handler has panicked.
func (s *Server) watchCalls(ctx context.Context) error {
	select {
	case err := <-s.died:
		return err
	case <-ctx.Done():
		return nil
	}
}
