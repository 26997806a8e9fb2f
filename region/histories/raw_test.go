package histories

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// rawClient calls the API as no client should and every client may: it repeats
// requests, also late and at two servers at once, forgets what it holds, falls
// silent, releases what is not its own any more.
type rawClient struct {
	w    *world
	name string
	rng  *rand.Rand
	ttl  time.Duration
	// deaf: it never says what it knows, so its offers are never confirmed.
	deaf  bool
	locks []target

	mu    sync.Mutex
	conns map[string]*grpc.ClientConn
	late  sync.WaitGroup
}

func newRaw(w *world, name string, locks []target, deaf bool) *rawClient {
	rng := rand.New(rand.NewPCG(w.seed, uint64(len(name))<<16+uint64(name[len(name)-1])))
	return &rawClient{
		w: w, name: name, rng: rng, ttl: time.Duration(800+rng.IntN(1600)) * time.Millisecond, deaf: deaf, locks: locks,
		conns: map[string]*grpc.ClientConn{},
	}
}

// conn returns the connection to a server.
func (c *rawClient) conn(to string) *grpc.ClientConn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cc := c.conns[to]; cc != nil {
		return cc
	}
	cc, err := dialGRPC(c.w.net, c.name, to,
		grpc.WithChainUnaryInterceptor(c.w.recorder.Unary(c.name)), grpc.WithChainStreamInterceptor(c.w.recorder.Stream(c.name)))
	if err != nil {
		panic(err)
	}
	c.conns[to] = cc
	return cc
}

func (c *rawClient) any() string { return c.w.servers[c.rng.IntN(3)].name }

func (c *rawClient) chance(percent int) bool { return c.rng.IntN(100) < percent }

func (c *rawClient) upTo(d time.Duration) time.Duration { return time.Duration(c.rng.Int64N(int64(d))) }

// call makes a call with a deadline of its own.
func call[R any](d time.Duration, f func(ctx context.Context) (R, error)) (R, error) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return f(ctx)
}

// rawSession is a session and its stream.
type rawSession struct {
	c      *rawClient
	id     string
	secret []byte
	// lazy: it stays with the first server whatever happens there.
	lazy bool
	at   string
	stop context.CancelFunc
	done sync.WaitGroup

	mu     sync.Mutex
	named  map[string]uint64
	grants map[uint64]held // by request
	news   chan struct{}
	over   bool
	open   map[uint64]bool
	last   uint64
}

// held is what a request was granted.
type held struct {
	resource string
	token    uint64
}

// run works until ctx ends. Then it leaves its session to its fate.
func (c *rawClient) run(ctx context.Context) {
	for ctx.Err() == nil {
		s := c.openSession(ctx)
		if s == nil {
			continue
		}
		for ctx.Err() == nil && !s.isOver() {
			s.step(ctx)
			if c.deaf {
				continue
			}
			if c.chance(2) { // silence: the session is left to expire
				break
			}
			if c.chance(2) {
				_, _ = call(time.Second, func(ctx context.Context) (*pb.CloseSessionResponse, error) {
					return pb.NewSessionServiceClient(c.conn(c.any())).CloseSession(ctx, &pb.CloseSessionRequest{SessionId: s.id, Secret: s.secret})
				})
				break
			}
		}
		s.stop()
		s.done.Wait()
	}
	c.close()
}

func (c *rawClient) openSession(ctx context.Context) *rawSession {
	resp, err := call(time.Second, func(ctx context.Context) (*pb.OpenSessionResponse, error) {
		return pb.NewSessionServiceClient(c.conn(c.any())).OpenSession(ctx, &pb.OpenSessionRequest{TtlMs: c.ttl.Milliseconds()})
	})
	if err != nil {
		pause(ctx, 20*time.Millisecond)
		return nil
	}
	s := &rawSession{
		c: c, id: resp.GetSessionId(), secret: resp.GetSecret(), lazy: c.chance(35), at: c.any(),
		named: map[string]uint64{}, grants: map[uint64]held{}, news: make(chan struct{}, 1), open: map[uint64]bool{},
	}
	attach, stop := context.WithCancel(ctx)
	s.stop = stop
	s.done.Go(func() { s.attach(attach) })
	return s
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func (s *rawSession) isOver() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.over
}

// attach keeps the session alive over one stream after the other.
func (s *rawSession) attach(ctx context.Context) {
	at := s.at
	for ctx.Err() == nil && !s.isOver() {
		s.stream(ctx, at)
		if !s.lazy {
			at = s.c.w.servers[int(time.Now().UnixNano()/1e6)%3].name
		}
		pause(ctx, 10*time.Millisecond)
	}
}

