package redisguard

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/redisserver"
)

// Random interleavings of two holders' claims and writes against a map; the
// server's scripts are flushed in between.
func TestGuardAgainstModel(t *testing.T) {
	s := startServer(t)
	first, c := s.guard(Options{})
	second, _ := s.guard(Options{})
	guards := []*Guard{first, second}
	ctx := t.Context()
	run := 0
	rapid.Check(t, func(t *rapid.T) {
		run++
		var (
			resource = fmt.Sprintf("r%d", run)
			key      = "{" + resource + "}:k"
			mark     fence.Token
			values   = map[string]int64{}
		)
		// expect tells whether the model lets the token write, and checks
		// that the guard's error says the same.
		expect := func(tok fence.Token, claim bool, err error) bool {
			var stale *fence.StaleError
			var unclaimed *fence.UnclaimedError
			switch {
			case mark == 0 && !claim:
				if !errors.As(err, &unclaimed) {
					t.Fatalf("token %s without a mark: %v", tok, err)
				}
				return false
			case tok < mark:
				if !errors.As(err, &stale) || stale.Seen != mark || stale.Given != tok {
					t.Fatalf("token %s below %s: %v", tok, mark, err)
				}
				return false
			case err != nil:
				t.Fatalf("token %s at mark %s: %v", tok, mark, err)
			}
			mark = tok
			return true
		}
		tokens := rapid.Custom(func(t *rapid.T) fence.Token {
			tok, err := fence.NewToken(rapid.SampledFrom([]fence.Epoch{1, 2, fence.MaxEpoch}).Draw(t, "epoch"),
				rapid.SampledFrom([]fence.Seq{1, 2, fence.MaxSeq}).Draw(t, "seq"))
			if err != nil {
				t.Fatal(err)
			}
			return tok
		})
		guard := func(t *rapid.T) *Guard { return rapid.SampledFrom(guards).Draw(t, "holder") }
		t.Repeat(map[string]func(*rapid.T){
			"claim": func(t *rapid.T) {
				tok := tokens.Draw(t, "token")
				expect(tok, true, guard(t).Claim(ctx, resource, tok))
			},
			"set": func(t *rapid.T) {
				tok, v := tokens.Draw(t, "token"), rapid.Int64Range(0, 9).Draw(t, "value")
				if expect(tok, false, guard(t).Set(ctx, resource, tok, key, v, 0)) {
					values[key] = v
				}
			},
			"incr": func(t *rapid.T) {
				tok := tokens.Draw(t, "token")
				n, err := guard(t).Incr(ctx, resource, tok, key)
				if expect(tok, false, err) {
					values[key]++
					if n != values[key] {
						t.Fatalf("incr: %d, want %d", n, values[key])
					}
				}
			},
			"del": func(t *rapid.T) {
				tok := tokens.Draw(t, "token")
				was, err := guard(t).Del(ctx, resource, tok, key)
				if expect(tok, false, err) {
					if _, want := values[key]; was != want {
						t.Fatalf("del: %v, want %v", was, want)
					}
					delete(values, key)
				}
			},
			"flush scripts": func(t *rapid.T) { c.ScriptFlush(ctx) },
			"": func(t *rapid.T) {
				if got, err := first.Mark(ctx, resource); got != mark || err != nil {
					t.Fatalf("mark %s, %v; want %s", got, err, mark)
				}
				n, err := c.Get(ctx, key).Int64()
				if want, ok := values[key]; ok != (err == nil) || n != want || err != nil && !errors.Is(err, redis.Nil) {
					t.Fatalf("value %d, %v; want %d, %v", n, err, want, slices.Collect(maps.Keys(values)))
				}
			},
		})
	})
}

// The old holder writes as fast as it can while the new one claims: what the
// new one reads after its claim does not change any more.
func TestF15NothingChangesAfterClaim(t *testing.T) {
	s := startServer(t)
	older, _ := s.guard(Options{})
	newer, c := s.guard(Options{})
	ctx := t.Context()
	for round := range 40 {
		resource := fmt.Sprintf("r%d", round)
		key := "{" + resource + "}:n"
		low, high := token(t, 1, 1), token(t, 1, 2)
		if err := older.Claim(ctx, resource, low); err != nil {
			t.Fatal(err)
		}
		var accepted atomic.Int64
		running := make(chan struct{}, 4)
		var writers errgroup.Group
		for range cap(running) {
			writers.Go(func() error {
				for n := 0; ; n++ {
					_, err := older.Incr(ctx, resource, low, key)
					var stale *fence.StaleError
					switch {
					case errors.As(err, &stale) && stale.Seen == high:
						return nil
					case err != nil:
						return err
					}
					accepted.Add(1)
					if n == 5 {
						running <- struct{}{}
					}
				}
			})
		}
		for range cap(running) {
			<-running
		}
		if err := newer.Claim(ctx, resource, high); err != nil {
			t.Fatal(err)
		}
		read := c.Get(ctx, key).Val()
		if err := writers.Wait(); err != nil {
			t.Fatal(err)
		}
		after := c.Get(ctx, key).Val()
		if read != after || after != fmt.Sprint(accepted.Load()) {
			t.Fatalf("the new holder read %s after its claim, then it was %s, with %d writes accepted", read, after, accepted.Load())
		}
	}
}

