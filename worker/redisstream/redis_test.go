package redisstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

var orders = Stream{Name: "orders", Shards: 1}

const resource = "shard/0"

func token(t testing.TB, seq fence.Seq) fence.Token {
	t.Helper()
	tok, err := fence.NewToken(1, seq)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func newSource(t testing.TB, client redis.UniversalClient, change ...func(*Config)) *Source {
	t.Helper()
	g, err := redisguard.New(client, redisguard.Options{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{Client: client, Guard: g, Stream: orders, Logger: quiet, Poll: 20 * time.Millisecond, TrimEvery: -1}
	for _, f := range change {
		f(&cfg)
	}
	s, err := NewSource(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func open(t testing.TB, s *Source, seq fence.Seq) *Feed {
	t.Helper()
	f, err := s.Open(t.Context(), resource, token(t, seq))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return f.(*Feed)
}

func next(t testing.TB, f *Feed, limit int) []worker.Message {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	m, err := f.Next(ctx, limit)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func produce(t testing.TB, client redis.UniversalClient, key string, n int) {
	t.Helper()
	p, err := NewProducer(client, orders)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if _, err := p.Send(t.Context(), key, fmt.Append(nil, i)); err != nil {
			t.Fatal(err)
		}
	}
}

func seqs(messages []worker.Message) (out []uint64) {
	for _, m := range messages {
		out = append(out, m.Seq)
	}
	return out
}

// Several producers write for the same keys while the server is killed and
// started again and producers end in the midst of a send: the numbers of each
// key are 1, 2, 3 … in the stream, and every send that was answered is there
// once.
func TestProducersLeaveNoGapAndSwapNothing(t *testing.T) {
	srv := startServer(t)
	client := srv.client()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var mu sync.Mutex
	answered := map[string]string{} // body → id
	send := func(ctx context.Context, p *Producer, r *rand.Rand, body string) error {
		sent, err := p.Send(ctx, fmt.Sprintf("user/%d", r.IntN(5)), []byte(body))
		if err == nil {
			mu.Lock()
			answered[body] = sent.ID
			mu.Unlock()
		}
		return err
	}
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 1))
			for life := range 4 {
				p, err := NewProducer(client, orders)
				if err != nil {
					t.Error(err)
					return
				}
				for n := range 60 {
					if err := send(ctx, p, r, fmt.Sprintf("%d/%d/%d", i, life, n)); err != nil {
						t.Error(err)
						return
					}
				}
				// Its last send is broken off at any point.
				crash, done := context.WithTimeout(ctx, time.Duration(r.IntN(500))*time.Microsecond)
				_ = send(crash, p, r, fmt.Sprintf("%d/%d/crash", i, life))
				done()
			}
		})
	}
	for range 2 {
		<-time.After(100 * time.Millisecond)
		srv.kill()
		srv.start()
	}
	all.Wait()
	key, err := orders.Key(resource)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := client.XRange(ctx, key, "-", "+").Result()
	if err != nil {
		t.Fatal(err)
	}
	last, bodies := map[string]int{}, map[string]bool{}
	for _, e := range entries {
		user, body := e.Values["key"].(string), e.Values["body"].(string)
		if last[user]++; fmt.Sprint(last[user]) != e.Values["seq"] {
			t.Fatalf("entry %s of %s has number %v, want %d", e.ID, user, e.Values["seq"], last[user])
		}
		if bodies[body] {
			t.Fatalf("%s is there twice", body)
		}
		bodies[body] = true
		if id, ok := answered[body]; ok && id != e.ID {
			t.Fatalf("%s is %s, and the answer was %s", body, e.ID, id)
		}
	}
	for body := range answered {
		if !bodies[body] {
			t.Fatalf("%s was answered and is not there", body)
		}
	}
	if len(answered) < 4*4*60 {
		t.Errorf("only %d of 960 sends were answered", len(answered))
	}
}

