package replica

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// gatedStore is a log in memory whose writes wait for the gate.
type gatedStore struct {
	*raft.InmemStore
	gate  chan error // an error is the write's
	wrote []int      // entries of each write
}

func (s *gatedStore) StoreLogs(logs []*raft.Log) error {
	if err := <-s.gate; err != nil {
		return err
	}
	s.wrote = append(s.wrote, len(logs))
	return s.InmemStore.StoreLogs(logs)
}

// lateStore returns a log with entries 1 to 3 on its disk.
func lateStore(t *testing.T) (*logStore, *gatedStore) {
	t.Helper()
	disk := &gatedStore{InmemStore: raft.NewInmemStore(), gate: make(chan error)}
	if err := disk.InmemStore.StoreLogs(entries(1, 3, 1)); err != nil {
		t.Fatal(err)
	}
	l, err := newLogStore(disk, 16, 0)
	if err != nil {
		t.Fatal(err)
	}
	return l, disk
}

// blocks reports whether f waits for the disk; it must end once release has run.
func blocks(t *testing.T, f func(), release func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	synctest.Wait()
	select {
	case <-done:
		t.Error("did not wait for the disk")
	default:
	}
	release()
	<-done
}

// TestLeaderStoresLate: a leader's entries are there before they are on disk, are
// written as they gather, and count as on disk only then.
func TestLeaderStoresLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, disk := lateStore(t)
		l.late.leads = func() bool { return true }
		for _, e := range [][2]uint64{{4, 4}, {5, 6}, {7, 7}} {
			if err := l.StoreLogs(entries(e[0], e[1], 1)); err != nil {
				t.Fatal(err)
			}
			synctest.Wait() // the first is being written
		}
		var e raft.Log
		if err := l.GetLog(7, &e); err != nil || e.Index != 7 {
			t.Errorf("entry 7: %v, %v", e.Index, err)
		}
		if last, err := l.LastIndex(); last != 7 || err != nil {
			t.Errorf("last %d, %v", last, err)
		}
		if err := l.late.onDisk(3, nil); err != nil {
			t.Error(err)
		}
		stop := make(chan struct{})
		close(stop)
		if err := l.late.onDisk(4, stop); !errors.Is(err, errLateStopped) {
			t.Errorf("entry 4 counts as on disk: %v", err)
		}
		blocks(t, func() {
			if err := l.late.onDisk(4, nil); err != nil {
				t.Error(err)
			}
		}, func() { disk.gate <- nil })
		blocks(t, func() {
			if err := l.late.onDisk(7, nil); err != nil {
				t.Error(err)
			}
		}, func() { disk.gate <- nil })
		if !l.late.settle(time.Second) || len(disk.wrote) != 2 {
			t.Errorf("writes of %v entries", disk.wrote)
		}
	})
}

// TestOnlyALeaderSeesWhatIsNotOnDisk: what a deposed leader finds in its log, by
// which it answers the next one, is on its disk; so is what it stores or removes
// after that, and what changes the group.
func TestOnlyALeaderSeesWhatIsNotOnDisk(t *testing.T) {
	for name, f := range map[string]func(*logStore) error{
		"read":   func(l *logStore) error { return l.GetLog(4, new(raft.Log)) },
		"store":  func(l *logStore) error { return l.StoreLogs(nil) },
		"remove": func(l *logStore) error { return l.DeleteRange(4, 4) },
		"group": func(l *logStore) error {
			l.late.leads = func() bool { return true }
			return l.StoreLogs([]*raft.Log{{Index: 5, Term: 1, Type: raft.LogConfiguration}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, disk := lateStore(t)
				leads := true
				l.late.leads = func() bool { return leads }
				if err := l.StoreLogs(entries(4, 4, 1)); err != nil {
					t.Fatal(err)
				}
				leads = false
				if name == "store" {
					f = func(l *logStore) error { return l.StoreLogs(entries(5, 5, 2)) }
				}
				blocks(t, func() {
					if err := f(l); err != nil {
						t.Error(err)
					}
				}, func() {
					disk.gate <- nil
					if name == "store" || name == "group" {
						disk.gate <- nil
					}
				})
				want := map[string]uint64{"read": 4, "store": 5, "remove": 3, "group": 5}[name]
				if last, _ := disk.LastIndex(); last != want || l.late.durable != want {
					t.Errorf("last on disk %d, said to be %d, want %d", last, l.late.durable, want)
				}
			})
		})
	}
}

