package lessor

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

type tokens = map[string]fence.Token

// An arrival moves the expiry deadline at once, the sendable one after a check
// begun later, and only to that arrival + TTL.
func TestL2TwoDeadlines(t *testing.T) {
	r := newRig(t, 1)
	r.stream(1)
	r.to(1 * time.Second)
	r.keepalive(1, "s0", nil)
	expiry, sendable, _ := r.l.Deadlines("s0")
	if expiry != r.now.Add(ttl) || sendable != t0.Add(ttl) {
		t.Errorf("deadlines %v and %v", expiry.Sub(t0), sendable.Sub(t0))
	}
	ticket := r.l.CheckBegun(r.now)
	r.to(3 * time.Second)
	r.keepalive(1, "s0", nil) // not covered by the check
	r.l.CheckPassed(r.now, ticket)
	r.take()
	a := r.ack(1)
	if since(a.SessionUntil) != 1*time.Second+ttl || since(a.ReceivedAt) != 1*time.Second || a.Sequence != 1 {
		t.Errorf("ack %v, want the first arrival's", a)
	}
	expiry, sendable, _ = r.l.Deadlines("s0")
	if expiry != t0.Add(3*time.Second+ttl) || sendable != t0.Add(1*time.Second+ttl) {
		t.Errorf("deadlines %v and %v", expiry.Sub(t0), sendable.Sub(t0))
	}
}

func TestF1CheckBegunBeforeTheArrivalCoversNothing(t *testing.T) {
	r := newRig(t, 1)
	r.stream(1)
	ticket := r.l.CheckBegun(r.now)
	r.keepalive(1, "s0", nil)
	if !r.l.CheckWanted() {
		t.Error("the arrival wants a check of its own")
	}
	r.l.CheckPassed(r.now, ticket)
	r.take()
	if m := r.sent(1); len(m) != 0 {
		t.Errorf("acknowledged by a check begun before: %v", m)
	}
	second := r.l.CheckBegun(r.now)
	if r.l.CheckWanted() {
		t.Error("the running check covers all")
	}
	r.l.CheckFailed(r.now, second)
	if !r.l.CheckWanted() {
		t.Error("after a failed check another is wanted")
	}
	r.check()
	r.ack(1)
}

func TestL7NothingIsSentBeforeTheFirstCheck(t *testing.T) {
	r := newRig(t, 2)
	k := r.acquire("s0", "lock/a")
	r.elect()
	r.stream(1)
	r.keepalive(1, "s0", nil)
	r.hold(d)
	r.keepalive(1, "nobody", nil)
	r.to(1 * time.Second)
	r.revoke("lock/a", k)
	r.l.Push(r.now, 1)
	r.take()
	if m := r.sent(1); len(m) != 0 {
		t.Errorf("sent before any check: %v", m)
	}
	if _, err := r.l.Answer(r.now, "s0", "lock/a", k); !errors.Is(err, ErrNotHeld) {
		t.Errorf("an answer for a revoked token: %v", err)
	}
	k2 := r.acquire("s0", "lock/b")
	if _, err := r.l.Answer(r.now, "s0", "lock/b", k2); !errors.Is(err, ErrWait) {
		t.Errorf("an answer before the first check: %v", err)
	}
}

// Every session has its full TTL from the start of a term; expiry is a command
// with its term, one at a time.
func TestF2ExpiryIsACommandOfItsTerm(t *testing.T) {
	r := newRig(t, 2)
	r.stream(1)
	r.to(9 * time.Second)
	r.elect()
	r.to(18999 * ms)
	r.none()
	r.to(19 * time.Second)
	c := r.proposed()
	if got := c.Command.GetExpire().GetSessionIds(); len(got) != 2 {
		t.Fatalf("expires %v", got)
	}
	r.to(25 * time.Second)
	r.none() // in flight
	r.commit(c)
	if n := r.m.View().Counts().Sessions; n != 0 || r.l.Stats().Sessions != 0 {
		t.Errorf("%d sessions left in the state, %d in the tables", n, r.l.Stats().Sessions)
	}
	r.to(60 * time.Second)
	r.none()
}

