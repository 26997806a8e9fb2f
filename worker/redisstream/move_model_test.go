package redisstream

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/shard"
)

func modelID(index int) string { return strconv.Itoa(index) + "-0" }

func modelIndex(id string) int {
	var n int
	_, _ = fmt.Sscanf(id, "%d-0", &n) // no test passes without
	return n
}

const (
	hot   = "hot"   // the key that is moved
	other = "other" // another key of its hash shard
)

// world is everything around a key that is moved to and fro: producers, of which
// sends are lost, repeated and late; holders of shards, which freeze and go on
// when others have the shard; the configuration; and operators' commands, which
// die at any step or go on with what was decided long ago. It runs on a model of
// the stream, in one goroutine: whatever one does can happen between any two
// steps of another's.
type world struct {
	*model
	rand  *rand.Rand
	depth int
	fault error

	// tokens that were granted so far in the partition.
	tokens  fence.Token
	holders []*holder
	// marks and effects of the store that handlers write to.
	marks   map[uint32]fence.Token
	handled map[string][]int
	writer  map[string]fence.Token

	producers []*producer
	sent      map[string][]int // answered, by key
	late      []func()
	bodies    int

	// decided configuration.
	version   uint64
	exception *Move
	dedicated uint32
	old       []Move
}

type holder struct {
	shard  uint32
	token  fence.Token
	opened bool
	// claims is where it is in the entries that were pending when it began; -1:
	// done with these.
	claims int
	hand   []int
}

type producer struct {
	id      int
	numbers map[uint32]uint64
	routes  map[string]route
	// key and body of the message under way; body 0: none is. tried: a send of it
	// may have been done, and must be asked for with the same number.
	key   string
	body  int
	tried bool
}

func newWorld(seed uint64, without string) *world {
	w := &world{
		model: newModel(7), rand: rand.New(rand.NewPCG(seed, 1)), marks: map[uint32]fence.Token{}, handled: map[string][]int{},
		writer: map[string]fence.Token{}, sent: map[string][]int{}, version: 1, dedicated: shard.FirstDedicated - 1,
	}
	w.without = without
	for i := range 3 {
		w.producers = append(w.producers, &producer{id: i, numbers: map[uint32]uint64{}, routes: map[string]route{}})
	}
	return w
}

func (w *world) wrong(format string, args ...any) {
	if w.fault == nil {
		w.fault = fmt.Errorf(format, args...)
	}
}

func (w *world) chance(n int) bool { return w.rand.IntN(n) == 0 }

// anything lets somebody do something.
func (w *world) anything() {
	if w.depth > 2 || w.fault != nil {
		return
	}
	w.depth++
	defer func() { w.depth-- }()
	switch w.rand.IntN(12) {
	case 0, 1, 2:
		w.produce(w.producers[w.rand.IntN(len(w.producers))], true)
	case 3:
		if n := len(w.late); n > 0 {
			w.late[w.rand.IntN(n)]() // an old packet; it stays, and may come again
		}
	case 4, 5, 6, 7:
		if len(w.holders) > 0 {
			w.hold(w.holders[w.rand.IntN(len(w.holders))])
		}
	case 8:
		w.grant(w.anyShard())
	case 9:
		if w.chance(4) {
			w.decide()
		}
	case 10:
		w.command(w.exception)
	case 11:
		if len(w.old) > 0 {
			w.command(&w.old[w.rand.IntN(len(w.old))])
		}
	}
}

func (w *world) anyShard() uint32 {
	if w.exception != nil && w.chance(2) {
		return w.exception.Dedicated
	}
	return w.home
}

// grant gives a shard a new holder. The one before does not know.
func (w *world) grant(at uint32) {
	w.tokens++
	w.holders = append(w.holders, &holder{shard: at, token: w.tokens})
	if len(w.holders) > 6 {
		w.holders = slices.Delete(w.holders, 0, 1)
	}
}

func (w *world) retire(h *holder) {
	w.holders = slices.DeleteFunc(w.holders, func(o *holder) bool { return o == h })
}

