package validity

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	ms       = time.Millisecond
	sid      = "s"
	partName = "p"
	res      = "lock/a"
	res2     = "lock/b"
	// skew is what the leader's clock is ahead of ours in most tests.
	skew = instant.Instant(77 * time.Hour)
	t0   = instant.Instant(1000 * time.Second)
)

func at(d time.Duration) instant.Instant { return t0.Add(d) }

// leader converts one of our instants, for clocks of one rate.
func leader(i instant.Instant) int64 { return int64(i + skew) }

func tok(t *testing.T, epoch fence.Epoch, seq fence.Seq) fence.Token {
	t.Helper()
	k, err := fence.NewToken(epoch, seq)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// rig is a Table with one session of 10 s on one stream.
type rig struct {
	*testing.T
	*Table
	stream StreamID
}

func newRig(t *testing.T) *rig {
	r := &rig{T: t, Table: New(Config{})}
	r.OpenSession(sid, 10*time.Second)
	r.stream = r.StreamOpened()
	return r
}

func named(token fence.Token) *pb.Held {
	return &pb.Held{Resource: res, Token: uint64(token), Partition: partName}
}

func end(epoch uint32, until instant.Instant) *pb.PartitionEnd {
	return &pb.PartitionEnd{Partition: partName, Epoch: epoch, Until: leader(until)}
}

// ack sends a keepalive at c and takes its ack, stamped rtt/2 later.
func (r *rig) ack(term uint64, c instant.Instant, complete bool, ends []*pb.PartitionEnd, held ...*pb.Held) []Event {
	ka := r.Table.Keepalive(c, sid, r.stream)
	s := c.Add(20 * ms)
	return r.Received(c.Add(40*ms), r.stream, &pb.AttachResponse{Term: term, Kind: &pb.AttachResponse_Ack{Ack: &pb.Ack{
		SessionId: sid, Sequence: ka.Sequence, ReceivedAt: leader(s), SessionUntil: leader(s.Add(10 * time.Second)),
		Complete: complete, Held: held, Partitions: ends,
	}}})
}

func (r *rig) push(term uint64, now instant.Instant, ends ...*pb.PartitionEnd) {
	r.Received(now, r.stream, &pb.AttachResponse{Term: term, Kind: &pb.AttachResponse_Push{Push: &pb.PartitionPush{Partitions: ends}}})
}

func (r *rig) grant(term uint64, now instant.Instant, request uint64, h *pb.Held, e *pb.PartitionEnd) []Event {
	return r.Received(now, r.stream, &pb.AttachResponse{Term: term, Kind: &pb.AttachResponse_Grant{Grant: &pb.Grant{
		SessionId: sid, RequestId: request, Held: h, Partition: e,
	}}})
}

func (r *rig) withdraw(term uint64, now instant.Instant, token fence.Token, until int64) []Event {
	return r.Received(now, r.stream, &pb.AttachResponse{Term: term, Kind: &pb.AttachResponse_Withdrawal{Withdrawal: &pb.Withdrawal{
		SessionId: sid, Resource: res, Token: uint64(token), Until: until, Reason: pb.WithdrawalReason_WITHDRAWAL_REASON_REVOKED,
	}}})
}

func (r *rig) answer(term uint64, sent instant.Instant, request uint64, token fence.Token, until instant.Instant) []Event {
	h := named(token)
	h.Until = leader(until)
	return r.AcquireAnswered(sent.Add(40*ms), sent, sid, request, &pb.AcquireResponse{
		Term: term, ReceivedAt: leader(sent.Add(20 * ms)), Outcome: &pb.AcquireResponse_Granted{Granted: h},
	})
}

func (r *rig) valid(now instant.Instant, token fence.Token, want bool) {
	r.Helper()
	if got := r.Table.Valid(now, sid, res, token); got != want {
		r.Errorf("at %v: valid is %v, want %v (until %v)", now.Sub(t0), got, want, r.Until(sid, res, token).Sub(t0))
	}
}

func (r *rig) only(events []Event, kind Kind) Event {
	r.Helper()
	if len(events) != 1 || events[0].Kind != kind {
		r.Fatalf("events %+v, want one %v", events, kind)
	}
	return events[0]
}

// held brings the rig to holding a token, named by a complete ack at 0, with a
// partition end at 4 s.
func held(t *testing.T) (*rig, fence.Token) {
	r := newRig(t)
	k := tok(t, 1, 1)
	r.RequestBegun(sid, 1, res)
	r.only(r.ack(1, at(0), true, []*pb.PartitionEnd{end(1, at(4*time.Second))}, named(k)), Granted)
	return r, k
}

// An instant X is at c + (X-s)(1-2ρ): here s is 20 ms after c.
func TestF8InstantsAreMappedByTheRoundTrip(t *testing.T) {
	r, k := held(t)
	want := at(time.Duration(float64(4*time.Second-20*ms) * 0.98))
	if got := r.Until(sid, res, k); got.Sub(want).Abs() > time.Microsecond {
		t.Errorf("until %v, want %v", got.Sub(t0), want.Sub(t0))
	}
	// A push counts by the same pair, however late it comes.
	r.push(1, at(3*time.Second), end(1, at(5*time.Second)))
	want = at(time.Duration(float64(5*time.Second-20*ms) * 0.98))
	if got := r.Until(sid, res, k); got.Sub(want).Abs() > time.Microsecond {
		t.Errorf("until %v after a push, want %v", got.Sub(t0), want.Sub(t0))
	}
}

// Whatever the rates within ρ, an instant of the leader is over here no later
// than there [L8].
func TestL8MappingIsNeverLate(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const rho = 0.01
	for range 100_000 {
		rate := func() float64 { return 1 + rho*(2*rng.Float64()-1) }
		clientRate, leaderRate := rate(), rate()
		// In true time: sent at 0, stamped at d, X at x after the stamp.
		d, x := rng.Float64()*2, rng.Float64()*600
		c := instant.Instant(5e12)
		s := instant.Instant(9e14)
		X := s.Add(time.Duration(x * leaderRate * 1e9))
		mine := mapped(X, c, s, DefaultDriftPPM)
		trueEnd := c.Add(time.Duration((d + x) * clientRate * 1e9))
		if mine > trueEnd {
			t.Fatalf("client rate %v, leader rate %v, x %v: let go %v too late", clientRate, leaderRate, x, mine.Sub(trueEnd))
		}
	}
	if got := mapped(100, 50, 200, DefaultDriftPPM); got > 50 {
		t.Errorf("an instant before the stamp maps to %v, after the send", got)
	}
}

// An ack pairs with its own keepalive, not with a later one.
func TestF18AckPairsWithItsOwnKeepalive(t *testing.T) {
	r := newRig(t)
	k := tok(t, 1, 1)
	r.RequestBegun(sid, 1, res)
	first := r.Table.Keepalive(at(0), sid, r.stream)
	r.Table.Keepalive(at(3*time.Second), sid, r.stream)
	r.Received(at(3*time.Second), r.stream, &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Ack{Ack: &pb.Ack{
		SessionId: sid, Sequence: first.Sequence, ReceivedAt: leader(at(0)), SessionUntil: leader(at(10 * time.Second)),
		Complete: true, Held: []*pb.Held{named(k)}, Partitions: []*pb.PartitionEnd{end(1, at(4*time.Second))},
	}}})
	if got, limit := r.Until(sid, res, k), at(4*time.Second); got > limit {
		t.Errorf("until %v, after the leader's %v", got.Sub(t0), limit.Sub(t0))
	}
	// An ack of a keepalive never sent gives no pair.
	r2 := newRig(t)
	r2.RequestBegun(sid, 1, res)
	r2.Received(at(0), r2.stream, &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Ack{Ack: &pb.Ack{
		SessionId: sid, Sequence: 99, ReceivedAt: leader(at(0)), SessionUntil: leader(at(10 * time.Second)),
		Complete: true, Held: []*pb.Held{named(k)}, Partitions: []*pb.PartitionEnd{end(1, at(4*time.Second))},
	}}})
	r2.valid(at(0), k, false)
}