func TestF7NoKeepaliveWhileExpiring(t *testing.T) {
	r := newRig(t, 1)
	r.attach(1, "s0", nil)
	r.to(10 * time.Second)
	c := r.proposed()
	r.sent(1)
	before, _, _ := r.l.Deadlines("s0")
	r.keepalive(1, "s0", nil)
	r.check()
	if m := r.sent(1); len(m) != 0 {
		t.Errorf("a session that is being expired was acknowledged: %v", m)
	}
	if after, _, _ := r.l.Deadlines("s0"); after != before {
		t.Error("its deadline moved")
	}
	r.commit(c)
	if e := r.only(1).GetEnded(); e.GetSessionId() != "s0" || e.GetReason() != "expired" {
		t.Errorf("told %v", e)
	}
}

// The outcome of an expiry is unknown: it is proposed again, and until it is
// known no keepalive is taken.
func TestF7UnknownOutcomeIsProposedAgain(t *testing.T) {
	r := newRig(t, 1)
	r.attach(1, "s0", nil)
	r.to(10 * time.Second)
	c := r.proposed()
	r.sent(1)
	r.l.CommandDone(r.now, c.ID, nil, errors.New("unknown"))
	r.keepalive(1, "s0", nil)
	r.check()
	if m := r.sent(1); len(m) != 0 {
		t.Errorf("acknowledged: %v", m)
	}
	r.to(10*time.Second + DefaultRetryAfter)
	again := r.proposed()
	// The first copy commits after all, then the second.
	r.must(c.Command)
	r.commit(again)
	if r.l.Stats().Sessions != 0 || r.l.Stats().Commands != 0 {
		t.Errorf("%+v", r.l.Stats())
	}
	r.to(60 * time.Second)
	r.none()
}

func TestF2WrongTermEndsTheLessor(t *testing.T) {
	r := newRig(t, 1)
	r.to(10 * time.Second)
	c := r.proposed()
	r.l.CommandDone(r.now, c.ID, &pb.CommandResult{Error: &pb.ErrorDetail{Kind: &pb.ErrorDetail_WrongTerm{WrongTerm: &pb.WrongTerm{Term: 2}}}}, nil)
	if !r.l.Over() || r.l.CheckWanted() {
		t.Error("the term is over")
	}
	r.to(60 * time.Second)
	r.none()
}

// A session with more leases than a command removes is closed by the first and
// emptied by the next.
func TestF22BatchesAndClosingSessions(t *testing.T) {
	r := newRig(t, 3)
	for i := range state.MaxRemovals + 100 {
		r.acquire("s0", fmt.Sprintf("lock/a%d", i))
	}
	for i := range state.MaxRemovals {
		r.acquire("s1", fmt.Sprintf("lock/b%d", i))
	}
	r.acquire("s2", "lock/c")
	r.to(10 * time.Second)
	seen := map[string]int{}
	for len(seen) < 3 && len(r.commands) > 0 {
		c := r.commands[0]
		r.commands = r.commands[1:]
		leases := 0
		for _, id := range c.Command.GetExpire().GetSessionIds() {
			seen[id]++
			s, _ := r.m.View().Session(id)
			leases += s.Held
		}
		if n := len(c.Command.GetExpire().GetSessionIds()); n > 1 && leases > maxEnded {
			t.Errorf("a command of %d sessions removes %d leases", n, leases)
		}
		r.commit(c)
	}
	if len(seen) != 3 {
		t.Errorf("expired %v", seen)
	}
	if n := r.m.View().Counts(); n.Closing != 1 || n.Leases != 100 {
		t.Fatalf("after the first commands: %+v", n)
	}
	// A new leader goes on with it.
	r.elect()
	r.commit(r.proposed())
	if n := r.m.View().Counts(); n.Sessions != 0 || n.Leases != 0 {
		t.Errorf("left: %+v", n)
	}
	if r.l.Stats().Sessions != 0 {
		t.Errorf("%+v", r.l.Stats())
	}
}

// A client's own close of a large session is emptied by the leader.
func TestF22CloseOfALargeSession(t *testing.T) {
	r := newRig(t, 1)
	for i := range state.MaxRemovals + 1 {
		r.acquire("s0", fmt.Sprintf("lock/a%d", i))
	}
	r.attach(1, "s0", nil)
	r.must(&pb.Command{Kind: &pb.Command_CloseSession{CloseSession: &pb.CloseSessionCommand{SessionId: "s0"}}})
	if e := r.sent(1); len(e) != 1 || e[0].GetEnded().GetReason() != "closed" {
		t.Errorf("told %v", e)
	}
	r.commit(r.proposed())
	if n := r.m.View().Counts(); n.Sessions != 0 {
		t.Errorf("left: %+v", n)
	}
}

