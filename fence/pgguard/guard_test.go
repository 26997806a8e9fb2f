package pgguard

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/pgserver"
)

// shared is the server of all tests but those that kill theirs.
var shared *pgserver.Server

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "pgguard")
	if err == nil {
		shared, err = pgserver.New(context.Background(), filepath.Join(dir, "data"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	defer shared.Close()
	code := m.Run()
	if err := goleak.Find(); err != nil && code == 0 {
		// The server's log has a reader until it is closed.
		if !strings.Contains(err.Error(), "pgserver") {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

// database is a schema of the test's own, with the guard and a journal that
// tells in which order the writes came.
func database(t testing.TB, s *pgserver.Server) *pgxpool.Pool {
	t.Helper()
	ctx := context.Background()
	name := "t" + strings.ToLower(strings.NewReplacer("/", "_", "#", "_").Replace(t.Name()))
	name = name[:min(len(name), 60)]
	cfg, err := pgxpool.ParseConfig(s.DSN() + " search_path=" + name)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 16
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	for _, q := range []string{
		"DROP SCHEMA IF EXISTS " + name + " CASCADE", "CREATE SCHEMA " + name,
		Migration, Migration, // twice: the second changes nothing
		"CREATE TABLE journal (id bigserial PRIMARY KEY, resource text, token bigint)",
		"CREATE TABLE account (id bigint PRIMARY KEY, balance bigint)",
		"INSERT INTO account VALUES (1, 0)",
	} {
		if _, err := pool.Exec(ctx, q); err != nil {
			t.Fatalf("%.40s: %v", q, err)
		}
	}
	return pool
}

func token(seq fence.Seq) fence.Token {
	tok, err := fence.NewToken(1, seq)
	if err != nil {
		panic(err)
	}
	return tok
}

const insert = "INSERT INTO journal (resource, token) VALUES ($1, $2)"

func tokens(t testing.TB, pool *pgxpool.Pool) (out []fence.Token) {
	t.Helper()
	rows, err := pool.Query(context.Background(), "SELECT token FROM journal ORDER BY id")
	if err != nil {
		t.Fatal(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range all {
		out = append(out, fence.Token(n))
	}
	return out
}

func TestOnlyTheHighestTokenWrites(t *testing.T) {
	pool, g, ctx := database(t, shared), New(), context.Background()
	write := func(tok fence.Token) error {
		_, err := g.Exec(ctx, pool, "r", tok, insert, "r", int64(tok))
		return err
	}
	var unclaimed *fence.UnclaimedError
	if err := write(token(5)); !errors.As(err, &unclaimed) || unclaimed.Resource != "r" {
		t.Fatalf("before a claim: %v, want unclaimed", err)
	}
	for range 2 {
		if err := g.Claim(ctx, pool, "r", token(5)); err != nil {
			t.Fatal(err)
		}
	}
	if err := write(token(5)); err != nil {
		t.Fatal(err)
	}
	want := &fence.StaleError{Resource: "r", Seen: token(5), Given: token(4)}
	var stale *fence.StaleError
	if err := write(token(4)); !errors.As(err, &stale) || *stale != *want {
		t.Fatalf("a lower token: %v, want %v", err, want)
	}
	if err := g.Claim(ctx, pool, "r", token(4)); !errors.As(err, &stale) || *stale != *want {
		t.Fatalf("a claim with a lower token: %v, want %v", err, want)
	}
	if err := write(token(8)); err != nil { // raises the mark as it writes
		t.Fatal(err)
	}
	if mark, err := g.Mark(ctx, pool, "r"); err != nil || mark != token(8) {
		t.Fatalf("mark %v, %v, want %v", mark, err, token(8))
	}
	if err := write(token(7)); !errors.As(err, &stale) {
		t.Fatalf("below the raised mark: %v", err)
	}
	if mark, err := g.Mark(ctx, pool, "other"); err != nil || mark != 0 {
		t.Fatalf("mark of a resource that nobody claimed: %v, %v", mark, err)
	}
	if got := fmt.Sprint(tokens(t, pool)); got != fmt.Sprint([]fence.Token{token(5), token(8)}) {
		t.Fatalf("written by %s", got)
	}
}

// TestARefusedWriteLeavesNothing: neither the caller's rows nor the mark.
func TestARefusedWriteLeavesNothing(t *testing.T) {
	pool, g, ctx := database(t, shared), New(), context.Background()
	if err := g.Claim(ctx, pool, "r", token(5)); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Exec(ctx, pool, "r", token(6), "INSERT INTO journal (id) VALUES ('not a number')"); err == nil || Refusal(err) != nil {
		t.Fatalf("broken SQL: %v", err)
	}
	broken := errors.New("handler failed")
	if err := g.Do(ctx, pool, "r", token(6), func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, insert, "r", int64(token(6))); err != nil {
			return err
		}
		return broken
	}); !errors.Is(err, broken) {
		t.Fatalf("%v, want the handler's error", err)
	}
	if mark, err := g.Mark(ctx, pool, "r"); err != nil || mark != token(5) {
		t.Fatalf("mark %v, %v after undone writes, want %v", mark, err, token(5))
	}
	if got := tokens(t, pool); len(got) > 0 {
		t.Fatalf("written by %v", got)
	}
}

// waiting waits until n advisory locks are waited for.
func waiting(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		var have int
		if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").Scan(&have); err != nil {
			t.Fatal(err)
		}
		if have == n {
			return
		}
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatalf("%d wait, want %d", have, n)
		}
	}
}

// TestF15ClaimWaitsForLowerWrites: a claim returns only when transactions checked
// with lower tokens have ended, and those that come while it waits are behind it,
// however many there are.
func TestF15ClaimWaitsForLowerWrites(t *testing.T) {
	pool, g, ctx := database(t, shared), New(), context.Background()
	if err := g.Claim(ctx, pool, "r", token(5)); err != nil {
		t.Fatal(err)
	}
	old, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Fence(ctx, old, "r", token(5)); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Exec(ctx, pool, "r", token(5), insert, "r", int64(token(5))); err != nil {
		t.Fatalf("a second writer of the same token waits or fails: %v", err)
	}
	claimed := make(chan error, 1)
	go func() { claimed <- g.Claim(ctx, pool, "r", token(7)) }()
	waiting(t, pool, 1)
	late := make(chan error, 1)
	go func() {
		_, err := g.Exec(ctx, pool, "r", token(5), insert, "r", int64(token(5)))
		late <- err
	}()
	waiting(t, pool, 2)
	select {
	case err := <-claimed:
		t.Fatalf("claimed while a lower write is under way: %v", err)
	default:
	}
	if _, err := old.Exec(ctx, insert, "r", int64(token(5))); err != nil {
		t.Fatal(err)
	}
	if err := old.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-claimed; err != nil {
		t.Fatal(err)
	}
	var stale *fence.StaleError
	if err := <-late; !errors.As(err, &stale) || stale.Seen != token(7) {
		t.Fatalf("a lower write that waited behind the claim: %v, want stale", err)
	}
	if n := len(tokens(t, pool)); n != 2 {
		t.Fatalf("%d writes of the old holder, want the 2 from before the claim", n)
	}
}

// TestOldSnapshotsCannotHideAMark: above read committed a transaction may have
// begun before the claim; it must not pass.
func TestOldSnapshotsCannotHideAMark(t *testing.T) {
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(strings.ReplaceAll(string(level), " ", "_"), func(t *testing.T) {
			pool, g, ctx := database(t, shared), New(), context.Background()
			if err := g.Claim(ctx, pool, "r", token(5)); err != nil {
				t.Fatal(err)
			}
			tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(ctx) }()                          // refused by then, or ended
			if _, err := tx.Exec(ctx, "SELECT * FROM account"); err != nil { // takes the snapshot
				t.Fatal(err)
			}
			if err := g.Claim(ctx, pool, "r", token(7)); err != nil {
				t.Fatal(err)
			}
			err = g.Fence(ctx, tx, "r", token(5))
			var stale *fence.StaleError
			var pg *pgconn.PgError
			if serial := errors.As(err, &pg) && pg.Code == "40001"; !errors.As(err, &stale) && (!serial || level == pgx.ReadCommitted) {
				t.Fatalf("%v, want a refusal", err)
			}
		})
	}
}

