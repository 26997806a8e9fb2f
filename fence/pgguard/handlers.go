package pgguard

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/headlease/headlease/fence"
)

// Handlers is a store of marks for effects that are not writes to this database: handlers of
// several processes, which claim and wait for each other through it (markstore.Store).
// An effect holds a connection of the pool, and on it the resource's lock in a transaction that is
// open as long as the effect runs; so a claim waits for it whatever becomes of its process, and
// the server ends the lock with the connection. A claim waits, and cancels nothing.
//
// Give it a pool of its own, as large as the effects that may run at once: those beyond
// wait. idle_in_transaction_session_timeout must be longer than an effect, or 0.
type Handlers struct {
	pool  *pgxpool.Pool
	guard Guard
}

// NewHandlers returns a store of marks in the pool's database, which needs Migration.
func NewHandlers(pool *pgxpool.Pool) *Handlers { return &Handlers{pool: pool} }

// Shared is true: all processes on the database see the same marks.
func (h *Handlers) Shared() bool { return true }

// Claim is [Guard.Claim].
func (h *Handlers) Claim(ctx context.Context, resource string, token fence.Token) error {
	return h.guard.Claim(ctx, h.pool, resource, token)
}

// Do runs the effect under the mark; see [Handlers].
func (h *Handlers) Do(ctx context.Context, resource string, token fence.Token, effect func(context.Context) error) error {
	if err := check(resource, token); err != nil {
		return err
	}
	// A higher token is claimed first, and on its own: the mark must be there for others before
	// the effect begins, and stay if it fails.
	mark, err := h.guard.Mark(ctx, h.pool, resource)
	if err != nil {
		return err
	}
	if mark != 0 && mark < token {
		if err := h.guard.Claim(ctx, h.pool, resource, token); err != nil {
			return err
		}
	}
	return h.guard.Do(ctx, h.pool, resource, token, func(pgx.Tx) error { return effect(ctx) })
}
