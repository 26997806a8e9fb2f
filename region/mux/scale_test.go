package mux_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

var sessionsFlag = flag.Int("mux.sessions", 1200, "sessions of the scale test")

const (
	scaleTTL = 10 * time.Second
	// perConn sessions share a connection and its stream.
	perConn = 20
)

// fleet is many clients, of many connections over all servers of a region. It
// knows what each session was told.
type fleet struct {
	t   *testing.T
	w   *world
	ctx context.Context

	mu    sync.Mutex
	lost  []string       // live sessions that were told to have ended
	woken map[string]int // grants told, by session and request
	acks  int
	ends  int // streams that ended without being closed
	rng   *rand.Rand
}

// member is one session of a connection.
type member struct {
	id      string
	secret  []byte
	seq     uint64
	request uint64
	held    map[string]uint64 // resource to token
	closed  bool
}

// conn is one connection with its sessions; its goroutine owns them.
type conn struct {
	f       *fleet
	server  int
	cc      *grpc.ClientConn
	members map[string]*member
	// ask runs a function between two messages.
	ask chan func()
}

func newFleet(t *testing.T, w *world, ctx context.Context) *fleet {
	return &fleet{t: t, w: w, ctx: ctx, woken: map[string]int{}, rng: rand.New(rand.NewPCG(1, 2))}
}

func (f *fleet) random(n int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.rng.IntN(n)
}

// connect starts a connection with sessions of its own.
func (f *fleet) connect(server int) *conn {
	c := &conn{f: f, server: server, members: map[string]*member{}, ask: make(chan func())}
	c.dial()
	for range perConn {
		c.open()
	}
	return c
}

func (c *conn) dial() {
	if c.cc != nil {
		_ = c.cc.Close()
	}
	cc, err := c.f.w.network.Links("c").DialGRPC(link.PlaneAPI, link.Peer{Address: c.f.w.region.Server(c.server).Name()})
	if err != nil {
		c.f.t.Error(err)
	}
	c.cc = cc
}

// call repeats a call, on one server after the other, until it is answered.
func (c *conn) call(f func(ctx context.Context, cc *grpc.ClientConn) error) {
	for c.f.ctx.Err() == nil {
		ctx, cancel := context.WithTimeout(c.f.ctx, time.Second)
		err := f(ctx, c.cc)
		cancel()
		if err == nil {
			return
		}
		time.Sleep(time.Duration(20+c.f.random(60)) * time.Millisecond) // virtual
		c.server = (c.server + 1) % 3
		c.dial()
	}
}

func (c *conn) open() *member {
	m := &member{held: map[string]uint64{}}
	c.call(func(ctx context.Context, cc *grpc.ClientConn) error {
		s, err := pb.NewSessionServiceClient(cc).OpenSession(ctx, &pb.OpenSessionRequest{TtlMs: scaleTTL.Milliseconds()})
		m.id, m.secret = s.GetSessionId(), s.GetSecret()
		return err
	})
	c.members[m.id] = m
	return m
}

// acquire takes or queues for a lock.
func (c *conn) acquire(m *member, resource string) {
	m.request++
	c.call(func(ctx context.Context, cc *grpc.ClientConn) error {
		res, err := pb.NewLeaseServiceClient(cc).Acquire(ctx, &pb.AcquireRequest{
			SessionId: m.id, Secret: m.secret, RequestId: m.request, LowestOpenRequest: 1, Resource: resource, Wait: true,
		})
		if g := res.GetGranted(); g != nil {
			m.held[resource] = g.GetToken()
		}
		return err
	})
}

// redeploy closes all sessions of the connection and opens as many.
func (c *conn) redeploy() {
	for _, id := range slices.Sorted(maps.Keys(c.members)) {
		m := c.members[id]
		m.closed = true
		c.call(func(ctx context.Context, cc *grpc.ClientConn) error {
			_, err := pb.NewSessionServiceClient(cc).CloseSession(ctx, &pb.CloseSessionRequest{SessionId: m.id, Secret: m.secret})
			if status.Code(err) == codes.NotFound {
				return nil // the answer to the first try was lost
			}
			return err
		})
		delete(c.members, id)
		c.open()
	}
}

// run keeps the sessions alive until the fleet ends.
func (c *conn) run() {
	for c.f.ctx.Err() == nil {
		c.attach()
		if c.f.ctx.Err() != nil {
			break
		}
		c.f.mu.Lock()
		c.f.ends++
		c.f.mu.Unlock()
		time.Sleep(time.Duration(10+c.f.random(90)) * time.Millisecond) // virtual
		c.server = (c.server + 1) % 3
		c.dial()
	}
	_ = c.cc.Close()
}

// attach runs one stream until it ends.
func (c *conn) attach() {
	ctx, cancel := context.WithCancel(c.f.ctx)
	defer cancel()
	a, err := pb.NewSessionServiceClient(c.cc).Attach(ctx)
	if err != nil {
		return
	}
	messages := make(chan *pb.AttachResponse, 64)
	go func() {
		defer close(messages)
		for {
			m, err := a.Recv()
			if err != nil {
				return
			}
			select {
			case messages <- m:
			case <-ctx.Done():
				return
			}
		}
	}()
	tick := time.NewTicker(scaleTTL / 3)
	defer tick.Stop()
	c.keepalives(a)
	for {
		select {
		case m, ok := <-messages:
			if !ok {
				return
			}
			if c.take(m) {
				c.keepalives(a) // confirm
			}
		case f := <-c.ask:
			f()
			c.keepalives(a)
		case <-tick.C:
			c.keepalives(a)
		case <-ctx.Done():
			return
		}
	}
}

