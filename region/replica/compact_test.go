package replica

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
)

// slowSnaps is a disk on which a snapshot takes long, and which knows how many
// servers write one at the same time.
type slowSnaps struct {
	*testDisk
	of *snapCount
	by string
}

type snapCount struct {
	mu      sync.Mutex
	each    time.Duration
	writing map[string]bool
	worst   int
	began   map[string]int
}

func (d slowSnaps) Before(op string) error {
	if err := d.testDisk.Before(op); err != nil || op != opSnapshot {
		return err
	}
	d.of.mu.Lock()
	if !d.of.writing[d.by] {
		d.of.began[d.by]++
	}
	d.of.writing[d.by] = true
	d.of.worst = max(d.of.worst, len(d.of.writing))
	d.of.mu.Unlock()
	time.Sleep(d.of.each) // virtual
	d.of.mu.Lock()
	delete(d.of.writing, d.by)
	d.of.mu.Unlock()
	return nil
}

// snapCluster is a group whose snapshots are slow: three writes of 0.7 s.
func snapCluster(t *testing.T, edit func(*Config)) (*cluster, *snapCount) {
	count := &snapCount{each: 700 * time.Millisecond, writing: map[string]bool{}, began: map[string]int{}}
	c := newCluster(t, newSimNet(), three, func(cfg *Config) {
		cfg.SnapshotThreshold, cfg.TrailingLogs, cfg.logCache = 100, 20, 16
		cfg.segmentSize = 4096 // the log serves what is left of its oldest file
		if edit != nil {
			edit(cfg)
		}
	})
	c.wrap = func(n *node) Disk { return slowSnaps{n.disk, count, n.name} }
	return c, count
}

// write proposes n commands, some bytes each, in a time of n times each.
func (c *cluster) write(n int, each time.Duration) {
	c.t.Helper()
	for range n {
		lead := c.leader()
		if _, err := lead.r.Propose(context.Background(), ticket(0)); err != nil {
			c.t.Fatal(err)
		}
		time.Sleep(each) // virtual
	}
}

// TestF37OneSnapshotAtATime: while commands go on, every server writes
// snapshots, never two at once, and the log stays short everywhere.
func TestF37OneSnapshotAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, count := snapCluster(t, nil)
		c.start()
		c.setup()
		c.write(750, 80*time.Millisecond)
		count.mu.Lock()
		began, worst := maps.Clone(count.began), count.worst
		count.mu.Unlock()
		for _, n := range c.all() {
			s := n.r.Stats()
			if began[n.name] < 3 {
				t.Errorf("%s wrote %d snapshots", n.name, began[n.name])
			}
			// A turn comes after at most two snapshots of others and the looks between.
			if behind := s.Applied - s.Snapshot; behind > 100+300 || s.Last-s.First > 750 {
				t.Errorf("%s: %d entries behind its snapshot, log %d to %d", n.name, behind, s.First, s.Last)
			}
		}
		if worst != 1 {
			t.Errorf("%d servers wrote a snapshot at once", worst)
		}
		c.stop()
	})
}

// TestF37AFailedServerBlocksNobody: a server that is cut off, or whose
// snapshots fail, does not keep the others from theirs; the one cut off does
// without a turn.
func TestF37AFailedServerBlocksNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, count := snapCluster(t, nil)
		count.each = 0
		c.start()
		n := c.setup()
		var failing, away *node
		for _, f := range c.all() {
			switch {
			case f == n:
			case failing == nil:
				failing = f
			default:
				away = f
			}
		}
		failing.disk.failOp(opSnapshot, syscall.ENOSPC)
		c.write(150, time.Millisecond)
		c.sim.isolate(away.name, true)
		c.write(200, 200*time.Millisecond)
		if s := n.r.Stats(); s.Snapshot == 0 || s.Applied-s.Snapshot > 200 {
			t.Errorf("leader: %+v", s)
		}
		if s := failing.r.Stats(); s.Snapshot != 0 || s.First != 1 {
			t.Errorf("the one whose snapshots fail: %+v", s)
		}
		if s := away.r.Stats(); s.Snapshot == 0 {
			t.Errorf("the one cut off: %+v", s)
		}
		c.sim.isolate(away.name, false)
		c.stop()
	})
}

