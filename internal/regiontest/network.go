package regiontest

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/link"
)

// Network connects clients and regions in memory. It is safe for concurrent
// use.
type Network struct {
	t testing.TB

	mu      sync.Mutex
	delay   func() time.Duration
	writes  map[way]Traffic
	servers map[string]*Server
	order   []*Region
}

// NewNetwork returns a network without regions.
func NewNetwork(t testing.TB) *Network {
	return &Network{t: t, servers: map[string]*Server{}, writes: map[way]Traffic{}}
}

// Delay makes every read of every connection take so long; nil: no time. Bytes
// stay in order. delay is called from many goroutines, one at a time.
func (n *Network) Delay(delay func() time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.delay = delay
}

// Traffic is what connections have written.
type Traffic struct{ Writes, Bytes int }

// way is from and to a server; false: a client.
type way struct{ from, to bool }

// Written is what was written so far by servers, or by clients, to servers, or to
// clients.
func (n *Network) Written(fromServer, toServer bool) Traffic {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.writes[way{fromServer, toServer}]
}

func (n *Network) wrote(w way, bytes int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.writes[w]
	n.writes[w] = Traffic{t.Writes + 1, t.Bytes + bytes}
}

// wait takes the time of a read, less if the connection ends meanwhile.
func (n *Network) wait(ended <-chan struct{}) {
	n.mu.Lock()
	var d time.Duration
	if n.delay != nil {
		d = n.delay()
	}
	n.mu.Unlock()
	if d > 0 {
		select {
		case <-time.After(d):
		case <-ended:
		}
	}
}

// Regions are the network's, as a client's configuration has them.
func (n *Network) Regions() []client.Region {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]client.Region, len(n.order))
	for i, r := range n.order {
		out[i].Name = r.cfg.Name
		for _, s := range r.servers {
			out[i].Servers = append(out[i].Servers, client.Server{Name: s.name, API: s.name})
		}
	}
	return out
}

// Links makes the connections of a client of that name.
func (n *Network) Links(name string) *Links {
	return &Links{network: n, caller: caller("client/" + name)}
}

// ServerLinks makes the connections of a region server.
func (n *Network) ServerLinks(region, server string) *Links {
	return &Links{network: n, caller: caller("region/" + region + "/" + server)}
}

// Links makes connections for one caller.
type Links struct {
	network *Network
	caller  caller
}

// DialGRPC connects to the server that the peer's address names.
func (l *Links) DialGRPC(_ link.Plane, peer link.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error) {
	options := append(link.Windows(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDisableServiceConfig(),
		grpc.WithIdleTimeout(0),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return l.network.dial(ctx, l.caller, peer.Address)
		}),
	)
	options = append(options, extra...)
	return grpc.NewClient("passthrough:///"+peer.Address, options...) //nolint:forbidigo // connections in memory, for tests
}

var errRefused = errors.New("connection refused")

func (n *Network) dial(ctx context.Context, from caller, to string) (net.Conn, error) {
	n.mu.Lock()
	s := n.servers[to]
	n.mu.Unlock()
	if s == nil {
		return nil, errRefused
	}
	in := s.incoming()
	if in == nil {
		return nil, errRefused
	}
	a, b, err := pipe(ctx)
	if err != nil {
		return nil, err
	}
	ended := &ending{ch: make(chan struct{})}
	near := &conn{Conn: a, network: n, gate: &s.gate, ended: ended, remote: caller(to), way: way{from.server(), true}}
	far := &conn{Conn: b, network: n, gate: &s.gate, ended: ended, remote: from, way: way{true, from.server()}}
	select {
	case in.conns <- far:
		return near, nil
	case <-in.closed:
		return nil, errRefused
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// buffer of a connection, in bytes each way: as much as a kernel might take for
// a peer that does not read.
const buffer = 64 << 10

// pipe returns the ends of a connection with buffers.
func pipe(ctx context.Context) (a, b net.Conn, err error) {
	l := bufconn.Listen(buffer)
	accepted := make(chan net.Conn, 1)
	go func() {
		c, _ := l.Accept() // fails when the dial did, and l is closed
		accepted <- c
	}()
	a, err = l.DialContext(ctx)
	if err != nil {
		_ = l.Close()
	}
	b = <-accepted
	return a, b, errors.Join(err, l.Close())
}

// caller is who is at the other end of a connection, as its address.
type caller string

func (c caller) Network() string { return "memory" }
func (c caller) String() string  { return string(c) }
func (c caller) server() bool    { return strings.HasPrefix(string(c), "region/") }

// conn delays what it reads, and holds it while its server is frozen.
type conn struct {
	net.Conn
	network *Network
	gate    *gate
	remote  caller
	way     way
	ended   *ending
}

// ending is when the first end of a connection closes. From then on nothing is
// delayed or held: gRPC's calls spin from a failed write until the reader of
// the same transport has failed, too.
type ending struct {
	once sync.Once
	ch   chan struct{}
}

func (c *conn) RemoteAddr() net.Addr { return c.remote }

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil {
		c.network.wait(c.ended.ch)
		c.gate.pass(c.ended.ch)
	}
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	c.network.wrote(c.way, len(b))
	return c.Conn.Write(b)
}

func (c *conn) Close() error {
	c.ended.once.Do(func() { close(c.ended.ch) })
	return c.Conn.Close()
}

// gate is open, or holds whoever wants to pass.
type gate struct {
	mu   sync.Mutex
	shut chan struct{}
}

func (g *gate) pass(ended <-chan struct{}) {
	for {
		g.mu.Lock()
		shut := g.shut
		g.mu.Unlock()
		if shut == nil {
			return
		}
		select {
		case <-shut:
		case <-ended:
			return
		}
	}
}

func (g *gate) set(shut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case shut && g.shut == nil:
		g.shut = make(chan struct{})
	case !shut && g.shut != nil:
		close(g.shut)
		g.shut = nil
	}
}

// listener hands out the connections made to one run of a server.
type listener struct {
	conns  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func newListener() *listener {
	return &listener{conns: make(chan net.Conn), closed: make(chan struct{})}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *listener) Addr() net.Addr { return caller("listener") }
