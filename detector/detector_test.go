package detector

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bubbleClock is the lease clock of a synctest bubble.
type bubbleClock struct{ origin time.Time }

func (c bubbleClock) Now() instant.Instant {
	return instant.Instant(0).Add(time.Since(c.origin) + time.Hour)
}

var key = bytes.Repeat([]byte{7}, keyBytes)

// pool is a set of processes on one memNet.
type pool struct {
	t     *testing.T
	net   *memNet
	clock bubbleClock
	nodes map[string]*node
	peers []Peer
}

type node struct {
	*Detector
	stop func()

	mu    sync.Mutex
	heard map[string]int
}

func (n *node) heardOf(peer string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.heard[peer]
}

// newPool has the servers eu-1 and us-1 and the witness w1.
func newPool(t *testing.T) *pool {
	p := &pool{t: t, net: &memNet{port: 7000}, clock: bubbleClock{time.Now()}, nodes: map[string]*node{}}
	for i, name := range []string{"eu-1", "us-1", "w1"} {
		region, _, _ := strings.Cut(name, "-")
		if name == "w1" {
			region = ""
		}
		p.peers = append(p.peers, Peer{Name: name, Region: region, Gossip: fmt.Sprintf("127.0.0.1:%d", 8000+i)})
	}
	t.Cleanup(func() {
		for _, n := range p.nodes {
			n.stop()
		}
		wait(10 * time.Second) // memberlist's probes end after Shutdown has returned
	})
	return p
}

func (p *pool) config(name string) Config {
	cfg := Config{Name: name, Cluster: "test", Key: key, D: 4 * time.Second, Clock: p.clock, Logger: slog.New(slog.DiscardHandler)}
	for _, peer := range p.peers {
		if peer.Name == name {
			cfg.Region = peer.Region
			cfg.Transport = p.net.listen(name, peer.Gossip)
		} else {
			cfg.Peers = append(cfg.Peers, peer)
		}
	}
	return cfg
}

func (p *pool) start(name string, change ...func(*Config)) *node {
	p.t.Helper()
	n := &node{heard: map[string]int{}}
	cfg := p.config(name)
	cfg.Heard = func(peer string) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.heard[peer]++
	}
	for _, c := range change {
		c(&cfg)
	}
	d, err := New(cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	n.Detector = d
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			p.t.Errorf("%s: Run: %v", name, err)
		}
	})
	p.nodes[name] = n
	return n
}

// lead makes n send heartbeats of a term while on says so.
func (n *node) lead(term uint64) (stop func()) {
	n.SetBeat(func() (*pb.Heartbeat, bool) { return &pb.Heartbeat{Term: term, ClusterId: "c"}, true })
	return func() { n.SetBeat(nil) }
}

// wait lets virtual time pass.
func wait(d time.Duration) {
	timer := time.NewTimer(d)
	<-timer.C
	synctest.Wait()
}

func verdict(n *node, region string) register.Verdict { return n.Suspicion(region).Verdict }

func TestHeartbeatsMakeARegionHealthyAndSilenceCrashed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		eu, us, w := p.start("eu-1"), p.start("us-1"), p.start("w1")
		stop := eu.lead(3)
		wait(20 * time.Second)
		for _, n := range []*node{eu, us, w} {
			if v := verdict(n, "eu"); v != register.VerdictHealthy {
				t.Errorf("%s: eu is %v, want healthy", n.cfg.Name, v)
			}
			if v := verdict(n, "us"); v != register.VerdictCrashed {
				t.Errorf("%s: us, whose leader never spoke, is %v", n.cfg.Name, v)
			}
		}
		if got, want := w.Members(), []string{"eu-1", "us-1"}; !slices.Equal(got, want) {
			t.Errorf("members at w1: %v, want %v", got, want)
		}
		if _, ok := w.RoundTrip("eu-1"); !ok || len(w.RoundTrips()) != 2 {
			t.Errorf("round trips after 20 s: %v", w.RoundTrips())
		}
		if r := w.Reports(); len(r) != 2 || r[0].GetRegion() != "eu" || r[0].GetVerdict() != pb.Verdict_VERDICT_HEALTHY || r[1].GetVerdict() != pb.Verdict_VERDICT_CRASHED || r[1].GetSilentNs() >= 0 {
			t.Errorf("reports: %v", r)
		}
		stop() // no quorum, no pulse: the process lives and stays in the pool
		wait(3 * time.Second)
		if v := verdict(w, "eu"); !v.Alive() {
			t.Errorf("3 s of silence: %v", v)
		}
		wait(1500 * time.Millisecond)
		if v := verdict(w, "eu"); v != register.VerdictCrashed {
			t.Errorf("4.5 s of silence: %v", v)
		}
		if !slices.Contains(w.Members(), "eu-1") {
			t.Error("the silent leader's process left the pool")
		}
	})
}