func (s *rawSession) stream(ctx context.Context, at string) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st, err := pb.NewSessionServiceClient(s.c.conn(at)).Attach(ctx)
	if err != nil {
		return
	}
	s.mu.Lock()
	s.named = map[string]uint64{}
	s.mu.Unlock()
	acked := make(chan struct{}, 1)
	confirm := make(chan struct{}, 1)
	s.done.Go(func() { // ends with the stream
		defer cancel()
		for {
			m, err := st.Recv()
			if err != nil {
				return
			}
			if s.take(m) {
				wake.Up(confirm)
			}
			if m.GetAck() != nil {
				wake.Up(acked)
			}
		}
	})
	silent := time.Now()
	for seq := uint64(1); ; seq++ {
		if err := st.Send(&pb.AttachRequest{Kind: &pb.AttachRequest_Keepalive{Keepalive: &pb.Keepalive{
			SessionId: s.id, Secret: s.secret, Sequence: seq, TokensHash: s.hash(), LowestOpenRequest: s.lowest(),
		}}}); err != nil {
			return
		}
		t := time.NewTimer(s.c.ttl / 4)
		for again := true; again; {
			select {
			case <-acked:
				silent = time.Now()
			case <-confirm:
				again = false
			case <-t.C:
				again = false
			case <-ctx.Done():
				t.Stop()
				return
			}
		}
		t.Stop()
		if !s.lazy && time.Since(silent) > s.c.ttl/2 {
			return
		}
	}
}

// take follows the stream, and says whether a keepalive should confirm
// something.
func (s *rawSession) take(m *pb.AttachResponse) (confirm bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch k := m.GetKind().(type) {
	case *pb.AttachResponse_Ack:
		if k.Ack.GetComplete() {
			s.named = map[string]uint64{}
		}
		for _, h := range k.Ack.GetHeld() {
			s.named[h.GetResource()] = h.GetToken()
			confirm = confirm || h.GetUntil() != 0
		}
	case *pb.AttachResponse_Grant:
		s.named[k.Grant.GetHeld().GetResource()] = k.Grant.GetHeld().GetToken()
		s.grants[k.Grant.GetRequestId()] = held{k.Grant.GetHeld().GetResource(), k.Grant.GetHeld().GetToken()}
		wake.Up(s.news)
		confirm = k.Grant.GetHeld().GetUntil() != 0
	case *pb.AttachResponse_Withdrawal:
		if s.named[k.Withdrawal.GetResource()] == k.Withdrawal.GetToken() {
			delete(s.named, k.Withdrawal.GetResource())
		}
	case *pb.AttachResponse_Ended:
		s.over = true
		wake.Up(s.news)
	}
	return confirm && !s.c.deaf
}

func (s *rawSession) hash() uint64 {
	if s.c.deaf {
		return 1
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var sum uint64
	for resource, token := range s.named {
		sum += validity.TokenHash(resource, fence.Token(token))
	}
	return sum
}

func (s *rawSession) lowest() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	lowest := s.last + 1
	for id := range s.open {
		lowest = min(lowest, id)
	}
	return lowest
}

