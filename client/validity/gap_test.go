package validity

import (
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// anew ends the rig's stream and opens another one to the same leader, whose
// clock has jumped.
func (r *rig) anew() {
	r.StreamBroken(r.stream)
	r.stream = r.StreamOpened()
}

// ackBy is a complete ack, of a leader whose clock is ahead by jump of what leader
// says.
func (r *rig) ackBy(jump time.Duration, c instant.Instant, until time.Duration, tokens ...fence.Token) []Event {
	ka := r.Table.Keepalive(c, sid, r.stream)
	s := leader(c.Add(20*ms)) + int64(jump)
	a := &pb.Ack{SessionId: sid, Sequence: ka.GetSequence(), ReceivedAt: s, SessionUntil: s + int64(10*time.Second), Complete: true}
	for _, k := range tokens {
		a.Held = append(a.Held, named(k))
	}
	if until > 0 {
		a.Partitions = []*pb.PartitionEnd{{Partition: partName, Epoch: 1, Until: leader(at(until)) + int64(jump)}}
	}
	return r.Received(c.Add(40*ms), r.stream, &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Ack{Ack: a}})
}

// A leader whose clock had a gap begins anew in its term: its streams end, and
// the new ones name what is held before it has renewed the head lease. What it
// promised before counts till it runs out, on the client's clock, whatever the
// leader's clock did; and no longer.
func TestL3ThePromiseOfBeforeAGapRunsOn(t *testing.T) {
	for _, jump := range []time.Duration{0, time.Hour, -time.Second} {
		r, k := held(t) // to 4 s, less the drift
		before := r.Until(sid, res, k)
		context := r.ContextEnd(sid, res, k)
		r.anew()
		if ev := r.ackBy(jump, at(1*time.Second), 0, k); len(ev) != 0 {
			t.Fatalf("jump %v: events %+v", jump, ev)
		}
		if u := r.Until(sid, res, k); u != before {
			t.Errorf("jump %v: believed until %v, want the %v of before", jump, u.Sub(t0), before.Sub(t0))
		}
		if c := r.ContextEnd(sid, res, k); c < context {
			t.Errorf("jump %v: its context ends at %v, want no earlier than the %v of before", jump, c.Sub(t0), context.Sub(t0))
		}
		r.valid(before-1, k, true)
		r.valid(before, k, false) // the region does not renew
		if h := r.Table.Keepalive(at(1500*ms), sid, r.stream).GetTokensHash(); h != TokenHash(res, k) {
			t.Errorf("jump %v: the hash is not that of what the new stream named", jump)
		}
		// A second gap ends a stream that has promised nothing. Then it renews.
		r.anew()
		r.ackBy(2*jump, at(2*time.Second), 0, k)
		r.valid(before-1, k, true)
		r.Received(at(2500*ms), r.stream, &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Push{Push: &pb.PartitionPush{
			Partitions: []*pb.PartitionEnd{{Partition: partName, Epoch: 1, Until: leader(at(6*time.Second)) + int64(2*jump)}},
		}}})
		if u := r.Until(sid, res, k).Sub(t0); u < 5900*ms || u > 6*time.Second {
			t.Errorf("jump %v: renewed until 6 s, believed until %v", jump, u)
		}
	}
}

// Nothing is added to what was promised before: neither by the new stream, whose
// leader counts on another clock, nor for a token that it does not name.
func TestL3NothingIsAddedToThePromiseOfBefore(t *testing.T) {
	r, k := held(t)
	before, old := r.Until(sid, res, k), r.stream
	r.anew()
	r.ackBy(0, at(1*time.Second), 0, k)
	// Late on the old stream, or of an epoch that is not the token's.
	r.Received(at(1100*ms), old, &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Push{Push: &pb.PartitionPush{
		Partitions: []*pb.PartitionEnd{end(1, at(9*time.Second))},
	}}})
	r.push(1, at(1200*ms), end(2, at(9*time.Second)))
	if u := r.Until(sid, res, k); u != before {
		t.Errorf("believed until %v, want the %v of before", u.Sub(t0), before.Sub(t0))
	}
	// It is withdrawn by the new stream, and what the region waits for is no less
	// than what was promised.
	e := r.only(r.withdraw(1, at(1500*ms), k, leader(at(5*time.Second))), Withdrawn)
	if r.valid(before-1, k, true); e.Until < before || r.ContextEnd(sid, res, k) != 0 {
		t.Errorf("withdrawn until %v, its context to %v", e.Until.Sub(t0), r.ContextEnd(sid, res, k))
	}
	r.valid(at(5*time.Second), k, false)

	r, k = held(t)
	r.anew()
	r.only(r.ackBy(0, at(1*time.Second), 0), Lost)
	r.valid(at(1100*ms), k, false)

	// A gap in the client's clock ends all that older streams have said.
	r, k = held(t)
	r.anew()
	r.ackBy(0, at(1*time.Second), 0, k)
	r.Table.ClockGap(at(1200 * ms))
	r.valid(at(1300*ms), k, false)
}
