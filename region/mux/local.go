package mux

import (
	"sync"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor/run"
)

// maxTaken bounds what one client says under one hold of the shell's lock.
const maxTaken = 256

// local is the upstream of a server that leads.
type local struct {
	edge *Edge
	t    uint64

	mu      sync.Mutex
	dead    bool
	clients map[*Client]*served
}

// served is one client of it.
type served struct {
	// busy: a goroutine passes its requests on; again: there are more.
	busy, again bool
	attendant   *attendant // of the goroutine that is busy
}

func (l *local) term() uint64 { return l.t }

// ready passes on what the client has said. One goroutine does it at a time, so
// that the order is kept.
func (l *local) ready(c *Client) {
	l.mu.Lock()
	if l.dead {
		l.mu.Unlock()
		c.leave(l)
		return
	}
	s := l.clients[c]
	if s == nil {
		s = &served{attendant: newAttendant(l.edge.cfg.Prove, c.caller)}
		l.clients[c] = s
	}
	if s.busy {
		s.again = true
		l.mu.Unlock()
		return
	}
	s.busy = true
	for more := true; more; more = s.again {
		s.again = false
		l.mu.Unlock()
		l.pass(c, s.attendant)
		l.mu.Lock()
	}
	s.busy = false
	l.mu.Unlock()
}

func (l *local) pass(c *Client, a *attendant) {
	if c.over() {
		if a.stream != nil {
			a.stream.Close()
		}
		l.drop(c)
		return
	}
	if a.stream == nil {
		stream, err := l.edge.cfg.Shell.Attach(&sink{l, c})
		if err == nil && stream.Term() != l.t {
			stream.Close()
			err = run.ErrNotLeading
		}
		if err != nil {
			c.leave(l)
			return
		}
		a.stream = stream
	}
	var inputs []run.Input
	for more := true; more; {
		var reqs []*pb.AttachRequest
		reqs, more = c.take(l, nil, maxTaken)
		inputs = inputs[:0]
		for _, req := range reqs {
			in, ok, err := a.admit(req)
			if err != nil {
				c.end(err)
				a.stream.Close()
				l.drop(c)
				return
			}
			if ok {
				inputs = append(inputs, in)
			}
		}
		if len(inputs) > 0 {
			l.edge.cfg.Shell.Take(inputs)
		}
	}
}

func (l *local) drop(c *Client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.clients, c)
}

// finish: no client may use it any more.
func (l *local) finish() {
	l.mu.Lock()
	l.dead = true
	l.clients = map[*Client]*served{}
	l.mu.Unlock()
}

// sink passes the messages of the shell on to a client.
type sink struct {
	local  *local
	client *Client
}

func (s *sink) Push(m *pb.AttachResponse) bool { return s.client.deliver(s.local, m) }

func (s *sink) End(err error) {
	over, told := ofShell(err)
	if over {
		s.client.leave(s.local)
		return
	}
	s.client.end(told)
	s.local.drop(s.client)
}
