package client_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/regiontest"
	"github.com/headlease/headlease/region/state"
)

// rateClock runs at a rate of its own.
type rateClock struct {
	clock.Runtime
	ppm int64
}

func (c rateClock) Now() instant.Instant {
	now := c.Runtime.Now()
	return now + instant.Instant(int64(now)/1_000_000*c.ppm)
}

// I4: at most one client believes in a lease at any instant, whatever is
// delayed, frozen, elected, lapsed or revoked, with clock rates within ρ. And
// somebody does now and then.
func TestI4NoTwoClientsBelieveInOneLease(t *testing.T) {
	for seed := range uint64(8) {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex // the source is shared by all goroutines of the bubble
			source := rand.New(rand.NewPCG(seed, 1))
			random := func(n int64) int64 {
				mu.Lock()
				defer mu.Unlock()
				return source.Int64N(n)
			}
			rate := func() rateClock { return rateClock{clock.NewRuntime(), random(20_001) - 10_000} }
			w := &world{T: t, Network: regiontest.NewNetwork(t)}
			w.eu = w.Region(regiontest.Config{Name: "eu", Clock: rate()})
			w.eu.Own(1)
			w.Delay(func() time.Duration {
				if random(10) > 0 {
					return time.Duration(random(int64(5 * time.Millisecond)))
				}
				return time.Duration(random(int64(300 * time.Millisecond)))
			})
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()

			var (
				held    sync.Mutex
				leases  = map[string]*client.Lease{} // the newest of each client
				highest fence.Token
				grants  int
				work    sync.WaitGroup
			)
			for i := range 3 {
				c := w.client(name(i), withClock(rate()))
				work.Go(func() {
					for ctx.Err() == nil {
						var options []client.Option
						if random(2) == 0 {
							options = append(options, client.Wait())
						}
						try, stop := context.WithTimeout(ctx, time.Duration(random(int64(20*time.Second))))
						l, err := c.Acquire(try, "lock/x", options...)
						stop()
						if err == nil {
							held.Lock()
							if l.Token() <= highest {
								t.Errorf("seed %d: token %v after %v", seed, l.Token(), highest)
							}
							leases[name(i)], highest = l, l.Token()
							grants++
							held.Unlock()
							select {
							case <-l.Context().Done():
							case <-time.After(time.Duration(random(int64(5 * time.Second)))):
								short, stop := context.WithTimeout(ctx, time.Second)
								_ = l.Release(short)
								stop()
							}
						}
						<-time.After(time.Duration(random(int64(500 * time.Millisecond))))
					}
				})
			}
			work.Go(func() { // what goes wrong
				for ctx.Err() == nil {
					<-time.After(time.Duration(random(int64(3 * time.Second))))
					server := w.eu.Server(int(random(3)))
					switch random(6) {
					case 0:
						w.eu.Elect(int(random(3)))
					case 1:
						w.eu.Depose()
						<-time.After(time.Duration(random(int64(3 * time.Second))))
						w.eu.Elect(int(random(3)))
					case 2:
						server.Freeze()
						<-time.After(time.Duration(random(int64(8 * time.Second))))
						server.Thaw()
					case 3:
						server.Kill()
						<-time.After(time.Duration(random(int64(2 * time.Second))))
						server.Start()
					case 4:
						w.eu.Lapse(true)
						<-time.After(time.Duration(random(int64(6 * time.Second))))
						w.eu.Lapse(false)
					case 5:
						w.eu.Revoke("lock/x")
					}
				}
			})
			for ctx.Err() == nil {
				held.Lock()
				var believers []string
				for who, l := range leases {
					if l.Valid() {
						believers = append(believers, who+" with "+l.Token().String())
					}
				}
				held.Unlock()
				if len(believers) > 1 {
					t.Fatalf("seed %d: %v believe at once", seed, believers)
				}
				<-time.After(5 * time.Millisecond)
			}
			work.Wait()
			if grants < 8 {
				t.Errorf("seed %d: only %d grants in two minutes", seed, grants)
			}
			// It comes to rest: nothing is held for nobody, and it works again.
			w.Delay(nil)
			w.eu.Lapse(false)
			w.eu.Elect(0)
			l := w.acquire(w.client("last"), "lock/x", client.Wait())
			w.valid(l, ttl)
			w.release(l)
			w.eu.Wait(3*ttl, "rest", func(v state.View) bool { _, held := v.Lease("lock/x"); return !held })
		})
	}
}
