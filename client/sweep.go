package client

import (
	"time"

	"github.com/headlease/headlease/internal/instant"
)

// sweepEvery bounds the time between two looks at the clock: timers count
// neither suspends nor freezes.
const sweepEvery = 100 * time.Millisecond

// sweeper ends what ends by the clock, whatever the stream is doing.
func (r *region) sweeper(s *session) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var next instant.Instant
	for {
		asked := false
		select {
		case <-s.ctx.Done():
			return
		case <-s.tick:
			asked = true
		case <-timer.C:
		}
		now := r.now()
		if asked || now >= next {
			next = r.sweep(s)
		}
		timer.Reset(max(time.Millisecond, min(sweepEvery, next.Sub(now))))
	}
}

// sweep ends what has ended and returns when to look again.
func (r *region) sweep(s *session) instant.Instant {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	next := now.Add(time.Second)
	if s.over {
		return next
	}
	if events := r.table.Poll(now); len(events) > 0 {
		r.handle(s, events)
	}
	var soonest instant.Instant
	for _, l := range s.leases {
		if l.releasing {
			continue
		}
		if l.letGo == 0 {
			end := r.table.ContextEnd(s.id, l.resource, l.token)
			if end > now {
				if soonest == 0 || end < soonest {
					soonest = end
				}
				continue
			}
			// The holder has until letGo to stop; only then is it given back.
			l.cancel(&LostError{Resource: l.resource, Token: l.token, Reason: "its validity runs out: no word from the region in time"})
			l.letGo = max(r.table.Until(s.id, l.resource, l.token), 1)
		}
		if l.letGo > now {
			next = instant.Min(next, l.letGo)
			continue
		}
		r.beginRelease(l)
		r.client.spawn(func() { r.keepReleasing(s, l.resource, l.token, l) })
	}
	if soonest != s.soonest {
		if soonest > s.soonest {
			s.span = soonest.Sub(now)
		}
		s.soonest = soonest
	}
	if soonest != 0 {
		next = instant.Min(next, soonest)
	}
	// A session of which nothing was heard for its whole TTL is given up, so
	// that waiters look for another region.
	if now.Sub(s.heard) > s.ttl {
		r.drop(s, "no word from the region for the session's whole ttl")
	}
	return next
}