func TestF30NothingIsAcknowledgedWhileThePulseIsStale(t *testing.T) {
	r := newRig(t, 1)
	r.stream(1)
	r.hold(d)
	k := r.acquire("s0", "lock/a")
	r.keepalive(1, "s0", nil)
	ticket := r.l.CheckBegun(r.now)
	r.l.PulseFresh(r.now, false)
	if r.l.CheckWanted() {
		t.Error("a check is wanted while the pulse is stale")
	}
	r.l.CheckPassed(r.now, ticket)
	r.take()
	if m := r.sent(1); len(m) != 0 {
		t.Errorf("acknowledged: %v", m)
	}
	if _, err := r.l.Answer(r.now, "s0", "lock/a", k); !errors.Is(err, ErrWait) {
		t.Errorf("answered: %v", err)
	}
	r.l.PulseFresh(r.now, true)
	if !r.l.CheckWanted() {
		t.Error("what waits wants a check")
	}
	r.check()
	r.ack(1)
}

// A stream is told of its partitions' ends when half of D is left of what it
// was told last, and no sooner.
func TestF8PushesBeforeWhatIsKnownRunsShort(t *testing.T) {
	r := newRig(t, 2)
	r.acquire("s0", "lock/a")
	r.hold(d)
	r.attach(1, "s0", nil)
	r.attach(2, "s1", nil) // holds nothing: is pushed nothing
	var got []time.Duration
	for at := 100 * ms; at <= 6*time.Second; at += 100 * ms {
		r.now = t0.Add(at)
		r.hold(at + d)
		r.to(at)
		for _, m := range r.sent(1) {
			p := m.GetPush()
			if p == nil || len(p.Partitions) != 1 || p.Partitions[0].Epoch != 1 || since(p.Partitions[0].Until) != at+d {
				t.Fatalf("at %v: %v", at, m)
			}
			got = append(got, at)
		}
	}
	if want := []time.Duration{d / 5, d/5 + d/2, d/5 + d}; !slices.Equal(got, want) {
		t.Errorf("pushed at %v, want %v", got, want)
	}
	if m := r.sent(2); len(m) != 0 {
		t.Errorf("pushed to a session without leases: %v", m)
	}
	// Without renewals it is told the same each fifth, as a sign of life.
	got = nil
	for at := 6 * time.Second; at <= 9500*ms; at += 100 * ms {
		r.to(at)
		for range r.sent(1) {
			got = append(got, at)
		}
	}
	if want := []time.Duration{6800 * ms, 8 * time.Second, 8800 * ms}; !slices.Equal(got, want) {
		t.Errorf("pushed at %v while nothing was renewed, want %v", got, want)
	}
	// A lapse silences the pushes; the next hold is told at once.
	r.l.Lapsed(r.now, part, 1)
	r.to(12 * time.Second)
	if m := r.sent(1); len(m) != 0 {
		t.Errorf("pushed while lapsed: %v", m)
	}
	r.hold(16 * time.Second)
	if p := r.only(1).GetPush(); since(p.GetPartitions()[0].GetUntil()) != 16*time.Second {
		t.Errorf("told %v", p)
	}
}

// Acks that name all ends stand in for pushes; without them pushes go on, for all
// streams of one instant together.
func TestF8AcksStandInForPushes(t *testing.T) {
	r := newRig(t, 2)
	k := map[string]tokens{}
	for i, s := range []string{"s0", "s1"} {
		resource := "lock/" + s
		k[s] = tokens{resource: r.acquire(s, resource)}
		r.hold(d)
		r.now = t0.Add(time.Duration(i) * 30 * ms)
		r.attach(StreamID(i+1), s, k[s])
	}
	pushed := map[StreamID][]time.Duration{}
	for at := 50 * ms; at <= 6*time.Second; at += 50 * ms {
		r.now = t0.Add(at)
		r.hold(at + d)
		r.to(at)
		if at <= 3*time.Second && at%(900*ms) == 0 {
			r.keepalive(1, "s0", k["s0"])
			r.check()
		}
		for on := StreamID(1); on <= 2; on++ {
			for _, m := range r.sent(on) {
				if m.GetPush() != nil {
					pushed[on] = append(pushed[on], at)
				}
			}
		}
	}
	if got, want := pushed[1], []time.Duration{d / 5, 4700 * ms}; !slices.Equal(got, want) {
		t.Errorf("with acks until 2.7 s: pushed at %v, want %v", got, want)
	}
	if got, want := pushed[2], []time.Duration{d / 5, d/5 + d/2, d/5 + d}; !slices.Equal(got, want) {
		t.Errorf("without acks: pushed at %v, want %v", got, want)
	}
}

