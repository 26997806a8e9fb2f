package witness

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/detector"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

var (
	idW1    = pki.Identity{Cluster: "test", Role: pki.RoleWitness, Name: "w1"}
	idW2    = pki.Identity{Cluster: "test", Role: pki.RoleWitness, Name: "w2"}
	idEU    = pki.Identity{Cluster: "test", Role: pki.RoleRegion, Region: "eu", Name: "eu-1"}
	idUS    = pki.Identity{Cluster: "test", Role: pki.RoleRegion, Region: "us", Name: "us-1"}
	idApp   = pki.Identity{Cluster: "test", Role: pki.RoleClient, Name: "app"}
	idAdmin = pki.Identity{Cluster: "test", Role: pki.RoleAdmin}
)

// certificates are made once for all tests.
var certificates = sync.OnceValue(func() map[pki.Identity]*pki.Credentials {
	dir, err := os.MkdirTemp("", "headlease-witness-test")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	ids := []pki.Identity{idW1, idW2, idEU, idUS, idApp, idAdmin}
	if _, err := pki.Generate(pki.Config{Dir: dir, Cluster: "test", Identities: ids}); err != nil {
		panic(err)
	}
	out := map[pki.Identity]*pki.Credentials{}
	for _, id := range ids {
		creds, err := pki.Load(pki.LoadConfig{Dir: dir, Want: id, Gossip: true})
		if err != nil {
			panic(err)
		}
		out[id] = creds
	}
	return out
})

func configIn(dir string) Config {
	return Config{
		Cluster: "test", Name: "w1", DataDir: dir, Votes: "127.0.0.1:0", Gossip: "127.0.0.1:0", D: testD,
		Credentials: certificates()[idW1], Clock: clock.NewRuntime(), Version: "v", Logger: quiet(),
	}
}

// running is a witness with its Run under way.
type running struct {
	*Witness
	stop func() error
}

func run(t *testing.T, cfg Config) *running {
	t.Helper()
	w, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	r := &running{Witness: w}
	r.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { _ = r.stop() })
	return r
}

// client connects to the witness as id.
func (r *running) client(t *testing.T, id pki.Identity) pb.VoteServiceClient {
	t.Helper()
	return pb.NewVoteServiceClient(r.dial(t, id))
}

