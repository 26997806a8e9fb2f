package client_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/regiontest"
	"github.com/headlease/headlease/region/state"
)

func TestANewTermResumesLeasesAndPlaces(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a"), w.client("b")
		l := w.acquire(a, "lock/x")
		q := w.queue(b, "lock/x", w.Context())
		for i := range 6 {
			w.eu.Elect(i % 3)
			w.valid(l, 2*time.Second)
		}
		if n := waiters("lock/x")(w.eu.View()); n != 1 {
			t.Fatalf("%d waiters", n)
		}
		w.eu.Elect(1)
		w.release(l)
		r := <-q
		if r.err != nil || r.lease.Token() != l.Token()+1 {
			t.Fatalf("the waiter got %v, %v", r.lease, r.err)
		}
		w.valid(r.lease, 2*ttl)
	})
}

// A new leader says who holds what before it has renewed the head lease, which
// takes it a round trip to the voters. Until then its predecessor's word counts.
func TestL3ThePromiseOfTheLeaderBeforeRunsOn(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		l := w.acquire(c, "lock/x")
		w.valid(l, ttl)
		w.eu.Lapse(true)
		w.eu.Elect(1)
		w.valid(l, time.Second)
		w.eu.Lapse(false)
		w.valid(l, 2*ttl)
		// It runs out all the same, if the new leader cannot renew at all.
		w.eu.Lapse(true)
		w.eu.Elect(2)
		w.lost(l, 4*time.Second)
		if left := l.Remaining(); left > 200*time.Millisecond {
			t.Errorf("believed for another %v", left)
		}
	})
}

// Nor is it shortened by a leader that begins anew in its term, as often as its
// clock has gaps: it too says who holds what before it has renewed.
func TestL3ThePromiseOfBeforeAClockGapRunsOn(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		l := w.acquire(c, "lock/x")
		w.valid(l, ttl)
		for range 3 {
			w.eu.Lapse(true)
			w.eu.ClockGap()
			w.valid(l, 500*time.Millisecond)
			w.eu.ClockGap()
			// Both take less than is left of a promise: D, less the time of a renewal and of a push,
			// and of the next renewal.
			w.valid(l, 500*time.Millisecond)
			w.eu.Lapse(false)
			w.valid(l, 2*ttl)
		}
		w.eu.Lapse(true)
		w.eu.ClockGap()
		w.lost(l, 4*time.Second)
		if left := l.Remaining(); left > 200*time.Millisecond {
			t.Errorf("believed for another %v", left)
		}
	})
}

func TestARestartedServerCostsNothing(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		l := w.acquire(c, "lock/x")
		for i := range 3 {
			w.eu.Server(i).Kill()
			w.eu.Elect((i + 1) % 3)
			w.valid(l, 2*time.Second)
			w.eu.Server(i).Start()
			w.valid(l, 2*time.Second)
		}
	})
}

// A server that hangs says nothing and breaks nothing: the client must find
// out in time to attach elsewhere.
func TestAHungServerIsLeftBeforeHalfTheTTL(t *testing.T) {
	for _, leader := range []int{0, 1} {
		inWorld(t, func(w *world) {
			w.eu.Elect(leader)
			c := w.client("a")
			l := w.acquire(c, "lock/x")
			w.valid(l, ttl)
			w.eu.Server(0).Freeze()
			if leader == 0 {
				w.eu.Elect(1)
			}
			w.valid(l, 3*ttl)
			began := time.Now()
			w.acquire(c, "lock/y")
			if d := time.Since(began); d > ttl/2 {
				t.Errorf("leader %d: an acquire took %v with one server of three hung", leader, d)
			}
		})
	}
}