// TestFailedLateWrite: after a write that failed nothing counts as on disk, and
// nothing more is stored.
func TestFailedLateWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, disk := lateStore(t)
		leads := true
		l.late.leads = func() bool { return leads }
		if err := l.StoreLogs(entries(4, 4, 1)); err != nil {
			t.Fatal(err)
		}
		broken := errors.New("broken")
		blocks(t, func() {
			if err := l.late.onDisk(4, nil); !errors.Is(err, broken) {
				t.Errorf("entry 4: %v", err)
			}
		}, func() { disk.gate <- broken })
		if err := l.StoreLogs(entries(5, 5, 1)); err == nil {
			t.Error("a leader's entry was taken")
		}
		leads = false
		if err := l.StoreLogs(entries(5, 5, 2)); err == nil {
			t.Error("a follower's entry was taken")
		}
		if err := l.GetLog(4, new(raft.Log)); err == nil {
			t.Error("the entry is shown to a new leader")
		}
		if !l.late.settle(time.Second) {
			t.Error("still writing")
		}
	})
}

// TestWaiterOfARemovedEntry: who waits for an entry that was written and removed
// before he looked is not left waiting.
func TestWaiterOfARemovedEntry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, disk := lateStore(t)
		leads := true
		l.late.leads = func() bool { return leads }
		if err := l.StoreLogs(entries(4, 4, 1)); err != nil {
			t.Fatal(err)
		}
		leads = false
		go func() { disk.gate <- nil }()
		if err := l.DeleteRange(4, 4); err != nil {
			t.Fatal(err)
		}
		stop := make(chan struct{})
		time.AfterFunc(time.Second, func() { close(stop) })
		if err := l.late.onDisk(4, stop); !errors.Is(err, errLateRemoved) {
			t.Errorf("entry 4, which was removed: %v", err)
		}
	})
}

// TestFailedWriteEndsALeadership: a leader whose disk fails answers what is in
// flight with the reason, and the others elect another as soon as they may.
func TestFailedWriteEndsALeadership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		n := c.setup()
		time.Sleep(time.Second)
		broken := errors.New("broken")
		n.disk.failOp(opAppend, broken)
		began := time.Now()
		if _, err := n.reserve(context.Background()); !errors.Is(err, ErrUnknown) || !errors.Is(err, broken) {
			t.Errorf("answered: %v", err)
		}
		if took := time.Since(began); took > 10*time.Millisecond {
			t.Errorf("answered after %v", took)
		}
		if err := <-n.done; !errors.Is(err, broken) {
			t.Errorf("ended: %v", err)
		}
		c.mu.Lock()
		delete(c.nodes, n.name)
		c.mu.Unlock()
		c.leader()
		if took, most := time.Since(began), 4*TimingLAN().Heartbeat; took > most {
			t.Errorf("another leads after %v, want at most %v", took, most)
		}
		c.stop()
	})
}

// TestNothingCommitsBeforeTheLeadersDisk: the others have an entry that the leader
// has sent, and it is committed only when the leader has it on disk too.
func TestNothingCommitsBeforeTheLeadersDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		n := c.setup()
		time.Sleep(time.Second)
		before := n.r.View().BallotRound()
		n.disk.hang()
		at := n.r.raft.Load().LastIndex()
		type answer struct {
			res *pb.CommandResult
			err error
		}
		answers := make(chan answer, 1)
		go func() {
			res, err := n.r.Propose(context.Background(), ticket(0))
			answers <- answer{res, err}
		}()
		time.Sleep(time.Second) // less than the watchdog's
		if len(answers) != 0 {
			t.Error("answered")
		}
		for _, f := range c.all() {
			if got := f.r.View().BallotRound(); got != before {
				t.Errorf("%s has applied it", f.name)
			}
			if f.r.raft.Load().LastIndex() <= at {
				t.Errorf("%s does not have it: this test shows nothing", f.name)
			}
		}
		n.disk.release()
		if a := <-answers; a.err != nil || a.res.GetReserved() == nil {
			t.Errorf("afterwards: %v, %v", a.res, a.err)
		}
		c.until("application", func() bool {
			for _, f := range c.all() {
				if f.r.View().BallotRound() == before {
					return false
				}
			}
			return true
		})
		c.stop()
	})
}

