package redisguard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/redisserver"
)

// writes are all guarded writes of the resource "r", each of which succeeds
// any number of times.
func writes(t *testing.T, g *Guard) map[string]func(context.Context, fence.Token) error {
	t.Helper()
	script, err := NewScript(`return redis.call('APPEND', KEYS[1], ARGV[1])`)
	if err != nil {
		t.Fatal(err)
	}
	return map[string]func(context.Context, fence.Token) error{
		"Set": func(ctx context.Context, tok fence.Token) error { return g.Set(ctx, "r", tok, "{r}:set", "v", 0) },
		"HSet": func(ctx context.Context, tok fence.Token) error {
			_, err := g.HSet(ctx, "r", tok, "{r}:hash", "f", "v", "n", 7)
			return err
		},
		"Incr": func(ctx context.Context, tok fence.Token) error {
			_, err := g.Incr(ctx, "r", tok, "{r}:n")
			return err
		},
		"XAdd": func(ctx context.Context, tok fence.Token) error {
			_, err := g.XAdd(ctx, "r", tok, &redis.XAddArgs{Stream: "{r}:stream", Values: []string{"a", "b"}})
			return err
		},
		"XAck": func(ctx context.Context, tok fence.Token) error {
			_, err := g.XAck(ctx, "r", tok, "{r}:stream", "group", "1-1")
			return err
		},
		"Del": func(ctx context.Context, tok fence.Token) error {
			_, err := g.Del(ctx, "r", tok, "{r}:del")
			return err
		},
		"Run": func(ctx context.Context, tok fence.Token) error {
			_, err := g.Run(ctx, "r", tok, script, []string{"{r}:run"}, "x")
			return err
		},
	}
}

func TestEveryWriteIsRefusedBelowTheMark(t *testing.T) {
	s := startServer(t, redisserver.Durable()...)
	g, c := s.guard(Options{})
	ctx := t.Context()
	low, mid, high := token(t, 3, 9), token(t, 3, 10), token(t, 4, 1)
	for name, write := range writes(t, g) {
		t.Run(name, func(t *testing.T) {
			c.FlushAll(ctx)
			dump := func() int64 { return c.DBSize(ctx).Val() }

			var unclaimed *fence.UnclaimedError
			if err := write(ctx, mid); !errors.As(err, &unclaimed) || unclaimed.Resource != "r" {
				t.Fatalf("without a mark: %v; want UnclaimedError", err)
			}
			if n := dump(); n != 0 {
				t.Fatalf("a refused write left %d keys", n)
			}
			if err := g.Claim(ctx, "r", mid); err != nil {
				t.Fatal(err)
			}
			var stale *fence.StaleError
			if err := write(ctx, low); !errors.As(err, &stale) || *stale != (fence.StaleError{Resource: "r", Seen: mid, Given: low}) {
				t.Fatalf("below the mark: %v; want StaleError of %s and %s", err, mid, low)
			}
			if n := dump(); n != 1 {
				t.Fatalf("a refused write left %d keys beside the mark", n-1)
			}
			for _, tok := range []fence.Token{mid, mid, high} {
				if err := write(ctx, tok); err != nil {
					t.Fatalf("token %s at the mark or above: %v", tok, err)
				}
				if mark, err := g.Mark(ctx, "r"); err != nil || mark != tok {
					t.Fatalf("mark after a write of %s: %s, %v", tok, mark, err)
				}
			}
			// The write of the higher token has raised the mark.
			if err := write(ctx, mid); !errors.As(err, &stale) || stale.Seen != high {
				t.Fatalf("after a higher token's write: %v; want StaleError", err)
			}
			if err := g.Claim(ctx, "r", mid); !errors.As(err, &stale) || stale.Seen != high || stale.Given != mid {
				t.Fatalf("claim below the mark: %v; want StaleError", err)
			}
			cancelled, cancel := context.WithCancel(ctx)
			cancel()
			if err := write(cancelled, high); !errors.Is(err, context.Canceled) {
				t.Fatalf("with a cancelled ctx: %v", err)
			}
		})
	}
}

