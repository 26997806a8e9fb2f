package replica

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

var three = []string{"eu-1", "eu-2", "eu-3"}

// TestI6KilledLeader: what was acknowledged survives the leader, and the
// leader's return.
func TestI6KilledLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		old := c.setup()
		ctx := context.Background()

		var mu sync.Mutex
		acked := map[string]bool{}
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				for i := range 40 {
					id := fmt.Sprintf("s-%d-%d", w, i)
					res, err := old.r.Propose(ctx, openSession(id))
					if err != nil {
						return // cut off
					}
					if res.GetError() != nil {
						t.Errorf("%s: %v", id, res.GetError())
					}
					mu.Lock()
					acked[id] = true
					mu.Unlock()
				}
			})
		}
		c.until("acknowledged sessions", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(acked) > 50
		})
		c.sim.isolate(old.name, true)
		wg.Wait()
		var lead *node
		c.until("another leader", func() bool {
			for _, n := range c.all() {
				if _, ok := n.r.Leading(); ok && n != old {
					lead = n
				}
			}
			return lead != nil
		})
		check := func(n *node) {
			t.Helper()
			for id := range acked {
				if _, ok := n.r.View().Session(id); !ok {
					t.Errorf("%s lost acknowledged session %s", n.name, id)
				}
			}
		}
		check(lead)
		if err := old.stop(); err != nil {
			t.Errorf("stop the old leader: %v", err)
		}
		c.sim.isolate(old.name, false)
		back := c.open(old.name)
		back.run()
		last, err := lead.reserve(ctx)
		if err != nil {
			t.Fatal(err)
		}
		c.until("the old leader's catching up", func() bool { return back.r.View().BallotRound() >= last })
		check(back)
		nodes := append(c.all(), old)
		c.stop()
		for _, n := range nodes {
			n.obs.check(t)
		}
	})
}

func openSession(id string) *pb.Command {
	return &pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{
		SessionId: id, SecretHash: make([]byte, 32), TtlMs: 10000, Identity: "worker",
	}}}
}

// TestLoopback runs the same parts over real TCP streams and restarts all.
func TestLoopback(t *testing.T) {
	c := newCluster(t, nil, three, func(cfg *Config) { cfg.Timing = TimingCalm() })
	c.start()
	n := c.setup()
	ctx := context.Background()
	var last uint64
	for range 20 {
		got, err := n.reserve(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if got <= last {
			t.Fatalf("round %d after %d", got, last)
		}
		last = got
	}
	if _, err := n.r.Check(ctx); err != nil {
		t.Errorf("check of a healthy leader: %v", err)
	}
	for _, f := range c.all() {
		if f == n {
			continue
		}
		if _, err := f.r.Propose(ctx, ticket(0)); !errors.Is(err, ErrNotLeader) {
			t.Errorf("propose on a follower: %v", err)
		}
		if name, _, self := f.r.Leader(); self || name != n.name {
			t.Errorf("%s sees leader %q, self %v; want %s", f.name, name, self, n.name)
		}
	}
	c.stop()
	for _, name := range c.names {
		c.open(name).run()
	}
	n = c.leader()
	if got, err := n.reserve(ctx); err != nil || got <= last {
		t.Errorf("after the restart: round %d, %v; want over %d", got, err, last)
	}
	c.stop()
}

// TestStopHandsOver: a planned stop costs less than an election timeout.
func TestStopHandsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		old := c.setup()
		synctest.Wait()
		began := time.Now()
		old.cancel()
		c.until("another leader", func() bool {
			for _, n := range c.all() {
				if _, ok := n.r.Leading(); ok && n != old {
					return true
				}
			}
			return false
		})
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("hand-over took %v", took)
		}
		if err := old.stop(); err != nil {
			t.Error(err)
		}
		old.obs.check(t)
		c.stop()
	})
}

// TestBeginTermIsFirst: nothing is proposed or checked before the leader's own
// first entry is applied, and every term begun ends with Deposed.
func TestBeginTermIsFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		c.setup()
		for range 5 {
			n := c.leader()
			term, ok := n.r.Leading()
			if !ok {
				continue
			}
			n.obs.mu.Lock()
			if n.obs.tables != term {
				t.Errorf("%s leads term %d with tables of %d", n.name, term, n.obs.tables)
			}
			n.obs.mu.Unlock()
			if err := n.r.raft.Load().LeadershipTransfer().Error(); err != nil {
				t.Fatal(err)
			}
			if _, ok := n.r.Leading(); ok {
				t.Errorf("%s still leads after the transfer", n.name)
			}
		}
		nodes := c.all()
		c.stop()
		for _, n := range nodes {
			n.obs.check(t)
			if len(n.obs.deposed) < len(n.obs.begun) {
				t.Errorf("%s: begun %v, deposed %v", n.name, n.obs.begun, n.obs.deposed)
			}
		}
	})
}

