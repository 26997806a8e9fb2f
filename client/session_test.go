package client_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/regiontest"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// countingLinks counts what a client sends on its streams.
type countingLinks struct {
	client.Links
	messages, keepalives atomic.Int64
}

func (l *countingLinks) DialGRPC(plane link.Plane, peer link.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error) {
	return l.Links.DialGRPC(plane, peer, append(extra, grpc.WithStreamInterceptor(
		func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, s grpc.Streamer, o ...grpc.CallOption) (grpc.ClientStream, error) {
			stream, err := s(ctx, desc, cc, method, o...)
			return countingStream{stream, l}, err
		}))...)
}

type countingStream struct {
	grpc.ClientStream
	count *countingLinks
}

func (s countingStream) SendMsg(m any) error {
	s.count.messages.Add(1)
	if q, ok := m.(*pb.AttachRequest); ok {
		for _, q := range append(q.GetBatch().GetRequests(), q) {
			if q.GetKeepalive() != nil {
				s.count.keepalives.Add(1)
			}
		}
	}
	return s.ClientStream.SendMsg(m)
}

// releaseLinks counts the tries to release.
type releaseLinks struct {
	client.Links
	tries atomic.Int64
	mu    sync.Mutex
	first map[string]time.Time // by resource
}

func (l *releaseLinks) DialGRPC(plane link.Plane, peer link.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error) {
	count := grpc.WithChainUnaryInterceptor(
		func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, call grpc.UnaryInvoker, o ...grpc.CallOption) error {
			if method == pb.LeaseService_Release_FullMethodName {
				l.tries.Add(1)
				l.mu.Lock()
				if r, ok := req.(*pb.ReleaseRequest); ok && l.first[r.GetResource()].IsZero() {
					l.first[r.GetResource()] = time.Now()
				}
				l.mu.Unlock()
			}
			return call(ctx, method, req, reply, cc, o...)
		})
	return l.Links.DialGRPC(plane, peer, append([]grpc.DialOption{count}, extra...)...)
}

// What is lost with a region is given back when that is heard again, and not
// tried until then, lease by lease.
func TestLostLeasesWaitForTheirRegion(t *testing.T) {
	inWorld(t, func(w *world) {
		links := &releaseLinks{Links: w.Links("a"), first: map[string]time.Time{}}
		c := w.client("a", func(cfg *client.Config) { cfg.Links = links })
		const n = 20
		leases := make([]*client.Lease, n)
		for i := range leases {
			// Their sessions outlive the head lease by far.
			leases[i] = w.take(w.session(c, client.SessionOptions{TTL: time.Minute}), fmt.Sprint("lock/", i))
		}
		w.release(w.acquire(c, "lock/other"))
		if links.tries.Load() != 1 {
			t.Fatalf("%d tries counted of 1", links.tries.Load())
		}
		for i := range 3 {
			w.eu.Server(i).Freeze()
		}
		for _, l := range leases {
			w.lost(l, ttl)
		}
		time.Sleep(10 * time.Second) // virtual
		if tries := links.tries.Load() - 1; tries > 0 {
			t.Errorf("%d tries to release %d leases in a region that is not heard", tries, n)
		}
		for i := range 3 {
			w.eu.Server(i).Thaw()
		}
		for i := range leases {
			w.free(2*time.Second, fmt.Sprint("lock/", i))
		}
		if tries := links.tries.Load() - 1; tries != n {
			t.Errorf("%d tries for %d leases", tries, n)
		}
	})
}

