package idempotency

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
)

// modelKey is what a store is to remember of a key.
type modelKey struct {
	attempt string // that began and did not end; empty: none
	over    bool   // its time is
	done    bool
	result  string
}

// TestTwoHoldersInAnyOrder has two holders begin, finish and abandon attempts at a key in a
// thousand random orders, each dying now and then with its effect had or not and its attempt left
// behind, and compares what the stores say with a model.
func TestTwoHoldersInAnyOrder(t *testing.T) {
	for name, s := range stores(t) {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(1000) {
				if err := twoHolders(t, s, Key(t.Name(), fmt.Sprint(seed)), seed); err != nil {
					t.Fatalf("interleaving %d: %v", seed, err)
				}
			}
		})
	}
}

func twoHolders(t *testing.T, s Store, key string, seed uint64) error {
	ctx, random := context.Background(), rand.New(rand.NewPCG(seed, 1))
	var m modelKey
	var attempts [2]string // of the holders; empty: it has begun none, or died
	for step := range 4 + random.IntN(8) {
		h := random.IntN(2)
		what := fmt.Sprintf("step %d, holder %d", step, h)
		switch {
		case random.IntN(6) == 0 && m.attempt != "" && !m.over:
			over(t, key)
			m.over = true
		case random.IntN(6) == 0:
			attempts[h] = "" // it dies: whatever it began stays
		case attempts[h] == "":
			attempts[h] = fmt.Sprintf("%d.%d", h, step)
			begun, err := s.Begin(ctx, key, attempts[h])
			var busy *BusyError
			switch {
			case m.done:
				attempts[h] = ""
				if err != nil || !begun.Done || string(begun.Result) != m.result {
					return fmt.Errorf("%s begins, and is told %+v, %w; it is done with %q", what, begun, err, m.result)
				}
			case m.attempt != "" && !m.over:
				attempts[h] = ""
				if !errors.As(err, &busy) || busy.For <= 0 {
					return fmt.Errorf("%s begins beside %s: %+v, %w", what, m.attempt, begun, err)
				}
			default:
				if err != nil || begun.Done || begun.Again != (m.attempt != "") {
					return fmt.Errorf("%s begins, and is told %+v, %w; an attempt before it: %q", what, begun, err, m.attempt)
				}
				m = modelKey{attempt: attempts[h]}
			}
		default:
			finishes, result := random.IntN(3) > 0, what
			err := error(nil)
			if finishes {
				err = s.Finish(ctx, key, attempts[h], []byte(result))
			} else {
				err = s.Abandon(ctx, key, attempts[h])
			}
			switch overtaken := attempts[h] != m.attempt; {
			case overtaken && !errors.Is(err, ErrOvertaken):
				return fmt.Errorf("%s ends %s, overtaken by %q: %w", what, attempts[h], m.attempt, err)
			case !overtaken && err != nil:
				return fmt.Errorf("%s ends its attempt: %w", what, err)
			case !overtaken && finishes:
				m = modelKey{done: true, result: result}
			case !overtaken:
				m = modelKey{}
			}
			attempts[h] = ""
		}
	}
	return nil
}
