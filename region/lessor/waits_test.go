package lessor

import (
	"errors"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// ask is Acquire with terms.
func (r *rig) ask(session, resource string, edit func(*pb.AcquireCommand)) *pb.AcquireResult {
	r.Helper()
	r.request++
	c := &pb.AcquireCommand{
		SessionId: session, RequestId: r.request, Resource: resource, Partition: part, Epoch: uint32(r.epoch()), Wait: true,
	}
	edit(c)
	return r.must(&pb.Command{Kind: &pb.Command_Acquire{Acquire: c}}).GetAcquire()
}

// alive keeps sessions from expiring, at the present instant.
func (r *rig) alive(on StreamID, sessions ...string) {
	r.l.StreamOpened(r.now, on)
	for _, s := range sessions {
		r.keepalive(on, s, nil)
	}
	r.check()
	r.sent(on)
}

// until ticks to an instant; nothing may be proposed before it.
func (r *rig) until(d time.Duration) {
	r.Helper()
	r.to(d - time.Millisecond)
	r.none()
	r.to(d)
}

// TestAWaitEndsWhenItsTimeIsOver, counted anew in full by a new leader, and the
// client is told.
func TestAWaitEndsWhenItsTimeIsOver(t *testing.T) {
	r := newRig(t, 2)
	r.alive(1, "s0", "s1")
	r.acquire("s0", "lock/a")
	r.ask("s1", "lock/a", func(c *pb.AcquireCommand) { c.WaitMs = 3000 })
	r.to(2 * time.Second)
	r.elect()
	r.alive(2, "s0", "s1")
	r.until(5 * time.Second)
	c := r.proposed()
	if w := c.Command.GetEndWait(); w.GetSessionId() != "s1" || w.GetRequestId() != r.request {
		t.Fatalf("proposed %v", c.Command)
	}
	r.commit(c)
	if f := r.only(2).GetFailed(); f.GetError().GetWaitEnded().GetResource() != "lock/a" || f.GetRequestId() != r.request {
		t.Errorf("told %v", f)
	}
	r.to(8 * time.Second)
	r.none()
}

// TestAWaitThatIsOverHasNoTimer: granted, cancelled, or without a limit.
func TestAWaitThatIsOverHasNoTimer(t *testing.T) {
	r := newRig(t, 2)
	before := r.l.Stats().Timers
	a := r.acquire("s0", "lock/a")
	r.acquire("s0", "lock/b")
	r.acquire("s0", "lock/c")
	r.ask("s1", "lock/a", func(c *pb.AcquireCommand) { c.WaitMs = 1000 })
	r.ask("s1", "lock/b", func(c *pb.AcquireCommand) { c.WaitMs = 1000 })
	r.must(&pb.Command{Kind: &pb.Command_Cancel{Cancel: &pb.CancelCommand{SessionId: "s1", RequestId: r.request}}})
	r.ask("s1", "lock/c", func(*pb.AcquireCommand) {})
	r.release("s0", "lock/a", a)
	if got := r.l.Stats().Timers; got != before+1 { // the offer of lock/a
		t.Errorf("%d timers, before %d", got, before)
	}
	r.to(2 * time.Second)
	r.none()
}

// TestAWaitWhoseEndIsLostIsEndedAgain, in the same term.
func TestAWaitWhoseEndIsLostIsEndedAgain(t *testing.T) {
	r := newRig(t, 2)
	r.acquire("s0", "lock/a")
	r.ask("s1", "lock/a", func(c *pb.AcquireCommand) { c.WaitMs = 1000 })
	r.to(time.Second)
	r.l.CommandDone(r.now, r.proposed().ID, nil, errors.New("unknown"))
	r.until(time.Second + DefaultRetryAfter)
	r.commit(r.proposed())
	r.to(5 * time.Second)
	r.none()
}

// TestI6ALockDelayIsCountedInFull, and anew by a new leader and after a gap in
// the clock.
func TestI6ALockDelayIsCountedInFull(t *testing.T) {
	const length = 4 * time.Second
	for name, disturb := range map[string]func(r *rig) (from time.Duration){
		"quietly":    func(*rig) time.Duration { return 0 },
		"new leader": func(r *rig) time.Duration { r.to(time.Second); r.elect(); return time.Second },
		"clock gap":  func(r *rig) time.Duration { r.to(time.Second); r.l.ClockGap(r.now); r.take(); return time.Second },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 2)
			token := r.ask("s0", "lock/a", func(c *pb.AcquireCommand) { c.LockDelayMs = length.Milliseconds() }).GetGranted().GetToken()
			r.ask("s1", "lock/a", func(*pb.AcquireCommand) {})
			r.must(&pb.Command{Term: r.term, Kind: &pb.Command_Expire{Expire: &pb.ExpireCommand{SessionIds: []string{"s0"}}}})
			if r.l.Stats().Delays != 1 {
				t.Fatal("no delay runs")
			}
			from := disturb(r)
			r.l.PulseFresh(r.now, true)
			r.until(from + stretched(length))
			c := r.proposed()
			if d := c.Command.GetEndDelay(); d.GetResource() != "lock/a" || d.GetToken() != token {
				t.Fatalf("proposed %v", c.Command)
			}
			r.commit(c)
			if l, ok := r.m.View().Lease("lock/a"); !ok || l.Session != "s1" || r.l.Stats().Delays != 0 {
				t.Errorf("after the delay: %+v", l)
			}
		})
	}
}

