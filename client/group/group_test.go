package group_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/regiontest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ttl = 6 * time.Second

// world is a network in a bubble with members of one group, and what they do.
type world struct {
	*testing.T
	*regiontest.Network
	shards uint32
	work   func(ctx context.Context, s *group.Shard) error

	mu sync.Mutex
	// working has the member that works on a shard now, history all that did.
	working map[uint32]string
	history map[uint32][]string
	since   map[uint32]time.Time
	gap     time.Duration
}

func inWorld(t *testing.T, shards uint32, f func(w *world, eu *regiontest.Region)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{
			T: t, Network: regiontest.NewNetwork(t), shards: shards,
			working: map[uint32]string{}, history: map[uint32][]string{}, since: map[uint32]time.Time{},
		}
		eu := w.Region(regiontest.Config{Name: "eu"})
		eu.Own(1)
		f(w, eu)
	})
}

// process is a member's.
type process struct {
	client *client.Client
	stop   func() error
	// crash leaves the session to its TTL.
	crash func()
}

func (w *world) member(name string, change ...func(*group.Config)) *process {
	w.Helper()
	c, err := client.New(client.Config{
		Cluster: "test", Regions: w.Regions(), Links: w.Links(name), TTL: ttl, Clock: clock.NewRuntime(),
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		w.Fatal(err)
	}
	crashed := false
	cfg := group.Config{
		Client: c, Name: "orders", Member: name, Shards: group.Shards(w.shards), Clock: clock.NewRuntime(),
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Work: func(ctx context.Context, s *group.Shard) error {
			if !s.Lease.Valid() {
				w.Errorf("shard %d: worked on without a valid lease", s.Number)
			}
			w.begin(s.Number, name)
			defer w.end(s.Number, name, &crashed)
			if w.work != nil {
				return w.work(ctx, s)
			}
			select {
			case <-s.Drain():
			case <-ctx.Done():
			}
			return nil
		},
	}
	for _, f := range change {
		f(&cfg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- group.Run(ctx, cfg) }()
	var once sync.Once
	var result error
	p := &process{client: c}
	closeClient := func() {
		end, done := context.WithTimeout(context.Background(), time.Second)
		defer done()
		_ = c.Close(end)
	}
	p.stop = func() error {
		once.Do(func() {
			cancel()
			result = <-ended
			closeClient()
		})
		return result
	}
	p.crash = func() {
		once.Do(func() {
			w.mu.Lock()
			crashed = true
			w.mu.Unlock()
			leave, done := context.WithTimeout(context.Background(), time.Second)
			_ = c.Leave(leave)
			done()
			cancel()
			<-ended //nolint:errcheck // it is dead
		})
	}
	w.Cleanup(func() { _ = p.stop() })
	return p
}

func (w *world) begin(s uint32, member string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if other := w.working[s]; other != "" {
		w.Errorf("shard %d: %s begins while %s works on it", s, member, other)
	}
	w.working[s] = member
	if n := len(w.history[s]); n == 0 || w.history[s][n-1] != member {
		w.history[s] = append(w.history[s], member)
	}
	if at, ok := w.since[s]; ok {
		w.gap = max(w.gap, time.Since(at))
	}
}

func (w *world) end(s uint32, member string, crashed *bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.working[s] == member {
		delete(w.working, s)
	}
	if !*crashed {
		w.since[s] = time.Now()
	}
}

// counts is how many shards each member works on.
func (w *world) counts() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]int{}
	for _, m := range w.working {
		out[m]++
	}
	return out
}

// even waits until all shards are worked on, evenly, by the members.
func (w *world) even(within time.Duration, members ...string) {
	w.Helper()
	for end := time.Now().Add(within); ; {
		synctest.Wait()
		c := w.counts()
		ok := len(c) == len(members)
		total := 0
		for _, m := range members {
			n := c[m]
			total += n
			ok = ok && n >= int(w.shards)/len(members) && n <= (int(w.shards)+len(members)-1)/len(members)
		}
		if ok && total == int(w.shards) {
			return
		}
		if time.Now().After(end) {
			w.Fatalf("after %v: %v", within, c)
		}
		<-time.After(20 * time.Millisecond)
	}
}

// settled is the member of each shard.
func (w *world) settled() map[uint32]string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[uint32]string{}
	for s, m := range w.working {
		out[s] = m
	}
	return out
}

func moves(before, after map[uint32]string) (n int) {
	for s, m := range after {
		if before[s] != m {
			n++
		}
	}
	return n
}

func TestGroupDividesAndMovesTheFewest(t *testing.T) {
	inWorld(t, 256, func(w *world, _ *regiontest.Region) {
		three := func(c *group.Config) { c.MinMembers = 3 }
		for _, name := range []string{"a", "b", "c"} {
			w.member(name, three)
		}
		w.even(20*time.Second, "a", "b", "c")
		counts := []int{w.counts()["a"], w.counts()["b"], w.counts()["c"]}
		if slices.Sort(counts); !slices.Equal(counts, []int{85, 85, 86}) {
			t.Errorf("%v", counts)
		}
		for s, h := range w.history {
			if len(h) != 1 {
				t.Errorf("shard %d: %v, before anything changed", s, h)
			}
		}
		before := w.settled()
		d := w.member("d", three)
		w.even(20*time.Second, "a", "b", "c", "d")
		if n := moves(before, w.settled()); n != 64 {
			t.Errorf("a join moved %d shards, want 64", n)
		}
		before = w.settled()
		if err := d.stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
		w.even(time.Second, "a", "b", "c")
		if n := moves(before, w.settled()); n != 64 {
			t.Errorf("a leave moved %d shards, want 64", n)
		}
		t.Logf("longest gap of a planned hand-over: %v", w.gap)
		if w.gap > 200*time.Millisecond {
			t.Errorf("a planned hand-over took %v", w.gap)
		}
	})
}