// A region that elects a leader for a while answers no keepalive, at whatever
// server: one that answers pings is not left, which would only make more work
// for all of them.
func TestAServerThatIsAliveIsNotLeftWhileItsRegionIsSlow(t *testing.T) {
	inWorld(t, func(w *world) {
		var log lines
		w.eu.Elect(1)
		c := w.client("a", func(cfg *client.Config) { cfg.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		l := w.acquire(c, "lock/x")
		w.valid(l, ttl)
		w.eu.Depose()
		w.valid(l, 1200*time.Millisecond)
		w.eu.Elect(2)
		w.valid(l, 2*ttl)
		if s := log.String(); s != "" {
			t.Errorf("left its server:\n%s", s)
		}
	})
}

// lines of a log.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// The hand-over of a waiter whose server hangs: it attaches elsewhere and asks
// again, and the offer is confirmed in time.
func TestF23AnOfferReachesAWaiterWhoseServerHangs(t *testing.T) {
	inWorld(t, func(w *world) {
		w.eu.Elect(1)
		a, b := w.client("a"), w.client("b")
		l := w.acquire(a, "lock/x")
		q := w.queue(b, "lock/x", w.Context())
		w.eu.Server(0).Freeze()
		_ = l.Release(w.Context())
		r := <-q
		if r.err != nil {
			t.Fatal(r.err)
		}
		w.valid(r.lease, 2*ttl)
		if w.holder("lock/x") != "client/b" {
			t.Errorf("%s holds it", w.holder("lock/x"))
		}
	})
}

// All of the region is silent: contexts end before the validity does, and the
// validity before anybody else can be granted it.
func TestSilenceEndsContextsThenValidityThenTheHold(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		l := w.acquire(c, "lock/x")
		w.valid(l, ttl)
		for i := range 3 {
			w.eu.Server(i).Freeze()
		}
		w.lost(l, ttl)
		var lost *client.LostError
		if err := context.Cause(l.Context()); !errors.Is(err, client.ErrLost) || !errors.As(err, &lost) || lost.Token != l.Token() {
			t.Errorf("cause %v", err)
		}
		left := l.Remaining()
		if left < 50*time.Millisecond || !l.Valid() {
			t.Errorf("%v left when the context ended; the margin is 100 ms", left)
		}
		time.Sleep(left) // virtual
		if l.Valid() {
			t.Error("valid after its remaining time")
		}
		if w.holder("lock/x") != "client/a" {
			t.Errorf("%q holds it while it was valid here", w.holder("lock/x"))
		}
		w.free(2*ttl, "lock/x")
		if err := l.Release(w.Context()); err != nil {
			t.Errorf("release of a lost lease: %v", err)
		}
	})
}

// A lease whose context has ended is given back, though word from the region
// comes after all: nobody works under it.
func TestALostLeaseIsNotKeptForNobody(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		l := w.acquire(c, "lock/x")
		w.valid(l, ttl)
		for i := range 3 {
			w.eu.Server(i).Freeze()
		}
		w.lost(l, ttl)
		for i := range 3 {
			w.eu.Server(i).Thaw()
		}
		left := l.Remaining()
		time.Sleep(left + time.Millisecond) // virtual
		if l.Valid() {
			t.Error("a lost lease was prolonged")
		}
		w.free(time.Second, "lock/x")
		// The session lives; the client may acquire it anew.
		if again := w.acquire(c, "lock/x", client.Wait()); again.Session() != l.Session() || again.Token() <= l.Token() {
			t.Errorf("session %s, token %v", again.Session(), again.Token())
		}
	})
}

// jumpClock is a bubble's clock that can jump, as after a suspend.
type jumpClock struct {
	clock.Runtime
	ahead atomic.Int64
}

func (c *jumpClock) Now() instant.Instant { return c.Runtime.Now().Add(time.Duration(c.ahead.Load())) }

func TestF19AGapInTheClockEndsValidityAtOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		cl := &jumpClock{Runtime: clock.NewRuntime()}
		c := w.client("a", withClock(cl))
		l := w.acquire(c, "lock/x")
		w.valid(l, ttl)
		cl.ahead.Add(int64(time.Minute))
		if l.Valid() { // before any watch has seen the gap
			t.Fatal("valid a minute later")
		}
		w.lost(l, time.Second)
		time.Sleep(200 * time.Millisecond) // virtual: the watch looks every 100 ms
		// Under a second it is no gap, but time that has passed.
		l = w.acquire(c, "lock/x", client.Wait())
		w.valid(l, ttl)
		cl.ahead.Add(int64(800 * time.Millisecond))
		w.valid(l, ttl)
	})
}