// unsettled is a partition that came without a release.
func unsettled(t *testing.T) *rig {
	r := newRig(t, 2)
	r.to(time.Second)
	r.must(&pb.Command{Term: r.term, Kind: &pb.Command_Drop{Drop: &pb.DropCommand{Partition: part, Epoch: 1}}})
	r.adopt(2)
	if p, _ := r.m.View().Partition(part); !p.Unsettled {
		t.Fatal("the partition is settled")
	}
	return r
}

// TestI6ADelayOfBeforeAPromotionCountsFromTheAdoption.
func TestI6ADelayOfBeforeAPromotionCountsFromTheAdoption(t *testing.T) {
	r := unsettled(t)
	r.to(3 * time.Second)
	if got := r.ask("s0", "lock/a", func(c *pb.AcquireCommand) { c.LockDelayMs = 5000 }); got.GetQueued() == nil {
		t.Fatalf("answered %v", got)
	}
	r.until(time.Second + stretched(5*time.Second))
	c := r.proposed()
	if d := c.Command.GetEndDelay(); d.GetResource() != "lock/a" || d.GetToken() != 0 {
		t.Fatalf("proposed %v", c.Command)
	}
	r.commit(c)
	if l, ok := r.m.View().Lease("lock/a"); !ok || l.Session != "s0" {
		t.Errorf("after the delay: %+v", l)
	}
}

// TestI6APartitionSettlesAfterTheLongestDelay, counted from the adoption, or from
// the start of the term that found it.
func TestI6APartitionSettlesAfterTheLongestDelay(t *testing.T) {
	for _, elected := range []bool{false, true} {
		r := unsettled(t)
		from := time.Second
		if elected {
			r.to(2 * time.Second)
			r.elect()
			from = 2 * time.Second
		}
		for at := 4 * time.Second; at < from+stretched(settleAfter); at += 4 * time.Second {
			r.to(at)
			r.alive(StreamID(at), "s0", "s1")
		}
		r.until(from + stretched(settleAfter))
		c := r.proposed()
		if s := c.Command.GetSettle(); s.GetPartition() != part || s.GetEpoch() != 2 {
			t.Fatalf("elected %v: proposed %v", elected, c.Command)
		}
		r.commit(c)
		if p, _ := r.m.View().Partition(part); p.Unsettled {
			t.Errorf("elected %v: still unsettled", elected)
		}
		r.none()
	}
}

// TestALostPartitionIsNotSettled, and its delays end with it.
func TestALostPartitionIsNotSettled(t *testing.T) {
	r := unsettled(t)
	r.ask("s0", "lock/a", func(c *pb.AcquireCommand) { c.LockDelayMs = 5000 })
	before := r.l.Stats()
	r.must(&pb.Command{Term: r.term, Kind: &pb.Command_Drop{Drop: &pb.DropCommand{Partition: part, Epoch: 2}}})
	after := r.l.Stats()
	if after.Delays != 0 || after.Timers != before.Timers-2 {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

// TestACommandThatFindsNothingToEndIsNotRepeated.
func TestACommandThatFindsNothingToEndIsNotRepeated(t *testing.T) {
	r := unsettled(t)
	r.ask("s0", "lock/a", func(c *pb.AcquireCommand) { c.LockDelayMs = 1000 })
	r.to(4 * time.Second)
	c := r.proposed()
	r.l.CommandDone(r.now, c.ID, &pb.CommandResult{Error: &pb.ErrorDetail{Kind: &pb.ErrorDetail_Refused{Refused: &pb.Refused{Reason: "none runs"}}}}, nil)
	r.alive(9, "s0", "s1")
	r.to(8 * time.Second)
	r.none()
}

// TestL6ATokenOfADroppedEpochIsNotAnswered, though its end comes in a later
// piece of the drop, after the adoption of the next epoch.
func TestL6ATokenOfADroppedEpochIsNotAnswered(t *testing.T) {
	r := newRig(t, 1)
	r.alive(1, "s0")
	r.hold(d)
	token := r.acquire("s0", "lock/a")
	if _, err := r.l.Answer(r.now, "s0", "lock/a", token); err != nil {
		t.Fatal(err)
	}
	r.l.Applied(r.now, []state.Event{
		state.PartitionDropped{Partition: part, Epoch: 1}, state.PartitionAdopted{Partition: part, Epoch: 2},
	})
	r.l.HeadLease(r.now, part, 2, r.now.Add(d))
	if h, err := r.l.Answer(r.now, "s0", "lock/a", token); err == nil {
		t.Errorf("answered %v", h)
	}
	// Granted anew before the old one's end: the stream is told of both.
	r.take()
	r.sent(1)
	next, err := fence.NewToken(2, 1)
	if err != nil {
		t.Fatal(err)
	}
	r.l.Applied(r.now, []state.Event{state.LeaseGranted{Session: "s0", Request: 99, Resource: "lock/a", Partition: part, Token: next}})
	r.l.Applied(r.now, []state.Event{state.LeaseEnded{Session: "s0", Resource: "lock/a", Partition: part, Token: token, Reason: state.EndDropped}})
	r.l.Push(r.now, 1) // names what the answer told
	r.take()
	m := r.sent(1)
	if len(m) != 3 || m[2].GetPush() == nil || m[0].GetWithdrawal().GetToken() != uint64(token) || m[1].GetGrant().GetHeld().GetToken() != uint64(next) {
		t.Errorf("told %v", m)
	}
	r.keepalive(1, "s0", tokens{"lock/a": next})
	r.check()
	if a := r.ack(1); a.GetComplete() {
		t.Errorf("the hash of what was told does not match: %v", a)
	}
}
