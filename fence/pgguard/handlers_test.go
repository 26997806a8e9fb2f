package pgguard

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/fencetest"
	"github.com/headlease/headlease/fence/markstore"
)

var _ markstore.Store = (*Handlers)(nil)

// rows are values of resources, written in the guard's transactions.
type rows struct {
	*Guard
	pool *pgxpool.Pool
}

func (r rows) Claim(ctx context.Context, resource string, token fence.Token) error {
	return r.Guard.Claim(ctx, r.pool, resource, token)
}

func (r rows) Write(ctx context.Context, resource string, token fence.Token, value string) error {
	_, err := r.Exec(ctx, r.pool, resource, token, "INSERT INTO value VALUES ($1, $2) ON CONFLICT (resource) DO UPDATE SET value = excluded.value", resource, value)
	return err
}

func (r rows) Value(ctx context.Context, resource string) (value string, err error) {
	err = r.pool.QueryRow(ctx, "SELECT value FROM value WHERE resource = $1", resource).Scan(&value)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	return value, err
}

// relaxed is a database that does not wait for the disk at each of thousands of commits.
func relaxed(t testing.TB) *pgxpool.Pool {
	pool := database(t, shared)
	if _, err := pool.Exec(t.Context(), "ALTER DATABASE postgres SET synchronous_commit = off"); err != nil {
		t.Fatal(err)
	}
	pool.Reset()
	t.Cleanup(func() {
		_, err := pool.Exec(context.Background(), "ALTER DATABASE postgres RESET synchronous_commit")
		if err != nil {
			t.Error(err)
		}
	})
	return pool
}

func TestGuardAgainstTheCommonModel(t *testing.T) {
	pool := relaxed(t)
	if _, err := pool.Exec(t.Context(), "CREATE TABLE value (resource text PRIMARY KEY, value text)"); err != nil {
		t.Fatal(err)
	}
	fencetest.Run(t, rows{New(), pool}, "lock/")
}

func TestHandlersAgainstTheCommonModel(t *testing.T) {
	fencetest.Run(t, fencetest.Handled(NewHandlers(relaxed(t))), "lock/")
}

// A claim of another process waits for a running handler, and nothing of a lower token begins
// meanwhile.
func TestF15ClaimWaitsForHandlersOfOtherProcesses(t *testing.T) {
	pool := database(t, shared)
	here, there := NewHandlers(pool), NewHandlers(pool)
	ctx := t.Context()
	if err := here.Claim(ctx, "r", token(1)); err != nil {
		t.Fatal(err)
	}
	running, end := make(chan struct{}), make(chan struct{})
	effect, claim := make(chan error, 1), make(chan error, 1)
	go func() {
		effect <- here.Do(ctx, "r", token(1), func(context.Context) error { close(running); <-end; return nil })
	}()
	<-running
	go func() { claim <- there.Claim(ctx, "r", token(2)) }()
	waiting(t, pool, 1)
	select {
	case err := <-claim:
		t.Fatalf("claimed beside a running handler: %v", err)
	default:
	}
	close(end)
	if err := errors.Join(<-effect, <-claim); err != nil {
		t.Fatal(err)
	}
	var stale *fence.StaleError
	if err := here.Do(ctx, "r", token(1), func(context.Context) error { t.Error("ran"); return nil }); !errors.As(err, &stale) {
		t.Error(err)
	}
}
