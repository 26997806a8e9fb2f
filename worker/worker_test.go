package worker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/regiontest"
	"github.com/headlease/headlease/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ttl = 6 * time.Second

// queue is a source in memory, of all shards, with marks.
type queue struct {
	mu     sync.Mutex
	shards map[string]*line
}

type line struct {
	mark     fence.Token
	messages []worker.Message
	acked    map[string]bool
	parked   map[string]bool
	dead     []string
	more     chan struct{}
}

func newQueue() *queue { return &queue{shards: map[string]*line{}} }

func (q *queue) line(resource string) *line {
	l := q.shards[resource]
	if l == nil {
		l = &line{acked: map[string]bool{}, parked: map[string]bool{}, more: make(chan struct{})}
		q.shards[resource] = l
	}
	return l
}

func (q *queue) send(resource, key string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(resource)
	l.messages = append(l.messages, worker.Message{ID: fmt.Sprint(len(l.messages) + 1), Key: key, Seq: uint64(len(l.messages) + 1)})
	close(l.more)
	l.more = make(chan struct{})
}

// left is how many messages are neither acknowledged nor parked.
func (q *queue) left() (n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, l := range q.shards {
		n += len(l.messages) - len(l.acked)
	}
	return n
}

type feed struct {
	q        *queue
	resource string
	token    fence.Token
	at       int
}

func (q *queue) Open(_ context.Context, resource string, token fence.Token) (worker.Feed, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.line(resource)
	if token < l.mark {
		return nil, &fence.StaleError{Resource: resource, Seen: l.mark, Given: token}
	}
	l.mark = token
	return &feed{q: q, resource: resource, token: token}, nil
}

// guarded runs f under the check.
func (f *feed) guarded(do func(l *line)) error {
	f.q.mu.Lock()
	defer f.q.mu.Unlock()
	l := f.q.line(f.resource)
	if f.token < l.mark {
		return &fence.StaleError{Resource: f.resource, Seen: l.mark, Given: f.token}
	}
	do(l)
	return nil
}

func (f *feed) Next(ctx context.Context, limit int) (out []worker.Message, err error) {
	for {
		var more chan struct{}
		err := f.guarded(func(l *line) {
			for ; f.at < len(l.messages) && len(out) < limit; f.at++ {
				if m := l.messages[f.at]; !l.acked[m.ID] {
					m.Parked = l.parked[m.Key]
					out = append(out, m)
				}
			}
			more = l.more
		})
		if err != nil || len(out) > 0 {
			return out, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-more:
		}
	}
}

func (f *feed) Ack(_ context.Context, messages []worker.Message) error {
	return f.guarded(func(l *line) {
		for _, m := range messages {
			l.acked[m.ID] = true
		}
	})
}

func (f *feed) Park(_ context.Context, m worker.Message, _ string) error {
	return f.guarded(func(l *line) {
		l.acked[m.ID], l.parked[m.Key] = true, true
		l.dead = append(l.dead, m.ID)
	})
}

func (f *feed) Close() {}

// start runs a worker in the bubble; stop ends it in order and returns its
// error.
func start(t *testing.T, n *regiontest.Network, name string, cfg worker.Config, change ...func(*client.Config)) (stop func() error) {
	t.Helper()
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	cc := client.Config{Cluster: "test", Regions: n.Regions(), Links: n.Links(name), TTL: ttl, Clock: clock.NewRuntime(), Logger: quiet}
	for _, f := range change {
		f(&cc)
	}
	c, err := client.New(cc)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Logger = quiet
	cfg.Group.Client, cfg.Group.Name, cfg.Group.Member, cfg.Group.Clock = c, "g", name, clock.NewRuntime()
	if cfg.Group.Shards == nil {
		cfg.Group.Shards = group.Shards(4)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx, cfg) }()
	var once sync.Once
	stop = func() (err error) {
		once.Do(func() {
			cancel()
			err = <-ended
			end, done := context.WithTimeout(context.Background(), time.Second)
			defer done()
			_ = c.Close(end)
		})
		return err
	}
	t.Cleanup(func() { _ = stop() })
	return stop
}