// TestPlainSQL: any driver, and the trigger of the example, which no statement
// can forget.
func TestPlainSQL(t *testing.T) {
	pool, g, ctx := database(t, shared), New(), context.Background()
	if _, err := pool.Exec(ctx, "CREATE TRIGGER fenced BEFORE INSERT OR UPDATE ON journal FOR EACH ROW EXECUTE FUNCTION headlease_fence_row('resource', 'token')"); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("pgx", pool.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, "SELECT headlease_claim($1, $2)", "r", int64(token(5))); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, insert, "r", int64(token(5))); err != nil {
		t.Fatal(err)
	}
	_, err = db.ExecContext(ctx, insert, "r", int64(token(4)))
	var stale *fence.StaleError
	if !errors.As(Refusal(err), &stale) || stale.Seen != token(5) || stale.Given != token(4) {
		t.Fatalf("a lower token under the trigger: %v", err)
	}
	for _, row := range [][2]any{{"r", nil}, {nil, int64(token(5))}, {"r", -1}, {"", int64(token(5))}, {"r", int64(1) << 53}} {
		var pg *pgconn.PgError
		if _, err := db.ExecContext(ctx, insert, row[0], row[1]); !errors.As(err, &pg) || pg.Code != "22023" {
			t.Errorf("a row of %v passes the trigger, or fails otherwise: %v", row, err)
		}
	}
	if mark, err := g.Mark(ctx, pool, "r"); err != nil || mark != token(5) {
		t.Fatalf("mark %v, %v", mark, err)
	}
	if _, err := pool.Exec(ctx, "INSERT INTO headlease_mark VALUES ('x', 9007199254740992)"); err == nil {
		t.Fatal("a mark that is no token is stored")
	}
}

