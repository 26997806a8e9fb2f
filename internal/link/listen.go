package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"
)

// addressError explains why an address cannot be used, and what to do.
func addressError(what, address string, err error) error {
	const remedy = "choose another address in cluster.yaml"
	var dns *net.DNSError
	var parse *net.AddrError
	var reason string
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		reason = "is in use; stop the process that has it, or " + remedy
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		reason = "is no address of this machine; " + remedy
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		reason = "may not be used by this user; choose a port from 1024 up in cluster.yaml"
	case errors.As(err, &dns):
		reason = "does not resolve; correct the host name or " + remedy
	case errors.As(err, &parse):
		reason = "is not HOST:PORT; correct it in cluster.yaml"
	case errors.Is(err, errNotLoopback):
		return fmt.Errorf("%s address %q: %w", what, address, errNotLoopback)
	default:
		return fmt.Errorf("%s address %q: %w; %s", what, address, err, remedy)
	}
	return fmt.Errorf("%s address %q: %s (%w)", what, address, reason, err)
}

var errNotLoopback = errors.New("is not a loopback address; plain text (--insecure) is for loopback only")

// control refuses what is not loopback where it must be, on the resolved
// address, and sets the options of a plane's sockets.
func control(plane Plane, insecure bool) func(network, address string, raw syscall.RawConn) error {
	return func(_, address string, raw syscall.RawConn) error {
		if insecure && !loopback(address) {
			return errNotLoopback
		}
		if plane == PlaneVotes && raw != nil {
			return setUserTimeout(raw, votesUserTimeout)
		}
		return nil
	}
}

func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// CheckAddress refuses an address that is not HOST:PORT with a host that
// resolves; what names the setting, such as "votes".
func CheckAddress(ctx context.Context, what, address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return addressError(what, address, err)
	}
	if host == "" {
		return addressError(what, address, &net.AddrError{Err: "missing host", Addr: address})
	}
	if _, err := net.DefaultResolver.LookupPort(ctx, "tcp", port); err != nil {
		return fmt.Errorf("%s address %q: port %q is not a number from 0 to 65535; correct it in cluster.yaml", what, address, port)
	}
	if _, err := net.DefaultResolver.LookupHost(ctx, host); err != nil {
		return addressError(what, address, err)
	}
	return nil
}

// listener accepts faulted connections on which the handshake is still to
// come: gRPC's servers do it with ServerCredentials.
type listener struct {
	net.Listener
	links *Links
	plane Plane
}

// Listen listens for a gRPC plane. The connections are useless without the
// handshake of ServerCredentials(plane).
func (l *Links) Listen(plane Plane, address string) (net.Listener, error) {
	ln, err := l.listen(plane, address)
	if err != nil {
		return nil, err // not a *listener that is nil
	}
	return ln, nil
}

func (l *Links) listen(plane Plane, address string) (*listener, error) {
	if err := CheckAddress(context.Background(), plane.String(), address); err != nil && !isWildcard(address) {
		return nil, err
	}
	lc := net.ListenConfig{
		Control:         control(plane, l.cfg.Insecure),
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: time.Second, Count: 3},
	}
	raw, err := lc.Listen(context.Background(), "tcp", address)
	if err != nil {
		return nil, addressError(plane.String(), address, err)
	}
	ln := &listener{Listener: raw, links: l, plane: plane}
	if err := l.track(ln); err != nil {
		return nil, errors.Join(err, raw.Close())
	}
	return ln, nil
}

func isWildcard(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && host == ""
}

func (ln *listener) Accept() (net.Conn, error) {
	raw, err := ln.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return ln.links.wrap(raw, ln.plane)
}

func (ln *listener) Close() error {
	ln.links.forget(ln)
	return ln.Listener.Close()
}

func (ln *listener) kill() { _ = ln.Close() }

// secured is a listener whose connections have proven both ends. A slow
// handshake holds up no other.
type secured struct {
	*listener
	ready chan net.Conn
	done  <-chan struct{}
	stop  context.CancelFunc // closes done and ends handshakes
	once  sync.Once
}

// maxHandshakes bounds the handshakes under way on one listener; more wait in
// the kernel's backlog.
const maxHandshakes = 256

func (l *Links) listenSecured(plane Plane, address string) (*secured, error) {
	ln, err := l.listen(plane, address)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &secured{listener: ln, ready: make(chan net.Conn), done: ctx.Done(), stop: stop}
	l.forget(ln)
	if err := l.track(s); err != nil {
		stop()
		return nil, errors.Join(err, ln.Close())
	}
	if !l.spawn(func() { s.serve(ctx) }) {
		s.kill()
		return nil, ErrClosed
	}
	return s, nil
}

func (s *secured) serve(ctx context.Context) {
	slots := make(chan struct{}, maxHandshakes)
	pause := time.Millisecond
	for {
		c, err := s.listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || errors.Is(err, ErrClosed) {
				return
			}
			// Out of descriptors, most likely: do not spin.
			s.links.cfg.Logger.Warn("accept failed", "plane", s.plane.String(), "error", err)
			t := time.NewTimer(pause)
			pause = min(2*pause, time.Second)
			select {
			case <-t.C:
			case <-s.done:
				t.Stop()
				return
			}
			continue
		}
		pause = time.Millisecond
		select {
		case slots <- struct{}{}:
		case <-s.done:
			_ = c.Close()
			return
		}
		if !s.links.spawn(func() {
			defer func() { <-slots }()
			s.handshake(ctx, c)
		}) {
			_ = c.Close()
			return
		}
	}
}

func (s *secured) handshake(ctx context.Context, c net.Conn) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	ready, _, err := s.links.serverHandshake(ctx, s.plane, c)
	if err != nil {
		abort(c)
		s.links.cfg.Logger.Debug("connection refused", "plane", s.plane.String(), "error", err)
		return
	}
	select {
	case s.ready <- ready:
	case <-s.done:
		abort(c)
	}
}

func abort(c net.Conn) {
	if fc, ok := c.(*conn); ok {
		fc.kill()
		return
	}
	_ = c.Close()
}

func (s *secured) Accept() (net.Conn, error) {
	select {
	case c := <-s.ready:
		return c, nil
	case <-s.done:
		return nil, net.ErrClosed
	}
}

func (s *secured) Close() error {
	err := net.ErrClosed
	s.once.Do(func() {
		s.stop()
		s.links.forget(s)
		err = s.Listener.Close()
	})
	return err
}

func (s *secured) kill() { _ = s.Close() }