// What is granted in a partition that ends sooner than those that were told is named
// in time: until then its answer speaks for it alone.
func TestF9GrantsAreNamedBeforeTheirAnswersEnd(t *testing.T) {
	r := newRig(t, 1)
	k := r.acquire("s0", "lock/a")
	r.hold(d)
	r.attach(1, "s0", tokens{"lock/a": k})
	r.to(d / 5)
	if r.only(1).GetPush() == nil {
		t.Fatal("nothing was pushed")
	}
	r.keepalive(1, "s0", tokens{"lock/a": k})
	r.now = t0.Add(d / 2)
	r.check()
	r.sent(1)
	r.acquire("s0", "lock/b") // answered until d: the hold was not renewed
	named := time.Duration(0)
	for at := d / 2; at < d && named == 0; at += 50 * ms {
		r.to(at)
		for _, m := range r.sent(1) {
			if m.GetGrant().GetHeld().GetResource() == "lock/b" {
				named = at
			}
		}
	}
	if named == 0 || named > d/2+50*ms {
		t.Errorf("named at %v, which is to be by %v", named, d/2)
	}
}

func TestF8PushesToManyAreOneMessage(t *testing.T) {
	r := newRig(t, 2)
	for i, s := range []string{"s0", "s1"} {
		resource := "lock/" + s
		k := tokens{resource: r.acquire(s, resource)}
		r.hold(d)
		r.now = t0.Add(time.Duration(1+i) * 30 * ms)
		r.attach(StreamID(i+1), s, k)
	}
	r.to(d / 5)
	if one, other := r.only(1), r.only(2); one.GetPush() == nil || one != other {
		t.Errorf("streams opened shortly one after the other: pushed %v and %v", one, other)
	}
}

// Keepalives of sessions that the stream speaks for may wait for each other's
// check, others not.
func TestCheckByTellsHowLongACheckMayWait(t *testing.T) {
	r := newRig(t, 2)
	by := func(want time.Duration) {
		t.Helper()
		at, wanted := r.l.CheckBy()
		switch {
		case want < 0 && wanted:
			t.Errorf("a check is wanted by %v", at.Sub(t0))
		case want >= 0 && (!wanted || max(at, r.now).Sub(t0) != want):
			t.Errorf("wanted %v by %v, want by %v", wanted, max(at, r.now).Sub(t0), want)
		}
	}
	by(-1)
	r.stream(1)
	r.keepalive(1, "s0", nil)
	by(0) // the stream does not speak for the session yet
	r.check()
	by(-1)
	r.to(3 * time.Second)
	r.keepalive(1, "s0", nil)
	by(3*time.Second + maxPatience)
	r.to(3*time.Second + 20*ms)
	r.keepalive(1, "s0", nil)
	by(3*time.Second + maxPatience)
	r.keepalive(1, "s1", nil) // its first
	by(3*time.Second + 20*ms)
	r.l.CheckFailed(r.now, r.l.CheckBegun(r.now))
	by(3*time.Second + 20*ms)
	r.check()
	by(-1)
	r.keepalive(1, "s0", tokens{"lock/x": 1}) // asks what it holds
	by(3*time.Second + 20*ms)
	r.check()
	r.to(9 * time.Second)
	r.keepalive(1, "s0", nil) // little of its time is left
	by(9 * time.Second)
	r.check()
	r.open("short", time.Second)
	r.keepalive(1, "short", nil)
	r.check()
	r.keepalive(1, "short", nil)
	by(9*time.Second + time.Second/patiencePart)
}

