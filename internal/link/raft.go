package link

import (
	"context"
	"errors"
	"net"
	"time"
)

// RaftConfig of a RaftLayer. A is raft.ServerAddress: as a type parameter it
// keeps package raft out of the witness, which links this package too.
type RaftConfig[A ~string] struct {
	// Listen is HOST:PORT.
	Listen string
	// Advertise is this server's address in Raft's configuration: its name.
	Advertise string
	// Resolve tells whom an address of Raft's configuration (a name) means; it
	// is asked at each dial, so that a server may move.
	Resolve func(A) (Peer, error)
}

// Validate reports all faults at once.
func (c RaftConfig[A]) Validate() error {
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
type RaftLayer[A ~string] struct {
	*secured
	cfg RaftConfig[A]
}

// NewRaftLayer listens for the servers of this process's region.
func NewRaftLayer[A ~string](l *Links, c RaftConfig[A]) (*RaftLayer[A], error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	s, err := l.listenSecured(PlaneRaft, c.Listen)
	if err != nil {
		return nil, err
	}
	return &RaftLayer[A]{secured: s, cfg: c}, nil
}

// Addr is what Raft advertises: the server's name, not where it listens.
func (r *RaftLayer[A]) Addr() net.Addr { return nameAddr(r.cfg.Advertise) }

// ListenAddr is where it listens.
func (r *RaftLayer[A]) ListenAddr() net.Addr { return r.Listener.Addr() }

// Dial is raft.StreamLayer; timeout covers the handshake too.
func (r *RaftLayer[A]) Dial(address A, timeout time.Duration) (net.Conn, error) {
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
