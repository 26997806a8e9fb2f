package pgguard

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/headlease/headlease/fence/fencetest"
)

// A guarded UPDATE beside a plain one, each a transaction that is synced to disk; aim: 1.2x.
func BenchmarkUpdate(b *testing.B) {
	pool, g, ctx := database(b, shared), New(), context.Background()
	if err := g.Claim(ctx, pool, "r", token(5)); err != nil {
		b.Fatal(err)
	}
	if _, err := pool.Exec(ctx, "INSERT INTO account SELECT n, 0 FROM generate_series(2, 1000) n"); err != nil {
		b.Fatal(err)
	}
	const update = "UPDATE account SET balance = balance + 1 WHERE id = $1"
	var next atomic.Int64
	row := func() int64 { return 1 + next.Add(1)%1000 } // callers do not wait for each other's rows
	plain := func() error {
		_, err := pool.Exec(ctx, update, row())
		return err
	}
	inTx := func(check bool) func() error {
		return func() error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if check {
					if err := g.Fence(ctx, tx, "r", token(5)); err != nil {
						return err
					}
				}
				_, err := tx.Exec(ctx, update, row())
				return err
			})
		}
	}
	for name, callers := range map[string]int{"1": 1, "8": 8} {
		b.Run(name+", statement", func(b *testing.B) {
			fencetest.Ratio(b, callers, plain, func() error {
				_, err := g.Exec(ctx, pool, "r", token(5), update, row())
				return err
			})
		})
		b.Run(name+", transaction", func(b *testing.B) { fencetest.Ratio(b, callers, inTx(false), inTx(true)) })
	}
}
