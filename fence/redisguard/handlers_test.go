package redisguard

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

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

func TestHandlersAgainstTheCommonModel(t *testing.T) {
	s := startServer(t)
	g, c := s.guard(Options{})
	fencetest.Run(t, fencetest.Handled(handlers(t, g, 0)), "lock/")
	if keys := c.Keys(t.Context(), "*running*").Val(); len(keys) != 0 {
		t.Errorf("%d effects count as running when all have ended", len(keys))
	}
}

// A claim of another process cancels a running handler and waits for its end, however long
// that takes.
func TestF15ClaimCancelsHandlersOfOtherProcessesAndWaits(t *testing.T) {
	s := startServer(t)
	first, _ := s.guard(Options{})
	second, _ := s.guard(Options{})
	here, there := handlers(t, first, 6*time.Second), handlers(t, second, 6*time.Second)
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
	// Its end is moved on all the same, until it has returned.
	score := func() float64 {
		score, err := first.client.ZScore(ctx, "headlease:mark-running:{r}:r", first.client.ZRange(ctx, "headlease:mark-running:{r}:r", 0, 0).Val()[0]).Result()
		if err != nil {
			t.Fatal(err)
		}
		return score
	}
	for moves, last := 0, score(); moves < 2; {
		select {
		case err := <-claim:
			t.Fatalf("claimed beside a running effect: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
		if now := score(); now > last {
			moves, last = moves+1, now
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
	h := handlers(t, g, time.Minute)
	ctx, low, high := t.Context(), token(t, 1, 1), token(t, 1, 2)
	if err := h.Claim(ctx, "r", low); err != nil {
		t.Fatal(err)
	}
	gone := low.String() + ":gone"
	if err := h.wait(ctx, "r", low, h.enter, gone); err != nil {
		t.Fatal(err)
	}
	if err := h.run(ctx, "r", high, h.claim, ""); !errors.Is(err, errBusy) {
		t.Errorf("claimed at once: %v", err)
	}
	if mark, err := g.Mark(ctx, "r"); mark != high || err != nil {
		t.Errorf("the mark is %s, %v", mark, err)
	}
	if err := c.ZAdd(ctx, "headlease:mark-running:{r}:r", redis.Z{Score: 1, Member: gone}).Err(); err != nil {
		t.Fatal(err)
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
