package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/worker/redisstream"
)

// lanes is how many orders a producer sends at a time.
const lanes = 16

// hot is the account of every tenth order.
const hot = "account/hot"

// produce sends orders of accounts whose popularity is Zipf's, and of one hot
// account; each: of every account first.
func produce(ctx context.Context, s stage, seed uint64, count int, over time.Duration, each bool) error {
	store := redis.NewClient(&redis.Options{Addr: s.Redis, ContextTimeoutEnabled: true, PoolSize: lanes})
	defer store.Close() //nolint:errcheck // nothing is lost
	p, err := redisstream.NewProducer(store, stream)
	if err != nil {
		return err
	}
	began := time.Now()
	var sent atomic.Int64 // that are there for good
	next := make(chan int)
	var sending sync.WaitGroup
	failed := make(chan error, lanes)
	for range lanes {
		sending.Go(func() {
			for i := range next {
				r := rand.New(rand.NewPCG(seed, uint64(i)))
				account := hot
				switch {
				case each && i < s.Users:
					account = fmt.Sprintf("account/%d", i)
				case i%10 != 0:
					account = fmt.Sprintf("account/%d", rand.NewZipf(r, 1.1, 10, uint64(s.Users-1)).Uint64())
				}
				if _, err := p.Send(ctx, account, fmt.Appendf(nil, "order %d of %d", i, seed)); err != nil {
					select {
					case failed <- err:
					default:
					}
					return
				}
				if n := sent.Add(1); n%100 == 0 || n == int64(count) {
					say(report{Event: eventSent, N: int(n)})
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
	}
	close(next)
	sending.Wait()
	select {
	case last := <-failed:
		return errors.Join(err, last)
	default:
		return err
	}
}
