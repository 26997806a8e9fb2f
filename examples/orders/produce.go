package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/worker/redisstream"
)

// lanes is how many orders a producer sends at a time.
const lanes = 16

// hot is the account of every tenth order.
const hot = "account/hot"

// produce sends orders of accounts whose popularity is Zipf's, and of one hot
// account.
func produce(ctx context.Context, s stage, seed uint64, count int, over time.Duration) error {
	store := redis.NewClient(&redis.Options{Network: "unix", Addr: s.Redis, ContextTimeoutEnabled: true, PoolSize: lanes})
	defer store.Close() //nolint:errcheck // nothing is lost
	p, err := redisstream.NewProducer(store, stream)
	if err != nil {
		return err
	}
	began := time.Now()
	next := make(chan int)
	var sending sync.WaitGroup
	failed := make(chan error, lanes)
	for range lanes {
		sending.Go(func() {
			for i := range next {
				r := rand.New(rand.NewPCG(seed, uint64(i)))
				account := hot
				if i%10 != 0 {
					// The first orders go to each account once, so that all have some.
					n := uint64(i)
					if i >= s.Users {
						n = rand.NewZipf(r, 1.1, 10, uint64(s.Users-1)).Uint64()
					}
					account = fmt.Sprintf("account/%d", n%uint64(s.Users))
				}
				if _, err := p.Send(ctx, account, fmt.Appendf(nil, "order %d of %d", i, seed)); err != nil {
					select {
					case failed <- err:
					default:
					}
					return
				}
			}
		})
	}
	for i := range count {
		if over > 0 && i%lanes == 0 {
			due := time.NewTimer(time.Until(began.Add(over * time.Duration(i) / time.Duration(count))))
			<-due.C
		}
		select {
		case next <- i:
		case err = <-failed:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		if err != nil {
			break
		}
		if i%100 == 99 || i == count-1 {
			say(report{Event: eventSent, N: i + 1})
		}
	}
	close(next)
	sending.Wait()
	return err
}
