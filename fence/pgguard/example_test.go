package pgguard

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/headlease/headlease/fence"
)

func ExampleGuard_Do() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, shared.DSN()) // the tests' server
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	for _, sql := range []string{Migration, "CREATE TABLE IF NOT EXISTS example (id int PRIMARY KEY, state text)", "INSERT INTO example VALUES (7, 'new')"} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			log.Fatal(err)
		}
	}
	guard := New()
	older, _ := fence.NewToken(1, 1)
	newer, _ := fence.NewToken(1, 2)
	set := func(token fence.Token, state string) error {
		return guard.Do(ctx, pool, "orders/7", token, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "UPDATE example SET state = $1 WHERE id = 7", state)
			return err
		})
	}
	fmt.Println(guard.Claim(ctx, pool, "orders/7", older), set(older, "paid"))
	fmt.Println(guard.Claim(ctx, pool, "orders/7", newer), set(newer, "shipped"))
	var stale *fence.StaleError
	fmt.Println(errors.As(set(older, "cancelled"), &stale))
	var state string
	if err := pool.QueryRow(ctx, "SELECT state FROM example WHERE id = 7").Scan(&state); err != nil {
		log.Fatal(err)
	}
	fmt.Println(state)
	// Output:
	// <nil> <nil>
	// <nil> <nil>
	// true
	// shipped
}
