package callstream

import (
	"context"
	"io"
	"sync"
	"time"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// maxMessage: a longer request has a stream of its own, or it would hold up
	// those behind it.
	maxMessage = 8 << 10
	// maxInline is how much may be unanswered when a caller sends by itself. Less
	// than the 64 KiB that gRPC takes without waiting for the other end: a caller
	// must never wait there beyond its deadline.
	maxInline = 40 << 10
	// callOverhead is about what a call has beside its message.
	callOverhead = 128
	// maxOpen bounds the calls without an answer; what is beyond goes its own way.
	maxOpen = 4096
	// askAgain is when a server that did not have the service is tried again: it
	// may have been replaced.
	askAgain = time.Minute
)

// WorkerMethods are the short calls that workers make all the time, and those of a
// session, which a fleet that is redeployed makes all at once.
func WorkerMethods() []string {
	return []string{
		pb.SessionService_OpenSession_FullMethodName,
		pb.SessionService_CloseSession_FullMethodName,
		pb.LeaseService_Acquire_FullMethodName,
		pb.LeaseService_CancelAcquire_FullMethodName,
		pb.LeaseService_Release_FullMethodName,
		pb.LeaseService_SetValue_FullMethodName,
		pb.LeaseService_GetLease_FullMethodName,
	}
}

// DialOption makes a connection carry the calls of these methods over one
// stream. An option serves one connection.
func DialOption(methods ...string) grpc.DialOption {
	c := &caller{methods: map[string]bool{}}
	for _, m := range methods {
		c.methods[m] = true
	}
	return grpc.WithChainUnaryInterceptor(c.intercept)
}

// caller is the client's end on one connection.
type caller struct {
	methods map[string]bool

	mu sync.Mutex
	// stream is the present one, being opened, open or just broken; nil: none.
	stream *callerStream
	// lacks: the server did not have the service, then.
	lacks time.Time
}