// A send that was delayed and overtaken by the same producer's next one comes
// to nothing.
func TestALateSendIsRefused(t *testing.T) {
	client := startServer(t).client()
	p, err := NewProducer(client, orders)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Send(t.Context(), "u", []byte("first")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Send(t.Context(), "u", []byte("second")); err != nil {
		t.Fatal(err)
	}
	k, err := orders.keys(resource)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := p.try(t.Context(), k, route{}, 1, "u", []byte("first")); !redis.HasErrorPrefix(err, "LATE ") {
		t.Errorf("the late one: %v", err)
	}
	again, _, err := p.try(t.Context(), k, route{}, 2, "u", []byte("second"))
	if err != nil || again.Seq != 2 {
		t.Errorf("a repeated send: %+v, %v", again, err)
	}
	if n := client.XLen(t.Context(), k.stream).Val(); n != 2 {
		t.Errorf("%d entries", n)
	}
}

func TestThePredecessorsPendingComeFirst(t *testing.T) {
	client := startServer(t).client()
	produce(t, client, "u", 300)
	s := newSource(t, client)
	first := open(t, s, 1)
	delivered := next(t, first, 250) // in parts: more than one claim is needed
	if err := first.Ack(t.Context(), delivered[:3]); err != nil {
		t.Fatal(err)
	}
	second := open(t, s, 2)
	want := uint64(4)
	for want <= 300 {
		m := next(t, second, 20)
		for _, seq := range seqs(m) {
			if seq != want {
				t.Fatalf("%d after %d", seq, want-1)
			}
			want++
		}
		if err := second.Ack(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
}

// A holder that woke up late takes nothing out of its successor's sight, and
// acknowledges nothing.
func TestALateHolderReadsNothing(t *testing.T) {
	client := startServer(t).client()
	produce(t, client, "u", 10)
	s := newSource(t, client)
	late := open(t, s, 1)
	got := next(t, late, 2)
	holder := open(t, s, 2)
	var stale *fence.StaleError
	if _, err := late.Next(t.Context(), 5); !errors.As(err, &stale) {
		t.Errorf("a late read: %v", err)
	}
	if err := late.Ack(t.Context(), got); !errors.As(err, &stale) {
		t.Errorf("a late acknowledgement: %v", err)
	}
	if err := late.Park(t.Context(), got[0], "x"); !errors.As(err, &stale) {
		t.Errorf("a late parking: %v", err)
	}
	var all []uint64
	for len(all) < 10 {
		all = append(all, seqs(next(t, holder, 100))...)
	}
	if !slices.Equal(all, []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}) {
		t.Errorf("%v", all)
	}
}

// An answer to a read that was lost leaves entries delivered to nobody; they
// come before what is new.
func TestALostReadIsReadAgain(t *testing.T) {
	client := startServer(t).client()
	produce(t, client, "u", 6)
	s := newSource(t, client)
	f := open(t, s, 1)
	m := next(t, f, 2)
	if err := f.Ack(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if _, err := f.run(t.Context(), readScript, []string{f.keys.stream, f.keys.parked, f.keys.arriving}, s.cfg.Group, consumer, 2, f.last); err != nil {
		t.Fatal(err) // and its answer is thrown away
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.Next(ended, 1); err == nil {
		t.Fatal("a read whose context has ended succeeded")
	}
	if got := seqs(next(t, f, 10)); !slices.Equal(got, []uint64{3, 4}) {
		t.Errorf("%v", got)
	}
	if got := seqs(next(t, f, 10)); !slices.Equal(got, []uint64{5, 6}) {
		t.Errorf("%v", got)
	}
}

// repeating does calls twice, as go-redis does by itself when the answer to the
// first one is late or its connection broke.
type repeating struct{}

func (repeating) DialHook(next redis.DialHook) redis.DialHook { return next }
func (repeating) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (repeating) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := next(ctx, cmd); err != nil { // the script is not known yet
			return err
		}
		cmd.SetErr(nil)
		return next(ctx, cmd)
	}
}

// TestAReadThatTheClientRepeats: what was delivered to the first call, whose
// answer nobody has, comes before what is new. Nothing else would bring it back:
// the feed has seen no error.
func TestAReadThatTheClientRepeats(t *testing.T) {
	srv := startServer(t)
	client, twice := srv.client(), srv.client()
	twice.AddHook(repeating{})
	produce(t, client, "u", 8)
	f := open(t, newSource(t, client), 1)
	next(t, f, 3) // in work when the next holder comes
	f = open(t, newSource(t, twice), 2)
	var got []uint64
	for _, n := range []int{2, 2, 2, 1, 2} {
		m := next(t, f, n)
		got = append(got, seqs(m)...)
		if len(m) > 1 { // one of them stays in work
			if err := f.Ack(t.Context(), m[1:]); err != nil {
				t.Fatal(err)
			}
		}
	}
	if !slices.Equal(got, []uint64{1, 2, 3, 4, 5, 6, 7, 8}) {
		t.Errorf("%v", got)
	}
}

func TestTrimDropsNothingThatIsNotAcknowledged(t *testing.T) {
	client := startServer(t).client()
	s := newSource(t, client)
	other := newSource(t, client, func(c *Config) { c.Group = "others" })
	f, g := open(t, s, 1), open(t, other, 1)
	key := f.keys.stream
	trim := func(want int64) {
		t.Helper()
		if n, err := Trim(t.Context(), client, key); err != nil || n != want {
			t.Errorf("%d trimmed (%v), want %d", n, err, want)
		}
	}
	if n, err := Trim(t.Context(), client, "{shard/0}:nothing"); n != 0 || err != nil {
		t.Errorf("no stream: %d, %v", n, err)
	}
	produce(t, client, "u", 10)
	trim(0)
	a := next(t, f, 4)
	if err := f.Ack(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	trim(0) // the other group has read nothing
	b := next(t, g, 10)
	if err := g.Ack(t.Context(), append(slices.Clone(b[:2]), b[3:]...)); err != nil {
		t.Fatal(err)
	}
	trim(2) // b[2] is pending
	if err := g.Ack(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	trim(1) // the last delivered one of the first group stays, and all above
	if got := seqs(next(t, f, 10)); !slices.Equal(got, []uint64{5, 6, 7, 8, 9, 10}) {
		t.Errorf("left to read: %v", got)
	}
}

func TestParkedKeysKeepTheirOrder(t *testing.T) {
	client := startServer(t).client()
	s := newSource(t, client)
	f := open(t, s, 1)
	produce(t, client, "bad", 2)
	produce(t, client, "good", 1)
	m := next(t, f, 10)
	if err := f.Park(t.Context(), m[0], "it is poison"); err != nil {
		t.Fatal(err)
	}
	if err := f.Park(t.Context(), m[0], "repeated, since the answer was lost"); err != nil {
		t.Fatal(err)
	}
	f = open(t, s, 2)
	m = next(t, f, 10)
	if len(m) != 2 || !m[0].Parked || m[1].Parked {
		t.Fatalf("%+v", m)
	}
	if _, err := Unpark(t.Context(), s.cfg.Client, orders, "bad"); !redis.HasErrorPrefix(err, "PARKED ") && err == nil {
		t.Error("unparked while a message of the key is parked")
	}
	dead, err := client.XRange(t.Context(), f.keys.dead, "-", "+").Result()
	if err != nil || len(dead) != 1 || dead[0].Values["seq"] != "1" || dead[0].Values["reason"] != "it is poison" {
		t.Fatalf("%v, %v", dead, err)
	}
	client.XDel(t.Context(), f.keys.dead, dead[0].ID)
	if was, err := Unpark(t.Context(), s.cfg.Client, orders, "bad"); !was || err != nil {
		t.Errorf("unpark: %v, %v", was, err)
	}
	f = open(t, s, 3)
	if m = next(t, f, 10); len(m) != 2 || m[0].Parked {
		t.Errorf("%+v", m)
	}
}

func TestApplyWritesAndAcknowledgesInOneStep(t *testing.T) {
	client := startServer(t).client()
	s := newSource(t, client)
	f := open(t, s, 1)
	produce(t, client, "u", 3)
	script, err := NewApplyScript(`return redis.call('INCRBY', KEYS[1], ARGV[1])`)
	if err != nil {
		t.Fatal(err)
	}
	total, err := redisguard.Key(resource, "total")
	if err != nil {
		t.Fatal(err)
	}
	b := &worker.Batch{Messages: next(t, f, 10), Feed: f}
	if got, err := script.Apply(t.Context(), b, []string{total}, 5); err != nil || got != int64(5) {
		t.Fatalf("%v, %v", got, err)
	}
	if p := client.XPending(t.Context(), f.keys.stream, s.cfg.Group).Val(); p.Count != 0 {
		t.Errorf("%d are pending", p.Count)
	}
	// The answer was lost, and the batch, or each message of it, is tried again.
	if got, err := script.Apply(t.Context(), b, []string{total}, 5); err != nil || got != nil {
		t.Errorf("again: %v, %v", got, err)
	}
	one := &worker.Batch{Messages: b.Messages[1:2], Feed: f}
	if got, err := script.Apply(t.Context(), one, []string{total}, 5); err != nil || got != nil {
		t.Errorf("one of it again: %v, %v", got, err)
	}
	open(t, s, 2)
	var stale *fence.StaleError
	if _, err := script.Apply(t.Context(), b, []string{total}, 5); !errors.As(err, &stale) {
		t.Errorf("a late one: %v", err)
	}
	if v := client.Get(t.Context(), total).Val(); v != "5" {
		t.Errorf("the total is %s", v)
	}
}

// Without a hint a message is found by polling, with one long before.
func TestAHintWakesAFeed(t *testing.T) {
	client := startServer(t).client()
	s := newSource(t, client, func(c *Config) { c.Poll = time.Hour })
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx) })
	defer running.Wait()
	defer cancel()
	f := open(t, s, 1)
	for client.PubSubNumSub(ctx, orders.channel()).Val()[orders.channel()] == 0 {
		<-time.After(time.Millisecond)
	}
	got := make(chan []uint64, 1)
	go func() { got <- seqs(next(t, f, 1)) }()
	<-time.After(20 * time.Millisecond) // it waits by now, or finds the message at once
	produce(t, client, "u", 1)
	if m := <-got; !slices.Equal(m, []uint64{1}) {
		t.Errorf("%v", m)
	}
}

// TestWhatIsThereIsReadWithoutAWait: a reply without entries that only says that
// nothing is to be taken over, or that what was is gone, is no reason to wait for
// more.
func TestWhatIsThereIsReadWithoutAWait(t *testing.T) {
	client := startServer(t).client()
	source := newSource(t, client, func(cfg *Config) { cfg.Poll = time.Hour }) // and nobody hears its hints
	produce(t, client, "a", 1)
	f := open(t, source, 1)
	if m := next(t, f, 10); len(m) != 1 {
		t.Fatalf("got %v at first", seqs(m))
	}
	produce(t, client, "a", 2)
	// Delivered by a call whose answer was lost, and deleted by somebody.
	lost, err := client.XReadGroup(t.Context(), &redis.XReadGroupArgs{
		Group: "workers", Consumer: consumer, Streams: []string{f.keys.stream, ">"}, Count: 10,
	}).Result()
	if err != nil || len(lost) != 1 || len(lost[0].Messages) != 2 {
		t.Fatalf("lost %v: %v", lost, err)
	}
	for _, m := range lost[0].Messages {
		if err := client.XDel(t.Context(), f.keys.stream, m.ID).Err(); err != nil {
			t.Fatal(err)
		}
	}
	produce(t, client, "a", 1)
	if m := next(t, f, 10); len(m) != 1 || m[0].Seq != 4 {
		t.Errorf("got %v behind entries that are gone, want 4", seqs(m))
	}
}
