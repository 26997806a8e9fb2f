package lessor

import (
	"errors"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func TestL1TheFirstAckNamesAll(t *testing.T) {
	r := newRig(t, 2)
	a, b := r.acquire("s0", "lock/a"), r.acquire("s0", "lock/b")
	c := r.acquire("s0", "lock/c")
	r.revoke("lock/c", c) // a revoked one is not named
	r.hold(d)
	got := r.attach(1, "s0", nil)
	if !got.Complete || len(got.Held) != 2 || fence.Token(got.Held[0].Token) != a || fence.Token(got.Held[1].Token) != b {
		t.Errorf("first ack %v", got)
	}
	if len(got.Partitions) != 1 || got.Partitions[0].Epoch != 1 || since(got.Partitions[0].Until) != d {
		t.Errorf("ends %v", got.Partitions)
	}
	// A grant is named before the next end that is to reach it.
	e := r.acquire("s0", "lock/e")
	if got := r.sent(1); len(got) != 0 {
		t.Errorf("a grant is told by the answer, and the stream says %v at once", got)
	}
	r.l.Push(r.now, 1)
	r.take()
	m := r.sent(1)
	if len(m) != 2 || m[1].GetPush() == nil || fence.Token(m[0].GetGrant().GetHeld().GetToken()) != e || m[0].GetGrant().GetHeld().GetUntil() != 0 {
		t.Errorf("pushed %v", m)
	}
	// The next ack need not name them again.
	r.keepalive(1, "s0", tokens{"lock/a": a, "lock/b": b, "lock/e": e})
	r.check()
	if got := r.ack(1); got.Complete || len(got.Held) != 0 {
		t.Errorf("second ack %v", got)
	}
	r.release("s0", "lock/a", a)
	if w := r.only(1).GetWithdrawal(); fence.Token(w.GetToken()) != a || w.GetUntil() != 0 || w.GetReason() != pb.WithdrawalReason_WITHDRAWAL_REASON_RELEASED {
		t.Errorf("told %v", w)
	}
}

// A lock that is given back before the next push is not spoken of on the stream.
func TestL1WhatTheAnswerToldIsNamedLater(t *testing.T) {
	r := newRig(t, 1)
	a := r.acquire("s0", "lock/a")
	r.hold(d)
	r.attach(1, "s0", nil)
	r.release("s0", "lock/b", r.acquire("s0", "lock/b"))
	r.l.Push(r.now, 1)
	r.take()
	if m := r.only(1); m.GetPush() == nil {
		t.Errorf("after a grant and its release: %v", m)
	}
	// It is named before it is withdrawn, and before an ack.
	b := r.acquire("s0", "lock/b")
	r.revoke("lock/b", b)
	m := r.sent(1)
	if len(m) != 2 || fence.Token(m[0].GetGrant().GetHeld().GetToken()) != b || fence.Token(m[1].GetWithdrawal().GetToken()) != b {
		t.Errorf("a revocation: %v", m)
	}
	c := r.acquire("s0", "lock/c")
	r.keepalive(1, "s0", tokens{"lock/a": a})
	r.check()
	m = r.sent(1)
	if len(m) != 2 || fence.Token(m[0].GetGrant().GetHeld().GetToken()) != c || m[1].GetAck().GetComplete() || len(m[1].GetAck().GetHeld()) != 0 {
		t.Errorf("an ack: %v", m)
	}
	r.release("s0", "lock/c", c)
	if w := r.only(1).GetWithdrawal(); fence.Token(w.GetToken()) != c {
		t.Errorf("the release of one that was named: %v", w)
	}
	// A new stream's first ack names it.
	e := r.acquire("s0", "lock/e")
	r.stream(2)
	if got := r.attach(2, "s0", nil); len(got.Held) != 2 || fence.Token(got.Held[1].Token) != e {
		t.Errorf("first ack %v", got)
	}
	r.l.Push(r.now, 2)
	r.take()
	if m := r.only(2); m.GetPush() == nil {
		t.Errorf("named twice: %v", m)
	}
}

// A session that attaches elsewhere ends its old stream: later pushes there
// would reach a token whose withdrawal goes to the new one.
func TestL1MovingClosesTheOldStream(t *testing.T) {
	r := newRig(t, 2)
	k := r.acquire("s0", "lock/a")
	r.acquire("s1", "lock/b")
	r.hold(d)
	r.attach(1, "s0", nil)
	r.keepalive(1, "s1", nil)
	r.check()
	r.sent(1)
	r.stream(2)
	r.keepalive(2, "s0", tokens{"lock/a": k})
	if len(r.closes) != 1 || r.closes[0] != 1 {
		t.Fatalf("closed %v, want stream 1", r.closes)
	}
	r.hold(2 * d)
	r.to(d / 5)
	if m := r.sent(1); len(m) != 0 {
		t.Errorf("sent to the closed stream: %v", m)
	}
	r.check()
	if a := r.sent(2); len(a) == 0 || !a[len(a)-1].GetAck().GetComplete() {
		t.Errorf("the new stream begins with %v", a)
	}
	if st := r.l.Stats(); st.Attached != 1 || st.Streams != 1 {
		t.Errorf("%+v", st)
	}
}

func TestF17MismatchListsAll(t *testing.T) {
	r := newRig(t, 1)
	k := r.acquire("s0", "lock/a")
	r.attach(1, "s0", nil)
	r.keepalive(1, "s0", tokens{"lock/a": k})
	r.check()
	if a := r.ack(1); a.Complete {
		t.Errorf("a match: %v", a)
	}
	r.keepalive(1, "s0", tokens{"lock/a": k, "lock/zombie": k})
	r.check()
	if a := r.ack(1); !a.Complete || len(a.Held) != 1 {
		t.Errorf("a mismatch: %v", a)
	}
	// A keepalive that crossed a grant and a release is no mismatch.
	b := r.acquire("s0", "lock/b")
	r.l.Push(r.now, 1) // names it
	r.release("s0", "lock/a", k)
	r.take()
	r.sent(1)
	for _, known := range []tokens{{"lock/a": k}, {"lock/a": k, "lock/b": b}, {"lock/b": b}} {
		r.keepalive(1, "s0", known)
		r.check()
		if a := r.ack(1); a.Complete {
			t.Errorf("%v: %v", known, a)
		}
	}
	// What was confirmed as past does not match again.
	r.keepalive(1, "s0", tokens{"lock/a": k})
	r.check()
	if a := r.ack(1); !a.Complete {
		t.Errorf("a step back: %v", a)
	}
}

func TestF9RevocationWaitsForWhatWasSent(t *testing.T) {
	r := newRig(t, 2)
	k := r.acquire("s0", "lock/a")
	r.acquire("s1", "lock/a")
	r.attach(1, "s0", nil)
	r.to(5 * time.Second) // past D: nothing is assumed as sent of the partition
	r.sent(1)
	r.hold(8 * time.Second)
	r.only(1) // pushed
	r.to(6 * time.Second)
	r.sent(1)
	r.revoke("lock/a", k)
	w := r.only(1).GetWithdrawal()
	if since(w.GetUntil()) != 8*time.Second || w.GetReason() != pb.WithdrawalReason_WITHDRAWAL_REASON_REVOKED {
		t.Fatalf("withdrawn until %v: the partition's part was sent to 8 s, the session's to 10 s", since(w.GetUntil()))
	}
	// Later validity does not move it.
	r.hold(20 * time.Second)
	r.keepalive(1, "s0", nil)
	r.check()
	r.sent(1)
	r.to(7999 * ms)
	r.none()
	r.to(8 * time.Second)
	c := r.proposed()
	if fence.Token(c.Command.GetEndRevocation().GetToken()) != k {
		t.Fatalf("proposed %v", c)
	}
	r.commit(c)
	if l, ok := r.m.View().Lease("lock/a"); !ok || l.Session != "s1" || !l.Offered {
		t.Errorf("passed on to %+v", l)
	}
	r.to(9 * time.Second)
	for _, m := range r.sent(1) {
		if m.GetWithdrawal() != nil {
			t.Errorf("withdrawn twice: %v", m)
		}
	}
}

// A revocation that a new leader finds waits min(max TTL, D) in full.
func TestL3FoundRevocationWaitsInFull(t *testing.T) {
	for _, c := range []struct {
		ttl, want time.Duration
	}{{10 * time.Second, d}, {2 * time.Second, 2 * time.Second}} {
		r := newRig(t, 0)
		r.open("s0", c.ttl)
		k := r.acquire("s0", "lock/a")
		r.revoke("lock/a", k)
		r.commands = nil
		r.now = t0.Add(1 * time.Second)
		r.elect()
		if until, ok := r.l.RevocationEnd("s0", "lock/a", k); !ok || until.Sub(t0) != 1*time.Second+c.want {
			t.Errorf("TTL %v: ends at %v, want %v after the start", c.ttl, until.Sub(t0), c.want)
		}
		r.stream(1)
		r.keepalive(1, "s0", nil)
		r.to(1*time.Second + c.want - 1)
		r.none()
		r.to(1*time.Second + c.want)
		for _, p := range r.commands {
			if p.Command.GetEndRevocation() != nil {
				r.commit(p)
			}
		}
		if _, ok := r.m.View().Lease("lock/a"); ok {
			t.Errorf("TTL %v: the lease did not end", c.ttl)
		}
	}
}

// One that begins later waits for the later of what was assumed and sent.
func TestL3LaterRevocation(t *testing.T) {
	r := newRig(t, 1)
	k := r.acquire("s0", "lock/a")
	r.elect()
	r.revoke("lock/a", k)
	if until, _ := r.l.RevocationEnd("s0", "lock/a", k); until != t0.Add(d) {
		t.Errorf("nothing sent yet: ends at %v, want D after the start", until.Sub(t0))
	}

	r = newRig(t, 1)
	k = r.acquire("s0", "lock/a")
	r.elect()
	r.now = t0.Add(2 * time.Second)
	r.hold(6 * time.Second)
	r.attach(1, "s0", nil)
	r.revoke("lock/a", k)
	if until, _ := r.l.RevocationEnd("s0", "lock/a", k); until != t0.Add(6*time.Second) {
		t.Errorf("ends at %v, want the 6 s that were sent", until.Sub(t0))
	}

	// A head lease that nobody was told of does not count.
	r = newRig(t, 1)
	k = r.acquire("s0", "lock/a")
	r.elect()
	r.now = t0.Add(3 * time.Second)
	r.hold(7 * time.Second)
	r.revoke("lock/a", k)
	if until, _ := r.l.RevocationEnd("s0", "lock/a", k); until != t0.Add(d) {
		t.Errorf("ends at %v, want D after the start", until.Sub(t0))
	}
}

// A session opened in this term was promised nothing before.
func TestL3NothingIsAssumedOfANewSession(t *testing.T) {
	r := newRig(t, 0)
	r.open("s0", ttl)
	k := r.acquire("s0", "lock/a")
	r.revoke("lock/a", k)
	r.to(0)
	r.commit(r.proposed())
	if _, ok := r.m.View().Lease("lock/a"); ok {
		t.Error("a lease of which nothing was said does not pass on at once")
	}
}

// offer gives s0's lease to s1, attached to stream 2.
func offer(t *testing.T) (*rig, fence.Token) {
	r := newRig(t, 2)
	k := r.acquire("s0", "lock/a")
	r.acquire("s1", "lock/a")
	r.attach(2, "s1", nil)
	r.to(1 * time.Second)
	r.hold(5 * time.Second)
	r.sent(2)
	r.release("s0", "lock/a", k)
	l, _ := r.m.View().Lease("lock/a")
	return r, l.Token
}

func TestF10AnswerIsComputedWhenAnswering(t *testing.T) {
	r := newRig(t, 1)
	k := r.acquire("s0", "lock/a")
	if _, err := r.l.Answer(r.now, "s0", "lock/a", k); !errors.Is(err, ErrLapsed) {
		t.Errorf("without a head lease: %v", err)
	}
	r.hold(d)
	if _, err := r.l.Answer(r.now, "s0", "lock/a", k); !errors.Is(err, ErrWait) || !r.l.CheckWanted() {
		t.Errorf("without a check: %v, wanted %v", err, r.l.CheckWanted())
	}
	r.check()
	for _, c := range []struct{ at, hold, want time.Duration }{
		{0, d, d},
		{1 * time.Second, 5 * time.Second, 5 * time.Second},
		{8 * time.Second, 12 * time.Second, ttl}, // the session's part
	} {
		r.now = t0.Add(c.at)
		r.hold(c.hold)
		h, err := r.l.Answer(r.now, "s0", "lock/a", k)
		if err != nil || since(h.GetUntil()) != c.want || h.GetPartition() != part {
			t.Errorf("at %v: %v, %v; want %v", c.at, h, err, c.want)
		}
	}
	// What was answered counts as sent.
	r.revoke("lock/a", k)
	if until, _ := r.l.RevocationEnd("s0", "lock/a", k); until != t0.Add(ttl) {
		t.Errorf("revocation ends at %v, after answers up to %v", until.Sub(t0), ttl)
	}
	if _, err := r.l.Answer(r.now, "s0", "lock/a", k); !errors.Is(err, ErrNotHeld) {
		t.Errorf("a revoked token: %v", err)
	}
	if _, err := r.l.Answer(r.now, "s0", "lock/b", k); !errors.Is(err, ErrNotHeld) {
		t.Errorf("a token never held: %v", err)
	}
}

// A session of this term is answered after a check begun after its opening.
func TestL2NewSessionIsAnsweredAfterACheck(t *testing.T) {
	r := newRig(t, 0)
	r.hold(d)
	ticket := r.l.CheckBegun(r.now)
	r.open("s0", ttl)
	k := r.acquire("s0", "lock/a")
	if r.l.CheckWanted() {
		t.Error("nobody waits yet")
	}
	r.l.CheckPassed(r.now, ticket)
	if _, err := r.l.Answer(r.now, "s0", "lock/a", k); !errors.Is(err, ErrWait) || !r.l.CheckWanted() {
		t.Errorf("by a check begun before: %v, wanted %v", err, r.l.CheckWanted())
	}
	r.check()
	if h, err := r.l.Answer(r.now, "s0", "lock/a", k); err != nil || since(h.GetUntil()) != d {
		t.Errorf("%v, %v", h, err)
	}
}

// A raised epoch revokes the old tokens; they pass on under the new one.
func TestF47RaisedEpoch(t *testing.T) {
	r := newRig(t, 2)
	k := r.acquire("s0", "lock/a")
	r.acquire("s1", "lock/a")
	r.hold(d)
	r.attach(1, "s0", nil)
	r.adopt(2)
	if w := r.only(1).GetWithdrawal(); fence.Token(w.GetToken()) != k || since(w.GetUntil()) != d {
		t.Errorf("told %v", w)
	}
	r.hold(2 * d)
	r.sent(1)
	r.to(d)
	for _, c := range r.commands {
		r.commit(c)
	}
	if l, ok := r.m.View().Lease("lock/a"); !ok || l.Token.Epoch() != 2 || l.Token <= k {
		t.Errorf("passed on as %+v", l)
	}
}
