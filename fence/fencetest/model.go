// Package fencetest is the test that every fence guard must pass: two holders in random
// interleavings beside a model of marks and data.
package fencetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/headlease/headlease/fence"
)

// Subject is a guard with a value of each resource that it guards. It must be safe for
// concurrent use.
type Subject interface {
	// Claim raises the mark.
	Claim(ctx context.Context, resource string, token fence.Token) error
	// Write sets the resource's value under the guard.
	Write(ctx context.Context, resource string, token fence.Token, value string) error
	// Value returns the resource's value; empty if there is none.
	Value(ctx context.Context, resource string) (string, error)
}

// Interleavings of Run: a thousand.
const Interleavings = 1000

// Run checks the subject with a thousand interleavings, and with holders that run beside
// each other. Resources are named by prefix and a number; none of them may have a mark before.
func Run(t *testing.T, s Subject, prefix string) {
	t.Helper()
	for seed := range uint64(Interleavings) {
		if err := interleave(t.Context(), s, fmt.Sprintf("%s%d", prefix, seed), seed); err != nil {
			t.Fatalf("interleaving %d: %v", seed, err)
		}
	}
	for round := range uint64(20) {
		if err := beside(t.Context(), s, fmt.Sprintf("%sbeside%d", prefix, round), round); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
	}
}

// model of one resource.
type model struct {
	mark  fence.Token
	value string
}

// judge returns the error that the model wants of a call, and says whether the call has an
// effect.
func (m *model) judge(token fence.Token, claims bool, got error) (ok bool, err error) {
	var stale *fence.StaleError
	var unclaimed *fence.UnclaimedError
	switch {
	case m.mark == 0 && !claims:
		if !errors.As(got, &unclaimed) {
			return false, fmt.Errorf("token %s without a mark: %s, want an UnclaimedError", token, fmt.Sprint(got))
		}
		return false, nil
	case token < m.mark:
		if !errors.As(got, &stale) || stale.Seen != m.mark || stale.Given != token {
			return false, fmt.Errorf("token %s below mark %s: %s, want a StaleError that says so", token, m.mark, fmt.Sprint(got))
		}
		return false, nil
	case got != nil:
		return false, fmt.Errorf("token %s at mark %s: %w", token, m.mark, got)
	}
	m.mark = token
	return true, nil
}

// interleave runs the steps of two holders, which take the resource from each other, in a
// random order; each may go on with a token that has passed on.
func interleave(ctx context.Context, s Subject, resource string, seed uint64) error {
	random := rand.New(rand.NewPCG(seed, 1))
	var m model
	var held [2]fence.Token
	seq := fence.Seq(0)
	for step := range 4 + random.IntN(6) {
		h := random.IntN(2)
		if held[h] == 0 || random.IntN(4) == 0 { // a grant: above all before
			seq++
			epoch := fence.Epoch(1)
			if random.IntN(3) == 0 {
				epoch = fence.MaxEpoch // tokens that a double must still tell apart
			}
			token, err := fence.NewToken(max(epoch, held[0].Epoch(), held[1].Epoch()), seq)
			if err != nil {
				return err
			}
			held[h] = token
		}
		if random.IntN(3) == 0 {
			if _, err := m.judge(held[h], true, s.Claim(ctx, resource, held[h])); err != nil {
				return fmt.Errorf("step %d, claim of holder %d: %w", step, h, err)
			}
			continue
		}
		value := fmt.Sprintf("%d by %d", step, h)
		ok, err := m.judge(held[h], false, s.Write(ctx, resource, held[h], value))
		if err != nil {
			return fmt.Errorf("step %d, write of holder %d: %w", step, h, err)
		}
		if ok {
			m.value = value
		}
		if got, err := s.Value(ctx, resource); err != nil || got != m.value {
			return fmt.Errorf("step %d: the value is %q, %w; want %q", step, got, err, m.value)
		}
	}
	return nil
}

// beside has an older holder write while a newer one claims: what the newer reads after its
// claim is changed by nobody but itself [F15].
func beside(ctx context.Context, s Subject, resource string, seed uint64) error {
	low, err := fence.NewToken(1, fence.Seq(seed+1))
	if err != nil {
		return err
	}
	high, err := fence.NewToken(2, 1)
	if err != nil {
		return err
	}
	if err := s.Claim(ctx, resource, low); err != nil {
		return err
	}
	var writers sync.WaitGroup
	failed := make(chan error, 3)
	started := make(chan struct{}, 3)
	for w := range 3 {
		writers.Go(func() {
			for n := 0; ; n++ {
				err := s.Write(ctx, resource, low, fmt.Sprintf("late %d.%d", w, n))
				if n == 0 {
					started <- struct{}{}
				}
				var stale *fence.StaleError
				switch {
				case errors.As(err, &stale) && stale.Seen == high:
					return
				case err != nil && ctx.Err() == nil && errors.Is(err, context.Canceled):
					continue // cancelled by the claim: refused next time
				case err != nil:
					failed <- err
					return
				}
			}
		})
	}
	for range 3 {
		select {
		case <-started:
		case err := <-failed:
			writers.Wait()
			return fmt.Errorf("write of the older holder: %w", err)
		}
	}
	claimed := s.Claim(ctx, resource, high)
	read, err := s.Value(ctx, resource)
	writers.Wait()
	after, errAfter := s.Value(ctx, resource)
	select {
	case err := <-failed:
		return fmt.Errorf("write of the older holder: %w", err)
	default:
	}
	if err := errors.Join(claimed, err, errAfter); err != nil {
		return err
	}
	if read != after {
		return fmt.Errorf("the new holder read %q after its claim, and then it was %q", read, after)
	}
	return nil
}
