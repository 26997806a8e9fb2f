package link

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/pki"
)

// gossip is a transport of one process among known ones.
func gossip(t *testing.T, l *Links) *GossipTransport {
	t.Helper()
	g, err := l.GossipTransport(GossipConfig{Listen: "127.0.0.1:0", Resolve: func(name, _ string) (Peer, bool) {
		for _, id := range []Identity{eu1, eu2, us1, w1} {
			if id.Name == name {
				return peerOf(id, ""), true
			}
		}
		return Peer{}, false
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// inbox is a memberlist delegate that keeps messages, and a large state, so
// that push-pull needs more than a datagram.
type inbox struct {
	state []byte
	mu    sync.Mutex
	got   chan []byte
	met   []byte
}

func (*inbox) NodeMeta(int) []byte             { return nil }
func (i *inbox) NotifyMsg(b []byte)            { i.got <- append([]byte(nil), b...) }
func (*inbox) GetBroadcasts(int, int) [][]byte { return nil }
func (i *inbox) LocalState(bool) []byte        { return i.state }
func (i *inbox) MergeRemoteState(b []byte, _ bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.met = append([]byte(nil), b...)
}

func (i *inbox) merged() []byte {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.met
}

func member(t *testing.T, l *Links, key []byte) (*memberlist.Memberlist, *inbox, *GossipTransport) {
	t.Helper()
	g := gossip(t, l)
	box := &inbox{got: make(chan []byte, 16), state: bytes.Repeat([]byte(l.Identity().Name), 50_000)}
	cfg := memberlist.DefaultLocalConfig()
	cfg.Name = l.Identity().Name
	cfg.Transport = g
	cfg.SecretKey = key
	cfg.EnableCompression = false
	cfg.Delegate = box
	cfg.Logger = log.New(io.Discard, "", 0)
	cfg.AdvertisePort = 0
	m, err := memberlist.Create(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	return m, box, g
}

func TestMemberlistsJoinOverTheTransport(t *testing.T) {
	eachMode(t, func(t *testing.T, dir string) {
		key := bytes.Repeat([]byte{7}, 32)
		if dir != "" {
			creds, err := pki.Load(pki.LoadConfig{Dir: dir, File: "eu-1", Gossip: true})
			if err != nil {
				t.Fatal(err)
			}
			key = creds.GossipKey
		}
		// The far process answers late, as over a WAN: a state sent and a
		// connection closed at once must still arrive.
		slow := table(t)
		rule(t, slow, fault.LinkRule{Peer: "*", Link: fault.Link{Delay: 20 * time.Millisecond}})
		one, box, g1 := member(t, links(t, dir, eu1, nil), key)
		two, far, g2 := member(t, links(t, dir, w1, slow), key)
		if n, err := one.Join([]string{"w1/" + g2.Addr().String()}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if one.NumMembers() != 2 || !bytes.Equal(box.merged(), far.state) {
			t.Errorf("%d members, %d bytes of state", one.NumMembers(), len(box.merged()))
		}
		if got := one.Members(); got[0].Port == 7946 || got[1].Port == 7946 {
			t.Errorf("members advertise memberlist's own port: %v", got)
		}
		if rtt, err := one.Ping("w1", g2.Addr()); err != nil || rtt < 15*time.Millisecond {
			t.Errorf("ping over a link of 20 ms: %v, %v", rtt, err)
		}
		if err := two.SendToAddress(memberlist.Address{Addr: g1.Addr().String(), Name: "eu-1"}, []byte("beat")); err != nil {
			t.Fatal(err)
		}
		if got := <-box.got; string(got) != "beat" {
			t.Errorf("%q", got)
		}
	})
}

func TestGossipOfAStrangerIsRefused(t *testing.T) {
	dir := set(t, "c")
	key := bytes.Repeat([]byte{7}, 32)
	_, _, g := member(t, links(t, dir, eu1, nil), key)
	for name, l := range map[string]*Links{
		"another authority": links(t, set(t, "c"), w1, nil),
		"plain text":        links(t, "", w1, nil),
		"a client":          links(t, dir, alice, nil),
	} {
		m, _, _ := member(t, l, key)
		if n, err := m.Join([]string{"eu-1/" + g.Addr().String()}); n != 0 || err == nil {
			t.Errorf("%s joined", name)
		}
	}
	// The certificate alone is not enough either.
	m, _, _ := member(t, links(t, dir, w1, nil), bytes.Repeat([]byte{8}, 32))
	if n, err := m.Join([]string{"eu-1/" + g.Addr().String()}); n != 0 || err == nil {
		t.Error("joined with another gossip key")
	}
}

func TestGossipGoesWhereTheNameSays(t *testing.T) {
	dir := set(t, "c")
	g := gossip(t, links(t, dir, eu1, nil))
	other := gossip(t, links(t, dir, w1, nil))
	// w1 is dialled under another's name: its certificate tells.
	_, err := other.DialAddressTimeout(memberlist.Address{Addr: g.Addr().String(), Name: "us-1"}, 5*time.Second)
	if err == nil || !strings.Contains(err.Error(), "wrong identity: the other end is region/eu/eu-1") {
		t.Error(err)
	}
	// An unknown name may be any server.
	c, err := other.DialAddressTimeout(memberlist.Address{Addr: g.Addr().String()}, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	_ = (<-g.StreamCh()).Close()
}

func TestDatagramFaults(t *testing.T) {
	tbl := table(t)
	g := gossip(t, links(t, "", eu1, tbl))
	to := gossip(t, links(t, "", w1, nil))
	addr := memberlist.Address{Addr: to.Addr().String(), Name: "w1"}
	send := func(s string) {
		t.Helper()
		if _, err := g.WriteToAddress([]byte(s), addr); err != nil {
			t.Fatal(err)
		}
	}
	rule(t, tbl, fault.LinkRule{Peer: "w1", Plane: PlaneGossip, Link: fault.Link{Drop: true}})
	send("dropped")
	rule(t, tbl, fault.LinkRule{Peer: "w1", Plane: PlaneGossip, Link: fault.Link{Loss: 1}})
	send("lost")
	rule(t, tbl, fault.LinkRule{Peer: "w1", Plane: PlaneGossip, Link: fault.Link{Delay: 30 * time.Millisecond, Jitter: 5 * time.Millisecond}})
	start := time.Now()
	const n = 50
	for i := range n {
		send(fmt.Sprint(i))
	}
	tbl.Clear()
	send("end") // without a rule, but behind those on their way
	for i := range n {
		p := <-to.PacketCh()
		if string(p.Buf) != fmt.Sprint(i) || p.Timestamp.Sub(start) < 30*time.Millisecond {
			t.Fatalf("%q after %v in place of %d", p.Buf, p.Timestamp.Sub(start), i)
		}
	}
	if p := <-to.PacketCh(); string(p.Buf) != "end" || p.From.String() != g.Addr().String() {
		t.Errorf("%q from %v", p.Buf, p.From)
	}
}

func TestLanesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &GossipTransport{done: make(chan struct{}), lanes: map[string]*lane{}}
		to := &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}
		for range 2 * maxDelayed {
			if !g.delayed([]byte("x"), to, "w1", time.Now(), time.Hour) {
				t.Fatal("not delayed")
			}
		}
		synctest.Wait() // one may have left the queue to wait for its time
		if n := len(g.lanes["w1"].queue); n > maxDelayed || n < maxDelayed-1 {
			t.Errorf("%d wait", n)
		}
		close(g.done)
		g.wg.Wait()
	})
}

func TestGossipAdvertises(t *testing.T) {
	l := links(t, "", eu1, nil)
	resolve := func(string, string) (Peer, bool) { return Peer{}, false }
	g, err := l.GossipTransport(GossipConfig{Listen: "127.0.0.1:0", Advertise: "localhost:7777", Resolve: resolve})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = g.Shutdown() }()
	if ip, port, err := g.FinalAdvertiseAddr("", 7946); err != nil || !ip.IsLoopback() || port != 7777 {
		t.Error(ip, port, err)
	}
	_, err = l.GossipTransport(GossipConfig{Listen: "127.0.0.1:0", Advertise: "no-such-host.invalid:1", Resolve: resolve})
	if err == nil || !strings.Contains(err.Error(), `gossip address "no-such-host.invalid:1": does not resolve`) {
		t.Error(err)
	}
	busy, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = busy.Close() }()
	_, err = l.GossipTransport(GossipConfig{Listen: busy.LocalAddr().String(), Resolve: resolve})
	if err == nil || !strings.Contains(err.Error(), "is in use") {
		t.Error(err)
	}
	if _, err := l.GossipTransport(GossipConfig{}); err == nil {
		t.Error("made without an address")
	}
	secure := links(t, set(t, "c"), eu1, nil)
	_, err = secure.GossipTransport(GossipConfig{Listen: "0.0.0.0:0", Resolve: resolve})
	if err == nil || !strings.Contains(err.Error(), "give the address to advertise") {
		t.Error(err)
	}
}

func TestHostNamesAreRememberedWhileNameServersFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, fail := 0, false
		at := netip.MustParseAddr("127.0.0.1")
		h := &hosts{lookup: func(context.Context, string, string) ([]netip.Addr, error) {
			asked++
			if fail {
				return nil, &net.DNSError{Err: "down", Name: "w1.example"}
			}
			return []netip.Addr{netip.MustParseAddr("::1"), at}, nil
		}}
		resolve := func(want string, lookups int) {
			t.Helper()
			addr, err := h.resolve("w1.example:7603")
			if err != nil || addr.String() != want || asked != lookups {
				t.Errorf("%v, %v after %d look-ups", addr, err, asked)
			}
		}
		resolve("127.0.0.1:7603", 1)
		resolve("127.0.0.1:7603", 1)
		time.Sleep(resolveEvery)
		fail = true
		resolve("127.0.0.1:7603", 2)
		resolve("127.0.0.1:7603", 2)
		time.Sleep(resolveEvery)
		fail, at = false, netip.MustParseAddr("127.0.0.9") // it moved
		resolve("127.0.0.9:7603", 3)
		fail = true
		for range 2 { // a failure is remembered too
			if _, err := h.resolve("w2.example:7603"); err == nil || asked != 4 {
				t.Error(err, asked)
			}
		}
		if addr, err := h.resolve("10.0.0.1:5"); err != nil || addr.String() != "10.0.0.1:5" || asked != 4 {
			t.Error(addr, err)
		}
	})
}
