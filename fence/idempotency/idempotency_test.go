package idempotency

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/internal/pgserver"
	"github.com/headlease/headlease/internal/redisserver"
)

var (
	pool   *pgxpool.Pool
	client *redis.Client
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "idempotency")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	pg, err1 := pgserver.New(ctx, filepath.Join(dir, "pg"), "synchronous_commit=off")
	rs, err2 := redisserver.New(filepath.Join(dir, "redis"))
	if err := errors.Join(err1, err2); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer pg.Close()
	defer rs.Close()
	client = redis.NewClient(&redis.Options{Addr: rs.Socket(), ContextTimeoutEnabled: true})
	defer client.Close()
	if pool, err = pgxpool.New(ctx, pg.DSN()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer pool.Close()
	for _, sql := range []string{Migration, Migration, "CREATE TABLE paid (account text, amount int)"} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return m.Run()
}

// over makes the time of the present attempt at a key be over.
func over(t *testing.T, key string) {
	t.Helper()
	value, err := client.Get(t.Context(), DefaultPrefix+key).Result()
	if err == nil {
		err = client.Set(t.Context(), DefaultPrefix+key, value[:strings.LastIndex(value, " ")+1]+"1", time.Hour).Err()
	} else if errors.Is(err, redis.Nil) {
		_, err = pool.Exec(t.Context(), "UPDATE headlease_idempotency SET attempt_ends = clock_timestamp() WHERE key = $1", key)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func stores(t testing.TB) map[string]Store {
	t.Helper()
	o := Options{Attempt: time.Minute}
	r, err1 := NewRedis(client, o)
	p, err2 := NewPostgres(pool, o)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return map[string]Store{"redis": r, "postgres": p}
}

func TestKeysAreTheMessagesOwn(t *testing.T) {
	if got, want := Key("shard/68", "7"), Key("shard/68", "7"); got != want || !regexp.MustCompile(`^[A-Za-z0-9_-]{43}$`).MatchString(got) {
		t.Errorf("%q, %q", got, want)
	}
	// Published: other languages make the same.
	if got := Key("lock/a", "1"); got != "OhvpLpagDJsKo4iWavCm8F7BXVYf-XDckKgBc5iXPco" {
		t.Errorf("the key of lock/a and 1 is %s", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.StringMatching(`[ab/]{0,3}`)
		a, b, c, d := part.Draw(t, "a"), part.Draw(t, "b"), part.Draw(t, "c"), part.Draw(t, "d")
		if (Key(a, b) == Key(c, d)) != (a == c && b == d) {
			t.Fatalf("%q %q and %q %q", a, b, c, d)
		}
	})
}

// Holders that get the same message beside each other and again, some of which die in the middle or
// fail: the effect is had once for each time that somebody may not have seen its end, and all who
// are told a result are told the same.
func TestAnEffectIsHadOnce(t *testing.T) {
	for name, s := range stores(t) {
		t.Run(name, func(t *testing.T) {
			for message := range 30 {
				key := Key("shard/1", fmt.Sprint(name, message))
				var had, running atomic.Int32
				var holders errgroup.Group
				for range 5 {
					holders.Go(func() error {
						for {
							result, err := Do(t.Context(), s, key, func(_ context.Context, again bool) ([]byte, error) {
								if again || running.Add(1) != 1 {
									t.Error("beside another attempt")
								}
								defer running.Add(-1)
								return fmt.Appendf(nil, "%d \x00 ümlaut", had.Add(1)), nil
							})
							var busy *BusyError
							switch {
							case errors.As(err, &busy):
								if busy.For <= 0 || busy.For > time.Minute {
									t.Errorf("busy for %v", busy.For)
								}
								continue
							case err != nil:
								return err
							case string(result) != "1 \x00 ümlaut":
								return fmt.Errorf("the result is %q", result)
							}
							return nil
						}
					})
				}
				if err := holders.Wait(); err != nil {
					t.Fatal(err)
				}
				if had.Load() != 1 {
					t.Fatalf("message %d had its effect %d times", message, had.Load())
				}
			}
		})
	}
}

// What an attempt leaves that did not end, and what the next one is told.
func TestAttemptsThatDoNotEnd(t *testing.T) {
	wrong := errors.New("it went wrong")
	for name, s := range stores(t) {
		t.Run(name, func(t *testing.T) {
			ctx, key := t.Context(), Key(t.Name(), "1")
			// Surely without effect: at once again, as if nothing had been.
			_, err := Do(ctx, s, key, func(context.Context, bool) ([]byte, error) { return nil, Nothing(wrong) })
			if !errors.Is(err, wrong) {
				t.Fatal(err)
			}
			// An error that says nothing of the effect: not before the attempt's time is over, and then
			// as another one.
			_, err = Do(ctx, s, key, func(_ context.Context, again bool) ([]byte, error) {
				if again {
					t.Error("again, after nothing")
				}
				return nil, wrong
			})
			if !errors.Is(err, wrong) {
				t.Fatal(err)
			}
			var busy *BusyError
			told := false
			attempt := func() error {
				_, err := Do(ctx, s, key, func(_ context.Context, again bool) ([]byte, error) {
					told = again
					return nil, nil
				})
				return err
			}
			if err := attempt(); !errors.As(err, &busy) {
				t.Errorf("beside an attempt that may have had its effect: %v", err)
			}
			over(t, key)
			if err := attempt(); err != nil || !told {
				t.Errorf("the next attempt was told %v, %v", told, err)
			}
			// Done, with an empty result.
			result, err := Do(ctx, s, key, func(context.Context, bool) ([]byte, error) { t.Error("had twice"); return nil, nil })
			if err != nil || len(result) != 0 {
				t.Errorf("%q, %v", result, err)
			}
			// An attempt whose time is over is overtaken, and cannot end any more.
			late := Key(t.Name(), "late")
			if _, err := s.Begin(ctx, late, "first"); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Begin(ctx, late, "second"); !errors.As(err, &busy) {
				t.Fatal(err)
			}
			over(t, late)
			if begun, err := s.Begin(ctx, late, "second"); err != nil || !begun.Again {
				t.Fatal(begun, err)
			}
			for what, err := range map[string]error{"finish": s.Finish(ctx, late, "first", nil), "abandon": s.Abandon(ctx, late, "first")} {
				if !errors.Is(err, ErrOvertaken) {
					t.Errorf("%s of an attempt that was overtaken: %v", what, err)
				}
			}
			if err := s.Finish(ctx, late, "second", []byte("x")); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestBounds(t *testing.T) {
	for name, s := range stores(t) {
		if _, err := Do(t.Context(), s, "", nil); err == nil {
			t.Errorf("%s: an empty key is taken", name)
		}
		_, err := Do(t.Context(), s, Key(name, "large"), func(context.Context, bool) ([]byte, error) { return make([]byte, MaxResult+1), nil })
		if err == nil || !strings.Contains(err.Error(), "are kept") {
			t.Errorf("%s: %v", name, err)
		}
	}
	err := Options{Keep: time.Second, Attempt: 500 * time.Millisecond}.Validate()
	if err == nil || !strings.Contains(err.Error(), "attempt: 500ms is below 1s") {
		t.Error(err)
	}
	if err := (Options{Keep: time.Minute, Attempt: time.Hour}).Validate(); err == nil || !strings.Contains(err.Error(), "keep: ") {
		t.Error(err)
	}
}

// Key and effect commit together: of transactions beside each other one has it, and one that rolls
// back had nothing.
func TestOnceIsOneTransaction(t *testing.T) {
	ctx := t.Context()
	pay := func(account string, fail error) (first bool, err error) {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			var result []byte
			result, first, err = Once(ctx, tx, Key(account, "1"), func(tx pgx.Tx) ([]byte, error) {
				if _, err := tx.Exec(ctx, "INSERT INTO paid VALUES ($1, 5)", account); err != nil {
					return nil, err
				}
				return []byte("paid"), fail
			})
			if err == nil && string(result) != "paid" {
				return fmt.Errorf("the result is %q", result)
			}
			return err
		})
		return first, err
	}
	for i := range 20 {
		account := fmt.Sprint("account", i)
		wrong := errors.New("rolled back")
		if _, err := pay(account, wrong); !errors.Is(err, wrong) {
			t.Fatal(err)
		}
		var firsts atomic.Int32
		var all errgroup.Group
		for range 4 {
			all.Go(func() error {
				first, err := pay(account, nil)
				if first {
					firsts.Add(1)
				}
				return err
			})
		}
		if err := all.Wait(); err != nil {
			t.Fatal(err)
		}
		var n int
		if err := pool.QueryRow(ctx, "SELECT count(*) FROM paid WHERE account = $1", account).Scan(&n); err != nil || n != 1 || firsts.Load() != 1 {
			t.Fatalf("paid %d times, %d first, %v", n, firsts.Load(), err)
		}
	}
}

func TestOldKeysAreForgotten(t *testing.T) {
	p, err := NewPostgres(pool, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	old, fresh := Key(t.Name(), "old"), Key(t.Name(), "fresh")
	for _, key := range []string{old, fresh} {
		if _, err := Do(ctx, p, key, func(context.Context, bool) ([]byte, error) { return nil, nil }); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := pool.Exec(ctx, "UPDATE headlease_idempotency SET at = at - interval '8 days' WHERE key = $1", old); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Forget(ctx); n != 1 || err != nil {
		t.Errorf("%d keys were forgotten, %v", n, err)
	}
	if begun, err := p.Begin(ctx, fresh, "x"); !begun.Done || err != nil {
		t.Errorf("%+v, %v", begun, err)
	}
	r, err := NewRedis(client, Options{Keep: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Do(ctx, r, fresh, func(context.Context, bool) ([]byte, error) { return nil, nil }); err != nil {
		t.Fatal(err)
	}
	if ttl := client.TTL(ctx, DefaultPrefix+fresh).Val(); ttl <= 0 || ttl > time.Hour {
		t.Errorf("a key in Redis is kept for %v", ttl)
	}
}
