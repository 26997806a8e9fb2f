package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/fence"
)

// load is workers that take, hold and release locks, and what they saw. All
// share this process's clock, so beliefs can be compared.
type load struct {
	t      *testing.T
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	spans  []span
	errors int
}

// span is one lease as its holder believed it: Valid from first to last.
type span struct {
	resource    string
	token       fence.Token
	first, last time.Time
}

// startLoad runs one worker per client and lock pair: workers wait for each
// other's locks, so each lock passes from client to client.
func startLoad(t *testing.T, clients []*client.Client, locks int, seed uint64) *load {
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{t: t, cancel: cancel}
	t.Cleanup(cancel)
	for i, c := range clients {
		for k := range locks {
			l.wg.Go(func() {
				l.worker(ctx, c, fmt.Sprintf("lock/load-%d", k), rand.New(rand.NewPCG(seed, uint64(i*1000+k))))
			})
		}
	}
	return l
}

func (l *load) worker(ctx context.Context, c *client.Client, resource string, rnd *rand.Rand) {
	for ctx.Err() == nil {
		try, cancel := context.WithTimeout(ctx, 20*time.Second)
		lease, err := c.Acquire(try, resource, client.Wait())
		cancel()
		if err != nil {
			l.mu.Lock()
			l.errors++
			l.mu.Unlock()
			continue
		}
		s := span{resource: resource, token: lease.Token()}
		hold := time.Duration(5+rnd.IntN(40)) * time.Millisecond
		for began := time.Now(); time.Since(began) < hold && ctx.Err() == nil; {
			before := time.Now()
			if !lease.Valid() {
				break
			}
			if s.first.IsZero() {
				s.first = before
			}
			s.last = before // it was valid at some moment after this one
			select {
			case <-lease.Context().Done():
			case <-time.After(2 * time.Millisecond):
			}
		}
		if !s.first.IsZero() {
			l.mu.Lock()
			l.spans = append(l.spans, s)
			l.mu.Unlock()
		}
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		if err := lease.Release(release); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			l.mu.Lock()
			l.errors++
			l.mu.Unlock()
		}
		cancel()
	}
}

// count of leases seen so far.
func (l *load) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.spans)
}

// progress waits until n more leases were held.
func (l *load) progress(n int, within time.Duration) {
	l.t.Helper()
	from := l.count()
	for deadline := time.Now().Add(within); l.count() < from+n; {
		if time.Now().After(deadline) {
			l.t.Fatalf("only %d of %d leases within %v", l.count()-from, n, within)
		}
		<-time.After(20 * time.Millisecond)
	}
}

// stop ends the load and checks what it saw: I4, at most one believer per
// resource at any instant; I2, tokens rise with time and never come twice.
func (l *load) stop() []span {
	l.t.Helper()
	l.cancel()
	l.wg.Wait()
	byResource := map[string][]span{}
	for _, s := range l.spans {
		byResource[s.resource] = append(byResource[s.resource], s)
	}
	for resource, spans := range byResource {
		for i, a := range spans {
			for _, b := range spans[i+1:] {
				switch {
				case a.token == b.token:
					l.t.Errorf("I2: %s: token %v granted twice", resource, a.token)
				case a.first.Before(b.last) && b.first.Before(a.last):
					l.t.Errorf("I4: %s: tokens %v and %v believed at once", resource, a.token, b.token)
				case (a.token < b.token) != a.first.Before(b.first):
					l.t.Errorf("I2: %s: token %v was believed after %v", resource, min(a.token, b.token), max(a.token, b.token))
				}
			}
		}
	}
	l.t.Logf("%d leases held on %d locks, %d failed attempts", len(l.spans), len(byResource), l.errors)
	return l.spans
}
