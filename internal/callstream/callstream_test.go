package callstream_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/headlease/headlease/internal/callstream"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// leases is a service whose calls are told apart by the resource.
type leases struct {
	pb.UnimplementedLeaseServiceServer
	release func(context.Context, *pb.ReleaseRequest) (*pb.ReleaseResponse, error)
}

func (l *leases) Release(ctx context.Context, req *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
	return l.release(ctx, req)
}

func (l *leases) CancelAcquire(_ context.Context, req *pb.CancelAcquireRequest) (*pb.CancelAcquireResponse, error) {
	return &pb.CancelAcquireResponse{GrantedToken: req.GetRequestId(), Resource: req.GetSessionId()}, nil
}

type rig struct {
	client pb.LeaseServiceClient
	conn   *grpc.ClientConn
	server *grpc.Server
	// alone and carried count the calls that came alone and over the stream.
	alone, carried atomic.Int64
}

func start(t *testing.T, l *leases, with bool, intercept grpc.UnaryServerInterceptor) *rig {
	t.Helper()
	r := &rig{}
	r.server = grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
		r.alone.Add(1)
		return h(ctx, req)
	}))
	pb.RegisterLeaseServiceServer(r.server, l)
	if with {
		s := &callstream.Server{Interceptors: []grpc.UnaryServerInterceptor{func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			r.carried.Add(1)
			return h(ctx, req)
		}}}
		if intercept != nil {
			s.Interceptors = append(s.Interceptors, intercept)
		}
		pb.RegisterLeaseServiceServer(s, l)
		pb.RegisterCallServiceServer(r.server, s)
	}
	listener := bufconn.Listen(1 << 20)
	go func() { _ = r.server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///test", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		callstream.DialOption(pb.LeaseService_Release_FullMethodName, pb.LeaseService_CancelAcquire_FullMethodName))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		r.server.Stop()
	})
	r.conn, r.client = conn, pb.NewLeaseServiceClient(conn)
	return r
}

func echo(_ context.Context, req *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
	return nil, status.Error(codes.Code(req.GetToken()), req.GetResource())
}

// Each of many concurrent calls gets its own answer, and all go over the stream.
func TestAnswersReachTheirCallers(t *testing.T) {
	r := start(t, &leases{release: echo}, true, nil)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			id := fmt.Sprint(i)
			for range 20 {
				got, err := r.client.CancelAcquire(t.Context(), &pb.CancelAcquireRequest{SessionId: id, RequestId: uint64(i)})
				if err != nil || got.GetResource() != id || got.GetGrantedToken() != uint64(i) {
					t.Errorf("call %d: %v, %v", i, got, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if r.carried.Load() != 4000 || r.alone.Load() != 0 {
		t.Errorf("%d calls over the stream, %d alone", r.carried.Load(), r.alone.Load())
	}
}

func TestStatusWithDetailsArrives(t *testing.T) {
	want, err := status.New(codes.FailedPrecondition, "no").WithDetails(&pb.ErrorDetail{Kind: &pb.ErrorDetail_NotHolder{NotHolder: &pb.NotHolder{Resource: "lock/a"}}})
	if err != nil {
		t.Fatal(err)
	}
	r := start(t, &leases{release: func(context.Context, *pb.ReleaseRequest) (*pb.ReleaseResponse, error) { return nil, want.Err() }}, true, nil)
	_, err = r.client.Release(t.Context(), &pb.ReleaseRequest{})
	got := status.Convert(err)
	if got.Code() != want.Code() || got.Message() != want.Message() || len(got.Details()) != 1 {
		t.Fatalf("got %v", err)
	}
	if d, ok := got.Details()[0].(*pb.ErrorDetail); !ok || d.GetNotHolder().GetResource() != "lock/a" {
		t.Errorf("details %v", got.Details())
	}
}

// Interceptors see the method, the caller's metadata and its deadline.
func TestInterceptorsSeeTheCall(t *testing.T) {
	r := start(t, &leases{release: echo}, true, func(ctx context.Context, _ any, info *grpc.UnaryServerInfo, _ grpc.UnaryHandler) (any, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		deadline, ok := ctx.Deadline()
		left := time.Until(deadline)
		return nil, status.Errorf(codes.Aborted, "%s %v %v", info.FullMethod, md.Get("who"), ok && left > 0 && left < time.Hour)
	})
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "who", "me"), time.Hour)
	defer cancel()
	_, err := r.client.Release(ctx, &pb.ReleaseRequest{})
	if want := "/headlease.v1.LeaseService/Release [me] true"; status.Code(err) != codes.Aborted || status.Convert(err).Message() != want {
		t.Errorf("got %v, want %q", err, want)
	}
	// A call without metadata must not have those of the stream or of another call.
	_, err = r.client.Release(t.Context(), &pb.ReleaseRequest{})
	if want := "/headlease.v1.LeaseService/Release [] false"; status.Convert(err).Message() != want {
		t.Errorf("got %v, want %q", err, want)
	}
}

// A caller that goes returns at once, its handler is told, and the stream goes on.
func TestCancelReachesTheHandler(t *testing.T) {
	began, ended := make(chan struct{}), make(chan error, 1)
	r := start(t, &leases{release: func(ctx context.Context, req *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
		if req.GetResource() != "hang" {
			return &pb.ReleaseResponse{}, nil
		}
		close(began)
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, ctx.Err()
	}}, true, nil)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := r.client.Release(ctx, &pb.ReleaseRequest{Resource: "hang"})
		failed <- err
	}()
	<-began
	cancel()
	if err := <-failed; status.Code(err) != codes.Canceled {
		t.Errorf("got %v", err)
	}
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the handler ended by %v", err)
	}
	if _, err := r.client.Release(t.Context(), &pb.ReleaseRequest{}); err != nil {
		t.Error(err)
	}
}

