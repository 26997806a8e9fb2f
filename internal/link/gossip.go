package link

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	maxDatagram = 64 << 10
	// udpBuffer is asked of the kernel for bursts; less is taken if need be.
	udpBuffer = 2 << 20
	// bindTries is for a port of 0: the TCP port found may be taken for UDP.
	bindTries = 16
)

// GossipConfig of a GossipTransport.
type GossipConfig struct {
	// Listen is HOST:PORT, for TCP and UDP.
	Listen string
	// Advertise is HOST:PORT as others reach it; default where it listens. A
	// host name is resolved once, since memberlist advertises an IP address.
	Advertise string
	// Resolve tells whom a node's name, or with an empty name its address,
	// means; false for a stranger, to whom only the fault rules for "*" apply
	// and whose certificate may be any server's.
	Resolve func(name, address string) (Peer, bool)
}

// Validate reports all faults at once.
func (c GossipConfig) Validate() error {
	var errs []error
	if c.Listen == "" {
		errs = append(errs, errors.New("gossip listen address: must not be empty"))
	}
	if c.Resolve == nil {
		errs = append(errs, errors.New("gossip resolve: must be given"))
	}
	return errors.Join(errs...)
}

// GossipTransport is memberlist's transport over the links: streams in TLS,
// datagrams protected by memberlist's own key, which its owner sets.
type GossipTransport struct {
	links     *Links
	cfg       GossipConfig
	streams   *secured
	udp       *net.UDPConn
	advertise *net.TCPAddr

	packets chan *memberlist.Packet
	conns   chan net.Conn
	done    chan struct{}
	once    sync.Once
	wg      sync.WaitGroup

	hosts hosts

	mu    sync.Mutex
	lanes map[string]*lane
}

var _ memberlist.NodeAwareTransport = (*GossipTransport)(nil)

// GossipTransport listens on TCP and UDP. Shutdown ends it, also by way of
// memberlist's own.
func (l *Links) GossipTransport(c GossipConfig) (*GossipTransport, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	t := &GossipTransport{
		links:   l,
		cfg:     c,
		packets: make(chan *memberlist.Packet),
		conns:   make(chan net.Conn),
		done:    make(chan struct{}),
		lanes:   map[string]*lane{},
	}
	if err := t.bind(); err != nil {
		return nil, err
	}
	if err := t.findAdvertised(); err != nil {
		return nil, errors.Join(err, t.streams.Close(), t.udp.Close())
	}
	_ = t.udp.SetReadBuffer(udpBuffer)
	if err := l.track(t); err != nil {
		return nil, errors.Join(err, t.streams.Close(), t.udp.Close())
	}
	t.wg.Go(t.readPackets)
	t.wg.Go(t.acceptStreams)
	return t, nil
}

func (t *GossipTransport) bind() error {
	var errs []error
	for range bindTries {
		s, err := t.links.listenSecured(PlaneGossip, t.cfg.Listen)
		if err != nil {
			return err
		}
		at := s.Addr().(*net.TCPAddr)
		udp, err := net.ListenUDP("udp", &net.UDPAddr{IP: at.IP, Port: at.Port, Zone: at.Zone})
		if err == nil {
			t.streams, t.udp = s, udp
			return nil
		}
		err = addressError(PlaneGossip.String(), t.cfg.Listen, err)
		if _, port, _ := net.SplitHostPort(t.cfg.Listen); port != "0" {
			return errors.Join(err, s.Close())
		}
		errs = append(errs, err, s.Close())
	}
	return errors.Join(errs...)
}

// findAdvertised resolves what others are told.
func (t *GossipTransport) findAdvertised() error {
	at := t.streams.Addr().(*net.TCPAddr)
	if t.cfg.Advertise == "" {
		if at.IP.IsUnspecified() {
			return fmt.Errorf("gossip address %q: others cannot reach a wildcard; give the address to advertise in cluster.yaml", t.cfg.Listen)
		}
		t.advertise = at
		return nil
	}
	addr, err := net.ResolveTCPAddr("tcp", t.cfg.Advertise)
	if err != nil {
		return addressError("gossip", t.cfg.Advertise, err)
	}
	if addr.Port == 0 {
		addr.Port = at.Port
	}
	t.advertise = addr
	return nil
}

