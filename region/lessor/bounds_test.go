package lessor

import (
	"fmt"
	"testing"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// TestArrivalsAreBoundedByTheSessions: while no check passes, as many
// keepalives as may come are remembered as two per session at most, and no
// session is forgotten.
func TestArrivalsAreBoundedByTheSessions(t *testing.T) {
	const n = 3
	r := newRig(t, n)
	r.stream(1)
	ticket := r.l.CheckBegun(r.now)
	for range 10_000 {
		for i := range n {
			r.keepalive(1, fmt.Sprintf("s%d", i), nil)
		}
	}
	if got := r.l.Stats().Arrivals; got != n {
		t.Errorf("%d arrivals of %d sessions wait", got, n)
	}
	r.l.CheckPassed(r.now, ticket) // it began before all of them
	r.take()
	if m := r.sent(1); len(m) != 0 {
		t.Fatalf("acknowledged what came after the check: %v", m)
	}
	r.check()
	if m := r.sent(1); len(m) != n {
		t.Errorf("%d acks for %d sessions", len(m), n)
	}
	if got := r.l.Stats().Arrivals; got != 0 {
		t.Errorf("%d arrivals are left", got)
	}
}

// TestAFloodOfKeepalivesIsAcknowledged: what arrives while a check runs does
// not displace what the check covers.
func TestAFloodOfKeepalivesIsAcknowledged(t *testing.T) {
	r := newRig(t, 1)
	r.stream(1)
	for i := range 20 {
		r.keepalive(1, "s0", nil)
		covered := r.seq
		ticket := r.l.CheckBegun(r.now)
		for range 5 {
			r.now = r.now.Add(ms)
			r.keepalive(1, "s0", nil)
		}
		r.l.CheckPassed(r.now, ticket)
		r.take()
		if a := r.ack(1); a.GetSequence() != covered || a.GetComplete() != (i == 0) {
			t.Fatalf("round %d: %v, want sequence %d", i, a, covered)
		}
	}
}

// TestUnknownSessionsAreBoundedPerStream.
func TestUnknownSessionsAreBoundedPerStream(t *testing.T) {
	r := newRig(t, 1)
	r.stream(1)
	r.stream(2)
	for i := range 3 * maxUnknown {
		r.keepalive(1, fmt.Sprintf("gone%d", i), nil)
		r.keepalive(1, "gone0", nil)
	}
	r.keepalive(2, "gone", nil)
	r.check()
	if m := r.sent(1); len(m) != maxUnknown {
		t.Errorf("%d sessions were told to have ended, want %d", len(m), maxUnknown)
	}
	if e := r.only(2).GetEnded(); e.GetSessionId() != "gone" {
		t.Errorf("the other stream was told %v", e)
	}
	r.keepalive(1, "gone0", nil)
	r.check()
	if e := r.only(1).GetEnded(); e.GetSessionId() != "gone0" {
		t.Errorf("later: %v", e)
	}
	for range maxUnknown {
		r.keepalive(1, "gone", nil)
	}
	r.l.StreamClosed(r.now, 1)
	r.check()
	if m := r.sent(1); len(m) != 0 {
		t.Errorf("a closed stream was told %v", m)
	}
}

// TestWhatIsGoneKeepsNoTimer: sessions that come and go leave nothing behind
// for the rest of their TTL.
func TestWhatIsGoneKeepsNoTimer(t *testing.T) {
	r := newRig(t, 2)
	r.attach(1, "s0", nil)
	r.attach(2, "s1", nil)
	before := r.l.Stats()
	for i := range 100 {
		id := fmt.Sprintf("x%d", i)
		r.open(id, 10*time.Minute)
		r.stream(StreamID(100 + i))
		r.keepalive(StreamID(100+i), id, nil)
		token := r.acquire(id, "lock/a")
		r.acquire("s1", "lock/a")
		r.release(id, "lock/a", token) // an offer to s1
		l, _ := r.m.View().Lease("lock/a")
		r.release("s1", "lock/a", l.Token)
		r.must(&pb.Command{Kind: &pb.Command_CloseSession{CloseSession: &pb.CloseSessionCommand{SessionId: id}}})
		r.l.StreamClosed(r.now, StreamID(100+i))
	}
	if after := r.l.Stats(); after != before {
		t.Errorf("before %+v\nafter  %+v", before, after)
	}
}

// TestCommandsUnderWayAreBounded: many offers that end at once are proposed a
// few at a time, the ends of sessions before them, and each exactly once.
func TestCommandsUnderWayAreBounded(t *testing.T) {
	const n = 3 * maxInflight
	r := newRig(t, 2)
	r.open("x", time.Minute)
	r.attach(1, "s1", nil)
	r.hold(time.Hour)
	for i := range n {
		res := fmt.Sprintf("lock/%d", i)
		token := r.acquire("s0", res)
		r.acquire("s1", res)
		r.release("s0", res, token)
	}
	r.now = t0.Add(4 * time.Second)
	r.keepalive(1, "s1", tokens{"lock/none": 1}) // alive, and knows nothing
	r.to(5 * time.Second)
	if len(r.commands) != maxInflight {
		t.Fatalf("%d commands at once, want %d", len(r.commands), maxInflight)
	}
	r.to(ttl) // s0 has expired
	seen, expired := map[string]int{}, -1
	for k := 0; len(r.commands) > 0; k++ {
		c := r.commands[0]
		r.commands = r.commands[1:]
		if c.Command.GetExpire() != nil && expired < 0 {
			expired = k
		}
		if v := c.Command.GetRevoke(); v != nil {
			seen[v.GetResource()]++
		}
		res, events := r.m.Apply(1, r.term, c.Command)
		r.l.Applied(r.now, events)
		r.l.CommandDone(r.now, c.ID, res, nil)
		r.take()
		if got := r.l.Stats().Commands; got > maxInflight {
			t.Fatalf("%d commands under way", got)
		}
	}
	if len(seen) != n {
		t.Errorf("%d of %d offers were taken back", len(seen), n)
	}
	for res, k := range seen {
		if k != 1 {
			t.Errorf("%s was revoked %d times", res, k)
		}
	}
	if expired < 0 || expired > maxInflight {
		t.Errorf("the session's end was proposed as command %d, behind the revocations", expired)
	}
}

// TestF22EndsOfSessionsLeaveRoom: sessions that end at once are proposed a few
// hundred at a time, small commands together, and others get in between.
func TestF22EndsOfSessionsLeaveRoom(t *testing.T) {
	const few, many = 3, 10 * maxEnding
	r := newRig(t, many) // due at one instant
	for i := range many {
		r.acquire(fmt.Sprintf("s%d", i), fmt.Sprintf("lock/%d", i))
	}
	for i := range few {
		r.open(fmt.Sprintf("few%d", i), ttl-time.Duration(few-i)*ms)
	}
	for i := range few {
		r.to(ttl - time.Duration(few-i)*ms)
	}
	if len(r.commands) != few {
		t.Fatalf("%d commands at a time for %d sessions that end one after the other", len(r.commands), few)
	}
	for range few {
		c := r.commands[0]
		r.commands = r.commands[1:]
		r.commit(c)
	}
	ended := map[string]bool{}
	r.to(ttl)
	for len(r.commands) > 0 {
		under := 0
		for _, c := range r.commands {
			n := len(c.Command.GetExpire().GetSessionIds())
			under += n
			if n > maxEnded {
				t.Fatalf("a command ends %d sessions", n)
			}
		}
		if under > maxEnding {
			t.Fatalf("%d sessions are being ended at a time", under)
		}
		if len(ended) == 0 && under+maxEnded <= maxEnding {
			t.Errorf("%d sessions are being ended at a time, and %d wait", under, many-under)
		}
		c := r.commands[0]
		r.commands = r.commands[1:]
		for _, id := range c.Command.GetExpire().GetSessionIds() {
			if ended[id] {
				t.Errorf("%s is ended twice", id)
			}
			ended[id] = true
		}
		r.commit(c)
	}
	if len(ended) != many || r.m.View().Counts().Sessions != 0 {
		t.Errorf("%d of %d sessions were ended", len(ended), many)
	}
}