// All clients lose what they hold in a lapse at the same instant, and hear a lost
// region again at the same one: they do not all give back at once.
func TestLostLeasesAreNotGivenBackAllAtOnce(t *testing.T) {
	for how, lose := range map[string]func(w *world, lost func()){
		"a lapse": func(w *world, lost func()) {
			w.eu.Lapse(true)
			lost()
			w.eu.Lapse(false)
		},
		"a region not heard": func(w *world, lost func()) {
			for i := range 3 {
				w.eu.Server(i).Freeze()
			}
			lost()
			for i := range 3 {
				w.eu.Server(i).Thaw()
			}
		},
	} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				const n = 20
				var mu sync.Mutex
				rolled := 0
				links := &releaseLinks{Links: w.Links("a"), first: map[string]time.Time{}}
				c := w.client("a", func(cfg *client.Config) {
					cfg.Links = links
					cfg.LoadDice(func(n time.Duration) time.Duration { // all twenty sides in turn
						mu.Lock()
						defer mu.Unlock()
						rolled++
						return n * time.Duration(rolled%20) / 20
					})
				})
				s := w.session(c, client.SessionOptions{TTL: time.Minute})
				leases := make([]*client.Lease, n)
				for i := range leases {
					leases[i] = w.take(s, fmt.Sprint("lock/", i))
				}
				lose(w, func() {
					for _, l := range leases {
						w.lost(l, ttl)
					}
					time.Sleep(time.Second) // virtual
				})
				for i := range leases {
					w.free(2*time.Second, fmt.Sprint("lock/", i))
				}
				links.mu.Lock()
				defer links.mu.Unlock()
				at := slices.SortedFunc(maps.Values(links.first), time.Time.Compare)
				if len(at) != n {
					t.Fatalf("%d leases were released of %d", len(at), n)
				}
				together := 0
				for i, first := 0, 0; i < n; i++ {
					for at[i].Sub(at[first]) >= 50*time.Millisecond {
						first++
					}
					together = max(together, i-first+1)
				}
				if spread := at[n-1].Sub(at[0]); together > n/4 || spread > time.Second {
					t.Errorf("%d of %d releases within 50ms, all within %v", together, n, spread)
				}
			})
		})
	}
}

func (w *world) session(c *client.Client, o client.SessionOptions) *client.Session {
	w.Helper()
	s, err := c.NewSession(o)
	if err != nil {
		w.Fatal(err)
	}
	return s
}

func (w *world) take(s *client.Session, resource string, options ...client.Option) *client.Lease {
	w.Helper()
	l, err := s.Acquire(w.Context(), resource, options...)
	if err != nil {
		w.Fatalf("acquire %s: %v", resource, err)
	}
	return l
}

func TestSessionsOfOneClientAreHoldersOfTheirOwn(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		one, two := w.session(c, client.SessionOptions{}), w.session(c, client.SessionOptions{TTL: 20 * time.Second})
		l := w.take(one, "lock/x")
		other := w.take(two, "lock/y")
		own := w.acquire(c, "lock/z")
		if l.Session() == other.Session() || l.Session() == own.Session() || other.TTL() != 20*time.Second {
			t.Fatalf("sessions %s, %s, %s; ttl %v", l.Session(), other.Session(), own.Session(), other.TTL())
		}
		if _, err := two.Acquire(w.Context(), "lock/x"); !errors.Is(err, client.ErrBusy) {
			t.Errorf("the second session got %v", err)
		}
		waiting := make(chan result, 1)
		go func() {
			l, err := two.Acquire(w.Context(), "lock/x", client.Wait())
			waiting <- result{l, err}
		}()
		w.eu.Wait(time.Second, "a waiter", func(v state.View) bool { return waiters("lock/x")(v) == 1 })
		if err := one.Close(w.Context()); err != nil {
			t.Error(err)
		}
		if l.Valid() || !errors.Is(context.Cause(l.Context()), client.ErrLost) {
			t.Errorf("valid %v, %v after the session was closed", l.Valid(), context.Cause(l.Context()))
		}
		r := <-waiting
		if r.err != nil {
			t.Fatal(r.err)
		}
		w.valid(r.lease, 3*ttl)
		w.valid(other, ttl)
		w.valid(own, ttl)
		if _, err := one.Acquire(w.Context(), "lock/q"); !errors.Is(err, client.ErrClosed) {
			t.Errorf("acquire of a closed session: %v", err)
		}
		if n := w.eu.View().Counts().Sessions; n != 2 {
			t.Errorf("%d sessions", n)
		}
	})
}

func TestALeftSessionIsLeftAlone(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		s, keep := w.session(c, client.SessionOptions{}), w.acquire(c, "lock/keep")
		l := w.take(s, "lock/x")
		if err := s.Leave(w.Context()); err != nil {
			t.Fatal(err)
		}
		if l.Valid() || !errors.Is(context.Cause(l.Context()), client.ErrLeft) {
			t.Error("the client believes in what it has left")
		}
		time.Sleep(ttl - 100*time.Millisecond) // virtual
		if w.holder("lock/x") != "client/a" {
			t.Error("it did not live for its TTL")
		}
		w.free(time.Second, "lock/x")
		w.valid(keep, ttl)
	})
}

