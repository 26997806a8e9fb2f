package mux

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/policy"
	"github.com/headlease/headlease/region/lessor/run"
)

// Defaults.
const (
	// DefaultHold is how long a client's stream waits without a leader.
	DefaultHold = 1500 * time.Millisecond
	// DefaultSilence is how long nothing may be heard from the leader on a mux
	// before it counts as broken; it is asked five times in that time.
	DefaultSilence = 1500 * time.Millisecond
	// maxClients of one server.
	maxClients = 1 << 16
	// look is how often the leadership is looked at if nothing says that it moved.
	look = 100 * time.Millisecond
	// minRetry and maxRetry are between two tries to reach one leader.
	minRetry = 10 * time.Millisecond
	maxRetry = 200 * time.Millisecond
	// endsAtOnce clients are told that their streams end, and then no more for
	// endsPause: so they come back one after the other.
	endsAtOnce = 64
	endsPause  = 5 * time.Millisecond
)

// Config of an Edge. Server, Leader, Shell, Conn and Prove are needed.
type Config struct {
	// Server is this one's name.
	Server string
	// Leader returns the leader as this server knows it, and whether it is this
	// one and ready. It is cheap.
	Leader func() (name string, ready bool)
	// Shell is the lessor's, of this process.
	Shell *run.Shell
	// Conn returns the connection for the mux to another server of the region. It
	// must not wait.
	Conn func(server string) (*grpc.ClientConn, error)
	// Prove checks who may speak for a session, when this server leads.
	Prove Prove
	// Hold and Silence: see the defaults.
	Hold, Silence time.Duration
	Registerer    prometheus.Registerer
	Logger        *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Hold == 0 {
		c.Hold = DefaultHold
	}
	if c.Silence == 0 {
		c.Silence = DefaultSilence
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Edge has the client streams of one server, and the way to the leader for all
// of them. It is safe for concurrent use.
type Edge struct {
	cfg    Config
	wake   chan struct{}
	work   sync.WaitGroup
	metric *metrics

	mu      sync.Mutex
	closed  bool
	up      upstream // nil: none at present
	last    uint64
	clients map[*Client]struct{}
	// orphans are clients without a leader, since when.
	orphans map[*Client]time.Time
}

// NewEdge returns an Edge without clients.
func NewEdge(cfg Config) *Edge {
	e := &Edge{cfg: cfg.withDefaults(), wake: make(chan struct{}, 1), clients: map[*Client]struct{}{}, orphans: map[*Client]time.Time{}}
	e.metric = newMetrics(cfg.Registerer, e)
	return e
}

// LeaderChanged makes the Edge look at the leadership now. It does not wait.
func (e *Edge) LeaderChanged() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// Term of the leader that the clients' streams go to; 0 while there is none.
func (e *Edge) Term() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.up == nil {
		return 0
	}
	return e.up.term()
}

// Open takes a client's stream. The caller closes it.
func (e *Edge) Open(caller policy.Caller) (*Client, error) {
	c := &Client{edge: e, caller: caller, queue: run.NewQueue(), sessions: map[string]*said{}}
	e.mu.Lock()
	switch {
	case e.closed:
		e.mu.Unlock()
		return nil, errStops
	case len(e.clients) >= maxClients:
		e.mu.Unlock()
		return nil, overloaded("this server has %d client streams; attach to another one", maxClients)
	}
	e.last++
	c.id = e.last
	e.clients[c] = struct{}{}
	up := e.up
	e.mu.Unlock()
	if up == nil {
		e.orphan(c)
		e.LeaderChanged()
		return c, nil
	}
	e.attach(c, up)
	return c, nil
}

// attach moves a client to an upstream; false if its stream must end instead.
func (e *Edge) attach(c *Client, up upstream) bool {
	e.mu.Lock()
	delete(e.orphans, c)
	e.mu.Unlock()
	switch c.attach(up) {
	case moved:
		e.metric.attached.Inc()
	case stale:
		e.orphan(c)
	case broken:
		return false
	case kept:
	}
	return true
}

// orphan notes that a client has no leader.
func (e *Edge) orphan(c *Client) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, ok := e.clients[c]; !ok {
		return
	}
	if _, ok := e.orphans[c]; !ok {
		e.orphans[c] = time.Now()
	}
}

func (e *Edge) forget(c *Client) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.clients, c)
	delete(e.orphans, c)
}

