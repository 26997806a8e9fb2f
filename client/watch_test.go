package client_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/regiontest"
)

// watcher pulls a watch's events, and keeps what they come to.
type watcher struct {
	w    *world
	next func() (client.WatchEvent, error, bool)
	stop func()
	view client.WatchView
}

func (w *world) watch(seq iter.Seq2[client.WatchEvent, error]) *watcher {
	out := &watcher{w: w}
	out.next, out.stop = iter.Pull2(seq)
	w.Cleanup(out.stop)
	return out
}

// event returns the next event but progress.
func (x *watcher) event() client.WatchEvent {
	x.w.Helper()
	for {
		e, err, ok := x.next()
		if !ok || err != nil {
			x.w.Fatalf("the watch ended: %v", err)
		}
		x.view.Apply(e)
		if e.Kind != client.WatchProgress {
			return e
		}
	}
}

// kinds returns the next n events' kinds and resources.
func (x *watcher) kinds(n int) (out []string) {
	x.w.Helper()
	for range n {
		e := x.event()
		out = append(out, fmt.Sprintf("%v %s", e.Kind, e.Resource))
	}
	return out
}

func (x *watcher) want(want ...string) {
	x.w.Helper()
	if got := x.kinds(len(want)); !slices.Equal(got, want) {
		x.w.Fatalf("told %q, not %q", got, want)
	}
}

func TestWatchTellsGrantsAndEnds(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a"), w.client("b")
		l := w.acquire(a, "lock/x")
		x := w.watch(b.Watch(w.Context(), "lock/x"))
		all := w.watch(b.WatchPrefix(w.Context(), "lock/"))
		x.want("reset lock/x", "held lock/x", "synced ")
		all.want("reset ", "held lock/x", "synced ")
		if e, ok := x.view.Lease("lock/x"); !ok || e.Token != l.Token() || e.Holder != "client/a" || e.Session != l.Session() {
			t.Errorf("held: %+v", e)
		}
		w.release(l)
		y := w.acquire(a, "lock/y")
		if e := x.event(); e.Kind != client.WatchEnded || e.Token != l.Token() || e.Reason != "released" {
			t.Errorf("%+v", e)
		}
		all.want("ended lock/x", "granted lock/y")
		if e, ok := all.view.Lease("lock/y"); !ok || e.Token != y.Token() {
			t.Errorf("%+v", e)
		}
		w.eu.Revoke("lock/y")
		all.want("revoked lock/y")
	})
}

func TestAWatchEndsWithItsContextOrItsClient(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx, cancel := context.WithCancel(w.Context())
		c := w.client("a")
		go func() {
			time.Sleep(time.Second) // virtual
			cancel()
		}()
		for _, err := range c.Watch(ctx, "lock/x") {
			if err != nil {
				t.Errorf("cancelled: %v", err)
			}
		}
		for _, err := range c.Watch(w.Context(), "lock/x") {
			if err != nil {
				t.Error(err)
			}
			break
		}
		ended := make(chan error)
		go func() {
			var last error
			for _, err := range c.WatchPrefix(w.Context(), "") {
				last = err
			}
			ended <- last
		}()
		time.Sleep(time.Second) // virtual
		_ = c.Close(w.Context())
		if err := <-ended; !errors.Is(err, client.ErrClosed) {
			t.Errorf("closed: %v", err)
		}
		for _, err := range c.Watch(w.Context(), "lock/x") {
			if !errors.Is(err, client.ErrClosed) {
				t.Errorf("a closed client's: %v", err)
			}
		}
		for resource, seq := range map[string]iter.Seq2[client.WatchEvent, error]{
			"x": w.client("b").Watch(w.Context(), "x"), "locks/": w.client("c").WatchPrefix(w.Context(), "locks/"),
		} {
			n := 0
			for _, err := range seq {
				if n++; !errors.Is(err, client.ErrInvalid) {
					t.Errorf("%s: %v", resource, err)
				}
			}
			if n != 1 {
				t.Errorf("%s: told %d times", resource, n)
			}
		}
	})
}

// Servers and leaders come and go: nothing is told twice, nothing is missed, and
// nothing begins again.
func TestAWatchOutlivesServersAndLeaders(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a"), w.client("b")
		x := w.watch(b.Watch(w.Context(), "lock/x", client.WithProgress(time.Second)))
		x.want("reset lock/x", "synced ")
		for i := range 6 {
			l := w.acquire(a, "lock/x", client.Wait())
			w.release(l)
			x.want("granted lock/x", "ended lock/x")
			s := w.eu.Server(i % 3)
			if i%2 == 0 {
				s.Kill()
			} else {
				s.Freeze()
			}
			w.eu.Elect((i + 1) % 3)
			l = w.acquire(a, "lock/x", client.Wait())
			x.want("granted lock/x")
			w.release(l)
			x.want("ended lock/x")
			s.Thaw()
			s.Start()
		}
	})
}