func (c *caller) intercept(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	in, ok := req.(proto.Message)
	out, ok2 := reply.(proto.Message)
	if !ok || !ok2 || !c.methods[method] || !plain(opts) {
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	call := &pb.Call{Method: method}
	if md, ok := metadata.FromOutgoingContext(ctx); ok {
		call.Metadata = make(map[string]string, len(md))
		for k, v := range md {
			if len(v) != 1 {
				return invoke(ctx, method, req, reply, cc, opts...)
			}
			call.Metadata[k] = v[0]
		}
	}
	if deadline, ok := ctx.Deadline(); ok {
		call.TimeoutNs = max(1, int64(time.Until(deadline)))
	}
	message, err := proto.Marshal(in)
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	call.Message = message
	s := c.open(cc)
	if s == nil || len(message) > maxMessage {
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	select {
	case <-s.opened:
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
	w, err := s.add(call, out)
	if w == nil && err != nil && status.Code(err) != codes.Unimplemented {
		return err
	}
	if w == nil {
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	select {
	case err = <-w.done:
	case <-ctx.Done():
		if s.abandon(call.Id) {
			return status.FromContextError(ctx.Err()).Err()
		}
		err = <-w.done // its answer is being read
	}
	if status.Code(err) == codes.Unimplemented {
		// The server lacks the service, or this method over it: nothing was done.
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	return err
}

// plain reports whether a call has no options but the one that generated code
// always gives.
func plain(opts []grpc.CallOption) bool {
	for _, o := range opts {
		if _, ok := o.(grpc.StaticMethodCallOption); !ok {
			return false
		}
	}
	return true
}

// open returns the present stream, or begins one; nil while the server is
// known to lack the service.
func (c *caller) open(cc *grpc.ClientConn) *callerStream {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stream != nil {
		return c.stream
	}
	if !c.lacks.IsZero() && time.Since(c.lacks) < askAgain {
		return nil
	}
	s := &callerStream{opened: make(chan struct{}), waiting: map[uint64]*waiter{}}
	c.stream = s
	go c.run(cc, s)
	return s
}

// run opens a stream and reads it until it breaks, at the latest with its
// connection's end.
func (c *caller) run(cc *grpc.ClientConn, s *callerStream) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := pb.NewCallServiceClient(cc).Calls(ctx)
	if err == nil {
		s.out.send = func(calls []*pb.Call) error { return stream.Send(&pb.CallsRequest{Calls: calls}) }
		close(s.opened)
		for err == nil {
			var answers *pb.CallsResponse
			if answers, err = stream.Recv(); err == nil {
				s.answered(answers.GetCalls())
			}
		}
		if err == io.EOF { //nolint:errorlint // gRPC returns it as it is
			err = status.Error(codes.Unavailable, "the server ended the stream of calls")
		}
	}
	if status.Code(err) == codes.Canceled {
		// Of the stream, not of a call: the connection was closed.
		err = status.Error(codes.Unavailable, "the connection was closed")
	}
	c.mu.Lock()
	c.stream = nil
	c.lacks = time.Time{}
	if status.Code(err) == codes.Unimplemented {
		c.lacks = time.Now()
	}
	c.mu.Unlock()
	s.end(err)
	if s.out.send == nil {
		close(s.opened)
	}
}

// callerStream is one stream of a connection.
type callerStream struct {
	opened chan struct{} // closed once it is open, or has failed
	out    outbox[*pb.Call]

	mu   sync.Mutex
	last uint64
	// waiting have no answer.
	waiting map[uint64]*waiter
	// bytes is about the length of what is unanswered.
	bytes int
	// err is why it broke.
	err error
}

// waiter is a call that waits for its answer.
type waiter struct {
	reply proto.Message
	size  int
	done  chan error
	// gone: nobody waits any more.
	gone bool
}

// add sends a call; nil if the stream is full, or broken, with the error.
func (s *callerStream) add(call *pb.Call, reply proto.Message) (*waiter, error) {
	w := &waiter{reply: reply, size: len(call.Message) + callOverhead, done: make(chan error, 1)}
	s.mu.Lock()
	if s.err != nil || len(s.waiting) >= maxOpen {
		defer s.mu.Unlock()
		return nil, s.err
	}
	s.last++
	call.Id = s.last
	s.waiting[call.Id] = w
	s.bytes += w.size
	inline := s.bytes <= maxInline
	s.mu.Unlock()
	if inline {
		s.out.put(call)
	} else {
		go s.out.put(call) // may wait for a server that does not read; ends with the stream
	}
	return w, nil
}

// answered hands answers to their callers.
func (s *callerStream) answered(answers []*pb.CallResult) {
	for _, a := range answers {
		s.mu.Lock()
		w, ok := s.waiting[a.GetId()]
		if !ok {
			s.mu.Unlock()
			continue
		}
		delete(s.waiting, a.GetId())
		s.bytes -= w.size
		gone := w.gone
		s.mu.Unlock()
		if !gone { // from here on the caller waits for done, also beyond its deadline
			w.done <- outcome(a, w.reply)
		}
	}
}

func outcome(a *pb.CallResult, reply proto.Message) error {
	if len(a.GetStatus()) > 0 {
		var st spb.Status
		if err := proto.Unmarshal(a.GetStatus(), &st); err != nil {
			return status.Errorf(codes.Internal, "status of a call: %v", err)
		}
		return status.ErrorProto(&st)
	}
	if err := proto.Unmarshal(a.GetMessage(), reply); err != nil {
		return status.Errorf(codes.Internal, "response of a call: %v", err)
	}
	return nil
}

// abandon forgets the caller of a call and tells the server; false if its
// answer is here.
func (s *callerStream) abandon(id uint64) bool {
	s.mu.Lock()
	w, ok := s.waiting[id]
	if ok {
		w.gone = true // it counts until it is answered
	}
	s.mu.Unlock()
	if ok {
		go s.out.put(&pb.Call{Id: id, Cancel: true})
	}
	return ok
}

// end fails what is unanswered.
func (s *callerStream) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
	for _, w := range s.waiting {
		if !w.gone {
			w.done <- err
		}
	}
	clear(s.waiting)
}
