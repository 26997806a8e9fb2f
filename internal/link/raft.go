package link

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/hashicorp/raft"
)

// RaftConfig of a RaftLayer.
type RaftConfig struct {
	// Listen is HOST:PORT.
	Listen string
	// Advertise is this server's address in Raft's configuration: its name.
	Advertise string
	// Resolve tells whom an address of Raft's configuration (a name) means; it
	// is asked at each dial, so that a server may move.
	Resolve func(raft.ServerAddress) (Peer, error)
}

// Validate reports all faults at once.
func (c RaftConfig) Validate() error {
	var errs []error
	if c.Listen == "" {
		errs = append(errs, errors.New("raft listen address: must not be empty"))
	}
	if c.Advertise == "" {
		errs = append(errs, errors.New("raft advertise: must be the server's name"))
	}
	if c.Resolve == nil {
		errs = append(errs, errors.New("raft resolve: must be given"))
	}
	return errors.Join(errs...)
}

// RaftLayer is raft.StreamLayer over the links.
type RaftLayer struct {
	*secured
	cfg RaftConfig
}

var _ raft.StreamLayer = (*RaftLayer)(nil)

// RaftLayer listens for the servers of this process's region.
func (l *Links) RaftLayer(c RaftConfig) (*RaftLayer, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	s, err := l.listenSecured(PlaneRaft, c.Listen)
	if err != nil {
		return nil, err
	}
	return &RaftLayer{secured: s, cfg: c}, nil
}

// Addr is what Raft advertises: the server's name, not where it listens.
func (r *RaftLayer) Addr() net.Addr { return nameAddr(r.cfg.Advertise) }

// ListenAddr is where it listens.
func (r *RaftLayer) ListenAddr() net.Addr { return r.Listener.Addr() }

// Dial is raft.StreamLayer; timeout covers the handshake too.
func (r *RaftLayer) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	peer, err := r.cfg.Resolve(address)
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return r.links.dial(ctx, PlaneRaft, peer)
}

// nameAddr is a name where an address is asked for.
type nameAddr string

func (nameAddr) Network() string  { return "headlease" }
func (n nameAddr) String() string { return string(n) }