func (c *conn) keepalives(a grpc.BidiStreamingClient[pb.AttachRequest, pb.AttachResponse]) {
	for _, m := range c.members {
		m.seq++
		hash := uint64(0)
		for resource, token := range m.held {
			hash += validity.TokenHash(resource, fence.Token(token))
		}
		if a.Send(&pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: &pb.Keepalive{
			SessionId: m.id, Secret: m.secret, Sequence: m.seq, TokensHash: hash,
		}}}) != nil {
			return
		}
	}
}

// take notes what a session is told; true if there is something to confirm.
func (c *conn) take(m *pb.AttachResponse) (confirm bool) {
	f := c.f
	f.mu.Lock()
	defer f.mu.Unlock()
	switch k := m.GetKind().(type) {
	case *pb.AttachResponse_Ack:
		f.acks++
		if s := c.members[k.Ack.GetSessionId()]; s != nil && k.Ack.GetComplete() {
			clear(s.held)
			for _, h := range k.Ack.GetHeld() {
				s.held[h.GetResource()] = h.GetToken()
				confirm = confirm || h.GetUntil() != 0
			}
		}
	case *pb.AttachResponse_Grant:
		if s := c.members[k.Grant.GetSessionId()]; s != nil {
			s.held[k.Grant.GetHeld().GetResource()] = k.Grant.GetHeld().GetToken()
			f.woken[fmt.Sprint(s.id, "/", k.Grant.GetRequestId())]++
			return true
		}
	case *pb.AttachResponse_Withdrawal:
		if s := c.members[k.Withdrawal.GetSessionId()]; s != nil {
			delete(s.held, k.Withdrawal.GetResource())
		}
	case *pb.AttachResponse_Ended:
		if s := c.members[k.Ended.GetSessionId()]; s != nil && !s.closed {
			f.lost = append(f.lost, s.id)
		}
	}
	return confirm
}

// TestF41TheFleetSurvives a leader change, a rolling restart of all servers and a
// redeployment of all clients within 5 s: no live session is lost, and nobody is
// woken twice for one request. With -mux.sessions=20000 it is the size aimed at.
func TestF41TheFleetSurvives(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		ctx, cancel := context.WithCancel(t.Context())
		f := newFleet(t, w, ctx)
		conns := make([]*conn, max(3, *sessionsFlag/perConn))
		var opened, running sync.WaitGroup
		for i := range conns {
			opened.Go(func() { conns[i] = f.connect(i % 3) })
		}
		opened.Wait()
		for _, c := range conns {
			running.Go(c.run)
		}
		settle := func(d time.Duration) {
			time.Sleep(d) // virtual
			synctest.Wait()
		}
		// each runs a function in all connections at once, over a while.
		each := func(spread time.Duration, do func(i int, c *conn)) {
			var all sync.WaitGroup
			for i, c := range conns {
				all.Go(func() {
					time.Sleep(spread * time.Duration(i) / time.Duration(len(conns))) // virtual
					done := make(chan struct{})
					c.ask <- func() { do(i, c); close(done) }
					<-done
				})
			}
			all.Wait()
		}
		alive := func(what string) {
			t.Helper()
			f.mu.Lock()
			defer f.mu.Unlock()
			if len(f.lost) > 0 {
				t.Fatalf("%s: %d live sessions were lost", what, len(f.lost))
			}
			view := w.region.View()
			if got, want := view.Counts().Sessions, len(conns)*perConn; got != want {
				t.Fatalf("%s: the region has %d sessions, %d live", what, got, want)
			}
		}
		// A lock per connection: its first session holds it, one of the next
		// connection waits.
		each(time.Second, func(i int, c *conn) {
			first := c.members[slices.Sorted(maps.Keys(c.members))[0]]
			c.acquire(first, fmt.Sprintf("lock/%d", i))
		})
		each(time.Second, func(i int, c *conn) {
			second := c.members[slices.Sorted(maps.Keys(c.members))[1]]
			c.acquire(second, fmt.Sprintf("lock/%d", (i+1)%len(conns)))
		})
		settle(scaleTTL)
		alive("at rest")

		w.region.Elect(1)
		settle(2 * scaleTTL)
		alive("after a leader change")
		if f.ends != 0 {
			t.Errorf("a leader change ended %d of %d streams", f.ends, len(conns))
		}

		for i := range 3 {
			if i == 1 { // the leader hands over before it stops
				w.region.Elect(2)
			}
			w.region.Server(i).Kill()
			if i == 2 { // it leads, and stops without a word
				settle(time.Second)
				w.region.Elect(0)
			}
			settle(2 * time.Second)
			w.region.Server(i).Start()
			settle(3 * time.Second)
		}
		settle(scaleTTL)
		alive("after a rolling restart")

		each(5*time.Second, func(_ int, c *conn) { c.redeploy() })
		settle(2 * scaleTTL)
		alive("after a redeployment")
		if n := w.region.View().Counts(); n.Leases != 0 || n.Waiters != 0 {
			t.Errorf("of the sessions that are gone %d leases and %d waiters are left", n.Leases, n.Waiters)
		}
		for request, n := range f.woken {
			if n > 1 {
				t.Errorf("%s was woken %d times", request, n)
			}
		}
		t.Logf("%d sessions on %d connections; %d acks; %d streams ended by restarts; %d waiters woken",
			len(conns)*perConn, len(conns), f.acks, f.ends, len(f.woken))
		if len(f.woken) == 0 {
			t.Error("no waiter was woken: nothing is shown")
		}
		cancel()
		running.Wait()
	})
}
