package fault

import (
	"context"
	"log/slog"
	"math"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// ServiceConfig of a Service.
type ServiceConfig struct {
	// Table is the process's; it must not be nil.
	Table *Table
	// Authorize refuses, with a gRPC status, who is no admin.
	Authorize func(context.Context) error
	// Logger; default slog.Default().
	Logger *slog.Logger
}

// Service is FaultService over a table. Register it only in a process started
// with --drills.
type Service struct {
	pb.UnimplementedFaultServiceServer
	cfg ServiceConfig
}

// Register adds the service to a gRPC server. It panics without a table or an
// Authorize: that would be a process whose faults anyone may set.
func Register(server grpc.ServiceRegistrar, c ServiceConfig) {
	if c.Table == nil || c.Authorize == nil {
		panic("fault: service needs a table and who may change it")
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	pb.RegisterFaultServiceServer(server, &Service{cfg: c})
}

// SetFaults sets all faults of the request, or none.
func (s *Service) SetFaults(ctx context.Context, req *pb.SetFaultsRequest) (*pb.SetFaultsResponse, error) {
	if err := s.cfg.Authorize(ctx); err != nil {
		return nil, err
	}
	rules := FromProto(req)
	if err := rules.Validate(); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if err := s.cfg.Table.Set(rules); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	s.cfg.Logger.Warn("drill faults set", "ids", rules.ids())
	return &pb.SetFaultsResponse{}, nil
}

// ClearFaults ends the named faults, or all that were set.
func (s *Service) ClearFaults(ctx context.Context, req *pb.ClearFaultsRequest) (*pb.ClearFaultsResponse, error) {
	if err := s.cfg.Authorize(ctx); err != nil {
		return nil, err
	}
	s.cfg.Table.Clear(req.GetIds()...)
	s.cfg.Logger.Warn("drill faults cleared", "ids", req.GetIds())
	return &pb.ClearFaultsResponse{}, nil
}

// ListFaults lists what is in force, the start-up table included.
func (s *Service) ListFaults(ctx context.Context, _ *pb.ListFaultsRequest) (*pb.ListFaultsResponse, error) {
	if err := s.cfg.Authorize(ctx); err != nil {
		return nil, err
	}
	return ToProto(s.cfg.Table.Rules()), nil
}

// FromProto reads rules as they are on the wire; Validate judges them.
func FromProto(req *pb.SetFaultsRequest) Rules {
	var out Rules
	for _, f := range req.GetFaults() {
		plane := Plane(math.MaxUint8) // unknown, for Validate to refuse
		if p, ok := planes[f.GetPlane()]; ok {
			plane = p
		}
		out.Links = append(out.Links, LinkRule{
			ID:      f.GetId(),
			Peer:    f.GetPeer(),
			Plane:   plane,
			Link:    Link{Drop: f.GetDrop(), Delay: ms(f.GetDelayMs()), Jitter: ms(f.GetJitterMs()), Loss: f.GetLoss()},
			Expires: ms(f.GetExpiresMs()),
		})
	}
	for _, f := range req.GetDiskFaults() {
		out.Disks = append(out.Disks, DiskRule{
			ID: f.GetId(), Store: f.GetStore(), Stall: f.GetStall(), Delay: ms(f.GetDelayMs()),
			Error: f.GetError(), Full: f.GetFull(), Expires: ms(f.GetExpiresMs()),
		})
	}
	for _, f := range req.GetClockFaults() {
		out.Clocks = append(out.Clocks, ClockRule{
			ID: f.GetId(), Step: ms(f.GetStepMs()), Rate: f.GetRate(), WallStep: ms(f.GetWallStepMs()), Expires: ms(f.GetExpiresMs()),
		})
	}
	return out
}

// ToProto writes rules as they are listed on the wire.
func ToProto(r Rules) *pb.ListFaultsResponse {
	out := &pb.ListFaultsResponse{}
	for _, l := range r.Links {
		f := &pb.Fault{
			Id: l.ID, Peer: l.Peer, Drop: l.Drop, DelayMs: l.Delay.Milliseconds(), JitterMs: l.Jitter.Milliseconds(),
			Loss: l.Loss, ExpiresMs: left(l.Expires),
		}
		for wire, plane := range planes {
			if plane == l.Plane {
				f.Plane = wire
			}
		}
		out.Faults = append(out.Faults, f)
	}
	for _, d := range r.Disks {
		out.DiskFaults = append(out.DiskFaults, &pb.DiskFault{
			Id: d.ID, Store: d.Store, Stall: d.Stall, DelayMs: d.Delay.Milliseconds(),
			Error: d.Error, Full: d.Full, ExpiresMs: left(d.Expires),
		})
	}
	for _, c := range r.Clocks {
		out.ClockFaults = append(out.ClockFaults, &pb.ClockFault{
			Id: c.ID, StepMs: c.Step.Milliseconds(), Rate: c.Rate, WallStepMs: c.WallStep.Milliseconds(), ExpiresMs: left(c.Expires),
		})
	}
	return out
}

var planes = map[pb.Plane]Plane{
	pb.Plane_PLANE_UNSPECIFIED: PlaneAll,
	pb.Plane_PLANE_API:         PlaneAPI,
	pb.Plane_PLANE_VOTES:       PlaneVotes,
	pb.Plane_PLANE_RAFT:        PlaneRaft,
	pb.Plane_PLANE_GOSSIP:      PlaneGossip,
}

// ms keeps absurd numbers absurd instead of letting them overflow.
func ms(n int64) time.Duration {
	const most = math.MaxInt64 / int64(time.Millisecond)
	return time.Duration(min(max(n, -most), most)) * time.Millisecond
}

// left rounds up, since 0 on the wire means for ever.
func left(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}