func TestF9WithdrawalBeforeLaterValidity(t *testing.T) {
	r, k := held(t)
	e := r.only(r.withdraw(1, at(1*time.Second), k, leader(at(2*time.Second))), Withdrawn)
	if e.Until > at(2*time.Second) || e.Until < at(1900*ms) {
		t.Errorf("withdrawn until %v", e.Until.Sub(t0))
	}
	if got := r.ContextEnd(sid, res, k); got != 0 {
		t.Errorf("the context of a revoked token ends at %v, want at once", got)
	}
	r.push(1, at(1500*ms), end(1, at(6*time.Second)))
	r.ack(1, at(1600*ms), false, []*pb.PartitionEnd{end(1, at(6*time.Second))})
	r.valid(at(1900*ms), k, true)
	r.valid(at(2*time.Second), k, false)
	// Not even a list that names it brings it back on this stream.
	r.ack(1, at(1700*ms), true, []*pb.PartitionEnd{end(1, at(6*time.Second))}, named(k))
	r.valid(at(2*time.Second), k, false)
	r.only(r.Poll(at(2*time.Second)), Lost)
}

func TestF10AnswerHasItsOwnEnd(t *testing.T) {
	r := newRig(t)
	k := tok(t, 1, 1)
	r.RequestBegun(sid, 1, res)
	r.only(r.answer(1, at(0), 1, k, at(2*time.Second)), Granted)
	r.valid(at(1*time.Second), k, true)
	r.valid(at(2*time.Second), k, false)
	// It gives nothing more until the stream names the token [L1].
	r.ack(1, at(500*ms), true, nil)
	r.push(1, at(600*ms), end(1, at(9*time.Second)))
	r.valid(at(2*time.Second), k, false)
	r.grant(1, at(700*ms), 1, named(k), nil)
	r.valid(at(2*time.Second), k, true)
	if ev := r.answer(1, at(800*ms), 1, k, at(3*time.Second)); len(ev) != 0 {
		t.Errorf("a repeated answer gave %+v", ev)
	}
}