func TestGroupRollingDeployMovesNoShardTwice(t *testing.T) {
	inWorld(t, 64, func(w *world, _ *regiontest.Region) {
		deployed := func(c *group.Config) { c.MinMembers, c.Return = 3, true }
		processes := map[string]*process{}
		names := []string{"a", "b", "c"}
		for _, name := range names {
			processes[name] = w.member(name, deployed)
		}
		w.even(20*time.Second, names...)
		for _, name := range names {
			if err := processes[name].stop(); err != nil {
				t.Fatalf("stop %s: %v", name, err)
			}
			<-time.After(5 * time.Second) // it starts anew
			w.member(name, deployed)
			w.even(5*time.Second, names...)
		}
		for s, h := range w.history {
			if len(h) != 1 {
				t.Errorf("shard %d moved: %v", s, h)
			}
		}
	})
}

func TestGroupALostMembersShardsMoveWhenItsValidityIsOver(t *testing.T) {
	inWorld(t, 32, func(w *world, _ *regiontest.Region) {
		names := []string{"a", "b", "c"}
		processes := map[string]*process{}
		for _, name := range names {
			processes[name] = w.member(name, func(c *group.Config) { c.MinMembers = 3 })
			<-time.After(50 * time.Millisecond)
		}
		w.even(20*time.Second, names...)
		before := w.settled()
		began := time.Now()
		processes["a"].crash() // the one that assigns
		w.even(ttl+3*time.Second, "b", "c")
		if d := time.Since(began); d < ttl/2 {
			t.Errorf("moved after %v, of a session of %v", d, ttl)
		}
		for s, m := range w.settled() {
			if before[s] != "a" && before[s] != m {
				t.Errorf("shard %d moved from %s to %s", s, before[s], m)
			}
		}
	})
}

func TestGroupWorkThatDoesNotEndIsEndedAtTheDrainLimit(t *testing.T) {
	inWorld(t, 8, func(w *world, _ *regiontest.Region) {
		causes := make(chan error, 100)
		w.work = func(ctx context.Context, _ *group.Shard) error {
			<-ctx.Done() // heeds no Drain
			causes <- context.Cause(ctx)
			return nil
		}
		limit := func(c *group.Config) { c.DrainLimit = 10 * time.Second }
		w.member("a", limit)
		w.even(5*time.Second, "a")
		began := time.Now()
		w.member("b", limit)
		w.even(12*time.Second, "a", "b")
		if d := time.Since(began); d < 10*time.Second {
			t.Errorf("moved after %v, before the limit", d)
		}
		for range 4 {
			if err := <-causes; !errors.Is(err, group.ErrDrainLimit) {
				t.Errorf("ended by %v", err)
			}
		}
	})
}

func TestGroupANewProcessReplacesTheOldOneOfItsName(t *testing.T) {
	inWorld(t, 16, func(w *world, _ *regiontest.Region) {
		old := w.member("a")
		w.member("b")
		w.even(10*time.Second, "a", "b")
		before := w.settled()
		w.member("a")
		<-time.After(2 * time.Second)
		w.even(5*time.Second, "a", "b")
		if err := old.stop(); !errors.Is(err, group.ErrReplaced) {
			t.Errorf("the old process ended with %v", err)
		}
		if n := moves(before, w.settled()); n != 0 {
			t.Errorf("%d shards moved", n)
		}
	})
}

// A region is lost with all registrations; nobody gets another's shard for it.
func TestGroupOutlivesItsRegion(t *testing.T) {
	inWorld(t, 32, func(w *world, eu *regiontest.Region) {
		us := w.Region(regiontest.Config{Name: "us"})
		names := []string{"a", "b", "c"}
		for _, name := range names {
			w.member(name, func(c *group.Config) { c.MinMembers = 3 })
		}
		w.even(20*time.Second, names...)
		for i := range 3 {
			eu.Server(i).Freeze()
		}
		<-time.After(10 * time.Second) // more than the head lease and all sessions
		us.Own(2)
		w.even(15*time.Second, names...)
		<-time.After(2 * ttl)
		w.even(time.Second, names...)
		for s, h := range w.history {
			if len(h) != 1 {
				t.Errorf("shard %d moved: %v", s, h)
			}
		}
	})
}

func TestGroupConfigNamesAllFaults(t *testing.T) {
	err := group.Config{Name: "a b", Shards: []uint32{1, 1}, MinMembers: -1}.Validate()
	for _, want := range []string{"client: missing", "work: missing", `name: "a b"`, "member:", "shards: 1 is listed twice", "min_members:"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}