func TestWritesWriteWhatRedisWrites(t *testing.T) {
	s := startServer(t)
	g, c := s.guard(Options{KeyPrefix: "m:"})
	ctx, tok := t.Context(), token(t, 1, 1)
	if err := g.Claim(ctx, "r", tok); err != nil {
		t.Fatal(err)
	}
	binary := string([]byte{0, 255, '\r', '\n', '{'})
	if err := g.Set(ctx, "r", tok, "{r}:s", binary, time.Hour); err != nil {
		t.Fatal(err)
	}
	if got := c.Get(ctx, "{r}:s").Val(); got != binary {
		t.Errorf("SET wrote %q", got)
	}
	if ttl := c.TTL(ctx, "{r}:s").Val(); ttl <= 59*time.Minute || ttl > time.Hour {
		t.Errorf("SET with an hour's TTL has %v", ttl)
	}
	if n, err := g.HSet(ctx, "r", tok, "{r}:h", map[string]any{"a": 1, "b": "x"}); n != 2 || err != nil {
		t.Errorf("HSET of two new fields: %d, %v", n, err)
	}
	if n, err := g.Incr(ctx, "r", tok, "{r}:n"); n != 1 || err != nil {
		t.Errorf("first INCR: %d, %v", n, err)
	}
	if was, err := g.Del(ctx, "r", tok, "{r}:n"); !was || err != nil {
		t.Errorf("DEL of a key: %v, %v", was, err)
	}
	if was, err := g.Del(ctx, "r", tok, "{r}:n"); was || err != nil {
		t.Errorf("DEL of no key: %v, %v", was, err)
	}
	if id, err := g.XAdd(ctx, "r", tok, &redis.XAddArgs{Stream: "{r}:x", NoMkStream: true, Values: []string{"a", "b"}}); id != "" || err != nil {
		t.Errorf("XADD NOMKSTREAM without a stream: %q, %v", id, err)
	}
	if id, err := g.XAdd(ctx, "r", tok, &redis.XAddArgs{Stream: "{r}:x", ID: "5-1", Values: []string{"a", "b"}}); id != "5-1" || err != nil {
		t.Errorf("XADD: %q, %v", id, err)
	}
	if err := c.XGroupCreate(ctx, "{r}:x", "g", "0").Err(); err != nil {
		t.Fatal(err)
	}
	if err := c.XReadGroup(ctx, &redis.XReadGroupArgs{Group: "g", Consumer: "c", Streams: []string{"{r}:x", ">"}}).Err(); err != nil {
		t.Fatal(err)
	}
	if n, err := g.XAck(ctx, "r", tok, "{r}:x", "g", "5-1", "6-1"); n != 1 || err != nil {
		t.Errorf("XACK of one pending and one unknown: %d, %v", n, err)
	}
	_, err := g.Incr(ctx, "r", tok, "{r}:h")
	var replied redis.Error
	if !errors.As(err, &replied) || !strings.Contains(err.Error(), "WRONGTYPE") {
		t.Errorf("INCR of a hash: %v", err)
	}
	if _, err := g.HSet(ctx, "r", tok, "{r}:h", make([]any, 8000)...); err == nil || !strings.Contains(err.Error(), "in parts") {
		t.Errorf("HSET of 8000 arguments: %v", err)
	}
	if ttl := c.TTL(ctx, "m:{r}:r").Val(); ttl != -1 {
		t.Errorf("the mark's TTL is %v; want none", ttl)
	}
}

func TestScriptsKeepTheirOwnReplies(t *testing.T) {
	s := startServer(t)
	g, c := s.guard(Options{})
	ctx, tok := t.Context(), token(t, 1, 7)
	if err := g.Claim(ctx, "r", tok); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ body, want string }{
		{`return 7`, `7`},
		{`return`, `<nil>`},
		{`return false`, `<nil>`},
		{`local x = 1 -- no reply, and a comment at the end`, `<nil>`},
		{`return {#KEYS, #ARGV, KEYS[1], ARGV[2]}`, `[1 2 {r}:k b]`},
		{`if headlease_body or seen or reply then return 'sees the check' end return 'alone'`, `Script attempted to access nonexistent global variable`},
		{`return {ok='FINE'}`, `FINE`},
		{`return redis.error_reply('OWN went wrong')`, `OWN went wrong`},
		{"\n\nerror('third line')", `user_script:3: third line`},
		{`redis.call('SET', KEYS[1], 'kept') return redis.call('INCR', KEYS[1])`, `not an integer`},
		{`return return`, `Error compiling script`},
	} {
		t.Run(tc.body, func(t *testing.T) {
			script, err := NewScript(tc.body)
			if err != nil {
				t.Fatal(err)
			}
			reply, err := g.Run(ctx, "r", tok, script, []string{"{r}:k"}, "a", "b")
			got := fmt.Sprint(reply)
			if err != nil {
				got = err.Error()
			}
			if !strings.Contains(got, tc.want) {
				t.Errorf("got %s; want %s", got, tc.want)
			}
		})
	}
	if got := c.Get(ctx, "{r}:k").Val(); got != "kept" {
		t.Errorf("what a script did before it failed: %q", got)
	}
	for _, body := range []string{"", " \n", "#!lua flags=no-writes\nreturn 1"} {
		if _, err := NewScript(body); err == nil {
			t.Errorf("NewScript(%q) is accepted", body)
		}
	}
	if _, err := g.Run(ctx, "r", tok, nil, nil); err == nil {
		t.Error("a nil script runs")
	}
	// More keys and arguments than Lua's unpack takes.
	count, err := NewScript(`return {#KEYS, #ARGV, KEYS[#KEYS], ARGV[#ARGV]}`)
	if err != nil {
		t.Fatal(err)
	}
	keys, args := make([]string, 9000), make([]any, 10000)
	for i := range keys {
		keys[i] = fmt.Sprintf("{r}:%d", i)
	}
	for i := range args {
		args[i] = i
	}
	if reply, err := g.Run(ctx, "r", tok, count, keys, args...); fmt.Sprint(reply) != "[9000 10000 {r}:8999 9999]" {
		t.Errorf("many keys and arguments: %v, %v", reply, err)
	}
}

