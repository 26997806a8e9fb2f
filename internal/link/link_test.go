package link

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/pki"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	eu1    = Identity{Cluster: "c", Role: pki.RoleRegion, Region: "eu", Name: "eu-1"}
	eu2    = Identity{Cluster: "c", Role: pki.RoleRegion, Region: "eu", Name: "eu-2"}
	us1    = Identity{Cluster: "c", Role: pki.RoleRegion, Region: "us", Name: "us-1"}
	w1     = Identity{Cluster: "c", Role: pki.RoleWitness, Name: "w1"}
	alice  = Identity{Cluster: "c", Role: pki.RoleClient, Name: "alice"}
	admin  = Identity{Cluster: "c", Role: pki.RoleAdmin}
	actors = []Identity{eu1, eu2, us1, w1, alice, admin}
)

// set makes the certificates of a cluster.
func set(t *testing.T, cluster string) string {
	t.Helper()
	dir := t.TempDir()
	ids := make([]Identity, len(actors))
	for i, id := range actors {
		id.Cluster = cluster
		ids[i] = id
	}
	if _, err := pki.Generate(pki.Config{Dir: dir, Cluster: cluster, Identities: ids}); err != nil {
		t.Fatal(err)
	}
	return dir
}

// links of one process; dir "" is insecure.
func links(t *testing.T, dir string, id Identity, faults *fault.Table) *Links {
	t.Helper()
	c := Config{Identity: id, Faults: faults, Insecure: dir == "", Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	if dir != "" {
		creds, err := pki.Load(pki.LoadConfig{Dir: dir, Want: id, Gossip: true})
		if err != nil {
			t.Fatal(err)
		}
		c.Credentials = creds
	}
	l, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func table(t *testing.T) *fault.Table {
	t.Helper()
	tbl, err := fault.NewTable(fault.Rules{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tbl.Close)
	return tbl
}

func short5(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func peerOf(id Identity, addr string) Peer {
	return Peer{Name: id.Name, Region: id.Region, Role: id.Role, Address: addr}
}

// callers records who calls.
type callers struct {
	grpc_health_v1.UnimplementedHealthServer
	seen chan Identity
}

func (c *callers) Check(ctx context.Context, _ *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	id, _ := PeerIdentity(ctx)
	c.seen <- id
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

// serve runs a gRPC server on a plane and returns its address.
func serve(t *testing.T, l *Links, plane Plane) (string, *callers) {
	t.Helper()
	ln, err := l.Listen(plane, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer(l.ServerOptions(plane)...)
	c := &callers{seen: make(chan Identity, 100)}
	grpc_health_v1.RegisterHealthServer(srv, c)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ln) }()
	t.Cleanup(func() {
		srv.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return ln.Addr().String(), c
}

func check(ctx context.Context, t *testing.T, l *Links, plane Plane, p Peer) error {
	t.Helper()
	cc, err := l.DialGRPC(plane, p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cc.Close() }()
	_, err = grpc_health_v1.NewHealthClient(cc).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	return err
}

func eachMode(t *testing.T, f func(t *testing.T, dir string)) {
	t.Run("tls", func(t *testing.T) { f(t, set(t, "c")) })
	t.Run("insecure", func(t *testing.T) { f(t, "") })
}

func TestGRPCCarriesIdentity(t *testing.T) {
	eachMode(t, func(t *testing.T, dir string) {
		server := links(t, dir, eu1, nil)
		for _, plane := range []Plane{PlaneAPI, PlaneVotes} {
			addr, c := serve(t, server, plane)
			for _, id := range []Identity{us1, w1, admin} {
				if err := check(short5(t), t, links(t, dir, id, nil), plane, peerOf(eu1, addr)); err != nil {
					t.Fatal(err)
				}
				if got := <-c.seen; got != id {
					t.Errorf("%s: caller is %v, not %v", plane, got, id)
				}
			}
		}
	})
}

var _ net.Listener = (*secured)(nil)

// TestAClosedLinksCallsNobody: it says that it is closed before it dials.
func TestAClosedLinksCallsNobody(t *testing.T) {
	creds, err := pki.Load(pki.LoadConfig{Dir: set(t, "c"), Want: eu1})
	if err != nil {
		t.Fatal(err)
	}
	called := 0
	l, err := New(Config{Identity: eu1, Credentials: creds, Dial: func(context.Context, string, string) (net.Conn, error) {
		called++
		return nil, errors.New("refused")
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.dial(t.Context(), PlaneRaft, peerOf(eu2, "127.0.0.1:1")); err == nil || called != 1 {
		t.Fatalf("dialled %d times: %v", called, err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.dial(t.Context(), PlaneRaft, peerOf(eu2, "127.0.0.1:1")); !errors.Is(err, ErrClosed) || called != 1 {
		t.Errorf("closed, dialled %d times: %v", called-1, err)
	}
}
