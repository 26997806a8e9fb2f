package client

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
)

// TestWhenAServerIsLeft: one that answers nothing soon, one that answers pings
// later, one that answers keepalives never.
func TestWhenAServerIsLeft(t *testing.T) {
	const s = time.Second
	at := func(d time.Duration) instant.Instant { return instant.Instant(0).Add(time.Hour + d) }
	w := wait{hung: 2 * s, late: 8 * s}
	for name, c := range map[string]struct {
		do          func(st *streamState)
		leave, ping time.Duration
		hung        bool
	}{
		"nothing asked":         {do: func(*streamState) {}},
		"asked":                 {func(st *streamState) { st.sent(at(0), w) }, 2 * s, s, true},
		"asked twice":           {func(st *streamState) { st.sent(at(0), w); st.sent(at(s), w) }, 2 * s, s, true},
		"a shorter wait counts": {func(st *streamState) { st.sent(at(0), w); st.sent(at(s/2), wait{s, s}) }, 3 * s / 2, s, true},
		"one batch, the shortest": {func(st *streamState) {
			st.sent(at(0), w)
			st.sent(at(0), wait{s, s})
		}, s, s / 2, true},
		"pinged":       {func(st *streamState) { st.sent(at(0), w); st.ping(at(s)) }, 2 * s, 2 * s, true},
		"alive":        {func(st *streamState) { st.sent(at(0), w); st.ping(at(s)); st.alive = at(s) }, 3 * s, 2 * s, true},
		"alive late":   {func(st *streamState) { st.sent(at(0), w); st.alive = at(7 * s) }, 8 * s, 8 * s, false},
		"alive before": {func(st *streamState) { st.alive = at(-5 * s); st.sent(at(0), w) }, 2 * s, s, true},
		"answered":     {do: func(st *streamState) { st.sent(at(0), w); st.sent(at(s), w); st.answered(at(s)) }},
		"answered the first": {func(st *streamState) {
			st.sent(at(0), w)
			st.sent(at(s), w)
			st.answered(at(0))
		}, 3 * s, 2 * s, true},
		"given up": {do: func(st *streamState) { st.sent(at(0), w); st.forget(at(0)) }},
		"the owner was late": {func(st *streamState) {
			st.sent(at(0), w)
			st.look = at(s)
			st.looked(at(3 * s))
		}, 5 * s, 4 * s, true},
		"the owner was late, and pings are answered": {func(st *streamState) {
			st.sent(at(0), w)
			st.look = at(s)
			st.looked(at(3 * s))
			st.alive = at(10 * s)
		}, 11 * s, 11 * s, false},
		"the owner was hardly late": {func(st *streamState) {
			st.sent(at(0), w)
			st.look = at(s)
			st.looked(at(s + maxOverslept))
		}, 2 * s, s, true},
		"the owner is always late": {func(st *streamState) {
			st.sent(at(0), w)
			for i := range time.Duration(maxExcuses + 1) {
				st.look = at(i * s)
				st.looked(at(i*s + s/2))
			}
		}, (maxExcuses-1)*s + s/2 + 2*s, (maxExcuses-1)*s + s/2 + s, true},
	} {
		var st streamState
		c.do(&st)
		leave, hung := st.leaveAt()
		if len(st.asked) == 0 {
			if leave != 0 || st.pingAt() != 0 {
				t.Errorf("%s: leave at %v, ping at %v, with nothing to wait for", name, leave, st.pingAt())
			}
			continue
		}
		if leave != at(c.leave) || hung != c.hung || st.pingAt() != at(c.ping) {
			t.Errorf("%s: leave after %v (hung %v), ping after %v; want %v (%v), %v", name,
				leave.Sub(at(0)), hung, st.pingAt().Sub(at(0)), c.leave, c.hung, c.ping)
		}
	}
}

func TestMovesAreRememberedForAWhile(t *testing.T) {
	at := func(d time.Duration) instant.Instant { return instant.Instant(0).Add(time.Hour + d) }
	m := moves{2, at(0)}
	for d, want := range map[time.Duration]int{0: 2, lagLasts: 2, lagLasts + 1: 0} {
		got := m
		if n := got.lately(at(d)); n != want {
			t.Errorf("%v after two moves %d count, not %d", d, n, want)
		}
	}
}

// Whoever has moved is patient with the opening of the next stream, but not until its
// session or its leases are over.
func TestPatienceWithOpeningAStream(t *testing.T) {
	const ms = time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			ttl, left  time.Duration // left of the leases; 0: there are none
			once, most time.Duration
		}{
			{MinTTL, 0, 125 * ms, MinTTL / 3},
			{2 * time.Second, 0, 250 * ms, 2 * time.Second / 3},
			{6 * time.Second, 0, 750 * ms, 2 * time.Second},
			{6 * time.Second, 3 * time.Second, 750 * ms, 1500 * ms},
			{6 * time.Second, time.Second, 750 * ms, 750 * ms},
			{time.Minute, 0, attemptTimeout, attemptTimeout},
		} {
			now := clock.NewRuntime()
			r := &region{client: &Client{cfg: Config{Clock: now}}}
			s := &session{ttl: c.ttl}
			if c.left > 0 {
				s.soonest = now.Now().Add(c.left)
			}
			r.sessions = map[string]*session{"s": s}
			if got := r.openWithin(); got != c.once {
				t.Errorf("%+v: %v at first", c, got)
			}
			for range maxMoves {
				r.moved()
			}
			if got := r.openWithin(); got != c.most {
				t.Errorf("%+v: %v after %d moves", c, got, maxMoves)
			}
		}
	})
}