// TestGroupOfOneStoresFirst: where the leader's copy alone commits, it is on disk
// first, whoever else gets copies.
func TestGroupOfOneStoresFirst(t *testing.T) {
	for _, nonvoter := range []bool{false, true} {
		t.Run(fmt.Sprintf("nonvoter=%v", nonvoter), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, newSimNet(), three[:1], nil)
				c.start()
				n := c.setup()
				if nonvoter {
					if err := n.r.raft.Load().AddNonvoter("away/1", "away", 0, time.Second).Error(); err != nil {
						t.Fatal(err)
					}
				}
				before := n.r.View().BallotRound()
				n.disk.hang()
				answered := make(chan error, 1)
				go func() { _, err := n.reserve(context.Background()); answered <- err }()
				time.Sleep(time.Second)
				if len(answered) != 0 || n.r.View().BallotRound() != before {
					t.Error("committed by what is not on disk")
				}
				n.disk.release()
				if err := <-answered; err != nil {
					t.Error(err)
				}
				c.stop()
			})
		})
	}
}

// TestNewLeaderCommitsFromDisk: a leader's first entries are sent outside a
// pipeline; they too are not committed before they are on its disk.
func TestNewLeaderCommitsFromDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		old := c.setup()
		time.Sleep(time.Second)
		var next *node
		for _, n := range c.all() {
			if n != old {
				next = n
			}
		}
		release := next.disk.hangOp(opAppend)
		rf := next.r.raft.Load()
		at := rf.LastIndex()
		if err := transfer(old.r.raft.Load(), Server{Name: next.name, RaftID: next.r.RaftID()}).Error(); err != nil {
			t.Fatal(err)
		}
		c.until("leadership", func() bool { return rf.State() == raft.Leader })
		time.Sleep(500 * time.Millisecond)
		for _, n := range c.all() {
			if n.r.raft.Load().LastIndex() <= at {
				t.Errorf("%s does not have the first entry: this test shows nothing", n.name)
			}
		}
		if got := rf.CommitIndex(); got > at {
			t.Errorf("entry %d counts as committed before it is on disk", got)
		}
		release()
		c.until("commit", func() bool { return rf.CommitIndex() == rf.LastIndex() })
		c.stop()
	})
}

// TestLeaderCrashesBeforeItsDisk: a leader crashes while an entry is on a
// follower's disk and not on its own. It comes back without it and may, with the
// third, commit another in its place: nobody was told of the first, and the
// follower gives it up.
func TestLeaderCrashesBeforeItsDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		n := c.setup()
		time.Sleep(time.Second)
		before, err := n.reserve(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
		var with, without *node
		for _, f := range c.all() {
			if f != n {
				with, without = f, with
			}
		}
		at := n.r.raft.Load().LastIndex()
		c.sim.isolate(without.name, true)
		release := n.disk.hangOp(opAppend)
		answer := make(chan error, 1)
		go func() { _, err := n.reserve(context.Background()); answer <- err }()
		time.Sleep(50 * time.Millisecond)
		if with.r.raft.Load().LastIndex() <= at {
			t.Error("the follower does not have the entry: this test shows nothing")
		}
		c.sim.isolate(with.name, true)
		n.disk.failOp(opAppend, errors.New("crash"))
		time.Sleep(time.Millisecond)
		release()
		if err := <-answer; err == nil {
			t.Error("answered")
		}
		if err := <-n.done; err == nil {
			t.Error("still there")
		}
		n = c.open(n.name)
		if last, _ := n.r.stores.logs.LastIndex(); last != at {
			t.Errorf("comes back with entry %d, not %d: this test shows nothing", last, at)
		}
		n.run()
		c.sim.isolate(without.name, false)
		if got, err := c.leader().reserve(context.Background()); err != nil || got != before+1 {
			t.Errorf("the next is %d, %v; %d is the last that was answered", got, err, before)
		}
		c.sim.isolate(with.name, false)
		c.until("agreement", func() bool { return with.r.View().BallotRound() == before+1 })
		with.obs.check(t)
		c.stop()
	})
}

