package cache

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/redisserver"
)

// still is a mirror that does not run: the test writes.
func still(t testing.TB, server ServerConfig) (*Mirror, *Reader) {
	t.Helper()
	w := newWorld()
	m, err := New(Config{Server: server, Cluster: "test", Region: "eu", Source: w.source(), Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	if err := m.ask(t.Context()); err != nil {
		t.Fatal(err)
	}
	r, err := NewReader(m.client, ReaderConfig{Cluster: "test", Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return m, r
}

// Writes of any order leave the highest token, and of that the tombstone if it was among
// them.
func TestF24UpwardOnlyInAnyOrder(t *testing.T) {
	m, r := still(t, unix(start(t)))
	run := 0
	rapid.Check(t, func(t *rapid.T) {
		run++
		resource := fmt.Sprint("lock/", run)
		var best write
		for range rapid.IntRange(1, 12).Draw(t, "writes") {
			tok, err := fence.NewToken(rapid.SampledFrom([]fence.Epoch{1, 2, fence.MaxEpoch}).Draw(t, "epoch"), rapid.SampledFrom([]fence.Seq{1, 2, fence.MaxSeq}).Draw(t, "seq"))
			if err != nil {
				t.Fatal(err)
			}
			w := write{resource: resource, token: tok, holder: "client/a"}
			if rapid.Bool().Draw(t, "live") {
				w.left = time.Minute
			}
			if rapid.Bool().Draw(t, "renewal") {
				err = m.renew(context.Background(), []renewal{{Lease{w.resource, w.holder, w.token}, time.Minute}})
				w.left = time.Minute
			} else {
				err = m.put(context.Background(), []write{w})
			}
			if err != nil {
				t.Fatal(err)
			}
			if w.token > best.token || w.token == best.token && w.left == 0 {
				best = w
			}
			e, found, err := r.Lookup(context.Background(), resource)
			if err != nil || !found || e.Token != best.token || e.Held != (best.left > 0) || e.Left > Tombstone+time.Second {
				t.Fatalf("%+v, %v, %v; want %+v", e, found, err, best)
			}
		}
	})
}

// A write that was on its way for longer than WriteWithin does nothing, so that none is
// left when the tombstone goes.
func TestF24ALateWriteIsVoid(t *testing.T) {
	if WriteWithin*3 > Tombstone || DefaultMaxAge*3 > Tombstone {
		t.Fatal("a tombstone does not outlive late writes by far")
	}
	m, r := still(t, unix(start(t)))
	m.ahead = m.ahead.Add(WriteWithin + time.Second) // as if it had been built so long ago
	if err := m.put(t.Context(), []write{{resource: "lock/a", token: token(t, 1, 1), left: time.Minute}}); err != nil {
		t.Fatal(err)
	}
	if e, found, err := r.Lookup(t.Context(), "lock/a"); found || err != nil {
		t.Errorf("%+v, %v", e, err)
	}
	if m.up {
		t.Error("the server's clock is not asked again")
	}
}

func TestLookupSaysHowOldTheAnswerIs(t *testing.T) {
	s := start(t)
	m, r := still(t, unix(s))
	if err := m.put(t.Context(), []write{{resource: "lock/a", token: token(t, 1, 1), holder: "client/a", left: time.Hour}}); err != nil {
		t.Fatal(err)
	}
	for _, known := range []bool{false, true} {
		// As if the server's clock had gone on by ten seconds.
		if known {
			last := *r.clock.Load()
			last.server += 10_000
			r.clock.Store(&last)
		}
		e, found, err := r.Lookup(t.Context(), "lock/a")
		if err != nil || !found || known && (e.Age < 10*time.Second || e.Left > 0 && e.Age+e.Left != DefaultMaxAge) || e.Left > DefaultMaxAge {
			t.Errorf("%+v, %v", e, err)
		}
	}
	// It is asked again, and is then right.
	last := *r.clock.Load()
	r.clock.Store(&reading{last.server + 5000, last.at.Add(-5 * time.Second)})
	if _, known := r.serverNow(); known {
		t.Error("a reading of long ago is taken")
	}
	r.clock.Store(&last)
}

func TestReaderLeavesAServerAloneThatFails(t *testing.T) {
	s := start(t)
	_, r := still(t, unix(s))
	s.Kill()
	for i := range failuresInARow {
		if _, _, err := r.Lookup(t.Context(), "lock/a"); err == nil || errors.Is(err, ErrDown) {
			t.Fatalf("look-up %d: %v", i, err)
		}
	}
	failed := time.Now()
	if _, _, err := r.Lookup(t.Context(), "lock/a"); !errors.Is(err, ErrDown) && time.Since(failed) < downFor/2 {
		t.Fatalf("after %d failures: %v", failuresInARow, err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		if _, _, err := r.Lookup(t.Context(), "lock/a"); err == nil {
			break
		} else if time.Now().After(deadline) {
			t.Fatal("never asked again")
		}
		<-time.After(10 * time.Millisecond)
	}
}

func TestOnARedisCluster(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	servers, err := redisserver.NewCluster(ctx, t.TempDir(), 3)
	if err != nil {
		t.Fatal(err)
	}
	var addresses []string
	for _, s := range servers {
		addresses = append(addresses, s.Address())
		t.Cleanup(func() { s.Close() })
	}
	r := newRig(t, ServerConfig{Addresses: addresses, Cluster: true})
	r.churn(40)
	r.right("at first")
	c := redis.NewClient(&redis.Options{Addr: servers[1].Socket()})
	defer c.Close()
	if n := c.DBSize(ctx).Val(); n == 0 || n == 40 {
		t.Fatalf("%d of 40 entries are on one of three masters", n)
	}
	if err := errors.Join(c.FlushAll(ctx).Err(), c.ScriptFlush(ctx).Err()); err != nil {
		t.Fatal(err)
	}
	r.right("after one master was flushed")
	servers[1].Kill()
	r.fails(1)
	if err := servers[1].Start(); err != nil {
		t.Fatal(err)
	}
	r.right("after one master was killed, without its data")
}

func TestValidate(t *testing.T) {
	for name, test := range map[string]struct {
		cfg  ServerConfig
		want string
	}{
		"nothing":           {ServerConfig{}, "addresses: none given"},
		"several":           {ServerConfig{Addresses: []string{"a:1", "b:1"}}, "set cluster: true"},
		"cluster sentinels": {ServerConfig{Addresses: []string{"a:1"}, Cluster: true, Master: "m"}, "leave one of them out"},
		"ca without tls":    {ServerConfig{Addresses: []string{"a:1"}, CAFile: "ca.pem"}, "set tls: true"},
	} {
		if err := test.cfg.Validate(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := New(Config{MaxAge: time.Hour}); err == nil || !strings.Contains(err.Error(), "max_age") || !strings.Contains(err.Error(), "source") {
		t.Errorf("an empty config: %v", err)
	}
	if _, err := (ServerConfig{Addresses: []string{"a:1"}, TLS: true, CAFile: "/nowhere"}).Client(time.Second, nil); err == nil {
		t.Error("a CA file that is not there is taken")
	}
}

// A reader whose idea of the server's clock is behind by a little makes nobody's
// time longer than it was written.
func TestAnEntryIsNoYoungerThanItsWriting(t *testing.T) {
	for now, want := range map[int64][2]time.Duration{ // age and left
		999:  {0, 4 * time.Second},
		1000: {0, 4 * time.Second},
		1001: {time.Millisecond, 3999 * time.Millisecond},
		6000: {5 * time.Second, 0},
	} {
		e, err := decode("lock/a", "4294967297 L 1000 5000 eu client/a", now)
		if err != nil || e.Age != want[0] || e.Left != want[1] {
			t.Errorf("at %d: %+v, %v", now, e, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add("4294967297 L 1795910400000 1795910415000 eu client/a b")
	f.Add("4294967297 T 1795910400000 1795910460000 eu ")
	f.Add("4294967297 T 99999999999999999999 1 eu ")
	f.Fuzz(func(t *testing.T, text string) {
		e, err := decode("lock/a", text, 1795910400000)
		if err != nil {
			return
		}
		if _, err := fence.TokenOf(uint64(e.Token)); err != nil || e.Age < 0 || e.Left < 0 || e.Region == "" || !e.Held && e.Holder != "" {
			t.Errorf("%q is read as %+v", text, e)
		}
	})
}
