package cache

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/internal/redisserver"
)

// Whatever happens to the server, the mirror's entry points wait for nothing (the
// grants and ends of a fault are told from the test's own goroutine while the server
// is away), and the cache is right again afterwards.
func TestF45TheCacheIsRightAgainAfter(t *testing.T) {
	type faulted struct {
		*rig
		s *redisserver.Server
		c *redis.Client // as admin
	}
	ok := func(t testing.TB, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, fault := range map[string]func(t *testing.T, f faulted){
		"killed, without its data": func(t *testing.T, f faulted) {
			f.s.Kill()
			f.churn(20)
			f.fails(2)
			ok(t, f.s.Start())
		},
		"flushed": func(t *testing.T, f faulted) {
			ok(t, f.c.FlushAll(t.Context()).Err())
		},
		"its scripts flushed": func(t *testing.T, f faulted) {
			ok(t, f.c.ScriptFlush(t.Context()).Err())
			f.churn(20)
		},
		"paused": func(t *testing.T, f faulted) { // with back-offs, about 10 s
			ok(t, f.s.Freeze())
			f.churn(20)
			f.fails(7)
			f.churn(20)
			ok(t, f.s.Thaw())
		},
		"out of memory": func(t *testing.T, f faulted) {
			ok(t, f.c.ConfigSet(t.Context(), "maxmemory-policy", "noeviction").Err())
			ok(t, f.c.ConfigSet(t.Context(), "maxmemory", "1").Err())
			f.release(f.mirror, "lock/1")
			f.churn(20)
			f.fails(2)
			// Full as it is, it tells of no lease that ended.
			f.until("the entry of a lease that ended stays", func() string {
				e, found, err := f.reader.Lookup(t.Context(), "lock/0")
				if err == nil && (!found || !e.Held) {
					return ""
				}
				return fmt.Sprint(e, err)
			})
			ok(t, f.c.ConfigSet(t.Context(), "maxmemory", "0").Err())
		},
		"a value of another type in its place": func(t *testing.T, f faulted) {
			key := f.mirror.key.of("lock/1")
			ok(t, f.c.Del(t.Context(), key).Err())
			ok(t, f.c.RPush(t.Context(), key, "x").Err())
			f.grant(t, f.mirror, "lock/1")
			f.grant(t, f.mirror, "lock/2")
			f.until("others are not written because of one", func() string {
				if e, _, _ := f.reader.Lookup(t.Context(), "lock/2"); e.Token == f.leases["lock/2"].Token {
					return ""
				}
				return "not yet"
			})
			ok(t, f.c.Del(t.Context(), key).Err())
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t)
			f := faulted{newRig(t, unix(s)), s, redis.NewClient(&redis.Options{Addr: s.Socket()})}
			t.Cleanup(func() { f.c.Close() })
			f.churn(10)
			f.right("at first")
			fault(t, f)
			f.right("after the fault")
		})
	}
}