func TestArgumentsAreChecked(t *testing.T) {
	pool, g, ctx := database(t, shared), New(), context.Background()
	for want, call := range map[string]func() error{
		"resource: is empty":  func() error { return g.Claim(ctx, pool, "", token(1)) },
		"resource: 1025":      func() error { return g.Claim(ctx, pool, strings.Repeat("x", 1025), token(1)) },
		"resource: is not":    func() error { return g.Claim(ctx, pool, "\xff", token(1)) },
		"token: is 0":         func() error { return g.Claim(ctx, pool, "r", 0) },
		"fencing token out o": func() error { return g.Claim(ctx, pool, "r", 1<<60) },
	} {
		if err := call(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestTwoHoldersInAnyOrder runs holders side by side, each with transactions of a
// random shape, and checks the order of what was committed: no write of a lower
// token after one of a higher.
func TestTwoHoldersInAnyOrder(t *testing.T) {
	pool, g, ctx := database(t, shared), New(), context.Background()
	var round int
	rapid.Check(t, func(t *rapid.T) {
		round++
		resource := fmt.Sprint("r", round)
		low := fence.Seq(rapid.IntRange(1, 5).Draw(t, "low"))
		high := low + fence.Seq(rapid.IntRange(1, 5).Draw(t, "by"))
		if err := g.Claim(ctx, pool, resource, token(low)); err != nil {
			t.Fatal(err)
		}
		level := rapid.SampledFrom([]pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}).Draw(t, "level")
		type act struct {
			claim, split bool
			writes       int
		}
		acts := func(label string) []act {
			return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) act {
				return act{rapid.Bool().Draw(t, "claim"), rapid.Bool().Draw(t, "split"), rapid.IntRange(1, 3).Draw(t, "writes")}
			}), 1, 5).Draw(t, label)
		}
		holder := func(tok fence.Token, acts []act) error {
			for _, a := range acts {
				var err error
				switch {
				case a.claim:
					err = g.Claim(ctx, pool, resource, tok)
				case a.split:
					err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
						for range a.writes {
							if err := g.Fence(ctx, tx, resource, tok); err != nil {
								return err
							}
							if _, err := tx.Exec(ctx, insert, resource, int64(tok)); err != nil {
								return err
							}
						}
						return nil
					})
				default:
					_, err = g.Exec(ctx, pool, resource, tok, insert, resource, int64(tok))
				}
				var stale *fence.StaleError
				var pg *pgconn.PgError
				switch {
				case err == nil, errors.As(err, &pg) && pg.Code == "40001":
				case errors.As(err, &stale) && tok == token(low) && stale.Seen == token(high):
					return nil // overtaken, for good
				default:
					return fmt.Errorf("holder %v: %w", tok, err)
				}
			}
			return nil
		}
		one, two := acts("low"), acts("high")
		errs := make([]error, 2)
		var both sync.WaitGroup
		both.Go(func() { errs[0] = holder(token(low), one) })
		both.Go(func() { errs[1] = holder(token(high), two) })
		both.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		rows, err := pool.Query(ctx, "SELECT token FROM journal WHERE resource = $1 ORDER BY id", resource)
		if err != nil {
			t.Fatal(err)
		}
		written, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			t.Fatal(err)
		}
		for i := 1; i < len(written); i++ {
			if written[i] < written[i-1] {
				t.Fatalf("written in the order %v", written)
			}
		}
	})
}

// TestMarksSurviveAKilledServer: what was claimed before a crash holds after it.
func TestMarksSurviveAKilledServer(t *testing.T) {
	s, err := pgserver.New(t.Context(), filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	pool, g, ctx := database(t, s), New(), context.Background()
	if err := g.Claim(ctx, pool, "r", token(5)); err != nil {
		t.Fatal(err)
	}
	// A write that was checked and not committed when the server died.
	tx, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Fence(ctx, tx, "r", token(9)); err != nil {
		t.Fatal(err)
	}
	s.Kill()
	if err := tx.Commit(ctx); err == nil {
		t.Fatal("committed by a dead server")
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	pool.Reset()
	if mark, err := g.Mark(ctx, pool, "r"); err != nil || mark != token(5) {
		t.Fatalf("mark %v, %v after the crash, want %v", mark, err, token(5))
	}
	var stale *fence.StaleError
	if _, err := g.Exec(ctx, pool, "r", token(4), insert, "r", int64(token(4))); !errors.As(err, &stale) {
		t.Fatalf("a late write after the crash: %v", err)
	}
}
