package grpcguard_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/fencetest"
	"github.com/headlease/headlease/fence/grpcguard"
	"github.com/headlease/headlease/fence/inprocess"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// service has one value per resource, and a stream that lasts until its context ends.
type service struct {
	mu      sync.Mutex
	values  map[string]string
	began   chan struct{}
	ended   chan error
	proceed chan struct{}
}

func (s *service) write(ctx context.Context, v *wrapperspb.StringValue) (*emptypb.Empty, error) {
	if v.GetValue() == "fail" {
		return nil, status.Error(codes.AlreadyExists, "the handler's own")
	}
	md, _ := metadata.FromIncomingContext(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values[md.Get(grpcguard.KeyResource)[0]] = v.GetValue()
	return &emptypb.Empty{}, nil
}

var desc = grpc.ServiceDesc{
	ServiceName: "test.Values", HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Write", Handler: func(srv any, ctx context.Context, dec func(any) error, in grpc.UnaryServerInterceptor) (any, error) {
		v := new(wrapperspb.StringValue)
		if err := dec(v); err != nil {
			return nil, err
		}
		info := &grpc.UnaryServerInfo{Server: srv, FullMethod: "/test.Values/Write"}
		return in(ctx, v, info, func(ctx context.Context, req any) (any, error) {
			return srv.(*service).write(ctx, req.(*wrapperspb.StringValue))
		})
	}}},
	Streams: []grpc.StreamDesc{{StreamName: "Hold", ServerStreams: true, Handler: func(srv any, stream grpc.ServerStream) error {
		s := srv.(*service)
		close(s.began)
		<-stream.Context().Done()
		s.ended <- context.Cause(stream.Context())
		<-s.proceed
		return nil
	}}},
}

type client struct {
	*service
	conn *grpc.ClientConn
}

func start(t testing.TB) *client {
	t.Helper()
	g, err := grpcguard.New(grpcguard.Config{
		Store: inprocess.New(inprocess.Options{}), Replicas: 1, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	s := &service{values: map[string]string{}, began: make(chan struct{}), ended: make(chan error, 1), proceed: make(chan struct{})}
	server := grpc.NewServer(grpc.UnaryInterceptor(g.Unary()), grpc.StreamInterceptor(g.Stream()))
	server.RegisterService(&desc, s)
	ln := bufconn.Listen(1 << 16)
	done := make(chan error, 1)
	go func() { done <- server.Serve(ln) }()
	conn, err := grpc.NewClient("passthrough:///test", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return ln.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return &client{s, conn}
}

func (c *client) send(ctx context.Context, resource string, token fence.Token, claim bool, value string) error {
	err := c.conn.Invoke(grpcguard.Outgoing(ctx, resource, token, claim), "/test.Values/Write", wrapperspb.String(value), &emptypb.Empty{})
	if refusal := grpcguard.Refusal(err); refusal != nil {
		return refusal
	}
	return err
}

// Claim is a call that claims, as a new holder's first one does. It writes what is there.
func (c *client) Claim(ctx context.Context, resource string, token fence.Token) error {
	c.mu.Lock()
	value := c.values[resource]
	c.mu.Unlock()
	return c.send(ctx, resource, token, true, value)
}

func (c *client) Write(ctx context.Context, resource string, token fence.Token, value string) error {
	return c.send(ctx, resource, token, false, value)
}

func (c *client) Value(_ context.Context, resource string) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.values[resource], nil
}

func TestGuardAgainstModel(t *testing.T) { fencetest.Run(t, start(t), "orders/") }

func token(t testing.TB, epoch fence.Epoch, seq fence.Seq) fence.Token {
	t.Helper()
	tok, err := fence.NewToken(epoch, seq)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// A call that claims ends the stream of a lower token, and is handled when that has returned.
func TestF15AClaimEndsStreamsAndWaits(t *testing.T) {
	c := start(t)
	low, high := token(t, 1, 1), token(t, 1, 2)
	if err := c.Claim(t.Context(), "r", low); err != nil {
		t.Fatal(err)
	}
	stream, err := c.conn.NewStream(grpcguard.Outgoing(t.Context(), "r", low, false), &desc.Streams[0], "/test.Values/Hold")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(stream.SendMsg(&emptypb.Empty{}), stream.CloseSend()); err != nil {
		t.Fatal(err)
	}
	<-c.began
	taken := make(chan error, 1)
	go func() { taken <- c.send(t.Context(), "r", high, true, "new") }()
	var stale *fence.StaleError
	if cause := <-c.ended; !errors.As(cause, &stale) || stale.Seen != high {
		t.Errorf("the stream's context ended with %v", cause)
	}
	select {
	case err := <-taken:
		t.Fatalf("handled beside the stream of a lower token: %v", err)
	default:
	}
	close(c.proceed)
	if err := <-taken; err != nil {
		t.Fatal(err)
	}
	_ = stream.RecvMsg(&emptypb.Empty{})
	again, err := c.conn.NewStream(grpcguard.Outgoing(t.Context(), "r", low, false), &desc.Streams[0], "/test.Values/Hold")
	if err != nil {
		t.Fatal(err)
	}
	if err := again.RecvMsg(&emptypb.Empty{}); !errors.As(grpcguard.Refusal(err), &stale) {
		t.Errorf("a stream of the lower token: %v", err)
	}
}

func TestMetadataThatIsNoGood(t *testing.T) {
	c := start(t)
	for name, test := range map[string]struct {
		md   metadata.MD
		want string
	}{
		"nothing":      {metadata.MD{}, "fencing-resource: missing"},
		"no token":     {metadata.Pairs(grpcguard.KeyResource, "r"), "fencing-token: "},
		"two tokens":   {metadata.Pairs(grpcguard.KeyResource, "r", grpcguard.KeyToken, "4294967297", grpcguard.KeyToken, "4294967298"), "fencing-token: "},
		"not a number": {metadata.Pairs(grpcguard.KeyResource, "r", grpcguard.KeyToken, "x"), "not a plain decimal"},
	} {
		err := c.conn.Invoke(metadata.NewOutgoingContext(t.Context(), test.md), "/test.Values/Write", wrapperspb.String("x"), &emptypb.Empty{})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTheHandlersOwnErrorStays(t *testing.T) {
	c := start(t)
	tok := token(t, 1, 1)
	err := c.send(t.Context(), "r", tok, true, "fail")
	if status.Code(err) != codes.AlreadyExists {
		t.Errorf("%v", err)
	}
	if grpcguard.Refusal(status.Error(codes.FailedPrecondition, "somebody else's")) != nil || grpcguard.Refusal(nil) != nil {
		t.Error("an error of somebody else's counts as a refusal")
	}
}

func TestMethodsThatAreNotGuarded(t *testing.T) {
	g, err := grpcguard.New(grpcguard.Config{Store: inprocess.New(inprocess.Options{}), Replicas: 1, Guarded: func(m string) bool { return m != "/health" }})
	if err != nil {
		t.Fatal(err)
	}
	call := func(method string) error {
		_, err := g.Unary()(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: method}, func(context.Context, any) (any, error) { return nil, nil })
		return err
	}
	if call("/health") != nil || status.Code(call("/write")) != codes.InvalidArgument {
		t.Error(call("/health"), call("/write"))
	}
}

func TestReplicasNeedASharedStore(t *testing.T) {
	_, err := grpcguard.New(grpcguard.Config{Store: inprocess.New(inprocess.Options{}), Replicas: 2})
	if err == nil || !strings.Contains(err.Error(), "use a shared one") {
		t.Errorf("two replicas with marks in memory: %v", err)
	}
}
