package watch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// small makes every bound easy to reach.
func small(n *naive) Config {
	return Config{
		State: n.State, RingEvents: 12, RingBytes: 4000, QueueEvents: 5, QueueBytes: 1200, QueuedBytes: 4000,
		ResponseEvents: 3, ResponseBytes: 900,
		Watchers: 8, PerConnection: 4, Registerer: prometheus.NewRegistry(),
	}
}

// source makes random entries.
type source struct {
	model *naive
	token uint64
}

var names = []string{"lock/a", "lock/ab", "lock/b", "shard/1", "lock/a#0"}

func (s *source) entry(draw func(n int) int) []*pb.WatchEvent {
	held := s.model.State().(naiveState).leases
	now := map[string]uint64{}
	for r, l := range held {
		now[r] = l.GetToken()
	}
	var events []*pb.WatchEvent
	for range draw(draw(4)*2 + 1) {
		r := names[draw(len(names))]
		switch token, ok := now[r]; {
		case !ok:
			s.token++
			now[r] = s.token
			events = append(events, granted(r, s.token, fmt.Sprint("v", draw(3))))
		case draw(3) == 0:
			events = append(events, valued(r, token, strings.Repeat("x", draw(300))))
		default:
			delete(now, r)
			events = append(events, ended(r, token))
		}
	}
	return events
}

// A consumer that applies what it is told has, wherever it is told that this is
// all, exactly the region's state: for any events, bounds, slowness, resumes
// and replaced states.
func TestAConsumerHasExactlyTheStateOfTheRevision(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		model := newNaive(10)
		h := New(small(model))
		src := &source{model: model}
		draw := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "n") }
		type watching struct {
			w *Watcher
			c *consumer
		}
		var open []watching
		queries := []Query{
			{Resource: "lock/a", Partition: "p"}, {Resource: "shard/1", Partition: "q"}, {Prefix: "lock/"}, {Prefix: "lock/a"}, {},
		}
		next := func(x watching) {
			r, err := x.w.Next(context.Background(), 0)
			if err == nil {
				err = x.c.take(r)
			}
			if err == nil {
				err = x.c.check(model)
			}
			if err != nil {
				t.Fatalf("%+v: %v", x.c.query, err)
			}
		}
		apply := func() {
			for range draw(4) {
				events := src.entry(draw)
				model.apply(events)
				h.apply(model.last(), events)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"apply":    func(*rapid.T) { apply() },
			"dispatch": func(*rapid.T) { h.dispatch() },
			"next": func(*rapid.T) {
				for range draw(6) {
					if len(open) > 0 {
						next(open[draw(len(open))])
					}
				}
			},
			"watch": func(*rapid.T) {
				q := queries[draw(len(queries))]
				w, err := h.Watch(q, fmt.Sprint(draw(3)), 7, 0)
				if err != nil {
					if !errors.Is(err, ErrTooMany) {
						t.Fatal(err)
					}
					return
				}
				open = append(open, watching{w, &consumer{query: q}})
			},
			"resume": func(*rapid.T) {
				if len(open) == 0 {
					return
				}
				i := draw(len(open))
				x := open[i]
				if x.c.partial || !x.c.known || x.c.revision > x.c.complete {
					return // it would ask anew
				}
				x.w.Close()
				apply()
				w, err := h.Watch(x.c.query, fmt.Sprint(draw(3)), 7, x.c.complete)
				if err != nil {
					open = append(open[:i], open[i+1:]...)
					return
				}
				open[i].w = w
				if draw(2) == 0 { // before what was applied just now is handed on
					next(open[i])
				}
			},
			"close": func(*rapid.T) {
				if len(open) > 0 {
					i := draw(len(open))
					open[i].w.Close()
					open[i].w.Close()
					open = append(open[:i], open[i+1:]...)
				}
			},
			"restore": func(*rapid.T) {
				for range draw(5) { // entries of which this server sees nothing
					model.apply(src.entry(draw))
				}
				h.Restored()
			},
			"": func(*rapid.T) {
				if h.queued.Load() > 4000 || h.in.ring.events > 12+9*blockEntries || len(h.out.index.all) != len(open) {
					t.Fatalf("out of bounds: %d bytes queued, %d events in the ring, %d watchers of %d",
						h.queued.Load(), h.in.ring.events, len(h.out.index.all), len(open))
				}
			},
		})
		for more := true; more; {
			more = h.dispatch()
		}
		for _, x := range open {
			for range 300 {
				if next(x); x.c.complete == model.last() && !x.c.partial && x.c.known && x.w.idle() {
					break
				}
			}
			if x.c.complete != model.last() {
				t.Fatalf("%+v: it rests at %d of %d", x.c.query, x.c.complete, model.last())
			}
			x.w.Close()
		}
		if n := h.queued.Load(); n != 0 {
			t.Fatalf("%d bytes are counted as queued when nobody watches", n)
		}
		if x := h.out.index; len(x.resources)+len(x.partitions)+len(x.prefixes)+len(x.lengths)+len(x.ofLen) != 0 {
			t.Fatal("the index remembers watchers that have gone")
		}
	})
}