// hold is one action of a worker's chain.
func (w *world) hold(h *holder) {
	switch {
	case !h.opened:
		if h.token < w.marks[h.shard] { // the store's claim comes first
			w.retire(h)
			return
		}
		w.marks[h.shard] = h.token
		if !w.claim(h.shard, h.token) {
			w.retire(h)
			return
		}
		h.opened = true
	case len(h.hand) == 0:
		if w.chance(2) && w.receive(h) {
			w.retire(h)
			w.grant(h.shard) // it is released and acquired anew
			return
		}
		ids, ok := w.read(h.shard, h.token, h.claims >= 0, h.claims, 1+w.rand.IntN(3))
		switch {
		case !ok:
			w.retire(h)
		case len(ids) > 0 && h.claims >= 0:
			h.claims = ids[len(ids)-1]
		case len(ids) == 0:
			h.claims = -1
		}
		h.hand = ids
	default:
		id := h.hand[0]
		if !w.write(h, w.at(h.shard).entries[id-1]) {
			w.retire(h)
			return
		}
		if w.chance(8) {
			return // it crashes, or is called again, between the write and the ack
		}
		if !w.ack(h.shard, h.token, id) {
			w.retire(h)
			return
		}
		h.hand = h.hand[1:]
	}
}

// receive is Feed.receive.
func (w *world) receive(h *holder) (again bool) {
	for _, key := range w.arrivals(h.shard) {
		p, err := finish(context.Background(), w, h.shard, key)
		if err == nil && p.Stage == StageLease && h.token <= p.Floor {
			return true
		}
	}
	return false
}

// write is the guarded, idempotent write of a handler.
func (w *world) write(h *holder, e modelEntry) bool {
	if h.token < w.marks[h.shard] {
		return false
	}
	w.marks[h.shard] = h.token
	done := w.handled[e.key]
	switch {
	case e.seq > uint64(len(done))+1:
		w.wrong("message %d of %s is handled after %d", e.seq, e.key, len(done))
	case e.seq <= uint64(len(done)) && done[e.seq-1] != e.body:
		w.wrong("there are two messages %d of %s", e.seq, e.key)
	case h.token < w.writer[e.key]:
		w.wrong("token %d writes message %d of %s after token %d", h.token, e.seq, e.key, w.writer[e.key])
	}
	for n, s := range w.shards {
		for i, o := range s.entries {
			if id := i + 1; n != h.shard && o.key == e.key && (id > s.delivered || slices.Contains(s.pending, id)) {
				w.wrong("message %d of %s is handled in shard %d, and %d is in shard %d", e.seq, e.key, h.shard, o.seq, n)
			}
		}
	}
	if e.seq > uint64(len(done)) {
		w.handled[e.key] = append(done, e.body)
	}
	w.writer[e.key] = h.token
	return true
}

// produce is one try of a producer. Its answer, or all of it, may be lost.
func (w *world) produce(p *producer, more bool) {
	if p.body == 0 {
		if !more {
			return
		}
		w.bodies++
		p.body, p.key = w.bodies, hot
		if w.chance(4) {
			p.key = other
		}
	}
	r, ok := p.routes[p.key]
	if !ok {
		r = route{shard: w.home}
	}
	if !p.tried {
		p.numbers[r.shard]++
	}
	number, key, body := p.numbers[r.shard], p.key, p.body
	do := func() (seq uint64, moved *route, late bool) {
		return w.send(r.shard, r, p.id, number, key, body)
	}
	if more && w.chance(4) { // it is under way
		p.tried = true
		w.late = append(w.late, func() { do() })
		if w.chance(2) {
			return // and comes later, or never
		}
		do()
		return
	}
	_, moved, late := do()
	switch {
	case late:
		w.wrong("a producer was refused as late")
	case moved == nil:
		w.sent[p.key] = append(w.sent[p.key], p.body)
		p.body, p.tried = 0, false
	case moved.generation <= r.generation:
		w.wrong("a producer goes in circles: %+v, %+v", r, *moved)
	default:
		p.routes[p.key], p.tried = *moved, false
	}
}

// decide is a step of the configuration, as Pin, Unpin and Unpinned make them.
func (w *world) decide() {
	if w.exception != nil {
		w.old = append(w.old, *w.exception)
		if w.exception.Back {
			return // only its command ends it
		}
		w.version++
		w.exception = &Move{Key: hot, Dedicated: w.exception.Dedicated, Generation: w.version, Back: true}
		return
	}
	w.version++
	w.dedicated++
	w.exception = &Move{Key: hot, Dedicated: w.dedicated, Generation: w.version}
}

// command is a run of an operator's command by what it believes to be decided.
func (w *world) command(mv *Move) {
	if mv == nil {
		return
	}
	move := *mv
	p, err := w.step(&broken{world: w, left: w.rand.IntN(12)}, move)
	if err != nil && !errors.Is(err, ErrSuperseded) && !errors.Is(err, errDied) {
		w.wrong("command: %v", err)
	}
	if err == nil && p.Stage == StageDone && move.Back && w.exception != nil && *w.exception == move {
		w.old, w.exception = append(w.old, move), nil
		w.version++
	}
}

