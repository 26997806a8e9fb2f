package client_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/region/state"
)

func TestAcquireIsExclusiveAndTokensRise(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a"), w.client("b")
		la := w.acquire(a, "lock/x")
		_, err := b.Acquire(w.Context(), "lock/x")
		var busy *client.BusyError
		if !errors.Is(err, client.ErrBusy) || !errors.As(err, &busy) || busy.Holder != "client/a" || busy.Token != la.Token() {
			t.Fatalf("the second one got %v", err)
		}
		w.acquire(b, "lock/y")
		w.release(la)
		lb := w.acquire(b, "lock/x")
		if lb.Token() <= la.Token() {
			t.Errorf("token %v after %v", lb.Token(), la.Token())
		}
		info, err := a.Get(w.Context(), "lock/x")
		if err != nil || info.GetHolder() != "client/b" || info.GetToken() != uint64(lb.Token()) {
			t.Errorf("get: %v, %v", info, err)
		}
		w.valid(lb, 5*ttl)
	})
}

func TestInvalidResourcesAreRefusedAtOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		for _, resource := range []string{"", "x", "queue/x", "lock/", "shard/256", "shard/x", "lock/a b"} {
			began := time.Now()
			if _, err := c.Acquire(w.Context(), resource); !errors.Is(err, client.ErrInvalid) {
				t.Errorf("acquire %q: %v", resource, err)
			}
			if _, err := c.Get(w.Context(), resource); !errors.Is(err, client.ErrInvalid) {
				t.Errorf("get %q: %v", resource, err)
			}
			if time.Since(began) > 0 {
				t.Errorf("%q was tried again", resource)
			}
		}
	})
}

func TestWaitersAreServedInTheirOrder(t *testing.T) {
	inWorld(t, func(w *world) {
		l := w.acquire(w.client("first"), "lock/x")
		var queue []<-chan result
		for i := range 5 {
			queue = append(queue, w.queue(w.client(name(i)), "lock/x", w.Context()))
		}
		for i, q := range queue {
			w.release(l)
			next := <-q
			if next.err != nil {
				t.Fatal(next.err)
			}
			if next.lease.Token() != l.Token()+1 || w.holder("lock/x") != "client/"+name(i) {
				t.Fatalf("waiter %d got token %v after %v; %s holds", i, next.lease.Token(), l.Token(), w.holder("lock/x"))
			}
			l = next.lease
			// An offer that was not confirmed would end within 5 s [F23].
			w.valid(l, 2*ttl)
			for _, rest := range queue[i+1:] {
				select {
				case r := <-rest:
					t.Fatalf("a second waiter has %v", r)
				default:
				}
			}
		}
	})
}

func TestACancelledWaiterLeavesNothingBehind(t *testing.T) {
	inWorld(t, func(w *world) {
		l := w.acquire(w.client("a"), "lock/x")
		b := w.client("b")
		ctx, cancel := context.WithCancel(w.Context())
		q := w.queue(b, "lock/x", ctx)
		cancel()
		if r := <-q; !errors.Is(r.err, context.Canceled) {
			t.Fatalf("cancelled: %v", r.err)
		}
		w.eu.Wait(time.Second, "no waiter", func(v state.View) bool { return waiters("lock/x")(v) == 0 })

		// One that is cancelled while the hand-over is under way gives it back.
		for range 20 {
			ctx, cancel := context.WithCancel(w.Context())
			q := w.queue(b, "lock/x", ctx)
			var both sync.WaitGroup
			both.Go(cancel)
			both.Go(func() { w.release(l) })
			both.Wait()
			if r := <-q; r.err == nil {
				w.release(r.lease)
			}
			w.free(time.Second, "lock/x")
			l = w.acquire(w.client("a"), "lock/x")
		}
	})
}

func TestOneClientsUsersTakeTurns(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		l := w.acquire(c, "lock/x")
		var busy *client.BusyError
		if _, err := c.Acquire(w.Context(), "lock/x"); !errors.As(err, &busy) || busy.Token != l.Token() {
			t.Fatalf("a second user of the client got %v", err)
		}
		got := make(chan *client.Lease)
		for range 4 {
			go func() {
				l, err := c.Acquire(w.Context(), "lock/x", client.Wait())
				if err != nil {
					t.Error(err)
				}
				got <- l
			}()
		}
		for range 4 {
			synctest.Wait()
			select {
			case l := <-got:
				t.Fatalf("two users hold %v", l.Token())
			default:
			}
			w.release(l)
			next := <-got
			if next.Token() <= l.Token() {
				t.Fatalf("token %v after %v", next.Token(), l.Token())
			}
			l = next
		}
	})
}

func TestAcquireEndsWithItsContext(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		w.eu.Depose()
		ctx, cancel := context.WithTimeout(w.Context(), 10*time.Second)
		defer cancel()
		began := time.Now()
		_, err := c.Acquire(ctx, "lock/x")
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, client.ErrUnavailable) {
			t.Errorf("without a leader: %v", err)
		}
		if d := time.Since(began); d != 10*time.Second {
			t.Errorf("it took %v", d)
		}
	})
}

func TestCloseEndsWaitersAndLeases(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a"), w.client("b")
		l := w.acquire(a, "lock/x")
		q := w.queue(b, "lock/x", w.Context())
		other := w.acquire(b, "lock/y")
		if err := b.Close(w.Context()); err != nil {
			t.Error(err)
		}
		if r := <-q; !errors.Is(r.err, client.ErrClosed) {
			t.Errorf("waiter: %v", r.err)
		}
		if other.Valid() || other.Context().Err() == nil {
			t.Error("a lease of a closed client is valid")
		}
		if _, held := w.eu.View().Lease("lock/y"); held || waiters("lock/x")(w.eu.View()) != 0 {
			t.Error("the closed client still holds or waits")
		}
		if _, err := b.Acquire(w.Context(), "lock/z"); !errors.Is(err, client.ErrClosed) {
			t.Errorf("acquire: %v", err)
		}
		w.valid(l, ttl)
	})
}
