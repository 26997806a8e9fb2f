package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/internal/pki"
)

var _ raft.StreamLayer = (*RaftLayer[raft.ServerAddress])(nil)

// open starts a server of every plane and returns the addresses.
func open(t *testing.T, l *Links) map[Plane]string {
	t.Helper()
	out := map[Plane]string{}
	out[PlaneAPI], _ = serve(t, l, PlaneAPI)
	out[PlaneVotes], _ = serve(t, l, PlaneVotes)
	r, err := NewRaftLayer(l, RaftConfig[raft.ServerAddress]{Listen: "127.0.0.1:0", Advertise: "eu-1", Resolve: func(raft.ServerAddress) (Peer, error) { return Peer{}, errors.New("none") }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	drain(t, r)
	out[PlaneRaft] = r.ListenAddr().String()
	s, err := l.listenSecured(PlaneGossip, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	drain(t, s)
	out[PlaneGossip] = s.Addr().String()
	return out
}

// drain answers every accepted connection with one byte.
func drain(t *testing.T, ln net.Listener) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("!"))
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
}

// got reads a byte, the proof that the server took the connection: in TLS 1.3
// a client's own handshake ends before the server has judged its certificate.
func got(c net.Conn) error {
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	n, err := c.Read(make([]byte, 1))
	if n == 1 {
		return nil
	}
	return err
}

func (l *Links) try(ctx context.Context, t *testing.T, plane Plane, p Peer) error {
	t.Helper()
	if plane == PlaneAPI || plane == PlaneVotes {
		return check(ctx, t, l, plane, p)
	}
	c, err := l.dial(ctx, plane, p)
	if err != nil {
		return err
	}
	return got(c)
}

func TestEveryPlaneTakesItsOwn(t *testing.T) {
	eachMode(t, func(t *testing.T, dir string) {
		for plane, addr := range open(t, links(t, dir, eu1, nil)) {
			if err := links(t, dir, eu2, nil).try(short5(t), t, plane, peerOf(eu1, addr)); err != nil {
				t.Errorf("%s: %v", plane, err)
			}
		}
	})
}

func TestPlainTextIsRefusedOnEveryPlane(t *testing.T) {
	for plane, addr := range open(t, links(t, set(t, "c"), eu1, nil)) {
		if err := links(t, "", eu2, nil).try(short5(t), t, plane, peerOf(eu1, addr)); err == nil {
			t.Errorf("%s: plain text was served", plane)
		}
		// Something that is no peer of ours at all.
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		answer, _ := io.ReadAll(c)
		_ = c.Close()
		if len(answer) > 0 && answer[0] != 21 { // a TLS alert
			t.Errorf("%s: plain text was answered with %q", plane, answer)
		}
	}
}

func TestTLSIsRefusedByPlainServer(t *testing.T) {
	for plane, addr := range open(t, links(t, "", eu1, nil)) {
		err := links(t, set(t, "c"), eu2, nil).try(short5(t), t, plane, peerOf(eu1, addr))
		if err == nil {
			t.Errorf("%s: TLS and plain text met", plane)
		}
	}
}

func TestForeignAuthorityIsRefusedOnEveryPlane(t *testing.T) {
	dir := set(t, "c")
	foreign := set(t, "c") // same names, another authority
	for plane, addr := range open(t, links(t, dir, eu1, nil)) {
		if err := links(t, foreign, eu2, nil).try(short5(t), t, plane, peerOf(eu1, addr)); err == nil {
			t.Errorf("%s: a foreign authority was served", plane)
		}
		// A client that does not mind the server's certificate is refused too.
		creds, err := pki.Load(pki.LoadConfig{Dir: foreign, Want: eu2})
		if err != nil {
			t.Fatal(err)
		}
		for name, certs := range map[string][]tls.Certificate{"foreign": {creds.Certificate}, "no": nil} {
			c, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true, Certificates: certs, NextProtos: []string{alpn(plane)}})
			if err == nil {
				_, _ = io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
				err = got(c)
			}
			if err == nil {
				t.Errorf("%s: a client with %s certificate was served", plane, name)
			}
		}
	}
}

func TestOldTLSIsRefused(t *testing.T) {
	dir := set(t, "c")
	creds, err := pki.Load(pki.LoadConfig{Dir: dir, Want: eu2})
	if err != nil {
		t.Fatal(err)
	}
	for plane, addr := range open(t, links(t, dir, eu1, nil)) {
		c, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12, Certificates: []tls.Certificate{creds.Certificate}, NextProtos: []string{alpn(plane)}})
		if err == nil {
			_ = c.Close()
			t.Errorf("%s: TLS 1.2 was served", plane)
		}
	}
}

func TestWrongIdentityIsRefused(t *testing.T) {
	eachMode(t, func(t *testing.T, dir string) {
		at := open(t, links(t, dir, eu1, nil))
		for _, plane := range []Plane{PlaneAPI, PlaneVotes, PlaneRaft, PlaneGossip} {
			l := links(t, dir, eu2, nil)
			for _, wrong := range []Peer{
				{Name: "eu-3", Region: "eu", Role: pki.RoleRegion},
				{Name: "eu-1", Region: "us", Role: pki.RoleRegion},
				{Region: "us", Role: pki.RoleRegion},
				{Name: "eu-1", Role: pki.RoleWitness},
			} {
				wrong.Address = at[plane]
				if err := l.try(short5(t), t, plane, wrong); err == nil || !strings.Contains(err.Error(), "wrong identity: the other end is region/eu/eu-1") {
					t.Errorf("%s: dialling %v: %v", plane, wrong, err)
				}
			}
			// Any server of the region will do for whoever names none.
			if err := l.try(short5(t), t, plane, Peer{Region: "eu", Role: pki.RoleRegion, Address: at[plane]}); err != nil {
				t.Errorf("%s: any server of eu: %v", plane, err)
			}
		}
	})
}