// Addr is where it listens, on TCP and UDP alike.
func (t *GossipTransport) Addr() *net.TCPAddr { return t.streams.Addr().(*net.TCPAddr) }

// FinalAdvertiseAddr is memberlist.Transport; an address in memberlist's
// configuration goes before that of GossipConfig.
func (t *GossipTransport) FinalAdvertiseAddr(ip string, port int) (net.IP, int, error) {
	if ip == "" {
		return short(t.advertise.IP), t.advertise.Port, nil
	}
	parsed := net.ParseIP(ip)
	if parsed == nil {
		return nil, 0, fmt.Errorf("gossip advertise address %q: is not an IP address", ip)
	}
	return short(parsed), port, nil
}

func short(ip net.IP) net.IP {
	if v4 := ip.To4(); v4 != nil {
		return v4
	}
	return ip
}

func (t *GossipTransport) peer(a memberlist.Address) Peer {
	p, ok := t.cfg.Resolve(a.Name, a.Addr)
	if !ok {
		p = Peer{}
	}
	p.Address = a.Addr
	return p
}

// WriteTo is memberlist.Transport.
func (t *GossipTransport) WriteTo(b []byte, addr string) (time.Time, error) {
	return t.WriteToAddress(b, memberlist.Address{Addr: addr})
}

// WriteToAddress is memberlist.NodeAwareTransport. A lost datagram is no error.
func (t *GossipTransport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	peer := t.peer(a)
	link := t.links.fault(PlaneGossip, peer.Name, peer.Region)
	now := time.Now()
	if link.Drop || link.Loss > 0 && rand.Float64() < link.Loss {
		return now, nil
	}
	to, err := t.hosts.resolve(a.Addr)
	if err != nil {
		return time.Time{}, addressError("gossip", a.Addr, err)
	}
	if t.links.cfg.Insecure && !to.IP.IsLoopback() {
		return time.Time{}, addressError("gossip", a.Addr, errNotLoopback)
	}
	if t.delayed(b, to, peer.Name, now, link.Delay+jitter(link)) {
		return now, nil
	}
	_, err = t.udp.WriteToUDP(b, to)
	return time.Now(), err
}

// PacketCh is memberlist.Transport.
func (t *GossipTransport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// StreamCh is memberlist.Transport.
func (t *GossipTransport) StreamCh() <-chan net.Conn { return t.conns }

// DialTimeout is memberlist.Transport.
func (t *GossipTransport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return t.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

// DialAddressTimeout is memberlist.NodeAwareTransport.
func (t *GossipTransport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	ctx := context.Background()
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return t.links.dial(ctx, PlaneGossip, t.peer(a))
}

// Shutdown ends the transport and its goroutines; again it does nothing.
func (t *GossipTransport) Shutdown() error {
	var err error
	t.once.Do(func() {
		t.mu.Lock()
		close(t.done) // under mu: no lane starts after it
		t.mu.Unlock()
		t.links.forget(t)
		err = errors.Join(t.streams.Close(), t.udp.Close())
	})
	t.wg.Wait()
	return err
}

func (t *GossipTransport) kill() { _ = t.Shutdown() }

func (t *GossipTransport) acceptStreams() {
	for {
		c, err := t.streams.Accept()
		if err != nil {
			return // only Close makes it fail
		}
		select {
		case t.conns <- c:
		case <-t.done:
			_ = c.Close()
			return
		}
	}
}

func (t *GossipTransport) readPackets() {
	buf := make([]byte, maxDatagram)
	for {
		n, from, err := t.udp.ReadFromUDP(buf)
		at := time.Now()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// ICMP errors of earlier sends surface here.
			t.links.cfg.Logger.Debug("gossip datagram not read", "error", err)
			continue
		}
		if n == 0 {
			continue
		}
		p := &memberlist.Packet{Buf: append([]byte(nil), buf[:n]...), From: from, Timestamp: at}
		select {
		case t.packets <- p:
		case <-t.done:
			return
		}
	}
}
