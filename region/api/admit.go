package api

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/admission"
)

// Lane of a method: what its calls do to the load. What is not named here is
// for operators and servers, and always taken on.
func Lane(fullMethod string) admission.Lane {
	switch fullMethod {
	case pb.SessionService_OpenSession_FullMethodName,
		pb.LeaseService_Acquire_FullMethodName,
		pb.LeaseService_SetValue_FullMethodName:
		return admission.Work
	case pb.LeaseService_GetLease_FullMethodName,
		pb.LeaseService_ListLeases_FullMethodName,
		pb.WatchService_Watch_FullMethodName:
		return admission.Read
	}
	return admission.Relief
}

// Admission answers OVERLOADED before a call costs anything: on the server that
// takes it, and again on the leader that it is forwarded to.
type Admission struct {
	Control  *admission.Control
	Identify func(context.Context) (policy.Caller, bool)
	// Refused is told of each refusal; it must not wait.
	Refused func(l admission.Lane, byIdentity bool)
}

func (a *Admission) admit(ctx context.Context, method string) (done func(), err error) {
	lane := Lane(method)
	if lane == admission.Relief {
		return func() {}, nil
	}
	caller, _ := a.Identify(ctx) // the policy has refused a caller without identity
	done, refused := a.Control.Admit(time.Now(), lane, caller.Name)
	if refused == nil {
		return done, nil
	}
	a.Refused(lane, refused.ByIdentity)
	return nil, fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_Overloaded{Overloaded: &pb.Overloaded{
		RetryNs: int64(refused.Retry), What: refused.What,
	}}})
}

// Unary is the server interceptor for unary calls.
func (a *Admission) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	done, err := a.admit(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	defer done()
	return handler(ctx, req)
}

// Stream is the server interceptor for streams. A stream lives long and holds no
// place: what it may cost is its service's to bound.
func (a *Admission) Stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	done, err := a.admit(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	done()
	return handler(srv, ss)
}