func TestSessionsClosedByTheRegionEndTheirContexts(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		l := w.acquire(c, "lock/x")
		w.eu.CloseSession(l.Session())
		if d := w.lost(l, ttl); d > 50*time.Millisecond {
			t.Errorf("told after %v", d)
		}
		if l.Valid() {
			t.Error("valid")
		}
		if again := w.acquire(c, "lock/x"); again.Session() == l.Session() {
			t.Error("the same session")
		}
	})
}

func TestARevokedLeaseIsValidUntilItsEndAndPassesOnEarlyWhenReleased(t *testing.T) {
	inWorld(t, func(w *world) {
		c, d := w.client("a"), w.client("b")
		l := w.acquire(c, "lock/x")
		w.valid(l, time.Second)
		w.eu.Revoke("lock/x")
		w.lost(l, 50*time.Millisecond)
		if !l.Valid() {
			t.Error("no time to stop in order")
		}
		q := w.queue(d, "lock/x", w.Context())
		select {
		case r := <-q:
			t.Fatalf("passed on while valid: %v", r)
		case <-time.After(500 * time.Millisecond):
		}
		w.release(l)
		if r := <-q; r.err != nil || r.lease.Token() <= l.Token() {
			t.Fatalf("%v", r)
		}
		// And without a release it passes on by itself.
		l2 := w.acquire(c, "lock/y")
		w.eu.Revoke("lock/y")
		w.lost(l2, 50*time.Millisecond)
		w.free(ttl, "lock/y")
		if l2.Valid() {
			t.Error("valid after it passed on")
		}
	})
}

func TestALapseIsWaitedOutWithTheSameToken(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		l := w.acquire(c, "lock/x")
		w.eu.Lapse(true)
		if d := w.lost(l, 5*time.Second); d < 2*time.Second {
			t.Errorf("lost after %v with a head lease of 4 s", d)
		}
		time.Sleep(5 * time.Second) // virtual
		if l.Valid() {
			t.Error("valid in a lapse")
		}
		got := make(chan result, 1)
		go func() {
			l, err := c.Acquire(w.Context(), "lock/z")
			got <- result{l, err}
		}()
		select {
		case r := <-got:
			t.Fatalf("granted in a lapse: %v", r)
		case <-time.After(10 * time.Second):
		}
		w.eu.Lapse(false)
		began := time.Now()
		if r := <-got; r.err != nil {
			t.Fatal(r.err)
		}
		if d := time.Since(began); d > 2*time.Second {
			t.Errorf("granted %v after the head lease was regained", d)
		}
	})
}

// The home region is lost, the other one promoted: leases end by the clock, and
// Acquire goes on there, also for those that wait.
func TestALostRegionsWorkGoesOnInTheNext(t *testing.T) {
	inWorld(t, func(w *world) {
		us := w.Region(regiontest.Config{Name: "us"})
		us.Accept("eu", 1)
		a, b := w.client("a"), w.client("b")
		l := w.acquire(a, "lock/x")
		q := w.queue(b, "lock/x", w.Context())
		w.valid(l, ttl)
		for i := range 3 {
			w.eu.Server(i).Kill()
		}
		w.lost(l, ttl)
		time.Sleep(2 * time.Second) // virtual
		if l.Valid() {
			t.Error("valid after the head lease's end")
		}
		us.Own(2)
		began := time.Now()
		r := <-q
		if r.err != nil {
			t.Fatal(r.err)
		}
		if r.lease.Region() != "us" || r.lease.Token() <= l.Token() {
			t.Errorf("token %v of %s after %v of eu", r.lease.Token(), r.lease.Region(), l.Token())
		}
		if d := time.Since(began); d > ttl {
			t.Errorf("the waiter was served %v after the promotion", d)
		}
		w.valid(r.lease, ttl)
	})
}

