package idempotency

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Migration makes the table of keys in the schema that comes first in the search path. Run again
// it changes nothing.
//
//go:embed migration.sql
var Migration string

// DB is what a pool of pgx has.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Postgres is a Store in PostgreSQL, which needs Migration.
type Postgres struct {
	db   DB
	opts Options
}

// NewPostgres returns a store in the pool's database.
func NewPostgres(db DB, opts Options) (*Postgres, error) {
	if db == nil {
		return nil, errors.New("idempotency keys: database is nil")
	}
	if err := opts.Validate(); err != nil {
		return nil, fmt.Errorf("idempotency keys: %w", err)
	}
	return &Postgres{db, opts.withDefaults()}, nil
}

// AttemptWithin is Options.Attempt.
func (p *Postgres) AttemptWithin() time.Duration { return p.opts.Attempt }

// Begin begins an attempt.
func (p *Postgres) Begin(ctx context.Context, key, attempt string) (Begun, error) {
	// Each statement is a step of its own; between them another attempt may come or a key go, and
	// then it is asked again.
	for {
		var again bool
		err := p.db.QueryRow(ctx, `
			INSERT INTO headlease_idempotency AS k (key, attempt, attempt_ends)
			VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3))
			ON CONFLICT (key) DO UPDATE SET attempt = excluded.attempt, attempt_ends = excluded.attempt_ends, at = clock_timestamp()
			WHERE k.attempt IS NOT NULL AND (k.attempt = excluded.attempt OR k.attempt_ends <= clock_timestamp())
			RETURNING xmax <> 0`, key, attempt, p.opts.Attempt.Seconds()).Scan(&again)
		if err == nil {
			return Begun{Again: again}, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return Begun{}, fmt.Errorf("idempotency key %s: %w", key, err)
		}
		var done bool
		var result []byte
		var left float64
		err = p.db.QueryRow(ctx, `
			SELECT attempt IS NULL, result, coalesce(extract(epoch FROM attempt_ends - clock_timestamp()), 0)::float8
			FROM headlease_idempotency WHERE key = $1`, key).Scan(&done, &result, &left)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
		case err != nil:
			return Begun{}, fmt.Errorf("idempotency key %s: %w", key, err)
		case done:
			return Begun{Done: true, Result: result}, nil
		case left > 0:
			return Begun{}, &BusyError{Key: key, For: time.Duration(left * float64(time.Second))}
		}
	}
}

// Finish notes the attempt's result.
func (p *Postgres) Finish(ctx context.Context, key, attempt string, result []byte) error {
	return p.one(p.db.Exec(ctx, `
		UPDATE headlease_idempotency SET attempt = NULL, attempt_ends = NULL, result = $3, at = clock_timestamp()
		WHERE key = $1 AND attempt = $2`, key, attempt, nonNil(result)))
}

// Abandon forgets the attempt. An earlier one that did not end is forgotten with it: the
// effect that says Nothing has looked.
func (p *Postgres) Abandon(ctx context.Context, key, attempt string) error {
	return p.one(p.db.Exec(ctx, "DELETE FROM headlease_idempotency WHERE key = $1 AND attempt = $2", key, attempt))
}

func (p *Postgres) one(tag pgconn.CommandTag, err error) error {
	if err == nil && tag.RowsAffected() == 0 {
		return ErrOvertaken
	}
	return err
}

func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// Forget removes keys that are older than Options.Keep, and returns how many. Run it now and then;
// nothing else does.
func (p *Postgres) Forget(ctx context.Context) (int64, error) {
	tag, err := p.db.Exec(ctx, "DELETE FROM headlease_idempotency WHERE at < clock_timestamp() - make_interval(secs => $1)", p.opts.Keep.Seconds())
	return tag.RowsAffected(), err
}

// Once has an effect on the database itself, in the caller's transaction: key and effect commit
// together, so that there is no attempt that may have had it. A second transaction with the key waits
// for the end of the first. first is false if the effect was had before, and the result then that one's.
// After an error the transaction must end without a commit. The isolation level must be read committed, the
// default: above it a key of a transaction that ran beside this one shows as a serialization failure.
func Once(ctx context.Context, tx pgx.Tx, key string, effect func(pgx.Tx) ([]byte, error)) (result []byte, first bool, err error) {
	wrap := func(err error) error { return fmt.Errorf("idempotency key %s: %w", key, err) }
	tag, err := tx.Exec(ctx, "INSERT INTO headlease_idempotency (key, result) VALUES ($1, '') ON CONFLICT (key) DO NOTHING", key)
	if err != nil {
		return nil, false, wrap(err)
	}
	if tag.RowsAffected() == 0 {
		var attempt *string
		if err := tx.QueryRow(ctx, "SELECT attempt, result FROM headlease_idempotency WHERE key = $1", key).Scan(&attempt, &result); err != nil {
			return nil, false, wrap(err)
		}
		if attempt != nil {
			return nil, false, wrap(errors.New("an attempt outside of a transaction has it; use Once or Do for a key, not both"))
		}
		return result, false, nil
	}
	if result, err = effect(tx); err != nil {
		return nil, true, err
	}
	if len(result) > MaxResult {
		return nil, true, wrap(fmt.Errorf("the result has %d bytes, and %d are kept", len(result), MaxResult))
	}
	if _, err := tx.Exec(ctx, "UPDATE headlease_idempotency SET result = $2 WHERE key = $1", key, nonNil(result)); err != nil {
		return nil, true, wrap(err)
	}
	return result, true, nil
}
