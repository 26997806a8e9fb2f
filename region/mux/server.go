package mux

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor/run"
)

// Server is the MuxService: the leader's side. All fields are needed.
type Server struct {
	pb.UnimplementedMuxServiceServer
	Region string
	Shell  *run.Shell
	Prove  Prove
	// Identify returns who calls.
	Identify func(context.Context) (policy.Caller, bool)
}

// ours reports whether a caller is a server of the region.
func (s *Server) ours(ctx context.Context) bool {
	c, ok := s.Identify(ctx)
	parts := strings.Split(c.Name, "/")
	return ok && c.Role == policy.Region && len(parts) == 3 && parts[1] == s.Region
}

// Carry serves the client streams of another server of the region until the term
// ends, or the caller goes.
func (s *Server) Carry(ss grpc.BidiStreamingServer[pb.CarryRequest, pb.CarryResponse]) error {
	if !s.ours(ss.Context()) {
		return status.Errorf(codes.PermissionDenied, "only servers of region %s carry streams to its leader", s.Region)
	}
	term, over := s.Shell.Leads()
	if over == nil {
		return status.Error(codes.Unavailable, run.ErrNotLeading.Error())
	}
	ctx, cancel := context.WithCancelCause(ss.Context())
	defer cancel(nil)
	if err := ss.Send(&pb.CarryResponse{Hello: &pb.MuxHello{Term: term}}); err != nil {
		return err
	}
	r := &reader{server: s, term: term, outlet: newOutlet(), streams: map[uint64]*virtual{}}
	go func() { cancel(r.run(ss)) }() // ends with the stream, whose context the return of this method ends
	go func() {                       // ended by ctx
		select {
		case <-over:
			cancel(run.ErrNotLeading)
		case <-ctx.Done():
		}
	}()
	err := write(ctx, ss, r.outlet)
	// Its streams end with the mux. The reader may still be at one of them: it
	// closes them itself, when its Recv fails because this method has returned.
	cancel(err)
	if errors.Is(err, run.ErrNotLeading) {
		return status.Error(codes.Unavailable, err.Error())
	}
	if errors.Is(err, errMuxSlow) {
		return status.Error(codes.ResourceExhausted, err.Error())
	}
	return err
}

func write(ctx context.Context, ss grpc.BidiStreamingServer[pb.CarryRequest, pb.CarryResponse], o *outlet) error {
	for {
		resp, err := o.next(ctx)
		if err != nil {
			return err
		}
		if err := ss.Send(resp); err != nil {
			return err
		}
	}
}

// reader takes what comes on a mux.
type reader struct {
	server  *Server
	term    uint64
	outlet  *outlet
	streams map[uint64]*virtual
}

func (r *reader) run(ss grpc.BidiStreamingServer[pb.CarryRequest, pb.CarryResponse]) error {
	defer func() {
		for _, v := range r.streams {
			v.attendant.stream.Close()
		}
	}()
	var inputs []run.Input
	for {
		req, err := ss.Recv()
		if err != nil {
			return err
		}
		if req.GetPing() != 0 {
			r.outlet.ping(req.GetPing())
		}
		inputs = inputs[:0]
		for _, f := range req.GetFrames() {
			in, ok, err := r.take(f)
			if err != nil {
				return err
			}
			if ok {
				inputs = append(inputs, in)
			}
		}
		if len(inputs) > 0 {
			r.server.Shell.Take(inputs)
		}
	}
}

// take takes one frame; an error ends the mux.
func (r *reader) take(f *pb.MuxUp) (in run.Input, ok bool, err error) {
	v := r.streams[f.GetStream()]
	switch k := f.GetKind().(type) {
	case *pb.MuxUp_Open:
		return in, false, r.open(f.GetStream(), policy.Caller{Role: policy.Role(k.Open.GetRole()), Name: k.Open.GetName()})
	case *pb.MuxUp_Close:
		if v != nil {
			r.close(v)
		}
	case *pb.MuxUp_Request:
		if v == nil {
			return in, false, nil // it has been ended here
		}
		in, ok, err := v.attendant.admit(k.Request)
		if err != nil {
			v.End(err)
			v.attendant.stream.Close()
			delete(r.streams, v.id)
			return in, false, nil
		}
		return in, ok, nil
	default:
		return in, false, status.Error(codes.InvalidArgument, "kind: is missing in a frame")
	}
	return in, false, nil
}

func (r *reader) open(id uint64, caller policy.Caller) error {
	if r.streams[id] != nil {
		return status.Errorf(codes.InvalidArgument, "stream: %d is open; use another number", id)
	}
	v := &virtual{outlet: r.outlet, id: id, attendant: newAttendant(r.server.Prove, caller)}
	switch {
	case caller.Role != policy.Client && caller.Role != policy.Admin:
		v.End(status.Errorf(codes.PermissionDenied, "%s may not attach; use a certificate of role client or admin", caller.Name))
		return nil
	case len(r.streams) >= maxClients:
		v.End(overloaded("the leader has %d client streams of that server; attach to another one", maxClients))
		return nil
	}
	stream, err := r.server.Shell.Attach(v)
	if err != nil {
		return err
	}
	if stream.Term() != r.term {
		stream.Close()
		return run.ErrNotLeading
	}
	v.attendant.stream = stream
	r.streams[id] = v
	return nil
}

func (r *reader) close(v *virtual) {
	v.attendant.stream.Close()
	v.drop()
	delete(r.streams, v.id)
}
