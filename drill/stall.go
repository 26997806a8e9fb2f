package drill

import (
	"context"
	"sync"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/internal/clock"
)

const (
	stallTick = 20 * time.Millisecond
	// stallFloor is the lateness that a busy machine has all the time.
	stallFloor = 60 * time.Millisecond
)

// stalls measures when this process did not run though it was due: what the
// machine did to the drill it did to the cluster beside it. Close it.
type stalls struct {
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu  sync.Mutex
	all []check.Stall
}

func watchStalls(c clock.Clock) *stalls {
	ctx, cancel := context.WithCancel(context.Background())
	s := &stalls{cancel: cancel}
	s.work.Go(func() {
		for last := c.Now(); sleep(ctx, stallTick) == nil; {
			now := c.Now()
			if late := now.Sub(last) - stallTick; late > stallFloor {
				s.mu.Lock()
				if len(s.all) < maxKept {
					s.all = append(s.all, check.Stall{At: last, For: late})
				}
				s.mu.Unlock()
			}
			last = now
		}
	})
	return s
}

func (s *stalls) close() []check.Stall {
	s.cancel()
	s.work.Wait()
	return s.all
}
