package lessor

import (
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestF23OfferIsConfirmedByTheHash(t *testing.T) {
	r, k := offer(t)
	g := r.only(2).GetGrant()
	if fence.Token(g.GetHeld().GetToken()) != k || g.GetRequestId() != 2 || since(g.GetHeld().GetUntil()) != 6*time.Second {
		t.Fatalf("offered %v, want an end of its own in 5 s", g)
	}
	// A keepalive from before the offer reached the client confirms nothing.
	r.keepalive(2, "s1", nil)
	r.check()
	if a := r.ack(2); a.Complete || len(a.Held) != 0 {
		t.Errorf("ack %v", a)
	}
	if r.l.Stats().Offers != 1 {
		t.Error("confirmed by a keepalive that does not name it")
	}
	r.keepalive(2, "s1", tokens{"lock/a": k})
	r.check()
	if a := r.ack(2); a.Complete || len(a.Held) != 1 || a.Held[0].Until != 0 {
		t.Errorf("the confirming ack takes the offer's end away: %v", a)
	}
	r.to(10 * time.Second)
	for _, c := range r.commands {
		if c.Command.GetRevoke() != nil {
			t.Errorf("a confirmed offer is revoked: %v", c)
		}
	}
}

func TestF23UnconfirmedOfferIsRevokedLikeAnyLease(t *testing.T) {
	r, k := offer(t)
	r.acquire("s0", "lock/a")
	r.sent(2)
	r.to(5999 * ms)
	r.none()
	r.to(6 * time.Second)
	c := r.proposed()
	if rv := c.Command.GetRevoke(); fence.Token(rv.GetToken()) != k || rv.GetReason() != OfferExpired {
		t.Fatalf("proposed %v", c)
	}
	// Too late now.
	r.keepalive(2, "s1", tokens{"lock/a": k})
	if r.l.Stats().Offers != 1 {
		t.Error("confirmed while its revocation is under way")
	}
	r.sent(2)
	r.commit(c)
	w := r.only(2).GetWithdrawal()
	if since(w.GetUntil()) > 6*time.Second || w.GetReason() != pb.WithdrawalReason_WITHDRAWAL_REASON_OFFER_EXPIRED {
		t.Errorf("withdrawn %v: nothing beyond the offer's end was sent [L4]", w)
	}
	r.to(6 * time.Second)
	r.commit(r.proposed())
	if l, ok := r.m.View().Lease("lock/a"); !ok || l.Session != "s0" {
		t.Errorf("passed on to %+v", l)
	}
}

// A new leader asks again, from the start of its term; an earlier leader may
// have sent validity beyond the offer's new end.
func TestL4NewLeaderAsksAgain(t *testing.T) {
	r, k := offer(t)
	r.keepalive(2, "s1", tokens{"lock/a": k})
	r.check()
	r.now = t0.Add(3 * time.Second)
	r.elect()
	if r.l.Stats().Offers != 1 {
		t.Fatal("the new leader does not ask again")
	}
	// Its first ack limits the token, until confirmed: the time for it begins when a
	// session that is not heard would have ended.
	a := r.attach(2, "s1", nil)
	if want := 3*time.Second + ttl + DefaultConfirmWithin; len(a.Held) != 1 || since(a.Held[0].Until) != want {
		t.Errorf("first ack %v, want a limit at %v", a, want)
	}
	r.revoke("lock/a", k)
	if until, _ := r.l.RevocationEnd("s1", "lock/a", k); until.Sub(t0) != 3*time.Second+d {
		t.Errorf("ends at %v, want what the earlier leader may have sent", until.Sub(t0))
	}
	// A first keepalive that knows it confirms at once.
	r, k = offer(t)
	r.elect()
	if a := r.attach(2, "s1", tokens{"lock/a": k}); len(a.Held) != 1 || a.Held[0].Until != 0 {
		t.Errorf("first ack %v", a)
	}
}

// A lease that was confirmed to the leader before is not taken back from a client
// that a new leader does not hear, while its session lives [I6].
func TestF23ANewLeaderTakesNothingBackBeforeTheSessionEnds(t *testing.T) {
	r, k := offer(t)
	r.keepalive(2, "s1", tokens{"lock/a": k})
	r.check()
	r.elect()
	for at := time.Second; at < ttl; at += time.Second {
		r.to(at)
		if len(r.commands) > 0 {
			t.Fatalf("after %v of a TTL of %v: %v", at, ttl, r.commands)
		}
	}
}

// A gap of the clock is a restart: sessions live for their TTL again, and so do
// the offers found at the start, which may have been confirmed before.
func TestF23AClockGapTakesNothingBackBeforeTheSessionEnds(t *testing.T) {
	r, k := offer(t)
	r.keepalive(2, "s1", tokens{"lock/a": k})
	r.check()
	r.elect()
	r.to(time.Second)
	r.now = r.now.Add(10 * time.Minute)
	r.l.ClockGap(r.now)
	r.take()
	for range int(ttl/time.Second) - 1 {
		r.now = r.now.Add(time.Second)
		r.l.Tick(r.now)
		r.take()
		if len(r.commands) > 0 {
			t.Fatalf("%v after a gap, with a TTL of %v: %v", time.Second, ttl, r.commands)
		}
	}
}

// Where a jump of the clock makes the end of a session and of its offer due at
// once, the session ends, and takes the offer with it.
func TestF23ASessionThatEndsTakesItsOffers(t *testing.T) {
	r, _ := offer(t)
	r.elect()
	r.to(time.Hour)
	if len(r.commands) != 1 || len(r.commands[0].Command.GetExpire().GetSessionIds()) != 2 {
		t.Errorf("%v, want one end of both sessions", r.commands)
	}
}

func TestF23ShortTTLShortensTheOffer(t *testing.T) {
	r := newRig(t, 0)
	r.open("s0", ttl)
	r.open("s1", 1*time.Second)
	k := r.acquire("s0", "lock/a")
	r.acquire("s1", "lock/a")
	r.attach(1, "s1", nil)
	r.release("s0", "lock/a", k)
	if g := r.only(1).GetGrant(); since(g.GetHeld().GetUntil()) != 1*time.Second {
		t.Errorf("offered until %v", since(g.GetHeld().GetUntil()))
	}
}