// Run follows the leadership until ctx ends; then it ends the clients' streams.
func (e *Edge) Run(ctx context.Context) error {
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	var cur *way
	retry, next := minRetry, time.Time{}
	for {
		name, ready := e.cfg.Leader()
		if cur != nil && (cur.ended() || ready != (cur.server == e.cfg.Server) || !ready && name != "" && name != cur.server) {
			if cur.stop(); cur.used() {
				retry = minRetry
			}
			cur, next = nil, time.Now().Add(retry)
			retry = min(2*retry, maxRetry)
		}
		if cur == nil && !time.Now().Before(next) {
			switch {
			case ready:
				cur = e.lead(ctx)
			case name != "" && name != e.cfg.Server:
				cur = e.carry(ctx, name)
			}
		}
		e.expire(ctx, name)
		var over <-chan struct{}
		var again <-chan time.Time
		if cur != nil {
			over = cur.over
		} else if wait := time.Until(next); wait > 0 || e.wanted() {
			again = time.After(max(wait, minRetry))
		}
		select {
		case <-ctx.Done():
			if cur != nil {
				cur.stop()
			}
			e.finish()
			return nil
		case <-e.wake:
			next = time.Time{} // whoever leads now may be ready
		case <-over:
		case <-again:
		case <-ticker.C:
		}
	}
}

// wanted: clients wait for a leader.
func (e *Edge) wanted() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.orphans) > 0
}

// way is an upstream in use, or on its way to be.
type way struct {
	server string
	over   <-chan struct{} // closed when it is of no use any more
	stop   func()          // ends it and waits
	used   func() bool     // it was good for something
}

func (w *way) ended() bool {
	select {
	case <-w.over:
		return true
	default:
		return false
	}
}

// lead serves the clients here; nil if this server is not ready after all.
func (e *Edge) lead(ctx context.Context) *way {
	term, over := e.cfg.Shell.Leads()
	if over == nil {
		return nil
	}
	l := &local{edge: e, t: term, clients: map[*Client]*served{}}
	e.use(ctx, l)
	return &way{server: e.cfg.Server, over: over, used: func() bool { return true }, stop: func() {
		l.finish()
		e.leave(l)
	}}
}

// use gives all clients to an upstream.
func (e *Edge) use(ctx context.Context, up upstream) {
	e.mu.Lock()
	e.up = up
	clients := e.snapshot()
	e.mu.Unlock()
	var lost []*Client
	for _, c := range clients {
		if !e.attach(c, up) {
			lost = append(lost, c)
		}
	}
	if len(lost) > 0 {
		e.cfg.Logger.Info("the stream to the leader broke within its term; the clients' streams end", "term", up.term(), "streams", len(lost))
		e.endAll(ctx, lost, errBroken)
	}
}

func (e *Edge) snapshot() []*Client {
	out := make([]*Client, 0, len(e.clients))
	for c := range e.clients {
		out = append(out, c)
	}
	return out
}

// leave takes all clients off an upstream that is over.
func (e *Edge) leave(up upstream) {
	e.mu.Lock()
	if e.up == up {
		e.up = nil
	}
	clients := e.snapshot()
	e.mu.Unlock()
	for _, c := range clients {
		c.leave(up)
	}
}

// expire tells the clients that have waited for a leader long enough.
func (e *Edge) expire(ctx context.Context, leader string) {
	var late []*Client
	before := time.Now().Add(-e.cfg.Hold)
	e.mu.Lock()
	for c, since := range e.orphans {
		if !since.After(before) {
			late = append(late, c)
			delete(e.orphans, c)
		}
	}
	e.mu.Unlock()
	lonely := late[:0]
	for _, c := range late {
		if c.lonely() {
			lonely = append(lonely, c)
		}
	}
	if len(lonely) > 0 {
		e.endAll(ctx, lonely, notLeader(leader))
	}
}

// endAll ends streams in a goroutine of its own, a few at a time.
func (e *Edge) endAll(ctx context.Context, clients []*Client, err error) {
	e.metric.ended.Add(float64(len(clients)))
	e.work.Go(func() {
		for i, c := range clients {
			if i%endsAtOnce == endsAtOnce-1 {
				select {
				case <-ctx.Done():
				case <-time.After(endsPause):
				}
			}
			c.refuse(err)
		}
	})
}

// finish ends all clients' streams.
func (e *Edge) finish() {
	e.mu.Lock()
	e.closed = true
	clients := e.snapshot()
	e.mu.Unlock()
	for _, c := range clients {
		c.refuse(errStops)
	}
	e.work.Wait()
}
