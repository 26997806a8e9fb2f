package region

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/callstream"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// peers are the other processes of the cluster file, and the connections to
// the servers of the own region. Safe for concurrent use.
type peers struct {
	links  *link.Links
	region string
	dial   []grpc.DialOption // of the API plane

	// missed is told that a name was asked for that the file does not have.
	missed func()

	mu     sync.Mutex
	file   clusterfile.File
	closed bool
	conns  map[connKey]*grpc.ClientConn
}

type connKey struct {
	plane  link.Plane
	server string
	mux    bool
}

func newPeers(links *link.Links, file clusterfile.File, region string, dial []grpc.DialOption) *peers {
	return &peers{links: links, file: file, region: region, dial: dial, conns: map[connKey]*grpc.ClientConn{}}
}

// current is the cluster file in force.
func (p *peers) current() clusterfile.File {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.file
}

// setFile replaces the cluster file. Connections to servers that moved or are
// gone are ended; those to the others stay.
func (p *peers) setFile(f clusterfile.File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, c := range p.conns {
		was, _ := p.file.Process(key.server)
		if now, ok := f.Process(key.server); !ok || now.Region != was.Region || addressOf(now, key.plane) != addressOf(was, key.plane) {
			_ = c.Close()
			delete(p.conns, key)
		}
	}
	p.file = f
}

func addressOf(p clusterfile.Process, plane link.Plane) string {
	if plane == link.PlaneVotes {
		return p.Votes
	}
	return p.API
}

// server returns a server of the own region.
func (p *peers) server(name string) (clusterfile.Process, error) {
	file := p.current()
	proc, ok := p.own(file, name)
	if !ok {
		return proc, p.miss(name)
	}
	return proc, nil
}

// own finds a server of the own region in a cluster file.
func (p *peers) own(file clusterfile.File, name string) (clusterfile.Process, bool) {
	proc, ok := file.Process(name)
	return proc, ok && proc.Region == p.region
}

func (p *peers) miss(name string) error {
	if p.missed != nil {
		p.missed()
	}
	return fmt.Errorf("server %q is not in the cluster file under region %s; add it there", name, p.region)
}

func peerOf(p clusterfile.Process, address string) link.Peer {
	return link.Peer{Name: p.Name, Region: p.Region, Role: pki.Role(p.Role), Address: address}
}

// raft tells whom a name of Raft's configuration means.
func (p *peers) raft(name string) (link.Peer, error) {
	proc, err := p.server(name)
	if err != nil {
		return link.Peer{}, err
	}
	return peerOf(proc, proc.Raft), nil
}

// gossip tells whom a gossip name or address means.
func (p *peers) gossip(name, address string) (link.Peer, bool) {
	for _, proc := range p.current().Processes() {
		if proc.Name == name || (name == "" && proc.Gossip == address) {
			return peerOf(proc, proc.Gossip), true
		}
	}
	return link.Peer{}, false
}

// voters are the remote voters with the processes that speak for them.
func (p *peers) voters() map[string][]link.Peer {
	out := map[string][]link.Peer{}
	for _, proc := range p.current().Processes() {
		if proc.Region != p.region {
			out[proc.Voter()] = append(out[proc.Voter()], peerOf(proc, proc.Votes))
		}
	}
	return out
}

// addresses are the API addresses of a region.
func (p *peers) addresses(region string) []string {
	var out []string
	for _, proc := range p.current().RegionProcesses(region) {
		out = append(out, proc.API)
	}
	return out
}

// conn returns the connection to a server of the own region; it does not wait.
func (p *peers) conn(plane link.Plane, server string) (*grpc.ClientConn, error) {
	return p.dialled(connKey{plane: plane, server: server})
}

// mux is a connection of its own to the votes port, for the clients' streams: a
// leadership check waits for nobody's keepalives.
func (p *peers) mux(server string) (*grpc.ClientConn, error) {
	return p.dialled(connKey{plane: link.PlaneVotes, server: server, mux: true})
}

func (p *peers) dialled(key connKey) (*grpc.ClientConn, error) {
	c, found, err := p.dialKnown(key)
	if !found {
		return nil, p.miss(key.server)
	}
	return c, err
}

// dialKnown returns a connection to a server that the cluster file has.
func (p *peers) dialKnown(key connKey) (c *grpc.ClientConn, found bool, err error) {
	// The address is looked up under the lock under which the connection is kept:
	// setFile ends those that it finds.
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.conns[key]; c != nil {
		return c, true, nil
	}
	if p.closed {
		return nil, true, link.ErrClosed
	}
	proc, ok := p.own(p.file, key.server)
	if !ok {
		return nil, false, nil
	}
	options := p.dial
	switch {
	case key.plane == link.PlaneVotes:
		options = nil
	case len(options) == 0: // not traced
		options = []grpc.DialOption{callstream.DialOption(callstream.WorkerMethods()...)}
	}
	if c, err = p.links.DialGRPC(key.plane, peerOf(proc, addressOf(proc, key.plane)), options...); err == nil {
		p.conns[key] = c
	}
	return c, true, err
}

// AskTerm asks a server of the region for its Raft term, for the leadership
// check; on the votes plane, which no client's load reaches.
func (p *peers) AskTerm(ctx context.Context, server string) (*pb.CurrentTermResponse, error) {
	c, err := p.conn(link.PlaneVotes, server)
	if err != nil {
		return nil, err
	}
	return pb.NewPeerServiceClient(c).CurrentTerm(ctx, &pb.CurrentTermRequest{})
}

// AskProgress asks a server of the region how far it is, with the leader's
// hints.
func (p *peers) AskProgress(ctx context.Context, server string, req *pb.CurrentTermRequest) (*pb.CurrentTermResponse, error) {
	c, err := p.conn(link.PlaneVotes, server)
	if err != nil {
		return nil, err
	}
	return pb.NewPeerServiceClient(c).CurrentTerm(ctx, req)
}

// heard resets the back-off of connections to a process heard by gossip [F50].
func (p *peers) heard(process string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, c := range p.conns {
		if key.server == process {
			link.RetryNow(c)
		}
	}
}

func (p *peers) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	var errs []error
	for _, c := range p.conns {
		errs = append(errs, c.Close())
	}
	clear(p.conns)
	return errors.Join(errs...)
}