// TestF37TheLogWaitsForALaggard: a follower that was away catches up from the
// log, also when the leader changed meanwhile; a dead one holds it for a time and
// for so many bytes only.
func TestF37TheLogWaitsForALaggard(t *testing.T) {
	for _, x := range []struct {
		name     string
		edit     func(*Config)
		transfer bool
		wait     time.Duration
		install  bool
	}{
		{"kept", nil, false, 0, false},
		{"kept by the next leader", nil, true, 0, false},
		{"for a time", func(cfg *Config) { cfg.RetainTime = time.Minute }, false, 2 * time.Minute, true},
		{"for a time, by the next leader", func(cfg *Config) { cfg.RetainTime = time.Minute }, true, 2 * time.Minute, true},
		{"so many bytes", func(cfg *Config) { cfg.RetainBytes = 2 << 10 }, false, 0, true},
	} {
		t.Run(x.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, count := snapCluster(t, x.edit)
				count.each = 0
				c.start()
				n := c.setup()
				c.write(20, time.Second)
				var away *node
				for _, f := range c.all() {
					if f != n {
						away = f
					}
				}
				c.sim.isolate(away.name, true)
				has := away.r.Stats().Last
				c.write(50, 10*time.Millisecond)
				if x.transfer {
					if err := n.r.raft.Load().LeadershipTransfer().Error(); err != nil {
						t.Fatal(err)
					}
				}
				c.write(250, 10*time.Millisecond)
				time.Sleep(x.wait) // virtual
				c.write(120, 10*time.Millisecond)
				time.Sleep(10 * time.Second) // virtual
				lead := c.leader()
				if x.transfer == (lead == n) {
					t.Fatal("the leader is not whom this test means")
				}
				s := lead.r.Stats()
				if s.Snapshot < has+300 {
					t.Fatalf("no late snapshot: %+v", s)
				}
				if held := s.First <= has+1; held == x.install {
					t.Errorf("log %d to %d while one is away", s.First, s.Last)
				}
				c.sim.isolate(away.name, false)
				want := lead.r.View().BallotRound()
				c.until("catching up", func() bool { return away.r.View().BallotRound() == want })
				away.obs.mu.Lock()
				if installed := away.obs.restored > 0; installed != x.install {
					t.Errorf("installed %v, want %v", installed, x.install)
				}
				away.obs.mu.Unlock()
				// With everyone there the log is short again.
				c.write(120, 10*time.Millisecond)
				time.Sleep(10 * time.Second) // virtual
				for _, f := range c.all() {
					if s := f.r.Stats(); s.Last-s.First > 300 {
						t.Errorf("%s: log %d to %d with everyone there", f.name, s.First, s.Last)
					}
				}
				c.stop()
			})
		})
	}
}

// TestRestartReplaysLittle: what a restart applies again is bounded by the
// threshold, by entries as by bytes.
func TestRestartReplaysLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, count := snapCluster(t, func(cfg *Config) { cfg.SnapshotThreshold, cfg.SnapshotBytes = 1<<40, 16<<10 })
		count.each = 0
		c.start()
		c.setup()
		c.write(1000, time.Millisecond)
		time.Sleep(10 * time.Second) // virtual
		n := c.all()[0]
		s := n.r.Stats()
		if left := n.r.stores.logs.bytesFrom(s.Snapshot + 1); s.Snapshot == 0 || left > 20<<10 {
			t.Errorf("%d bytes behind the snapshot: %+v", left, s)
		}
		if err := n.stop(); err != nil {
			t.Fatal(err)
		}
		back := c.open(n.name)
		back.run()
		c.write(1, 0)
		want := c.leader().r.View().BallotRound()
		c.until("replay", func() bool { return back.r.View().BallotRound() == want })
		back.obs.mu.Lock()
		if back.obs.restored != 1 || back.obs.first <= s.Snapshot {
			t.Errorf("restored %d times, then applied from %d; the snapshot ends at %d", back.obs.restored, back.obs.first, s.Snapshot)
		}
		back.obs.mu.Unlock()
		c.stop()
	})
}

