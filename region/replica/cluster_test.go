package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"go.uber.org/goleak"

	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		if err := beChild(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// goClock is Go's time as a lease clock: virtual in a synctest bubble.
type goClock struct{ start time.Time }

func (c goClock) Now() instant.Instant { return instant.Instant(time.Since(c.start)) + 1 }

// node is one server under test.
type node struct {
	c     *cluster
	name  string
	r     *Replica
	disk  *testDisk
	obs   *recorder
	exits chan error
	// ends makes the goroutine that calls Exit end with it.
	ends   bool
	cancel context.CancelFunc
	done   chan error
	over   chan struct{} // closed when Run has returned
}

// cluster runs servers in this process, over simNet or loopback TCP.
type cluster struct {
	t     testing.TB
	dir   string
	sim   *simNet // nil: TCP
	tcp   *tcpPeers
	names []string
	edit  func(*Config)
	clock goClock
	wrap  func(*node) Disk // what a node's replica gets for its disk; nil: the node's own

	mu    sync.Mutex
	nodes map[string]*node
}

func newCluster(t testing.TB, sim *simNet, names []string, edit func(*Config)) *cluster {
	c := &cluster{
		t: t, dir: t.TempDir(), sim: sim, tcp: &tcpPeers{addr: map[string]string{}}, names: names, edit: edit,
		nodes: map[string]*node{}, clock: goClock{time.Now()},
	}
	t.Cleanup(c.abandon)
	return c
}

// abandon ends what a test that has failed left running: a bubble waits for it.
func (c *cluster) abandon() {
	if !c.t.Failed() {
		return
	}
	for _, n := range c.all() {
		n.disk.free()
		if n.cancel == nil {
			_ = n.r.Close()
			continue
		}
		n.cancel()
		<-n.over
	}
	if c.sim != nil {
		time.Sleep(30 * time.Second) // virtual: transports' timers run out
	}
}

func (c *cluster) get(name string) *node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodes[name]
}

func (c *cluster) all() []*node {
	var out []*node
	for _, name := range c.names {
		if n := c.get(name); n != nil {
			out = append(out, n)
		}
	}
	return out
}

// asker answers leadership checks as gRPC would, with the network's delays.
type asker struct {
	c    *cluster
	from string
}

func (a asker) AskTerm(ctx context.Context, server string) (*pb.CurrentTermResponse, error) {
	return a.AskProgress(ctx, server, &pb.CurrentTermRequest{})
}

