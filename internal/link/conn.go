package link

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/headlease/headlease/internal/fault"
)

const (
	// maxHeld bounds the bytes that one connection holds back; a writer then
	// blocks, as it would on a full send buffer.
	maxHeld = 4 << 20
	// resetAfter is how long a connection may be held by a drop and still go on
	// when it heals. TCP's retransmissions have backed off by then, and those
	// above have given the connection up.
	resetAfter = 3 * time.Second
	// maxLinger bounds how long a closed connection still sends what it holds.
	maxLinger = time.Minute

	retransmit = 200 * time.Millisecond
	// maxRetransmits bounds one write's delay by loss to 12.6 s.
	maxRetransmits = 6
)

// conn is a stream under the fault table. Writes go straight through while no
// fault applies and nothing is held; otherwise they are queued, never
// reordered, and sent by one goroutine, which lives while the queue does.
// Reads are never touched: the sender applies faults.
//
// Closing counts as the last thing sent: it too is delayed or held, so that a
// process on the far side of a cut does not learn of it.
type conn struct {
	net.Conn
	links *Links
	plane Plane
	done  chan struct{} // closed when the raw connection is

	mu       sync.Mutex
	known    bool // the peer is known; before that no fault applies
	name     string
	region   string
	version  uint64 // of the table that link was read from; 0: read it again
	link     fault.Link
	queue    []segment
	held     int // bytes in queue
	last     time.Time
	running  bool
	closing  bool // Close was called
	dead     bool // the raw connection is closed
	linger   *time.Timer
	err      error
	deadline time.Time     // for writes
	wake     chan struct{} // closed and replaced when a blocked writer should look again
}

// segment is one write; nil data is the close.
type segment struct {
	data []byte
	due  time.Time
}

func (l *Links) wrap(raw net.Conn, plane Plane) (*conn, error) {
	c := &conn{Conn: raw, links: l, plane: plane, done: make(chan struct{}), wake: make(chan struct{})}
	if err := l.track(c); err != nil {
		return nil, errors.Join(err, raw.Close())
	}
	return c, nil
}

// setPeer names the other end, from when on faults apply.
func (c *conn) setPeer(name, region string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known, c.name, c.region, c.version = true, name, region, 0
}

// effect is called with mu held.
func (c *conn) effect() fault.Link {
	if !c.known || c.links.cfg.Faults == nil {
		return fault.Link{}
	}
	if v := c.links.cfg.Faults.Version(); v != c.version {
		c.version, c.link = v, c.links.fault(c.plane, c.name, c.region)
	}
	return c.link
}

// sendDelay draws the delay of one write.
func sendDelay(l fault.Link) time.Duration {
	d := l.Delay + jitter(l)
	for k := 0; k < maxRetransmits && l.Loss > 0 && rand.Float64() < l.Loss; k++ {
		d += retransmit << k
	}
	return d
}

func jitter(l fault.Link) time.Duration {
	if l.Jitter <= 0 {
		return 0
	}
	return rand.N(l.Jitter)
}

func (c *conn) Write(b []byte) (int, error) {
	c.mu.Lock()
	for {
		if err := c.usable(); err != nil {
			c.mu.Unlock()
			return 0, err
		}
		if c.held < maxHeld {
			break
		}
		if err := c.waitSpace(); err != nil {
			c.mu.Unlock()
			return 0, err
		}
	}
	link := c.effect()
	if !c.running && link.Clean() {
		c.mu.Unlock()
		return c.Conn.Write(b)
	}
	defer c.mu.Unlock()
	if len(b) == 0 {
		return 0, nil
	}
	if err := c.enqueue(append([]byte(nil), b...), link); err != nil {
		return 0, err
	}
	return len(b), nil
}

// usable is called with mu held.
func (c *conn) usable() error {
	switch {
	case c.closing:
		return net.ErrClosed
	case c.err != nil:
		return c.err
	case c.dead:
		return net.ErrClosed
	default:
		return nil
	}
}

// waitSpace is called with mu held, and holds it again when it returns.
func (c *conn) waitSpace() error {
	wake, deadline := c.wake, c.deadline
	c.mu.Unlock()
	defer c.mu.Lock()
	var expired <-chan time.Time
	if !deadline.IsZero() {
		t := time.NewTimer(time.Until(deadline))
		defer t.Stop()
		expired = t.C
	}
	select {
	case <-wake:
		return nil
	case <-expired:
		return fmt.Errorf("write to %s: %w", c.RemoteAddr(), os.ErrDeadlineExceeded)
	}
}

