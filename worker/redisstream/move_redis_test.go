package redisstream

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/internal/pause"
	"github.com/headlease/headlease/shard"
	"github.com/headlease/headlease/worker"
)

func newGuard(t testing.TB, client redis.UniversalClient) *redisguard.Guard {
	t.Helper()
	g, err := redisguard.New(client, redisguard.Options{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func newMover(t testing.TB, client redis.UniversalClient) *Mover {
	t.Helper()
	m, err := NewMover(client, newGuard(t, client), orders)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// openAt opens a shard under a token.
func openAt(t testing.TB, s *Source, n uint32, token fence.Token) *Feed {
	t.Helper()
	f, err := s.Open(t.Context(), orders.resource(n), token)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return f.(*Feed)
}

// A key is not back because a server does not know it: that is another one, or
// its move out never began.
func TestAKeyIsNotBackOnAnotherServer(t *testing.T) {
	ctx := t.Context()
	client := startServer(t).client()
	home := shard.HashShard(hot, orders.Shards)
	out := Move{Key: hot, Dedicated: shard.FirstDedicated, Generation: 2}
	back := Move{Key: hot, Dedicated: shard.FirstDedicated, Generation: 3, Back: true}
	for name, moved := range map[string]bool{"its own": true, "another": false} {
		if err := client.FlushAll(ctx).Err(); err != nil {
			t.Fatal(err)
		}
		m, s := newMover(t, client), newSource(t, client)
		openAt(t, s, home, 1<<32|1) // workers are there, of a stream of the same name
		openAt(t, s, out.Dedicated, 1<<32|2)
		if moved {
			if p, err := m.Step(ctx, out); err != nil || p.Stage != StageDone {
				t.Fatal(name, p, err)
			}
		}
		if got, err := m.Moved(ctx, hot); err != nil || got != moved {
			t.Errorf("%s: moved %v, %v", name, got, err)
		}
		for range 2 { // the first one leaves no trace by which a second would be done
			if p, err := m.Step(ctx, back); errors.Is(err, ErrNotMoved) == moved || !moved && p.Stage == StageDone {
				t.Errorf("%s: %v, %v", name, p, err)
			}
		}
		unmoved := back
		unmoved.Unmoved = true
		if p, err := m.Step(ctx, unmoved); !moved && (err != nil || p.Stage != StageDone) {
			t.Errorf("%s: taken for unmoved: %v, %v", name, p, err)
		}
	}
}

// The scripts answer as the model does, to any steps in any order: also to those
// that no command takes.
func TestScriptsDoAsTheModelDoes(t *testing.T) {
	srv := startServer(t)
	client := srv.client()
	runs := 60
	if testing.Short() {
		runs = 10
	}
	for seed := range runs {
		if err := client.FlushAll(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		compareScripts(t, client, uint64(seed))
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func compareScripts(t *testing.T, client redis.UniversalClient, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 2))
	ctx := t.Context()
	m := newModel(0)
	places := redisPlaces{client, newGuard(t, client), orders}
	source := newSource(t, client)
	var producers [2]*Producer
	for i := range producers {
		var err error
		if producers[i], err = NewProducer(client, orders); err != nil {
			t.Fatal(err)
		}
	}
	shards := []uint32{0, shard.FirstDedicated, shard.FirstDedicated + 1}
	feeds := map[uint32]*Feed{}
	tokens := fence.Token(1 << 32)
	ids := map[uint32]map[string]int{0: {}, shards[1]: {}, shards[2]: {}} // of entries, in the model
	numbers := [2]map[uint32]uint64{{}, {}}
	for i := range 250 {
		at, key := shards[r.IntN(3)], []string{hot, other}[r.IntN(2)]
		generation := uint64(r.IntN(6))
		var what string
		var got, want answer
		var err error
		switch r.IntN(9) {
		case 0:
			what = "look"
			got, err = places.look(ctx, at, key)
			want, _ = m.look(ctx, at, key)
		case 1:
			what = fmt.Sprintf("stay %d", generation)
			got, err = places.stay(ctx, at, key, generation)
			want, _ = m.stay(ctx, at, key, generation)
		case 2:
			to := shards[r.IntN(3)]
			what = fmt.Sprintf("seal %d to %d", generation, to)
			got, err = places.seal(ctx, at, key, generation, to)
			want, _ = m.seal(ctx, at, key, generation, to)
		case 3:
			what = fmt.Sprintf("drain %d", generation)
			got, err = places.drain(ctx, at, key, generation)
			want, _ = m.drain(ctx, at, key, generation)
		case 4:
			from, last := shards[r.IntN(3)], uint64(r.IntN(9))
			what = fmt.Sprintf("arrive %d from %d after %d", generation, from, last)
			got, err = places.arrive(ctx, at, key, generation, from, last)
			want, _ = m.arrive(ctx, at, key, generation, from, last)
		case 5:
			floor := tokens - fence.Token(r.IntN(3))
			if r.IntN(3) == 0 {
				floor = 0
			}
			what = fmt.Sprintf("open %d above %d", generation, floor)
			got, err = places.open(ctx, at, key, generation, floor)
			want, _ = m.open(ctx, at, key, generation, floor)
		case 6:
			what = fmt.Sprintf("send at generation %d", generation)
			p := r.IntN(2)
			if r.IntN(4) > 0 {
				numbers[p][at]++
			} else if numbers[p][at] == 0 {
				continue
			}
			way := route{shard: at, generation: generation, from: shards[r.IntN(3)], last: uint64(r.IntN(9))}
			k, _ := orders.keysOf(at)
			sent, moved, sendErr := producers[p].try(ctx, k, way, numbers[p][at], key, fmt.Append(nil, i))
			seq, wantMoved, late := m.send(at, way, p, numbers[p][at], key, i)
			if late != (sendErr != nil) || !late && (sent.Seq != seq || (moved == nil) != (wantMoved == nil) || moved != nil && *moved != *wantMoved) {
				t.Errorf("step %d, %s of %s at %d: %+v %+v %v, want %d %+v late %v", i, what, key, at, sent, moved, sendErr, seq, wantMoved, late)
			}
			continue
		case 7:
			tokens++
			feeds[at] = openAt(t, source, at, tokens)
			m.claim(at, tokens)
			continue
		case 8:
			f := feeds[at]
			if f == nil {
				continue
			}
			f.cursor, f.last = "", "99999999999999-0" // only what is new: the others are another feed's
			messages, _, readErr := f.read(ctx, 2)
			wantIDs, _ := m.read(at, f.token, false, 0, 2)
			if readErr != nil || len(messages) != len(wantIDs) {
				t.Errorf("step %d, read at %d: %v, %v, want %v", i, at, messages, readErr, wantIDs)
				return
			}
			for j, message := range messages {
				e := m.at(at).entries[wantIDs[j]-1]
				if message.Key != e.key || message.Seq != e.seq || string(message.Body) != fmt.Sprint(e.body) {
					t.Errorf("step %d, read at %d: %+v, want %+v", i, at, message, e)
				}
				ids[at][message.ID] = wantIDs[j]
				if r.IntN(4) > 0 {
					if err := f.Ack(ctx, messages[j:j+1]); err != nil {
						t.Error(err)
					}
					m.ack(at, f.token, wantIDs[j])
				}
			}
			continue
		}
		// The ids of streams differ.
		got.upTo, want.upTo = "", ""
		if err != nil || got != want {
			t.Errorf("step %d, %s of %s at %d: %+v %v, want %+v", i, what, key, at, got, err, want)
			return
		}
	}
}

// leases grants the shards of a test, with rising tokens.
type leases struct {
	mu   sync.Mutex
	last fence.Token
}

func (l *leases) grant() fence.Token {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	return l.last
}

// outcome is what handlers wrote, by key.
type outcome struct {
	mu     sync.Mutex
	seqs   map[string]uint64
	tokens map[string]fence.Token
	repeat int
}

func (o *outcome) write(t *testing.T, m worker.Message, at uint32, token fence.Token) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if m.Seq > o.seqs[m.Key]+1 || token < o.tokens[m.Key] {
		t.Errorf("message %d of %s in shard %d under %v, after %d under %v", m.Seq, m.Key, at, token, o.seqs[m.Key], o.tokens[m.Key])
	}
	if m.Seq <= o.seqs[m.Key] {
		o.repeat++
	}
	o.seqs[m.Key], o.tokens[m.Key] = max(o.seqs[m.Key], m.Seq), token
}

// chain handles a shard's messages as package worker does, losing its lease now
// and then in the midst of a batch.
func chain(ctx context.Context, t *testing.T, s *Source, l *leases, o *outcome, at uint32, r *rand.Rand) {
	for ; ctx.Err() == nil; _ = pause.For(ctx, time.Millisecond) {
		token := l.grant()
		feed, err := s.Open(ctx, orders.resource(at), token)
		for err == nil {
			var messages []worker.Message
			if messages, err = feed.Next(ctx, 5); err != nil {
				break
			}
			for i, m := range messages {
				o.write(t, m, at, token)
				if r.IntN(100) == 0 {
					err = errLost
					break
				}
				if err = feed.Ack(ctx, messages[i:i+1]); err != nil {
					break
				}
			}
		}
		if feed != nil {
			feed.Close()
		}
		if stale := (*fence.StaleError)(nil); errors.As(err, &stale) {
			t.Errorf("shard %d: %v", at, err)
		}
	}
}

var errLost = errors.New("the lease is lost")

// A key is moved out and back under load, by commands that die after any of
// their steps, while the server is killed and workers lose their leases.
func TestAKeyIsMovedUnderLoad(t *testing.T) {
	srv := startServer(t)
	client := srv.client()
	source := newSource(t, client, func(c *Config) { c.Poll = 5 * time.Millisecond })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	work, stop := context.WithCancel(ctx)
	defer stop()
	l := leases{last: 1 << 32}
	o := &outcome{seqs: map[string]uint64{}, tokens: map[string]fence.Token{}}
	var workers, producers sync.WaitGroup
	serve := func(at uint32) {
		workers.Go(func() { chain(work, t, source, &l, o, at, rand.New(rand.NewPCG(uint64(at), 3))) })
	}
	serve(0)
	produced, over := make(chan struct{}), make(chan struct{})

	var mu sync.Mutex
	highest := map[string]uint64{}
	for i := range 3 {
		producers.Go(func() {
			p, err := NewProducer(client, orders)
			if err != nil {
				t.Error(err)
				return
			}
			for n := 0; ; n++ {
				select {
				case <-produced:
					return
				default:
				}
				key := []string{hot, hot, other}[(n+i)%3]
				sent, err := p.Send(ctx, key, fmt.Appendf(nil, "%d/%d", i, n))
				if err != nil {
					t.Error(err)
					return
				}
				_ = pause.For(ctx, time.Millisecond)
				mu.Lock()
				highest[key] = max(highest[key], sent.Seq)
				mu.Unlock()
			}
		})
	}
	go func() {
		defer close(over)
		r := rand.New(rand.NewPCG(1, 4))
		for round := range 6 {
			mv := Move{Key: hot, Dedicated: shard.FirstDedicated + uint32(round/2), Generation: uint64(round + 2), Back: round%2 == 1}
			if !mv.Back {
				serve(mv.Dedicated)
			}
			if round == 3 {
				srv.kill()
				srv.start()
			}
			for {
				p, err := step(ctx, t, client, r.IntN(8), mv)
				_ = pause.For(ctx, time.Millisecond)
				if ctx.Err() != nil {
					t.Errorf("round %d: %+v, %v", round, p, err)
					return
				}
				if err == nil && p.Stage == StageDone {
					break
				}
			}
		}
	}()
	<-over
	close(produced)
	producers.Wait()
	for _, key := range []string{hot, other} {
		for ctx.Err() == nil {
			o.mu.Lock()
			done := o.seqs[key] == highest[key]
			o.mu.Unlock()
			if done {
				break
			}
			_ = pause.For(ctx, 10*time.Millisecond)
		}
	}
	stop()
	workers.Wait()
	if o.seqs[hot] != highest[hot] || o.seqs[other] != highest[other] || highest[hot] < 50 {
		t.Errorf("handled %v of %v", o.seqs, highest)
	}
	t.Logf("handled %v, %d repeats, the last tokens %v", o.seqs, o.repeat, o.tokens)
}

// step is a command that dies after some of its steps.
func step(ctx context.Context, t *testing.T, client redis.UniversalClient, left int, mv Move) (Progress, error) {
	m := newMover(t, client)
	m.places = &dying{m.places, left}
	return m.Step(ctx, mv)
}

type dying struct {
	places
	left int
}

func (d *dying) dies(err error) error {
	if d.left--; d.left < 0 {
		return errDied
	}
	return err
}

func (d *dying) seal(ctx context.Context, at uint32, key string, generation uint64, to uint32) (answer, error) {
	a, err := d.places.seal(ctx, at, key, generation, to)
	return a, d.dies(err)
}

func (d *dying) drain(ctx context.Context, at uint32, key string, generation uint64) (answer, error) {
	a, err := d.places.drain(ctx, at, key, generation)
	return a, d.dies(err)
}

func (d *dying) arrive(ctx context.Context, at uint32, key string, generation uint64, from uint32, last uint64) (answer, error) {
	a, err := d.places.arrive(ctx, at, key, generation, from, last)
	return a, d.dies(err)
}

// An operator's command that dies after the seal leaves nothing to be done: the
// worker of the dedicated shard ends the move.
func TestASealedMoveEndsByItself(t *testing.T) {
	srv := startServer(t)
	client := srv.client()
	source := newSource(t, client)
	mover := newMover(t, client)
	mv := Move{Key: hot, Dedicated: shard.FirstDedicated, Generation: 2}

	produce(t, client, hot, 3)
	if p, err := mover.Step(t.Context(), mv); err != nil || p.Stage != StageWorker {
		t.Fatalf("%+v, %v: sealed before a worker serves the shard", p, err)
	}
	there := openAt(t, source, mv.Dedicated, token(t, 1))
	f := openAt(t, source, 0, token(t, 2))
	first := next(t, f, 2)
	if p, err := mover.Step(t.Context(), mv); err != nil || p.Stage != StageDrain || p.Left != 3 {
		t.Fatalf("%+v, %v", p, err)
	}
	// The next producer knows nothing of it, and need not wait.
	p, err := NewProducer(client, orders)
	if err != nil {
		t.Fatal(err)
	}
	sent, err := p.Send(t.Context(), hot, []byte("after"))
	if err != nil || sent.Shard != mv.Dedicated || sent.Seq != 4 {
		t.Fatalf("%+v, %v", sent, err)
	}
	if m, _, err := there.read(t.Context(), 10); err != nil || len(m) > 0 {
		t.Fatalf("%v, %v: handled before what was sent before it", m, err)
	}
	for _, m := range [][]worker.Message{first, next(t, f, 2)} {
		if err := f.Ack(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	// The token of the dedicated shard's holder is below one that handled the key.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := there.Next(ctx, 10); !errors.Is(err, group.ErrNewLease) {
		t.Fatalf("the older token goes on: %v", err)
	}
	there = openAt(t, source, mv.Dedicated, token(t, 3))
	if m := next(t, there, 10); len(m) != 1 || m[0].Seq != 4 || string(m[0].Body) != "after" {
		t.Fatalf("%+v", m)
	}
	if p, err := mover.Step(t.Context(), mv); err != nil || p.Stage != StageDone {
		t.Errorf("%+v, %v", p, err)
	}
}

// A key with parked messages is not moved, and one that is parked while it moves
// waits for the operator: what follows must not overtake.
func TestAParkedKeyIsNotMoved(t *testing.T) {
	srv := startServer(t)
	client := srv.client()
	source := newSource(t, client)
	mover := newMover(t, client)
	mv := Move{Key: hot, Dedicated: shard.FirstDedicated, Generation: 2}
	openAt(t, source, mv.Dedicated, token(t, 1))
	f := openAt(t, source, 0, token(t, 2))

	produce(t, client, hot, 1)
	if err := f.Park(t.Context(), next(t, f, 1)[0], "bad"); err != nil {
		t.Fatal(err)
	}
	if p, err := mover.Step(t.Context(), mv); err != nil || p.Stage != StageParked || p.Left != 1 {
		t.Fatalf("%+v, %v", p, err)
	}
	if sent := sendOne(t, client, hot); sent.Shard != 0 {
		t.Fatalf("%+v: sealed all the same", sent)
	}
	unpark(t, client, f)
	if p, err := mover.Step(t.Context(), mv); err != nil || p.Stage != StageDrain {
		t.Fatalf("%+v, %v", p, err)
	}
	if err := f.Park(t.Context(), next(t, f, 1)[0], "bad"); err != nil {
		t.Fatal(err)
	}
	if p, err := mover.Step(t.Context(), mv); err != nil || p.Stage != StageParked {
		t.Fatalf("%+v, %v", p, err)
	}
	if sent := sendOne(t, client, hot); sent.Shard != mv.Dedicated || sent.Seq != 3 {
		t.Fatalf("%+v: a producer waits for a parked message", sent)
	}
	unpark(t, client, f)
	if p, err := mover.Step(t.Context(), mv); err != nil || p.Stage != StageLease || p.Floor != token(t, 2) {
		t.Fatalf("%+v, %v", p, err)
	}
}

func sendOne(t *testing.T, client redis.UniversalClient, key string) Sent {
	t.Helper()
	p, err := NewProducer(client, orders)
	if err != nil {
		t.Fatal(err)
	}
	sent, err := p.Send(t.Context(), key, nil)
	if err != nil {
		t.Fatal(err)
	}
	return sent
}

func unpark(t *testing.T, client redis.UniversalClient, f *Feed) {
	t.Helper()
	if err := client.Del(t.Context(), f.keys.dead).Err(); err != nil {
		t.Fatal(err)
	}
	if ok, err := Unpark(t.Context(), client, orders, hot); err != nil || !ok {
		t.Fatal(ok, err)
	}
}
