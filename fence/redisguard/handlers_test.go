package redisguard

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/fencetest"
	"github.com/headlease/headlease/fence/markstore"
)

var _ markstore.Store = (*Handlers)(nil)

func handlers(t testing.TB, g *Guard, running time.Duration) *Handlers {
	t.Helper()
	h, err := g.Handlers(running)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// handled is data in this process, guarded by marks in Redis.
type handled struct {
	*Handlers
	mu     sync.Mutex
	values map[string]string
}

func (d *handled) Write(ctx context.Context, resource string, token fence.Token, value string) error {
	return d.Do(ctx, resource, token, func(context.Context) error {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.values[resource] = value
		return nil
	})
}

func (d *handled) Value(_ context.Context, resource string) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.values[resource], nil
}

func TestHandlersAgainstTheCommonModel(t *testing.T) {
	s := startServer(t)
	g, c := s.guard(Options{})
	fencetest.Run(t, &handled{Handlers: handlers(t, g, 0), values: map[string]string{}}, "lock/")
	if keys := c.Keys(t.Context(), "*running*").Val(); len(keys) != 0 {
		t.Errorf("%d effects count as running when all have ended", len(keys))
	}
}

// clockOf is the server's clock in milliseconds.
func clockOf(t *testing.T, g *Guard) int64 {
	t.Helper()
	now, err := g.client.Time(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	return now.UnixMilli()
}

// A claim of another process cancels a running handler and waits for its end, however long
// that takes.
func TestF15ClaimCancelsHandlersOfOtherProcessesAndWaits(t *testing.T) {
	s := startServer(t)
	first, _ := s.guard(Options{})
	second, _ := s.guard(Options{})
	here, there := handlers(t, first, time.Second), handlers(t, second, time.Second)
	ctx, low, high := t.Context(), token(t, 1, 1), token(t, 1, 2)
	if err := here.Claim(ctx, "r", low); err != nil {
		t.Fatal(err)
	}
	running, cancelled, end := make(chan struct{}), make(chan error, 1), make(chan struct{})
	effect, claim := make(chan error, 1), make(chan error, 1)
	go func() {
		effect <- here.Do(ctx, "r", low, func(ctx context.Context) error {
			close(running)
			<-ctx.Done()
			cancelled <- context.Cause(ctx)
			<-end
			return nil
		})
	}()
	<-running
	go func() { claim <- there.Claim(ctx, "r", high) }()
	var stale *fence.StaleError
	if err := <-cancelled; !errors.As(err, &stale) || stale.Seen != high || stale.Given != low {
		t.Errorf("the running effect was cancelled with %v", err)
	}
	// It goes on for longer than it would count as running without a word.
	const set = "headlease:mark-running:{r}:r"
	for began := clockOf(t, first); clockOf(t, first) < began+2000; {
		if n := first.client.ZCard(ctx, set).Val(); n != 1 {
			t.Fatalf("%d effects count as running", n)
		}
		select {
		case err := <-claim:
			t.Fatalf("claimed beside a running effect: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	close(end)
	if err := errors.Join(<-effect, <-claim); err != nil {
		t.Fatal(err)
	}
}

// Of a process that is gone a claim does not wait for ever.
func TestAHandlerThatIsGoneIsWaitedForUntilItsTimeIsOver(t *testing.T) {
	s := startServer(t)
	g, c := s.guard(Options{})
	h := handlers(t, g, time.Second)
	ctx, low, high := t.Context(), token(t, 1, 1), token(t, 1, 2)
	if err := h.Claim(ctx, "r", low); err != nil {
		t.Fatal(err)
	}
	if err := h.wait(ctx, "r", low, h.enter, low.String()+":gone"); err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if err := h.Claim(soon, "r", high); !errors.Is(err, errBusy) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("claimed at once: %v", err)
	}
	if err := h.Claim(ctx, "r", high); err != nil {
		t.Error(err)
	}
	if ttl := c.TTL(ctx, DefaultKeyPrefix+"{r}:r").Val(); ttl != -1 {
		t.Errorf("the mark has a TTL: %v", ttl)
	}
}

// An effect whose marks are out of reach is cancelled before a claim would pass it.
func TestAHandlerWithoutItsServerIsCancelled(t *testing.T) {
	s := startServer(t)
	g, _ := s.guard(Options{})
	h := handlers(t, g, time.Second)
	ctx, tok := t.Context(), token(t, 1, 1)
	if err := h.Claim(ctx, "r", tok); err != nil {
		t.Fatal(err)
	}
	err := h.Do(ctx, "r", tok, func(ctx context.Context) error {
		s.Kill()
		<-ctx.Done()
		return context.Cause(ctx)
	})
	var stale *fence.StaleError
	if err == nil || errors.As(err, &stale) || errors.Is(err, context.Canceled) {
		t.Errorf("the effect ended with %v", err)
	}
	if _, err := g.Handlers(time.Millisecond); err == nil {
		t.Error("a millisecond is taken")
	}
}
