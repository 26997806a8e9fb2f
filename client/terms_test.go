package client_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestValuesAreKeptBesideLeases(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a"), w.client("b")
		l := w.acquire(a, "lock/x", client.WithValue([]byte("one")))
		x := w.watch(b.Watch(w.Context(), "lock/x"))
		x.want("reset lock/x", "held lock/x", "synced ")
		if e, ok := x.view.Lease("lock/x"); !ok || string(e.Value) != "one" {
			t.Errorf("held: %+v", e)
		}
		revision, err := l.SetValue(w.Context(), []byte("two"))
		if err != nil {
			t.Fatal(err)
		}
		if e := x.event(); e.Kind != client.WatchValue || string(e.Value) != "two" || e.Revision != revision {
			t.Errorf("%+v at revision %d", e, revision)
		}
		if e, _ := x.view.Lease("lock/x"); string(e.Value) != "two" {
			t.Errorf("held: %+v", e)
		}
		info, err := b.Get(w.Context(), "lock/x")
		if err != nil || string(info.GetValue()) != "two" || info.GetRevision() != revision {
			t.Errorf("get: %v, %v", info, err)
		}
		w.eu.Depose() // and is asked on until there is a leader again
		set := make(chan error)
		go func() {
			_, err := l.SetValue(w.Context(), []byte("three"))
			set <- err
		}()
		time.Sleep(500 * time.Millisecond) // virtual
		w.eu.Elect(1)
		if err := <-set; err != nil {
			t.Error(err)
		}
		w.release(l)
		if _, err := l.SetValue(w.Context(), nil); !errors.Is(err, client.ErrNotHolder) {
			t.Errorf("after the release: %v", err)
		}
		big := make([]byte, client.MaxValue+1)
		if _, err := a.Acquire(w.Context(), "lock/y", client.WithValue(big)); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("a value too big: %v", err)
		}
		l = w.acquire(a, "lock/y", client.WithValue(big[1:]))
		if _, err := l.SetValue(w.Context(), big); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("a value too big: %v", err)
		}
	})
}

func TestALockDelayFollowsALossAndNoRelease(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a"), w.client("b")
		const delay = 10 * time.Second
		s := w.session(a, client.SessionOptions{})
		l := w.take(s, "lock/x", client.WithLockDelay(delay))
		w.valid(l, time.Second)
		w.release(l)
		w.release(w.acquire(b, "lock/x"))
		l = w.take(s, "lock/x", client.WithLockDelay(delay))
		w.valid(l, time.Second)
		if err := s.Leave(w.Context()); err != nil { // and nobody keeps it alive
			t.Fatal(err)
		}
		w.free(2*ttl, "lock/x")
		began := time.Now()
		var busy *client.BusyError
		if _, err := b.Acquire(w.Context(), "lock/x"); !errors.As(err, &busy) || !busy.Delayed {
			t.Errorf("in the delay: %v", err)
		}
		next := w.acquire(b, "lock/x", client.Wait())
		if d := time.Since(began); d < delay-time.Second {
			t.Errorf("granted after %v", d)
		}
		w.valid(next, ttl)
		if _, err := b.Acquire(w.Context(), "lock/y", client.WithLockDelay(2*time.Minute)); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("a delay too long: %v", err)
		}
	})
}

func TestAWaitEndsWhenItsTimeIsOver(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a"), w.client("b")
		l := w.acquire(a, "lock/x")
		for who, s := range map[string]*client.Session{"another client": b.Session(), "the same session": a.Session()} {
			began := time.Now()
			_, err := s.Acquire(w.Context(), "lock/x", client.WaitAtMost(7*time.Second))
			if !errors.Is(err, client.ErrWaitEnded) {
				t.Errorf("%s: %v", who, err)
			}
			if d := time.Since(began); d < 7*time.Second || d > 8*time.Second {
				t.Errorf("%s: after %v", who, d)
			}
		}
		if n := waiters("lock/x")(w.eu.View()); n != 0 {
			t.Errorf("%d wait on", n)
		}
		// Nobody says that the time is over: the region cannot be reached.
		for i := range 3 {
			w.eu.Server(i).Freeze()
		}
		began := time.Now()
		if _, err := b.Acquire(w.Context(), "lock/x", client.WaitAtMost(3*time.Second)); !errors.Is(err, client.ErrWaitEnded) || time.Since(began) > 5*time.Second {
			t.Errorf("frozen: %v after %v", err, time.Since(began))
		}
		for i := range 3 {
			w.eu.Server(i).Thaw()
		}
		_ = l.Release(w.Context())
		w.release(w.acquire(b, "lock/x", client.WaitAtMost(7*time.Second)))
	})
}

