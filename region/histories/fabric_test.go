package histories

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/internal/wake"
)

// resetAfter is how long a connection may be held by a cut and still go on.
const resetAfter = 3 * time.Second

var errRefused = errors.New("connection refused")

// fabric connects everybody with everybody. Bytes take time, and stay in
// order; a direction that is cut, or one to or from somebody who is paused,
// holds them.
type fabric struct {
	mu        sync.Mutex
	rng       *rand.Rand
	near, far time.Duration // one-way delays are between these
	listeners map[string]*listener
	pipes     map[*pipe]struct{}
	cuts      map[[2]string]int // from, to
	slow      map[[2]string]time.Duration
	paused    map[string]int
	changed   chan struct{}
	// heldBytes is what a cut or a pause has held so far, and broken how many
	// connections a kill or a heal has reset.
	heldBytes, broken int
}

func newFabric(seed uint64) *fabric {
	return &fabric{
		rng: rand.New(rand.NewPCG(seed, 1)), near: 500 * time.Microsecond, far: 4 * time.Millisecond,
		listeners: map[string]*listener{}, pipes: map[*pipe]struct{}{}, cuts: map[[2]string]int{}, slow: map[[2]string]time.Duration{}, paused: map[string]int{},
		changed: make(chan struct{}),
	}
}

// change wakes everybody who waits. f.mu is held.
func (f *fabric) change() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// delay of the next chunk. f.mu is held.
func (f *fabric) delay(from, to string) time.Duration {
	return f.slow[[2]string{from, to}] + f.near + time.Duration(f.rng.Int64N(int64(f.far-f.near)))
}

// blocked reports whether nothing passes from one to another. f.mu is held.
func (f *fabric) blocked(from, to string) bool {
	return f.cuts[[2]string{from, to}] > 0 || f.paused[from] > 0 || f.paused[to] > 0
}

// slower makes all that one sends another take so much longer.
func (f *fabric) slower(from, to string, by time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.slow[[2]string{from, to}] = by
}

// cut holds what one sends another, or lets it pass again.
func (f *fabric) cut(from, to string, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count(f.cuts, [2]string{from, to}, on)
}

// pause holds all that somebody sends or is sent.
func (f *fabric) pause(name string, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if on {
		f.paused[name]++
	} else {
		f.paused[name]--
	}
	f.settle()
}

func (f *fabric) count(m map[[2]string]int, k [2]string, on bool) {
	if on {
		m[k]++
	} else {
		m[k]--
	}
	f.settle()
}

// settle notes which directions are held from now on, and resets connections
// that were for too long. f.mu is held.
func (f *fabric) settle() {
	now := time.Now()
	for p := range f.pipes {
		switch held := f.blocked(p.from, p.to); {
		case held && p.heldSince.IsZero():
			p.heldSince = now
		case !held && !p.heldSince.IsZero():
			if now.Sub(p.heldSince) > resetAfter && p.held {
				p.conn.breakLocked()
			}
			p.heldSince, p.held = time.Time{}, false
		}
	}
	f.change()
}

// kill breaks every connection of a process that has ended.
func (f *fabric) kill(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for p := range f.pipes {
		if p.from == name {
			p.conn.breakLocked()
		}
	}
	f.change()
}

// pipe is one direction of a connection.
type pipe struct {
	f         *fabric
	from, to  string
	conn      *connection
	chunks    [][]byte
	at        []time.Time
	closed    bool // by either end
	heldSince time.Time
	held      bool // bytes have waited since
	wake      chan struct{}
}

func (f *fabric) pipe(from, to string, c *connection) *pipe {
	return &pipe{f: f, from: from, to: to, conn: c, wake: make(chan struct{}, 1)}
}

// connection is a pair of pipes.
type connection struct {
	f      *fabric
	pipes  [2]*pipe
	broken bool
	ends   int // closed by its users
}

// breakLocked ends a connection for both. f.mu is held.
func (c *connection) breakLocked() {
	if !c.broken {
		c.broken = true
		c.f.broken++
	}
	for _, p := range c.pipes {
		p.closed = true
		delete(c.f.pipes, p)
	}
}

// end is what one of the two has of a connection.
type end struct {
	f        *fabric
	in, out  *pipe
	closed   bool
	deadline time.Time
}

func (e *end) Write(b []byte) (int, error) {
	e.f.mu.Lock()
	defer e.f.mu.Unlock()
	switch {
	case e.closed:
		return 0, net.ErrClosed
	case e.out.closed:
		return len(b), nil // the reader of this end will hear of it
	}
	p := e.out
	at := time.Now().Add(e.f.delay(p.from, p.to))
	if n := len(p.at); n > 0 && p.at[n-1].After(at) {
		at = p.at[n-1]
	}
	p.chunks, p.at = append(p.chunks, append([]byte(nil), b...)), append(p.at, at)
	if e.f.blocked(p.from, p.to) {
		e.f.heldBytes += len(b)
		p.held = true
	}
	wake.Up(p.wake)
	return len(b), nil
}

