package witness

import (
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/headlease/headlease/global/config"
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

// refusalOf is the gRPC error of what package config refuses.
func refusalOf(err error) error {
	var (
		cluster *config.OtherClusterError
		version *config.VersionError
		field   *config.FieldError
		content *config.InvalidError
		era     *config.EraError
		stopped *config.StoppedError
	)
	switch {
	case errors.Is(err, config.ErrUninitialised):
		return refusal(codes.FailedPrecondition, &pb.ErrorDetail{Kind: &pb.ErrorDetail_Uninitialised{Uninitialised: &pb.Uninitialised{}}}, "%v", err)
	case errors.As(err, &cluster):
		return refusal(codes.FailedPrecondition, otherCluster(cluster.Own, 0), "%v", err)
	case errors.As(err, &version):
		return withDetail(refusal(codes.FailedPrecondition, otherCluster("", version.Own), "%v", err), version.Proto())
	case errors.As(err, &era):
		return withDetail(refusal(codes.FailedPrecondition, nil, "%v", err), era.Proto())
	case errors.As(err, &stopped):
		return withDetail(refusal(codes.FailedPrecondition, nil, "%v", err), stopped.Proto())
	case errors.As(err, &content):
		return invalid("proposed", content.Error())
	case errors.As(err, &field):
		return invalid(field.Field, field.Remedy)
	}
	return refusal(codes.FailedPrecondition, nil, "%v", err)
}

func otherCluster(id string, version uint64) *pb.ErrorDetail {
	return &pb.ErrorDetail{Kind: &pb.ErrorDetail_OtherCluster{OtherCluster: &pb.OtherCluster{ClusterId: id, Version: version}}}
}

func invalid(field, remedy string) error {
	return refusal(codes.InvalidArgument, &pb.ErrorDetail{Kind: &pb.ErrorDetail_Invalid{Invalid: &pb.Invalid{Field: field, Remedy: remedy}}},
		"%s: %s", field, remedy)
}

// withDetail adds a detail to a gRPC error.
func withDetail(err error, detail protoadapt.MessageV1) error {
	if st, e := status.Convert(err).WithDetails(detail); e == nil {
		return st.Err()
	}
	return err
}