func TestASemaphoreHasSoManyHolders(t *testing.T) {
	inWorld(t, func(w *world) {
		const n = 3
		c := w.client("a")
		var held []*client.Lease
		seen := map[string]bool{}
		for i := range n {
			l, err := c.AcquireSlot(w.Context(), "lock/x", n) // also one session has several
			if err != nil {
				t.Fatalf("slot %d: %v", i, err)
			}
			if seen[l.Resource()] {
				t.Fatalf("%s twice", l.Resource())
			}
			seen[l.Resource()] = true
			held = append(held, l)
		}
		for i := range n {
			if !seen[fmt.Sprint("lock/x#", i)] {
				t.Errorf("slots %v", seen)
			}
		}
		other := w.client("b")
		if _, err := other.AcquireSlot(w.Context(), "lock/x", n); !errors.Is(err, client.ErrBusy) {
			t.Errorf("one too many: %v", err)
		}
		got := make(chan result)
		go func() {
			l, err := other.AcquireSlot(w.Context(), "lock/x", n, client.Wait())
			got <- result{l, err}
		}()
		time.Sleep(2 * ttl) // virtual
		for _, l := range held {
			w.valid(l, ttl/4)
		}
		w.release(held[1])
		r := <-got
		if r.err != nil || r.lease.Resource() != held[1].Resource() || r.lease.Token() <= held[1].Token() {
			t.Fatalf("%v, %v", r.lease, r.err)
		}
		for i := range 3 {
			w.eu.Elect((i + 1) % 3)
			w.valid(r.lease, ttl)
			w.valid(held[0], time.Second)
		}
		ctx, cancel := context.WithCancel(w.Context())
		go func() {
			l, err := c.AcquireSlot(ctx, "lock/x", n, client.Wait())
			got <- result{l, err}
		}()
		time.Sleep(time.Second) // virtual
		cancel()
		if r := <-got; !errors.Is(r.err, context.Canceled) {
			t.Errorf("%v", r.err)
		}
		for _, bad := range []struct {
			resource string
			slots    int
		}{{"lock/x", 0}, {"lock/x", client.MaxSlots + 1}, {"shard/1", 2}, {"lock/x#1", 2}, {"x", 2}} {
			if _, err := c.AcquireSlot(w.Context(), bad.resource, bad.slots); !errors.Is(err, client.ErrInvalid) {
				t.Errorf("%+v: %v", bad, err)
			}
		}
	})
}

// lateAnswers are links on which the answers to releases come late.
type lateAnswers struct {
	client.Links
	by time.Duration
}

func (l lateAnswers) DialGRPC(plane link.Plane, peer link.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error) {
	late := grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, o ...grpc.CallOption) error {
		err := invoke(ctx, method, req, reply, cc, o...)
		if method == pb.LeaseService_Release_FullMethodName {
			time.Sleep(l.by) // virtual
		}
		return err
	})
	return l.Links.DialGRPC(plane, peer, append([]grpc.DialOption{late}, extra...)...)
}

// TestASlotPassesWithinASession: the region hands a slot over in the commit of
// its release, and the offer may come before the answer to the release.
func TestASlotPassesWithinASession(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a", func(cfg *client.Config) { cfg.Links = lateAnswers{cfg.Links, 100 * time.Millisecond} })
		l, err := c.AcquireSlot(w.Context(), "lock/x", 1)
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan result)
		for range 5 {
			go func() {
				l, err := c.AcquireSlot(w.Context(), "lock/x", 1, client.Wait())
				got <- result{l, err}
			}()
			time.Sleep(time.Second) // virtual
			w.release(l)
			r := <-got
			if r.err != nil {
				t.Fatal(r.err)
			}
			if r.lease.Token().Seq() != l.Token().Seq()+1 {
				t.Fatalf("token %s after %s", r.lease.Token(), l.Token())
			}
			w.valid(r.lease, ttl/4)
			l = r.lease
		}
	})
}