func TestHeartbeatsGoToConfiguredPeersNotMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		// Without streams nobody joins anybody.
		eu := p.start("eu-1", func(c *Config) { c.Transport = noStreams{c.Transport.(*memTransport)} })
		w := p.start("w1", func(c *Config) { c.Transport = noStreams{c.Transport.(*memTransport)} })
		eu.lead(1)
		wait(10 * time.Second)
		if m := eu.Members(); len(m) != 0 {
			t.Fatalf("eu-1 has members %v; the test shows nothing", m)
		}
		if v := verdict(w, "eu"); v != register.VerdictHealthy {
			t.Errorf("eu is %v at a peer outside its membership", v)
		}
	})
}

// noStreams cannot dial, so that its node never joins.
type noStreams struct{ *memTransport }

func (noStreams) DialTimeout(string, time.Duration) (net.Conn, error) {
	return nil, errors.New("no streams")
}

func (noStreams) DialAddressTimeout(memberlist.Address, time.Duration) (net.Conn, error) {
	return nil, errors.New("no streams")
}

func TestAHangingAddressDoesNotSilenceTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		release := make(chan struct{})
		eu := p.start("eu-1", func(c *Config) { c.Transport = hanging{c.Transport.(*memTransport), "us-1", release} })
		w := p.start("w1")
		eu.lead(1)
		wait(20 * time.Second)
		if v := verdict(w, "eu"); v != register.VerdictHealthy {
			t.Errorf("eu is %v at w1 while its sends to us-1 hang", v)
		}
		close(release)
	})
}

// hanging never gets rid of what is for one peer, as when its name does not
// resolve.
type hanging struct {
	*memTransport
	peer    string
	release chan struct{}
}

func (h hanging) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	if a.Name == h.peer {
		<-h.release
	}
	return h.memTransport.WriteToAddress(b, a)
}

func TestF42RejoinAfterALongPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		eu, w := p.start("eu-1"), p.start("w1")
		eu.lead(1)
		wait(5 * time.Second)
		if len(w.Members()) != 1 {
			t.Fatalf("not joined: %v", w.Members())
		}
		p.net.setCut(func(string, string) bool { return true })
		wait(5 * time.Minute) // far beyond the time after which memberlist forgets
		if len(w.Members()) != 0 || verdict(w, "eu") != register.VerdictCrashed {
			t.Fatalf("during the partition: members %v, eu %v", w.Members(), verdict(w, "eu"))
		}
		before := w.heardOf("eu-1")
		p.net.setCut(nil)
		wait(time.Second)
		if v := verdict(w, "eu"); !v.Alive() {
			t.Errorf("1 s after the heal eu is %v", v)
		}
		if w.heardOf("eu-1") == before {
			t.Error("the hook was not called when the peer was heard again")
		}
		wait(20 * time.Second)
		if len(w.Members()) != 1 || len(eu.Members()) != 1 {
			t.Errorf("21 s after the heal: %v, %v", w.Members(), eu.Members())
		}
	})
}

func TestOneWayCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		eu, us, w := p.start("eu-1"), p.start("us-1"), p.start("w1")
		eu.lead(1)
		us.lead(1)
		wait(5 * time.Second)
		p.net.setCut(func(from, to string) bool { return from == "eu-1" && to == "us-1" })
		wait(5 * time.Second)
		if v := verdict(us, "eu"); v != register.VerdictCrashed {
			t.Errorf("us thinks eu is %v though it hears nothing", v)
		}
		if v := verdict(eu, "us"); v != register.VerdictHealthy {
			t.Errorf("eu thinks us is %v", v)
		}
		if v := verdict(w, "eu"); v != register.VerdictHealthy {
			t.Errorf("the witness thinks eu is %v", v)
		}
	})
}

func TestLeaderChangeAndSenderPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		eu, w := p.start("eu-1"), p.start("w1")
		stop := eu.lead(1)
		wait(10 * time.Second)
		stop()
		wait(2 * time.Second) // an election
		eu.lead(2)
		wait(300 * time.Millisecond)
		if v := verdict(w, "eu"); !v.Alive() {
			t.Errorf("after an election of 2 s: %v", v)
		}
		w.receive(message(t, &pb.Heartbeat{Region: "eu", Server: "eu-1", Term: 1, Seq: 1 << 30}))
		eu.SetBeat(nil)
		wait(5 * time.Second)
		w.receive(message(t, &pb.Heartbeat{Region: "eu", Server: "eu-1", Term: 2, Seq: 1}))
		if v := verdict(w, "eu"); v != register.VerdictCrashed {
			t.Errorf("an old heartbeat made a silent region %v", v)
		}
	})
}