// A waiter hears how far the head lease reaches, since it may be handed a
// lease.
func TestF8WaitersArePushedTo(t *testing.T) {
	r := newRig(t, 2)
	r.acquire("s0", "lock/a")
	r.acquire("s1", "lock/a")
	r.hold(d)
	if a := r.attach(1, "s1", nil); len(a.Partitions) != 1 || len(a.Held) != 0 {
		t.Errorf("ack %v", a)
	}
	r.must(&pb.Command{Kind: &pb.Command_Cancel{Cancel: &pb.CancelCommand{SessionId: "s1", RequestId: 2}}})
	if f := r.only(1).GetFailed(); f.GetRequestId() != 2 || f.GetError() == nil {
		t.Errorf("told %v", f)
	}
	r.to(d / 5)
	if m := r.sent(1); len(m) != 0 {
		t.Errorf("pushed to who waits no more: %v", m)
	}
}

func TestL6EndsAreOfTheLiveEpoch(t *testing.T) {
	r := newRig(t, 1)
	r.acquire("s0", "lock/a")
	r.l.HeadLease(r.now, part, 2, t0.Add(d)) // not adopted here
	if a := r.attach(1, "s0", nil); len(a.Partitions) != 0 {
		t.Errorf("ends of an epoch that is not live: %v", a.Partitions)
	}
	if _, _, ok := r.l.Hold(r.now, part); ok {
		t.Error("held under an epoch that is not live")
	}
	r.hold(d)
	if p := r.only(1).GetPush(); p.GetPartitions()[0].GetEpoch() != 1 {
		t.Errorf("%v", p)
	}
	r.must(&pb.Command{Term: 1, Kind: &pb.Command_Drop{Drop: &pb.DropCommand{Partition: part, Epoch: 1}}})
	if w := r.only(1).GetWithdrawal(); w.GetReason() != pb.WithdrawalReason_WITHDRAWAL_REASON_DROPPED || w.GetUntil() != 0 {
		t.Errorf("told %v", w)
	}
	if _, _, ok := r.l.Hold(r.now, part); ok {
		t.Error("held after the drop")
	}
}

func TestUnknownSessionIsToldAfterACheck(t *testing.T) {
	r := newRig(t, 0)
	r.stream(1)
	r.keepalive(1, "nobody", nil)
	if m := r.sent(1); len(m) != 0 {
		t.Fatalf("told before a check: %v", m)
	}
	if !r.l.CheckWanted() {
		t.Fatal("no check wanted")
	}
	r.check()
	if e := r.only(1).GetEnded(); e.GetSessionId() != "nobody" {
		t.Errorf("told %v", e)
	}
	// A stream that is not open is ignored.
	r.keepalive(9, "nobody", nil)
	r.check()
	if m := r.sent(9); len(m) != 0 {
		t.Errorf("sent to a stream that is not open: %v", m)
	}
}

func TestF19ClockGap(t *testing.T) {
	r := newRig(t, 1)
	k := r.acquire("s0", "lock/a")
	r.hold(d)
	r.attach(1, "s0", tokens{"lock/a": k})
	r.keepalive(1, "s0", tokens{"lock/a": k})
	ticket := r.l.CheckBegun(r.now)
	r.now = t0.Add(2 * time.Second)
	r.l.ClockGap(r.now)
	r.take()
	if len(r.closes) != 1 || r.closes[0] != 1 {
		t.Errorf("closed %v, want all streams", r.closes)
	}
	if _, _, ok := r.l.Hold(r.now, part); ok {
		t.Error("the head lease outlives the gap")
	}
	r.l.CheckPassed(r.now, ticket) // begun before
	r.stream(2)
	r.keepalive(2, "s0", nil)
	r.l.CheckPassed(r.now, ticket)
	r.take()
	if m := r.sent(2); len(m) != 0 {
		t.Errorf("a check of before the gap counted: %v", m)
	}
	r.check()
	if a := r.ack(2); !a.Complete || len(a.Held) != 1 || len(a.Partitions) != 0 {
		t.Errorf("ack %v", a)
	}
	r.to(11 * time.Second)
	r.none() // full TTLs after the gap
}

func TestConfig(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Error(err)
	}
	err := Config{ConfirmWithin: -1, RetryAfter: -1, PushEvery: -1}.Validate()
	if joined, ok := err.(interface{ Unwrap() []error }); !ok || len(joined.Unwrap()) != 3 {
		t.Errorf("faults: %v", err)
	}
}