func inRegion(t *testing.T, f func(t *testing.T, n *regiontest.Network)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := regiontest.NewNetwork(t)
		n.Region(regiontest.Config{Name: "eu"}).Own(1)
		f(t, n)
	})
}

func eventually(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(within); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("after %v not: %s", within, what)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// Two workers come and go while messages are sent: each shard's messages are
// handled in order, never two batches of a shard at once, and never more than
// Batch and Parallel.
func TestMessagesOfAShardAreHandledInOrderByOneAtATime(t *testing.T) {
	inRegion(t, func(t *testing.T, n *regiontest.Network) {
		q := newQueue()
		var mu sync.Mutex
		busy, last, inHandle := map[string]bool{}, map[string]uint64{}, map[string]int{}
		handle := func(name string) func(context.Context, *worker.Batch) error {
			return func(_ context.Context, b *worker.Batch) error {
				mu.Lock()
				inHandle[name]++
				if busy[b.Resource()] || inHandle[name] > 3 || len(b.Messages) > 5 {
					t.Errorf("%s: busy %v, %d in the handler, %d messages", b.Resource(), busy[b.Resource()], inHandle[name], len(b.Messages))
				}
				busy[b.Resource()] = true
				for _, m := range b.Messages {
					if m.Seq != last[b.Resource()]+1 {
						t.Errorf("%s: %d after %d", b.Resource(), m.Seq, last[b.Resource()])
					}
					last[b.Resource()] = m.Seq
				}
				mu.Unlock()
				<-time.After(20 * time.Millisecond)
				mu.Lock()
				defer mu.Unlock()
				busy[b.Resource()] = false
				inHandle[name]--
				return nil
			}
		}
		cfg := func(name string) worker.Config {
			return worker.Config{Group: group.Config{Shards: group.Shards(8)}, Source: q, Batch: 5, Parallel: 3, Handle: handle(name)}
		}
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			for i := range 1600 {
				q.send(fmt.Sprintf("shard/%d", i%8), "u")
				<-time.After(5 * time.Millisecond)
			}
		}()
		start(t, n, "a", cfg("a"))
		<-time.After(time.Second)
		stop := start(t, n, "b", cfg("b"))
		<-time.After(2 * time.Second)
		if err := stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
		<-time.After(time.Second)
		start(t, n, "c", cfg("c"))
		<-sent
		eventually(t, 20*time.Second, "all handled", func() bool { return q.left() == 0 })
	})
}

func TestAPoisonMessageHoldsUpItsShardAlone(t *testing.T) {
	inRegion(t, func(t *testing.T, n *regiontest.Network) {
		q := newQueue()
		reg := prometheus.NewRegistry()
		heal := make(chan struct{})
		start(t, n, "a", worker.Config{Source: q, Registerer: reg, Handle: func(_ context.Context, b *worker.Batch) error {
			for _, m := range b.Messages {
				select {
				case <-heal:
				default:
					if m.Key == "bad" {
						panic("poison")
					}
				}
			}
			return nil
		}})
		for _, key := range []string{"good", "bad", "good"} {
			q.send("shard/1", key)
			q.send("shard/2", "good")
		}
		eventually(t, 10*time.Second, "all but the poison and what is behind it", func() bool { return q.left() == 2 })
		<-time.After(time.Minute)
		if n := q.left(); n != 2 {
			t.Errorf("%d messages are left, want the poison and the one behind it", n)
		}
		if v := value(t, reg, "headlease_worker_shards_stalled"); v != 1 {
			t.Errorf("%v shards are stalled, want 1", v)
		}
		if v := value(t, reg, "headlease_worker_oldest_batch_seconds"); v < 50 {
			t.Errorf("the oldest batch is in work for %v s", v)
		}
		close(heal)
		eventually(t, 20*time.Second, "all handled", func() bool { return q.left() == 0 })
		if v := value(t, reg, "headlease_worker_shards_stalled"); v != 0 {
			t.Errorf("%v shards are stalled at the end", v)
		}
	})
}