// step is one try for one lock.
func (s *rawSession) step(ctx context.Context) {
	c := s.c
	lock := c.locks[c.rng.IntN(len(c.locks))]
	s.mu.Lock()
	s.last++
	id := s.last
	s.open[id] = true
	s.mu.Unlock()
	wait := c.deaf || c.chance(70)
	req := &pb.AcquireRequest{SessionId: s.id, Secret: s.secret, RequestId: id, LowestOpenRequest: s.lowest(), Resource: lock.name, Slots: lock.slots, Wait: wait}
	if lock.slots > 0 && c.chance(15) { // one slot by its name
		req.Resource, req.Slots = lock.slot(c.rng.IntN(int(lock.slots))), 0
	}
	if c.chance(40) {
		req.Value = fmt.Appendf(nil, "%s/%d", c.name, id)
	}
	if c.chance(15) {
		req.LockDelayMs = c.upTo(400 * time.Millisecond).Milliseconds()
	}
	if !c.deaf && c.chance(15) { // the same at once, elsewhere
		s.later(c.upTo(20*time.Millisecond), func(at string) { _, _ = s.acquire(at, req) })
	}
	var got held
	queued, known := false, false
	for range 3 {
		resp, err := s.acquire(c.any(), req)
		if known = err == nil; known {
			got, queued = held{resp.GetGranted().GetResource(), resp.GetGranted().GetToken()}, resp.GetQueued() != nil
			break
		}
		if ctx.Err() != nil || s.isOver() {
			return
		}
		pause(ctx, c.upTo(50*time.Millisecond))
	}
	if queued {
		patience := c.upTo(2 * time.Second)
		if c.deaf {
			patience = 8 * time.Second
		}
		got = s.granted(ctx, id, patience)
	}
	if c.deaf && queued {
		s.forget(id) // an offer that nobody confirms or releases
		pause(ctx, time.Second)
		return
	}
	if got.token == 0 && (queued || !known) && ctx.Err() == nil {
		got = s.cancel(id)
	}
	if got.token != 0 {
		pause(ctx, c.upTo(30*time.Millisecond))
		if c.chance(2) {
			s.forget(id) // held until the session's end
			return
		}
		s.release(ctx, got)
		if c.chance(15) {
			s.later(c.upTo(1500*time.Millisecond), func(at string) { _ = s.tryRelease(at, got) })
		}
	}
	s.forget(id)
	if c.chance(25) { // a late copy
		s.later(c.upTo(2*time.Second), func(at string) { _, _ = s.acquire(at, req) })
	}
	pause(ctx, c.upTo(40*time.Millisecond))
}

func (s *rawSession) forget(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, id)
}

// later does something at some server, after a while.
func (s *rawSession) later(d time.Duration, f func(at string)) {
	at := s.c.any()
	s.c.late.Go(func() {
		time.Sleep(d) // virtual
		f(at)
	})
}

func (s *rawSession) acquire(at string, req *pb.AcquireRequest) (*pb.AcquireResponse, error) {
	return call(700*time.Millisecond, func(ctx context.Context) (*pb.AcquireResponse, error) {
		return pb.NewLeaseServiceClient(s.c.conn(at)).Acquire(ctx, req)
	})
}

// granted waits for the hand-over of a request.
func (s *rawSession) granted(ctx context.Context, id uint64, patience time.Duration) held {
	late := time.After(patience)
	for {
		s.mu.Lock()
		got, over := s.grants[id], s.over
		s.mu.Unlock()
		if got.token != 0 || over {
			return got
		}
		select {
		case <-s.news:
		case <-late:
			return held{}
		case <-ctx.Done():
			return held{}
		}
	}
}

// cancel gives a request up; it returns what was granted meanwhile.
func (s *rawSession) cancel(id uint64) held {
	for range 3 {
		resp, err := call(700*time.Millisecond, func(ctx context.Context) (*pb.CancelAcquireResponse, error) {
			return pb.NewLeaseServiceClient(s.c.conn(s.c.any())).CancelAcquire(ctx, &pb.CancelAcquireRequest{SessionId: s.id, Secret: s.secret, RequestId: id})
		})
		if err == nil {
			return held{resp.GetResource(), resp.GetGrantedToken()}
		}
	}
	return held{}
}

func (s *rawSession) tryRelease(at string, h held) error {
	_, err := call(700*time.Millisecond, func(ctx context.Context) (*pb.ReleaseResponse, error) {
		return pb.NewLeaseServiceClient(s.c.conn(at)).Release(ctx, &pb.ReleaseRequest{SessionId: s.id, Secret: s.secret, Resource: h.resource, Token: h.token})
	})
	return err
}

func (s *rawSession) release(ctx context.Context, h held) {
	for range 4 {
		if s.tryRelease(s.c.any(), h) == nil || ctx.Err() != nil {
			return
		}
	}
}

// read asks who holds what, at any server, until ctx ends.
func (c *rawClient) read(ctx context.Context) {
	for ctx.Err() == nil {
		names := c.locks[c.rng.IntN(len(c.locks))].names()
		c.get(c.any(), names[c.rng.IntN(len(names))])
		pause(ctx, c.upTo(80*time.Millisecond))
	}
	c.close()
}

func (c *rawClient) get(at, lock string) {
	_, _ = call(500*time.Millisecond, func(ctx context.Context) (*pb.GetLeaseResponse, error) {
		return pb.NewLeaseServiceClient(c.conn(at)).GetLease(ctx, &pb.GetLeaseRequest{Resource: lock})
	})
}

// close waits for what was begun, and disconnects.
func (c *rawClient) close() {
	c.late.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cc := range c.conns {
		_ = cc.Close()
	}
}