// TestUnknownCommandStops: a server never skips what it cannot apply.
func TestUnknownCommandStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three[:1], nil)
		c.start()
		n := c.setup()
		before := n.r.View().AppliedIndex()
		_, err := n.r.Propose(context.Background(), &pb.Command{})
		if !errors.Is(err, ErrUnknown) {
			t.Errorf("propose: %v, want unknown outcome", err)
		}
		if err := <-n.done; !errors.Is(err, state.ErrUnknownCommand) {
			t.Errorf("run: %v, want %v", err, state.ErrUnknownCommand)
		}
		if got := n.r.View().AppliedIndex(); got > before+2 { // pulses may pass before
			t.Errorf("applied %d after the unknown command at about %d", got, before+1)
		}
		// It comes back to the same entry and stops again.
		c.edit = nil
		again := c.open(n.name)
		again.run()
		if err := <-again.done; !errors.Is(err, state.ErrUnknownCommand) {
			t.Errorf("second run: %v, want %v", err, state.ErrUnknownCommand)
		}
		time.Sleep(30 * time.Second)
	})
}

// TestFailedWriteStops: after a failed fsync a voter stops.
func TestFailedWriteStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		n := c.setup()
		cause := errors.New("input/output error")
		n.disk.failWith(cause)
		// What is in flight, waits for its turn or comes later, everybody is told why.
		told := make(chan error)
		for range 20 {
			go func() {
				_, err := n.reserve(context.Background())
				told <- err
			}()
		}
		unknown := 0
		for range 20 {
			err := <-told
			if errors.Is(err, ErrUnknown) {
				unknown++
			} else if !errors.Is(err, ErrNotLeader) {
				t.Errorf("propose: %v, want unknown outcome or not the leader", err)
			}
			if !strings.Contains(err.Error(), cause.Error()) {
				t.Errorf("propose: %v, does not say %v", err, cause)
			}
		}
		if unknown == 0 {
			t.Error("no proposal was in flight")
		}
		if _, err := n.reserve(context.Background()); !errors.Is(err, ErrNotLeader) || !strings.Contains(err.Error(), cause.Error()) {
			t.Errorf("propose: %v, want not the leader, and %v", err, cause)
		}
		if err := <-n.done; !errors.Is(err, cause) {
			t.Errorf("run: %v, want %v", err, cause)
		}
		c.mu.Lock()
		delete(c.nodes, n.name)
		c.mu.Unlock()
		c.leader()
		c.stop()
	})
}

// TestATermThatCannotBeWrittenEndsTheProcess, with the reason: Raft would panic.
func TestATermThatCannotBeWrittenEndsTheProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		lead := c.setup()
		full := slices.DeleteFunc(c.all(), func(n *node) bool { return n == lead })[0]
		full.ends = true
		full.disk.failOp(opStable, syscall.ENOSPC)
		if err := lead.stop(); err != nil { // the next leader's term comes to it, or its own
			t.Fatal(err)
		}
		if err := <-full.exits; !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "free some space") {
			t.Errorf("ended with %v", err)
		}
		if err := <-full.done; !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("run: %v", err)
		}
		c.mu.Lock()
		delete(c.nodes, full.name)
		c.mu.Unlock()
		c.stop()
	})
}