func (r *running) dial(t *testing.T, id pki.Identity) *grpc.ClientConn {
	t.Helper()
	links, err := link.New(link.Config{Identity: id, Credentials: certificates()[id], Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := links.DialGRPC(link.PlaneVotes, link.Peer{Name: "w1", Role: pki.RoleWitness, Address: r.VotesAddr().String()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(); _ = links.Close() })
	return conn
}

func initialise(t *testing.T, r *running) {
	t.Helper()
	admin := r.client(t, idAdmin)
	d, err := admin.DescribeVoter(t.Context(), &pb.DescribeVoterRequest{})
	if err != nil {
		t.Fatal(err)
	}
	c := (&rig{voter: &voter{self: identity{incarnation: register.Incarnation(d.GetState().GetVoter().GetIncarnation())}}}).configuration()
	if _, err := admin.Configure(t.Context(), &pb.ConfigureRequest{Configuration: c}); err != nil {
		t.Fatal(err)
	}
}

func TestOverTLS(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	r := run(t, configIn(dir))
	initialise(t, r)
	c := r.client(t, idEU)
	p, err := c.Prepare(t.Context(), prepareOf(eu, 1, "p"))
	if err != nil || p.GetAnswers()[0].GetRefusal() != nil {
		t.Fatalf("prepare: %v, %v", p, err)
	}
	a, err := c.Accept(t.Context(), acceptOf(eu, 1, 1, "p"))
	if err != nil || a.GetAnswers()[0].GetRefusal() != nil {
		t.Fatalf("accept: %v, %v", a, err)
	}
	first := a.GetState()
	h, err := healthpb.NewHealthClient(r.dial(t, idEU)).Check(t.Context(), &healthpb.HealthCheckRequest{Service: "headlease.v1.VoteService"})
	if err != nil || h.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("health: %v, %v", h, err)
	}
	if err := r.stop(); err != nil {
		t.Fatalf("Run: %v", err)
	}

	again := run(t, configIn(dir))
	c = again.client(t, idUS)
	d, err := c.DescribeVoter(t.Context(), &pb.DescribeVoterRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if d.GetState().GetPreviousLife() != first.GetLife() || !proto.Equal(d.GetState().GetVoter(), first.GetVoter()) || len(d.GetRegisters()) != 2 ||
		register.RecordOf(d.GetRegisters()[0].GetRegister()).Accepted != ballot(1, eu) || d.GetConfiguration().GetClusterId() != "c" {
		t.Errorf("after a restart: %v", d)
	}
	p, err = c.Prepare(t.Context(), prepareOf(us, 2, "p"))
	if err != nil || p.GetAnswers()[0].GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_V2_RUNNING {
		t.Errorf("right after a restart: %v, %v", p, err)
	}
	if err := again.stop(); err != nil {
		t.Fatalf("Run: %v", err)
	}
}

// TestV3ByRealHeartbeats: a region's heartbeats over real gossip make the
// witness hold it alive.
func TestV3ByRealHeartbeats(t *testing.T) {
	gossip := func(links *link.Links, peers map[string]link.Peer) *link.GossipTransport {
		g, err := links.GossipTransport(link.GossipConfig{Listen: "127.0.0.1:0", Resolve: func(name, _ string) (link.Peer, bool) {
			p, ok := peers[name]
			return p, ok
		}})
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	links, err := link.New(link.Config{Identity: idEU, Credentials: certificates()[idEU], Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = links.Close() }()
	peers := map[string]link.Peer{"w1": {Name: "w1", Role: pki.RoleWitness}}
	transport := gossip(links, peers)

	cfg := configIn(t.TempDir())
	cfg.Peers = []Peer{{Name: "eu-1", Region: "eu", Role: pki.RoleRegion, Gossip: transport.Addr().String()}}
	r := run(t, cfg)
	initialise(t, r)
	heard := make(chan string, 16)
	eu1, err := detector.New(detector.Config{
		Name: "eu-1", Region: "eu", Cluster: "test", Key: certificates()[idEU].GossipKey, Transport: transport, D: testD,
		Clock: clock.NewRuntime(), Logger: quiet(), Peers: []detector.Peer{{Name: "w1", Gossip: r.GossipAddr().String()}},
		Heard: func(peer string) { heard <- peer },
	})
	if err != nil {
		t.Fatal(err)
	}
	eu1.SetBeat(func() (*pb.Heartbeat, bool) { return &pb.Heartbeat{Term: 1, ClusterId: "c"}, true })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- eu1.Run(ctx) }()
	if peer := <-heard; peer != "w1" {
		t.Errorf("heard %q", peer)
	}
	c := r.client(t, idEU)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(20 * time.Second); ; <-tick.C {
		d, err := c.DescribeVoter(t.Context(), &pb.DescribeVoterRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if p := d.GetPeers(); len(p) == 1 && p[0].GetVerdict() == pb.Verdict_VERDICT_HEALTHY && len(d.GetRoundTrips()) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the witness does not hear the region: %v", d)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("detector: %v", err)
	}
}

func TestWhoMayDoWhat(t *testing.T) {
	r := run(t, configIn(t.TempDir()))
	initialise(t, r)
	for _, c := range []struct {
		name string
		id   pki.Identity
		call func(pb.VoteServiceClient) error
		want codes.Code
		text string
	}{
		{"vote for another region", idUS, prepareAs(eu), codes.PermissionDenied, `header.candidate: "eu" is not the region of region/us/us-1`},
		{"vote as a witness", idW2, prepareAs(eu), codes.PermissionDenied, "witness/w2 may not call"},
		{"vote as the admin", idAdmin, prepareAs(eu), codes.PermissionDenied, "admin may not call"},
		{"describe as a witness", idW2, describe, codes.OK, ""},
		{"describe as a region", idEU, describe, codes.OK, ""},
		{"describe as a client", idApp, describe, codes.Unavailable, ""}, // refused at the handshake
		{"configure as a witness", idW2, configureAs, codes.PermissionDenied, "role region or admin"},
	} {
		err := c.call(r.client(t, c.id))
		if status.Code(err) != c.want || (err != nil && !strings.Contains(err.Error(), c.text)) {
			t.Errorf("%s: %v, want %v with %q", c.name, err, c.want, c.text)
		}
	}
	fc := pb.NewFaultServiceClient(r.dial(t, idAdmin))
	if _, err := fc.ListFaults(t.Context(), &pb.ListFaultsRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("drills are off, but FaultService answers %v", err)
	}
}

func prepareAs(who register.Region) func(pb.VoteServiceClient) error {
	return func(c pb.VoteServiceClient) error {
		_, err := c.Prepare(context.Background(), prepareOf(who, 1, "p"))
		return err
	}
}

func describe(c pb.VoteServiceClient) error {
	_, err := c.DescribeVoter(context.Background(), &pb.DescribeVoterRequest{})
	return err
}

func configureAs(c pb.VoteServiceClient) error {
	_, err := c.Configure(context.Background(), &pb.ConfigureRequest{Configuration: &pb.ClusterConfiguration{}})
	return err
}

func TestMalformedVotes(t *testing.T) {
	r := run(t, configIn(t.TempDir()))
	initialise(t, r)
	c := r.client(t, idEU)
	for name, p := range map[string]struct {
		change func(*pb.PrepareRequest)
		field  string
	}{
		"no partition":      {func(q *pb.PrepareRequest) { q.Partitions = nil }, "partitions:"},
		"twice":             {func(q *pb.PrepareRequest) { q.Partitions = []string{"p", "p"} }, "partitions:"},
		"no ballot":         {func(q *pb.PrepareRequest) { q.Ballot = nil }, "ballot.round:"},
		"another's":         {func(q *pb.PrepareRequest) { q.Ballot.Region = "us" }, "ballot:"},
		"other incarnation": {func(q *pb.PrepareRequest) { q.Ballot.Incarnation++ }, "ballot:"},
	} {
		req := prepareOf(eu, 1, "p")
		p.change(req)
		if _, err := c.Prepare(t.Context(), req); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), p.field) {
			t.Errorf("prepare, %s: %v", name, err)
		}
	}
	for name, a := range map[string]struct {
		change func(*pb.AcceptItem)
		field  string
	}{
		"no ballot": {func(i *pb.AcceptItem) { i.Ballot = nil }, "items[0].ballot.round:"},
		"no value":  {func(i *pb.AcceptItem) { i.Value = nil }, "items[0].value:"},
		"D of 0":    {func(i *pb.AcceptItem) { i.Value.DNs = 0 }, "value.d_ns"},
		"epoch 0":   {func(i *pb.AcceptItem) { i.Value.Epoch = 0 }, "value.epoch"},
		"another's": {func(i *pb.AcceptItem) { i.Value.Owner = "us" }, "items[0].value.owner:"},
	} {
		req := acceptOf(eu, 1, 1, "p")
		a.change(req.GetItems()[0])
		if _, err := c.Accept(t.Context(), req); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), a.field) {
			t.Errorf("accept, %s: %v", name, err)
		}
	}
	huge := prepareOf(eu, 1, strings.Repeat("p", voteBytes))
	if _, err := c.Prepare(t.Context(), huge); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("an oversized message: %v", err)
	}
	d, err := c.DescribeVoter(t.Context(), &pb.DescribeVoterRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, reg := range d.GetRegisters() {
		if register.RecordOf(reg.GetRegister()) != (register.Record{}) {
			t.Errorf("a malformed message left %v", reg)
		}
	}
}