func TestL1StreamBeginsWithACompleteAck(t *testing.T) {
	r := newRig(t)
	k := tok(t, 1, 1)
	r.RequestBegun(sid, 1, res)
	if ev := r.ack(1, at(0), false, []*pb.PartitionEnd{end(1, at(4*time.Second))}, named(k)); len(ev) != 0 {
		t.Errorf("a stream that begins with an incomplete ack gave %+v", ev)
	}
	if ev := r.grant(1, at(10*ms), 1, named(k), end(1, at(4*time.Second))); len(ev) != 0 {
		t.Errorf("a grant before the first ack gave %+v", ev)
	}
	r.valid(at(20*ms), k, false)
}

func TestL1LostWithItsStream(t *testing.T) {
	r, k := held(t)
	r.StreamBroken(r.stream)
	r.valid(at(3*time.Second), k, true) // what was said stays true
	r.stream = r.StreamOpened()
	// A push on the new stream reaches nothing that it has not named.
	r.push(1, at(1*time.Second), end(1, at(9*time.Second)))
	r.valid(at(5*time.Second), k, false)
	// Its first ack names all: what is missing is lost.
	r.only(r.ack(1, at(2*time.Second), true, []*pb.PartitionEnd{end(1, at(9*time.Second))}), Lost)
	r.valid(at(2*time.Second), k, false)
}

func TestL1CompleteAckEndsWhatItDoesNotName(t *testing.T) {
	r, k := held(t)
	r.only(r.ack(1, at(1*time.Second), true, []*pb.PartitionEnd{end(1, at(5*time.Second))}), Lost)
	r.valid(at(1100*ms), k, false)
	// Named again, it is a stranger: release it.
	r.only(r.ack(1, at(2*time.Second), true, []*pb.PartitionEnd{end(1, at(5*time.Second))}, named(k)), Stranger)
	r.valid(at(2100*ms), k, false)
}

func TestL5LowerTermsAreDropped(t *testing.T) {
	r, k := held(t)
	old := r.stream
	r.stream = r.StreamOpened()
	r.ack(2, at(1*time.Second), true, []*pb.PartitionEnd{end(1, at(3*time.Second))}, named(k))
	before := r.Until(sid, res, k)
	for _, on := range []StreamID{old, r.stream} {
		r.Received(at(2*time.Second), on, &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Push{Push: &pb.PartitionPush{
			Partitions: []*pb.PartitionEnd{end(1, at(9*time.Second))},
		}}})
	}
	if got := r.Until(sid, res, k); got != before {
		t.Errorf("a message of term 1 moved the end by %v", got.Sub(before))
	}
	// Nor does an answer to Acquire give validity; the token itself is known.
	r.RequestBegun(sid, 2, res2)
	k2 := tok(t, 1, 2)
	ev := r.AcquireAnswered(at(2*time.Second), at(1900*ms), sid, 2, &pb.AcquireResponse{
		Term: 1, ReceivedAt: leader(at(1900 * ms)), Outcome: &pb.AcquireResponse_Granted{Granted: &pb.Held{
			Resource: res2, Token: uint64(k2), Partition: partName, Until: leader(at(4 * time.Second)),
		}},
	})
	r.only(ev, Granted)
	if r.Table.Valid(at(2*time.Second), sid, res2, k2) {
		t.Error("an answer of an older term gave validity")
	}
}