func TestF43OwnPauseOfTheObserver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		w := p.start("w1")
		w.receive(message(t, &pb.Heartbeat{Region: "eu", Server: "eu-1", Term: 1, Seq: 1}))
		wait(30 * time.Second) // as a pause: nothing was read
		w.Resume(p.clock.Now())
		if s := w.Suspicion("eu"); s.Verdict != register.VerdictUnknown || s.Silent != 30*time.Second {
			t.Errorf("after the own pause: %+v", s)
		}
		w.receive(message(t, &pb.Heartbeat{Region: "eu", Server: "eu-1", Term: 1, Seq: 100}))
		if v := verdict(w, "eu"); v == register.VerdictCrashed {
			t.Error("crashed though just heard")
		}
	})
}

func message(t *testing.T, hb *pb.Heartbeat) []byte {
	t.Helper()
	raw, err := proto.Marshal(hb)
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte{kindHeartbeat}, raw...)
}

func TestStrangeMessagesAreIgnored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		w := p.start("w1", func(c *Config) { c.ClusterID = func() string { return "ours" } })
		good := &pb.Heartbeat{Region: "eu", Server: "eu-1", Term: 1, Seq: 1, ClusterId: "ours"}
		for name, raw := range map[string][]byte{
			"empty":                {},
			"unknown kind":         {99, 1, 2},
			"garbage":              {kindHeartbeat, 0xff, 0xff},
			"unknown server":       message(t, &pb.Heartbeat{Region: "eu", Server: "eu-9", Term: 1, Seq: 1, ClusterId: "ours"}),
			"server of another":    message(t, &pb.Heartbeat{Region: "eu", Server: "us-1", Term: 1, Seq: 1, ClusterId: "ours"}),
			"a witness":            message(t, &pb.Heartbeat{Region: "", Server: "w1", Term: 1, Seq: 1, ClusterId: "ours"}),
			"of another cluster":   message(t, &pb.Heartbeat{Region: "eu", Server: "eu-1", Term: 1, Seq: 1, ClusterId: "theirs"}),
			"of a cluster unnamed": message(t, &pb.Heartbeat{Region: "eu", Server: "eu-1", Term: 1, Seq: 1}),
		} {
			w.receive(raw)
			if s := w.Suspicion("eu"); s.Silent >= 0 {
				t.Errorf("%s: taken: %+v", name, s)
			}
		}
		if n := w.ignored; n != 8 {
			t.Errorf("%d ignored, want 8", n)
		}
		w.receive(message(t, good))
		if v := verdict(w, "eu"); v != register.VerdictHealthy {
			t.Errorf("after a good one: %v", v)
		}
		if s := w.Suspicion("mars"); s.Verdict != register.VerdictUnknown || s.Silent >= 0 {
			t.Errorf("a region that is not configured: %+v", s)
		}
	})
}

func TestOtherKeyAndOtherClusterAreRefused(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"other key":     func(c *Config) { c.Key = bytes.Repeat([]byte{8}, keyBytes) },
		"no key":        func(c *Config) { c.Key, c.Insecure = nil, true },
		"other cluster": func(c *Config) { c.Cluster = "another" },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPool(t)
				eu, us, w := p.start("eu-1", change), p.start("us-1"), p.start("w1")
				eu.lead(1)
				us.lead(1)
				wait(20 * time.Second)
				if s := w.Suspicion("eu"); s.Silent >= 0 || slices.Contains(w.Members(), "eu-1") {
					t.Errorf("the stranger was heard: %+v, members %v", s, w.Members())
				}
				if v := verdict(w, "us"); v != register.VerdictHealthy {
					t.Errorf("the friend is %v", v)
				}
				if s := eu.Suspicion("us"); s.Silent >= 0 {
					t.Errorf("the stranger hears us: %+v", s)
				}
			})
		})
	}
}

func TestNothingIsInPlainText(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		seen, leaked := 0, 0
		p.net.tap = func(raw []byte) {
			seen++
			if bytes.Contains(raw, []byte("eu-1")) {
				leaked++
			}
		}
		eu := p.start("eu-1")
		p.start("w1")
		eu.lead(1)
		wait(5 * time.Second)
		p.net.mu.Lock()
		defer p.net.mu.Unlock()
		if seen < 20 || leaked > 0 {
			t.Errorf("%d of %d datagrams show names", leaked, seen)
		}
	})
}

func TestHeardIsCalledAtMostOncePerSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		eu, w := p.start("eu-1"), p.start("w1")
		eu.lead(1)
		wait(10 * time.Second)
		if n := w.heardOf("eu-1"); n < 8 || n > 11 {
			t.Errorf("called %d times in 10 s of heartbeats", n)
		}
	})
}