// enqueue is called with mu held.
func (c *conn) enqueue(data []byte, link fault.Link) error {
	due := time.Now()
	if !link.Drop {
		due = due.Add(sendDelay(link))
	}
	if due.Before(c.last) {
		due = c.last // never reorder
	}
	c.last = due
	if !c.running {
		if !c.links.spawn(c.pump) {
			return ErrClosed
		}
		c.running = true
	}
	c.queue = append(c.queue, segment{data: data, due: due})
	c.held += len(data)
	return nil
}

// pump sends the queue and ends with it, with the connection or with the Links.
func (c *conn) pump() {
	// The writer's deadline bounds what it waits for, not what is on its way.
	_ = c.Conn.SetWriteDeadline(time.Time{})
	var since time.Time // when the drop began to hold the head of the queue
	for {
		c.mu.Lock()
		if c.dead {
			c.mu.Unlock()
			return
		}
		if len(c.queue) == 0 {
			c.running = false
			_ = c.Conn.SetWriteDeadline(c.deadline)
			c.mu.Unlock()
			return
		}
		changed := c.links.cfg.Faults.Changed()
		head, drop := c.queue[0], c.effect().Drop
		c.mu.Unlock()

		now := time.Now()
		if drop {
			if since.IsZero() {
				since = now
			}
			c.await(changed, 0)
			continue
		}
		if !since.IsZero() && now.Sub(since) > resetAfter {
			c.reset(fmt.Errorf("connection to %s was held over %v by a drill fault: %w", c.RemoteAddr(), resetAfter, syscall.ECONNRESET))
			return
		}
		since = time.Time{}
		if wait := head.due.Sub(now); wait > 0 {
			c.await(changed, wait)
			continue
		}
		if head.data == nil {
			c.kill()
			return
		}
		_, err := c.Conn.Write(head.data)
		c.sent(head, err)
		if err != nil {
			c.kill()
			return
		}
	}
}

func (c *conn) sent(head segment, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		return // killed during the write; the queue is gone
	}
	c.queue[0] = segment{}
	c.queue = c.queue[1:]
	c.held -= len(head.data)
	if err != nil && c.err == nil {
		c.err = err
	}
	c.signal()
}

// await waits for a change of the table, the end of the connection, or d if it
// is positive.
func (c *conn) await(changed <-chan struct{}, d time.Duration) {
	var timer <-chan time.Time
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-changed:
	case <-timer:
	case <-c.done:
	}
}

// signal is called with mu held.
func (c *conn) signal() {
	close(c.wake)
	c.wake = make(chan struct{})
}

// reset ends the connection so that both ends see an error.
func (c *conn) reset(err error) {
	c.mu.Lock()
	c.err = err
	c.mu.Unlock()
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	c.kill()
}

// Close ends the connection for its user at once; what is held is still sent
// as the faults say, for at most maxLinger.
func (c *conn) Close() error {
	c.mu.Lock()
	if c.closing || c.dead {
		c.closing = true
		c.mu.Unlock()
		return net.ErrClosed
	}
	link := c.effect()
	if !c.running && link.Clean() || c.enqueue(nil, link) != nil {
		c.closing = true
		c.mu.Unlock()
		return c.shut()
	}
	c.closing = true
	c.linger = time.AfterFunc(maxLinger, c.kill)
	c.signal()
	c.mu.Unlock()
	_ = c.Conn.SetReadDeadline(time.Unix(1, 0)) // wakes readers, who see net.ErrClosed
	return nil
}

// kill closes the raw connection at once; what is held is lost.
func (c *conn) kill() { _ = c.shut() }

func (c *conn) shut() error {
	c.mu.Lock()
	if c.dead {
		c.mu.Unlock()
		return nil
	}
	c.dead = true
	if c.linger != nil {
		c.linger.Stop()
	}
	close(c.done)
	c.signal()
	c.queue, c.held = nil, 0
	c.mu.Unlock()
	c.links.forget(c)
	return c.Conn.Close()
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		switch {
		case c.closing:
			err = net.ErrClosed
		case c.err != nil && c.dead:
			err = c.err
		}
	}
	return n, err
}

func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return net.ErrClosed
	}
	return c.Conn.SetReadDeadline(t)
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return net.ErrClosed
	}
	c.deadline = t
	c.signal()
	if c.running {
		return nil
	}
	return c.Conn.SetWriteDeadline(t)
}