// The pair must be of the term that the instant names.
func TestL5NewTermNeedsItsOwnPair(t *testing.T) {
	r, k := held(t)
	r.push(2, at(1*time.Second), end(1, at(9*time.Second)))
	if r.NextKeepalive(sid) != 0 {
		t.Error("a new term asks for a keepalive at once")
	}
	r.valid(at(3*time.Second), k, true) // term 1's word stands
	r.valid(at(5*time.Second), k, false)
}

func TestL6TokenOfAnotherEpochIsDead(t *testing.T) {
	r, k := held(t)
	r.push(1, at(1*time.Second), end(2, at(9*time.Second)))
	r.valid(at(3*time.Second), k, true)
	r.valid(at(5*time.Second), k, false)
}

func TestContextEnds(t *testing.T) {
	r, k := held(t)
	until := r.Until(sid, res, k)
	// The partition's end less 100 ms.
	if got, want := r.ContextEnd(sid, res, k), until.Add(-100*ms); got != want {
		t.Errorf("context ends at %v, want %v", got.Sub(t0), want.Sub(t0))
	}
	// Self-kill: two thirds of the TTL after the last acknowledged send.
	r.push(1, at(3*time.Second), end(1, at(60*time.Second)))
	ttl := 10 * time.Second
	if got, want := r.ContextEnd(sid, res, k), at(ttl*2/3); got != want {
		t.Errorf("context ends at %v, want %v", got.Sub(t0), want.Sub(t0))
	}
	if r.Until(sid, res, k) <= at(ttl*2/3) {
		t.Error("validity is longer than the context")
	}
	// A keepalive that is not acknowledged moves nothing.
	r.Table.Keepalive(at(5*time.Second), sid, r.stream)
	if got, want := r.ContextEnd(sid, res, k), at(ttl*2/3); got != want {
		t.Errorf("context ends at %v, want %v", got.Sub(t0), want.Sub(t0))
	}
}

func TestF19ClockGapEndsTheMapping(t *testing.T) {
	r, k := held(t)
	r.RequestBegun(sid, 2, res2)
	before := r.Table.Keepalive(at(1*time.Second), sid, r.stream)
	r.ClockGap(at(1500 * ms))
	r.valid(at(1600*ms), k, false)
	if r.ContextEnd(sid, res, k) != 0 {
		t.Error("a context outlives the gap")
	}
	// What was sent before the gap makes no pair.
	r.Received(at(1600*ms), r.stream, &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Ack{Ack: &pb.Ack{
		SessionId: sid, Sequence: before.Sequence, ReceivedAt: leader(at(1 * time.Second)), SessionUntil: leader(at(11 * time.Second)),
		Partitions: []*pb.PartitionEnd{end(1, at(9*time.Second))},
	}}})
	r.valid(at(1600*ms), k, false)
	if ev := r.AcquireAnswered(at(1700*ms), at(1400*ms), sid, 2, &pb.AcquireResponse{
		Term: 1, ReceivedAt: leader(at(1400 * ms)), Outcome: &pb.AcquireResponse_Granted{Granted: &pb.Held{
			Resource: res2, Token: uint64(tok(t, 1, 2)), Partition: partName, Until: leader(at(3 * time.Second)),
		}},
	}); len(ev) != 1 || r.Table.Valid(at(1800*ms), sid, res2, tok(t, 1, 2)) {
		t.Errorf("an answer to a request sent before the gap: %+v", ev)
	}
	// A new round trip maps the same instants again.
	r.ack(1, at(2*time.Second), false, []*pb.PartitionEnd{end(1, at(9*time.Second))})
	r.valid(at(3*time.Second), k, true)
}

