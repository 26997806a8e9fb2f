package mux

import (
	"context"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor/run"
)

const (
	// maxSessions of one client stream.
	maxSessions = 10_000
	// maxSaid bytes of what a client says of a session, the newest of which is kept.
	maxSaid = 4 << 10
)

// upstream is a way to one leader in one term.
type upstream interface {
	term() uint64
	// ready: the client has something for the leader, or has ended.
	ready(c *Client)
}

// Client is one client's Attach stream at this server. It is safe for
// concurrent use.
type Client struct {
	edge   *Edge
	id     uint64
	caller policy.Caller
	queue  *run.Queue

	mu       sync.Mutex
	ended    bool
	up       upstream // nil: none at present
	heard    uint64   // the term of the newest message passed on to the client
	sessions map[string]*said
	// batches: the client has sent one.
	batches bool
	// unsaid are the sessions of which something is to be told to up.
	unsaid []string
}

// said is the newest that the client has said of a session.
type said struct {
	keepalive *pb.AttachRequest // nil: detached
	detach    *pb.AttachRequest // to be told first
	unsaid    bool
}

// Request takes what the client says. An error ends the stream with it. What
// comes in one message goes on as one: so one leadership check covers it, and its
// acks come back together.
func (c *Client) Request(req *pb.AttachRequest) error {
	reqs := []*pb.AttachRequest{req}
	batch := req.GetBatch()
	if batch != nil {
		reqs = batch.GetRequests()
	}
	c.mu.Lock()
	c.batches = c.batches || batch != nil
	var err error
	for _, r := range reqs {
		if r.GetBatch() != nil {
			err = invalid("batch", "is in a batch; send its requests in the outer one")
		} else {
			err = c.request(r)
		}
		if err != nil {
			break // what came before it counts
		}
	}
	var up upstream
	if len(c.unsaid) > 0 {
		up = c.up
	}
	c.mu.Unlock()
	if up != nil {
		up.ready(c)
	}
	return err
}

// Batches reports whether the client takes several messages in one.
func (c *Client) Batches() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.batches
}

// request notes one thing that the client says. c.mu is held.
func (c *Client) request(req *pb.AttachRequest) error {
	if n := proto.Size(req); n > maxSaid {
		return overloaded("the request has %d bytes; at most %d are allowed, send less at once", n, maxSaid)
	}
	id := ""
	switch k := req.GetKind().(type) {
	case *pb.AttachRequest_Keepalive:
		id = k.Keepalive.GetSessionId()
	case *pb.AttachRequest_Detach:
		id = k.Detach.GetSessionId()
	case *pb.AttachRequest_Ping:
		if !c.queue.Push(&pb.AttachResponse{Kind: &pb.AttachResponse_Pong{Pong: &pb.Pong{Sequence: k.Ping.GetSequence()}}}) {
			return errSlow
		}
		return nil
	default:
		return invalid("kind", "is missing; send a keepalive, a detach, a ping, or a batch of them")
	}
	s := c.sessions[id]
	switch {
	case s != nil:
	case req.GetDetach() != nil:
		return nil // it was never attached here
	case len(c.sessions) >= maxSessions:
		return overloaded("one stream carries %d sessions at most; open another one", maxSessions)
	case c.ended:
		return nil // its end is told by Next
	default:
		s = &said{}
		c.sessions[id] = s
	}
	if req.GetDetach() != nil {
		s.keepalive, s.detach = nil, req
	} else {
		s.keepalive = req
	}
	if !s.unsaid {
		s.unsaid = true
		c.unsaid = append(c.unsaid, id)
	}
	return nil
}

// take appends up to n requests for an upstream; more says that some are left.
func (c *Client) take(up upstream, to []*pb.AttachRequest, n int) (reqs []*pb.AttachRequest, more bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.up != up || c.ended {
		return to, false
	}
	for len(c.unsaid) > 0 && n > 0 {
		id := c.unsaid[0]
		c.unsaid = c.unsaid[1:]
		s := c.sessions[id]
		if s == nil {
			continue
		}
		s.unsaid = false
		if s.detach != nil {
			to = append(to, s.detach)
			s.detach = nil
			n--
		}
		if s.keepalive == nil {
			delete(c.sessions, id)
			continue
		}
		to = append(to, s.keepalive)
		n--
	}
	if len(c.unsaid) == 0 {
		c.unsaid = nil
	}
	return to, len(c.unsaid) > 0
}

// attached is what came of moving a client to an upstream.
type attached int

const (
	moved attached = iota
	// kept: it has ended, or is on this upstream or a later one already.
	kept
	// stale: the upstream is of a term that the client has left behind.
	stale
	// broken: something of that very term may be lost; the stream must not go on
	// in it [L5].
	broken
)

// attach moves the client to another upstream and has all its sessions said
// again.
func (c *Client) attach(up upstream) attached {
	c.mu.Lock()
	switch {
	case c.ended, c.up != nil && c.up.term() >= up.term():
		c.mu.Unlock()
		return kept
	case up.term() < c.heard:
		c.mu.Unlock()
		return stale
	case up.term() == c.heard:
		c.mu.Unlock()
		return broken
	}
	c.up = up
	c.unsaid = c.unsaid[:0]
	for id, s := range c.sessions {
		if s.keepalive == nil {
			delete(c.sessions, id)
			continue
		}
		s.unsaid, s.detach = true, nil
		c.unsaid = append(c.unsaid, id)
	}
	c.mu.Unlock()
	up.ready(c)
	return moved
}

// leave takes the client off an upstream that is over.
func (c *Client) leave(up upstream) {
	c.mu.Lock()
	left := c.up == up && !c.ended
	if left {
		c.up = nil
	}
	c.mu.Unlock()
	if left {
		c.edge.orphan(c)
	}
}

// deliver passes a message of an upstream on; false if the client reads too
// slowly. What comes from an upstream that the client has left is dropped.
func (c *Client) deliver(up upstream, m *pb.AttachResponse) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.up != up || c.ended {
		return true
	}
	c.heard = up.term()
	if e := m.GetEnded(); e != nil {
		delete(c.sessions, e.GetSessionId())
	}
	return c.queue.Push(m)
}

// end ends the client's stream with err, after what is queued. It returns the
// upstream that is to be told, if any.
func (c *Client) end(err error) (up upstream) {
	c.mu.Lock()
	up, first := c.up, !c.ended
	c.ended, c.up, c.sessions, c.unsaid = true, nil, nil, nil
	c.mu.Unlock()
	c.queue.End(err)
	if !first {
		return nil
	}
	c.edge.forget(c)
	return up
}

// refuse ends the client's stream from this side of the mux.
func (c *Client) refuse(err error) {
	if up := c.end(err); up != nil {
		up.ready(c)
	}
}

// Close ends the stream from the client's side.
func (c *Client) Close() { c.refuse(errClosed) }

// Next returns the next messages for the client, in order, waiting for the
// first; after the last one, the error with which the stream is to end.
func (c *Client) Next(ctx context.Context) ([]*pb.AttachResponse, error) { return c.queue.Next(ctx) }

// Done is closed when the stream has ended; messages may be left in Next.
func (c *Client) Done() <-chan struct{} { return c.queue.Done() }

// lonely: it lives and has no upstream.
func (c *Client) lonely() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.ended && c.up == nil
}

func (c *Client) over() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}
