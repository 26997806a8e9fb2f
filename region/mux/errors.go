package mux

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor/run"
)

// Error ends a client's stream: a typed detail of the API, or a gRPC status. The
// services of package api give it code and text.
type Error struct {
	Detail *pb.ErrorDetail
}

func (e *Error) Error() string { return fmt.Sprintf("stream refused: %v", e.Detail) }

var (
	errClosed = errors.New("the client has closed its stream")
	errBroken = status.Error(codes.Unavailable, "this server's stream to the region's leader broke, and messages may be lost; attach again")
	errStops  = status.Error(codes.Unavailable, "this server stops; attach to another one")
	errSlow   = status.Error(codes.ResourceExhausted, run.ErrSlow.Error())
	errMoved  = status.Error(codes.Aborted, run.ErrDetached.Error())
)

func fail(d *pb.ErrorDetail) error { return &Error{Detail: d} }

func invalid(field, format string, args ...any) error {
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_Invalid{Invalid: &pb.Invalid{Field: field, Remedy: fmt.Sprintf(format, args...)}}})
}

// overloadedRetry is when to ask again after OVERLOADED.
const overloadedRetry = 250 * time.Millisecond

func overloaded(format string, args ...any) error {
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_Overloaded{Overloaded: &pb.Overloaded{
		What: fmt.Sprintf(format, args...), RetryNs: int64(overloadedRetry),
	}}})
}

func notLeader(name string) error {
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_NotLeader{NotLeader: &pb.NotLeader{Leader: name}}})
}

// ofShell is how a client is told why the leader's shell ended its stream;
// over: the term is over, and the client's stream may go on elsewhere.
func ofShell(err error) (over bool, told error) {
	switch {
	case errors.Is(err, run.ErrNotLeading):
		return true, notLeader("")
	case errors.Is(err, run.ErrSlow):
		return false, errSlow
	case errors.Is(err, run.ErrDetached):
		return false, errMoved
	}
	return false, err
}

// pack and unpack carry the end of a client's stream over the mux.
func pack(err error) *pb.MuxEnded {
	if e := (*Error)(nil); errors.As(err, &e) {
		return &pb.MuxEnded{Detail: e.Detail}
	}
	st := status.Convert(err)
	out := &pb.MuxEnded{Code: uint32(st.Code()), Text: st.Message()}
	for _, d := range st.Details() {
		if d, ok := d.(*pb.ErrorDetail); ok {
			out.Detail = d
		}
	}
	return out
}

func unpack(e *pb.MuxEnded) error {
	if e.GetCode() == 0 && e.GetDetail() != nil {
		return fail(e.GetDetail())
	}
	st := status.New(codes.Code(e.GetCode()), e.GetText())
	if e.GetDetail() != nil {
		if with, err := st.WithDetails(e.GetDetail()); err == nil {
			st = with
		}
	}
	if st.Code() == codes.OK {
		return errClosed
	}
	return st.Err()
}
