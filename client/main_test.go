package client_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/regiontest"
	"github.com/headlease/headlease/region/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ttl = 6 * time.Second

// world is a network in a bubble with its clients.
type world struct {
	*testing.T
	*regiontest.Network
	eu *regiontest.Region
}

// inWorld runs f in a bubble with a region "eu" of three servers that owns the
// partition.
func inWorld(t *testing.T, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t, Network: regiontest.NewNetwork(t)}
		w.eu = w.Region(regiontest.Config{Name: "eu"})
		w.eu.Own(1)
		f(w)
	})
}

type option func(*client.Config)

func withClock(c clock.Clock) option { return func(cfg *client.Config) { cfg.Clock = c } }

// client returns a client that is closed when the test ends.
func (w *world) client(name string, options ...option) *client.Client {
	w.Helper()
	cfg := client.Config{Cluster: "test", Regions: w.Regions(), Links: w.Links(name), TTL: ttl, Clock: clock.NewRuntime()}
	for _, o := range options {
		o(&cfg)
	}
	c, err := client.New(cfg)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = c.Close(ctx)
	})
	return c
}

// acquire acquires within a minute.
func (w *world) acquire(c *client.Client, resource string, options ...client.Option) *client.Lease {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
	defer cancel()
	l, err := c.Acquire(ctx, resource, options...)
	if err != nil {
		w.Fatalf("acquire %s: %v", resource, err)
	}
	if !l.Valid() || l.Context().Err() != nil {
		w.Fatalf("acquire %s: a lease that is not valid (%v)", resource, context.Cause(l.Context()))
	}
	return l
}

func (w *world) release(l *client.Lease) {
	w.Helper()
	if err := l.Release(w.Context()); err != nil {
		w.Fatalf("release %s: %v", l.Resource(), err)
	}
	if l.Valid() || l.Context().Err() == nil {
		w.Fatalf("%s: valid after its release", l.Resource())
	}
}

// queue starts an Acquire that waits, and returns when it has its place.
func (w *world) queue(c *client.Client, resource string, ctx context.Context) <-chan result {
	w.Helper()
	before := waiters(resource)(w.eu.View())
	out := make(chan result, 1)
	go func() {
		l, err := c.Acquire(ctx, resource, client.Wait())
		out <- result{l, err}
	}()
	w.eu.Wait(10*time.Second, "a place in the queue", func(v state.View) bool { return waiters(resource)(v) == before+1 })
	return out
}

type result struct {
	lease *client.Lease
	err   error
}

func waiters(resource string) func(state.View) int {
	return func(v state.View) int {
		l, _ := v.Lease(resource)
		return l.Waiters
	}
}

// holder is who the region says holds the resource.
func (w *world) holder(resource string) string {
	l, _ := w.eu.View().Lease(resource)
	return l.Holder
}

// free waits until nobody holds the resource.
func (w *world) free(within time.Duration, resource string) {
	w.Helper()
	w.eu.Wait(within, resource+" free", func(v state.View) bool { _, held := v.Lease(resource); return !held })
}

// valid fails the test when the lease is not valid at any time for so long.
func (w *world) valid(l *client.Lease, d time.Duration) {
	w.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); {
		if !l.Valid() || l.Context().Err() != nil {
			w.Fatalf("%s not valid any more: %v", l.Resource(), context.Cause(l.Context()))
		}
		<-time.After(20 * time.Millisecond)
	}
}

// lost waits until the lease's context ends by a loss and returns how long
// that took.
func (w *world) lost(l *client.Lease, within time.Duration) time.Duration {
	w.Helper()
	began := time.Now()
	select {
	case <-l.Context().Done():
	case <-time.After(within):
		w.Fatalf("%s: not lost within %v", l.Resource(), within)
	}
	return time.Since(began)
}

func name(i int) string { return fmt.Sprintf("c%d", i) }