// fussy is a source that wants a second lease of each shard.
type fussy struct {
	*queue
	first map[string]fence.Token
}

func (q fussy) Open(ctx context.Context, resource string, token fence.Token) (worker.Feed, error) {
	f, err := q.queue.Open(ctx, resource, token)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.first[resource] == 0 {
		q.first[resource] = token
	}
	return fussyFeed{f, token == q.first[resource]}, err
}

type fussyFeed struct {
	worker.Feed
	first bool
}

func (f fussyFeed) Next(ctx context.Context, limit int) ([]worker.Message, error) {
	if f.first {
		return nil, group.ErrNewLease
	}
	return f.Feed.Next(ctx, limit)
}

// A feed that needs a higher token has one at once, and it is no failure.
func TestAFeedIsGivenANewLease(t *testing.T) {
	inRegion(t, func(t *testing.T, n *regiontest.Network) {
		q := fussy{newQueue(), map[string]fence.Token{}}
		q.send("shard/1", "u")
		reg := prometheus.NewRegistry()
		var token fence.Token
		var took time.Duration
		began := time.Now()
		start(t, n, "a", worker.Config{Source: q, Registerer: reg, Handle: func(_ context.Context, b *worker.Batch) error {
			token, took = b.Token(), time.Since(began)
			return nil
		}})
		eventually(t, 10*time.Second, "handled", func() bool { return q.left() == 0 })
		if token <= q.first["shard/1"] || took > 900*time.Millisecond || value(t, reg, "headlease_worker_shards_stalled") != 0 {
			t.Errorf("handled under %v after %v; the first token was %v", token, took, q.first["shard/1"])
		}
	})
}

func TestAParkedMessageTakesThoseOfItsKeyAlong(t *testing.T) {
	inRegion(t, func(t *testing.T, n *regiontest.Network) {
		q := newQueue()
		for _, key := range []string{"good", "bad", "good", "bad", "good"} {
			q.send("shard/1", key)
		}
		var handled []string
		start(t, n, "a", worker.Config{Source: q, MaxAttempts: 3, Handle: func(_ context.Context, b *worker.Batch) error {
			for _, m := range b.Messages {
				if m.Seq == 2 {
					return errors.New("poison")
				}
			}
			for _, m := range b.Messages {
				handled = append(handled, m.ID)
			}
			return nil
		}})
		eventually(t, 20*time.Second, "all are done", func() bool { return q.left() == 0 })
		q.send("shard/1", "bad")
		q.send("shard/1", "good")
		eventually(t, 20*time.Second, "all are done", func() bool { return q.left() == 0 })
		if !slices.Equal(handled, []string{"1", "3", "5", "7"}) || !slices.Equal(q.shards["shard/1"].dead, []string{"2", "4", "6"}) {
			t.Errorf("handled %v, parked %v", handled, q.shards["shard/1"].dead)
		}
	})
}