func TestReleasedIsNeverBelievedAgain(t *testing.T) {
	r, k := held(t)
	r.Releasing(at(1*time.Second), sid, res, k)
	r.valid(at(1*time.Second), k, false)
	r.Released(at(1100*ms), sid, res, k)
	r.RequestBegun(sid, 2, res)
	if ev := r.ack(1, at(1200*ms), true, []*pb.PartitionEnd{end(1, at(9*time.Second))}, named(k)); len(ev) != 0 {
		t.Errorf("a released token came back: %+v", ev)
	}
	r.only(r.answer(1, at(1300*ms), 1, k, at(4*time.Second)), Lost)
	r.valid(at(1400*ms), k, false)
	// The next grant is another token.
	k2 := tok(t, 1, 2)
	r.only(r.answer(1, at(1400*ms), 2, k2, at(4*time.Second)), Granted)
	r.valid(at(1500*ms), k2, true)
}

func TestSessionEnd(t *testing.T) {
	r, k := held(t)
	ended := &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Ended{Ended: &pb.SessionEnded{SessionId: sid, Reason: "expired"}}}
	if e := r.only(r.Received(at(1*time.Second), r.stream, ended), SessionEnded); e.Reason != "expired" {
		t.Errorf("%+v", e)
	}
	r.valid(at(1*time.Second), k, false)
	if r.Table.Keepalive(at(1*time.Second), sid, r.stream) != nil {
		t.Error("a keepalive for an ended session")
	}
}

func TestDetachDropsLateAcks(t *testing.T) {
	r, k := held(t)
	late := r.Table.Keepalive(at(1*time.Second), sid, r.stream)
	r.DetachSession(sid)
	r.valid(at(1*time.Second), k, false)
	r.Received(at(1100*ms), r.stream, &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Ack{Ack: &pb.Ack{
		SessionId: sid, Sequence: late.Sequence, ReceivedAt: leader(at(1 * time.Second)), SessionUntil: leader(at(11 * time.Second)),
		Complete: true, Held: []*pb.Held{named(k)}, Partitions: []*pb.PartitionEnd{end(1, at(9*time.Second))},
	}}})
	r.valid(at(1200*ms), k, false)
}

func TestRequestFailed(t *testing.T) {
	r := newRig(t)
	r.RequestBegun(sid, 1, res)
	failed := &pb.AttachResponse{Term: 1, Kind: &pb.AttachResponse_Failed{Failed: &pb.RequestFailed{
		SessionId: sid, RequestId: 1, Error: &pb.ErrorDetail{Kind: &pb.ErrorDetail_Moved{Moved: &pb.Moved{Partition: partName}}},
	}}}
	if e := r.only(r.Received(at(0), r.stream, failed), RequestFailed); e.Resource != res || e.Err.GetMoved() == nil {
		t.Errorf("%+v", e)
	}
	if ev := r.Received(at(0), r.stream, failed); len(ev) != 0 {
		t.Errorf("failed twice: %+v", ev)
	}
}

func TestPollForgetsFloors(t *testing.T) {
	r, k := held(t)
	r.Releasing(at(1*time.Second), sid, res, k)
	r.Poll(at(40 * time.Second))
	if len(r.sessions[sid].floors) != 1 {
		t.Error("a release under way is remembered")
	}
	r.Released(at(40*time.Second), sid, res, k)
	r.Poll(at(71 * time.Second))
	if len(r.sessions[sid].floors) != 0 {
		t.Error("the floor outlives all that could name the token")
	}
}

func TestConfig(t *testing.T) {
	if err := (Config{DriftPPM: -1}).Validate(); err == nil {
		t.Error("negative drift is valid")
	}
	if err := (Config{}).Validate(); err != nil {
		t.Error(err)
	}
}

// A drain's withdrawal may reach beyond what is promised: keepalives and pushes
// prolong the validity up to its end, and no further.
func TestADrainedLeaseIsProlongedUpToItsEnd(t *testing.T) {
	r, k := held(t)
	e := r.only(r.withdraw(1, at(100*ms), k, leader(at(9*time.Second))), Withdrawn)
	if e.Until < at(8500*ms) || e.Until > at(9*time.Second) {
		t.Fatalf("withdrawn until %v", e.Until.Sub(t0))
	}
	r.valid(at(5*time.Second), k, false)
	r.ack(1, at(4*time.Second), false, nil)
	r.push(1, at(4500*ms), end(1, at(8*time.Second)))
	r.valid(at(7*time.Second), k, true)
	r.push(1, at(8*time.Second), end(1, at(12*time.Second)))
	r.valid(at(8800*ms), k, true)
	r.valid(at(9*time.Second), k, false)
	if end := r.ContextEnd(sid, res, k); end != 0 {
		t.Errorf("the holder is told to stop at %v, want at once", end.Sub(t0))
	}
}
