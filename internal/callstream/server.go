package callstream

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// maxRunning bounds the calls of a stream that are under way, or whose answers
	// wait to be sent; then it is not read on.
	maxRunning = 4096
	// maxIdle goroutines of a stream wait for its next calls: one whose stack has
	// grown for a call before, through all the interceptors, need not grow it again.
	maxIdle = 2
	// idleFor is for how long they wait: that stack is much of what an idle connection
	// costs.
	idleFor = 2 * time.Second
)

// maxStreams of one connection, or it could have maxRunning calls under way on
// each of all the streams that gRPC lets it open. A client needs one, and for a
// moment a second when the first has broken.
const maxStreams = 4

// Server answers the calls of streams with the handlers of services. Register
// these with it as with a grpc.Server, before it serves.
type Server struct {
	pb.UnimplementedCallServiceServer
	// Interceptors are those that a call passes which comes alone, the outermost
	// first. Each may go on with the call once.
	Interceptors []grpc.UnaryServerInterceptor

	methods map[string]method

	mu sync.Mutex
	// streams of a connection, by its remote address.
	streams map[string]int
}

var (
	_ pb.CallServiceServer  = (*Server)(nil)
	_ grpc.ServiceRegistrar = (*Server)(nil)
)

type method struct {
	handler grpc.MethodHandler
	impl    any
}

// RegisterService takes the unary methods of a service.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, impl any) {
	if s.methods == nil {
		s.methods = map[string]method{}
	}
	for _, m := range desc.Methods {
		s.methods["/"+desc.ServiceName+"/"+m.MethodName] = method{m.Handler, impl}
	}
}

// Methods are the registered ones, as "/package.Service/Method".
func (s *Server) Methods() []string { return slices.Collect(maps.Keys(s.methods)) }

// enter counts a connection's stream, until leave; false: it has too many.
func (s *Server) enter(ctx context.Context) (leave func(), ok bool) {
	connection := ""
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		connection = p.Addr.String()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams[connection] >= maxStreams {
		return nil, false
	}
	if s.streams == nil {
		s.streams = map[string]int{}
	}
	s.streams[connection]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.streams[connection]--; s.streams[connection] == 0 {
			delete(s.streams, connection)
		}
	}, true
}

