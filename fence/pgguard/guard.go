package pgguard

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/headlease/headlease/fence"
)

// Migration makes the table of marks and its functions in the schema that comes
// first in the search path. Run again it changes nothing.
//
//go:embed migration.sql
var Migration string

// MaxResource bounds a resource's name, in bytes.
const MaxResource = 1024

// SQLSTATEs of the functions' refusals.
const (
	stateStale     = "HL001"
	stateUnclaimed = "HL002"
)

// Execer is what a connection, a pool and a transaction of pgx have.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Beginner is what a connection and a pool of pgx have, and a transaction: its
// inner transactions are savepoints.
type Beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Batcher is what a connection, a pool and a transaction of pgx have.
type Batcher interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Guard makes guarded writes. It has no state and is safe for concurrent use.
type Guard struct{}

// New returns a guard. The database needs Migration.
func New() *Guard { return &Guard{} }

// Claim raises the resource's mark to the token: after a nil return no transaction
// of a lower token commits any more, so the new holder reads a state that no
// earlier one changes [F15]. It waits for those under way. It is repeatable. A
// holder calls it before its first read and after a *fence.UnclaimedError, and
// only while lease.Valid(); db is a pool or a connection, or a transaction that commits
// before the holder reads.
//
// It fails with a *fence.StaleError if a higher token was seen. After another error
// the mark may or may not be raised; claim again.
func (g *Guard) Claim(ctx context.Context, db Execer, resource string, token fence.Token) error {
	if err := check(resource, token); err != nil {
		return err
	}
	_, err := db.Exec(ctx, "SELECT headlease_claim($1, $2)", resource, int64(token))
	return wrap("claim", resource, err)
}

// Fence checks the token in the caller's transaction, before or after its writes:
// the transaction must end without a commit if Fence fails. Outside of a
// transaction it protects nothing, so it takes only one.
//
// It fails with a *fence.StaleError below the mark and with a
// *fence.UnclaimedError without one.
func (g *Guard) Fence(ctx context.Context, tx pgx.Tx, resource string, token fence.Token) error {
	if err := check(resource, token); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, "SELECT headlease_fence($1, $2)", resource, int64(token))
	return wrap("fence", resource, err)
}

// Do runs write in a transaction that was checked with the token, and commits.
// An error of write rolls back and is returned. After an error of the commit the
// outcome is unknown.
func (g *Guard) Do(ctx context.Context, db Beginner, resource string, token fence.Token, write func(tx pgx.Tx) error) error {
	if err := check(resource, token); err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if err := g.Fence(ctx, tx, resource, token); err != nil {
			return err
		}
		return write(tx)
	})
}

// Exec is one guarded statement: check and write in one transaction and one
// round trip.
func (g *Guard) Exec(ctx context.Context, db Batcher, resource string, token fence.Token, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := check(resource, token); err != nil {
		return pgconn.CommandTag{}, err
	}
	// Statements of a batch are one transaction: the first that fails undoes all.
	batch := &pgx.Batch{}
	batch.Queue("SELECT headlease_fence($1, $2)", resource, int64(token))
	batch.Queue(sql, args...)
	results := db.SendBatch(ctx, batch)
	_, err := results.Exec()
	var tag pgconn.CommandTag
	if err == nil {
		tag, err = results.Exec()
	}
	// The server commits at the end of the batch; only Close tells how that went.
	if closed := results.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return pgconn.CommandTag{}, wrap("fence", resource, err)
	}
	return tag, nil
}

// Mark returns the highest token seen of a resource; 0 if nobody claimed it.
func (g *Guard) Mark(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, resource string,
) (fence.Token, error) {
	var mark int64
	err := db.QueryRow(ctx, "SELECT mark FROM headlease_mark WHERE resource = $1", resource).Scan(&mark)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil
	}
	if err != nil {
		return 0, wrap("mark", resource, err)
	}
	return fence.TokenOf(uint64(mark))
}

func check(resource string, token fence.Token) error {
	switch {
	case resource == "":
		return errors.New("resource: is empty; name the leased resource")
	case len(resource) > MaxResource:
		return fmt.Errorf("resource: %d bytes; at most %d are allowed", len(resource), MaxResource)
	case !utf8.ValidString(resource):
		return errors.New("resource: is not valid UTF-8")
	case token == 0:
		return errors.New("token: is 0, which is no token; take it from the lease")
	}
	_, err := fence.TokenOf(uint64(token))
	return err
}

// wrap turns the functions' refusals into their types, and says of other errors
// what they were about.
func wrap(what, resource string, err error) error {
	if err == nil {
		return nil
	}
	if refusal := Refusal(err); refusal != nil {
		return refusal
	}
	return fmt.Errorf("%s of %s: %w", what, resource, err)
}

// Refusal returns the *fence.StaleError or *fence.UnclaimedError that an error of
// the database means, also one of the caller's own statements under the trigger, else
// nil.
func Refusal(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != stateStale && pg.Code != stateUnclaimed {
		return nil
	}
	var d struct {
		Resource string      `json:"resource"`
		Seen     fence.Token `json:"seen"`
		Given    fence.Token `json:"given"`
	}
	if json.Unmarshal([]byte(pg.Detail), &d) != nil {
		return nil //nolint:nilerr // somebody else's use of the SQLSTATE
	}
	if pg.Code == stateUnclaimed {
		return &fence.UnclaimedError{Resource: d.Resource}
	}
	return &fence.StaleError{Resource: d.Resource, Seen: d.Seen, Given: d.Given}
}