// TestDamagedSnapshotIsReplaced: a leader whose snapshot turns out damaged when
// a follower needs it writes another, and sends that.
func TestDamagedSnapshotIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, count := snapCluster(t, func(cfg *Config) { cfg.RetainBytes = 1 })
		count.each = 0
		c.start()
		n := c.setup()
		var away *node
		for _, f := range c.all() {
			if f != n {
				away = f
			}
		}
		c.sim.isolate(away.name, true)
		c.write(400, 10*time.Millisecond)
		time.Sleep(5 * time.Second) // virtual
		list, err := n.r.stores.snaps.List()
		if err != nil || len(list) == 0 {
			t.Fatal(list, err)
		}
		for _, m := range list {
			corrupt(t, n, m.ID)
		}
		c.sim.isolate(away.name, false)
		want := n.r.View().BallotRound()
		c.until("catching up", func() bool { return away.r.View().BallotRound() == want })
		away.obs.mu.Lock()
		if away.obs.restored != 1 {
			t.Errorf("restored %d times", away.obs.restored)
		}
		away.obs.mu.Unlock()
		c.stop()
	})
}

// TestTurns: against its own rules, on random servers.
func TestTurnsAreFairAndOneAtATime(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		servers := 1 + rnd.IntN(5)
		var ts turns
		had := map[raft.ServerID]int{}
		states := make([]turnState, servers)
		for i := range states {
			states[i] = turnState{id: raft.ServerID(fmt.Sprint(i)), leader: i == 0}
		}
		running := -1
		for step := range 300 {
			for i := range states {
				states[i].due = i != 1 || step%2 == 0 // 1 wants one only now and then
				states[i].backlog = rnd.Uint64N(100)
				states[i].running = i == running
			}
			before := ts.holder
			ts.next(states)
			switch {
			case running >= 0:
				if ts.holder != states[running].id {
					t.Fatalf("%v got the turn while %d writes", ts.holder, running)
				}
				if rnd.IntN(3) == 0 {
					running = -1
				}
			case ts.holder == "":
				t.Fatal("nobody has the turn though one wants it")
			default:
				if ts.holder != before {
					had[ts.holder]++
				}
				i := int(ts.holder[0] - '0')
				if i == 2 {
					break // 2 never manages to
				}
				if states[i].due && rnd.IntN(2) == 0 {
					running = i
				}
			}
		}
		for i := range states {
			if i != 1 && servers > 1 && had[states[i].id] < 300/servers/20 {
				t.Errorf("of %d servers, %d had %d turns", servers, i, had[states[i].id])
			}
		}
	}
}

func TestKeepFrom(t *testing.T) {
	for _, c := range []struct {
		k    keep
		want uint64
	}{
		{keep{after: 101, trailing: 0}, 0},
		{keep{after: 101, trailing: 51}, 51},
		{keep{after: 101, trailing: 151}, 101},
		{keep{after: 101, trailing: 51, trailingBytes: 80}, 80},
		{keep{after: 101, trailing: 51, trailingBytes: 200}, 101},
		{keep{after: 101, trailing: 51, needed: 20}, 20},
		{keep{after: 101, trailing: 51, needed: 20, neededBytes: 30}, 30},
		{keep{after: 101, trailing: 51, needed: 20, neededBytes: 70}, 51},
		{keep{after: 101, trailing: 51, needed: 120}, 51},
	} {
		if got := keepFrom(c.k); got != c.want {
			t.Errorf("%+v: %d, want %d", c.k, got, c.want)
		}
	}
}

// corrupt flips a bit in a snapshot.
func corrupt(t *testing.T, n *node, id string) {
	t.Helper()
	path := filepath.Join(n.r.stores.snaps.dir, id, snapStateName)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	raw[len(raw)/2] ^= 4
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
}
