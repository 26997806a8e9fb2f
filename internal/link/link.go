// Package link makes every dialer and every listener of a process: for the
// API, votes, Raft and gossip. All of them carry mutual TLS 1.3 with the
// identities of package pki, and the process's fault table.
//
// Streams are wrapped below TLS, so that a fault acts on bytes as the network
// would see them; faults are applied by the sender, to the peer's name, which
// on an accepted connection is known after its handshake.
//
// # Without TLS
//
// Insecure is for development on loopback addresses and refused elsewhere. The
// two ends then exchange their identities as one line each (see plain.go), in
// place of the TLS handshake, so that names, roles and faults work the same. A
// plain and a TLS process refuse each other.
//
// # Threads
//
// A Links owns the connections that it made: Close ends them and waits for
// their goroutines. Each Raft layer and gossip transport has an accept loop and
// a goroutine per handshake, ended by its Close or by that of the Links.
package link

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/pause"
	"github.com/headlease/headlease/internal/pki"
)

// Identity is who a process is; see package pki.
type Identity = pki.Identity

// Plane is one kind of traffic.
type Plane = fault.Plane

// The planes.
const (
	PlaneAPI    = fault.PlaneAPI
	PlaneVotes  = fault.PlaneVotes
	PlaneRaft   = fault.PlaneRaft
	PlaneGossip = fault.PlaneGossip
)

// handshakeTimeout bounds a handshake on an accepted connection, and one
// dialled without a deadline.
const handshakeTimeout = 5 * time.Second

// ErrClosed is returned by a Links that was closed.
var ErrClosed = errors.New("links are closed; the process is stopping")

// Peer is whom one dials; the other end must prove to be it.
type Peer struct {
	// Name may be empty: then any process of that role (and region) will do.
	Name string
	// Region is set for region servers.
	Region string
	Role   pki.Role
	// Address is host:port; a host name is resolved at each dial.
	Address string
}

func (p Peer) String() string {
	return Identity{Role: p.Role, Region: p.Region, Name: p.Name}.Path() + " at " + p.Address
}

// Config of a Links.
type Config struct {
	// Identity of this process.
	Identity Identity
	// Credentials prove it; nil only with Insecure.
	Credentials *pki.Credentials
	// Insecure sends plain text, on loopback addresses only.
	Insecure bool
	// Dial makes the TCP connections, as net.Dialer.DialContext does, which is the
	// default; not with Insecure, which binds its own to loopback.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Faults of this process; nil has none.
	Faults *fault.Table
	// Logger; default slog.Default().
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Validate reports all faults at once.
func (c Config) Validate() error {
	errs := []error{}
	if err := c.Identity.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("identity: %w", err))
	}
	switch {
	case c.Insecure && c.Dial != nil:
		errs = append(errs, errors.New("dial: insecure connections are made on loopback only; leave one of the two out"))
	case c.Insecure && c.Credentials != nil:
		errs = append(errs, errors.New("insecure: certificates are given too; leave one of them out"))
	case !c.Insecure && c.Credentials == nil:
		errs = append(errs, errors.New("certificates: none given; name their directory, or use --insecure on loopback"))
	case c.Credentials != nil && c.Credentials.Identity != c.Identity:
		errs = append(errs, fmt.Errorf("certificates: are for %s, not %s; use the pair made for this process", c.Credentials.Identity.URI(), c.Identity.URI()))
	}
	return errors.Join(errs...)
}

// Links makes the connections of one process. Safe for concurrent use.
type Links struct {
	cfg  Config
	shk  shaker
	rtts rtts

	mu     sync.Mutex
	closed bool
	open   map[closer]struct{}
	wg     sync.WaitGroup
}

// closer is something that Links.Close ends at once, without lingering.
type closer interface{ kill() }

// New checks the configuration and makes a Links. Nothing runs yet.
func New(c Config) (*Links, error) {
	c = c.withDefaults()
	if err := c.Validate(); err != nil {
		return nil, err
	}
	l := &Links{cfg: c, open: map[closer]struct{}{}}
	if c.Insecure {
		l.shk = plainShaker{id: c.Identity}
	} else {
		l.shk = newTLSShaker(c.Identity, c.Credentials)
	}
	return l, nil
}

// Identity of this process.
func (l *Links) Identity() Identity { return l.cfg.Identity }

// Insecure reports whether the links are plain text.
func (l *Links) Insecure() bool { return l.cfg.Insecure }

