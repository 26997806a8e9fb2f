package policy

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	describe = "/headlease.v1.VoteService/DescribeVoter"
	prepare  = "/headlease.v1.VoteService/Prepare"
	accept   = "/headlease.v1.VoteService/Accept"
	config   = "/headlease.v1.VoteService/Configure"
	check    = "/grpc.health.v1.Health/Check"
	list     = "/grpc.health.v1.Health/List"
	watch    = "/grpc.health.v1.Health/Watch"
	attach   = "/headlease.v1.SessionService/Attach"
	open     = "/headlease.v1.SessionService/OpenSession"
	closing  = "/headlease.v1.SessionService/CloseSession"
)

func table() Table {
	return Table{
		describe: {Deadline: time.Second, MaxRequestBytes: 64, Roles: []Role{Region, Admin}},
		prepare:  {Deadline: 3 * time.Second, MaxRequestBytes: 64, Roles: []Role{Region}},
		accept:   {Deadline: time.Second, MaxRequestBytes: 4096, Roles: []Role{Region}},
		config:   {Deadline: time.Second, MaxRequestBytes: 64, Roles: []Role{Admin}},
		check:    {Deadline: time.Second, MaxRequestBytes: 64, Roles: Everyone()},
		list:     {Deadline: time.Second, MaxRequestBytes: 64, Roles: Everyone()},
		watch:    {Deadline: NoDeadline, MaxRequestBytes: 64, Roles: Everyone()},
		attach:   {Deadline: NoDeadline, MaxRequestBytes: 64, Roles: []Role{Client}},
		open:     {Deadline: time.Second, MaxRequestBytes: 64, Roles: []Role{Client}},
		closing:  {Deadline: time.Second, MaxRequestBytes: 64, Roles: []Role{Client}},
	}
}

// byMetadata stands for the connection's certificate.
func byMetadata(ctx context.Context) (Caller, bool) {
	md, _ := metadata.FromIncomingContext(ctx)
	if v := md.Get("role"); len(v) == 1 {
		return Caller{Role: Role(v[0]), Name: v[0] + "/x"}, true
	}
	return Caller{}, false
}

type votes struct {
	pb.UnimplementedVoteServiceServer
	left time.Duration
}

func (v *votes) Prepare(ctx context.Context, _ *pb.PrepareRequest) (*pb.PrepareResponse, error) {
	deadline, _ := ctx.Deadline()
	v.left = time.Until(deadline)
	return &pb.PrepareResponse{}, nil
}

func (*votes) DescribeVoter(context.Context, *pb.DescribeVoterRequest) (*pb.DescribeVoterResponse, error) {
	return &pb.DescribeVoterResponse{Version: "v"}, nil
}

type sessions struct {
	pb.UnimplementedSessionServiceServer
}

func (sessions) Attach(s grpc.BidiStreamingServer[pb.AttachRequest, pb.AttachResponse]) error {
	for {
		if _, err := s.Recv(); err != nil {
			return err
		}
		if err := s.Send(&pb.AttachResponse{Term: 1}); err != nil {
			return err
		}
	}
}

func serve(t *testing.T, e *Enforcer) (*grpc.ClientConn, *votes) {
	t.Helper()
	v := &votes{}
	server := grpc.NewServer(e.ServerOptions()...)
	pb.RegisterVoteServiceServer(server, v)
	pb.RegisterSessionServiceServer(server, sessions{})
	healthpb.RegisterHealthServer(server, health.NewServer())
	if err := e.Check(server); err != nil {
		t.Fatal(err)
	}
	l := bufconn.Listen(1 << 16)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(); server.Stop(); <-done })
	return conn, v
}

func as(ctx context.Context, role Role) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "role", string(role))
}

func TestRolesSizesAndDeadlines(t *testing.T) {
	conn, v := serve(t, &Enforcer{Table: table(), Identify: byMetadata})
	c := pb.NewVoteServiceClient(conn)
	ctx := t.Context()

	_, err := c.DescribeVoter(ctx, &pb.DescribeVoterRequest{})
	if status.Code(err) != codes.Unauthenticated {
		t.Errorf("without identity: %v", err)
	}
	for _, role := range Everyone() {
		_, err := c.DescribeVoter(as(ctx, role), &pb.DescribeVoterRequest{})
		if allowed := role == Region || role == Admin; allowed != (err == nil) {
			t.Errorf("describe as %s: %v", role, err)
		} else if !allowed && (status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "role region or admin")) {
			t.Errorf("describe as %s: %v", role, err)
		}
	}
	if _, err := c.Prepare(as(ctx, Region), &pb.PrepareRequest{}); err != nil || v.left <= 0 || v.left > 3*time.Second {
		t.Errorf("prepare without a deadline got %v to run: %v", v.left, err)
	}
	large := &pb.PrepareRequest{Partitions: []string{strings.Repeat("p", 100)}}
	if _, err := c.Prepare(as(ctx, Region), large); status.Code(err) != codes.ResourceExhausted || len(status.Convert(err).Details()) != 1 {
		t.Errorf("oversized: %v", err)
	}
	huge := &pb.PrepareRequest{Partitions: []string{strings.Repeat("p", 5000)}}
	if _, err := c.Prepare(as(ctx, Region), huge); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("beyond every method's limit: %v", err)
	}
}

func TestStreams(t *testing.T) {
	conn, _ := serve(t, &Enforcer{Table: table(), Identify: byMetadata})
	c := pb.NewSessionServiceClient(conn)
	refused, err := c.Attach(as(t.Context(), Region))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := refused.Recv(); status.Code(err) != codes.PermissionDenied {
		t.Errorf("attach as region: %v", err)
	}
	s, err := c.Attach(as(t.Context(), Client))
	if err != nil {
		t.Fatal(err)
	}
	detach := func(id string) *pb.AttachRequest {
		return &pb.AttachRequest{Kind: &pb.AttachRequest_Detach{Detach: &pb.Detach{SessionId: id}}}
	}
	if err := s.Send(detach("s")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := s.Send(detach(strings.Repeat("s", 100))); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("oversized message: %v", err)
	}
}

func TestCheckNamesWhatIsMissing(t *testing.T) {
	server := grpc.NewServer()
	pb.RegisterVoteServiceServer(server, &votes{})
	pb.RegisterSessionServiceServer(server, sessions{})
	tab := table()
	delete(tab, prepare)
	tab[config] = Rule{}
	tab[attach] = Rule{Deadline: time.Second, MaxRequestBytes: 1, Roles: Everyone()}
	err := (&Enforcer{Table: tab}).Check(server)
	if err == nil {
		t.Fatal("an incomplete table passed")
	}
	for _, want := range []string{
		prepare + ": served without a rule", config + ": deadline", config + ": max request bytes", config + ": roles",
		attach + ": deadline: a client stream",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	if strings.Contains(err.Error(), describe) {
		t.Errorf("a complete entry is named: %v", err)
	}
}