// The region lives but cannot reach the voters: it can only say that its head
// lease has lapsed. The client must find the one that was promoted.
func TestAnIsolatedRegionIsLeftForThePromotedOne(t *testing.T) {
	inWorld(t, func(w *world) {
		us := w.Region(regiontest.Config{Name: "us"})
		us.Accept("eu", 1)
		a, b := w.client("a"), w.client("b")
		l := w.acquire(a, "lock/x")
		q := w.queue(b, "lock/x", w.Context())
		w.eu.Lapse(true)
		w.lost(l, ttl)
		time.Sleep(l.Remaining() + 200*time.Millisecond) // virtual
		us.Own(2)
		fresh := w.acquire(a, "lock/z")
		if fresh.Region() != "us" {
			t.Errorf("a fresh acquire went to %s", fresh.Region())
		}
		r := <-q
		if r.err != nil || r.lease.Region() != "us" {
			t.Fatalf("the waiter got %v, %v", r.lease, r.err)
		}
		// When the old owner hears of it, it sends its clients on.
		w.eu.Lapse(false)
		w.eu.Lose(1, "us")
		if l, err := w.client("c").Acquire(w.Context(), "lock/q"); err != nil || l.Region() != "us" {
			t.Errorf("%v, %v", l, err)
		}
	})
}

// Dropped waiters are told, and go on in the owner's queue.
func TestWaitersOfADroppedPartitionMove(t *testing.T) {
	inWorld(t, func(w *world) {
		us := w.Region(regiontest.Config{Name: "us"})
		us.Accept("eu", 1)
		a, b := w.client("a"), w.client("b")
		l := w.acquire(a, "lock/x")
		q := w.queue(b, "lock/x", w.Context())
		w.valid(l, time.Second) // the stream speaks for it now, and can withdraw it
		w.eu.Lose(1, "us")
		us.Own(2)
		w.lost(l, time.Second)
		if r := <-q; r.err != nil || r.lease.Region() != "us" {
			t.Fatalf("the waiter got %v, %v", r.lease, r.err)
		}
		us.Wait(time.Second, "one holder in us", func(v state.View) bool { l, _ := v.Lease("lock/x"); return l.Holder == "client/b" })
	})
}

// A new leader says who is attached before it has renewed the head lease, and
// answers an Acquire with LAPSED until then: who waits keeps the place.
func TestAPlaceOutlivesALeaderWithoutItsHeadLease(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a"), w.client("b")
		l := w.acquire(a, "lock/x")
		q := w.queue(b, "lock/x", w.Context())
		place := func() (found state.Waiter) {
			for s := range w.eu.View().Sessions() {
				for q := range w.eu.View().SessionWaiters(s.ID) {
					found = q
				}
			}
			return found
		}
		before := place()
		for i := range 3 {
			w.eu.Lapse(true)
			w.eu.Elect(i)
			time.Sleep(300 * time.Millisecond) // virtual
			w.eu.Lapse(false)
			w.valid(l, 2*time.Second)
		}
		if after := place(); before.Request == 0 || after != before {
			t.Errorf("the place is %+v, and was %+v", after, before)
		}
		w.release(l)
		r := <-q
		if r.err != nil || r.lease.Token() != l.Token()+1 {
			t.Fatalf("the waiter got %v, %v", r.lease, r.err)
		}
	})
}

// Its servers take connections and say nothing: what many callers have to find
// out about it takes as long as for one.
func TestManyLeasesMoveFromARegionThatHangsAtOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		us := w.Region(regiontest.Config{Name: "us"})
		us.Accept("eu", 1)
		a := w.client("a")
		const n = 50
		for i := range n {
			w.acquire(a, fmt.Sprintf("shard/%d", i))
		}
		for i := range 3 {
			w.eu.Server(i).Freeze()
		}
		time.Sleep(2 * ttl) // virtual
		us.Own(2)
		began := time.Now()
		moved := make(chan error, n)
		for i := range n {
			go func() {
				l, err := a.Acquire(w.Context(), fmt.Sprintf("shard/%d", i))
				if err == nil && l.Region() != "us" {
					err = errors.New("granted by " + l.Region())
				}
				moved <- err
			}()
		}
		for range n {
			if err := <-moved; err != nil {
				t.Error(err)
			}
		}
		if d := time.Since(began); d > 10*time.Second {
			t.Errorf("it took %v", d)
		}
	})
}
