package replica

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

var (
	benchLeases = flag.Int("bench.leases", 1_000_000, "leases in BenchmarkAcquireBesideSnapshots")
	benchTime   = flag.Duration("bench.phase", 8*time.Second, "length of each phase of BenchmarkAcquireBesideSnapshots")
)

const benchPerSession = 1000

// mustDo proposes a command that must succeed; if it does not, the calling
// goroutine ends.
func (n *node) mustDo(b testing.TB, cmd *pb.Command) *pb.CommandResult {
	b.Helper()
	res, err := n.r.Propose(context.Background(), cmd)
	if err != nil || res.GetError() != nil {
		b.Error(res, err)
		runtime.Goexit()
	}
	return res
}

// ownPartition makes the region the owner of "p", all shards, in epoch 1.
func (n *node) ownPartition(b testing.TB) {
	b.Helper()
	n.mustDo(b, &pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: &pb.ClusterConfiguration{
		ClusterId: "c", ClusterName: "c", Version: 1, Shards: 256, DNs: 4e9, Voters: []*pb.Voter{{Id: "region/eu", Incarnation: 7}},
		Partitions: []*pb.PartitionSpec{{Name: "p", Shards: []*pb.ShardRange{{First: 0, Last: 255}}, Prefer: []string{"eu"}}},
	}}}})
	term, _ := n.r.Leading()
	ballot := n.mustDo(b, ticket(0)).GetReserved().GetBallot()
	guard := func() *pb.RegisterGuard {
		p, _ := n.r.View().Partition("p")
		return p.Register.Guard().Proto()
	}
	n.mustDo(b, &pb.Command{Term: term, Kind: &pb.Command_Promise{Promise: &pb.PromiseCommand{
		Items: []*pb.PromiseItem{{Partition: "p", Guard: guard(), Ballot: ballot}},
	}}})
	n.mustDo(b, &pb.Command{Term: term, Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{Items: []*pb.AcceptedItem{{
		Partition: "p", Guard: guard(), Ballot: ballot, Value: &pb.Value{Owner: "eu", OwnerIncarnation: 7, Epoch: 1, DNs: 4e9},
	}}}}})
	n.mustDo(b, &pb.Command{Term: term, Kind: &pb.Command_Adopt{Adopt: &pb.AdoptCommand{Partition: "p", Epoch: 1, Ballot: ballot}}})
}

func acquireCommand(session string, id uint64, resource string) *pb.Command {
	return &pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
		SessionId: session, RequestId: id, LowestOpenRequest: id, Resource: resource, Partition: "p", Epoch: 1,
	}}}
}

// takeLeases takes the benchmark's leases, many at a time.
func (n *node) takeLeases(b testing.TB, leases int) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for {
				s := int(next.Add(1)) - 1
				if s*benchPerSession >= leases {
					return
				}
				id := fmt.Sprintf("session-%08d", s)
				n.mustDo(b, openSession(id))
				for i := range min(benchPerSession, leases-s*benchPerSession) {
					n.mustDo(b, acquireCommand(id, uint64(i)+1, fmt.Sprintf("lock/held-%08d-%04d", s, i)))
				}
			}
		})
	}
	wg.Wait()
}

// acquireDuring measures acquires, each with its release, while f runs and for
// the phase's length at least.
func acquireDuring(b *testing.B, n *node, what string, f func(ctx context.Context)) {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), *benchTime)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(ctx)
	}()
	var mu sync.Mutex
	var all []time.Duration
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			session := fmt.Sprintf("%s-%d", what, w)
			n.mustDo(b, openSession(session))
			for id := uint64(1); ; id++ {
				select {
				case <-done:
					if ctx.Err() != nil {
						return
					}
				default:
				}
				resource := fmt.Sprintf("lock/%s-%d", what, w)
				at := time.Now()
				res := n.mustDo(b, acquireCommand(session, id, resource))
				took := time.Since(at)
				mu.Lock()
				all = append(all, took)
				mu.Unlock()
				n.mustDo(b, &pb.Command{Kind: &pb.Command_Release{Release: &pb.ReleaseCommand{
					SessionId: session, Resource: resource, Token: res.GetAcquire().GetGranted().GetToken(),
				}}})
				<-time.After(5 * time.Millisecond)
			}
		})
	}
	wg.Wait()
	slices.Sort(all)
	at := func(q float64) float64 { return float64(all[int(q*float64(len(all)-1))].Microseconds()) / 1000 }
	b.ReportMetric(at(0.5), what+"-p50-ms")
	b.ReportMetric(at(0.99), what+"-p99-ms")
	b.ReportMetric(at(1), what+"-max-ms")
	b.Logf("%s: %d acquires: p50 %.2f, p99 %.2f, p99.9 %.2f, max %.2f ms", what, len(all), at(0.5), at(0.99), at(0.999), at(1))
}

