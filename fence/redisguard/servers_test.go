package redisguard

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/redisserver"
)

func always() bool { return true }

// replicated are two servers, and a name of the primary that a failover moves.
type replicated struct {
	t                testing.TB
	name             string
	primary, replica *server
}

func startReplicated(t testing.TB) *replicated {
	t.Helper()
	primary, replica, err := redisserver.NewReplicated(t.Context(), t.TempDir(), "--repl-diskless-sync-delay", "0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { primary.Close(); replica.Close() })
	dir, err := os.MkdirTemp("", "redis")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &replicated{t, filepath.Join(dir, "s"), &server{primary, t}, &server{replica, t}}
	if err := os.Symlink(primary.Socket(), r.name); err != nil {
		t.Fatal(err)
	}
	return r
}

// lag cuts the replica off from all that is written from now on: it stays one, of an
// address where nobody is.
func (r *replicated) lag() {
	r.t.Helper()
	if err := r.replica.client().ReplicaOf(context.Background(), "127.0.0.1", "1").Err(); err != nil {
		r.t.Fatal(err)
	}
}

// failover kills the primary and has the replica take its name.
func (r *replicated) failover() {
	r.t.Helper()
	r.primary.Kill()
	err := errors.Join(r.replica.client().ReplicaOf(context.Background(), "NO", "ONE").Err(),
		os.Remove(r.name), os.Symlink(r.replica.Socket(), r.name))
	if err != nil {
		r.t.Fatal(err)
	}
}

// A replica that missed the newest claim takes over. The older mark lets the older holder
// in, until the newer one's guard has looked.
func TestAFailoverThatLostTheMarkIsClaimedAgain(t *testing.T) {
	for name, look := range map[string]func(t *testing.T, g *Guard, tok fence.Token){
		"by the next write": func(t *testing.T, g *Guard, tok fence.Token) {
			if err := g.Set(t.Context(), "r", tok, "{r}:other", 1, 0); err != nil {
				t.Fatal(err)
			}
			if err := g.Set(t.Context(), "r", tok, "{r}:other", 1, 0); err != nil {
				t.Fatal(err)
			}
		},
		"by the watch": func(t *testing.T, g *Guard, tok fence.Token) {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- g.Watch(ctx) }()
			for deadline := time.Now().Add(time.Minute); ; {
				if mark, err := g.Mark(ctx, "r"); err == nil && mark == tok {
					break
				}
				if time.Now().After(deadline) {
					t.Fatal("it is not claimed again")
				}
				<-time.After(10 * time.Millisecond)
			}
			cancel()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		},
		"not, beyond the lease": nil,
	} {
		t.Run(name, func(t *testing.T) {
			r := startReplicated(t)
			c := clientAt(t, r.name)
			older, newer := guardOf(t, clientAt(t, r.name), Options{}), guardOf(t, c, Options{CheckEvery: 20 * time.Millisecond})
			low, high := token(t, 1, 1), token(t, 1, 2)
			ctx := t.Context()
			if err := older.Claim(ctx, "r", low); err != nil {
				t.Fatal(err)
			}
			if n := r.primary.client().Wait(ctx, 1, time.Minute).Val(); n != 1 {
				t.Fatal("no replica")
			}
			r.lag()
			valid := true
			kept, err := newer.Keep(ctx, "r", high, func() bool { return valid })
			if err != nil {
				t.Fatal(err)
			}
			defer kept.Release()
			if err := newer.Set(ctx, "r", high, "{r}:k", "new", 0); err != nil {
				t.Fatal(err)
			}
			r.failover()
			if mark, err := older.Mark(ctx, "r"); err != nil || mark != low {
				t.Fatalf("the replica has mark %s, %v: nothing was lost", mark, err)
			}
			if look == nil {
				valid = false
				if err := newer.look(ctx, alone, c); err != nil {
					t.Fatal(err)
				}
				if mark, _ := older.Mark(ctx, "r"); mark != low {
					t.Fatal("claimed again without a valid lease")
				}
				return
			}
			look(t, newer, high)
			var stale *fence.StaleError
			if err := older.Set(ctx, "r", low, "{r}:k", "late", 0); !errors.As(err, &stale) || stale.Seen != high {
				t.Errorf("late write after the failover: %v", err)
			}
			if kept.Err() != nil {
				t.Error(kept.Err())
			}
		})
	}
}

