package api

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/global/campaign"
	campaignrun "github.com/headlease/headlease/global/campaign/run"
	"github.com/headlease/headlease/internal/clock"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
	"github.com/headlease/headlease/region/replica"
	"github.com/headlease/headlease/region/state"
)

// Campaign is what the campaign's shell shows.
type Campaign interface {
	Explain() (parts []campaign.Status, restarts uint64)
	Problems() []campaignrun.Problem
	Releasing(partition string) bool
}

// Drains is what the lessor's shell tells of drains.
type Drains interface {
	Drain(partition string) (lessor.Draining, bool)
}

// Cluster is the ClusterService of a server.
type Cluster struct {
	pb.UnimplementedClusterServiceServer
	Region, Server string
	Version        string
	Replica        *replica.Replica
	Campaign       Campaign
	Drains         Drains
	Detector       Reports
	Clock          clock.Clock
}

// DescribeServer tells what this server is; it answers before init too.
func (s *Cluster) DescribeServer(context.Context, *pb.DescribeServerRequest) (*pb.DescribeServerResponse, error) {
	view := s.Replica.View()
	leader, term, _ := s.Replica.Leader()
	_, leads := s.Replica.Leading()
	return &pb.DescribeServerResponse{
		Name: s.Server, Region: s.Region, RaftId: s.Replica.RaftID(), Initialised: s.Replica.Initialised(), Version: s.Version,
		Incarnation: uint64(view.Incarnation()), Configuration: view.Configuration(),
		Leader: leader, IsLeader: leads, Term: term, AppliedIndex: view.AppliedIndex(),
	}, nil
}

// InitRegion makes the region's Raft group of the listed servers and waits
// until the region's incarnation is committed, by whichever of them leads.
func (s *Cluster) InitRegion(ctx context.Context, req *pb.InitRegionRequest) (*pb.InitRegionResponse, error) {
	if req.GetRegion() != s.Region {
		return nil, invalid("region", "this is a server of region %s, not of %q; check the addresses in cluster.yaml", s.Region, req.GetRegion())
	}
	already := s.Replica.View().Initialised()
	servers := make([]replica.Server, 0, len(req.GetServers()))
	for _, srv := range req.GetServers() {
		servers = append(servers, replica.Server{Name: srv.GetName(), RaftID: srv.GetRaftId(), Voter: true})
	}
	if err := s.Replica.Bootstrap(servers); errors.Is(err, replica.ErrStarting) {
		return nil, status.Error(codes.Unavailable, err.Error())
	} else if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		if view := s.Replica.View(); view.Initialised() {
			return &pb.InitRegionResponse{Incarnation: uint64(view.Incarnation()), Already: already}, nil
		}
		if _, leads := s.Replica.Leading(); leads {
			res, err := s.Replica.Propose(ctx, &pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{
				Region: s.Region, Incarnation: randomIncarnation(),
			}}})
			if err == nil && res.GetError() != nil {
				return nil, fail(res.GetError())
			}
		}
		select {
		case <-ctx.Done():
			return nil, status.Errorf(codes.DeadlineExceeded, "region %s has elected no leader in time; check that its servers reach each other's raft addresses, then run init again", s.Region)
		case <-ticker.C:
		}
	}
}

func randomIncarnation() uint64 {
	var b [8]byte
	for {
		_, _ = rand.Read(b[:]) // never fails
		if n := binary.LittleEndian.Uint64(b[:]); n != 0 {
			return n
		}
	}
}

// Status is the leader's view of its region and of the others.
func (s *Cluster) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	view := s.Replica.View()
	leader, term, _ := s.Replica.Leader()
	n := view.Counts()
	var problems []*pb.VoterProblem
	for _, p := range s.Campaign.Problems() {
		problems = append(problems, &pb.VoterProblem{Voter: p.Voter, Problem: p.Text, Uncounted: p.Uncounted})
	}
	parts, restarts := s.partitions(view)
	return &pb.StatusResponse{
		VoterProblems: problems, CampaignRestarts: restarts,
		Region: s.Region, Server: s.Server, Leader: leader, Term: term, AppliedIndex: view.AppliedIndex(),
		Incarnation: uint64(view.Incarnation()), Configuration: view.Configuration(), Partitions: parts,
		Peers: s.Detector.Reports(), RoundTrips: s.Detector.RoundTrips(),
		Sessions: uint64(n.Sessions), Leases: uint64(n.Leases), Waiters: uint64(n.Waiters), Version: s.Version,
		FeatureLevel: view.Level(), EraStop: view.EraStop(),
	}, nil
}

// ListPartitions is the leader's view of the partitions and dedicated shards.
func (s *Cluster) ListPartitions(context.Context, *pb.ListPartitionsRequest) (*pb.ListPartitionsResponse, error) {
	view := s.Replica.View()
	parts, _ := s.partitions(view)
	conf := view.Configuration()
	return &pb.ListPartitionsResponse{
		Partitions: parts, ConfigurationVersion: conf.GetVersion(), Shards: conf.GetShards(), Exceptions: conf.GetExceptions(),
	}, nil
}

// partitions are what the region does about each, and the restarts of its
// campaign when it said so.
func (s *Cluster) partitions(view state.View) (out []*pb.PartitionStatus, restarts uint64) {
	now := s.Clock.Now()
	doing := map[string]campaign.Status{}
	said, restarts := s.Campaign.Explain()
	for _, st := range said {
		doing[st.Partition] = st
	}
	for _, spec := range view.Configuration().GetPartitions() {
		p, _ := view.Partition(spec.GetName())
		ps := &pb.PartitionStatus{
			Name: p.Name, Phase: p.Phase, Register: p.Register.Proto(), Seq: uint32(p.Seq),
			Prefer: spec.GetPrefer(), Shards: spec.GetShards(), Activity: doing[p.Name].Text,
		}
		if p.Live() {
			ps.Epoch = uint32(p.Epoch)
		}
		if st := doing[p.Name]; st.Held != 0 {
			ps.HeldNs = max(0, int64(st.HeldUntil.Sub(now)))
		}
		if d, ok := s.Drains.Drain(p.Name); ok {
			ps.Transfer = &pb.TransferStatus{
				Successor: d.Successor, Stage: s.stage(p.Name, d), Leases: uint64(d.Leases), LockDelays: uint64(d.Delays), LeftNs: int64(d.Left),
			}
		}
		out = append(out, ps)
	}
	return out, restarts
}

func (s *Cluster) stage(partition string, d lessor.Draining) pb.TransferStage {
	switch {
	case s.Campaign.Releasing(partition):
		return pb.TransferStage_TRANSFER_STAGE_RELEASING
	case d.Leases > 0 || d.Delays > 0 && d.Left > 0:
		return pb.TransferStage_TRANSFER_STAGE_DRAINING
	}
	return pb.TransferStage_TRANSFER_STAGE_DRAINED
}