func TestABrokenDiskEndsRun(t *testing.T) {
	faults, err := fault.NewTable(fault.Rules{})
	if err != nil {
		t.Fatal(err)
	}
	defer faults.Close()
	cfg := configIn(t.TempDir())
	cfg.Faults = faults
	w, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- w.Run(context.Background()) }()
	r := &running{Witness: w}
	initialise(t, r)
	_, err = pb.NewFaultServiceClient(r.dial(t, idAdmin)).SetFaults(t.Context(), &pb.SetFaultsRequest{
		DiskFaults: []*pb.DiskFault{{Id: "eio", Store: "register", Error: true, ExpiresMs: 60_000}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.client(t, idEU).Accept(t.Context(), acceptOf(eu, 1, 1, "p")); status.Code(err) != codes.Unavailable {
		t.Errorf("accept on a broken disk: %v", err)
	}
	if err := <-done; err == nil || !strings.Contains(err.Error(), "witness store") {
		t.Errorf("Run returned %v", err)
	}
}

func TestF19AClockGapRestartsTheClocks(t *testing.T) {
	cfg := configIn(t.TempDir())
	manual := &clock.Manual{}
	cfg.Clock = manual
	gaps := make(chan struct{}, 16)
	cfg.Logger = slog.New(onMessage{"clock gap", gaps})
	r := run(t, cfg)
	initialise(t, r)
	c := r.client(t, idEU)
	if _, err := c.Accept(t.Context(), acceptOf(eu, 1, 1, "p")); err != nil {
		t.Fatal(err)
	}
	manual.Advance(time.Hour) // the process was frozen
	<-gaps
	// The manual clock stands, so the wall runs ahead of it: gaps go on coming.
	<-gaps
	p, err := r.client(t, idUS).Prepare(t.Context(), prepareOf(us, 2, "p"))
	if err != nil || p.GetAnswers()[0].GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_V2_RUNNING {
		t.Errorf("after a gap of an hour: %v, %v", p, err)
	}
}

func TestNothingIsChangedWhenTheStartIsRefused(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = busy.Close() }()
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"votes port in use":     {func(c *Config) { c.Votes = busy.Addr().String() }, busy.Addr().String()},
		"gossip port in use":    {func(c *Config) { c.Gossip = busy.Addr().String() }, busy.Addr().String()},
		"votes address garbage": {func(c *Config) { c.Votes = "nowhere" }, "nowhere"},
		"another's certificate": {func(c *Config) { c.Credentials = certificates()[idW2] }, "certificates: are for"},
		"no certificate":        {func(c *Config) { c.Credentials = nil }, "certificates: none given"},
		"D of an hour":          {func(c *Config) { c.D = time.Hour }, "d: 1h0m0s is out of range"},
		"no addresses":          {func(c *Config) { c.Votes, c.Gossip = "", "" }, "gossip: is empty"},
		"a peer of its name":    {func(c *Config) { c.Peers = []Peer{{Name: "w1", Gossip: "127.0.0.1:1"}} }, `"w1" is there twice`},
	} {
		t.Run(name, func(t *testing.T) {
			parent := t.TempDir()
			cfg := configIn(filepath.Join(parent, "data"))
			c.change(&cfg)
			before := hashDir(t, parent)
			w, err := New(cfg)
			if err == nil {
				_ = w.Close()
				t.Fatal("started")
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("message %q, want %q in it", err, c.want)
			}
			if hashDir(t, parent) != before {
				t.Error("something was written")
			}
		})
	}
}