// Calls is CallService.
func (s *Server) Calls(stream grpc.BidiStreamingServer[pb.CallsRequest, pb.CallsResponse]) error {
	leave, ok := s.enter(stream.Context())
	if !ok {
		return status.Errorf(codes.ResourceExhausted, "this connection has %d streams of calls; make the calls on one of them", maxStreams)
	}
	defer leave()
	ctx, cancel := context.WithCancel(stream.Context())
	r := &running{
		server: s, ctx: ctx, bare: metadata.NewIncomingContext(ctx, nil), out: outbox[*pb.CallResult]{patient: true},
		slots: make(chan struct{}, maxRunning), next: make(chan begun), idle: make(chan struct{}, maxIdle),
	}
	defer context.AfterFunc(ctx, func() { r.open.end(ctx.Err()) })()
	r.out.send = func(calls []*pb.CallResult) error {
		err := stream.Send(&pb.CallsResponse{Calls: calls})
		if err != nil {
			cancel() // the reader notices by itself, the handlers by this
		}
		for range calls { // only now: the answers that nobody reads are bounded too
			<-r.slots
		}
		return err
	}
	err := r.read(stream)
	close(r.next)
	if !errors.Is(err, io.EOF) {
		cancel()
	}
	r.calls.Wait() // who has said all waits for the answers
	cancel()
	r.open.end(context.Canceled)
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// running are the calls of one stream.
type running struct {
	server *Server
	ctx    context.Context
	bare   context.Context // without the metadata of the stream
	// slots are taken by calls until their answers are sent.
	slots chan struct{}
	calls sync.WaitGroup
	// next hands a call to an idle goroutine, of which idle counts maxIdle at most.
	// It is closed when nothing more is read.
	next chan begun
	idle chan struct{}
	out  outbox[*pb.CallResult]
	open calls
}

// begun is a call that has a slot.
type begun struct {
	call *pb.Call
	ctx  *callContext
}

// work makes a call, and further ones if it may wait for them.
func (r *running) work(b begun) {
	var idle *time.Timer
	for more := true; more; {
		r.out.put(r.server.answer(b.ctx, b.call))
		r.open.remove(b.call.GetId(), b.ctx)
		select {
		case r.idle <- struct{}{}:
		default:
			return
		}
		if idle == nil {
			idle = time.NewTimer(idleFor)
			defer idle.Stop()
		} else {
			idle.Reset(idleFor)
		}
		select {
		case b, more = <-r.next:
		case <-idle.C:
			more = false
		}
		<-r.idle
	}
}

func (r *running) read(stream grpc.BidiStreamingServer[pb.CallsRequest, pb.CallsResponse]) error {
	for {
		batch, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, call := range batch.GetCalls() {
			if call.GetCancel() {
				r.open.cancel(call.GetId())
				continue
			}
			select {
			case r.slots <- struct{}{}:
			case <-r.ctx.Done():
				return status.FromContextError(r.ctx.Err()).Err()
			}
			b := r.begin(call)
			if !r.open.add(call.GetId(), b.ctx) {
				return status.Errorf(codes.InvalidArgument, "a call %d has no answer yet; number the calls of a stream from 1", call.GetId())
			}
			select {
			case r.next <- b:
			default:
				r.calls.Go(func() { r.work(b) })
			}
		}
	}
}

// begin makes a call's context, before the next message is read, which may
// cancel it.
func (r *running) begin(call *pb.Call) begun {
	c := &callContext{Context: r.bare}
	if len(call.GetMetadata()) > 0 {
		c.Context = metadata.NewIncomingContext(r.ctx, metadata.New(call.GetMetadata()))
	}
	if d := call.GetTimeoutNs(); d > 0 {
		c.at = time.Now().Add(time.Duration(d))
	}
	return begun{call, c}
}

// answer makes one call.
func (s *Server) answer(ctx context.Context, call *pb.Call) *pb.CallResult {
	m, ok := s.methods[call.GetMethod()]
	if !ok {
		return failed(call, status.Errorf(codes.Unimplemented, "%s: not among the methods that go over a stream of calls", call.GetMethod()))
	}
	decode := func(v any) error {
		in, ok := v.(proto.Message)
		if !ok {
			return status.Errorf(codes.Internal, "%s: takes no protobuf message", call.GetMethod())
		}
		if err := proto.Unmarshal(call.GetMessage(), in); err != nil {
			return status.Errorf(codes.InvalidArgument, "%s: the request cannot be decoded: %v", call.GetMethod(), err)
		}
		return nil
	}
	reply, err := m.handler(m.impl, ctx, decode, s.intercept)
	if err != nil {
		return failed(call, err)
	}
	out, ok := reply.(proto.Message)
	if !ok {
		return failed(call, status.Errorf(codes.Internal, "%s: gave no protobuf message", call.GetMethod()))
	}
	b, err := proto.Marshal(out)
	if err != nil {
		return failed(call, status.Errorf(codes.Internal, "%s: the response cannot be encoded: %v", call.GetMethod(), err))
	}
	return &pb.CallResult{Id: call.GetId(), Message: b}
}

// intercept is the chain of the interceptors.
func (s *Server) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	c := &chain{left: s.Interceptors, info: info, handler: handler}
	c.step = c.next
	return c.next(ctx, req)
}

// chain is a call's way through the interceptors, each of which goes on at most
// once.
type chain struct {
	left    []grpc.UnaryServerInterceptor
	info    *grpc.UnaryServerInfo
	handler grpc.UnaryHandler
	step    grpc.UnaryHandler // next, made once
}

func (c *chain) next(ctx context.Context, req any) (any, error) {
	if len(c.left) == 0 {
		return c.handler(ctx, req)
	}
	first := c.left[0]
	c.left = c.left[1:]
	return first(ctx, req, c.info, c.step)
}

func failed(call *pb.Call, err error) *pb.CallResult {
	st, ok := status.FromError(err)
	if !ok {
		st = status.FromContextError(err) // as gRPC's server does
	}
	b, err := proto.Marshal(st.Proto())
	if err != nil || len(b) == 0 {
		b, _ = proto.Marshal(status.New(codes.Internal, "the error of a call cannot be encoded").Proto())
	}
	return &pb.CallResult{Id: call.GetId(), Status: b}
}