// TestSnapshotRestart: a restart comes from a snapshot and the log after it,
// and a snapshot that a crash left half written is removed.
func TestSnapshotRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three[:1], func(cfg *Config) {
			cfg.SnapshotInterval, cfg.SnapshotThreshold, cfg.TrailingLogs = time.Second, 50, 10
		})
		c.start()
		n := c.setup()
		for i := range 100 {
			if _, err := n.r.Propose(context.Background(), openSession(fmt.Sprint("s", i))); err != nil {
				t.Fatal(err)
			}
		}
		dir := filepath.Join(c.dir, n.name, snapsName)
		c.until("snapshot", func() bool {
			list, _ := n.r.stores.snaps.List()
			return len(list) > 0
		})
		want := n.r.View().Counts()
		if err := n.stop(); err != nil {
			t.Fatal(err)
		}
		left := filepath.Join(dir, "1-2-3.tmp")
		if err := os.MkdirAll(left, 0o755); err != nil {
			t.Fatal(err)
		}
		n = c.open(n.name)
		n.run()
		c.leader()
		if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("unfinished snapshot is still there: %v", err)
		}
		if n.obs.restored != 1 {
			t.Errorf("restored %d times, want 1", n.obs.restored)
		}
		if got := n.r.View().Counts(); got != want {
			t.Errorf("after the restart %+v, want %+v", got, want)
		}
		c.stop()
		n.obs.check(t)
	})
}

// TestLaggardGetsSnapshot: a follower that was away for longer than the log
// reaches back is given a snapshot, goes on from there, and restarts from there.
func TestLaggardGetsSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, func(cfg *Config) {
			cfg.SnapshotInterval, cfg.SnapshotThreshold, cfg.TrailingLogs = 200*time.Millisecond, 50, 10
			cfg.segmentSize = 4096                // the log serves what is left of its oldest segment
			cfg.RetainBytes, cfg.logCache = 1, 16 // and waits for nobody
		})
		c.start()
		n := c.setup()
		var away *node
		for _, f := range c.all() {
			if f != n {
				away = f
			}
		}
		c.sim.isolate(away.name, true)
		for i := range 200 {
			if _, err := n.r.Propose(context.Background(), openSession(fmt.Sprint("s", i))); err != nil {
				t.Fatal(err)
			}
		}
		c.until("compaction", func() bool {
			first, err := n.r.stores.logs.FirstIndex()
			return err == nil && first > 100
		})
		c.sim.isolate(away.name, false)
		caughtUp := func() bool { return away.r.View().Counts().Sessions == 200 }
		c.until("catching up", caughtUp)
		away.obs.mu.Lock()
		if away.obs.restored == 0 {
			t.Error("caught up without a snapshot: this test shows nothing")
		}
		away.obs.mu.Unlock()
		if err := away.stop(); err != nil {
			t.Fatal(err)
		}
		away.obs.check(t)
		away = c.open(away.name)
		away.run()
		c.until("restarting from the snapshot", caughtUp)
		lead := c.leader()
		if _, err := lead.reserve(context.Background()); err != nil {
			t.Error(err)
		}
		want := lead.r.View().BallotRound()
		c.until("going on", func() bool { return away.r.View().BallotRound() == want })
		c.stop()
	})
}

// TestRemovedLeaderStops: a leader that is removed from its group ends and says
// why.
func TestRemovedLeaderStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		n := c.setup()
		if err := n.r.raft.Load().RemoveServer(n.r.id, 0, 0).Error(); err != nil {
			t.Fatal(err)
		}
		if err := <-n.done; err == nil || !strings.Contains(err.Error(), "removed from its group") {
			t.Errorf("run: %v", err)
		}
		c.mu.Lock()
		delete(c.nodes, n.name)
		c.mu.Unlock()
		c.leader()
		c.stop()
	})
}

// TestUninitialised: an empty directory answers questions only.
func TestUninitialised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three[:1], nil)
		n := c.open("eu-1")
		n.run()
		ctx := context.Background()
		if _, err := n.r.Propose(ctx, ticket(0)); !errors.Is(err, ErrUninitialised) {
			t.Errorf("propose: %v", err)
		}
		if _, err := n.r.Check(ctx); !errors.Is(err, ErrUninitialised) {
			t.Errorf("check: %v", err)
		}
		s := n.r.Stats()
		if s.Initialised || s.RaftID != n.r.RaftID() || s.Term != 0 {
			t.Errorf("stats: %+v", s)
		}
		if err := n.r.Bootstrap(c.servers()); err != nil {
			t.Fatal(err)
		}
		if err := n.r.Bootstrap(c.servers()); err != nil {
			t.Errorf("bootstrap again: %v", err)
		}
		c.leader()
		if err := n.r.Bootstrap(c.servers()); err != nil {
			t.Errorf("bootstrap of a running server: %v", err)
		}
		other := append(c.servers(), Server{Name: "eu-9", RaftID: "eu-9/x", Voter: true})
		if err := n.r.Bootstrap(other); err == nil {
			t.Error("bootstrap with other servers passed")
		}
		c.stop()
	})
}
