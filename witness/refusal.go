package witness

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// refusal is a gRPC error with a typed detail, if given, and a text that names
// the field and the next step.
func refusal(code codes.Code, detail *pb.ErrorDetail, format string, args ...any) error {
	st := status.Newf(code, format, args...)
	if detail != nil {
		if with, err := st.WithDetails(detail); err == nil {
			st = with
		}
	}
	return st.Err()
}

func invalid(field, remedy string) error {
	return refusal(codes.InvalidArgument, &pb.ErrorDetail{Kind: &pb.ErrorDetail_Invalid{Invalid: &pb.Invalid{Field: field, Remedy: remedy}}},
		"%s: %s", field, remedy)
}