// The same with the hub's own goroutine, and consumers on theirs.
func TestConsumersBesideTheHubsGoroutine(t *testing.T) {
	for seed := range uint64(6) {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex // of the model
			model := newNaive(1)
			cfg := small(model)
			cfg.State = func() State {
				mu.Lock()
				defer mu.Unlock()
				return model.State()
			}
			h := New(cfg)
			ctx, cancel := context.WithCancel(t.Context())
			var work sync.WaitGroup
			work.Go(func() { _ = h.Run(ctx) })
			var consumers sync.WaitGroup
			stop := make(chan struct{})
			for i, q := range []Query{{Prefix: ""}, {Prefix: "lock/"}, {Resource: "lock/b", Partition: "p"}} {
				source := rand.New(rand.NewPCG(seed, uint64(i)))
				consumers.Go(func() {
					w, err := h.Watch(q, "c", 0, 0)
					if err != nil {
						t.Error(err)
						return
					}
					defer w.Close()
					c := &consumer{query: q}
					for {
						r, err := w.Next(ctx, 20*time.Millisecond)
						if err == nil {
							err = c.take(r)
						}
						mu.Lock()
						if err == nil {
							err = c.check(model)
						}
						last := model.last()
						mu.Unlock()
						if err != nil {
							t.Errorf("seed %d: %+v: %v", seed, q, err)
							return
						}
						select {
						case <-stop:
							if c.complete == last && c.known && !c.partial {
								return
							}
						default:
							if source.IntN(4) == 0 {
								<-time.After(time.Duration(source.IntN(50)) * time.Millisecond)
							}
						}
					}
				})
			}
			random := rand.New(rand.NewPCG(seed, 99))
			src := &source{model: model}
			for range 2000 {
				mu.Lock()
				events := src.entry(random.IntN)
				model.apply(events)
				revision := model.last()
				mu.Unlock()
				h.apply(revision, events)
				if random.IntN(3) == 0 {
					<-time.After(time.Duration(random.IntN(3)) * time.Millisecond)
				}
			}
			close(stop)
			consumers.Wait()
			cancel()
			work.Wait()
		})
	}
}

