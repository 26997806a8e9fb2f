package replica

import (
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
)

// TestASilentLeaderIsReplacedInTime: a cut-off leader has a successor as soon as
// a follower's patience is over, also when the leader before it, back with a log
// that is behind, is the first to ask. Two of them may campaign at once now
// and then, and split the votes. Raft alone takes up to three timeouts, and more
// when a candidate has asked in vain.
func TestASilentLeaderIsReplacedInTime(t *testing.T) {
	for n, splits := range map[int]int{3: 1, 5: 3} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var names []string
				for i := range n {
					names = append(names, fmt.Sprintf("eu-%d", i+1))
				}
				c := newCluster(t, newSimNet(), names, nil)
				c.start()
				c.setup()
				heartbeat := TimingLAN().Heartbeat
				limit := heartbeat*4/3 + time.Duration(n-3)/2*heartbeat/8 + 2*askAgain
				late := 0
				for k := range 12 {
					old := c.leader()
					time.Sleep(time.Second + time.Duration(k)*17*time.Millisecond)
					c.sim.isolate(old.name, true)
					began := time.Now()
					c.until("another leader", func() bool { return another(c, old) })
					if took := time.Since(began); took > limit {
						t.Logf("%d: another leader after %v; want at most %v", k, took, limit)
						late++
					}
					c.sim.isolate(old.name, false)
					c.until("one leader", func() bool { return agreed(c) })
				}
				if late > splits {
					t.Errorf("%d of 12 were late", late)
				}
				c.stop()
			})
		})
	}
}

// another server than old leads.
func another(c *cluster, old *node) bool {
	for _, n := range c.all() {
		if _, ok := n.r.Leading(); ok && n != old {
			return true
		}
	}
	return false
}

// agreed: all servers know the same leader.
func agreed(c *cluster) bool {
	first, term, _ := c.all()[0].r.Leader()
	for _, n := range c.all() {
		if name, in, _ := n.r.Leader(); name == "" || name != first || in != term {
			return false
		}
	}
	return true
}

// TestAFollowerThatAloneHearsNothingDeposesNobody: the others hear the leader, so
// it may ask for their votes as often as it likes.
func TestAFollowerThatAloneHearsNothingDeposesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		lead := c.setup()
		term, _ := lead.r.Leading()
		var deaf *node
		for _, n := range c.all() {
			if n != lead {
				deaf = n
			}
		}
		for range 10 {
			c.sim.isolate(deaf.name, true)
			time.Sleep(400 * time.Millisecond)
			c.sim.isolate(deaf.name, false)
			time.Sleep(300 * time.Millisecond)
		}
		if now, ok := lead.r.Leading(); !ok || now != term {
			t.Errorf("the leader of term %d leads %d now (%v)", term, now, ok)
		}
		c.stop()
	})
}

func TestPatience(t *testing.T) {
	const hb = 120 * time.Millisecond
	heard := time.Now()
	at := func(ms int) time.Time { return heard.Add(time.Duration(ms) * time.Millisecond) }
	own, less, more := logEnd{3, 10}, logEnd{3, 9}, logEnd{4, 2}
	for _, c := range []struct {
		what string
		p    patience
		want time.Time
		ask  bool
	}{
		{"alone", patience{place: 0}, at(160), true},
		{"alone, the next", patience{place: 1}, at(190), true},
		{"asked early", patience{asked: at(10), by: rival{"a", own}}, at(120), false},
		{"asked late", patience{asked: at(140), by: rival{"z", more}}, at(140), false},
		{"asked late, the next but one", patience{place: 2, asked: at(140), by: rival{"a", own}}, at(170), false},
		{"asked by one that is behind", patience{asked: at(10), by: rival{"a", less}}, at(120), true},
		{"two ask, the first", patience{asks: true, asked: at(150), by: rival{"z", own}}, at(150), true},
		{"two ask, the second", patience{asks: true, asked: at(150), by: rival{"a", own}}, at(150), false},
		{"two ask, ahead", patience{asks: true, asked: at(150), by: rival{"a", less}}, at(150), true},
		{"two ask, behind", patience{asks: true, asked: at(150), by: rival{"z", more}}, at(150), false},
	} {
		c.p.heartbeat, c.p.self = hb, "m"
		if got, ask := c.p.due(heard, own); got != c.want || ask != c.ask {
			t.Errorf("%s: %v, ask %v; want %v, %v", c.what, got.Sub(heard), ask, c.want.Sub(heard), c.ask)
		}
	}
}

// TestTheBestAskerCounts, and all are forgotten when the leader is heard again.
func TestTheBestAskerCounts(t *testing.T) {
	now := time.Now()
	var p patience
	for i, a := range []rival{{"c", logEnd{1, 5}}, {"d", logEnd{1, 5}}, {"b", logEnd{1, 5}}, {"a", logEnd{1, 4}}, {"e", logEnd{2, 1}}} {
		p.heardAsk(now.Add(time.Duration(i)), a)
		if want := []raft.ServerID{"c", "c", "b", "b", "e"}[i]; p.by.id != want || p.asked != now {
			t.Errorf("after %v: for %s since %v; want %s", a, p.by.id, p.asked.Sub(now), want)
		}
	}
	p.heardLeader(now.Add(-1))
	if p.asked.IsZero() {
		t.Error("a leader heard before has ended it")
	}
	p.heardLeader(now.Add(1))
	if !p.asked.IsZero() {
		t.Error("a leader heard since has not ended it")
	}
}

