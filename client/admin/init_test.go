package admin_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/leaktest"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region"
	"github.com/headlease/headlease/witness"
)

func TestMain(m *testing.M) { leaktest.VerifyTestMain(m) }

const stepTimeout = 20 * time.Second

// cluster is a region of one server and a witness, in this process, over TLS on
// loopback.
type cluster struct {
	t     *testing.T
	dir   string
	file  clusterfile.File
	admin *link.Links
	stops map[string]func()
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), stops: map[string]func(){}}
	a := addresses(t, 6)
	c.file = clusterfile.File{
		Cluster: "test", D: time.Second, Shards: 4, Timing: "calm",
		Regions:    []clusterfile.Region{{Name: "eu", Servers: []clusterfile.Server{{Name: "eu-1", API: a[0], Votes: a[1], Raft: a[2], Gossip: a[3]}}}},
		Witnesses:  []clusterfile.Witness{{Name: "w1", Votes: a[4], Gossip: a[5]}},
		Partitions: []clusterfile.Partition{{Name: "all", Shards: []clusterfile.ShardRange{{First: 0, Last: 3}}, Prefer: []string{"eu"}}},
	}
	if _, err := pki.Generate(pki.Config{Dir: filepath.Join(c.dir, "certs"), Cluster: "test", Identities: []pki.Identity{
		{Role: pki.RoleRegion, Region: "eu", Name: "eu-1"}, {Role: pki.RoleWitness, Name: "w1"},
		{Role: pki.RoleAdmin}, {Role: pki.RoleClient, Name: "alice"},
	}}); err != nil {
		t.Fatal(err)
	}
	c.admin = c.links(pki.Identity{Role: pki.RoleAdmin})
	t.Cleanup(func() {
		for name := range c.stops {
			c.stop(name)
		}
	})
	return c
}

// addresses that are free for TCP and UDP now.
func addresses(t *testing.T, n int) []string {
	t.Helper()
	var out []string
	for range n {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = ln.Close() }()
		out = append(out, ln.Addr().String())
	}
	return out
}

func (c *cluster) credentials(id pki.Identity, gossip bool) *pki.Credentials {
	c.t.Helper()
	id.Cluster = "test"
	creds, err := pki.Load(pki.LoadConfig{Dir: filepath.Join(c.dir, "certs"), Want: id, Gossip: gossip})
	if err != nil {
		c.t.Fatal(err)
	}
	return creds
}

func (c *cluster) links(id pki.Identity) *link.Links {
	c.t.Helper()
	id.Cluster = "test"
	l, err := link.New(link.Config{Identity: id, Credentials: c.credentials(id, false)})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = l.Close() })
	return l
}

func (c *cluster) systemClock() clock.Clock {
	c.t.Helper()
	cl, err := clock.NewSystem()
	if err != nil {
		c.t.Fatal(err)
	}
	return cl
}

