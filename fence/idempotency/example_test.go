package idempotency

import (
	"context"
	"fmt"
	"log"
)

func ExampleDo() {
	ctx := context.Background()
	store, err := NewPostgres(pool, Options{}) // the tests' pool
	if err != nil {
		log.Fatal(err)
	}
	for range 2 { // the same message comes twice, the second time perhaps to another holder
		key := Key("shard/68", "orders:1700000000000-0")
		receipt, err := Do(ctx, store, key, func(_ context.Context, again bool) ([]byte, error) {
			// With again, an attempt before this one may have paid: the third party is asked first, or gets
			// the same key.
			fmt.Println("pays, again:", again)
			return []byte("receipt 17"), nil
		})
		fmt.Println(string(receipt), err)
	}
	// Output:
	// pays, again: false
	// receipt 17 <nil>
	// receipt 17 <nil>
}