// One session ends at the region: the others of its stream do not notice.
func TestTheEndOfOneSessionLeavesTheStream(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		var leases []*client.Lease
		for i := range 5 {
			leases = append(leases, w.take(w.session(c, client.SessionOptions{}), fmt.Sprint("lock/", i)))
		}
		w.valid(leases[0], ttl)
		w.eu.CloseSession(leases[2].Session())
		w.lost(leases[2], time.Second)
		for range 20 {
			for i, l := range leases {
				if l.Valid() != (i != 2) {
					t.Fatalf("lease %d: valid %v", i, l.Valid())
				}
			}
			time.Sleep(ttl / 4) // virtual
		}
	})
}

// The keepalives of many sessions go out in gangs, a message each, and hundreds
// of sessions cost three goroutines.
func TestManySessionsCostOneStream(t *testing.T) {
	inWorld(t, func(w *world) {
		links := &countingLinks{Links: w.Links("a")}
		c := w.client("a", func(cfg *client.Config) { cfg.Links = links })
		first := w.acquire(c, "lock/first")
		w.valid(first, time.Second)
		// A stream of calls keeps goroutines for some seconds, as many as the calls have
		// needed at once.
		goroutines := func() int {
			time.Sleep(5 * time.Second) // virtual
			synctest.Wait()
			return runtime.NumGoroutine()
		}
		before := goroutines()
		const n = 300
		leases := make([]*client.Lease, n)
		var all sync.WaitGroup
		for i := range n {
			s := w.session(c, client.SessionOptions{})
			all.Go(func() { leases[i] = w.take(s, fmt.Sprint("lock/", i)) })
		}
		all.Wait()
		if now := goroutines(); now > before {
			t.Errorf("%d goroutines with %d sessions more, %d before", now, n, before)
		}
		check := func(d time.Duration) {
			t.Helper()
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(50 * time.Millisecond) { // virtual
				for i, l := range leases {
					if !l.Valid() || l.Context().Err() != nil {
						t.Fatalf("lease %d: %v", i, context.Cause(l.Context()))
					}
				}
			}
		}
		check(2 * ttl)
		// In each quarter of the third of a TTL about a quarter is kept alive.
		messages := links.messages.Load()
		var at []int64
		for range 4 {
			mark := links.keepalives.Load()
			time.Sleep(ttl / 3 / 4) // virtual
			at = append(at, links.keepalives.Load()-mark)
		}
		var sum int64
		for _, k := range at {
			if sum += k; k > n*2/3 {
				t.Errorf("keepalives come in bursts: %v", at)
			}
		}
		if sum > n*3/2 || sum < n {
			t.Errorf("%d keepalives of %d sessions in a third of the TTL", sum, n)
		}
		if sent := links.messages.Load() - messages; sent > 8 {
			t.Errorf("%d keepalives in %d messages", sum, sent)
		}
		for i := range 3 {
			w.eu.Elect((i + 1) % 3)
			check(ttl)
		}
		w.eu.Server(0).Freeze()
		w.eu.Elect(1)
		check(2 * ttl)
	})
}

// A server that hangs is found out with more than a quarter of the head lease to
// spare, whenever it begins, and by one keepalive however many sessions there
// are.
func TestAHungServerIsLeftWithTimeToSpare(t *testing.T) {
	for phase := time.Duration(0); phase < 900*time.Millisecond; phase += 100 * time.Millisecond {
		inWorld(t, func(w *world) {
			w.Delay(func() time.Duration { return time.Millisecond }) // the way is measured, and 0 is unknown
			w.eu.Elect(1)
			links := &countingLinks{Links: w.Links("a")}
			c := w.client("a", func(cfg *client.Config) { cfg.Links, cfg.TTL = links, time.Minute })
			const n = 40
			var leases []*client.Lease
			for i := range n {
				leases = append(leases, w.take(w.session(c, client.SessionOptions{}), fmt.Sprint("lock/", i)))
			}
			time.Sleep(3*time.Second + phase) // virtual
			before := links.keepalives.Load()
			w.eu.Server(0).Freeze()
			least := time.Minute
			for range 800 {
				for _, l := range leases {
					least = min(least, l.Remaining())
				}
				time.Sleep(10 * time.Millisecond) // virtual
			}
			if least < 1100*time.Millisecond {
				t.Errorf("frozen at +%v: only %v were left of 4 s", phase, least)
			}
			// One asks, all attach anew; a few may have been due anyway.
			if sent := links.keepalives.Load() - before; sent > n+n/2+2 { // two gangs were due anyway
				t.Errorf("frozen at +%v: %d keepalives of %d sessions", phase, sent, n)
			}
		})
	}
}