func TestCallersHaveTheirPlanes(t *testing.T) {
	may := map[Plane][]Identity{
		PlaneAPI:    {eu2, us1, w1, alice, admin},
		PlaneVotes:  {eu2, us1, w1, admin},
		PlaneRaft:   {eu2},
		PlaneGossip: {eu2, us1, w1},
	}
	eachMode(t, func(t *testing.T, dir string) {
		for plane, addr := range open(t, links(t, dir, eu1, nil)) {
			for _, id := range actors[1:] {
				err := links(t, dir, id, nil).try(short5(t), t, plane, peerOf(eu1, addr))
				want := false
				for _, m := range may[plane] {
					want = want || m == id
				}
				if (err == nil) != want {
					t.Errorf("%s on %s: %v; may: %v", id, plane, err, want)
				}
			}
		}
	})
}

func TestAnotherClusterIsRefused(t *testing.T) {
	// One authority for two clusters: only the names keep them apart.
	dir := set(t, "c")
	other := Identity{Cluster: "d", Role: pki.RoleRegion, Region: "eu", Name: "eu-2"}
	at := open(t, links(t, "", eu1, nil))
	for plane, addr := range at {
		if err := links(t, "", other, nil).try(short5(t), t, plane, peerOf(eu1, addr)); err == nil {
			t.Errorf("%s: a process of another cluster was served", plane)
		}
	}
	if _, err := pki.Load(pki.LoadConfig{Dir: dir, File: "eu-2", Want: other}); err == nil || !strings.Contains(err.Error(), `is of cluster "c", not "d"`) {
		t.Errorf("load: %v", err)
	}
}

func TestAPlanesPortRefusesOtherPlanes(t *testing.T) {
	eachMode(t, func(t *testing.T, dir string) {
		at := open(t, links(t, dir, eu1, nil))
		l := links(t, dir, eu2, nil)
		if err := l.try(short5(t), t, PlaneRaft, peerOf(eu1, at[PlaneGossip])); err == nil {
			t.Error("Raft was served on the gossip port")
		}
		if err := l.try(short5(t), t, PlaneVotes, peerOf(eu1, at[PlaneAPI])); err == nil {
			t.Error("votes were served on the API port")
		}
	})
}

func TestInsecureIsForLoopbackOnly(t *testing.T) {
	l := links(t, "", eu1, nil)
	for _, addr := range []string{"0.0.0.0:0", ":0", "[::]:0"} {
		if ln, err := l.Listen(PlaneAPI, addr); err == nil {
			_ = ln.Close()
			t.Errorf("listens on %s without TLS", addr)
		} else if !strings.Contains(err.Error(), "loopback only") {
			t.Error(err)
		}
	}
	// A documentation address: it would not answer, and it must not be asked.
	if _, err := l.dial(short5(t), PlaneRaft, peerOf(eu2, "192.0.2.1:7602")); !errors.Is(err, errNotLoopback) {
		t.Error(err)
	}
	c := Config{Identity: eu1, Insecure: false}
	if _, err := New(c); err == nil || !strings.Contains(err.Error(), "--insecure") {
		t.Error(err)
	}
}

func TestListenErrorsNameFieldAndRemedy(t *testing.T) {
	l := links(t, "", eu1, nil)
	ln, err := l.Listen(PlaneVotes, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	for addr, want := range map[string]string{
		ln.Addr().String():       fmt.Sprintf("votes address %q: is in use; stop the process that has it, or choose another address in cluster.yaml", ln.Addr()),
		"no-such-host.invalid:1": `votes address "no-such-host.invalid:1": does not resolve; correct the host name or choose another address in cluster.yaml`,
		"127.0.0.1":              `votes address "127.0.0.1": is not HOST:PORT; correct it in cluster.yaml`,
		"127.0.0.1:99999":        `votes address "127.0.0.1:99999": port "99999" is not a number from 0 to 65535; correct it in cluster.yaml`,
	} {
		got, err := l.Listen(PlaneVotes, addr)
		if err == nil {
			_ = got.Close()
			t.Errorf("listens on %s", addr)
		} else if !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s:\n got %v\nwant %s", addr, err, want)
		}
	}
}

func TestClosedLinksRefuse(t *testing.T) {
	l := links(t, "", eu1, nil)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Listen(PlaneAPI, "127.0.0.1:0"); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

func FuzzDecodePlain(f *testing.F) {
	f.Add(strings.TrimSuffix(string(encodePlain(PlaneVotes, eu1)), "\n"))
	f.Add("headlease/1 votes headlease://c/admin")
	f.Add("headlease/1 votes headlease://c/region/eu/../x")
	f.Add("")
	f.Fuzz(func(t *testing.T, line string) {
		id, err := decodePlain(PlaneVotes, line)
		if err != nil {
			return
		}
		if err := id.Validate(); err != nil {
			t.Fatalf("%q: accepted an identity that is not valid: %v", line, err)
		}
		if back := string(encodePlain(PlaneVotes, id)); back != line+"\n" || len(back) > maxPlainLine {
			t.Fatalf("%q: encodes to %q", line, back)
		}
	})
}
