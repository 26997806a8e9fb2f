package main

import "testing"

func TestACalmServerKeepsItsHeapSmall(t *testing.T) {
	const live = 40 << 20
	var tn tuner
	allocated := uint64(0)
	look := func(perSecond uint64) int {
		allocated += perSecond
		return tn.look(allocated, live)
	}
	for i := range calmAfter {
		if want, got := busyPercent, look(1<<20); i < calmAfter-1 && got != want {
			t.Fatalf("look %d: %d %%, want %d", i, got, want)
		} else if i == calmAfter-1 && got != calmPercent {
			t.Fatalf("look %d: %d %%, want %d", i, got, calmPercent)
		}
	}
	if got := look(10 << 20); got != calmPercent { // a collection every 2 s
		t.Errorf("at the limit: %d %%, want %d", got, calmPercent)
	}
	if got := look(11 << 20); got != busyPercent {
		t.Errorf("beyond the limit: %d %%, want %d at once", got, busyPercent)
	}
	if got := look(0); got != busyPercent {
		t.Errorf("just after: %d %%, want %d", got, busyPercent)
	}
}
