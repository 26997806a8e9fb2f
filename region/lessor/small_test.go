package lessor

import (
	"maps"
	"math/rand/v2"
	"testing"
)

// TestSmallIsAMap beside a plain one, over both of its forms.
func TestSmallIsAMap(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var m small[int, int]
		want := map[int]int{}
		for step := range 100 {
			k := rnd.IntN(3 * listed)
			if rnd.IntN(100) < 50 {
				m.set(k, step)
				want[k] = step
			} else {
				m.remove(k)
				delete(want, k)
			}
			if got := maps.Collect(m.all()); m.len() != len(want) || !maps.Equal(got, want) {
				t.Fatalf("seed %d, step %d: %v of %d, want %v", seed, step, got, m.len(), want)
			}
			v, ok := m.get(k)
			if w, there := want[k]; v != w || ok != there {
				t.Fatalf("seed %d, step %d: %d is %d %v, want %d %v", seed, step, k, v, ok, w, there)
			}
		}
	}
}