func TestSessionsAreBounded(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		var open []*client.Session
		for range client.MaxSessions {
			open = append(open, w.session(c, client.SessionOptions{}))
		}
		if _, err := c.NewSession(client.SessionOptions{}); err == nil {
			t.Error("one too many")
		}
		_ = open[0].Close(w.Context())
		if _, err := c.NewSession(client.SessionOptions{TTL: time.Millisecond}); err == nil {
			t.Error("a ttl of 1 ms")
		}
		w.session(c, client.SessionOptions{})
	})
}

// A region in which no server answers any more keeps its waiters' places until
// another owner is found, long before their sessions would be given up.
func TestWaitersOfALostRegionLookElsewhereAtOnce(t *testing.T) {
	for _, how := range []string{"killed", "frozen"} {
		inWorld(t, func(w *world) {
			us := w.Region(regiontest.Config{Name: "us"})
			us.Accept("eu", 1)
			long := func(c *client.Config) { c.TTL = 40 * time.Second }
			a, b := w.client("a", long), w.client("b", long)
			l := w.acquire(a, "lock/x")
			q := w.queue(b, "lock/x", w.Context())
			w.valid(l, ttl)
			for i := range 3 {
				if how == "killed" {
					w.eu.Server(i).Kill()
				} else {
					w.eu.Server(i).Freeze()
				}
			}
			w.lost(l, 5*time.Second)
			time.Sleep(2 * time.Second) // virtual
			us.Own(2)
			began := time.Now()
			r := <-q
			if r.err != nil || r.lease.Region() != "us" {
				t.Fatalf("%s: %v, %v", how, r.lease, r.err)
			}
			if d := time.Since(began); d > 20*time.Second {
				t.Errorf("%s: served %v after the promotion, with a session of 40 s", how, d)
			}
			w.valid(r.lease, ttl)
			for i := range 3 {
				w.eu.Server(i).Thaw()
			}
		})
	}
}

// A region that comes back with nobody else promoted: the waiter has its old
// place.
func TestAPlaceInARegionThatComesBackIsKept(t *testing.T) {
	inWorld(t, func(w *world) {
		us := w.Region(regiontest.Config{Name: "us"})
		us.Accept("eu", 1)
		a, b, c := w.client("a"), w.client("b"), w.client("c")
		l := w.acquire(a, "lock/x")
		qb := w.queue(b, "lock/x", w.Context())
		qc := w.queue(c, "lock/x", w.Context())
		for i := range 3 {
			w.eu.Server(i).Freeze()
		}
		time.Sleep(ttl / 2) // virtual
		for i := range 3 {
			w.eu.Server(i).Thaw()
		}
		w.release(l)
		r := <-qb
		if r.err != nil || r.lease.Region() != "eu" {
			t.Fatalf("%v, %v", r.lease, r.err)
		}
		select {
		case r := <-qc:
			t.Fatalf("two holders: %v, %v", r.lease, r.err)
		case <-time.After(2 * time.Second):
		}
		w.release(r.lease)
		if r := <-qc; r.err != nil {
			t.Fatal(r.err)
		}
	})
}

// An Acquire that has found its region lost goes on in the promoted one as soon
// as that grants.
func TestAPromotedRegionIsFoundAtOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		us := w.Region(regiontest.Config{Name: "us"})
		us.Accept("eu", 1)
		c := w.client("a")
		w.release(w.acquire(c, "lock/x"))
		for i := range 3 {
			w.eu.Server(i).Kill()
		}
		got := make(chan result, 1)
		go func() {
			l, err := c.Acquire(w.Context(), "lock/x", client.Wait())
			got <- result{l, err}
		}()
		time.Sleep(4987 * time.Millisecond) // virtual
		us.Own(2)
		began := time.Now()
		r := <-got
		if r.err != nil || r.lease.Region() != "us" {
			t.Fatalf("%v, %v", r.lease, r.err)
		}
		if d := time.Since(began); d > 200*time.Millisecond {
			t.Errorf("found after %v", d)
		}
	})
}

// A session is closed at the region though that has no leader at first.
func TestACloseIsRepeatedUntilTheRegionDecides(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		l := w.acquire(c, "lock/x")
		w.eu.Depose()
		closed := make(chan error, 1)
		go func() { closed <- c.Close(w.Context()) }()
		time.Sleep(4 * time.Second) // virtual
		if l.Valid() {
			t.Error("valid after its client was closed")
		}
		w.eu.Elect(1)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if h := w.holder("lock/x"); h != "" {
			t.Errorf("%s holds it", h)
		}
	})
}