func (w *world) step(p places, mv Move) (Progress, error) {
	if mv.Back {
		return stepBack(context.Background(), p, mv, w.home)
	}
	return stepOut(context.Background(), p, mv, w.home)
}

var errDied = errors.New("the operator's machine is dead")

// broken are the places for a command that dies after so many of its steps.
type broken struct {
	*world
	left int
}

func (b *broken) do(f func() (answer, error)) (answer, error) {
	b.anything()
	a, err := f()
	b.anything()
	if b.left--; b.left < 0 {
		return answer{}, errDied
	}
	return a, err
}

func (b *broken) look(ctx context.Context, at uint32, key string) (answer, error) {
	return b.do(func() (answer, error) { return b.model.look(ctx, at, key) })
}

func (b *broken) claimed(ctx context.Context, at uint32) (bool, error) {
	ok, err := b.model.claimed(ctx, at)
	b.anything()
	return ok, err
}

func (b *broken) stay(ctx context.Context, at uint32, key string, generation uint64) (answer, error) {
	return b.do(func() (answer, error) { return b.model.stay(ctx, at, key, generation) })
}

func (b *broken) seal(ctx context.Context, at uint32, key string, generation uint64, to uint32) (answer, error) {
	return b.do(func() (answer, error) { return b.model.seal(ctx, at, key, generation, to) })
}

func (b *broken) drain(ctx context.Context, at uint32, key string, generation uint64) (answer, error) {
	return b.do(func() (answer, error) { return b.model.drain(ctx, at, key, generation) })
}

func (b *broken) arrive(ctx context.Context, at uint32, key string, generation uint64, from uint32, last uint64) (answer, error) {
	return b.do(func() (answer, error) { return b.model.arrive(ctx, at, key, generation, from, last) })
}

func (b *broken) open(ctx context.Context, at uint32, key string, generation uint64, floor fence.Token) (answer, error) {
	return b.do(func() (answer, error) { return b.model.open(ctx, at, key, generation, floor) })
}

// settle lets everybody finish: no more faults, no new messages.
func (w *world) settle() {
	w.late = nil
	for range 400 {
		if w.fault != nil {
			return
		}
		for _, p := range w.producers {
			w.produce(p, false)
		}
		if mv := w.exception; mv != nil {
			p, err := w.step(w.model, *mv)
			if err != nil {
				w.wrong("at the end: %v", err)
				return
			}
			if p.Stage == StageDone && mv.Back {
				w.exception = nil
			}
		}
		// A live holder per shard; the others wake up now and then.
		for n := range w.shards {
			if !slices.ContainsFunc(w.holders, func(h *holder) bool { return h.shard == n && h.opened && h.token == w.at(n).mark }) {
				w.grant(n)
			}
		}
		if w.exception != nil && w.at(w.exception.Dedicated).mark == 0 {
			w.grant(w.exception.Dedicated)
		}
		for range 4 {
			for _, h := range slices.Clone(w.holders) {
				w.hold(h)
			}
		}
	}
	for _, key := range []string{hot, other} {
		got, want := slices.Sorted(slices.Values(w.handled[key])), slices.Sorted(slices.Values(w.sent[key]))
		if !slices.Equal(got, want) {
			w.wrong("%s: %d messages were answered and %d handled", key, len(want), len(got))
		}
	}
}

func run(seed uint64, without string) (*world, error) {
	w := newWorld(seed, without)
	for range 600 {
		w.anything()
	}
	w.settle()
	return w, w.fault
}

// However a key is moved to and fro: each of its messages is handled once, in
// the order of its number, in one shard at a time, under a token that never goes
// down [F13 F14].
func TestMovesKeepOrderHolderAndToken(t *testing.T) {
	n, moved := 1500, 0
	if testing.Short() {
		n = 200
	}
	for seed := range n {
		w, err := run(uint64(seed), "")
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		moved += int(w.dedicated - shard.FirstDedicated + 1)
	}
	if moved < n {
		t.Errorf("only %d moves in %d runs: nothing is shown", moved, n)
	}
}

// Each rule is needed: without it, a run goes wrong.
func TestMovesNeedEachRule(t *testing.T) {
	for _, rule := range []string{"seal", "drain", "floor", "number carried", "stay", "generation of a seal", "generation of a send"} {
		t.Run(rule, func(t *testing.T) {
			for seed := range 3000 {
				if _, err := run(uint64(seed), rule); err != nil {
					t.Logf("seed %d: %v", seed, err)
					return
				}
			}
			t.Error("nothing goes wrong without it")
		})
	}
}
