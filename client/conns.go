package client

import (
	"context"
	"errors"
	"fmt"
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
	// maxInterrupted tries of a call may end with their connection, closed by another
	// user of it, beside those that count.
	maxInterrupted = 8
)

// conns are the connections to a region's servers. One is used at a time; any
// server takes any call and forwards it to the leader.
type conns struct {
	region  string
	servers []Server
	links   Links

	// closing are the connections given up, which may take a while to say
	// goodbye to a silent peer.
	closing sync.WaitGroup

	mu     sync.Mutex
	closed bool
	at     int
	open   []*grpc.ClientConn
}

func newConns(links Links, r Region) *conns {
	return &conns{region: r.Name, servers: r.Servers, links: links, open: make([]*grpc.ClientConn, len(r.Servers))}
}

// current returns the connection in use.
func (c *conns) current() (*grpc.ClientConn, int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, 0, ErrClosed
	}
	if c.open[c.at] == nil {
		s := c.servers[c.at]
		cc, err := c.links.DialGRPC(link.PlaneAPI, link.Peer{Name: s.Name, Region: c.region, Role: pki.RoleRegion, Address: s.API},
			callstream.DialOption(callstream.WorkerMethods()...))
		if err != nil {
			return nil, 0, fmt.Errorf("connect to %s: %w", s.Name, err)
		}
		c.open[c.at] = cc
	}
	return c.open[c.at], c.at, nil
}

// leave moves on from a server, once however many calls failed with it. fresh
// gives its connection up, which a silent peer may never break.
func (c *conns) leave(at int, cc *grpc.ClientConn, fresh bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[at] != cc {
		return
	}
	if fresh {
		c.open[at] = nil
		c.closing.Go(func() { _ = cc.Close() })
	}
	if c.at == at {
		c.at = (at + 1) % len(c.servers)
	}
}

// do makes a call that may safely be repeated: at the present server, and at
// the others in turn while none can decide.
func (c *conns) do(ctx context.Context, call func(context.Context, *grpc.ClientConn) error) error {
	var last error
	timeout := attemptTimeout
	for tries, interrupted := 0, 0; tries < len(c.servers); {
		cc, at, err := c.current()
		if err != nil {
			return err
		}
		attempt, cancel := context.WithTimeout(ctx, timeout)
		err = errorOf(call(attempt, cc))
		expired := attempt.Err() != nil
		cancel()
		if expired {
			timeout = laterTimeout
		} else if isCode(err, codes.Canceled) && interrupted < maxInterrupted {
			// Somebody else has given the connection up: no server has said anything.
			interrupted++
			c.leave(at, cc, false)
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
		// answer others, and the stream finds out by itself if it hangs.
		c.leave(at, cc, false)
	}
	return last
}

func isCode(err error, code codes.Code) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
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
	c.open = make([]*grpc.ClientConn, len(open))
	c.mu.Unlock()
	var errs []error
	for _, cc := range open {
		if cc != nil {
			errs = append(errs, cc.Close())
		}
	}
	c.closing.Wait() // nothing is added once it is closed
	return errors.Join(errs...)
}