func TestAWatchFollowsItsResourceToAnotherRegion(t *testing.T) {
	for _, how := range []string{"killed", "isolated", "told"} {
		inWorld(t, func(w *world) {
			us := w.Region(regiontest.Config{Name: "us"})
			us.Accept("eu", 1)
			a, b := w.client("a"), w.client("b")
			l := w.acquire(a, "lock/x")
			x := w.watch(b.Watch(w.Context(), "lock/x"))
			all := w.watch(b.WatchPrefix(w.Context(), "lock/"))
			x.want("reset lock/x", "held lock/x", "synced ")
			all.kinds(5) // a reset and a synced of each region, and the lease
			switch how {
			case "killed":
				for i := range 3 {
					w.eu.Server(i).Kill()
				}
			case "isolated":
				w.eu.Lapse(true)
			case "told":
				w.eu.Lose(1, "us")
			}
			if how != "told" {
				w.lost(l, ttl)
				time.Sleep(5 * time.Second) // virtual
			}
			us.Own(2)
			next := w.acquire(a, "lock/x", client.Wait())
			for e := x.event(); e.Kind != client.WatchReset; e = x.event() {
				if e.Kind != client.WatchEnded || e.Token != l.Token() {
					t.Errorf("%s: told %+v", how, e)
				}
			}
			for {
				e, ok := x.view.Lease("lock/x")
				if ok && e.Token == next.Token() && e.Region == "us" {
					break
				}
				x.event()
			}
			all.want("ended lock/x", "granted lock/x")
			if e, ok := all.view.Lease("lock/x"); !ok || e.Token != next.Token() || e.Region != "us" {
				t.Errorf("%s: %+v", how, e)
			}
		})
	}
}

// Whatever is killed, frozen, elected and slow: a consumer's view comes to the
// region's state, and in between tokens only rise.
func TestAWatchComesToTheState(t *testing.T) {
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) {
			w := &world{T: t, Network: regiontest.NewNetwork(t)}
			w.eu = w.Region(regiontest.Config{Name: "eu"})
			w.eu.Own(1)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var work sync.WaitGroup
			holders := w.client("holder")
			for i := range 4 {
				random := rand.New(rand.NewPCG(seed, uint64(i)))
				s := w.session(holders, client.SessionOptions{})
				work.Go(func() {
					for ctx.Err() == nil {
						l, err := s.Acquire(ctx, fmt.Sprint("lock/", random.IntN(5)))
						if err == nil {
							_, _ = l.SetValue(ctx, []byte(fmt.Sprint(random.IntN(100))))
							time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond) // virtual
							if random.IntN(3) > 0 {
								_ = l.Release(ctx)
							}
						}
						time.Sleep(time.Duration(random.IntN(100)) * time.Millisecond) // virtual
					}
				})
			}
			work.Go(func() {
				random := rand.New(rand.NewPCG(seed, 77))
				for ctx.Err() == nil {
					time.Sleep(time.Duration(random.IntN(2000)) * time.Millisecond) // virtual
					s := w.eu.Server(random.IntN(3))
					switch random.IntN(3) {
					case 0:
						w.eu.Elect(random.IntN(3))
					case 1:
						s.Kill()
						time.Sleep(time.Duration(random.IntN(500)) * time.Millisecond) // virtual
						s.Start()
					case 2:
						s.Freeze()
						time.Sleep(time.Duration(random.IntN(5000)) * time.Millisecond) // virtual
						s.Thaw()
					}
				}
			})
			var views []*client.WatchView
			var mu sync.Mutex
			watching, stop := context.WithCancel(t.Context())
			var watchers sync.WaitGroup
			for i := range 3 {
				random := rand.New(rand.NewPCG(seed, uint64(50+i)))
				c := w.client(fmt.Sprint("watcher", i))
				view := &client.WatchView{}
				views = append(views, view)
				watchers.Go(func() {
					tokens := map[string]uint64{}
					for e, err := range c.WatchPrefix(watching, "lock/", client.WithProgress(time.Second)) {
						if err != nil {
							t.Errorf("seed %d: %v", seed, err)
							return
						}
						if e.Kind == client.WatchGranted {
							if uint64(e.Token) <= tokens[e.Resource] {
								t.Errorf("seed %d: %s: token %v after %d", seed, e.Resource, e.Token, tokens[e.Resource])
							}
							tokens[e.Resource] = uint64(e.Token)
						}
						mu.Lock()
						view.Apply(e)
						mu.Unlock()
						if i == 2 && random.IntN(20) == 0 {
							time.Sleep(time.Duration(random.IntN(8000)) * time.Millisecond) // virtual
						}
					}
				})
			}
			work.Wait()
			for i := range 3 {
				w.eu.Server(i).Thaw()
				w.eu.Server(i).Start()
			}
			w.eu.Elect(0)
			time.Sleep(time.Minute) // virtual
			mu.Lock()
			want := map[string]uint64{}
			for l := range w.eu.View().Leases() {
				want[l.Resource] = uint64(l.Token)
			}
			for i, v := range views {
				got := map[string]uint64{}
				for e := range v.Leases() {
					got[e.Resource] = uint64(e.Token)
				}
				if !v.Complete() || !maps.Equal(got, want) {
					t.Errorf("seed %d: watcher %d has %v (complete %v); the region has %v", seed, i, got, v.Complete(), want)
				}
			}
			mu.Unlock()
			stop()
			watchers.Wait()
		})
	}
}

func TestAWatchEndsWithItsContextAtOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		began := time.Now()
		for range 40 {
			ctx, cancel := context.WithCancel(w.Context())
			for e, err := range c.WatchPrefix(ctx, "lock/") {
				if err != nil {
					t.Fatal(err)
				}
				if e.Kind == client.WatchSynced {
					cancel()
				}
			}
			cancel()
		}
		if d := time.Since(began); d > time.Second {
			t.Errorf("40 watches took %v to end", d)
		}
	})
}
