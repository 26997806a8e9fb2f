package api

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/replica"
)

// overloadedRetry is when to ask again after OVERLOADED.
const overloadedRetry = 100 * time.Millisecond

// DetailError is an error of the API: a typed detail, from which code and text
// follow. It is the one way in which services refuse.
type DetailError struct {
	Detail *pb.ErrorDetail
}

func (e *DetailError) Error() string {
	_, text := describe(e.Detail)
	return text
}

// GRPCStatus makes the gRPC runtime send code, text and detail.
func (e *DetailError) GRPCStatus() *status.Status {
	code, text := describe(e.Detail)
	st, err := status.New(code, text).WithDetails(e.Detail)
	if err != nil {
		return status.New(code, text)
	}
	return st
}

// describe maps a detail to its gRPC code and to a text that names the next
// step. The inverse is in package client.
func describe(d *pb.ErrorDetail) (codes.Code, string) {
	switch k := d.GetKind().(type) {
	case *pb.ErrorDetail_NotOwner:
		if k.NotOwner.GetOwner() == "" {
			return codes.FailedPrecondition, fmt.Sprintf("partition %s has no owner that is known here; ask again in a second", k.NotOwner.GetPartition())
		}
		return codes.FailedPrecondition, fmt.Sprintf("partition %s is owned by region %s (epoch %d); ask one of %s",
			k.NotOwner.GetPartition(), k.NotOwner.GetOwner(), k.NotOwner.GetEpoch(), strings.Join(k.NotOwner.GetAddresses(), ", "))
	case *pb.ErrorDetail_Lapsed:
		return codes.Unavailable, fmt.Sprintf("the region's head lease on partition %s has lapsed; ask again in %v",
			k.Lapsed.GetPartition(), time.Duration(k.Lapsed.GetRetryNs()).Round(time.Millisecond))
	case *pb.ErrorDetail_Moved:
		return codes.FailedPrecondition, fmt.Sprintf("partition %s is moving to region %s; ask there", k.Moved.GetPartition(), k.Moved.GetSuccessor())
	case *pb.ErrorDetail_SessionExpired:
		return codes.NotFound, fmt.Sprintf("session %s is unknown or has ended; open a new one", k.SessionExpired.GetSessionId())
	case *pb.ErrorDetail_NotHolder:
		return codes.FailedPrecondition, fmt.Sprintf("this session does not hold %s with token %d; the lease has ended, stop working on it",
			k.NotHolder.GetResource(), k.NotHolder.GetToken())
	case *pb.ErrorDetail_Overloaded:
		return codes.ResourceExhausted, fmt.Sprintf("overloaded: %s; ask again in %v", k.Overloaded.GetWhat(), time.Duration(k.Overloaded.GetRetryNs()))
	case *pb.ErrorDetail_Invalid:
		return codes.InvalidArgument, fmt.Sprintf("%s: %s", k.Invalid.GetField(), k.Invalid.GetRemedy())
	case *pb.ErrorDetail_NotLeader:
		if reason := k.NotLeader.GetReason(); reason != "" {
			return codes.Unavailable, fmt.Sprintf("this server stops: %s; ask again, at another one", reason)
		}
		if k.NotLeader.GetLeader() == "" {
			return codes.Unavailable, "the region has no leader right now; ask again in a moment"
		}
		return codes.Unavailable, fmt.Sprintf("this server is not the region's leader; ask %s", k.NotLeader.GetLeader())
	case *pb.ErrorDetail_Uninitialised:
		return codes.FailedPrecondition, fmt.Sprintf("server %s is not initialised; run `headlease init`", k.Uninitialised.GetServer())
	case *pb.ErrorDetail_StaleRequest:
		return codes.Aborted, fmt.Sprintf("request %d of this session is closed (answered, cancelled or given up before); use a new request id", k.StaleRequest.GetRequestId())
	case *pb.ErrorDetail_WrongTerm:
		return codes.Unavailable, "leadership changed meanwhile; ask again"
	case *pb.ErrorDetail_OtherCluster:
		return codes.PermissionDenied, fmt.Sprintf("this process belongs to cluster %s (configuration %d); check the addresses in cluster.yaml",
			k.OtherCluster.GetClusterId(), k.OtherCluster.GetVersion())
	case *pb.ErrorDetail_WaitEnded:
		return codes.DeadlineExceeded, fmt.Sprintf("%s was not handed over within %v; ask again with a new request id",
			k.WaitEnded.GetResource(), time.Duration(k.WaitEnded.GetWaitedMs())*time.Millisecond)
	case *pb.ErrorDetail_Refused:
		return codes.FailedPrecondition, k.Refused.GetReason()
	}
	return codes.Internal, "internal: an error without a kind"
}

func fail(d *pb.ErrorDetail) error { return &DetailError{Detail: d} }

func invalid(field, format string, args ...any) error {
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_Invalid{Invalid: &pb.Invalid{Field: field, Remedy: fmt.Sprintf(format, args...)}}})
}

func notLeader(leader string) error {
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_NotLeader{NotLeader: &pb.NotLeader{Leader: leader}}})
}

// stops is notLeader of a server whose store failed: nobody leads, and why.
func stops(failed error) error {
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_NotLeader{NotLeader: &pb.NotLeader{Reason: failed.Error()}}})
}

func uninitialised(server string) error {
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_Uninitialised{Uninitialised: &pb.Uninitialised{Server: server}}})
}

func sessionExpired(id string) error {
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_SessionExpired{SessionExpired: &pb.SessionExpired{SessionId: id}}})
}

// resultError turns the outcome of a proposal into an error of the API.
func resultError(res *pb.CommandResult, err error) error {
	switch {
	case errors.Is(err, replica.ErrNotLeader):
		leader := ""
		if nl := (*replica.NotLeaderError)(nil); errors.As(err, &nl) {
			if nl.Failed != nil {
				return stops(nl.Failed)
			}
			leader = nl.Leader
		}
		return notLeader(leader)
	case errors.Is(err, replica.ErrOverloaded):
		return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_Overloaded{Overloaded: &pb.Overloaded{What: err.Error(), RetryNs: int64(overloadedRetry)}}})
	case errors.Is(err, replica.ErrUninitialised):
		return uninitialised("of this region")
	case errors.Is(err, replica.ErrUnknown), errors.Is(err, replica.ErrCheckFailed), errors.Is(err, replica.ErrClosed):
		return status.Error(codes.Unavailable, err.Error()+"; ask again with the same request id")
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, "the region did not decide in time; the outcome is unknown, ask again with the same request id")
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, "cancelled by the caller; the outcome is unknown")
	case err != nil:
		return err
	case res.GetError() != nil:
		return fail(res.GetError())
	}
	return nil
}
