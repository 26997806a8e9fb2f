package api

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/vote"
)

// Reports is what the failure detector shows.
type Reports interface {
	Reports() []*pb.PeerReport
	RoundTrips() []*pb.RoundTrip
}

// Votes is the VoteService of a region on its leader: it checks what a message
// may say, the voter judges it.
type Votes struct {
	pb.UnimplementedVoteServiceServer
	Voter    *vote.Voter
	Raft     Raft
	Clock    clock.Clock
	Detector Reports
	Identify func(context.Context) (policy.Caller, bool)
	// Met is told that somebody is in another era that ends this region's part in
	// its own; it must not block.
	Met     func(era register.Era, by string)
	Version string
}

// refuse turns what refuses a vote into an error of the API, and passes on
// another era that it shows.
func (s *Votes) refuse(ctx context.Context, err error) error {
	var era *config.EraError
	if errors.As(err, &era) && era.Stops() {
		by := ""
		if caller, ok := s.Identify(ctx); ok {
			by = caller.Name
		}
		s.Met(era.Theirs, by)
	}
	return voteError(err)
}

// Prepare promises, or refuses and says why, per partition.
func (s *Votes) Prepare(ctx context.Context, req *pb.PrepareRequest) (*pb.PrepareResponse, error) {
	if err := s.check(ctx, req.GetHeader(), config.CheckPrepare(req)); err != nil {
		return nil, err
	}
	res, err := s.Voter.Prepare(ctx, req)
	return res, s.refuse(ctx, err)
}

// Accept takes values, or refuses and says why, per partition.
func (s *Votes) Accept(ctx context.Context, req *pb.AcceptRequest) (*pb.AcceptResponse, error) {
	if err := s.check(ctx, req.GetHeader(), config.CheckAccept(req)); err != nil {
		return nil, err
	}
	res, err := s.Voter.Accept(ctx, req)
	return res, s.refuse(ctx, err)
}

// DescribeVoter tells what this region is as a voter.
func (s *Votes) DescribeVoter(context.Context, *pb.DescribeVoterRequest) (*pb.DescribeVoterResponse, error) {
	regs, err := s.Voter.Registers()
	if err != nil {
		return nil, voteError(err)
	}
	view := s.Raft.View()
	now := s.Clock.Now()
	out := &pb.DescribeVoterResponse{
		State: s.Voter.State(&pb.VoteHeader{}), Configuration: view.Configuration(), Version: s.Version,
		Peers: s.Detector.Reports(), RoundTrips: s.Detector.RoundTrips(), EraStop: view.EraStop(),
	}
	if r := view.ConfigRegister(); r != (config.Register{}) {
		out.ConfigRegister = r.Proto()
	}
	for _, p := range view.Configuration().GetPartitions() {
		r := regs[p.GetName()]
		out.Registers = append(out.Registers, &pb.RegisterStatus{
			Partition: p.GetName(), Register: r.Record.Proto(), RemainingNs: int64(r.Remaining(now)),
		})
	}
	return out, nil
}

// Configure commits a decided configuration: the first one, or a newer one.
func (s *Votes) Configure(ctx context.Context, req *pb.ConfigureRequest) (*pb.ConfigureResponse, error) {
	if req.GetConfiguration() == nil {
		return nil, invalid("configuration", "is missing; send a decided configuration")
	}
	if err := config.Check(req.GetConfiguration()); err != nil {
		return nil, invalid("configuration", "%v", err)
	}
	// Here too, since a state machine of feature level 1 does not ask whether it
	// is a member: data that was made anew must not take the old one's place.
	known := config.Voter{Decided: s.Raft.View().Configuration(), Stop: s.Raft.View().EraStop()}
	if _, _, err := known.Learn(s.Voter.State(nil).GetVoter(), req.GetConfiguration()); err != nil {
		return nil, s.refuse(ctx, err)
	}
	res, err := s.Raft.Propose(ctx, &pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: req.GetConfiguration()}}})
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	return &pb.ConfigureResponse{
		Already: res.GetConfigure().GetAlready(), Voter: s.Voter.State(nil).GetVoter(), Version: s.Raft.View().Configuration().GetVersion(),
	}, nil
}

// check lets a region vote for itself only; the header is the voter's to check.
func (s *Votes) check(ctx context.Context, h *pb.VoteHeader, shape error) error {
	caller, ok := s.Identify(ctx)
	if !ok || h.GetCandidate() == "" || regionOf(caller) != h.GetCandidate() {
		return status.Errorf(codes.PermissionDenied, "header.candidate: %q is not the region of %s; a region proposes itself only", h.GetCandidate(), caller.Name)
	}
	return voteError(shape)
}

// voteError turns what refuses a vote into an error of the API.
func voteError(err error) error {
	var (
		other     *config.OtherClusterError
		version   *config.VersionError
		field     *config.FieldError
		candidate *config.CandidateError
		join      *config.JoinError
		conflict  *config.ConflictError
		era       *config.EraError
		stopped   *config.StoppedError
	)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, vote.ErrNotLeading):
		return notLeader("")
	case errors.Is(err, config.ErrUninitialised):
		return uninitialised("of this region")
	case errors.As(err, &other):
		return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_OtherCluster{OtherCluster: &pb.OtherCluster{ClusterId: other.Own}}})
	case errors.As(err, &version):
		return versionError(version)
	case errors.As(err, &era):
		return eraError(err, era.Proto())
	case errors.As(err, &stopped):
		return eraError(err, stopped.Proto())
	case errors.As(err, &field):
		return invalid(field.Field, "%s", field.Remedy)
	case errors.As(err, &candidate), errors.As(err, &join), errors.As(err, &conflict):
		return status.Error(codes.FailedPrecondition, err.Error())
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return resultError(nil, err)
	}
	return status.Error(codes.Unavailable, err.Error())
}