func (a asker) AskProgress(ctx context.Context, server string, req *pb.CurrentTermRequest) (*pb.CurrentTermResponse, error) {
	travel := func() error {
		if a.c.sim == nil {
			return nil
		}
		if a.c.sim.severed(a.from, server) {
			<-ctx.Done()
			return ctx.Err()
		}
		select {
		case <-time.After(a.c.sim.latency(a.from, server)):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := travel(); err != nil {
		return nil, err
	}
	n := a.c.get(server)
	if n == nil {
		return nil, errors.New("unavailable")
	}
	resp, err := n.r.PeerServer().CurrentTerm(ctx, req)
	if err != nil {
		return nil, err
	}
	return resp, travel()
}

func (c *cluster) config(name string) Config {
	cfg := Config{
		Name: name, Cluster: "c", Region: "eu", DataDir: filepath.Join(c.dir, name), Timing: TimingLAN(), Clock: c.clock,
		Terms: asker{c, name}, Progress: asker{c, name}, Logger: slog.New(slog.DiscardHandler), segmentSize: 256 << 10,
	}
	if os.Getenv("REPLICA_TEST_LOG") != "" {
		cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("server", name)
	}
	if c.edit != nil {
		c.edit(&cfg)
	}
	return cfg
}

// open opens a server without running it.
func (c *cluster) open(name string) *node {
	c.t.Helper()
	n := &node{c: c, name: name, disk: newTestDisk(), obs: &recorder{}, exits: make(chan error, 1), done: make(chan error, 1), over: make(chan struct{})}
	cfg := c.config(name)
	cfg.Disk, cfg.Observer = n.disk, n.obs
	if c.wrap != nil {
		cfg.Disk = c.wrap(n)
	}
	cfg.Exit = func(err error) {
		n.exits <- err
		if n.ends {
			runtime.Goexit()
		}
	}
	if c.sim != nil {
		cfg.Stream = c.sim.listen(name)
	} else {
		l, err := c.tcp.listen(name)
		if err != nil {
			c.t.Fatal(err)
		}
		cfg.Stream, cfg.Resolve = l, c.tcp.resolve
	}
	r, err := Open(context.Background(), cfg)
	if err != nil {
		c.t.Fatal(err)
	}
	n.r = r
	n.obs.r = r
	c.mu.Lock()
	c.nodes[name] = n
	c.mu.Unlock()
	return n
}

func (n *node) run() {
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	go func() {
		defer close(n.over)
		n.done <- n.r.Run(ctx)
	}()
}

func (n *node) stop() error {
	n.cancel()
	err := <-n.done
	n.c.mu.Lock()
	delete(n.c.nodes, n.name)
	n.c.mu.Unlock()
	return err
}

func (c *cluster) servers() []Server {
	var out []Server
	for _, n := range c.all() {
		out = append(out, Server{Name: n.name, RaftID: n.r.RaftID(), Voter: true})
	}
	return out
}

// start opens, bootstraps and runs all servers.
func (c *cluster) start() {
	c.t.Helper()
	for _, name := range c.names {
		c.open(name)
	}
	servers := c.servers()
	for _, n := range c.all() {
		if err := n.r.Bootstrap(servers); err != nil {
			c.t.Fatal(err)
		}
		n.run()
	}
}

func (c *cluster) stop() {
	c.t.Helper()
	nodes := c.all()
	for _, n := range nodes {
		n.cancel()
	}
	for _, n := range nodes {
		if err := <-n.done; err != nil {
			c.t.Errorf("%s: %v", n.name, err)
		}
	}
	if c.sim != nil {
		time.Sleep(30 * time.Second) // virtual: transports' timers run out
	}
}

// leader waits for a server that leads and serves.
func (c *cluster) leader() *node {
	c.t.Helper()
	var found *node
	c.until("a leader", func() bool {
		for _, n := range c.all() {
			if _, ok := n.r.Leading(); ok {
				found = n
				return true
			}
		}
		return false
	})
	return found
}

// until polls with a bound. The pauses are virtual in a bubble.
func (c *cluster) until(what string, ok func() bool) {
	c.t.Helper()
	t := time.NewTicker(time.Millisecond)
	defer t.Stop()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); <-t.C {
		if ok() {
			return
		}
	}
	c.t.Fatalf("no %s in time", what)
}

// setup commits the region's incarnation, which other commands need.
func (c *cluster) setup() *node {
	c.t.Helper()
	n := c.leader()
	_, err := n.r.Propose(context.Background(), &pb.Command{Kind: &pb.Command_InitRegion{
		InitRegion: &pb.InitRegionCommand{Region: "eu", Incarnation: 7},
	}})
	if err != nil {
		c.t.Fatal(err)
	}
	return n
}

func ticket(above uint64) *pb.Command {
	return &pb.Command{Kind: &pb.Command_ReserveBallot{ReserveBallot: &pb.ReserveBallotCommand{Above: above}}}
}

// reserve takes the next ballot round: a counter that every test can read.
func (n *node) reserve(ctx context.Context) (uint64, error) {
	res, err := n.r.Propose(ctx, ticket(0))
	if err != nil {
		return 0, err
	}
	if res.GetReserved() == nil {
		return 0, fmt.Errorf("answered %v", res)
	}
	return res.GetReserved().GetBallot().GetRound(), nil
}

// testDisk stalls or fails writes on demand.
type testDisk struct {
	mu   sync.Mutex
	gate chan struct{} // closed: writes pass
	fail error
	ops  map[string]error // of one kind of operation
	held map[string]chan struct{}
}

func newTestDisk() *testDisk {
	d := &testDisk{gate: make(chan struct{})}
	close(d.gate)
	return d
}

func (d *testDisk) Before(op string) error {
	d.mu.Lock()
	gate, err := d.gate, d.fail
	if err == nil {
		err = d.ops[op]
	}
	held := d.held[op]
	d.mu.Unlock()
	<-gate
	if held != nil {
		<-held
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.ops[op] // as it is now
	}
	return err
}

// hangOp hangs one kind of operation until release is called.
func (d *testDisk) hangOp(op string) (release func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	held := make(chan struct{})
	d.held = map[string]chan struct{}{op: held}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.held = nil
		close(held)
	}
}

func (d *testDisk) hang() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gate = make(chan struct{})
}

func (d *testDisk) release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	close(d.gate)
}

// free lets go whatever hangs.
func (d *testDisk) free() {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-d.gate:
	default:
		close(d.gate)
	}
	for _, held := range d.held {
		close(held)
	}
	d.held = nil
}

func (d *testDisk) failOp(op string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ops == nil {
		d.ops = map[string]error{}
	}
	d.ops[op] = err
}

func (d *testDisk) failWith(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail = err
}

// recorder is an Observer that keeps what it is told and checks its order.
type recorder struct {
	r *Replica

	mu       sync.Mutex
	last     uint64
	first    uint64 // entry applied since the last restore
	faults   []string
	begun    []uint64 // terms that Begins was true for
	deposed  []uint64
	restored int
	tables   uint64 // term of the tables now built
}

func (o *recorder) Applied(index, term uint64, events []state.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if index <= o.last {
		o.faults = append(o.faults, fmt.Sprintf("applied %d after %d", index, o.last))
	}
	o.last = index
	if o.first == 0 {
		o.first = index
	}
	if got := o.r.View().AppliedIndex(); got != index {
		o.faults = append(o.faults, fmt.Sprintf("view at %d while observing %d", got, index))
	}
	for _, e := range events {
		b, ok := e.(state.TermBegun)
		if !ok || !o.r.Begins(b.Term) || b.Server != o.r.cfg.Name {
			continue
		}
		if _, leading := o.r.Leading(); leading {
			o.faults = append(o.faults, "leading before the tables were built")
		}
		o.begun = append(o.begun, b.Term)
		o.tables = b.Term
	}
}

func (o *recorder) Restored() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.restored++
	o.first = 0
	o.last = o.r.View().AppliedIndex()
}

func (o *recorder) Deposed(term uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.deposed = append(o.deposed, term)
	if o.tables == term {
		o.tables = 0
	}
}

func (o *recorder) check(t testing.TB) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, f := range o.faults {
		t.Error(f)
	}
	if o.tables != 0 {
		t.Errorf("tables of term %d outlived its leadership", o.tables)
	}
}

var _ raft.StreamLayer = (*simLayer)(nil)
