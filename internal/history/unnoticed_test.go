package history

import (
	"math/rand/v2"
	"testing"
)

// TestManyUnnoticedRequests: the holder has asked again and again, nobody knows
// what came of it, and a later answer shows which request the lease was of.
func TestManyUnnoticedRequests(t *testing.T) {
	after := func(answer Answer) History {
		s := start().granted("a", 1, 10).lasting(15 * ms).fact(Fact{Kind: Granted, Session: "a", Request: 1, Token: 10})
		for id := range uint64(40) {
			s.lost(Op{Kind: Acquire, Client: "a", Session: "a", Request: id + 2, Lowest: 1, Wait: true})
		}
		return s.granted("a", 100, 10).granted("a", 101, 10).acquire("a", 100, true, answer).release("a", 10, OK).get("", 0, 0).h
	}
	const steps = 100_000
	if v := Check(after(Answer{Code: Stale}), Config{Clocks: clocks, Steps: steps}); !v.OK() {
		t.Error(v)
	}
	if v := Check(after(Answer{Granted: true, Token: 11}), Config{Clocks: clocks, Steps: steps}); len(v.Disordered) != 1 {
		t.Errorf("the lease had two tokens: %v", v)
	}
}

// TestUnnoticedRequestsChangeNoVerdict compares verdicts on random histories, right
// ones and wrong ones, with those of a search that tells all requests apart.
func TestUnnoticedRequestsChangeNoVerdict(t *testing.T) {
	sound := 0
	const histories = 3000
	for seed := range uint64(histories) {
		h := unansweredRequests(rand.New(rand.NewPCG(seed, 1)))
		merged, apart := Check(h, Config{Clocks: clocks}), Check(h, Config{Clocks: clocks, apart: true})
		if merged.OK() != apart.OK() {
			for _, op := range h.Ops {
				t.Log(describe(&input{Op: op}))
			}
			t.Fatalf("seed %d: merged: %v, apart: %v", seed, merged, apart)
		}
		if merged.OK() {
			sound++
		}
	}
	t.Logf("%d of %d histories are sound", sound, histories)
	if sound < histories/20 || sound > histories*19/20 {
		t.Errorf("%d of %d histories are sound: too many of one kind show nothing", sound, histories)
	}
}

// unansweredRequests is a short history of a lock whose holder asks for it again,
// often without an answer.
func unansweredRequests(rng *rand.Rand) History {
	s := start().granted("a", 1, 10).lasting(15 * ms).fact(Fact{Kind: Granted, Session: "a", Request: 1, Token: 10})
	id := func() uint64 { return 1 + rng.Uint64N(6) }
	waiting := uint64(0)
	for range 9 {
		switch rng.IntN(9) {
		case 0, 1, 2:
			s.lost(Op{Kind: Acquire, Client: "a", Session: "a", Request: id(), Lowest: 1, Wait: true, Value: []string{"", "", "", "v"}[rng.IntN(4)]})
		case 3:
			s.granted("a", id(), 10)
		case 4:
			s.acquire("a", id(), true, Answer{Code: Stale})
		case 5:
			s.op(Op{Kind: Cancel, Client: "a", Session: "a", Request: id(), Answer: Answer{Token: []uint64{0, 10}[rng.IntN(2)]}})
		case 6:
			s.get("a", 10, uint32(waiting))
		case 7:
			waiting++
			s.acquire("b", waiting, true, Answer{Queued: true, Ahead: uint32(waiting - 1)}).lasting(15 * ms)
			s.fact(Fact{Kind: Queued, Session: "b", Request: waiting})
		case 8:
			s.offer("a", id(), 10)
		}
	}
	return s.release("a", 10, OK).h
}
