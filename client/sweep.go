package client

import (
	"context"
	"time"

	"github.com/headlease/headlease/internal/instant"
)

const (
	// sweepEvery bounds the time between two looks at the clock. Timers count no
	// suspend; the clock's watch tells of each, 100 ms later at most.
	sweepEvery = time.Second
	// pollEvery is how often the table forgets what has run out.
	pollEvery = time.Second
)

// sweeper ends what ends by the clock, whatever the stream is doing.
func (r *region) sweeper(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.tick:
		case <-timer.C:
		}
		timer.Reset(r.sweep())
	}
}

// sweep looks at the sessions for which it is time, and returns how long until
// the next one.
func (r *region) sweep() (wait time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	defer func() { r.sweeps = now.Add(wait) }()
	if now.Sub(r.polled) >= pollEvery {
		r.polled = now
		r.handle(r.table.Poll(now))
	}
	for {
		first := r.looks.first()
		switch {
		case first == nil:
			return sweepEvery
		case first.at > now:
			return max(time.Millisecond, min(sweepEvery, first.at.Sub(now)))
		}
		next := r.lookAt(first.session, now)
		if !first.session.over {
			r.looks.set(first, instant.Max(next, now+1))
		}
	}
}

// lookAt ends what has ended of a session and returns when to look again. r.mu
// is held.
func (r *region) lookAt(s *session, now instant.Instant) instant.Instant {
	// A session of which nothing was heard for its whole TTL is given up, so
	// that waiters look for another region.
	if now.Sub(s.heard) > s.ttl {
		r.drop(s, "no word from the region for the session's whole ttl")
		return 0
	}
	next := s.heard.Add(s.ttl + 1)
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
		after := r.client.cfg.random(giveBackWithin)
		r.client.spawn(func() { r.keepReleasing(s, l.resource, l.token, l, after) })
	}
	s.soonest = soonest
	if soonest == 0 {
		return next
	}
	heard := instant.Min(r.heard, now)
	s.span = soonest.Sub(heard)
	next = instant.Min(next, soonest)
	late := heard.Add(s.span * 21 / 40)
	if now < late {
		return instant.Min(next, late)
	}
	// The leader speaks again before so much of it has gone. If nothing came, and the
	// server hangs, a keepalive of one of its sessions shows it in time. In a lapse it
	// answers, and is not asked all the time.
	again := max(s.span/8, minRetry)
	if r.stream.id != 0 && len(r.stream.asked) == 0 && now.Sub(r.stream.probed) >= again {
		r.stream.probed = now
		r.confirm(s)
	}
	return instant.Min(next, now.Add(again))
}