func heap() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// BenchmarkAcquireBesideSnapshots: a region of three servers in this process,
// over loopback TCP and real disks, with a million leases: how long an acquire
// takes while nothing else goes on, while one server after the other writes a
// snapshot, and while a new server is sent one. It also tells the memory of a
// lease on one server.
func BenchmarkAcquireBesideSnapshots(b *testing.B) {
	before := heap()
	c := newCluster(b, nil, three, func(cfg *Config) {
		// An election would hide what is measured, and other processes may take the
		// processors for long.
		const calm = 3 * time.Second
		cfg.Timing = Timing{Heartbeat: calm, Election: calm, LeaderLease: calm, Commit: 5 * time.Millisecond}
		cfg.segmentSize = 1 << 20 // the log serves what is left of its oldest file, and is to lack what the new server needs
		cfg.SnapshotThreshold, cfg.SnapshotBytes, cfg.TrailingLogs, cfg.RetainBytes = 1<<40, 1<<40, 100, 1
	})
	c.start()
	n := c.setup()
	n.ownPartition(b)
	b.ResetTimer()
	began := time.Now()
	n.takeLeases(b, *benchLeases)
	b.Logf("%d leases taken in %v", *benchLeases, time.Since(began).Round(time.Millisecond))
	all := c.all()
	c.until("followers", func() bool {
		for _, f := range all {
			if f.r.View().Counts().Leases < *benchLeases {
				return false
			}
		}
		return true
	})
	for _, f := range all { // the logs' caches go with what follows
		f.r.compact.work(context.Background(), f.r.raft.Load(), true)
	}
	b.ReportMetric((heap()-before)/float64(len(all)**benchLeases), "B/lease")

	acquireDuring(b, n, "quiet", func(ctx context.Context) { <-ctx.Done() })
	acquireDuring(b, n, "snapshot", func(ctx context.Context) {
		for i := 0; ctx.Err() == nil; i++ {
			at := time.Now()
			f := all[i%len(all)]
			f.r.compact.snapshot(f.r.raft.Load())
			b.Logf("snapshot of %s (leads: %v): %v", f.name, f == n, time.Since(at).Round(time.Millisecond))
		}
	})
	acquireDuring(b, n, "install", func(context.Context) {
		at := time.Now()
		four := startChild(b, c)
		defer four.stop()
		if err := n.r.raft.Load().AddNonvoter(raft.ServerID(four.raftID), childName, 0, time.Second).Error(); err != nil {
			b.Error(err)
			return
		}
		four.installed()
		b.Logf("installed after %v", time.Since(at).Round(time.Millisecond))
		if err := n.r.raft.Load().RemoveServer(raft.ServerID(four.raftID), 0, time.Second).Error(); err != nil {
			b.Error(err)
		}
	})
	b.StopTimer()
	c.stop()
}

// childName is the server that BenchmarkAcquireBesideSnapshots adds, in a
// process of its own: another machine's work and memory are not the leader's.
const childName = "eu-4"

// childEnv asks this test binary to be that server, with its data there.
const childEnv = "REPLICA_TEST_CHILD"

// child is the server in a process of its own.
type child struct {
	b      *testing.B
	cmd    *exec.Cmd
	in     io.Closer
	out    *bufio.Scanner
	raftID string
}

func startChild(b *testing.B, c *cluster) *child {
	b.Helper()
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command("nice", self)
	cmd.Env = append(os.Environ(), childEnv+"="+b.TempDir())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	p := &child{b: b, cmd: cmd, in: in, out: bufio.NewScanner(out)}
	var addr string
	if _, err := fmt.Sscan(p.line(), &p.raftID, &addr); err != nil {
		b.Error(err)
	}
	c.tcp.mu.Lock()
	c.tcp.addr[childName] = addr
	c.tcp.mu.Unlock()
	return p
}

func (p *child) line() string {
	if !p.out.Scan() {
		p.b.Error("the added server has ended: ", p.out.Err())
	}
	return p.out.Text()
}

// installed waits until the child has a snapshot's leases.
func (p *child) installed() {
	if got := p.line(); !strings.HasPrefix(got, "installed") {
		p.b.Error(got)
	}
}

func (p *child) stop() {
	_ = p.in.Close()
	if err := p.cmd.Wait(); err != nil {
		p.b.Error(err)
	}
}

// beChild is the added server: it says its id and address, then that a snapshot
// was installed, and ends with its input.
func beChild(dir string) error {
	peers := &tcpPeers{addr: map[string]string{}}
	l, err := peers.listen(childName)
	if err != nil {
		return err
	}
	installed := make(chan struct{}, 1)
	r, err := Open(context.Background(), Config{
		Name: childName, Cluster: "c", Region: "eu", DataDir: dir, Stream: l, Resolve: peers.resolve,
		Clock: goClock{time.Now()}, Terms: asker{}, Logger: slog.New(slog.DiscardHandler), Observer: restoredObserver(installed),
	})
	if err != nil {
		return err
	}
	r.isReady = true
	close(r.ready)
	fmt.Println(r.RaftID(), l.Addr())
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-installed
		fmt.Println("installed", r.View().Counts().Leases)
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return r.Run(ctx)
}

// restoredObserver tells of the first restore.
type restoredObserver chan struct{}

func (restoredObserver) Applied(uint64, uint64, []state.Event) {}
func (restoredObserver) Deposed(uint64)                        {}

func (o restoredObserver) Restored() { wake.Up(o) }
