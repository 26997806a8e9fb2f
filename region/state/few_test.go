package state

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestFewIsAnOrderedMap beside a plain one, over both of its forms, and its
// copies stay as they were.
func TestFewIsAnOrderedMap(t *testing.T) {
	type copied struct {
		f    few[int, int]
		want map[int]int
	}
	same := func(f *few[int, int], want map[int]int) error {
		var keys []int
		f.Scan(func(k, v int) bool {
			keys = append(keys, k)
			return v == want[k]
		})
		sorted := slices.Sorted(maps.Keys(want))
		if f.Len() != len(want) || !slices.Equal(keys, sorted) {
			return fmt.Errorf("%d entries %v, want %v", f.Len(), keys, sorted)
		}
		if k, v, ok := f.Min(); ok != (len(want) > 0) || ok && (k != sorted[0] || v != want[k]) {
			return fmt.Errorf("the first is %d: %d, %v", k, v, ok)
		}
		return nil
	}
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var f few[int, int]
		want := map[int]int{}
		var copies []copied
		for step := range 100 {
			k := rnd.IntN(3 * listed)
			before, there := want[k]
			if rnd.IntN(100) < 50 {
				if old, ok := f.Set(k, step); old != before || ok != there {
					t.Fatalf("seed %d, step %d: set said %d %v, want %d %v", seed, step, old, ok, before, there)
				}
				want[k] = step
			} else {
				if old, ok := f.Delete(k); old != before || ok != there {
					t.Fatalf("seed %d, step %d: delete said %d %v, want %d %v", seed, step, old, ok, before, there)
				}
				delete(want, k)
			}
			if err := same(&f, want); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
			k = rnd.IntN(3 * listed)
			w, there := want[k]
			if v, ok := f.Get(k); v != w || ok != there {
				t.Fatalf("seed %d, step %d: %d is %d %v, want %d %v", seed, step, k, v, ok, w, there)
			}
			floor := k
			for floor >= 0 && func() bool { _, ok := want[floor]; return !ok }() {
				floor--
			}
			if at, v, ok := f.Floor(k); ok != (floor >= 0) || ok && (at != floor || v != want[floor]) {
				t.Fatalf("seed %d, step %d: below %d is %d: %d, %v, want %d", seed, step, k, at, v, ok, floor)
			}
			if rnd.IntN(10) == 0 {
				copies = append(copies, copied{f.Copy(), maps.Clone(want)})
			}
			for i := range copies {
				if err := same(&copies[i].f, copies[i].want); err != nil {
					t.Fatalf("seed %d, step %d: copy %d: %v", seed, step, i, err)
				}
			}
		}
	}
}