func TestOneEventTouchesOnlyItsWatchers(t *testing.T) {
	model := newNaive(1)
	h := New(Config{State: model.State, PerConnection: 20_000})
	for i := range 10_000 {
		if _, err := h.Watch(Query{Resource: fmt.Sprint("lock/", i), Partition: "p"}, "c", 7, 1); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{"", "lock/", "lock/7", "shard/", "lock/77#"} {
		if _, err := h.Watch(Query{Prefix: p}, "c", 7, 1); err != nil {
			t.Fatal(err)
		}
	}
	for resource, want := range map[string]int{"lock/77": 4, "lock/5": 3, "shard/1": 2, "lock/77#1": 4, "x": 1} {
		n := 0
		h.out.index.each(granted(resource, 1, ""), func(*Watcher) { n++ })
		if n != want {
			t.Errorf("%s: %d watchers are told, not %d", resource, n, want)
		}
	}
}

func TestWatchersAreBoundedInAllAndPerConnection(t *testing.T) {
	h := New(small(newNaive(1)))
	var open []*Watcher
	for i := range 20 {
		w, err := h.Watch(Query{}, fmt.Sprint(i/6), 0, 0)
		if err != nil {
			if !errors.Is(err, ErrTooMany) {
				t.Fatal(err)
			}
			continue
		}
		open = append(open, w)
	}
	if len(open) != 8 || h.out.connections["0"] != 4 {
		t.Fatalf("%d watchers, %d of the first connection", len(open), h.out.connections["0"])
	}
	for _, w := range open {
		w.Close()
	}
	if _, err := h.Watch(Query{}, "0", 0, 0); err != nil {
		t.Errorf("after all were closed: %v", err)
	}
}

func TestWhereAWatchBegins(t *testing.T) {
	const floor, last = 100, 110
	for _, test := range []struct {
		name               string
		incarnation, after uint64
		want               string
	}{
		{"from nothing", 0, 0, "snapshot"},
		{"from nothing of this data", 7, 0, "snapshot"},
		{"other data", 6, 105, "resync"},
		{"before what is remembered", 7, floor - 1, "resync"},
		{"at what is remembered", 7, floor, "events"},
		{"in between", 7, 105, "events"},
		{"the newest", 7, last, "progress"},
		{"what this server has not applied", 7, last + 50, "progress"},
	} {
		model := newNaive(floor)
		h := New(Config{State: model.State})
		for i := floor + 1; i <= last; i++ {
			e := []*pb.WatchEvent{granted("lock/a", uint64(i), "")}
			if i > floor+1 {
				e = append([]*pb.WatchEvent{ended("lock/a", uint64(i-1))}, e...)
			}
			model.apply(e)
			h.apply(uint64(i), e)
		}
		h.dispatch()
		w, err := h.Watch(Query{Resource: "lock/a"}, "c", test.incarnation, test.after)
		if err != nil {
			t.Fatal(err)
		}
		r, err := w.Next(context.Background(), 0)
		if err != nil {
			t.Fatal(err)
		}
		got := r.ProtoReflect().WhichOneof(r.ProtoReflect().Descriptor().Oneofs().ByName("kind")).Name()
		if string(got) != test.want {
			t.Errorf("%s: %v", test.name, r)
		}
		if want := max(last, test.after); test.want != "resync" && r.GetRevision() != want {
			t.Errorf("%s: at revision %d, not %d", test.name, r.GetRevision(), want)
		}
		if n := len(r.GetEvents().GetEvents()); test.want == "events" && uint64(n) != 2*(last-max(test.after, floor+1))+(floor+1-min(test.after, floor+1)) {
			t.Errorf("%s: %d events", test.name, n)
		}
		w.Close()
	}
}

// What a watcher goes on from is held for it as the rest is: within its bytes,
// and within those of the server.
func TestWhatIsRecalledIsBounded(t *testing.T) {
	for _, test := range []struct {
		name                   string
		queueBytes, serverRoom int
		want                   string
	}{
		{"in bounds", 4000, 4000, "events"},
		{"more than a watcher's", 1000, 4000, tooMuch},
		{"more than the server's", 4000, 1000, noRoom},
	} {
		model := newNaive(0)
		h := New(Config{State: model.State, QueueBytes: test.queueBytes, QueuedBytes: int64(test.serverRoom)})
		for i := 1; i <= 5; i++ {
			e := []*pb.WatchEvent{granted("lock/a", uint64(i), strings.Repeat("x", 200))}
			model.apply(e)
			h.apply(uint64(i), e)
		}
		h.dispatch()
		w, err := h.Watch(Query{Resource: "lock/a"}, "c", 7, 1)
		if err != nil {
			t.Fatal(err)
		}
		r, err := w.Next(context.Background(), 0)
		if err != nil {
			t.Fatal(err)
		}
		got := r.GetResync().GetReason()
		if len(r.GetEvents().GetEvents()) == 4 {
			got = "events"
		}
		if got != test.want {
			t.Errorf("%s: %v", test.name, r)
		}
		w.Close()
		if n := h.queued.Load(); n != 0 {
			t.Errorf("%s: %d bytes are still counted", test.name, n)
		}
	}
}

func TestNextEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(small(newNaive(1)))
		w, err := h.Watch(Query{}, "c", 7, 1)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		began := time.Now()
		r, err := w.Next(t.Context(), 10*time.Second)
		if err != nil || r.GetProgress() == nil || time.Since(began) != 10*time.Second {
			t.Errorf("%v, %v after %v", r, err, time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := w.Next(ctx, time.Minute); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
	})
}