// Another holder has claimed a shard's store: the chain ends, and the store's
// mark is not raised again with the old token.
func TestAStaleRefusalEndsTheChain(t *testing.T) {
	inRegion(t, func(t *testing.T, n *regiontest.Network) {
		q := newQueue()
		reg := prometheus.NewRegistry()
		handled := 0
		start(t, n, "a", worker.Config{Source: q, Registerer: reg, Handle: func(context.Context, *worker.Batch) error { handled++; return nil }})
		q.send("shard/1", "u")
		eventually(t, 10*time.Second, "handled", func() bool { return q.left() == 0 })
		high, err := fence.NewToken(1000, 1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := q.Open(t.Context(), "shard/1", high); err != nil {
			t.Fatal(err)
		}
		q.send("shard/1", "u")
		eventually(t, 10*time.Second, "refused", func() bool { return value(t, reg, "headlease_worker_stale_total") > 0 })
		<-time.After(5 * time.Second)
		if handled != 1 || q.left() != 1 {
			t.Errorf("%d handled, %d left", handled, q.left())
		}
	})
}

// The claim comes before the first read, and again until it succeeds.
func TestF15TheStoresAreClaimedBeforeAnythingIsRead(t *testing.T) {
	inRegion(t, func(t *testing.T, n *regiontest.Network) {
		q := newQueue()
		q.send("shard/1", "u")
		var mu sync.Mutex
		claims := map[string]int{}
		start(t, n, "a", worker.Config{
			Source: q,
			Claim: func(_ context.Context, s *worker.Shard) error {
				mu.Lock()
				defer mu.Unlock()
				if claims[s.Resource()]++; claims[s.Resource()] < 3 {
					return errors.New("the store is down")
				}
				return nil
			},
			Handle: func(_ context.Context, b *worker.Batch) error {
				mu.Lock()
				defer mu.Unlock()
				if claims[b.Resource()] != 3 {
					t.Errorf("handled after %d claims", claims[b.Resource()])
				}
				return nil
			},
		})
		eventually(t, 20*time.Second, "handled", func() bool { return q.left() == 0 })
	})
}

// skipping is a clock that a freeze can be put into.
type skipping struct {
	clock.Runtime
	by *atomic.Int64
}

func (s skipping) Now() instant.Instant { return s.Runtime.Now().Add(time.Duration(s.by.Load())) }

// After a freeze validity is over before anything has ended the lease's
// context. What was to be handled then is not acknowledged.
func TestNothingIsAcknowledgedWithoutValidity(t *testing.T) {
	inRegion(t, func(t *testing.T, n *regiontest.Network) {
		q := newQueue()
		q.send("shard/1", "u")
		q.send("shard/1", "u")
		var by atomic.Int64
		var handled []uint64
		frozen := false
		start(t, n, "a", worker.Config{Source: q, Batch: 1, Handle: func(_ context.Context, b *worker.Batch) error {
			if b.Messages[0].Seq == 2 && !frozen {
				frozen = true
				by.Add(int64(time.Minute))
				if b.Check() == nil || b.Lease.Context().Err() != nil {
					t.Error("valid after a freeze of a minute, or its context is over already: the test shows nothing")
				}
			}
			if err := b.Check(); err != nil {
				return err
			}
			handled = append(handled, b.Messages[0].Seq)
			return nil
		}}, func(c *client.Config) { c.Clock = skipping{clock.NewRuntime(), &by} })
		eventually(t, time.Minute, "handled", func() bool { return q.left() == 0 })
		if !slices.Equal(handled, []uint64{1, 2}) {
			t.Errorf("handled %v", handled)
		}
	})
}

func value(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetGauge().GetValue() + f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	t.Fatalf("there is no metric %s", name)
	return 0
}

// docs/worker.md and what a worker registers are the same, both ways.
func TestThePageListsTheMetrics(t *testing.T) {
	inRegion(t, func(t *testing.T, n *regiontest.Network) {
		reg := prometheus.NewRegistry()
		stop := start(t, n, "a", worker.Config{Source: newQueue(), Registerer: reg, Handle: func(context.Context, *worker.Batch) error { return nil }})
		<-time.After(time.Second)
		if err := stop(); err != nil {
			t.Error(err)
		}
		page, err := os.ReadFile("../docs/worker.md")
		if err != nil {
			t.Fatal(err)
		}
		var documented, served []string
		for _, m := range regexp.MustCompile("(?m)^\\| `(headlease_[a-z_]+)` \\| (\\w+) \\|").FindAllStringSubmatch(string(page), -1) {
			documented = append(documented, m[1]+" "+m[2])
		}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			served = append(served, f.GetName()+" "+strings.ToLower(f.GetType().String()))
		}
		slices.Sort(documented)
		slices.Sort(served)
		if !slices.Equal(documented, served) {
			t.Errorf("documented %q, served %q", documented, served)
		}
	})
}

func TestConfigNamesAllFaults(t *testing.T) {
	err := worker.Run(t.Context(), worker.Config{Batch: -1, Parallel: -1, MaxAttempts: -1, Group: group.Config{Work: func(context.Context, *group.Shard) error { return nil }}})
	for _, want := range []string{"source:", "handle:", "group.work:", "batch:", "parallel:", "max_attempts:"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}