func TestPlace(t *testing.T) {
	var servers []raft.Server
	for _, id := range []raft.ServerID{"d", "b", "n", "a", "c"} {
		suffrage := raft.Voter
		if id == "n" {
			suffrage = raft.Nonvoter
		}
		servers = append(servers, raft.Server{ID: id, Suffrage: suffrage})
	}
	for _, c := range []struct {
		self, leader, rival raft.ServerID
		want                int
		voter               bool
	}{
		{"a", "b", "", 0, true},
		{"d", "b", "", 2, true},
		{"d", "b", "c", 1, true},
		{"n", "b", "", 0, false},
		{"x", "b", "", 0, false},
	} {
		n, voters, voter := place(servers, c.self, c.leader, c.rival)
		if voter != c.voter || voter && n != c.want || voters != 4 {
			t.Errorf("%+v: place %d of %d, voter %v", c, n, voters, voter)
		}
	}
}

// TestWhomNobodyCanElectMakesNobodyImpatient: one that was removed and has not been
// told asks for ever, and its log may be the longest.
func TestWhomNobodyCanElectMakesNobodyImpatient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		lead := c.setup()
		layer := newStreams(c.sim.listen("gone"), "gone/1", Config{TransportTimeout: time.Second, Logger: slog.New(slog.DiscardHandler)})
		trans := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
			Stream: layer, ServerAddressProvider: byID{}, MaxPool: 1, Timeout: time.Second, Logger: newHlog(slog.New(slog.DiscardHandler), "raft"),
		})
		defer func() { _ = trans.Close() }()
		for k := range 5 {
			time.Sleep(time.Second + time.Duration(k)*7*time.Millisecond)
			c.sim.isolate(lead.name, true)
			first := lead // to miss it: the other would have asked it before it asks
			for _, n := range c.all() {
				if n != lead && (first == lead || n.r.raft.Load().LastContact().Before(first.r.raft.Load().LastContact())) {
					first = n
				}
			}
			// Asked when it has missed its leader for a while, it bears that for as long as
			// if it had not been asked.
			rf := first.r.raft.Load()
			time.Sleep(time.Until(rf.LastContact().Add(TimingLAN().Heartbeat / 2)))
			req := &raft.RequestPreVoteRequest{
				RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte("gone/1"), Addr: []byte("gone")},
				Term:      rf.CurrentTerm() + 1, LastLogTerm: 1 << 40, LastLogIndex: 1 << 40,
			}
			var resp raft.RequestPreVoteResponse
			if err := trans.RequestPreVote(first.r.id, raft.ServerAddress(first.name), req, &resp); err != nil || resp.Granted {
				t.Fatalf("granted %v: %v", resp.Granted, err)
			}
			time.Sleep(time.Until(rf.LastContact().Add(TimingLAN().Heartbeat * 5 / 4)))
			if _, id := rf.LeaderWithID(); id != lead.r.id {
				t.Errorf("%d: %s has given its leader up %v after it was heard last", k, first.name, time.Since(rf.LastContact()))
			}
			c.until("another leader", func() bool { return another(c, lead) })
			c.sim.isolate(lead.name, false)
			c.until("one leader", func() bool { return agreed(c) })
			lead = c.leader()
		}
		c.stop()
	})
}

// TestWhoWasNotRunLooksAgain: a follower whose patience seems to be over because
// it was not run itself asks nobody before it has looked once more: heartbeats may
// be waiting to be read.
func TestWhoWasNotRunLooksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three, nil)
		c.start()
		lead := c.setup()
		time.Sleep(time.Second)
		n := c.all()[0]
		if n == lead {
			n = c.all()[1]
		}
		trans := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
			Stream: newStreams(c.sim.listen("own"), n.r.id, n.r.cfg), ServerAddressProvider: byID{}, MaxPool: 1,
			Timeout: time.Second, Logger: newHlog(slog.New(slog.DiscardHandler), "raft"),
		})
		defer func() { _ = trans.Close() }()
		s := newSilence(n.r, n.r.raft.Load(), transport{NetworkTransport: trans})
		s.p.heartbeat /= 5 // due long before the server's own
		c.sim.isolate(lead.name, true)
		time.Sleep(100 * time.Millisecond)
		now := time.Now()
		if next := s.woken(now, now.Add(-overslept)); s.p.asks || next != now.Add(lookAgain) {
			t.Errorf("run %v late: asks %v, looks again after %v; want %v", overslept, s.p.asks, next.Sub(now), lookAgain)
		}
		if s.woken(now, now.Add(1-overslept)); !s.p.asks {
			t.Error("run in time, and does not ask: this test shows nothing")
		}
		c.sim.isolate(lead.name, false)
		c.until("agreement", func() bool { return agreed(c) })
		c.stop()
	})
}