// TestWithheld: an answer waits for the last of its entries; a heartbeat's, and
// one that says no, wait for nothing.
func TestWithheld(t *testing.T) {
	for _, x := range []struct {
		entries []*raft.Log
		success bool
		want    []uint64
	}{{nil, true, nil}, {entries(4, 6, 1), false, nil}, {entries(4, 6, 1), true, []uint64{6}}} {
		var waited []uint64
		wait := func(index uint64, _ <-chan struct{}) error { waited = append(waited, index); return nil }
		err := withheld(wait, nil, &raft.AppendEntriesRequest{Entries: x.entries}, &raft.AppendEntriesResponse{Success: x.success})
		if err != nil || !slices.Equal(waited, x.want) {
			t.Errorf("%d entries, success %v: waited for %v (%v), want %v", len(x.entries), x.success, waited, err, x.want)
		}
	}
}

// TestDeposedLeaderAnswersFromDisk: a leader whose log hangs is deposed; the next
// one commits nothing on the strength of its answers while that lasts.
func TestDeposedLeaderAnswersFromDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, func(cfg *Config) { cfg.StoreLimit = time.Minute })
		c.start()
		old := c.setup()
		time.Sleep(time.Second)
		release := map[*node]func(){old: old.disk.hangOp(opAppend)}
		ctx, cancel := context.WithCancel(context.Background())
		lost := make(chan struct{})
		go func() {
			defer close(lost)
			_, _ = old.reserve(ctx) // whatever becomes of it
		}()
		time.Sleep(50 * time.Millisecond) // the others have it
		for _, n := range c.all() {
			if n != old {
				release[n] = n.disk.hangOp(opAppend)
			}
		}
		c.sim.isolate(old.name, true)
		var next *node
		c.until("another leader", func() bool {
			for _, n := range c.all() {
				if n != old && n.r.raft.Load().State() == raft.Leader {
					next = n
				}
			}
			return next != nil
		})
		release[next]() // the third never has its first entry, and old may not say that it has
		rf := next.r.raft.Load()
		time.Sleep(10 * time.Millisecond)
		first := rf.LastIndex()
		if err := next.r.stores.logs.late.onDisk(first, nil); err != nil {
			t.Error(err)
		}
		c.sim.isolate(old.name, false)
		c.until("word from the next one", func() bool {
			name, _, _ := old.r.Leader()
			return name == next.name && time.Since(old.r.raft.Load().LastContact()) < TimingLAN().Heartbeat
		})
		time.Sleep(2 * time.Second) // calls of while it was cut off have ended
		if rf.State() != raft.Leader {
			t.Error("the next one leads no more: this test shows nothing")
		}
		if got := rf.CommitIndex(); got >= first {
			t.Errorf("entry %d counts as committed with the disks of both others hanging: it is %d", got, first)
		}
		delete(release, next)
		for _, f := range release {
			f()
		}
		c.until("service", func() bool {
			_, err := c.leader().reserve(context.Background())
			return err == nil
		})
		cancel()
		<-lost
		c.stop()
	})
}

// TestSettleWaitsForTheWrite: a server that stops gives its directory back only
// when nothing is being written: another process would write beside it.
func TestSettleWaitsForTheWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, disk := lateStore(t)
		l.late.leads = func() bool { return true }
		if err := l.StoreLogs(entries(4, 4, 1)); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if l.late.settle(time.Second) || time.Since(began) != time.Second {
			t.Errorf("settled after %v beside a write that hangs", time.Since(began))
		}
		blocks(t, func() {
			if !l.late.settle(time.Second) {
				t.Error("not settled once the entry is on disk")
			}
		}, func() { disk.gate <- nil })
	})
}
