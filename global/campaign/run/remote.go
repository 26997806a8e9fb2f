package run

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Links is what Voters needs of the process's links.
type Links interface {
	DialGRPC(plane link.Plane, peer link.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error)
	RTT(peer string) (time.Duration, bool)
}

// Voters reaches remote voters over the votes plane: a witness by its one
// process, a region by any of its servers, which forwards to the leader. A
// server that fails is left for the next one, and one that stays silent gets a
// fresh connection [F50]. Safe for concurrent use; close it when done.
type Voters struct {
	links Links

	mu     sync.Mutex
	closed bool
	voters map[string]*voter
}

// NewVoters returns the voters by id, each with the processes that speak for
// it.
func NewVoters(links Links, processes map[string][]link.Peer) *Voters {
	v := &Voters{links: links, voters: map[string]*voter{}}
	v.SetProcesses(processes)
	return v
}

// SetProcesses replaces the voters and their processes. Connections to processes
// that stay, at the same address, are kept.
func (v *Voters) SetProcesses(processes map[string][]link.Peer) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return
	}
	for id, r := range v.voters {
		if len(processes[id]) == 0 {
			_ = r.close()
			delete(v.voters, id)
		}
	}
	for id, peers := range processes {
		switch r := v.voters[id]; {
		case len(peers) == 0:
		case r == nil:
			v.voters[id] = &voter{id: id, links: v.links, peers: slices.Clone(peers), conns: make([]*grpc.ClientConn, len(peers))}
		default:
			r.setPeers(peers)
		}
	}
}

func (v *Voters) voter(id string) *voter {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.voters[id]
}

// Voter returns the voter of that id, or nil.
func (v *Voters) Voter(id string) RemoteVoter {
	if r := v.voter(id); r != nil {
		return r
	}
	return nil
}

// RTT is the measured round-trip time to the process asked now; zero if none.
func (v *Voters) RTT(id string) time.Duration {
	r := v.voter(id)
	if r == nil {
		return 0
	}
	r.mu.Lock()
	name := r.peers[r.at].Name
	r.mu.Unlock()
	d, _ := v.links.RTT(name)
	return d
}

// Heard resets the back-off of connections to a process that was heard by
// gossip [F50].
func (v *Voters) Heard(process string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, r := range v.voters {
		r.heard(process)
	}
}

// Close ends all connections.
func (v *Voters) Close() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	var errs []error
	for _, r := range v.voters {
		errs = append(errs, r.close())
	}
	return errors.Join(errs...)
}

type voter struct {
	id    string
	links Links

	mu     sync.Mutex
	closed bool
	peers  []link.Peer
	at     int // the process asked now
	conns  []*grpc.ClientConn
}

// setPeers replaces the processes, of which there is at least one.
func (r *voter) setPeers(peers []link.Peer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if slices.Equal(r.peers, peers) {
		return
	}
	asked := r.peers[r.at]
	conns := make([]*grpc.ClientConn, len(peers))
	for i, c := range r.conns {
		if j := slices.Index(peers, r.peers[i]); j >= 0 {
			conns[j] = c
		} else if c != nil {
			_ = c.Close()
		}
	}
	r.peers, r.conns, r.at = slices.Clone(peers), conns, max(0, slices.Index(peers, asked))
}

var errClosed = errors.New("connections to the voters are closed")

func (r *voter) Prepare(ctx context.Context, req *pb.PrepareRequest) (res *pb.PrepareResponse, err error) {
	err = r.call(func(c pb.VoteServiceClient) error {
		res, err = c.Prepare(ctx, req)
		return err
	})
	return res, err
}

func (r *voter) Accept(ctx context.Context, req *pb.AcceptRequest) (res *pb.AcceptResponse, err error) {
	err = r.call(func(c pb.VoteServiceClient) error {
		res, err = c.Accept(ctx, req)
		return err
	})
	return res, err
}

func (r *voter) Configure(ctx context.Context, req *pb.ConfigureRequest) (res *pb.ConfigureResponse, err error) {
	err = r.call(func(c pb.VoteServiceClient) error {
		res, err = c.Configure(ctx, req)
		return err
	})
	return res, err
}

// call asks the present process and moves on when it fails.
func (r *voter) call(do func(pb.VoteServiceClient) error) error {
	conn, err := r.conn()
	if err != nil {
		return err
	}
	err = do(pb.NewVoteServiceClient(conn))
	if err != nil && status.Code(err) != codes.Canceled {
		r.failed(conn, status.Code(err) == codes.DeadlineExceeded)
	}
	return err
}

func (r *voter) conn() (*grpc.ClientConn, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errClosed
	}
	if r.conns[r.at] == nil {
		conn, err := r.links.DialGRPC(link.PlaneVotes, r.peers[r.at])
		if err != nil {
			return nil, err
		}
		r.conns[r.at] = conn
	}
	return r.conns[r.at], nil
}

// failed moves on from a process, once however many calls failed with it. A
// silent connection is given up: a blackhole may never break it.
func (r *voter) failed(conn *grpc.ClientConn, silent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := slices.Index(r.conns, conn)
	if at < 0 {
		return
	}
	if silent {
		r.conns[at] = nil
		_ = conn.Close() // its other calls are as old or older and fail with it
	}
	if r.at == at {
		r.at = (at + 1) % len(r.peers)
	}
}

func (r *voter) heard(process string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, p := range r.peers {
		if p.Name == process && r.conns[i] != nil {
			link.RetryNow(r.conns[i])
		}
	}
}

func (r *voter) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	var errs []error
	for i, c := range r.conns {
		if c != nil {
			errs = append(errs, c.Close())
			r.conns[i] = nil
		}
	}
	return errors.Join(errs...)
}
