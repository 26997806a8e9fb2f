package lessor

import (
	"testing"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// gaps are what a clock may do: the process stood still while it ran on, it
// jumped ahead, or it stood still itself and was noticed by the wall clock.
var gaps = []time.Duration{3 * time.Second, time.Hour, 0}

func (r *rig) gap(by time.Duration) {
	r.now = r.now.Add(by)
	r.l.ClockGap(r.now)
	r.take()
}

// A leader that begins anew in its term takes as sent what one that begins a
// term takes as sent: clients believe by their own clocks, and what it sent before
// is an hour ago by a clock that has jumped an hour.
func TestL3ALeaderThatBeginsAnewCountsWhatItHadSent(t *testing.T) {
	for _, by := range gaps {
		for _, c := range []struct{ ttl, want time.Duration }{{ttl, d}, {2 * time.Second, 2 * time.Second}} {
			r := newRig(t, 0)
			r.open("s0", c.ttl)
			k := r.acquire("s0", "lock/a")
			r.hold(d)
			r.attach(1, "s0", tokens{"lock/a": k})
			r.gap(by)
			gap := r.now
			r.now = r.now.Add(100 * ms)
			r.revoke("lock/a", k)
			if until, _ := r.l.RevocationEnd("s0", "lock/a", k); until != gap.Add(c.want) {
				t.Errorf("gap %v, TTL %v: a revocation ends %v after the gap, want %v", by, c.ttl, until.Sub(gap), c.want)
			}
			// Nor does one that had begun before pass on any sooner.
			r = newRig(t, 0)
			r.open("s0", c.ttl)
			k = r.acquire("s0", "lock/a")
			r.hold(d)
			r.attach(1, "s0", tokens{"lock/a": k})
			r.to(1 * time.Second)
			r.revoke("lock/a", k)
			r.gap(by)
			gap = r.now
			for r.now = gap; r.now < gap.Add(c.want); r.now = r.now.Add(100 * ms) {
				r.l.Tick(r.now)
				if r.take(); len(r.commands) > 0 {
					t.Fatalf("gap %v, TTL %v: passed on %v after the gap, want %v", by, c.ttl, r.now.Sub(gap), c.want)
				}
			}
			r.now = gap.Add(max(c.want, ttl))
			r.l.Tick(r.now)
			if r.take(); len(r.commands) == 0 {
				t.Errorf("gap %v, TTL %v: never passed on", by, c.ttl)
			}
		}
	}
}

// The end of a drain that holders were told is kept where it is later.
func TestL3AGapEndsNoRevocationSooner(t *testing.T) {
	r := newRig(t, 1)
	k := r.acquire("s0", "lock/a")
	r.hold(ttl)
	r.attach(1, "s0", tokens{"lock/a": k})
	r.revoke("lock/a", k)
	if until, _ := r.l.RevocationEnd("s0", "lock/a", k); until != t0.Add(ttl) {
		t.Fatalf("ends at %v", until.Sub(t0))
	}
	r.gap(time.Second)
	if until, _ := r.l.RevocationEnd("s0", "lock/a", k); until != t0.Add(ttl) {
		t.Errorf("after the gap it ends at %v, want the %v of before", until.Sub(t0), ttl)
	}
}

// The full TTL that a session has after the gap may be told, once a check begun
// after it has passed.
func TestL2AfterAGapTheSessionsTimeIsToldAfterACheck(t *testing.T) {
	for _, by := range gaps {
		r := newRig(t, 1)
		r.attach(1, "s0", nil)
		r.gap(by)
		gap := r.now
		r.now = r.now.Add(500 * ms)
		r.stream(2)
		r.keepalive(2, "s0", nil)
		if m := r.sent(2); len(m) != 0 {
			t.Errorf("gap %v: sent before a check: %v", by, m)
		}
		expiry, sendable, _ := r.l.Deadlines("s0")
		if expiry != r.now.Add(ttl) || sendable != gap.Add(ttl) {
			t.Errorf("gap %v: deadlines %v and %v after the gap", by, expiry.Sub(gap), sendable.Sub(gap))
		}
		r.check()
		if a := r.ack(2); a.GetSessionUntil() != int64(r.now.Add(ttl)) {
			t.Errorf("gap %v: acknowledged until %v", by, since(a.GetSessionUntil()))
		}
	}
}

// How long a request waits is counted anew, as a new leader does: by a clock that
// has jumped, every wait would be over.
func TestAGapEndsNoWait(t *testing.T) {
	for _, by := range gaps {
		r := newRig(t, 2)
		r.alive(1, "s0", "s1")
		r.acquire("s0", "lock/a")
		r.ask("s1", "lock/a", func(c *pb.AcquireCommand) { c.WaitMs = 3000 })
		r.to(2 * time.Second)
		r.gap(by)
		for gap := r.now; r.now < gap.Add(3*time.Second); r.now = r.now.Add(100 * ms) {
			r.l.Tick(r.now)
			r.take()
			r.none()
		}
		r.l.Tick(r.now)
		r.take()
		if w := r.proposed().Command.GetEndWait(); w.GetSessionId() != "s1" {
			t.Errorf("gap %v: proposed %v", by, w)
		}
	}
}
