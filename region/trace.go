package region

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/api"
	"github.com/headlease/headlease/region/replica"
)

// tracedRaft shows the replica's part of a request: between the call's own span
// and these is what the API spends, inside them what Raft and the disks do.
type tracedRaft struct {
	*replica.Replica
	tracer trace.Tracer
}

// raft is the replica as the API uses it.
func (s *Server) raft() api.Raft {
	if s.cfg.Traces == nil {
		return s.replica
	}
	return tracedRaft{s.replica, s.cfg.Traces.Tracer("github.com/headlease/headlease/region")}
}

func (r tracedRaft) Propose(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error) {
	ctx, end := r.propose(ctx, cmd, "normal")
	res, err := r.Replica.Propose(ctx, cmd)
	end(res, err)
	return res, err
}

func (r tracedRaft) ProposeUrgent(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error) {
	ctx, end := r.propose(ctx, cmd, "urgent")
	res, err := r.Replica.ProposeUrgent(ctx, cmd)
	end(res, err)
	return res, err
}

func (r tracedRaft) propose(ctx context.Context, cmd *pb.Command, lane string) (context.Context, func(*pb.CommandResult, error)) {
	ctx, span := r.tracer.Start(ctx, "raft.propose", trace.WithAttributes(
		attribute.String("headlease.command", commandName(cmd)), attribute.String("headlease.lane", lane)))
	return ctx, func(res *pb.CommandResult, err error) {
		defer span.End()
		switch {
		case err != nil:
			span.SetStatus(codes.Error, err.Error())
		case res.GetError() != nil: // an answer, not a fault
			span.SetAttributes(attribute.Bool("headlease.refused", true))
		}
	}
}

// commandName is the name of a command's kind in the contract: "acquire".
func commandName(cmd *pb.Command) string {
	m := cmd.ProtoReflect()
	f := m.WhichOneof(m.Descriptor().Oneofs().ByName("kind"))
	if f == nil {
		return "none"
	}
	return string(f.Name())
}

func (r tracedRaft) Check(ctx context.Context) (uint64, error) {
	ctx, span := r.tracer.Start(ctx, "raft.leadership_check")
	defer span.End()
	term, err := r.Replica.Check(ctx)
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
	return term, err
}
