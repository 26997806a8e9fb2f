package vote

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// TestH3NothingIsAnsweredWhileAPromiseIsPending: from the V2 check until the
// promise's fate is known, no Accept and no renewal of that register.
func TestH3NothingIsAnsweredWhileAPromiseIsPending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		if a, err := g.accept(t.Context(), 3, "eu", own, 1); err != nil || a.GetRefusal() != nil {
			t.Fatalf("%v, %v", a, err)
		}
		time.Sleep(d) // eu's lease is over here, so V2 passes for us
		g.hold = make(chan struct{})
		promised := make(chan *pb.PrepareAnswer, 1)
		go func() {
			p, err := g.prepare(t.Context(), 5, false)
			if err != nil {
				t.Error(err)
			}
			promised <- p
		}()
		synctest.Wait()
		for _, c := range []struct {
			what  string
			round uint64
		}{{"renewal", 3}, {"Accept", 4}, {"Accept above the promise", 9}} {
			a, err := g.accept(t.Context(), c.round, "eu", own, 1)
			if err != nil || a.GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_PENDING {
				t.Errorf("%s while a promise is pending: %v, %v", c.what, a, err)
			}
		}
		close(g.hold)
		if p := <-promised; p.GetRefusal() != nil {
			t.Errorf("promise: %v", p)
		}
		synctest.Wait()
		if a, _ := g.accept(t.Context(), 3, "eu", own, 1); a.GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_V1_BALLOT {
			t.Errorf("renewal after the promise: %v", a)
		}
	})
}

// TestH3ARenewalUnderCheckLosesToAPromise: the check of a renewal began first,
// the promise came meanwhile; the renewal must not be answered.
func TestH3ARenewalUnderCheckLosesToAPromise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		if a, err := g.accept(t.Context(), 3, "eu", own, 1); err != nil || a.GetRefusal() != nil {
			t.Fatalf("%v, %v", a, err)
		}
		time.Sleep(d)
		g.checks = make(chan struct{})
		renewed := make(chan *pb.AcceptAnswer, 1)
		go func() {
			a, err := g.accept(t.Context(), 3, "eu", own, 1)
			if err != nil {
				t.Error(err)
			}
			renewed <- a
		}()
		synctest.Wait()
		if p, err := g.prepare(t.Context(), 5, false); err != nil || p.GetRefusal() != nil {
			t.Fatalf("promise: %v, %v", p, err)
		}
		close(g.checks)
		if a := <-renewed; a.GetRefusal() == nil {
			t.Error("the renewal was answered although a promise had passed V2 on the old clock")
		}
	})
}

// TestH3AnUnknownFateLastsUntilTheTermEnds: a promise whose commit is neither
// known to be applied nor to be lost keeps the register closed.
func TestH3AnUnknownFateLastsUntilTheTermEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		g.hold, g.fate = make(chan struct{}), errLost
		close(g.hold)
		if _, err := g.prepare(t.Context(), 5, false); !errors.Is(err, errLost) {
			t.Fatal(err)
		}
		g.mu.Lock()
		g.hold, g.fate = nil, nil
		g.mu.Unlock()
		if a, _ := g.accept(t.Context(), 3, "eu", own, 1); a.GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_PENDING {
			t.Errorf("Accept while the fate is unknown: %v", a)
		}
		g.elect()
		if a, err := g.accept(t.Context(), 3, "eu", own, 1); err != nil || a.GetRefusal() != nil {
			t.Errorf("Accept in the next term: %v, %v", a, err)
		}
	})
}

// TestH3ACallerThatGaveUpDoesNotFreeTheRegister: the promise is still in
// flight when its caller's deadline passes.
func TestH3ACallerThatGaveUpDoesNotFreeTheRegister(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		hold := make(chan struct{})
		g.hold = hold
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := g.prepare(ctx, 5, false); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		if a, _ := g.accept(t.Context(), 3, "eu", own, 1); a.GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_PENDING {
			t.Errorf("Accept while the promise is in flight: %v", a)
		}
		close(hold)
		synctest.Wait()
		g.mu.Lock()
		g.hold = nil
		g.mu.Unlock()
		if a, _ := g.accept(t.Context(), 3, "eu", own, 1); a.GetRefusal().GetRule() != pb.RefusalRule_REFUSAL_RULE_V1_BALLOT {
			t.Errorf("Accept below the promise that committed: %v", a)
		}
	})
}

func TestF30AStalePulseAnswersNoRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		if _, err := g.accept(t.Context(), 3, "eu", own, 1); err != nil {
			t.Fatal(err)
		}
		g.mu.Lock()
		g.stale = true
		g.mu.Unlock()
		if a, err := g.accept(t.Context(), 3, "eu", own, 1); err == nil {
			t.Fatalf("renewal answered: %v", a)
		}
	})
}

func TestACheckOfAnotherTermRenewsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		if _, err := g.accept(t.Context(), 3, "eu", own, 1); err != nil {
			t.Fatal(err)
		}
		g.mu.Lock()
		g.term++ // elected again, tables not built yet
		g.mu.Unlock()
		if a, err := g.accept(t.Context(), 3, "eu", own, 1); !errors.Is(err, errDeposed) {
			t.Fatalf("%v, %v", a, err)
		}
		g.voter.Deposed(9)
		if _, err := g.prepare(t.Context(), 5, false); !errors.Is(err, ErrNotLeading) {
			t.Fatal(err)
		}
	})
}

// An Accept that comes while its own Prepare's promise is being committed waits
// for that and is taken: others have made the majority meanwhile, and do not ask
// again.
func TestH3AnAcceptWaitsForAPromiseThatIsPending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t, nil)
		g.hold = make(chan struct{})
		go func() { _, _ = g.prepare(t.Context(), 5, false) }()
		synctest.Wait()
		answer := make(chan *pb.AcceptAnswer, 1)
		go func() {
			a, err := g.accept(t.Context(), 5, "us", rival, 1)
			if err != nil {
				t.Error(err)
			}
			answer <- a
		}()
		synctest.Wait()
		select {
		case a := <-answer:
			t.Fatalf("answered while the promise is pending: %v", a)
		default:
		}
		close(g.hold)
		if a := <-answer; a.GetRefusal() != nil {
			t.Errorf("after the promise: %v", a)
		}
	})
}