// A replica that misses the newest writes takes over: leases that ended are not told of
// as held, and those that began are known.
func TestF45FailedOverWithLostWrites(t *testing.T) {
	t.Parallel()
	first, second, err := redisserver.NewReplicated(t.Context(), t.TempDir(), "--repl-diskless-sync-delay", "0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { first.Close(); second.Close() })
	path, move := link(t, first)
	replica := redis.NewClient(&redis.Options{Addr: second.Socket()})
	defer replica.Close()
	r := newRig(t, ServerConfig{Addresses: []string{path}})
	r.churn(10)
	r.right("at first")
	// What is written from here on, the replica never sees: it follows nobody.
	if err := replica.ReplicaOf(t.Context(), "127.0.0.1", "1").Err(); err != nil {
		t.Fatal(err)
	}
	r.churn(12)
	r.right("before the failover")
	first.Kill()
	if err := replica.ReplicaOf(t.Context(), "NO", "ONE").Err(); err != nil {
		t.Fatal(err)
	}
	move(second)
	r.right("after the failover")
}

// With a user that may do what docs/fencing.md says, and no more.
func TestF45WrongPassword(t *testing.T) {
	t.Parallel()
	s := start(t)
	admin := redis.NewClient(&redis.Options{Addr: s.Socket()})
	defer admin.Close()
	rules := strings.Fields("on >right ~headlease:lease:* " + needs(t))
	if err := admin.ACLSetUser(t.Context(), "headlease", rules...).Err(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte("wrong\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	server := unix(s)
	server.Username, server.PasswordFile = "headlease", file
	r := newRig(t, server)
	r.churn(10)
	r.fails(2)
	if _, _, err := r.reader.Lookup(t.Context(), "lock/1"); err == nil || !strings.Contains(err.Error(), "WRONGPASS") {
		t.Errorf("with a wrong password the reader says %v", err)
	}
	if err := os.WriteFile(file, []byte("right\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.right("with the right password")
}

// needs are the commands that docs/fencing.md says an account needs.
func needs(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/fencing.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(page), "The account needs `")
	commands, _, ok := strings.Cut(after, "`")
	if !ok {
		t.Fatal("docs/fencing.md does not say what the account needs")
	}
	return commands
}

// More changes than may wait are dropped, and all is written anew: no end of a lease is
// lost with them.
func TestF45OverflowRebuilds(t *testing.T) {
	t.Parallel()
	s := start(t)
	r := newRig(t, unix(s), func(c *Config) { c.QueueLimit = 8 })
	for i := range 200 {
		r.grant(t, r.mirror, fmt.Sprint("lock/", i))
	}
	r.right("at first")
	if err := s.Freeze(); err != nil {
		t.Fatal(err)
	}
	for i := range 190 {
		r.release(r.mirror, fmt.Sprint("lock/", i))
	}
	r.mirror.mu.Lock()
	waiting := len(r.mirror.pending)
	r.mirror.mu.Unlock()
	if waiting > 8 || testutil.ToFloat64(r.mirror.metric.dropped) == 0 {
		t.Errorf("%d wait, %v were dropped", waiting, testutil.ToFloat64(r.mirror.metric.dropped))
	}
	if err := s.Thaw(); err != nil {
		t.Fatal(err)
	}
	r.right("after the overflow")
}

// The leader dies before it has told of an end; another server of the region, which knows
// of it, does.
func TestANewLeaderTellsOfTheEndsBeforeIt(t *testing.T) {
	t.Parallel()
	s := start(t)
	r := newRig(t, unix(s))
	r.grant(t, r.mirror, "lock/0")
	r.right("at first")
	r.mirror.End()
	r.release(r.mirror, "lock/0") // applied as a follower
	if r.wrong() == "" {
		t.Fatal("a follower writes")
	}
	r.mirror.Begin()
	r.right("with the new leader")
}

// Renewals keep an entry beyond its expiry, and say how old it is.
func TestRenewalsKeepEntries(t *testing.T) {
	t.Parallel()
	r := newRig(t, unix(start(t)), func(c *Config) { c.MaxAge = 4 * time.Second })
	r.grant(t, r.mirror, "lock/a")
	r.right("at first")
	var first, last Entry
	r.until("it is not renewed beyond its expiry", func() string {
		e, found, err := r.reader.Lookup(t.Context(), "lock/a")
		if err != nil || found && (e.Age < 0 || e.Age+e.Left > 4*time.Second) {
			t.Fatal(e, found, err)
		}
		if !found { // this machine stood still for seconds
			return "it is gone"
		}
		if first.Token == 0 {
			first = e
		}
		last = e
		if n := testutil.ToFloat64(r.mirror.metric.renewals); n < 5 {
			return fmt.Sprint(n, " renewals")
		}
		return ""
	})
	// The grant, and rebuilds at the begin.
	if testutil.ToFloat64(r.mirror.metric.leases) > 3+testutil.ToFloat64(r.mirror.metric.missing) {
		t.Errorf("%v entries were written for one lease", testutil.ToFloat64(r.mirror.metric.leases))
	}
	if first.Token != last.Token || last.Holder != "client/1" || last.Region != "eu" {
		t.Errorf("%+v, later %+v", first, last)
	}
}