// Unanswered calls fail with UNAVAILABLE when the connection ends; a later call
// opens a new stream.
func TestBrokenStreamFailsItsCalls(t *testing.T) {
	began := make(chan struct{}, 8)
	r := start(t, &leases{release: func(ctx context.Context, _ *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
		began <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	}}, true, nil)
	failed := make(chan error, 8)
	for range 8 {
		go func() {
			_, err := r.client.Release(t.Context(), &pb.ReleaseRequest{})
			failed <- err
		}()
	}
	for range 8 {
		<-began
	}
	r.server.Stop()
	for range 8 {
		if err := <-failed; status.Code(err) != codes.Unavailable {
			t.Errorf("got %v", err)
		}
	}
	if _, err := r.client.Release(t.Context(), &pb.ReleaseRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("a call to a server that is gone: %v", err)
	}
}

func TestServerWithoutTheServiceIsCalledPlainly(t *testing.T) {
	r := start(t, &leases{release: echo}, false, nil)
	for range 3 {
		if _, err := r.client.Release(t.Context(), &pb.ReleaseRequest{Token: uint64(codes.Aborted), Resource: "x"}); status.Code(err) != codes.Aborted {
			t.Fatal(err)
		}
	}
	if r.alone.Load() != 3 {
		t.Errorf("%d calls alone", r.alone.Load())
	}
}

func TestLongRequestGoesAlone(t *testing.T) {
	r := start(t, &leases{release: echo}, true, nil)
	if _, err := r.client.Release(t.Context(), &pb.ReleaseRequest{Resource: strings.Repeat("x", 9<<10)}); err == nil && r.alone.Load() != 1 {
		t.Errorf("%d calls alone, error %v", r.alone.Load(), err)
	}
	if r.alone.Load() != 1 || r.carried.Load() != 0 {
		t.Errorf("%d calls alone, %d over the stream", r.alone.Load(), r.carried.Load())
	}
}

// A server that reads nothing more holds no caller beyond its deadline, however
// much is unanswered.
func TestDeadlineHoldsWhenNothingIsRead(t *testing.T) {
	stuck := make(chan struct{})
	r := start(t, &leases{release: func(context.Context, *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
		<-stuck
		return &pb.ReleaseResponse{}, nil
	}}, true, nil)
	defer close(stuck)
	long := strings.Repeat("x", 4<<10)
	var wg sync.WaitGroup
	for range 6000 { // beyond what a stream takes and what gRPC buffers
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if _, err := r.client.Release(ctx, &pb.ReleaseRequest{Resource: long}); status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("got %v", err)
			}
		})
	}
	wg.Wait()
}