func TestConfigFaultsAreAllNamed(t *testing.T) {
	err := Config{Peers: []Peer{{Name: "a", Gossip: "x:1"}, {Name: "a", Gossip: "x:1"}, {}}, Key: []byte("short"), Rejoin: -1}.Validate()
	if err == nil {
		t.Fatal("taken")
	}
	for _, want := range []string{"name:", "cluster:", "key: has 5 bytes", "transport:", "clock:", "there twice", "needs a name", "d: 0s", "rejoin"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	if err := (Config{Key: nil}).Validate(); !strings.Contains(err.Error(), "key: has 0 bytes") {
		t.Errorf("no key without insecure: %v", err)
	}
}

func TestLogFloodIsCut(t *testing.T) {
	var out bytes.Buffer
	now := time.Unix(100, 0)
	w := &logWriter{logger: slog.New(slog.NewTextHandler(&out, nil)), now: func() time.Time { return now }}
	for range 100 {
		if _, err := w.Write([]byte("[ERR] memberlist: no keys\n")); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(out.String(), "level=WARN msg=\"no keys\""); n != logLines {
		t.Errorf("%d lines passed, want %d", n, logLines)
	}
	now = now.Add(time.Second)
	_, _ = w.Write([]byte("[DEBUG] memberlist: quiet\n"))
	_, _ = w.Write([]byte("[INFO] memberlist: hello\n"))
	if s := out.String(); !strings.Contains(s, "level=INFO msg=hello lines_dropped=80") || strings.Contains(s, "quiet") {
		t.Errorf("log: %s", s[max(0, len(s)-300):])
	}
}

// TestPeersChangeWhileItRuns: a peer that is added is joined and gets
// heartbeats, one that moves is found at its new address, and one that is gone
// is heard no more; what is known of the others stays.
func TestPeersChangeWhileItRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t)
		all := p.peers
		without := func(names ...string) []Peer {
			return slices.DeleteFunc(slices.Clone(all), func(p Peer) bool { return slices.Contains(names, p.Name) })
		}
		eu := p.start("eu-1", func(c *Config) { c.Peers = without("eu-1", "us-1") })
		w := p.start("w1", func(c *Config) { c.Peers = without("w1", "us-1") })
		eu.lead(1)
		wait(20 * time.Second)
		us := p.start("us-1")
		us.lead(1)
		wait(5 * time.Second)
		if s := w.Suspicion("us"); s.Silent != -1 || len(w.Reports()) != 1 {
			t.Fatalf("a region that is not configured is judged: %+v, %v", s, w.Reports())
		}
		silent := w.Suspicion("eu").Silent
		for _, n := range []*node{eu, w} {
			if err := n.SetPeers(without(n.cfg.Name)); err != nil {
				t.Fatal(err)
			}
		}
		if s := w.Suspicion("eu"); s.Silent != silent || s.Verdict != register.VerdictHealthy {
			t.Errorf("what was known of eu is lost: %+v", s)
		}
		wait(20 * time.Second) // the next try to join
		if v := verdict(w, "us"); v != register.VerdictHealthy {
			t.Errorf("us is %v at w1, which was told of it", v)
		}
		if v := verdict(us, "eu"); v != register.VerdictHealthy {
			t.Errorf("eu is %v at us-1, of which eu was told", v)
		}
		if got, want := w.Members(), []string{"eu-1", "us-1"}; !slices.Equal(got, want) {
			t.Errorf("members at w1: %v, want %v", got, want)
		}

		us.stop()
		i := slices.IndexFunc(all, func(p Peer) bool { return p.Name == "us-1" })
		p.peers = slices.Clone(all)
		p.peers[i].Gossip = "127.0.0.1:8100"
		all = p.peers
		wait(20 * time.Second)
		us = p.start("us-1")
		us.lead(2)
		for _, n := range []*node{eu, w} {
			if err := n.SetPeers(without(n.cfg.Name)); err != nil {
				t.Fatal(err)
			}
		}
		wait(20 * time.Second)
		if v, u := verdict(w, "us"), verdict(us, "eu"); v != register.VerdictHealthy || u != register.VerdictHealthy {
			t.Errorf("after us-1 moved: us is %v at w1, eu is %v at us-1", v, u)
		}

		if err := w.SetPeers(without("w1", "us-1")); err != nil {
			t.Fatal(err)
		}
		wait(5 * time.Second)
		if s := w.Suspicion("us"); s.Silent != -1 || verdict(w, "eu") != register.VerdictHealthy {
			t.Errorf("after us was taken out: us %+v, eu %v", s, verdict(w, "eu"))
		}
		if err := w.SetPeers([]Peer{{Name: "w1", Gossip: "127.0.0.1:1"}}); err == nil {
			t.Error("a process is its own peer")
		}
	})
}
