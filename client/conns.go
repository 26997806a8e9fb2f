package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/headlease/headlease/internal/callstream"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
)

// attemptTimeout bounds one try of a call at the first server: one that hangs
// is left for the next one. laterTimeout bounds those at the others.
const (
	attemptTimeout = 2 * time.Second
	laterTimeout   = time.Second
	// maxInterrupted tries of a call may end because their server is passed over, or
	// with their connection, closed by another user of it, beside those that count.
	maxInterrupted = 8
)

// conns are the connections to a region's servers. One is used at a time; any
// server takes any call and forwards it to the leader.
type conns struct {
	region  string
	servers []Server
	links   Links
	random  dice
	logger  *slog.Logger
	// found is called, and must not wait, when a server is found to hang that has
	// the region's stream: another one answers in its place. nil: nobody asks.
	found func()

	// closing are the connections given up, which may take a while to say
	// goodbye to a silent peer, and the questions to servers whether they live.
	closing sync.WaitGroup

	mu     sync.Mutex
	closed bool
	at     int
	open   []*connection
	// stream is the connection with the region's stream; nil: there is none.
	stream *connection
	lag    lag
}

func newConns(links Links, r Region, random dice) *conns {
	return &conns{
		region: r.Name, servers: r.Servers, links: links, random: random, logger: slog.New(slog.DiscardHandler),
		open: make([]*connection, len(r.Servers)),
	}
}

// current returns the connection in use.
func (c *conns) current() (*connection, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.currentLocked()
}

func (c *conns) currentLocked() (*connection, error) {
	if c.closed {
		return nil, ErrClosed
	}
	if c.open[c.at] == nil {
		s := c.servers[c.at]
		cc, err := c.links.DialGRPC(link.PlaneAPI, link.Peer{Name: s.Name, Region: c.region, Role: pki.RoleRegion, Address: s.API},
			callstream.DialOption(callstream.WorkerMethods()...))
		if err != nil {
			return nil, fmt.Errorf("connect to %s: %w", s.Name, err)
		}
		c.open[c.at] = &connection{ClientConn: cc, conns: c, at: c.at, attempts: map[*attempt]struct{}{}}
	}
	return c.open[c.at], nil
}

// leave moves on from a server, once however many calls failed with it. fresh
// gives its connection up, which a silent peer may never break.
func (c *conns) leave(x *connection, fresh bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leaveLocked(x, fresh)
}

func (c *conns) leaveLocked(x *connection, fresh bool) {
	if c.open[x.at] != x {
		return
	}
	if fresh {
		c.open[x.at] = nil
		x.giveUp()
		c.closing.Go(func() { _ = x.Close() })
	}
	if c.at == x.at {
		c.at = (x.at + 1) % len(c.servers)
	}
}

// do makes a call that may safely be repeated: at the present server, and at
// the others in turn while none can decide.
func (c *conns) do(ctx context.Context, call func(context.Context, *grpc.ClientConn) error) error {
	var last error
	timeout := attemptTimeout
	for tries, interrupted := 0, 0; tries < len(c.servers); {
		a, err := c.begin(ctx, timeout)
		if err != nil {
			return err
		}
		said := call(a.ctx, a.on.ClientConn)
		err = errorOf(said)
		expired := a.ctx.Err() != nil
		passed := a.end(said, expired)
		if expired {
			timeout = laterTimeout
		}
		if ctx.Err() == nil && (passed || !expired && isCode(err, codes.Canceled)) && interrupted < maxInterrupted {
			// The server was passed over, or somebody else has given the connection up:
			// no server has said anything.
			interrupted++
			c.leave(a.on, false)
			continue
		}
		tries++
		if err == nil || ctx.Err() != nil || !errors.Is(err, ErrUnavailable) && !withoutData(err) {
			return err
		}
		if last == nil || !withoutData(err) {
			last = err // what the others say counts for more than a server without data
		}
		// The connection stays: a server that is slow to decide may still
		// answer others, and whether it hangs is found out beside.
		if !knowsAnother(err) {
			c.leave(a.on, false)
			continue
		}
		// It has told all whose calls were at the leader of before, at once.
		select {
		case <-ctx.Done():
			return err
		case <-time.After(c.random(minRetry)):
		}
	}
	return last
}

func isCode(err error, code codes.Code) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}

// knowsAnother reports whether a server answered that the region has another leader
// now: it knows it, and the next one may be the one of before, which hangs.
func knowsAnother(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Detail.GetWrongTerm() != nil
}

// withoutData reports whether a server has no data yet or any more: the others
// may have.
func withoutData(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Detail.GetUninitialised() != nil
}

func (c *conns) close() error {
	c.mu.Lock()
	c.closed = true
	open := c.open
	c.open = make([]*connection, len(open))
	for _, x := range open {
		if x != nil {
			x.giveUp()
		}
	}
	c.mu.Unlock()
	var errs []error
	for _, x := range open {
		if x != nil {
			errs = append(errs, x.Close())
		}
	}
	c.closing.Wait() // nothing is added once it is closed
	return errors.Join(errs...)
}
