package link

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// maxDelayed bounds the datagrams on their way to one peer; more are lost,
	// as in a full router.
	maxDelayed = 1024

	// resolveEvery is how soon a host that moved is found again.
	resolveEvery = 10 * time.Second
	// resolveWithin bounds how long a heartbeat waits for a name server.
	resolveWithin = time.Second
	maxHosts      = 1024
)

// hosts remembers where host names lead, so that datagrams sent several times
// a second do not each ask a name server, nor wait for one that is down.
type hosts struct {
	// lookup is net.DefaultResolver's but for tests.
	lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)

	mu    sync.Mutex
	known map[string]*host
}

type host struct {
	asked time.Time
	addr  *net.UDPAddr // the last that was found; nil: none yet
	err   error        // of the last lookup
}

// resolve returns the address last found if asking again fails. A host's
// failed look-up is not repeated for resolveEvery either.
func (h *hosts) resolve(address string) (*net.UDPAddr, error) {
	if ap, err := netip.ParseAddrPort(address); err == nil {
		return net.UDPAddrFromAddrPort(ap), nil
	}
	now := time.Now()
	h.mu.Lock()
	if h.known == nil || len(h.known) > maxHosts {
		h.known = map[string]*host{}
	}
	e := h.known[address]
	if e != nil && now.Sub(e.asked) < resolveEvery {
		defer h.mu.Unlock()
		return e.result()
	}
	if e == nil {
		e = &host{}
		h.known[address] = e
	}
	e.asked = now // others use what there is meanwhile
	h.mu.Unlock()

	addr, err := h.find(address)
	h.mu.Lock()
	defer h.mu.Unlock()
	e.err = err
	if err == nil {
		e.addr = addr
	}
	return e.result()
}

func (e *host) result() (*net.UDPAddr, error) {
	switch {
	case e.addr != nil:
		return e.addr, nil
	case e.err != nil:
		return nil, e.err
	default:
		return nil, &net.DNSError{Err: "look-up is under way", IsTemporary: true}
	}
}

func (h *hosts) find(address string) (*net.UDPAddr, error) {
	name, service, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveWithin)
	defer cancel()
	port, err := net.DefaultResolver.LookupPort(ctx, "udp", service)
	if err != nil {
		return nil, err
	}
	lookup := h.lookup
	if lookup == nil {
		lookup = net.DefaultResolver.LookupNetIP
	}
	ips, err := lookup(ctx, "ip", name)
	if err != nil {
		return nil, err
	}
	if len(ips) == 0 {
		return nil, &net.DNSError{Err: "no address", Name: name, IsNotFound: true}
	}
	best := ips[0].Unmap()
	for _, ip := range ips { // like net.Dial: IPv4 first
		if ip = ip.Unmap(); ip.Is4() {
			best = ip
			break
		}
	}
	return net.UDPAddrFromAddrPort(netip.AddrPortFrom(best, uint16(port))), nil
}

// lane is the datagrams on their way to one peer, in order.
type lane struct {
	queue   []datagram
	last    time.Time
	running bool
}

type datagram struct {
	data []byte
	to   *net.UDPAddr
	due  time.Time
}

// delayed takes a datagram into its peer's lane if it must wait, or if others
// before it do.
func (t *GossipTransport) delayed(b []byte, to *net.UDPAddr, name string, now time.Time, d time.Duration) bool {
	if name == "" {
		name = to.String()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	ln := t.lanes[name]
	if ln == nil {
		if d <= 0 {
			return false
		}
		ln = &lane{}
		t.lanes[name] = ln
	}
	if d <= 0 && !ln.running {
		return false
	}
	if len(ln.queue) >= maxDelayed {
		return true
	}
	due := now.Add(d)
	if due.Before(ln.last) {
		due = ln.last
	}
	ln.last = due
	if !ln.running {
		select {
		case <-t.done:
			return true
		default:
		}
		ln.running = true
		t.wg.Go(func() { t.pump(ln) })
	}
	ln.queue = append(ln.queue, datagram{data: append([]byte(nil), b...), to: to, due: due})
	return true
}

func (t *GossipTransport) pump(ln *lane) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		t.mu.Lock()
		if len(ln.queue) == 0 {
			ln.running = false
			t.mu.Unlock()
			return
		}
		head := ln.queue[0]
		ln.queue = ln.queue[1:]
		t.mu.Unlock()
		timer.Reset(time.Until(head.due))
		select {
		case <-timer.C:
		case <-t.done:
			return
		}
		// A failed send is a lost datagram.
		_, _ = t.udp.WriteToUDP(head.data, head.to)
	}
}