func TestEveryMethodHasARule(t *testing.T) {
	faults, err := fault.NewTable(fault.Rules{})
	if err != nil {
		t.Fatal(err)
	}
	defer faults.Close()
	cfg := configIn(t.TempDir())
	cfg.Faults = faults
	w, err := New(cfg) // refuses a method without a rule
	if err != nil {
		t.Fatal(err)
	}
	served := 0
	for _, s := range w.server.GetServiceInfo() {
		served += len(s.Methods)
	}
	if served != len(policyTable()) {
		t.Errorf("%d methods, %d rules", served, len(policyTable()))
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

// onMessage is a slog.Handler that tells of a message.
type onMessage struct {
	text string
	seen chan struct{}
}

func (onMessage) Enabled(context.Context, slog.Level) bool { return true }
func (o onMessage) Handle(_ context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, o.text) {
		select {
		case o.seen <- struct{}{}:
		default:
		}
	}
	return nil
}
func (o onMessage) WithAttrs([]slog.Attr) slog.Handler { return o }
func (o onMessage) WithGroup(string) slog.Handler      { return o }

// TestPeersFollowTheClusterFile: a region that is added is judged, and resolved,
// without a restart.
func TestPeersFollowTheClusterFile(t *testing.T) {
	change := make(chan []Peer)
	taken := make(chan struct{})
	cfg := configIn(t.TempDir())
	cfg.Follow = func(ctx context.Context, changed func([]Peer)) error {
		for {
			select {
			case p := <-change:
				changed(p)
				taken <- struct{}{}
			case <-ctx.Done():
				return nil
			}
		}
	}
	w := run(t, cfg)
	put := func(p ...Peer) {
		change <- p
		<-taken
	}
	eu := Peer{Name: "eu-1", Role: pki.RoleRegion, Region: "eu", Gossip: "127.0.0.1:1"}
	put(eu)
	if got := w.detector.Reports(); len(got) != 1 || got[0].GetRegion() != "eu" {
		t.Errorf("judged: %v", got)
	}
	if p, ok := w.resolve("eu-1", ""); !ok || p.Address != eu.Gossip {
		t.Errorf("resolved as %v, %v", p, ok)
	}
	put(eu, eu) // unusable: nothing changes
	if p, ok := w.resolve("eu-1", ""); !ok || p.Address != eu.Gossip {
		t.Errorf("after a list that is refused: %v, %v", p, ok)
	}
	put()
	if got := w.detector.Reports(); len(got) != 0 {
		t.Errorf("judged although it is gone: %v", got)
	}
}