// A higher claim that came in between is what a claim again finds.
func TestAClaimThatPassedOnIsNotKept(t *testing.T) {
	s := startServer(t)
	g, _ := s.guard(Options{})
	next, _ := s.guard(Options{})
	ctx := t.Context()
	kept, err := g.Keep(ctx, "r", token(t, 1, 1), always)
	if err != nil {
		t.Fatal(err)
	}
	s.Kill() // forgets
	s.again()
	high := token(t, 1, 2)
	if err := next.Claim(ctx, "r", high); err != nil {
		t.Fatal(err)
	}
	if err := g.eachMaster(ctx, g.look); err != nil {
		t.Fatal(err)
	}
	var stale *fence.StaleError
	if !errors.As(kept.Err(), &stale) || stale.Seen != high {
		t.Errorf("kept: %v", kept.Err())
	}
	if n := g.servers.keeping.Load(); n != 0 {
		t.Errorf("%d are kept", n)
	}
	kept.Release()
	if n := g.servers.keeping.Load(); n != 0 {
		t.Errorf("%d are kept after a second release", n)
	}
}

// A mark that is gone, evicted or flushed, takes no write; one that is kept is claimed again.
func TestEvictedMarks(t *testing.T) {
	s := startServer(t, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
	g, c := s.guard(Options{})
	ctx, tok := t.Context(), token(t, 1, 1)
	if err := g.Claim(ctx, "plain", tok); err != nil {
		t.Fatal(err)
	}
	kept, err := g.Keep(ctx, "kept", tok, always)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Release()
	fill(t, c, func() bool {
		plain, err := g.Mark(ctx, "plain")
		other, errO := g.Mark(ctx, "kept")
		return errors.Join(err, errO) == nil && plain == 0 && other == 0
	})
	var unclaimed *fence.UnclaimedError
	if err := g.Set(ctx, "plain", tok, "{plain}:k", 1, 0); !errors.As(err, &unclaimed) {
		t.Errorf("write without a mark: %v", err)
	}
	if err := g.Set(ctx, "kept", tok, "{kept}:k", 1, 0); err != nil {
		t.Errorf("write under a claim that is kept: %v", err)
	}
	kept.Release()
	if err := c.FlushAll(ctx).Err(); err != nil {
		t.Fatal(err)
	}
	if err := g.Set(ctx, "kept", tok, "{kept}:k", 1, 0); !errors.As(err, &unclaimed) {
		t.Errorf("write after the release: %v", err)
	}
}

// Under volatile-* marks stay whatever is evicted, because they have no TTL; under noeviction a
// full server refuses, and the marks stand.
func TestMarksStayWhenMemoryIsFull(t *testing.T) {
	for _, policy := range []string{"volatile-lru", "volatile-ttl", "noeviction"} {
		t.Run(policy, func(t *testing.T) {
			s := startServer(t, "--maxmemory", "3mb", "--maxmemory-policy", policy)
			g, c := s.guard(Options{})
			ctx, low, high := t.Context(), token(t, 1, 1), token(t, 1, 2)
			for i := range 50 {
				if err := g.Claim(ctx, fmt.Sprint("r", i), high); err != nil {
					t.Fatal(err)
				}
			}
			if policy == "noeviction" {
				fill(t, c, func() bool {
					return redis.HasErrorPrefix(c.Set(ctx, "one more", strings.Repeat("x", 1<<14), 0).Err(), "OOM")
				})
				if err := g.Set(ctx, "r0", high, "{r0}:k", strings.Repeat("x", 1<<14), 0); !redis.HasErrorPrefix(errors.Unwrap(err), "OOM") {
					t.Errorf("write to a full server: %v", err)
				}
			} else {
				evicted := func() bool {
					n, err := infoField(ctx, c, "stats", "evicted_keys")
					return err == nil && n != "0"
				}
				fill(t, c, evicted)
			}
			for i := range 50 {
				r := fmt.Sprint("r", i)
				var stale *fence.StaleError
				if err := g.Set(ctx, r, low, "{"+r+"}:k", 1, 0); !errors.As(err, &stale) {
					t.Errorf("late write to %s: %v", r, err)
				}
				if ttl := c.TTL(ctx, DefaultKeyPrefix+"{"+r+"}:"+r).Val(); ttl != -1 {
					t.Errorf("the mark of %s has a TTL: %v", r, ttl)
				}
			}
		})
	}
}

// fill writes keys with a TTL until enough says so.
func fill(t *testing.T, c *redis.Client, enough func() bool) {
	t.Helper()
	for i := range 10_000 {
		err := c.Set(t.Context(), fmt.Sprint("filler", i), strings.Repeat("x", 1<<14), time.Hour).Err()
		if (err != nil || i%20 == 19) && enough() {
			return
		}
	}
	t.Fatal("the server does not get full")
}

func TestReplicasHaveAWriteBeforeItReturns(t *testing.T) {
	r := startReplicated(t)
	g := guardOf(t, clientAt(t, r.name), Options{Replicas: 1, ReplicasWithin: patience / 2})
	ctx, low, high := t.Context(), token(t, 1, 1), token(t, 1, 2)
	for i := range 20 {
		if err := g.Claim(ctx, fmt.Sprint("r", i), high); err != nil {
			t.Fatal(err)
		}
		if err := g.Set(ctx, fmt.Sprint("r", i), high, fmt.Sprintf("{r%d}:k", i), i, 0); err != nil {
			t.Fatal(err)
		}
	}
	var stale *fence.StaleError
	if err := g.Claim(ctx, "r0", low); !errors.As(err, &stale) {
		t.Errorf("late claim: %v", err)
	}
	r.lag()
	var few *ReplicationError
	g = guardOf(t, clientAt(t, r.name), Options{Replicas: 1, ReplicasWithin: 50 * time.Millisecond})
	n, err := g.Incr(ctx, "r0", high, "{r0}:n")
	if !errors.As(err, &few) || few.Want != 1 || few.Have != 0 || n != 1 {
		t.Errorf("a write that no replica has: %d, %v", n, err)
	}
	if err := g.Claim(ctx, "r0", high); !errors.As(err, &few) {
		t.Errorf("a claim that no replica has: %v", err)
	}
	r.failover()
	g = guardOf(t, clientAt(t, r.name), Options{})
	for i := range 20 {
		if err := g.Set(ctx, fmt.Sprint("r", i), low, fmt.Sprintf("{r%d}:k", i), "late", 0); !errors.As(err, &stale) {
			t.Errorf("late write after the failover: %v", err)
		}
	}
}

func TestOnARedisCluster(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	nodes, err := redisserver.NewCluster(ctx, t.TempDir(), 3, "--cluster-require-full-coverage", "no")
	if err != nil {
		t.Fatal(err)
	}
	var addresses []string
	for _, s := range nodes {
		addresses = append(addresses, s.Address())
		t.Cleanup(func() { s.Close() })
	}
	client := func() *redis.ClusterClient {
		c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addresses, ContextTimeoutEnabled: true, DialerRetries: 1, ReadTimeout: patience})
		t.Cleanup(func() { c.Close() })
		return c
	}
	older, newer, c := guardOf(t, client(), Options{}), guardOf(t, client(), Options{}), client()
	low, high := token(t, 1, 1), token(t, 1, 2)
	script, err := NewScript(`redis.call('SET', KEYS[1], ARGV[1]) return redis.call('RPUSH', KEYS[2], ARGV[1])`)
	if err != nil {
		t.Fatal(err)
	}
	on := map[string][]string{} // master to resources
	for i := range 60 {
		// Of another form, with a hash tag of its own, every second one.
		r := fmt.Sprint("orders/", i)
		if i%2 == 1 {
			r = fmt.Sprintf("orders/{user%d}/x", i)
		}
		a, err1 := Key(r, "last")
		b, err2 := Key(r, "all")
		mark, err3 := newer.MarkKey(r)
		if err := errors.Join(err1, err2, err3); err != nil {
			t.Fatal(err)
		}
		if c.ClusterKeySlot(ctx, a).Val() != c.ClusterKeySlot(ctx, mark).Val() {
			t.Fatalf("%s and %s are in different slots", a, mark)
		}
		_, at, err := newer.node(ctx, mark)
		if err != nil {
			t.Fatal(err)
		}
		on[at] = append(on[at], r)
		if err := older.Claim(ctx, r, low); err != nil {
			t.Fatal(err)
		}
		if _, err := newer.Keep(ctx, r, high, always); err != nil {
			t.Fatal(err)
		}
		if n, err := newer.Run(ctx, r, high, script, []string{a, b}, "x"); err != nil || n != int64(1) {
			t.Fatalf("%v, %v", n, err)
		}
		var stale *fence.StaleError
		if _, err := older.Run(ctx, r, low, script, []string{a, b}, "late"); !errors.As(err, &stale) {
			t.Errorf("late script on %s: %v", r, err)
		}
	}
	if len(on) != 3 {
		t.Fatalf("the resources are on %d masters", len(on))
	}
	lost := nodes[0].Address()
	nodes[0].Kill() // and its data with it
	for at, resources := range on {
		for _, r := range resources[:2] {
			key, _ := Key(r, "last")
			err := newer.Set(ctx, r, high, key, "y", 0)
			if (err != nil) != (at == lost) {
				t.Errorf("%s with one master of three dead: %v", r, err)
			}
		}
	}
	if err := nodes[0].Start(); err != nil {
		t.Fatal(err)
	}
	for newer.eachMaster(ctx, newer.look) != nil {
		if ctx.Err() != nil {
			t.Fatal("the master is not back")
		}
		<-time.After(50 * time.Millisecond)
	}
	for _, r := range on[lost] {
		key, _ := Key(r, "last")
		var stale *fence.StaleError
		for {
			err := older.Set(ctx, r, low, key, "late", 0)
			if errors.As(err, &stale) {
				break
			}
			if err == nil || ctx.Err() != nil {
				t.Fatalf("late write to %s on a master that forgot: %v", r, err)
			}
			<-time.After(50 * time.Millisecond) // the cluster forms again
		}
	}
}
