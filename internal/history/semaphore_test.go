package history

import (
	"testing"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// slot is a script's last call, of a semaphore of two slots: it asked for any
// slot, and was granted that one, if any.
func (s *script) slot(resource string) *script {
	o := s.h.Ops[len(s.h.Ops)-1]
	o.Slots, o.Answer.Resource = 2, resource
	return s
}

// of names the resource of the last call.
func (s *script) of(resource string) *script {
	s.h.Ops[len(s.h.Ops)-1].Resource = resource
	return s
}

// offerOf is offer of a slot.
func (s *script) offerOf(resource, session string, id, token uint64) *script {
	s.offer(session, id, token)
	s.h.Messages[len(s.h.Messages)-1].Heard.GetKind().(*pb.AttachResponse_Grant).Grant.Held.Resource = resource
	return s
}

// factOf is fact of a resource.
func (s *script) factOf(resource string, f Fact) *script {
	s.fact(f).h.Facts[len(s.h.Facts)-1].Resource = resource
	return s
}

// full has both slots held, by a and b.
func full() *script {
	return start().granted("a", 1, 10).slot("lock/x#0").granted("b", 1, 11).slot("lock/x#1")
}

func TestSemaphoresThatTheDesignAllows(t *testing.T) {
	for name, s := range map[string]*script{
		"two of two": full().get("a", 10, 0).of("lock/x#0").get("b", 11, 0).of("lock/x#1").release("a", 10, OK).of("lock/x#0").
			get("", 0, 0).of("lock/x#0").granted("c", 1, 12).slot("lock/x#0"),
		"handed over in order": full().queued("c", 1, 0).slot("").queued("a", 2, 1).slot("").release("b", 11, OK).of("lock/x#1").
			offerOf("lock/x#1", "c", 1, 12).release("a", 10, OK).of("lock/x#0").offerOf("lock/x#0", "a", 2, 13),
		"tokens that are learned late": full().queued("c", 1, 0).slot("").queued("c", 2, 1).slot("").release("b", 11, OK).of("lock/x#1").
			release("a", 10, OK).of("lock/x#0").offerOf("lock/x#0", "c", 2, 14).offerOf("lock/x#1", "c", 1, 13),
		"one that does not wait":    full().queued("c", 1, 0).slot("").acquire("c", 2, false, Answer{Busy: true, Waiters: 1}).slot(""),
		"two slots of one session":  start().granted("a", 1, 10).slot("lock/x#0").granted("a", 2, 11).slot("lock/x#1"),
		"repeated":                  start().granted("a", 1, 10).slot("lock/x#0").granted("a", 1, 10).slot("lock/x#0"),
		"beside a lock of its name": full().granted("c", 1, 12),
		"by its name first": full().queued("c", 1, 0).slot("").queued("a", 2, 0).of("lock/x#1").release("b", 11, OK).of("lock/x#1").
			offerOf("lock/x#1", "a", 2, 12).get("a", 12, 0).of("lock/x#1"),
		"a session that ends": start().granted("a", 1, 10).slot("lock/x#0").granted("a", 2, 11).slot("lock/x#1").queued("b", 1, 0).slot("").
			queued("c", 1, 1).slot("").op(Op{Kind: Close, Client: "a", Session: "a"}).of("").
			offerOf("lock/x#0", "b", 1, 12).offerOf("lock/x#1", "c", 1, 13),
		"sessions that expire together": full().queued("b", 2, 0).slot("").queued("c", 1, 1).slot("").
			fact(Fact{Kind: SessionClosed, Session: "a", Reason: ByExpiry}).fact(Fact{Kind: SessionClosed, Session: "b", Reason: ByExpiry}).sameEntry().
			get("c", 12, 0).of("lock/x#0").get("", 0, 0).of("lock/x#1"),
		"an answer that was lost": start().lost(Op{Kind: Acquire, Session: "a", Request: 1, Lowest: 1}).slot("").
			factOf("lock/x#0", Fact{Kind: Granted, Session: "a", Request: 1, Token: 10}).granted("b", 1, 11).slot("lock/x#1"),
	} {
		if v := Check(s.h, Config{Clocks: clocks}); !v.OK() {
			t.Errorf("%s: %v", name, v)
		}
	}
}

// sameEntry puts the last two facts into one entry.
func (s *script) sameEntry() *script {
	n := len(s.h.Facts)
	s.h.Facts[n-1].Index, s.h.Facts[n-1].At = s.h.Facts[n-2].Index, s.h.Facts[n-2].At
	return s
}

func TestSemaphoresThatTheDesignForbids(t *testing.T) {
	for name, s := range map[string]*script{
		"three of two":      full().granted("c", 1, 12).slot("lock/x#2"),
		"a slot twice":      full().granted("c", 1, 12).slot("lock/x#1").get("b", 11, 0).of("lock/x#1"),
		"a token twice":     start().granted("a", 1, 10).slot("lock/x#0").granted("b", 1, 10).slot("lock/x#1"),
		"a lower token":     start().granted("a", 1, 10).slot("lock/x#0").granted("b", 1, 9).slot("lock/x#1"),
		"a token of before": full().release("b", 11, OK).of("lock/x#1").granted("c", 1, 11).slot("lock/x#1"),
		"not the lowest":    start().granted("a", 1, 10).slot("lock/x#1"),
		"out of turn": full().queued("c", 1, 0).slot("").queued("a", 2, 1).slot("").release("b", 11, OK).of("lock/x#1").
			offerOf("lock/x#1", "a", 2, 12).release("a", 10, OK).of("lock/x#0").offerOf("lock/x#0", "c", 1, 13),
		"one release, two hand-overs": full().queued("c", 1, 0).slot("").queued("a", 2, 1).slot("").release("b", 11, OK).of("lock/x#1").
			offerOf("lock/x#1", "c", 1, 12).offerOf("lock/x#0", "a", 2, 13),
		"tokens that fall with the hand-overs": full().queued("c", 1, 0).slot("").queued("c", 2, 1).slot("").release("b", 11, OK).of("lock/x#1").
			release("a", 10, OK).of("lock/x#0").offerOf("lock/x#0", "c", 2, 13).offerOf("lock/x#1", "c", 1, 14),
		"busy with a free slot":            start().granted("a", 1, 10).slot("lock/x#0").acquire("b", 1, false, Answer{Busy: true}).slot(""),
		"a free slot is waited for":        start().granted("a", 1, 10).slot("lock/x#0").queued("b", 1, 0).slot(""),
		"released by another slot's token": full().release("a", 11, OK).of("lock/x#0"),
		"a slot that is lost": full().release("a", 10, OK).of("lock/x#0").release("b", 11, OK).of("lock/x#1").
			granted("c", 1, 12).slot("lock/x#1"),
		"two believe in one slot": full().heard("a", &pb.AttachResponse{Kind: &pb.AttachResponse_Ack{Ack: &pb.Ack{
			SessionId: "a", SessionUntil: int64(time.Hour), Complete: true, Partitions: []*pb.PartitionEnd{{Until: int64(time.Hour)}},
			Held: []*pb.Held{{Resource: "lock/x#1", Token: 12}},
		}}}),
		"passed from one that expired to another": full().queued("b", 2, 0).slot("").queued("c", 1, 1).slot("").
			fact(Fact{Kind: SessionClosed, Session: "a", Reason: ByExpiry}).fact(Fact{Kind: SessionClosed, Session: "b", Reason: ByExpiry}).sameEntry().
			get("c", 12, 0).of("lock/x#1"),
	} {
		if v := Check(s.h, Config{Clocks: clocks}); v.OK() {
			t.Errorf("%s: passed", name)
		}
	}
}
