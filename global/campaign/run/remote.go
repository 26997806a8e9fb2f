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
			v.voters[id] = &voter{id: id, links: v.links, peers: slices.Clone(peers), conns: make([]*connection, len(peers)), doubted: map[*connection]struct{}{}}
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
	conns  []*connection
	// last is the connection that was the last to answer.
	last *connection
	// doubted connections get no calls of their own any more.
	doubted map[*connection]struct{}
}

// connection to a process.
type connection struct {
	*grpc.ClientConn
	process string
	calls   int           // under way
	took    time.Duration // the newest answer
}

// setPeers replaces the processes, of which there is at least one.
func (r *voter) setPeers(peers []link.Peer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if slices.Equal(r.peers, peers) {
		return
	}
	asked := r.peers[r.at]
	conns := make([]*connection, len(peers))
	for i, c := range r.conns {
		if j := slices.Index(peers, r.peers[i]); j >= 0 {
			conns[j] = c
		} else if c != nil {
			_ = c.Close()
		}
	}
	r.peers, r.conns, r.at = slices.Clone(peers), conns, max(0, slices.Index(peers, asked))
	if last := r.last; last != nil && !slices.Contains(conns, last) {
		r.last = nil // of a process that is gone, or doubted; either may go
		r.drop(last)
	}
}

var errClosed = errors.New("connections to the voters are closed")

func (r *voter) Prepare(ctx context.Context, req *pb.PrepareRequest) (*pb.PrepareResponse, error) {
	return call(ctx, r, func(ctx context.Context, c pb.VoteServiceClient) (*pb.PrepareResponse, error) {
		return c.Prepare(ctx, req)
	})
}

func (r *voter) Accept(ctx context.Context, req *pb.AcceptRequest) (*pb.AcceptResponse, error) {
	return call(ctx, r, func(ctx context.Context, c pb.VoteServiceClient) (*pb.AcceptResponse, error) {
		return c.Accept(ctx, req)
	})
}

func (r *voter) Configure(ctx context.Context, req *pb.ConfigureRequest) (*pb.ConfigureResponse, error) {
	return call(ctx, r, func(ctx context.Context, c pb.VoteServiceClient) (*pb.ConfigureResponse, error) {
		return c.Configure(ctx, req)
	})
}

// call asks the present process and moves on when it fails. One that stays silent
// is doubted: calls go to another process, or over a fresh connection, and beside
// it over the one that was the last to answer. A process that is far away for a while
// answers there before hand-shakes are over; one in a blackhole never does.
func call[T any](ctx context.Context, r *voter, do func(context.Context, pb.VoteServiceClient) (T, error)) (T, error) {
	type reply struct {
		of  *connection
		res T
		err error
	}
	var none T
	present, last, err := r.begin()
	if err != nil {
		return none, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	replies := make(chan reply, 2)
	ask := func(c *connection) {
		silence := time.AfterFunc(r.patience(c), func() { r.failed(c, true) })
		began := time.Now()
		res, err := do(ctx, pb.NewVoteServiceClient(c))
		silence.Stop()
		if err != nil && status.Code(err) != codes.Canceled {
			r.failed(c, status.Code(err) == codes.DeadlineExceeded)
		}
		r.end(c, time.Since(began), err)
		replies <- reply{c, res, err}
	}
	asked := 1
	go ask(present) // ended by ctx
	if last != nil {
		asked++
		go ask(last) // ended by ctx
	}
	for range asked {
		a := <-replies
		if a.err == nil {
			return a.res, nil
		}
		if a.of == present {
			err = a.err
		}
	}
	return none, err
}

// begin returns the connection to the present process, for a call, and the one that
// was the last to answer, if that is another.
func (r *voter) begin() (present, last *connection, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, nil, errClosed
	}
	if r.conns[r.at] == nil {
		peer := r.peers[r.at]
		conn, err := r.links.DialGRPC(link.PlaneVotes, peer)
		if err != nil {
			return nil, nil, err
		}
		r.conns[r.at] = &connection{ClientConn: conn, process: peer.Name}
	}
	present = r.conns[r.at]
	present.calls++
	if r.last != nil && r.last != present {
		last = r.last
		last.calls++
	}
	return present, last, nil
}

// patience is how long the connection may be silent before it is doubted.
func (r *voter) patience(c *connection) time.Duration {
	rtt, _ := r.links.RTT(c.process)
	r.mu.Lock()
	defer r.mu.Unlock()
	return max(patienceWith(rtt), 2*c.took)
}

// failed moves on from a process, once however many calls failed with it. A
// silent connection is given up for new calls: a blackhole may never break it.
func (r *voter) failed(c *connection, silent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !silent && r.last == c {
		r.last = nil // it has answered, and cannot decide
	}
	at := slices.Index(r.conns, c)
	if at < 0 {
		return
	}
	if silent {
		r.conns[at] = nil
		r.doubted[c] = struct{}{}
	}
	if r.at == at {
		r.at = (at + 1) % len(r.peers)
	}
}

// end of a call, which took so long. A doubted connection that was answered is the
// one to use again.
func (r *voter) end(c *connection, took time.Duration, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c.calls--
	if err == nil {
		c.took = took
		before := r.last
		r.last = c
		at := slices.IndexFunc(r.peers, func(p link.Peer) bool { return p.Name == c.process })
		if _, doubted := r.doubted[c]; doubted && !r.closed && at >= 0 {
			delete(r.doubted, c)
			if fresh := r.conns[at]; fresh != nil {
				r.doubted[fresh] = struct{}{}
				r.drop(fresh)
			}
			r.conns[at], r.at = c, at
		}
		if before != nil {
			r.drop(before)
		}
	}
	r.drop(c)
}

// drop closes a doubted connection that has no call under way and was not the last
// to answer. r.mu is held.
func (r *voter) drop(c *connection) {
	if _, doubted := r.doubted[c]; doubted && c.calls == 0 && c != r.last {
		delete(r.doubted, c)
		_ = c.Close()
	}
}

func (r *voter) heard(process string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, p := range r.peers {
		if p.Name == process && r.conns[i] != nil {
			link.RetryNow(r.conns[i].ClientConn)
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
	for c := range r.doubted {
		errs = append(errs, c.Close())
	}
	clear(r.doubted)
	return errors.Join(errs...)
}
