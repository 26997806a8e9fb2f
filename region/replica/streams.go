package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// A Raft stream begins with a preface: the Raft id that the dialer means. The
// Raft configuration holds names, and a name is reached whatever data directory
// is behind it; without the preface a server whose directory was wiped could
// vote, and store entries, in the place of the one that had promised otherwise
// [F3]. hashicorp/raft's own messages do not name their addressee.
const (
	prefaceMagic = "HLR1"
	maxRaftID    = 512
)

// idOf makes a Raft id.
func idOf(name, uuid string) raft.ServerID { return raft.ServerID(name + "/" + uuid) }

// nameOf returns the server's name within a Raft id, "" for "".
func nameOf(id raft.ServerID) string {
	name, _, _ := strings.Cut(string(id), "/")
	return name
}

// byID makes the transport dial Raft ids: the pool of connections is then per
// id, and Dial knows whom a stream is meant for.
type byID struct{}

func (byID) ServerAddr(id raft.ServerID) (raft.ServerAddress, error) {
	return raft.ServerAddress(id), nil
}

// streams is the stream layer with prefaces, which also closes every accepted
// stream at the end: hashicorp/raft's transport closes neither those nor the
// goroutines that read them.
type streams struct {
	in      raft.StreamLayer
	self    raft.ServerID
	resolve func(string) (string, error)
	timeout time.Duration
	log     *slog.Logger

	mu       sync.Mutex
	accepted map[*stream]struct{}
	closed   bool
}

var _ raft.StreamLayer = (*streams)(nil)

func newStreams(in raft.StreamLayer, self raft.ServerID, c Config) *streams {
	return &streams{
		in: in, self: self, resolve: c.Resolve, timeout: c.TransportTimeout, log: c.Logger,
		accepted: make(map[*stream]struct{}),
	}
}

// nameAddr is a server's name as a network address.
type nameAddr string

func (a nameAddr) Network() string { return "name" }
func (a nameAddr) String() string  { return string(a) }

// Addr is the name: what the Raft configuration calls this server's address.
func (s *streams) Addr() net.Addr { return nameAddr(nameOf(s.self)) }

// Dial reaches the server of a Raft id by its name and sends the preface.
func (s *streams) Dial(to raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	name := nameOf(raft.ServerID(to))
	address := name
	if s.resolve != nil {
		var err error
		if address, err = s.resolve(name); err != nil {
			return nil, fmt.Errorf("resolve %s: %w", name, err)
		}
	}
	conn, err := s.in.Dial(raft.ServerAddress(address), timeout)
	if err != nil {
		return nil, err
	}
	preface := append([]byte(prefaceMagic), 0, 0)
	binary.BigEndian.PutUint16(preface[len(prefaceMagic):], uint16(len(to)))
	preface = append(preface, to...)
	err = conn.SetWriteDeadline(time.Now().Add(timeout))
	if err == nil {
		_, err = conn.Write(preface)
	}
	if err == nil {
		err = conn.SetWriteDeadline(time.Time{})
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("send the preface to %s: %w", to, err), conn.Close())
	}
	return conn, nil
}

// Accept hands a stream on at once; its first Read reads the preface, so that a
// silent dialer holds up nobody.
func (s *streams) Accept() (net.Conn, error) {
	conn, err := s.in.Accept()
	if err != nil {
		return nil, err
	}
	c := &stream{Conn: conn, of: s}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.Join(net.ErrClosed, conn.Close())
	}
	s.accepted[c] = struct{}{}
	return c, nil
}

// Close closes the listener and every accepted stream, once.
func (s *streams) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	open := s.accepted
	s.accepted = make(map[*stream]struct{})
	s.mu.Unlock()
	err := s.in.Close()
	for c := range open {
		_ = c.Conn.Close()
	}
	return err
}

// stream is an accepted connection. One goroutine reads it.
type stream struct {
	net.Conn
	of      *streams
	checked bool
}

func (c *stream) Read(b []byte) (int, error) {
	if !c.checked {
		if err := c.check(); err != nil {
			return 0, err
		}
		c.checked = true
	}
	return c.Conn.Read(b)
}

func (c *stream) check() error {
	if err := c.SetReadDeadline(time.Now().Add(c.of.timeout)); err != nil {
		return err
	}
	head := make([]byte, len(prefaceMagic)+2)
	if _, err := io.ReadFull(c.Conn, head); err != nil {
		return io.EOF // closed by the dialer, or not one of us: nothing to report
	}
	n := int(binary.BigEndian.Uint16(head[len(prefaceMagic):]))
	if string(head[:len(prefaceMagic)]) != prefaceMagic || n > maxRaftID {
		c.of.log.Warn("refused a raft stream without preface", "remote", c.RemoteAddr().String())
		return io.EOF
	}
	id := make([]byte, n)
	if _, err := io.ReadFull(c.Conn, id); err != nil {
		return io.EOF
	}
	if raft.ServerID(id) != c.of.self {
		c.of.log.Warn("refused a raft stream meant for another data directory; if this server's data was lost, "+
			"remove the old member and add this one",
			"meant", string(id), "self", string(c.of.self), "remote", c.RemoteAddr().String())
		return io.EOF
	}
	return c.SetReadDeadline(time.Time{})
}

func (c *stream) Close() error {
	c.of.mu.Lock()
	delete(c.of.accepted, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}