// The tokens that a double or fourteen digits would take for one.
func TestTokensAreExact(t *testing.T) {
	s := startServer(t)
	g, _ := s.guard(Options{})
	ctx := t.Context()
	top := token(t, fence.MaxEpoch, fence.MaxSeq)
	if top != 1<<53-1 {
		t.Fatalf("the highest token is %d", top)
	}
	for _, high := range []fence.Token{top, token(t, 1<<20, 1<<31), token(t, 2, 2)} {
		resource := "r" + high.String()
		if err := g.Claim(ctx, resource, high); err != nil {
			t.Fatal(err)
		}
		var stale *fence.StaleError
		if err := g.Claim(ctx, resource, high-1); !errors.As(err, &stale) || stale.Seen != high || stale.Given != high-1 {
			t.Errorf("claim of %s under %s: %v", high-1, high, err)
		}
		if mark, err := g.Mark(ctx, resource); mark != high || err != nil {
			t.Errorf("mark of %s: %s, %v", high, mark, err)
		}
	}
	for _, none := range []fence.Token{0, 1, 1 << 53, 1<<64 - 1} {
		if err := g.Claim(ctx, "none", none); !errors.Is(err, fence.ErrTokenRange) {
			t.Errorf("claim with %d: %v", uint64(none), err)
		}
	}
	if mark, err := g.Mark(ctx, "none"); mark != 0 || err != nil {
		t.Errorf("mark of an unclaimed resource: %s, %v", mark, err)
	}
}

func TestMarkThatIsNoTokenRefusesAll(t *testing.T) {
	s := startServer(t)
	g, c := s.guard(Options{})
	ctx, tok := t.Context(), token(t, 1, 1)
	for _, value := range []string{"", "x", "-1", "1e3", "0x10", "007", "99999999999999999", "9999999999999999", " 1", "nan"} {
		c.Set(ctx, "headlease:mark:{r}:r", value, 0)
		var corrupt *CorruptError
		if err := g.Claim(ctx, "r", tok); !errors.As(err, &corrupt) || corrupt.Value != value {
			t.Errorf("claim on mark %q: %v", value, err)
		}
		if err := g.Set(ctx, "r", tok, "{r}:k", 1, 0); !errors.As(err, &corrupt) {
			t.Errorf("write on mark %q: %v", value, err)
		}
		if _, err := g.Mark(ctx, "r"); !errors.As(err, &corrupt) {
			t.Errorf("mark %q: %v", value, err)
		}
	}
	c.Del(ctx, "headlease:mark:{r}:r")
	c.HSet(ctx, "headlease:mark:{r}:r", "a", "b")
	if err := g.Claim(ctx, "r", tok); err == nil {
		t.Error("claim on a mark that is a hash is accepted")
	}
	if c.Exists(ctx, "{r}:k").Val() != 0 {
		t.Error("a refused write was made")
	}
}

func TestWarnsOfEvictionOnce(t *testing.T) {
	for policy, want := range map[string]int{"allkeys-lru": 1, "allkeys-random": 1, "volatile-lru": 0, "noeviction": 0} {
		t.Run(policy, func(t *testing.T) {
			s := startServer(t, "--maxmemory-policy", policy)
			var log bytes.Buffer
			g, _ := s.guard(Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
			for seq := range fence.Seq(3) {
				if err := g.Claim(t.Context(), "r", token(t, 1, seq+1)); err != nil {
					t.Fatal(err)
				}
			}
			if got := strings.Count(log.String(), "maxmemory_policy="+policy); got != want {
				t.Errorf("%d warnings, want %d: %s", got, want, log.String())
			}
		})
	}
}

func TestOptionsAreChecked(t *testing.T) {
	_, err := New(nil, Options{KeyPrefix: "{x}"})
	if err == nil || !strings.Contains(err.Error(), "client") || !strings.Contains(err.Error(), "braces") {
		t.Errorf("New with two faults: %v", err)
	}
}
