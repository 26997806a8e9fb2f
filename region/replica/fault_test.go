package replica

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestF30HungDisk: a leader whose disk hangs stays leader in hashicorp/raft, so
// the pulse must go stale in time and the watchdog end the process.
func TestF30HungDisk(t *testing.T) {
	for _, d := range []time.Duration{time.Second, 4 * time.Second} {
		t.Run(d.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, newSimNet(), three, nil)
				c.start()
				n := c.setup()
				n.r.SetD(d)
				time.Sleep(2 * time.Second)
				for range 200 {
					if !n.r.PulseFresh(c.clock.Now()) {
						t.Fatal("pulse of a healthy leader is stale")
					}
					time.Sleep(7 * time.Millisecond)
				}
				hung := time.Now()
				n.disk.hang()
				c.until("stale pulse", func() bool { return !n.r.PulseFresh(c.clock.Now()) })
				if took, most := time.Since(hung), min(d/2, maxPulseAge)+2*time.Millisecond; took > most {
					t.Errorf("pulse was fresh for %v after the disk hung, want at most %v", took, most)
				}
				if _, ok := n.r.Leading(); !ok {
					t.Error("raft noticed the hung disk by itself: this test shows nothing")
				}
				err := <-n.exits
				if took := time.Since(hung); took < 1500*time.Millisecond || took > 1900*time.Millisecond+min(d/5, maxPulseEvery) {
					t.Errorf("watchdog fired after %v", took)
				}
				if !strings.Contains(err.Error(), opAppend) {
					t.Errorf("watchdog: %v", err)
				}
				n.disk.release()
				c.stop()
			})
		})
	}
}

// TestF30FollowerDisk: one slow follower disk makes no pulse stale.
func TestF30FollowerDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		n := c.setup()
		time.Sleep(time.Second)
		var follower *node
		for _, f := range c.all() {
			if f != n {
				follower = f
			}
		}
		follower.disk.hang()
		time.Sleep(3 * time.Second)
		if !n.r.PulseFresh(c.clock.Now()) {
			t.Error("one hung follower of three made the leader's pulse stale")
		}
		if err := <-follower.exits; err == nil {
			t.Error("no reason")
		}
		follower.disk.release()
		c.stop()
	})
}

// TestWatchdogOwnPause: a process that was stopped for long in the middle of a
// store call does not take that for a hung disk.
func TestWatchdogOwnPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuard(nil, func(error) {}, func(string, time.Duration, error) {})
		c := g.begin(opAppend)
		const limit = 1500 * time.Millisecond
		time.Sleep(time.Minute) // no tick came: the whole process stood still
		if err := g.overdue(limit, 15); err != nil {
			t.Errorf("first look after a pause: %v", err)
		}
		for range 13 {
			time.Sleep(100 * time.Millisecond)
			if err := g.overdue(limit, 15); err != nil {
				t.Fatalf("too early: %v", err)
			}
		}
		if err := g.overdue(limit, 15); err == nil {
			t.Error("a call that ran 15 ticks is not overdue")
		}
		g.end(c)
		if err := g.overdue(limit, 15); err != nil {
			t.Errorf("after its end: %v", err)
		}
	})
}

// TestF3WipedDirectory: s1 is away while s0 and s2 acknowledge a command; s2
// loses its disk and comes back under its name, s0 dies. s1 and the new s2 must
// not elect a leader that lacks the command, not even when an operator
// initialises s2 again.
func TestF3WipedDirectory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := newSimNet()
		c := newCluster(t, sim, three, nil)
		c.start()
		s0 := c.setup()
		var rest []*node
		for _, n := range c.all() {
			if n != s0 {
				rest = append(rest, n)
			}
		}
		s1, s2 := rest[0], rest[1]
		sim.isolate(s1.name, true)
		want, err := s0.reserve(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		oldID := s2.r.RaftID()
		sim.isolate(s0.name, true)
		if err := s2.stop(); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(c.config(s2.name).DataDir); err != nil {
			t.Fatal(err)
		}
		wiped := c.open(s2.name)
		if wiped.r.RaftID() == oldID {
			t.Fatal("a new data directory has the old raft id")
		}
		if err := wiped.r.Bootstrap([]Server{
			{Name: s0.name, RaftID: s0.r.RaftID(), Voter: true},
			{Name: s1.name, RaftID: s1.r.RaftID(), Voter: true},
			{Name: s2.name, RaftID: oldID, Voter: true},
		}); err == nil || !strings.Contains(err.Error(), "made for another data directory") {
			t.Errorf("bootstrap with the old id: %v", err)
		}
		// The operator's mistake: the group's list with the new id.
		if err := wiped.r.Bootstrap([]Server{
			{Name: s0.name, RaftID: s0.r.RaftID(), Voter: true},
			{Name: s1.name, RaftID: s1.r.RaftID(), Voter: true},
			{Name: s2.name, RaftID: wiped.r.RaftID(), Voter: true},
		}); err != nil {
			t.Fatal(err)
		}
		wiped.run()
		sim.isolate(s1.name, false)
		for range 1000 {
			time.Sleep(10 * time.Millisecond)
			for _, n := range []*node{s1, wiped} {
				if term, ok := n.r.Leading(); ok {
					t.Fatalf("%s leads term %d with round %d; %d was acknowledged", n.name, term, n.r.View().BallotRound(), want)
				}
			}
		}
		// With s0 back the group works, and has what was acknowledged.
		sim.isolate(s0.name, false)
		lead := c.leader()
		if got := lead.r.View().BallotRound(); got < want {
			t.Errorf("round %d after the return, %d was acknowledged", got, want)
		}
		c.stop()
	})
}

// TestIsolatedLeader: a leader cut off answers its callers with an unknown
// outcome when its lease ends, and steps down.
func TestIsolatedLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		n := c.setup()
		c.sim.isolate(n.name, true)
		began := time.Now()
		if _, err := n.reserve(context.Background()); !errors.Is(err, ErrUnknown) {
			t.Errorf("propose: %v, want unknown outcome", err)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("answered after %v", took)
		}
		if _, err := n.r.Check(context.Background()); err == nil {
			t.Error("check of a cut-off leader passed")
		}
		c.sim.isolate(n.name, false)
		c.leader()
		c.stop()
	})
}
