package cache

import (
	"context"
	"flag"
	"fmt"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/redisserver"
)

func TestMain(m *testing.M) {
	redis.SetLogger(quiet{}) // servers die here all the time
	flag.Parse()
	_ = flag.Set("test.parallel", "16") // they wait most of the time
	goleak.VerifyTestMain(m)
}

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

func token(t testing.TB, epoch fence.Epoch, seq fence.Seq) fence.Token {
	t.Helper()
	tok, err := fence.NewToken(epoch, seq)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func start(t testing.TB, settings ...string) *redisserver.Server {
	t.Helper()
	s, err := redisserver.New(t.TempDir(), settings...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// world is a region's leases as its leader knows them.
type world struct {
	mu     sync.Mutex
	ttl    time.Duration
	leases map[string]Lease // by resource; each of a session of its own
	ended  map[string]fence.Token
	seq    fence.Seq
}

func newWorld() *world {
	return &world{ttl: 30 * time.Second, leases: map[string]Lease{}, ended: map[string]fence.Token{}}
}

func (w *world) source() Source {
	return Source{
		Sessions: func() iter.Seq[Session] {
			w.mu.Lock()
			all := maps.Clone(w.leases)
			w.mu.Unlock()
			return func(yield func(Session) bool) {
				for resource, l := range all {
					if !yield(Session{ID: "of " + resource, TTL: w.ttl, Leases: slices.Values([]Lease{l})}) {
						return
					}
				}
			}
		},
		Left: func(session string) (time.Duration, bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			_, ok := w.leases[session[len("of "):]]
			return w.ttl, ok
		},
	}
}

// grant grants a resource, ending the lease on it, and tells the mirror.
func (w *world) grant(t testing.TB, m *Mirror, resource string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.end(m, resource)
	w.seq++
	l := Lease{Resource: resource, Holder: fmt.Sprint("client/", w.seq), Token: token(t, 1, w.seq)}
	w.leases[resource] = l
	m.Granted("of "+resource, l)
}

func (w *world) release(m *Mirror, resource string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.end(m, resource)
}

func (w *world) end(m *Mirror, resource string) {
	if l, ok := w.leases[resource]; ok {
		delete(w.leases, resource)
		w.ended[resource] = l.Token
		m.Ended(resource, l.Token)
	}
}

// rig is a mirror that runs, and a reader.
type rig struct {
	testing.TB
	*world
	mirror *Mirror
	reader *Reader
	reg    *prometheus.Registry
}

func newRig(t testing.TB, server ServerConfig, change ...func(*Config)) *rig {
	t.Helper()
	r := &rig{TB: t, world: newWorld(), reg: prometheus.NewRegistry()}
	cfg := Config{
		Server: server, Cluster: "test", Region: "eu", Source: r.source(), Registerer: r.reg, Timeout: 500 * time.Millisecond,
	}
	for _, f := range change {
		f(&cfg)
	}
	var err error
	if r.mirror, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	client, err := server.Client(time.Second, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	if r.reader, err = NewReader(client, ReaderConfig{Cluster: "test", Timeout: 5 * time.Second}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.mirror.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	r.mirror.Begin()
	return r
}

// wrong returns what the cache says wrongly; empty: it is right.
func (r *rig) wrong() (wrong string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	check := func(resource string, held bool, tok fence.Token) {
		e, found, err := r.reader.Lookup(r.Context(), resource)
		switch {
		case err != nil:
			wrong = fmt.Sprint(resource, ": ", err)
		case !found && held:
			wrong = resource + ": no entry of a lease that is held"
		case found && (e.Held != held || e.Token != tok):
			wrong = fmt.Sprintf("%s: %+v; held %v with %s", resource, e, held, tok)
		}
	}
	for resource, l := range r.leases {
		check(resource, true, l.Token)
	}
	for resource, tok := range r.ended {
		if _, held := r.leases[resource]; !held {
			check(resource, false, tok)
		}
	}
	return wrong
}

// wait waits until the cache is right.
func (r *rig) right(when string) {
	r.Helper()
	r.until("the cache is not right "+when, func() string { return r.wrong() })
}

func (r *rig) until(what string, f func() string) {
	r.Helper()
	deadline := time.After(time.Minute)
	for {
		why := f()
		if why == "" {
			return
		}
		select {
		case <-deadline:
			r.Fatalf("%s: %s", what, why)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// fails waits until so many more attempts of the mirror have failed.
func (r *rig) fails(n int) {
	r.Helper()
	before := testutil.ToFloat64(r.mirror.metric.failures)
	r.until("the mirror does not notice", func() string {
		if now := testutil.ToFloat64(r.mirror.metric.failures); now < before+float64(n) {
			return fmt.Sprintf("%v of %d failures", now-before, n)
		}
		return ""
	})
}

// churn grants and releases a few, before or in the middle of a fault.
func (r *rig) churn(n int) {
	for i := range n {
		r.grant(r, r.mirror, fmt.Sprint("lock/", i))
	}
	for i := 0; i < n; i += 3 {
		r.release(r.mirror, fmt.Sprint("lock/", i))
	}
}

func unix(s *redisserver.Server) ServerConfig { return ServerConfig{Addresses: []string{s.Socket()}} }

// link is a name for one server that later names another one: a failover.
func link(t testing.TB, to *redisserver.Server) (path string, move func(*redisserver.Server)) {
	dir, err := os.MkdirTemp("", "redis")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path = filepath.Join(dir, "s")
	move = func(to *redisserver.Server) {
		_ = os.Remove(path)
		if err := os.Symlink(to.Socket(), path); err != nil {
			t.Fatal(err)
		}
	}
	move(to)
	return path, move
}
