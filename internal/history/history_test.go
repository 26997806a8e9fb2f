package history

import (
	"reflect"
	"strings"
	"testing"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const ms = time.Millisecond

// script builds a history of one lock by hand. Calls take 1 ms each.
type script struct {
	h   History
	now time.Duration
}

func (s *script) op(o Op) *script {
	s.now += 10 * ms
	o.Call, o.Resource = s.now, "lock/x"
	if o.Return != Never {
		o.Return = s.now + ms
	}
	if o.Answer.Code == "" {
		o.Answer.Code = OK
	}
	s.h.Ops = append(s.h.Ops, &o)
	return s
}

func (s *script) open(session string) *script {
	return s.op(Op{Kind: Open, Client: session, Answer: Answer{Session: session, TTL: time.Second}})
}

func (s *script) acquire(session string, id uint64, wait bool, a Answer) *script {
	return s.op(Op{Kind: Acquire, Client: session, Session: session, Request: id, Lowest: 1, Wait: wait, Answer: a})
}

func (s *script) granted(session string, id, token uint64) *script {
	return s.acquire(session, id, true, Answer{Granted: true, Token: token})
}

// delayed and valued are granted with a lock delay, or a value.
func (s *script) delayed(session string, id, token uint64, delay time.Duration) *script {
	s.granted(session, id, token).h.Ops[len(s.h.Ops)-1].Delay = delay
	return s
}

func (s *script) valued(session string, id, token uint64, value string) *script {
	s.granted(session, id, token).h.Ops[len(s.h.Ops)-1].Value = value
	return s
}

func (s *script) queued(session string, id uint64, ahead uint32) *script {
	return s.acquire(session, id, true, Answer{Queued: true, Ahead: ahead})
}

func (s *script) lost(o Op) *script {
	o.Return, o.Answer = Never, Answer{Code: Unknown}
	return s.op(o)
}

func (s *script) release(session string, token uint64, c Code) *script {
	return s.op(Op{Kind: Release, Client: session, Session: session, Token: token, Answer: Answer{Code: c}})
}

func (s *script) get(session string, token uint64, waiters uint32) *script {
	return s.op(Op{Kind: Get, Client: "reader", Answer: Answer{Session: session, Token: token, Waiters: waiters}})
}

func (s *script) heard(client string, m *pb.AttachResponse) *script {
	s.now += 10 * ms
	m.Term = 1
	s.h.Messages = append(s.h.Messages, Message{At: s.now, Client: client, Heard: m})
	return s
}

func (s *script) offer(session string, id, token uint64) *script {
	return s.heard(session, &pb.AttachResponse{Kind: &pb.AttachResponse_Grant{Grant: &pb.Grant{
		SessionId: session, RequestId: id, Held: &pb.Held{Resource: "lock/x", Token: token, Until: int64(s.now + time.Second)},
	}}})
}

// ack names tokens as held, all there are.
func (s *script) ack(session string, until time.Duration, tokens ...uint64) *script {
	a := &pb.Ack{SessionId: session, SessionUntil: int64(until), ReceivedAt: int64(s.now), Complete: true, Partitions: []*pb.PartitionEnd{{Until: int64(until)}}}
	for _, t := range tokens {
		a.Held = append(a.Held, &pb.Held{Resource: "lock/x", Token: t})
	}
	return s.heard(session, &pb.AttachResponse{Kind: &pb.AttachResponse_Ack{Ack: a}})
}

// lasting makes the last call take so long.
func (s *script) lasting(d time.Duration) *script {
	o := s.h.Ops[len(s.h.Ops)-1]
	o.Return = o.Call + d
	return s
}

func (s *script) wait(d time.Duration) *script { s.now += d; return s }

func (s *script) fact(f Fact) *script {
	s.now += 10 * ms
	f.At, f.Index = s.now, uint64(len(s.h.Facts)+1)
	switch f.Kind {
	case SessionClosed, DrainBegun, DrainEnded, TermBegun:
	default:
		f.Resource = "lock/x"
	}
	s.h.Facts = append(s.h.Facts, f)
	return s
}

func start() *script { return (&script{}).open("a").open("b").open("c") }

func clocks(_ uint64, at int64) time.Duration { return time.Duration(at) }

func TestHistoriesThatTheDesignAllows(t *testing.T) {
	for name, s := range map[string]*script{
		"one after the other": start().granted("a", 1, 10).get("a", 10, 0).release("a", 10, OK).get("", 0, 0).granted("b", 1, 11),
		"handed over in order": start().granted("a", 1, 10).queued("b", 1, 0).queued("c", 1, 1).release("a", 10, OK).
			offer("b", 1, 11).release("b", 11, OK).offer("c", 1, 12).release("c", 12, OK).get("", 0, 0),
		"an answer that was lost, repeated": start().lost(Op{Kind: Acquire, Session: "a", Request: 1, Lowest: 1}).granted("a", 1, 10).granted("a", 1, 10),
		"a release without answer": start().granted("a", 1, 10).lost(Op{Kind: Release, Session: "a", Token: 10}).
			granted("b", 1, 11).release("a", 10, NotHolder),
		"a call that came never": start().lost(Op{Kind: Acquire, Session: "a", Request: 1, Lowest: 1, Wait: true}).granted("b", 1, 10).get("b", 10, 0),
		"a call that came late": start().granted("b", 1, 10).lost(Op{Kind: Acquire, Session: "a", Request: 1, Lowest: 1, Wait: true}).
			get("b", 10, 0).get("b", 10, 1),
		"a session that expired": start().granted("a", 1, 10).ack("a", 100*ms, 10).queued("b", 1, 0).wait(time.Second).
			offer("b", 1, 11).acquire("a", 2, true, Answer{Code: SessionExpired}),
		"an offer that lapsed": start().granted("a", 1, 10).queued("b", 1, 0).queued("c", 1, 1).release("a", 10, OK).
			wait(2*time.Second).offer("c", 1, 12).ack("c", time.Hour, 12),
		"a request id that was used": start().granted("a", 1, 10).release("a", 10, OK).acquire("a", 1, true, Answer{Code: Stale}),
		"facts that explain": start().granted("a", 1, 10).lost(Op{Kind: Acquire, Session: "b", Request: 1, Lowest: 1, Wait: true}).
			fact(Fact{Kind: Queued, Session: "b", Request: 1}).get("a", 10, 1).fact(Fact{Kind: SessionClosed, Session: "a"}).get("b", 11, 0),
		"a drain, taken back": start().granted("a", 1, 10).queued("b", 1, 0).fact(Fact{Kind: DrainBegun}).
			fact(Fact{Kind: Revoked, Session: "a", Token: 10}).lost(Op{Kind: Acquire, Session: "c", Request: 1, Lowest: 1, Wait: true}).
			release("a", 10, OK).get("", 0, 0).fact(Fact{Kind: DrainEnded}).fact(Fact{Kind: Granted, Session: "b", Request: 1, Token: 11, Offered: true}).
			get("b", 11, 0),
		"a drain's revocation that comes after it was taken back": start().granted("a", 1, 10).fact(Fact{Kind: Granted, Session: "a", Request: 1, Token: 10}).
			lasting(20*ms).fact(Fact{Kind: DrainBegun}).fact(Fact{Kind: DrainEnded}).
			fact(Fact{Kind: Revoked, Session: "a", Token: 10}).release("a", 10, OK),
		"a waiter that a drain sends away": start().granted("a", 1, 10).queued("b", 1, 0).fact(Fact{Kind: DrainBegun}).
			fact(Fact{Kind: LeftQueue, Session: "b", Request: 1}).get("a", 10, 0),
		"a lock delay": start().delayed("a", 1, 10, time.Second).queued("b", 1, 0).fact(Fact{Kind: SessionClosed, Session: "a", Reason: ByExpiry}).
			fact(Fact{Kind: DelayBegun, Token: 10, Delay: time.Second}).acquire("c", 1, false, Answer{Busy: true, Waiters: 1}).
			wait(time.Second).fact(Fact{Kind: DelayEnded, Token: 10}).fact(Fact{Kind: Granted, Session: "b", Request: 1, Token: 11, Offered: true}),
		"a release without a lock delay": start().delayed("a", 1, 10, time.Second).release("a", 10, OK).granted("b", 1, 11),
		"a lost try that took effect while its repeat was under way": start().granted("a", 1, 10).queued("c", 1, 0).
			lost(Op{Kind: Acquire, Session: "b", Request: 1, Lowest: 1, Wait: true}).
			queued("b", 1, 0).lasting(60*ms).fact(Fact{Kind: Queued, Session: "b", Request: 1}).get("a", 10, 2).release("a", 10, OK).
			fact(Fact{Kind: Granted, Session: "c", Request: 1, Token: 11, Offered: true}).get("c", 11, 1),
		"an offer that meets its session's Close": offeredInClose(),
		"a Close that meets an expiry": start().granted("a", 1, 10).op(Op{Kind: Close, Client: "a", Session: "a"}).lasting(20*ms).
			fact(Fact{Kind: SessionClosed, Session: "a", Reason: ByExpiry}).get("", 0, 0).granted("b", 1, 11),
		"a try of before a drain, repeated in it": start().granted("a", 1, 10).lost(Op{Kind: Acquire, Session: "b", Request: 1, Lowest: 1}).
			fact(Fact{Kind: DrainBegun}).acquire("b", 1, false, Answer{Busy: true, Token: 10}),
	} {
		if v := Check(s.h, Config{Clocks: clocks}); !v.OK() {
			t.Errorf("%s: %v", name, v)
		}
	}
}

// offeredInClose: a lets its session go while a grant is on its way to it, and
// hears of the grant before the answer. It goes on to b.
func offeredInClose() *script {
	return start().granted("c", 1, 9).ack("a", time.Hour).ack("b", time.Hour).queued("a", 1, 0).queued("b", 1, 1).release("c", 9, OK).
		op(Op{Kind: Close, Client: "a", Session: "a"}).lasting(15*ms).offer("a", 1, 10).offer("b", 1, 11)
}

func TestI3ASessionThatItsClientClosedGrantsNothing(t *testing.T) {
	s := offeredInClose()
	s.h.Beliefs = []Belief{{At: s.now - 5*ms, Client: "a", Session: "a", Resource: "lock/x", Token: 10}}
	if v := Check(s.h, Config{Clocks: clocks}); !strings.Contains(v.String(), "I3") {
		t.Errorf("%v", v)
	}
}

func TestHistoriesThatTheDesignForbids(t *testing.T) {
	for name, s := range map[string]*script{
		"two holders":             start().granted("a", 1, 10).ack("a", time.Hour, 10).granted("b", 1, 11),
		"a token twice":           start().granted("a", 1, 10).release("a", 10, OK).granted("b", 1, 10),
		"a lower token (I2)":      start().granted("a", 1, 10).release("a", 10, OK).granted("b", 1, 9),
		"a lost grant (I6)":       start().granted("a", 1, 10).get("", 0, 0).get("a", 10, 0),
		"a lost place (I6)":       start().granted("a", 1, 10).queued("b", 1, 0).ack("b", time.Hour).get("a", 10, 0),
		"out of turn":             start().granted("a", 1, 10).queued("b", 1, 0).queued("c", 1, 1).release("a", 10, OK).offer("c", 1, 11).offer("b", 1, 12),
		"a stale read":            start().granted("a", 1, 10).release("a", 10, OK).get("a", 10, 0),
		"a request granted twice": start().granted("a", 1, 10).release("a", 10, OK).granted("a", 1, 11),
		"released by another":     start().granted("a", 1, 10).release("b", 10, OK),
		"released by an old token": start().granted("a", 1, 10).release("a", 10, OK).granted("a", 2, 11).
			release("a", 10, OK),
		"a session ended that lives": start().granted("a", 1, 10).acquire("a", 2, false, Answer{Code: SessionExpired}).release("a", 10, OK),
		"expired before its promise (I3)": start().granted("a", 1, 10).ack("a", time.Hour, 10).queued("b", 1, 0).wait(time.Second).
			offer("b", 1, 11),
		"a confirmed offer that lapsed (F23)": start().granted("a", 1, 10).queued("b", 1, 0).queued("c", 1, 1).release("a", 10, OK).
			offer("b", 1, 11).ack("b", time.Hour, 11).wait(2*time.Second).offer("c", 1, 12),
		"a fact that nobody asked for": start().granted("a", 1, 10).fact(Fact{Kind: Ended, Session: "a", Token: 10, Reason: ByRelease}),
		"a try in a drain":             start().granted("a", 1, 10).fact(Fact{Kind: DrainBegun}).acquire("b", 1, false, Answer{Busy: true, Token: 10}),
		"a grant in a drain (F26)":     start().fact(Fact{Kind: DrainBegun}).granted("a", 1, 10),
		"a hand-over in a drain (F26)": start().granted("a", 1, 10).queued("b", 1, 0).fact(Fact{Kind: DrainBegun}).release("a", 10, OK).
			fact(Fact{Kind: Granted, Session: "b", Request: 1, Token: 11, Offered: true}),
		"a revocation that only a drain of before explains": start().fact(Fact{Kind: DrainBegun}).fact(Fact{Kind: DrainEnded}).granted("a", 1, 10).
			lasting(20 * ms).fact(Fact{Kind: Granted, Session: "a", Request: 1, Token: 10}).fact(Fact{Kind: Revoked, Session: "a", Token: 10}),
		"a revocation of a later term than the drain that was taken back": start().granted("a", 1, 10).fact(Fact{Kind: Granted, Session: "a", Request: 1, Token: 10}).
			lasting(20*ms).fact(Fact{Kind: DrainBegun}).fact(Fact{Kind: DrainEnded}).fact(Fact{Kind: TermBegun}).fact(Fact{Kind: Revoked, Session: "a", Token: 10}).
			release("a", 10, OK),
		"a waiter that an aborted drain sends away": start().granted("a", 1, 10).queued("b", 1, 0).fact(Fact{Kind: DrainBegun}).
			fact(Fact{Kind: DrainEnded}).fact(Fact{Kind: LeftQueue, Session: "b", Request: 1}),
		"a grant in a lock delay (I6)": start().delayed("a", 1, 10, time.Second).fact(Fact{Kind: SessionClosed, Session: "a", Reason: ByExpiry}).
			fact(Fact{Kind: DelayBegun, Token: 10, Delay: time.Second}).granted("b", 1, 11),
		"a lock delay cut short (I6)": start().delayed("a", 1, 10, time.Second).fact(Fact{Kind: SessionClosed, Session: "a", Reason: ByExpiry}).
			fact(Fact{Kind: DelayBegun, Token: 10, Delay: time.Second}).wait(900*ms).fact(Fact{Kind: DelayEnded, Token: 10}).granted("b", 1, 11),
		"a value of before": start().valued("a", 1, 10, "x").release("a", 10, OK).granted("b", 1, 11).
			op(Op{Kind: Get, Client: "reader", Answer: Answer{Session: "b", Token: 11, Value: "x"}}),
		"an expiry before its time": start().granted("a", 1, 10).ack("a", time.Hour, 10).fact(Fact{Kind: SessionClosed, Session: "a"}),
	} {
		if v := Check(s.h, Config{Clocks: clocks}); v.OK() {
			t.Errorf("%s: passed", name)
		}
	}
}

func TestI4TwoMayNotBelieve(t *testing.T) {
	s := start().granted("a", 1, 10).ack("a", time.Hour, 10).ack("b", time.Hour, 11)
	if v := Check(s.h, Config{Clocks: clocks}); !strings.Contains(v.String(), "I4") {
		t.Errorf("%v", v)
	}
}

func TestF8BeliefBeyondWhatWasSaid(t *testing.T) {
	s := start().granted("a", 1, 10).ack("a", 100*ms, 10)
	for at, ok := range map[time.Duration]bool{s.now + ms: true, 99 * ms: true, 101 * ms: false} {
		h := s.h
		h.Beliefs = []Belief{{At: at, Session: "a", Resource: "lock/x", Token: 10}}
		if v := Check(h, Config{Clocks: clocks}); v.OK() != ok {
			t.Errorf("at %v: %v", at, v)
		}
	}
}

// Validity of a stream reaches only the tokens that it has named.
func TestF9BeliefInATokenThatTheStreamDidNotName(t *testing.T) {
	s := start().op(Op{Kind: Acquire, Client: "a", Session: "a", Request: 1, Lowest: 1, Answer: Answer{Granted: true, Token: 10, Until: int64(50 * ms)}})
	s.ack("a", time.Hour)
	s.h.Beliefs = []Belief{{At: 60 * ms, Client: "a", Session: "a", Resource: "lock/x", Token: 10}}
	if v := Check(s.h, Config{Clocks: clocks}); !strings.Contains(v.String(), "I3") {
		t.Errorf("%v", v)
	}
}

func TestSavedHistoriesAreReadBack(t *testing.T) {
	h := start().granted("a", 1, 10).granted("b", 1, 11).ack("a", time.Hour, 10).fact(Fact{Kind: SessionClosed, Session: "a"}).h
	dir := t.TempDir()
	if err := Save(dir, h, Check(h, Config{})); err != nil {
		t.Fatal(err)
	}
	back, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(back.Ops) != len(h.Ops) || len(back.Messages) != 1 || !reflect.DeepEqual(back.Facts, h.Facts) ||
		back.Messages[0].Heard.GetAck().GetHeld()[0].GetToken() != 10 {
		t.Errorf("%+v", back)
	}
}

// An answer and a stream that speaks for a newer term may come at one instant: a
// client that took the answer first believes it.
func TestI3AnAnswerBesideANewerTerm(t *testing.T) {
	s := start()
	s.op(Op{Kind: Acquire, Client: "a", Session: "a", Request: 1, Lowest: 1, Answer: Answer{Granted: true, Token: 10, Until: int64(time.Second)}})
	s.ack("a", time.Hour, 10)
	m := &s.h.Messages[0]
	m.At, m.Heard.Term = s.h.Ops[len(s.h.Ops)-1].Return, 2
	m.Heard.GetAck().Partitions = nil
	s.h.Beliefs = []Belief{{At: m.At + ms, Client: "a", Session: "a", Resource: "lock/x", Token: 10}}
	if v := Check(s.h, Config{Clocks: clocks}); !v.OK() {
		t.Errorf("at one instant: %v", v)
	}
	m.At -= ms / 2
	if v := Check(s.h, Config{Clocks: clocks}); !strings.Contains(v.String(), "I3") {
		t.Errorf("after the newer term: %v", v)
	}
}

// A leader's clock may be fast and a client's slow, each by ρ. What is left of a
// validity is told by the newest pair of stamps, also of what was said before it.
func TestBeliefByDriftingClocks(t *testing.T) {
	const rho = 0.01
	shown := func(at time.Duration) int64 { return int64(float64(at) * (1 + rho)) }
	cfg := Config{Share: (1 - 2*rho) / (1 - rho), Clocks: func(_ uint64, at int64) time.Duration { return time.Duration(float64(at) / (1 + rho)) }}
	s := start().granted("a", 1, 10)
	ack := func(left time.Duration) {
		a := &pb.Ack{SessionId: "a", SessionUntil: shown(s.now + time.Hour), ReceivedAt: shown(s.now), Complete: true, Held: []*pb.Held{{Resource: "lock/x", Token: 10}}}
		if left > 0 {
			a.Partitions = []*pb.PartitionEnd{{Until: a.ReceivedAt + int64(left)}}
		}
		s.heard("a", &pb.AttachResponse{Kind: &pb.AttachResponse_Ack{Ack: a}})
	}
	first := s.now
	ack(time.Second)
	believed := func(at time.Duration) bool {
		h := s.h
		h.Beliefs = []Belief{{At: at, Client: "a", Session: "a", Resource: "lock/x", Token: 10}}
		return Check(h, cfg).OK()
	}
	if !believed(first+989*ms) || believed(first+990*ms) {
		t.Errorf("of a second from %v: belief after 989 ms: %v, after 990 ms: %v", first, believed(first+989*ms), believed(first+990*ms))
	}
	s.wait(800 * ms)
	second := s.now - first // of which the leader's clock has shown 1 % more
	ack(0)
	left := time.Duration(float64(time.Second-time.Duration(shown(second))) * cfg.Share)
	if end := first + second + left; !believed(end-ms) || believed(end+ms) || end < first+989*ms {
		t.Errorf("with a second stamp the end is at %v: belief before %v, after %v", end-first, believed(end-ms), believed(end+ms))
	}
}

// hard is a history without an order whose search takes long: nobody knows which
// of n acquires took effect, and the last token is too low for all of them.
func hard(n uint64) History {
	s := start()
	for id := range n {
		s.lost(Op{Kind: Acquire, Session: "a", Request: id + 1, Lowest: 1, Wait: true})
		s.lost(Op{Kind: Acquire, Session: "b", Request: id + 1, Lowest: 1, Wait: true})
	}
	return s.granted("c", 1, 10).release("c", 10, OK).granted("c", 2, 9).h
}

// A search that is too long is left undecided, after the same work on any machine.
func TestASearchIsBoundedByItsWork(t *testing.T) {
	for _, c := range []struct {
		steps uint64
		want  bool // decided
	}{{0, true}, {1_000_000, true}, {50, false}} {
		v := Check(hard(3), Config{Clocks: clocks, Steps: c.steps})
		if decided := len(v.Disordered) == 1 && len(v.Undecided) == 0; v.OK() || decided != c.want {
			t.Errorf("%d steps: %v", c.steps, v)
		}
	}
}