func (c *cluster) startRegion() {
	c.t.Helper()
	s, err := region.New(c.t.Context(), region.Config{
		File: c.file, Name: "eu-1", DataDir: filepath.Join(c.dir, "eu-1"), Clock: c.systemClock(), Version: "test",
		Credentials: c.credentials(pki.Identity{Role: pki.RoleRegion, Region: "eu", Name: "eu-1"}, true), Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.run("eu-1", s.Run)
}

func (c *cluster) startWitness() {
	c.t.Helper()
	w, err := witness.New(witness.Config{
		Cluster: "test", Name: "w1", DataDir: filepath.Join(c.dir, "w1"), Votes: c.file.Witnesses[0].Votes, Gossip: c.file.Witnesses[0].Gossip,
		Peers: []witness.Peer{{Name: "eu-1", Role: pki.RoleRegion, Region: "eu", Gossip: c.file.Regions[0].Servers[0].Gossip}},
		D:     c.file.D, Clock: c.systemClock(), Credentials: c.credentials(pki.Identity{Role: pki.RoleWitness, Name: "w1"}, true),
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.run("w1", w.Run)
}

func (c *cluster) run(name string, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	c.stops[name] = func() {
		cancel()
		if err := <-done; err != nil {
			c.t.Errorf("%s: %v", name, err)
		}
	}
}

func (c *cluster) stop(name string) {
	c.stops[name]()
	delete(c.stops, name)
}

func (c *cluster) within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeoutCause(c.t.Context(), d, fmt.Errorf("the step took longer than %v", d))
	c.t.Cleanup(cancel)
	return ctx
}

// breaking breaks an Init off at its n-th call, from 1: before it is sent, or
// after it took effect. It ends Init's context then, as a killed command would.
type breaking struct {
	*link.Links
	after  bool
	left   atomic.Int64
	cancel context.CancelFunc
}

func (b *breaking) DialGRPC(plane link.Plane, peer link.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error) {
	return b.Links.DialGRPC(plane, peer, append(extra, grpc.WithChainUnaryInterceptor(
		func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if b.left.Add(-1) != 0 {
				return invoke(ctx, method, req, reply, cc, opts...)
			}
			var err error
			if b.after {
				err = invoke(ctx, method, req, reply, cc, opts...)
			}
			b.cancel()
			return errors.Join(status.Error(codes.Unavailable, "broken off"), err)
		}))...)
}

// TestInitResumesWhereverItWasBrokenOff: before each of its calls and after
// each had its effect; then it goes to its end.
func TestInitResumesWhereverItWasBrokenOff(t *testing.T) {
	c := newCluster(t)
	c.startRegion()
	c.startWitness()
	var conf *pb.ClusterConfiguration
	calls := 0
	for n := 1; conf == nil; n++ {
		for _, after := range []bool{false, true} {
			ctx, cancel := context.WithTimeout(t.Context(), stepTimeout)
			links := &breaking{Links: c.admin, after: after, cancel: cancel}
			links.left.Store(int64(n))
			cl := admin.New(c.file, links)
			got, err := cl.Init(ctx, func(string) {})
			cancel()
			if cerr := cl.Close(); cerr != nil {
				t.Error(cerr)
			}
			if err == nil {
				conf = got
				break
			}
			if calls = n; n > 12 {
				t.Fatalf("init never ends: %v", err)
			}
		}
	}
	if calls != 7 {
		t.Errorf("init was broken off at %d calls; 2 processes, a group, and 2 voters twice make 7", calls)
	}
	cl := admin.New(c.file, c.admin)
	defer func() { _ = cl.Close() }()
	again, err := cl.Init(c.within(stepTimeout), func(string) {})
	if err != nil || !proto.Equal(again, conf) {
		t.Errorf("init once more: %v, %v; want %v", again, err, conf)
	}
	other := c.file
	other.D = 2 * time.Second
	changed := admin.New(other, c.admin)
	defer func() { _ = changed.Close() }()
	if _, err := changed.Init(c.within(stepTimeout), func(string) {}); err == nil || !strings.Contains(err.Error(), "init changes nothing that exists") {
		t.Errorf("init of another file: %v", err)
	}
}

func TestInitNamesWhoDoesNotAnswerAndWhere(t *testing.T) {
	c := newCluster(t)
	c.startRegion()
	cl := admin.New(c.file, c.admin)
	defer func() { _ = cl.Close() }()
	_, err := cl.Init(c.within(3*time.Second), func(string) {})
	want := "witness/w1 did not answer on the votes plane at " + c.file.Witnesses[0].Votes
	if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "eu-1") {
		t.Errorf("%v\nwant %s and nothing of eu-1", err, want)
	}
}

// TestARefusalIsNotCalledSilence: a server without --drills takes no faults,
// and starting it again would not help.
func TestARefusalIsNotCalledSilence(t *testing.T) {
	c := newCluster(t)
	c.startRegion()
	cl := admin.New(c.file, c.admin)
	defer func() { _ = cl.Close() }()
	err := cl.SetFaults(c.within(stepTimeout), c.file.RegionProcesses("eu")[0], &pb.SetFaultsRequest{})
	var refused *admin.Refused
	if !errors.As(err, &refused) || status.Code(refused.Err) != codes.Unimplemented || strings.Contains(err.Error(), "start it") {
		t.Errorf("%v", err)
	}
}

// TestALeaseOutlivesARestart of the region's only server, with its token and
// session.
func TestALeaseOutlivesARestart(t *testing.T) {
	c := newCluster(t)
	c.startRegion()
	c.startWitness()
	cl := admin.New(c.file, c.admin)
	defer func() { _ = cl.Close() }()
	ctx := c.within(2 * stepTimeout)
	if _, err := cl.Init(ctx, func(string) {}); err != nil {
		t.Fatal(err)
	}
	if err := cl.WaitOwned(ctx); err != nil {
		t.Fatal(err)
	}
	conn, err := c.links(pki.Identity{Role: pki.RoleClient, Name: "alice"}).DialGRPC(link.PlaneAPI,
		link.Peer{Name: "eu-1", Region: "eu", Role: pki.RoleRegion, Address: c.file.Regions[0].Servers[0].API}, grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	s, err := pb.NewSessionServiceClient(conn).OpenSession(ctx, &pb.OpenSessionRequest{TtlMs: 60_000})
	if err != nil {
		t.Fatal(err)
	}
	req := &pb.AcquireRequest{SessionId: s.GetSessionId(), Secret: s.GetSecret(), RequestId: 1, LowestOpenRequest: 1, Resource: "lock/x"}
	first, err := pb.NewLeaseServiceClient(conn).Acquire(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	c.stop("eu-1")
	c.startRegion()
	if err := cl.WaitOwned(ctx); err != nil {
		t.Fatal(err)
	}
	second, err := pb.NewLeaseServiceClient(conn).Acquire(ctx, req)
	if err != nil || second.GetGranted().GetToken() != first.GetGranted().GetToken() || second.GetTerm() <= first.GetTerm() {
		t.Errorf("after a restart the same request gives %v, %v; before %v", second, err, first)
	}
}
