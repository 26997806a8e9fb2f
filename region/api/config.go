package api

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/vote"
)

// Configs is the ConfigService of a region on its leader: each answer rests on
// a commit of the region's group.
type Configs struct {
	pb.UnimplementedConfigServiceServer
	Voter *vote.Voter
	Raft  Raft
}

// PrepareConfig promises a ballot for the next configuration.
func (s *Configs) PrepareConfig(ctx context.Context, req *pb.PrepareConfigRequest) (*pb.PrepareConfigResponse, error) {
	res, err := s.vote(ctx, req.GetClusterId(), register.EraOf(req.GetEra()), req.GetVersion(), &pb.Command{Kind: &pb.Command_ConfigPromise{ConfigPromise: &pb.ConfigPromiseCommand{
		ClusterId: req.GetClusterId(), Era: req.GetEra(), Version: req.GetVersion(), Ballot: req.GetBallot(),
	}}})
	if err != nil {
		return nil, err
	}
	return &pb.PrepareConfigResponse{Voter: s.Voter.State(nil).GetVoter(), Promised: res.GetDone(), Register: res.GetRegister()}, nil
}

// AcceptConfig takes a proposal for the next configuration.
func (s *Configs) AcceptConfig(ctx context.Context, req *pb.AcceptConfigRequest) (*pb.AcceptConfigResponse, error) {
	conf := s.Raft.View().Configuration()
	if err := config.CheckVersion(conf, req.GetClusterId(), register.EraOf(req.GetEra()), req.GetVersion()); err != nil {
		return nil, voteError(err)
	}
	if err := config.CheckChange(conf, req.GetProposed()); err != nil {
		return nil, invalid("proposed", "%v", err)
	}
	res, err := s.vote(ctx, req.GetClusterId(), register.EraOf(req.GetEra()), req.GetVersion(), &pb.Command{Kind: &pb.Command_ConfigAccept{ConfigAccept: &pb.ConfigAcceptCommand{
		ClusterId: req.GetClusterId(), Era: req.GetEra(), Version: req.GetVersion(), Ballot: req.GetBallot(), Proposed: req.GetProposed(),
	}}})
	if err != nil {
		return nil, err
	}
	return &pb.AcceptConfigResponse{Voter: s.Voter.State(nil).GetVoter(), Accepted: res.GetDone(), Register: res.GetRegister()}, nil
}

// PrepareAgain promises a ballot for values that stay as they are.
func (s *Configs) PrepareAgain(ctx context.Context, req *pb.PrepareAgainRequest) (*pb.PrepareAgainResponse, error) {
	if err := config.CheckPrepareAgain(req); err != nil {
		return nil, voteError(err)
	}
	res, err := s.Voter.PrepareAgain(ctx, req)
	return res, voteError(err)
}

// AcceptAgain takes values that were proposed before.
func (s *Configs) AcceptAgain(ctx context.Context, req *pb.AcceptAgainRequest) (*pb.AcceptAgainResponse, error) {
	if err := config.CheckAcceptAgain(req); err != nil {
		return nil, voteError(err)
	}
	res, err := s.Voter.AcceptAgain(ctx, req)
	return res, voteError(err)
}

// vote commits a step of the configuration's register. A refusal for its
// version comes with the newer configuration.
func (s *Configs) vote(ctx context.Context, clusterID string, era register.Era, version uint64, cmd *pb.Command) (*pb.ConfigVoteResult, error) {
	res, err := s.Raft.Propose(ctx, cmd)
	if err == nil && res.GetError().GetOtherCluster() != nil {
		if err := config.CheckVersion(s.Raft.View().Configuration(), clusterID, era, version); err != nil {
			return nil, voteError(err)
		}
	}
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	return res.GetConfigVote(), nil
}

// versionError refuses a message of another version of the configuration.
func versionError(e *config.VersionError) error {
	st, err := status.New(codes.FailedPrecondition, e.Error()).WithDetails(
		&pb.ErrorDetail{Kind: &pb.ErrorDetail_OtherCluster{OtherCluster: &pb.OtherCluster{Version: e.Own}}}, e.Proto())
	if err != nil {
		return status.Error(codes.FailedPrecondition, e.Error())
	}
	return st.Err()
}

// eraError refuses a message of another era, or by a voter that has met one.
func eraError(err error, detail *pb.EraMismatch) error {
	st, e := status.New(codes.FailedPrecondition, err.Error()).WithDetails(detail)
	if e != nil {
		return status.Error(codes.FailedPrecondition, err.Error())
	}
	return st.Err()
}
