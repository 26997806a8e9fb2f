package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func init() {
	registerSystem("headlease", func() System { return &headleaseSystem{base: 15300} })
	open := func(_ context.Context, s System, o Opts) (Driver, error) {
		return openHeadlease(s.(*headleaseSystem), o)
	}
	register(&Spec{
		Name: "headlease", System: "headlease", Workloads: "W1 W2 W3 W4 W5 W6 W7", Share: 100, Open: open,
		Note: "the Go SDK, mutual TLS, a session for each holder; a lease is a fencing token and an end of its own",
	})
	register(&Spec{
		Name: "headlease-leader", System: "headlease", Workloads: "W2 W3 W5", LeaderPin: true, Open: open,
		Note: "as headlease, every client connected to the leader",
	})
	register(&Spec{
		Name: "headlease-1conn", System: "headlease", Workloads: "W4", Share: 1, Open: open,
		Note: "as headlease, every session on its own connection",
	})
}

// headleaseSystem is one region of three servers and no witness: the region is
// its own majority, as in a cluster that one region makes up. TLS is on, timing
// is the default for servers near each other.
type headleaseSystem struct {
	headleaseCluster
	base int
	env  *Env
}

func (s *headleaseSystem) address(i, port int) string {
	return net.JoinHostPort(s.env.host(i), strconv.Itoa(s.base+10*i+port))
}

func (s *headleaseSystem) clusterYAML() string {
	var b strings.Builder
	fmt.Fprintf(&b, "cluster: bench\ntiming: %s\nallow_even_witnesses: true\nregions:\n  - name: here\n    servers:\n", *flagTiming)
	for i := range headleaseServers {
		fmt.Fprintf(&b, "      - {name: here-%d, api: %q, votes: %q, raft: %q, gossip: %q, metrics: \"off\"}\n",
			i+1, s.address(i, 0), s.address(i, 1), s.address(i, 2), s.address(i, 3))
	}
	b.WriteString("partitions:\n  - {name: all, shards: 0-255, prefer: [here]}\n")
	return b.String()
}

func (s *headleaseSystem) Start(ctx context.Context, env *Env) error {
	s.env = env
	if err := s.prepare(ctx, env, s.clusterYAML()); err != nil {
		return err
	}
	for i := range headleaseServers {
		for port := range portsPerServer {
			if err := portFree(env.ns(i), s.address(i, port)); err != nil {
				return err
			}
		}
		if err := s.startServer(fmt.Sprintf("here-%d", i+1), env.ns(i)); err != nil {
			return err
		}
	}
	if err := s.initialise(ctx, nil); err != nil {
		return err
	}
	if err := poll(ctx, 100*time.Millisecond, 40*time.Second, s.Ready); err != nil {
		return err
	}
	c, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return s.admin.WaitOwned(c)
}

func (s *headleaseSystem) Info() string {
	return headleaseVersion() + "; one region of 3 servers, no witness, mutual TLS, fsync on, default timing"
}

// leaders returns whom each running server takes for the leader.
func (s *headleaseSystem) leaders(ctx context.Context) []string {
	out := make([]string, len(s.procs))
	var wg sync.WaitGroup
	for i := range s.procs {
		p, known := s.file.Process(s.procs[i].Name)
		if !known || !s.procs[i].running() {
			continue
		}
		wg.Go(func() {
			c, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			if d, err := s.admin.DescribeServer(c, p); err == nil {
				out[i] = d.GetLeader()
			}
		})
	}
	wg.Wait()
	return out
}

func (s *headleaseSystem) Leader(ctx context.Context) (int, error) {
	for i, name := range s.leaders(ctx) {
		if name == s.procs[i].Name {
			return i, nil
		}
	}
	return -1, errors.New("no leader")
}

func (s *headleaseSystem) Ready(ctx context.Context) error {
	leaders := s.leaders(ctx)
	for _, name := range leaders {
		if name == "" || name != leaders[0] {
			return fmt.Errorf("no common leader: %q", leaders)
		}
	}
	return nil
}

// headleaseDriver is one client of the SDK.
type headleaseDriver struct {
	links *link.Links
	cl    *client.Client

	mu   sync.Mutex
	held map[string]*client.Lease

	grants atomic.Uint64
	dead   atomic.Bool
}

// cut ends the client without a word to the servers, and itself: a process that
// crashes leaves no goroutines that try to reach its region.
func (d *headleaseDriver) cut() {
	if d.dead.Swap(true) {
		return
	}
	_ = d.links.Close()
	over, cancel := context.WithCancel(context.Background())
	cancel()
	_ = d.cl.Close(over)
}