func TestMarksOutliveTheServer(t *testing.T) {
	for name, end := range map[string]func(*server){
		"restart": func(s *server) { s.Stop() },
		"kill -9": func(s *server) { s.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, redisserver.Durable()...)
			g, _ := s.guard(Options{})
			ctx := t.Context()
			low, high := token(t, 1, 1), token(t, 1, 2)
			if err := g.Claim(ctx, "r", low); err != nil {
				t.Fatal(err)
			}
			if err := g.Set(ctx, "r", high, "{r}:k", "by the new holder", 0); err != nil {
				t.Fatal(err)
			}
			end(s)
			s.again()
			g, c := s.guard(Options{})
			var stale *fence.StaleError
			if err := g.Set(ctx, "r", low, "{r}:k", "late", 0); !errors.As(err, &stale) || stale.Seen != high {
				t.Errorf("late write after the restart: %v; want StaleError", err)
			}
			if got := c.Get(ctx, "{r}:k").Val(); got != "by the new holder" {
				t.Errorf("after the restart: %q", got)
			}
			if err := g.Set(ctx, "r", high, "{r}:k", "again", 0); err != nil {
				t.Error(err)
			}
		})
	}
}

// Killed in the middle of a stream of rising writes, the server keeps a mark
// as high as the last acknowledged one: check and write are logged together.
func TestKillBetweenWritesLosesNoAcknowledgedMark(t *testing.T) {
	s := startServer(t, redisserver.Durable()...)
	g, _ := s.guard(Options{})
	ctx := t.Context()
	if err := g.Claim(ctx, "r", token(t, 1, 1)); err != nil {
		t.Fatal(err)
	}
	var acknowledged atomic.Uint64
	enough, ended := make(chan struct{}), make(chan error, 1)
	write := func() error {
		for seq := fence.Seq(2); ; seq++ {
			tok, err := fence.NewToken(1, seq)
			if err != nil {
				return err
			}
			if err := g.Set(ctx, "r", tok, "{r}:k", tok.String(), 0); err != nil {
				return err
			}
			acknowledged.Store(uint64(tok))
			if seq == 200 {
				close(enough)
			}
		}
	}
	go func() { ended <- write() }()
	select {
	case <-enough:
	case err := <-ended:
		t.Fatalf("the writer ended before the server was killed: %v", err)
	}
	s.Kill()
	if err := <-ended; err == nil {
		t.Error("the writer ended without an error although its server was killed")
	}
	s.again()
	g, c := s.guard(Options{})
	mark, err := g.Mark(ctx, "r")
	if err != nil || uint64(mark) < acknowledged.Load() {
		t.Errorf("mark %s, %v; %d was acknowledged", mark, err, acknowledged.Load())
	}
	if data := c.Get(ctx, "{r}:k").Val(); data != mark.String() {
		t.Errorf("mark %s with data of %s: they are not one step", mark, data)
	}
}

func TestServerThatForgotRefusesUntilClaimed(t *testing.T) {
	s := startServer(t) // no AOF, no snapshots
	g, _ := s.guard(Options{})
	ctx, tok := t.Context(), token(t, 1, 2)
	if err := g.Claim(ctx, "r", tok); err != nil {
		t.Fatal(err)
	}
	s.Kill()
	if err := g.Set(ctx, "r", tok, "{r}:k", 1, 0); err == nil {
		t.Fatal("a write to a dead server is accepted")
	}
	s.again()
	g, _ = s.guard(Options{})
	var unclaimed *fence.UnclaimedError
	if err := g.Set(ctx, "r", tok, "{r}:k", 1, 0); !errors.As(err, &unclaimed) {
		t.Fatalf("write to a server that forgot: %v; want UnclaimedError", err)
	}
	if err := g.Claim(ctx, "r", tok); err != nil {
		t.Fatal(err)
	}
	if err := g.Set(ctx, "r", tok, "{r}:k", 1, 0); err != nil {
		t.Fatal(err)
	}
}
