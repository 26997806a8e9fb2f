package histories

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/internal/history"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/replica"
	"github.com/headlease/headlease/region/state"
)

const (
	rho       = 0.01
	headLease = 2 * time.Second
	partition = "all"
)

// counts are how often things happened.
type counts struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counts) add(what string) { c.addN(what, 1) }

func (c *counts) addN(what string, n int) {
	if n == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[string]int{}
	}
	c.n[what] += n
}

func (c *counts) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for _, k := range slices.Sorted(maps.Keys(c.n)) {
		out = append(out, fmt.Sprintf("%s %d", k, c.n[k]))
	}
	return strings.Join(out, ", ")
}

// world is a region and its clients in a bubble.
type world struct {
	t        *testing.T
	seed     uint64
	began    time.Time
	net      *fabric
	recorder *history.Recorder
	counts   counts
	servers  []*server
	work     sync.WaitGroup
	closing  atomic.Bool
	crashing atomic.Bool // in a way that keeps another server away, too
	done     func()
	// stillness has room for the one that waits until nobody else runs.
	stillness chan struct{}

	mu      sync.Mutex
	leaders map[uint64]string // by term
	errs    []error
}

// newWorld starts a region; clockOf gives each server's clock.
func newWorld(t *testing.T, seed uint64, clockOf func(i int, began time.Time) *machineClock) *world {
	w := &world{t: t, seed: seed, began: time.Now(), net: newFabric(seed), recorder: history.NewRecorder(), leaders: map[uint64]string{}, stillness: make(chan struct{}, 1)}
	root, done := dataRoot(t.TempDir())
	w.done = done
	var members []replica.Server
	for i := range 3 {
		name := fmt.Sprintf("%s-%d", regionName, i+1)
		s := &server{w: w, name: name, dir: dataDir(root, name), clock: clockOf(i, w.began)}
		w.servers = append(w.servers, s)
		p := s.open()
		members = append(members, replica.Server{Name: name, RaftID: p.replica.RaftID(), Voter: true})
	}
	for _, s := range w.servers {
		if err := s.process.replica.Bootstrap(members); err != nil {
			t.Fatal(err)
		}
		s.process.run()
	}
	w.configure()
	return w
}

func (w *world) server(name string) *server {
	for _, s := range w.servers {
		if s.name == name {
			return s
		}
	}
	panic("no server " + name)
}

func (w *world) failed(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.errs = append(w.errs, err)
}

func (w *world) begun(term uint64, leader string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leaders[term] = leader
}

// leaderChanges counts terms that began with another leader than the one
// before.
func (w *world) leaderChanges() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, last := 0, ""
	for _, term := range slices.Sorted(maps.Keys(w.leaders)) {
		if l := w.leaders[term]; l != last {
			if last != "" {
				n++
			}
			last = l
		}
	}
	return n
}

// clocks converts the instants of leaders.
func (w *world) clocks(term uint64, at int64) time.Duration {
	w.mu.Lock()
	name, ok := w.leaders[term]
	w.mu.Unlock()
	if !ok {
		return 0
	}
	return w.server(name).clock.when(at)
}

// still waits until everybody waits for time to pass, or for each other; until the
// caller does, too, nothing happens.
func (w *world) still() {
	w.stillness <- struct{}{}
	synctest.Wait()
	<-w.stillness
}

// leader is a server that leads, or nil.
func (w *world) leader() *process {
	for _, s := range w.servers {
		if p := s.running(); p != nil {
			if _, ok := p.replica.Leading(); ok {
				return p
			}
		}
	}
	return nil
}

// until waits for something, for as long as tests may take in virtual time.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	for range 6000 {
		if ok() {
			return
		}
		time.Sleep(5 * time.Millisecond) // virtual
	}
	w.t.Fatalf("seed %d: %s: not within 30 s", w.seed, what)
}

// commit proposes a command at whatever server leads.
func (w *world) commit(c *pb.Command) {
	w.t.Helper()
	w.until("a commit", func() bool {
		p := w.leader()
		if p == nil {
			return false
		}
		res, err := p.replica.Propose(context.Background(), c)
		if err == nil && res.GetError() != nil {
			w.t.Fatalf("%v: %v", c, res.GetError())
		}
		return err == nil
	})
}

func (w *world) configure() {
	w.commit(&pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: regionName, Incarnation: 1}}})
	w.commit(&pb.Command{Kind: &pb.Command_RaiseLevel{RaiseLevel: &pb.RaiseLevelCommand{Level: state.MaxLevel}}})
	w.commit(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: &pb.ClusterConfiguration{
		ClusterId: "c1", ClusterName: "histories", Version: 1, Shards: 256, DNs: headLease.Nanoseconds(),
		Voters:     []*pb.Voter{{Id: "region/" + regionName, Incarnation: 1}},
		Partitions: []*pb.PartitionSpec{{Name: partition, Shards: []*pb.ShardRange{{First: 0, Last: 255}}, Prefer: []string{regionName}}},
	}}}})
	w.until("a head lease", func() bool {
		p := w.leader()
		if p == nil {
			return false
		}
		_, _, ok := p.lessor.Hold(partition)
		return ok
	})
}

// stop ends everything; all faults are over by then.
func (w *world) stop() {
	w.closing.Store(true)
	w.work.Wait()
	for _, s := range w.servers {
		if p := s.running(); p != nil {
			w.counts.addN("calls that lagged", int(p.seam.lagged.Load()))
		}
		s.kill()
	}
	time.Sleep(30 * time.Second) // virtual: timers of transports run out
	w.done()
	for _, err := range w.errs {
		w.t.Errorf("seed %d: %v", w.seed, err)
	}
}
