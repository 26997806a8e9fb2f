package inprocess_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/inprocess"
)

func ExampleGuard() {
	ctx := context.Background()
	guard := inprocess.New(inprocess.Options{})
	older, _ := fence.NewToken(1, 1) // lease.Token() of one holder, and of the next
	newer, _ := fence.NewToken(1, 2)

	_ = guard.Claim(ctx, "orders/7", older)
	_ = guard.Claim(ctx, "orders/7", newer) // before its first read
	err := guard.Do(ctx, "orders/7", older, func(context.Context) error {
		fmt.Println("never")
		return nil
	})
	var stale *fence.StaleError
	fmt.Println(errors.As(err, &stale), stale.Seen == newer, stale.Given == older)
	// Output: true true true
}
