package witness

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// voteBytes holds a vote on some thousand partitions.
const voteBytes = 1 << 20

// policyTable is who may do what at a witness.
func policyTable() policy.Table {
	servers := []policy.Role{policy.Region, policy.Witness, policy.Admin}
	return policy.Table{
		pb.VoteService_Prepare_FullMethodName:       {Deadline: 5 * time.Second, MaxRequestBytes: voteBytes, Roles: []policy.Role{policy.Region}},
		pb.VoteService_Accept_FullMethodName:        {Deadline: 5 * time.Second, MaxRequestBytes: voteBytes, Roles: []policy.Role{policy.Region}},
		pb.VoteService_DescribeVoter_FullMethodName: {Deadline: 5 * time.Second, MaxRequestBytes: 1 << 10, Roles: servers},
		pb.VoteService_Configure_FullMethodName:     {Deadline: 10 * time.Second, MaxRequestBytes: voteBytes, Roles: []policy.Role{policy.Region, policy.Admin}},

		pb.ConfigService_PrepareConfig_FullMethodName: {Deadline: 5 * time.Second, MaxRequestBytes: 4 << 10, Roles: []policy.Role{policy.Admin}},
		pb.ConfigService_AcceptConfig_FullMethodName:  {Deadline: 5 * time.Second, MaxRequestBytes: voteBytes, Roles: []policy.Role{policy.Admin}},
		pb.ConfigService_PrepareAgain_FullMethodName:  {Deadline: 5 * time.Second, MaxRequestBytes: voteBytes, Roles: []policy.Role{policy.Admin}},
		pb.ConfigService_AcceptAgain_FullMethodName:   {Deadline: 5 * time.Second, MaxRequestBytes: voteBytes, Roles: []policy.Role{policy.Admin}},

		"/grpc.health.v1.Health/Check": {Deadline: 5 * time.Second, MaxRequestBytes: 1 << 10, Roles: servers},
		"/grpc.health.v1.Health/List":  {Deadline: 5 * time.Second, MaxRequestBytes: 1 << 10, Roles: servers},
		"/grpc.health.v1.Health/Watch": {Deadline: policy.NoDeadline, MaxRequestBytes: 1 << 10, Roles: servers},

		pb.FaultService_SetFaults_FullMethodName:   {Deadline: 5 * time.Second, MaxRequestBytes: 64 << 10, Roles: []policy.Role{policy.Admin}},
		pb.FaultService_ClearFaults_FullMethodName: {Deadline: 5 * time.Second, MaxRequestBytes: 64 << 10, Roles: []policy.Role{policy.Admin}},
		pb.FaultService_ListFaults_FullMethodName:  {Deadline: 5 * time.Second, MaxRequestBytes: 1 << 10, Roles: []policy.Role{policy.Admin}},
	}
}

// service is the VoteService and the ConfigService of a witness: it checks what
// a message may say, the voter judges it.
type service struct {
	pb.UnimplementedVoteServiceServer
	pb.UnimplementedConfigServiceServer
	voter *voter
	// caller is the proven identity of the other end.
	caller func(context.Context) (link.Identity, bool)
}

// Prepare promises, or refuses and says why, per partition.
func (s *service) Prepare(ctx context.Context, req *pb.PrepareRequest) (*pb.PrepareResponse, error) {
	if err := s.checkCandidate(ctx, req.GetHeader()); err != nil {
		return nil, err
	}
	if err := config.CheckPrepare(req); err != nil {
		return nil, refusalOf(err)
	}
	return s.voter.prepare(ctx, req)
}

// Accept takes values, or refuses and says why, per partition.
func (s *service) Accept(ctx context.Context, req *pb.AcceptRequest) (*pb.AcceptResponse, error) {
	if err := s.checkCandidate(ctx, req.GetHeader()); err != nil {
		return nil, err
	}
	if err := config.CheckAccept(req); err != nil {
		return nil, refusalOf(err)
	}
	return s.voter.accept(ctx, req)
}

// DescribeVoter tells what this witness is and knows.
func (s *service) DescribeVoter(ctx context.Context, _ *pb.DescribeVoterRequest) (*pb.DescribeVoterResponse, error) {
	return s.voter.describe(ctx)
}

// Configure gives the witness a decided configuration.
func (s *service) Configure(ctx context.Context, req *pb.ConfigureRequest) (*pb.ConfigureResponse, error) {
	if req.GetConfiguration() == nil {
		return nil, invalid("configuration", "is missing; send a decided configuration")
	}
	by := ""
	if id, ok := s.caller(ctx); ok {
		by = id.Path()
	}
	return s.voter.configure(ctx, req.GetConfiguration(), by)
}

// PrepareConfig promises a ballot for the next configuration.
func (s *service) PrepareConfig(ctx context.Context, req *pb.PrepareConfigRequest) (*pb.PrepareConfigResponse, error) {
	return s.voter.prepareConfig(ctx, req)
}

// AcceptConfig takes a proposal for the next configuration.
func (s *service) AcceptConfig(ctx context.Context, req *pb.AcceptConfigRequest) (*pb.AcceptConfigResponse, error) {
	return s.voter.acceptConfig(ctx, req)
}

// PrepareAgain promises a ballot for values that stay as they are.
func (s *service) PrepareAgain(ctx context.Context, req *pb.PrepareAgainRequest) (*pb.PrepareAgainResponse, error) {
	if err := config.CheckPrepareAgain(req); err != nil {
		return nil, refusalOf(err)
	}
	return s.voter.prepareAgain(ctx, req)
}

// AcceptAgain takes values that were proposed before.
func (s *service) AcceptAgain(ctx context.Context, req *pb.AcceptAgainRequest) (*pb.AcceptAgainResponse, error) {
	if err := config.CheckAcceptAgain(req); err != nil {
		return nil, refusalOf(err)
	}
	return s.voter.acceptAgain(ctx, req)
}

// checkCandidate lets a region vote for itself only.
func (s *service) checkCandidate(ctx context.Context, h *pb.VoteHeader) error {
	id, ok := s.caller(ctx)
	if !ok {
		return refusal(codes.Unauthenticated, nil, "the caller has no identity; connect with a certificate of this cluster")
	}
	if h.GetCandidate() == "" || h.GetCandidate() != id.Region {
		return refusal(codes.PermissionDenied, nil, "header.candidate: %q is not the region of %s; a region proposes itself only", h.GetCandidate(), id.Path())
	}
	return nil
}