// Close ends every connection and listener made here and waits for their
// goroutines. Listeners and gRPC servers should have been stopped before.
func (l *Links) Close() error {
	l.mu.Lock()
	l.closed = true
	all := make([]closer, 0, len(l.open))
	for c := range l.open {
		all = append(all, c)
	}
	l.mu.Unlock()
	for _, c := range all {
		c.kill()
	}
	l.wg.Wait()
	return nil
}

func (l *Links) isClosed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

// track makes Close responsible for c; it fails once Close was called.
func (l *Links) track(c closer) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return ErrClosed
	}
	l.open[c] = struct{}{}
	return nil
}

func (l *Links) forget(c closer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, c)
}

// spawn runs f as a goroutine that Close waits for; false once Close was
// called.
func (l *Links) spawn(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.wg.Go(f)
	return true
}

// dialRaw makes the faulted connection below the handshake. A dial to a dropped
// peer hangs until its deadline or the end of the rule, as a lost SYN would.
func (l *Links) dialRaw(ctx context.Context, plane Plane, peer Peer) (*conn, error) {
	if l.isClosed() { // wrap says so too, but then the peer has been called for nothing
		return nil, fmt.Errorf("dial %s of %s: %w", plane, peer, ErrClosed)
	}
	if err := l.passDial(ctx, plane, peer); err != nil {
		return nil, fmt.Errorf("dial %s of %s: %w", plane, peer, err)
	}
	d := net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: time.Second, Count: 3},
		Control:         control(plane, l.cfg.Insecure),
	}
	dial := d.DialContext
	if l.cfg.Dial != nil {
		dial = l.cfg.Dial
	}
	raw, err := dial(ctx, "tcp", peer.Address)
	if err != nil {
		return nil, fmt.Errorf("dial %s of %s: %w", plane, peer, err)
	}
	c, err := l.wrap(raw, plane)
	if err != nil {
		return nil, err
	}
	c.setPeer(peer.Name, peer.Region)
	return c, nil
}

// passDial waits as the fault table says.
func (l *Links) passDial(ctx context.Context, plane Plane, peer Peer) error {
	for {
		changed := l.cfg.Faults.Changed()
		link := l.fault(plane, peer.Name, peer.Region)
		if !link.Drop {
			if pause.For(ctx, sendDelay(link)) != nil {
				return ctx.Err()
			}
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("no answer (drill fault): %w", ctx.Err())
		}
	}
}

// fault tells what the table does to what is sent to a peer; a process's links
// to itself have no faults.
func (l *Links) fault(plane Plane, name, region string) fault.Link {
	if name == l.cfg.Identity.Name && region == l.cfg.Identity.Region && name != "" {
		return fault.Link{}
	}
	return l.cfg.Faults.Link(plane, name, region)
}

// dial connects and proves both ends.
func (l *Links) dial(ctx context.Context, plane Plane, peer Peer) (net.Conn, error) {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, handshakeTimeout)
		defer cancel()
	}
	c, err := l.dialRaw(ctx, plane, peer)
	if err != nil {
		return nil, err
	}
	secured, _, err := l.clientHandshake(ctx, plane, peer, c)
	if err != nil {
		c.kill()
		return nil, err
	}
	return secured, nil
}

// clientHandshake proves both ends of a dialled connection.
func (l *Links) clientHandshake(ctx context.Context, plane Plane, peer Peer, c net.Conn) (net.Conn, Identity, error) {
	secured, id, err := l.shk.client(ctx, plane, peer, c)
	if err != nil {
		return nil, Identity{}, fmt.Errorf("dial %s of %s: %w", plane, peer, err)
	}
	if fc, ok := c.(*conn); ok {
		fc.setPeer(id.Name, id.Region)
	}
	return secured, id, nil
}

// serverHandshake proves both ends of an accepted connection. A connection from
// a peer to which this process drops everything could not have come about; it
// waits here for the end of the rule, as the peer's dial would.
func (l *Links) serverHandshake(ctx context.Context, plane Plane, c net.Conn) (net.Conn, Identity, error) {
	secured, id, err := l.shk.server(ctx, plane, c)
	if err != nil {
		return nil, Identity{}, fmt.Errorf("accept on %s from %s: %w", plane, c.RemoteAddr(), err)
	}
	if fc, ok := c.(*conn); ok {
		fc.setPeer(id.Name, id.Region)
	}
	for {
		changed := l.cfg.Faults.Changed()
		if !l.fault(plane, id.Name, id.Region).Drop {
			return secured, id, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, Identity{}, fmt.Errorf("accept on %s from %s: held by a drill fault: %w", plane, id, ctx.Err())
		}
	}
}
