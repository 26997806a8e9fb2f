package replica

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/internal/wake"
)

// simNet is a network of streams with one-way delays and cuts that works inside
// a synctest bubble: real NetworkTransport code in virtual time.
type simNet struct {
	mu     sync.Mutex
	layers map[string]*simLayer
	delay  map[[2]string]time.Duration
	cut    map[string]bool
}

func newSimNet() *simNet {
	return &simNet{layers: map[string]*simLayer{}, delay: map[[2]string]time.Duration{}, cut: map[string]bool{}}
}

// far puts a node at a one-way distance from all others.
func (n *simNet) far(name string, d time.Duration, others ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, o := range others {
		n.delay[[2]string{name, o}], n.delay[[2]string{o, name}] = d, d
	}
}

func (n *simNet) latency(a, b string) time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.delay[[2]string{a, b}]
}

// isolate cuts a node off (or brings it back): bytes and dials vanish.
func (n *simNet) isolate(name string, cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[name] = cut
}

func (n *simNet) severed(a, b string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cut[a] || n.cut[b]
}

func (n *simNet) listen(name string) *simLayer {
	l := &simLayer{n: n, name: name, accept: make(chan net.Conn), done: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.layers[name] = l
	return l
}

type simLayer struct {
	n      *simNet
	name   string
	accept chan net.Conn
	done   chan struct{}
	once   sync.Once
}

func (l *simLayer) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *simLayer) Close() error { l.once.Do(func() { close(l.done) }); return nil }

func (l *simLayer) Addr() net.Addr { return nameAddr(l.name) }

func (l *simLayer) Dial(to raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	name := string(to)
	l.n.mu.Lock()
	d := l.n.layers[name]
	l.n.mu.Unlock()
	if l.n.severed(l.name, name) {
		time.Sleep(timeout) // virtual: a dial hangs to its deadline
		return nil, os.ErrDeadlineExceeded
	}
	time.Sleep(2 * l.n.latency(l.name, name)) // virtual: a round trip
	if d == nil {
		return nil, errors.New("refused")
	}
	out, in := newPipeHalf(l.n, l.name, name), newPipeHalf(l.n, name, l.name)
	a := &simConn{rd: in, wr: out, local: l.name, remote: name}
	b := &simConn{rd: out, wr: in, local: name, remote: l.name}
	select {
	case d.accept <- b:
		return a, nil
	case <-d.done:
		return nil, errors.New("refused")
	}
}

// pipeHalf is one direction of a stream.
type pipeHalf struct {
	n        *simNet
	from, to string
	mu       sync.Mutex
	chunks   [][]byte
	at       []time.Time
	closed   bool
	dead     bool
	wake     chan struct{}
}

func newPipeHalf(n *simNet, from, to string) *pipeHalf {
	return &pipeHalf{n: n, from: from, to: to, wake: make(chan struct{}, 1)}
}

type simConn struct {
	rd, wr        *pipeHalf
	local, remote string
	mu            sync.Mutex
	deadline      time.Time
}

func (c *simConn) Write(b []byte) (int, error) {
	h := c.wr
	lost := h.n.severed(h.from, h.to)
	delay := h.n.latency(h.from, h.to)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return 0, io.ErrClosedPipe
	}
	if h.dead = h.dead || lost; h.dead { // a stream that lost bytes is silent for ever
		return len(b), nil
	}
	h.chunks = append(h.chunks, append([]byte(nil), b...))
	h.at = append(h.at, time.Now().Add(delay))
	wake.Up(h.wake)
	return len(b), nil
}

func (c *simConn) Read(b []byte) (int, error) {
	const forever = time.Duration(1<<62 - 1)
	h := c.rd
	for {
		c.mu.Lock()
		deadline := c.deadline
		c.mu.Unlock()
		now := time.Now()
		if !deadline.IsZero() && !now.Before(deadline) {
			return 0, os.ErrDeadlineExceeded
		}
		wait := forever
		h.mu.Lock()
		switch {
		case len(h.chunks) > 0:
			if wait = h.at[0].Sub(now); wait <= 0 {
				n := copy(b, h.chunks[0])
				if n == len(h.chunks[0]) {
					h.chunks, h.at = h.chunks[1:], h.at[1:]
				} else {
					h.chunks[0] = h.chunks[0][n:]
				}
				h.mu.Unlock()
				return n, nil
			}
		case h.closed:
			h.mu.Unlock()
			return 0, io.EOF
		}
		h.mu.Unlock()
		if !deadline.IsZero() {
			wait = min(wait, deadline.Sub(now))
		}
		if wait == forever {
			<-h.wake
			continue
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-h.wake:
		}
		t.Stop()
	}
}

func (c *simConn) Close() error {
	for _, h := range []*pipeHalf{c.rd, c.wr} {
		h.mu.Lock()
		h.closed = true
		h.mu.Unlock()
		wake.Up(h.wake)
	}
	return nil
}

func (c *simConn) LocalAddr() net.Addr  { return nameAddr(c.local) }
func (c *simConn) RemoteAddr() net.Addr { return nameAddr(c.remote) }

func (c *simConn) SetDeadline(t time.Time) error {
	c.mu.Lock()
	c.deadline = t
	c.mu.Unlock()
	wake.Up(c.rd.wake)
	return nil
}

func (c *simConn) SetReadDeadline(t time.Time) error { return c.SetDeadline(t) }
func (c *simConn) SetWriteDeadline(time.Time) error  { return nil }

// tcpLayer is a stream layer over loopback TCP.
type tcpLayer struct {
	net.Listener
	peers *tcpPeers
}

type tcpPeers struct {
	mu   sync.Mutex
	addr map[string]string
}

func (p *tcpPeers) listen(name string) (*tcpLayer, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.addr[name] = ln.Addr().String()
	return &tcpLayer{Listener: ln, peers: p}, nil
}

func (p *tcpPeers) resolve(name string) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a, ok := p.addr[name]
	if !ok {
		return "", errors.New("no such server")
	}
	return a, nil
}

func (l *tcpLayer) Dial(to raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	return net.DialTimeout("tcp", string(to), timeout)
}
