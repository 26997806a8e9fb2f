package detector

import (
	"errors"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// memNet is an in-memory network for memberlist: lossy datagrams and pipes.
type memNet struct {
	mu   sync.Mutex
	all  map[string]*memTransport
	port int
	// cut, under mu: what is sent from one name to another is lost.
	cut func(from, to string) bool
	// tap, under mu, sees every datagram as it is on the wire.
	tap func(raw []byte)
}

func (n *memNet) setCut(cut func(from, to string) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut = cut
}

type memTransport struct {
	net     *memNet
	name    string
	addr    string
	packets chan *memberlist.Packet
	streams chan net.Conn
	down    bool // under net.mu
}

type memAddr string

func (memAddr) Network() string  { return "mem" }
func (a memAddr) String() string { return string(a) }

// listen makes a transport at addr, or at a new one if empty.
func (n *memNet) listen(name, addr string) *memTransport {
	n.mu.Lock()
	defer n.mu.Unlock()
	if addr == "" {
		n.port++
		addr = "127.0.0.1:" + strconv.Itoa(n.port)
	}
	t := &memTransport{net: n, name: name, addr: addr, packets: make(chan *memberlist.Packet, 4096), streams: make(chan net.Conn, 64)}
	if n.all == nil {
		n.all = map[string]*memTransport{}
	}
	n.all[addr] = t
	return t
}

func (t *memTransport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	_, p, err := net.SplitHostPort(t.addr)
	if err != nil {
		return nil, 0, err
	}
	port, err := strconv.Atoi(p)
	return net.IPv4(127, 0, 0, 1).To4(), port, err
}

func (t *memTransport) peer(addr string, datagram []byte) *memTransport {
	t.net.mu.Lock()
	defer t.net.mu.Unlock()
	if datagram != nil && t.net.tap != nil {
		t.net.tap(datagram)
	}
	d := t.net.all[addr]
	if d == nil || d.down || t.down || (t.net.cut != nil && t.net.cut(t.name, d.name)) {
		return nil
	}
	return d
}

func (t *memTransport) WriteTo(b []byte, addr string) (time.Time, error) {
	now := time.Now()
	if d := t.peer(addr, b); d != nil {
		select {
		case d.packets <- &memberlist.Packet{Buf: append([]byte(nil), b...), From: memAddr(t.addr), Timestamp: now}:
		default:
		}
	}
	return now, nil
}

func (t *memTransport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	return t.WriteTo(b, a.Addr)
}

func (t *memTransport) PacketCh() <-chan *memberlist.Packet { return t.packets }

func (t *memTransport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	d := t.peer(addr, nil)
	if d == nil {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		<-timer.C
		return nil, errors.New("i/o timeout")
	}
	here, there := net.Pipe()
	select {
	case d.streams <- there:
		return here, nil
	default:
		return nil, errors.New("refused")
	}
}

func (t *memTransport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	return t.DialTimeout(a.Addr, timeout)
}

func (t *memTransport) StreamCh() <-chan net.Conn { return t.streams }

func (t *memTransport) Shutdown() error {
	t.net.mu.Lock()
	defer t.net.mu.Unlock()
	t.down = true
	for {
		select {
		case c := <-t.streams:
			_ = c.Close()
		default:
			return nil
		}
	}
}
