package api

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/admission"
)

// TestAFullServerAnswersOverloaded: the refusal is typed and names the time to
// ask again, releases pass, and what was answered makes room.
func TestAFullServerAnswersOverloaded(t *testing.T) {
	control, err := admission.New(admission.Limits{InFlight: 1})
	if err != nil {
		t.Fatal(err)
	}
	refusals := 0
	a := &Admission{
		Control: control,
		Identify: func(context.Context) (policy.Caller, bool) {
			return policy.Caller{Role: policy.Client, Name: "client/a"}, true
		},
		Refused: func(admission.Lane, bool) { refusals++ },
	}
	entered, leave := make(chan struct{}), make(chan struct{})
	first := make(chan error, 1)
	call := func(method string, handler grpc.UnaryHandler) error {
		_, err := a.Unary(context.Background(), nil, &grpc.UnaryServerInfo{FullMethod: method}, handler)
		return err
	}
	at := func(context.Context, any) (any, error) { return nil, nil }
	go func() {
		first <- call(pb.LeaseService_Acquire_FullMethodName, func(context.Context, any) (any, error) {
			close(entered)
			<-leave
			return nil, nil
		})
	}()
	<-entered
	err = call(pb.LeaseService_Acquire_FullMethodName, at)
	var detail *DetailError
	if !errors.As(err, &detail) || detail.Detail.GetOverloaded().GetRetryNs() <= 0 || status.Code(err) != codes.ResourceExhausted {
		t.Errorf("second of one: %v, want OVERLOADED with a retry time", err)
	}
	if refusals != 1 {
		t.Errorf("%d refusals told, want 1", refusals)
	}
	for _, method := range []string{pb.LeaseService_Release_FullMethodName, pb.LeaseService_CancelAcquire_FullMethodName, pb.SessionService_CloseSession_FullMethodName} {
		if err := call(method, at); err != nil {
			t.Errorf("%s refused by a full server: %v", method, err)
		}
	}
	close(leave)
	if err := <-first; err != nil {
		t.Error(err)
	}
	if err := call(pb.LeaseService_Acquire_FullMethodName, at); err != nil {
		t.Errorf("after the answer: %v", err)
	}
}

// TestEveryClientMethodHasALane: a method that takes room and is forgotten in
// Lane would pass a full server. The list is of those that make none.
func TestEveryClientMethodHasALane(t *testing.T) {
	relief := map[string]bool{
		pb.SessionService_Attach_FullMethodName:       true,
		pb.SessionService_CloseSession_FullMethodName: true,
		pb.LeaseService_CancelAcquire_FullMethodName:  true,
		pb.LeaseService_Release_FullMethodName:        true,
	}
	for method := range Policy() {
		service, _, _ := strings.Cut(strings.TrimPrefix(method, "/headlease.v1."), "/")
		switch service {
		case "SessionService", "LeaseService", "WatchService":
		default:
			continue
		}
		if got := Lane(method) == admission.Relief; got != relief[method] {
			t.Errorf("%s: relief %v, want %v; add it to Lane or to this list", method, got, relief[method])
		}
	}
}

func TestAPanicIsAnsweredAndEndsTheServer(t *testing.T) {
	died := make(chan error, 2)
	var boom = func() { panic("broken table") }
	unary, streamed := Recover(func(err error) { died <- err })
	options := []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(unary, func(context.Context, any, *grpc.UnaryServerInfo, grpc.UnaryHandler) (any, error) {
			boom()
			return nil, nil
		}),
		grpc.ChainStreamInterceptor(streamed, func(any, grpc.ServerStream, *grpc.StreamServerInfo, grpc.StreamHandler) error {
			boom()
			return nil
		}),
	}
	server := grpc.NewServer(options...)
	healthpb.RegisterHealthServer(server, health.NewServer())
	ln := bufconn.Listen(1 << 16)
	served := make(chan error, 1)
	go func() { served <- server.Serve(ln) }()
	conn, err := grpc.NewClient("passthrough:///buf", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return ln.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c := healthpb.NewHealthClient(conn)
	if _, err := c.Check(ctx, &healthpb.HealthCheckRequest{}); status.Code(err) != codes.Internal || strings.Contains(err.Error(), "broken table") {
		t.Errorf("a panic is answered with %v, want an internal error without its insides", err)
	}
	stream, err := c.Watch(ctx, &healthpb.HealthCheckRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Internal {
		t.Errorf("a stream's panic is answered with %v", err)
	}
	for range 2 {
		if err := <-died; !strings.Contains(err.Error(), "broken table") || !strings.Contains(err.Error(), "admit_test.go") {
			t.Errorf("told %v, want the panic and its stack", err)
		}
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	server.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