func (e *end) Read(b []byte) (int, error) {
	for {
		n, wait, changed, err := e.poll(b)
		if n > 0 || err != nil || len(b) == 0 {
			return n, err
		}
		if wait <= 0 {
			select {
			case <-changed:
			case <-e.in.wake:
			}
			continue
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-changed:
		case <-e.in.wake:
		}
		t.Stop()
	}
}

// poll reads what is there, or says how long nothing will be, unless something
// changes; 0: for ever.
func (e *end) poll(b []byte) (n int, wait time.Duration, changed chan struct{}, err error) {
	e.f.mu.Lock()
	defer e.f.mu.Unlock()
	now := time.Now()
	p := e.in
	switch {
	case e.closed:
		return 0, 0, nil, net.ErrClosed
	case p.conn.broken:
		return 0, 0, nil, io.EOF
	case !e.deadline.IsZero() && !now.Before(e.deadline):
		return 0, 0, nil, os.ErrDeadlineExceeded
	}
	if !e.deadline.IsZero() {
		wait = e.deadline.Sub(now)
	}
	if e.f.blocked(p.from, p.to) {
		return 0, wait, e.f.changed, nil
	}
	if len(p.chunks) == 0 {
		if p.closed {
			return 0, 0, nil, io.EOF
		}
		return 0, wait, e.f.changed, nil
	}
	if left := p.at[0].Sub(now); left > 0 {
		if wait == 0 || left < wait {
			wait = left
		}
		return 0, wait, e.f.changed, nil
	}
	n = copy(b, p.chunks[0])
	if p.chunks[0] = p.chunks[0][n:]; len(p.chunks[0]) == 0 {
		p.chunks, p.at = p.chunks[1:], p.at[1:]
	}
	return n, 0, nil, nil
}

func (e *end) Close() error {
	e.f.mu.Lock()
	defer e.f.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	e.in.closed, e.out.closed = true, true
	if e.in.conn.ends++; e.in.conn.ends == 2 {
		delete(e.f.pipes, e.in)
		delete(e.f.pipes, e.out)
	}
	wake.Up(e.in.wake)
	wake.Up(e.out.wake)
	return nil
}

func (e *end) LocalAddr() net.Addr  { return addr(e.in.to) }
func (e *end) RemoteAddr() net.Addr { return addr(e.in.from) }

func (e *end) SetReadDeadline(t time.Time) error {
	e.f.mu.Lock()
	defer e.f.mu.Unlock()
	e.deadline = t
	wake.Up(e.in.wake)
	return nil
}

func (e *end) SetDeadline(t time.Time) error    { return e.SetReadDeadline(t) }
func (e *end) SetWriteDeadline(time.Time) error { return nil }

type addr string

func (a addr) Network() string { return "memory" }
func (a addr) String() string  { return string(a) }

// dial connects, after a round trip. Where nothing passes it hangs to ctx's
// end.
func (f *fabric) dial(ctx context.Context, from, to, plane string) (net.Conn, error) {
	f.mu.Lock()
	for travelled := false; ; f.mu.Lock() {
		held := f.blocked(from, to) || f.blocked(to, from)
		if !held && travelled {
			break // nor was it cut, or the server killed, on the way
		}
		changed, trip := f.changed, f.delay(from, to)+f.delay(to, from)
		f.mu.Unlock()
		if held {
			select {
			case <-changed:
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
			continue
		}
		select {
		case <-time.After(trip):
			travelled = true
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	l := f.listeners[to+" "+plane]
	c := &connection{f: f}
	out := f.pipe(from, to, c)
	in := f.pipe(to, from, c)
	c.pipes = [2]*pipe{out, in}
	if l != nil {
		f.pipes[out], f.pipes[in] = struct{}{}, struct{}{}
	}
	f.mu.Unlock()
	if l == nil {
		return nil, errRefused
	}
	near, far := &end{f: f, in: in, out: out}, &end{f: f, in: out, out: in}
	var err error
	select {
	case l.conns <- far:
		return near, nil
	case <-l.closed:
		err = errRefused
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return nil, errors.Join(err, near.Close(), far.Close())
}

func (f *fabric) listen(name, plane string) *listener {
	l := &listener{f: f, name: name, key: name + " " + plane, conns: make(chan net.Conn), closed: make(chan struct{})}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listeners[l.key] = l
	return l
}

// listener is also a raft.StreamLayer.
type listener struct {
	f         *fabric
	name, key string
	conns     chan net.Conn
	once      sync.Once
	closed    chan struct{}
}

var _ raft.StreamLayer = (*listener)(nil)

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() {
		close(l.closed)
		l.f.mu.Lock()
		defer l.f.mu.Unlock()
		if l.f.listeners[l.key] == l {
			delete(l.f.listeners, l.key)
		}
	})
	return nil
}

func (l *listener) Addr() net.Addr { return addr(l.name) }

func (l *listener) Dial(to raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return l.f.dial(ctx, l.name, string(to), "raft")
}

// travel waits until a message has gone from one to another.
func (f *fabric) travel(ctx context.Context, from, to string) error {
	for {
		f.mu.Lock()
		held, changed, d := f.blocked(from, to), f.changed, f.delay(from, to)
		f.mu.Unlock()
		if !held {
			select {
			case <-time.After(d):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