// A client that sends and reads no answers has only so many calls taken: what
// waits for it is bounded.
func TestAnswersThatNobodyReadsAreBounded(t *testing.T) {
	answered := make(chan struct{}, 1<<16)
	r := start(t, &leases{release: func(context.Context, *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
		answered <- struct{}{}
		return nil, status.Error(codes.NotFound, strings.Repeat("x", 1<<10))
	}}, true, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := pb.NewCallServiceClient(r.conn).Calls(ctx)
	if err != nil {
		t.Fatal(err)
	}
	const calls = 6_000
	sent := make(chan struct{})
	go func() { // ended by ctx, when the server does not read on
		defer close(sent)
		for i := range calls / 100 {
			req := &pb.CallsRequest{}
			for j := range 100 {
				req.Calls = append(req.Calls, &pb.Call{Id: uint64(100*i + j + 1), Method: pb.LeaseService_Release_FullMethodName})
			}
			if stream.Send(req) != nil {
				return
			}
		}
	}()
	// Until what was taken is answered and nothing more is taken.
	for idle := false; !idle; {
		select {
		case <-answered:
			if r.carried.Load() == calls {
				t.Fatalf("all of %d calls were taken, and no answer was read", calls)
			}
		case <-time.After(300 * time.Millisecond):
			idle = true
		}
	}
	// Whoever reads gets them all.
	for got := 0; got < calls; {
		answers, err := stream.Recv()
		if err != nil {
			t.Fatalf("after %d answers: %v", got, err)
		}
		got += len(answers.GetCalls())
	}
	<-sent
}

// A connection has a few streams of calls, whatever gRPC lets it open.
func TestStreamsOfAConnectionAreBounded(t *testing.T) {
	r := start(t, &leases{release: echo}, true, nil)
	call := &pb.CallsRequest{Calls: []*pb.Call{{Id: 1, Method: pb.LeaseService_CancelAcquire_FullMethodName}}}
	open := func() (grpc.BidiStreamingClient[pb.CallsRequest, pb.CallsResponse], error) {
		stream, err := pb.NewCallServiceClient(r.conn).Calls(t.Context())
		if err != nil {
			return nil, err
		}
		if err := stream.Send(call); err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		_, err = stream.Recv()
		return stream, err
	}
	var streams []grpc.BidiStreamingClient[pb.CallsRequest, pb.CallsResponse]
	for {
		stream, err := open()
		if status.Code(err) == codes.ResourceExhausted {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if streams = append(streams, stream); len(streams) > 100 {
			t.Fatal("there is no bound")
		}
	}
	if len(streams) < 2 {
		t.Fatalf("%d streams; a client that reconnects needs 2", len(streams))
	}
	// The place of one that has ended is free.
	if err := streams[0].CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := streams[0].Recv(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if _, err := open(); err != nil {
		t.Errorf("after one has ended: %v", err)
	}
}

func BenchmarkCall(b *testing.B) {
	for name, opts := range map[string][]grpc.DialOption{"unary": nil, "stream": {callstream.DialOption(pb.LeaseService_Release_FullMethodName)}} {
		b.Run(name, func(b *testing.B) {
			l := &leases{release: func(context.Context, *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
				return &pb.ReleaseResponse{}, nil
			}}
			server := grpc.NewServer()
			s := &callstream.Server{}
			pb.RegisterLeaseServiceServer(server, l)
			pb.RegisterLeaseServiceServer(s, l)
			pb.RegisterCallServiceServer(server, s)
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			go func() { _ = server.Serve(listener) }()
			defer server.Stop()
			conn, err := grpc.NewClient(listener.Addr().String(), append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
			if err != nil {
				b.Fatal(err)
			}
			defer conn.Close()
			c := pb.NewLeaseServiceClient(conn)
			req := &pb.ReleaseRequest{SessionId: strings.Repeat("s", 32), Secret: make([]byte, 16), Resource: "lock/bench", Token: 1 << 33}
			for b.Loop() {
				if _, err := c.Release(b.Context(), req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
