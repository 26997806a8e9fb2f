package redisguard_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/internal/redisserver"
)

func Example() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	server, err := redisserver.New(dir, redisserver.Durable()...)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = server.Close() }()
	client := redis.NewClient(&redis.Options{Addr: server.Socket(), ContextTimeoutEnabled: true})
	defer func() { _ = client.Close() }()

	ctx := context.Background()
	guard, err := redisguard.New(client, redisguard.Options{})
	if err != nil {
		log.Fatal(err)
	}
	older, _ := fence.NewToken(1, 1)
	newer, _ := fence.NewToken(1, 2)
	valid := func() bool { return true } // lease.Valid

	// A holder claims before it reads, and the claim is kept over restarts of the server.
	if _, err := guard.Keep(ctx, "orders/7", older, valid); err != nil {
		log.Fatal(err)
	}
	key, _ := redisguard.Key("orders/7", "state") // "{orders/7}:state", beside the mark
	fmt.Println(guard.Set(ctx, "orders/7", older, key, "paid", 0))

	// The next holder takes over; any script runs under the check.
	_ = guard.Claim(ctx, "orders/7", newer)
	ship, _ := redisguard.NewScript(`
		if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'no' end
		redis.call('SET', KEYS[1], ARGV[2])
		return 'yes'`)
	fmt.Println(guard.Run(ctx, "orders/7", newer, ship, []string{key}, "paid", "shipped"))

	// What the first holder still had on its way is refused.
	var stale *fence.StaleError
	err = guard.Set(ctx, "orders/7", older, key, "cancelled", 0)
	fmt.Println(errors.As(err, &stale), client.Get(ctx, key).Val())
	// Output:
	// <nil>
	// yes <nil>
	// true shipped
}