func openHeadlease(s *headleaseSystem, o Opts) (*headleaseDriver, error) {
	d := &headleaseDriver{held: map[string]*client.Lease{}}
	var err error
	if d.links, err = s.newLinks(pki.Identity{Role: pki.RoleClient, Name: headleaseClient}, nil); err != nil {
		return nil, err
	}
	r := client.Region{Name: s.file.Regions[0].Name}
	for _, n := range o.Nodes { // asked in this order
		p := s.file.Regions[0].Servers[n]
		r.Servers = append(r.Servers, client.Server{Name: p.Name, API: p.API})
	}
	d.cl, err = client.New(client.Config{Cluster: s.file.Cluster, Regions: []client.Region{r}, Links: d.links, TTL: 30 * time.Second})
	if err != nil {
		return nil, errors.Join(err, d.links.Close())
	}
	return d, nil
}

func busy(err error) error {
	if errors.Is(err, client.ErrBusy) {
		return ErrHeld
	}
	return err
}

func (d *headleaseDriver) acquire(ctx context.Context, key string, o ...client.Option) (uint64, error) {
	l, err := d.cl.Acquire(ctx, "lock/"+key, o...)
	if err != nil {
		return 0, busy(err)
	}
	d.mu.Lock()
	d.held[key] = l
	d.mu.Unlock()
	return uint64(l.Token()), nil
}

func (d *headleaseDriver) Acquire(ctx context.Context, key string, _ time.Duration) (uint64, error) {
	return d.acquire(ctx, key)
}

func (d *headleaseDriver) AcquireWait(ctx context.Context, key string, _ time.Duration) (uint64, error) {
	t, err := d.acquire(ctx, key, client.Wait())
	if err == nil {
		d.grants.Add(1)
	}
	return t, err
}

func (d *headleaseDriver) Release(ctx context.Context, key string, token uint64) error {
	d.mu.Lock()
	l := d.held[key]
	delete(d.held, key)
	d.mu.Unlock()
	if l == nil || uint64(l.Token()) != token {
		return ErrLost
	}
	return l.Release(ctx)
}

// Notifications: a waiter hears one message, its grant.
func (d *headleaseDriver) Notifications() uint64 { return d.grants.Load() }

// CountHeld takes the leader's count of all leases while there are many, of which
// the unrelated clients have a few, and lists the last ones.
func (d *headleaseDriver) CountHeld(ctx context.Context, prefix string, n int) (int, error) {
	const few = 100
	var st *pb.StatusResponse
	err := d.cl.Call(ctx, "", func(ctx context.Context, cc grpc.ClientConnInterface) (err error) {
		st, err = pb.NewClusterServiceClient(cc).Status(ctx, &pb.StatusRequest{})
		return err
	})
	if err != nil {
		return 0, err
	}
	if st.GetLeases() > few {
		return min(int(st.GetLeases()), n), nil
	}
	held := 0
	for page := ""; ; {
		res, err := d.cl.List(ctx, "", &pb.ListLeasesRequest{Prefix: "lock/" + prefix, Limit: 1000, Page: page})
		if err != nil {
			return 0, err
		}
		held += len(res.GetLeases())
		if page = res.GetNextPage(); page == "" {
			return held, nil
		}
	}
}

func (d *headleaseDriver) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = d.cl.Close(ctx) // its sessions expire if the servers are gone
	return d.links.Close()
}

// headleaseSession is one of a client's sessions. It holds a lock from the
// start, which shows the application whether it lives.
type headleaseSession struct {
	d  *headleaseDriver
	of *client.Session

	ttl     time.Duration
	started time.Time

	mu   sync.Mutex
	held *client.Lease
}

var headleaseSessions atomic.Uint64

func (d *headleaseDriver) OpenSession(ctx context.Context, ttl time.Duration) (Session, error) {
	of, err := d.cl.NewSession(client.SessionOptions{TTL: ttl})
	if err != nil {
		return nil, err
	}
	s := &headleaseSession{d: d, of: of, ttl: ttl, started: time.Now()}
	if s.held, err = of.Acquire(ctx, fmt.Sprintf("lock/alive-%d", headleaseSessions.Add(1))); err != nil {
		return nil, errors.Join(err, of.Close(ctx))
	}
	return s, nil
}

// Hold replaces the lock that the session holds.
func (s *headleaseSession) Hold(ctx context.Context, key string) (uint64, error) {
	l, err := s.of.Acquire(ctx, "lock/"+key)
	if err != nil {
		return 0, busy(err)
	}
	s.mu.Lock()
	before := s.held
	s.held = l
	s.mu.Unlock()
	return uint64(l.Token()), before.Release(ctx)
}

// StartKeepAlive: the client keeps its sessions alive from the start.
func (s *headleaseSession) StartKeepAlive() error { s.started = time.Now(); return nil }

// KeepAlives are computed: the client sends one each TTL/3 and shows no count.
func (s *headleaseSession) KeepAlives() uint64 { return uint64(3 * time.Since(s.started) / s.ttl) }

func (s *headleaseSession) Alive() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held.Valid()
}

// Abandon cuts the client's connections before it can say anything: the sessions
// that share it die together, as those of a process that crashes.
func (s *headleaseSession) Abandon() { s.d.cut() }

func (s *headleaseSession) Close(ctx context.Context) error { return s.of.Close(ctx) }
