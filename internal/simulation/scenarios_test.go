package simulation

import (
	"fmt"
	"testing"
	"time"

	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/internal/instant"
)

// pairs are both directions between some sites and others.
func pairs(from []int, to ...int) (out [][2]int) {
	for _, a := range from {
		for _, b := range to {
			out = append(out, [2]int{a, b}, [2]int{b, a})
		}
	}
	return out
}

// Sites of a cluster of two regions and three witnesses.
const (
	siteA  = 0
	siteB  = 1
	siteW1 = 2
	siteW2 = 3
	siteW3 = 4
)

// TestScenarios are partial partitions and slow links, each in many worlds that
// differ in delays, clocks and the order of messages; region a owns the
// partition and is preferred.
func TestScenarios(t *testing.T) {
	const d = 4 * time.Second
	two := shape{regions: 2, witnesses: 3, partitions: 1, d: d, reach: 40 * time.Millisecond, calm: true, believers: 3}
	three := shape{regions: 3, witnesses: 3, partitions: 1, d: d, reach: 40 * time.Millisecond, calm: true, believers: 3}
	t.Log("TABLE | scenario, 20 worlds each, D 4 s | promotions | lapses | longest without an owner | leases lost in a's region, all worlds |")
	t.Log("TABLE | --- | --- | --- | --- | --- |")
	for _, c := range []struct {
		name  string
		shape shape
		fault func(w *world)
		// At most so many promotions and lapses; within, if set, another region
		// must own the partition so soon after the fault.
		promotions, lapses int
		within             time.Duration
		// owner at the end, a minute later.
		owner string
		// kept: no lease is lost.
		kept bool
	}{
		{"a and b cut, both see the witnesses", two, func(w *world) { w.cut(time.Minute, pairs([]int{siteA}, siteB)...) }, 0, 0, 0, "a", true},
		{"b hears nobody", two, func(w *world) { w.cut(time.Minute, w.around(siteB, false, true)...) }, 0, 0, 0, "a", true},
		{"b is heard by nobody", two, func(w *world) { w.cut(time.Minute, w.around(siteB, true, false)...) }, 0, 0, 0, "a", true},
		{"a is heard by nobody", two, func(w *world) { w.cut(time.Minute, w.around(siteA, true, false)...) }, 1, 1, d + 2*time.Second, "b", false},
		{"a hears nobody", two, func(w *world) { w.cut(time.Minute, w.around(siteA, false, true)...) }, 1, 1, 2*time.Second + 3*d + 3*time.Second, "b", false},
		{"a sees one witness only", two, func(w *world) { w.cut(time.Minute, pairs([]int{siteA}, siteB, siteW1, siteW2)...) }, 1, 1, 3*d + 2*time.Second, "b", false},
		{"a sees half of six, two witnesses among them", three, func(w *world) { w.cut(time.Minute, pairs([]int{0}, 1, 2, 5)...) }, 1, 1, 4*d + 2*time.Second, "", false},
		{"chained: a - w1 - b", two, func(w *world) {
			w.cut(time.Minute, pairs([]int{siteA}, siteB, siteW2, siteW3)...)
			w.cut(time.Minute, pairs([]int{siteB}, siteW2, siteW3)...)
		}, 1, 1, 0, "", false}, // neither has a majority; afterwards either may be first
		{"a flaps, 2 s up, 2 s down, for 2 min", two, func(w *world) { w.flapSite(siteA, 30) }, 1, 1 << 20, 0, "", false},
		{"one link flaps", two, func(w *world) { w.flap(siteA, siteW1, 30) }, 0, 0, 0, "a", true},
		{"a witness is slow, not dead", two, func(w *world) { w.witnesses[0].slow = 3 * time.Second }, 0, 0, 0, "a", true},
		{"2 s more on every round trip, 500 ms of jitter", two, func(w *world) { w.slowLinks(time.Minute, 750*time.Millisecond, 500*time.Millisecond) }, 0, 0, 0, "a", true},
		{"two candidates at once", three, func(w *world) {
			w.regionDown(w.regions[0], 5*time.Minute)
			for _, r := range w.regions[1:] {
				for range 3 {
					w.after(w.upTo(6*time.Second), func() {
						w.each(r, "hurry", func(l *campaign.Leader, now instant.Instant, p string) []campaign.Effect { return l.Hurry(now, p) })
					})
				}
			}
		}, 1, 1, 2*d + 3*time.Second, "", false}, // D more: an Accept that gets no majority keeps the voters that took it
		{"a loses its quorum", two, func(w *world) { w.regionDown(w.regions[0], time.Minute) }, 1, 1, d + 2*time.Second, "b", false},
		{"a's disks hang", two, func(w *world) { w.hang(w.regions[0], time.Minute) }, 1, 1, d + 1500*time.Millisecond + 2*time.Second, "b", false},
		{"a's leader is frozen", two, func(w *world) { w.freeze(w.regions[0].cur, time.Minute) }, 0, 1, 0, "a", false},
		{"a witness is lost", two, func(w *world) { w.crash(w.witnesses[0], time.Hour) }, 0, 0, 0, "a", true},
		{"b is lost", two, func(w *world) { w.regionDown(w.regions[1], time.Minute) }, 0, 0, 0, "a", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var longest, unowned time.Duration
			lost := 0
			promotions, lapses := 0, 0
			for seed := uint64(1); seed <= 20; seed++ {
				w := newWorld(c.shape, seed)
				bad := func(format string, a ...any) {
					t.Fatalf("seed %d: %s\n%s", seed, fmt.Sprintf(format, a...), w.tail())
				}
				w.run(20*time.Second + time.Duration(seed)*37*time.Millisecond)
				if h := w.parts[0].lastOwner; h != "a" {
					bad("%q owns the partition at first", h)
				}
				before, began := w.count, w.now
				w.parts[0].unowned = 0
				c.fault(w)
				w.run(began + 2*time.Minute + 10*time.Second)
				if w.bad != "" {
					bad("%s", w.bad)
				}
				if c.kept && w.count.leasesLost > before.leasesLost {
					bad("%d leases are lost", w.count.leasesLost-before.leasesLost)
				}
				unowned, lost = max(unowned, w.parts[0].unowned), lost+w.count.leasesLost-before.leasesLost
				p, l := w.count.promotions-before.promotions, w.count.lapses-before.lapses
				promotions, lapses = max(promotions, p), max(lapses, l)
				if p > c.promotions || l > c.lapses {
					bad("%d promotions and %d lapses, want at most %d and %d", p, l, c.promotions, c.lapses)
				}
				if c.within > 0 {
					took := w.parts[0].promoted - began
					longest = max(longest, took)
					if p != 1 || took > c.within {
						bad("promoted %d times, %v after the fault; want once, within %v", p, took, c.within)
					}
				}
				if o := w.parts[0].lastOwner; c.owner != "" && o != c.owner || !w.owned(0) {
					bad("%s owns the partition at last (held: %v)", o, w.owned(0))
				}
			}
			t.Logf("at most %d promotions and %d lapses; longest until another region owns it: %v", promotions, lapses, longest.Round(time.Millisecond))
			t.Logf("TABLE | %s | %d | %d | %v | %d |", c.name, promotions, lapses, unowned.Round(10*time.Millisecond), lost)
		})
	}
}

// flapSite cuts a site off again and again.
func (w *world) flapSite(a, times int) {
	if times == 0 {
		return
	}
	w.cut(2*time.Second, w.around(a, true, true)...)
	w.after(4*time.Second, func() { w.flapSite(a, times-1) })
}

// TestF50RenewalsAreBackWithin2sOfAHeal, here for the proposer's part: it asks
// again soon enough.
func TestF50RenewalsAreBackWithin2sOfAHeal(t *testing.T) {
	s := shape{regions: 2, witnesses: 3, partitions: 4, d: 4 * time.Second, reach: 40 * time.Millisecond, calm: true}
	var longest time.Duration
	for seed := uint64(1); seed <= 20; seed++ {
		w := newWorld(s, seed)
		w.run(20 * time.Second)
		w.regionDown(w.regions[1], time.Hour) // nobody else can take over
		healed := w.now + 30*time.Second
		w.cut(30*time.Second, w.around(siteA, true, true)...)
		w.run(healed - time.Millisecond)
		for i := range w.parts {
			if w.owned(i) {
				t.Fatalf("seed %d: %s is held in a cut\n%s", seed, w.names[i], w.tail())
			}
		}
		for w.now < healed+10*time.Second && w.bad == "" {
			w.run(w.now + 10*time.Millisecond)
			if w.owned(0) && w.owned(1) && w.owned(2) && w.owned(3) {
				break
			}
		}
		took := w.now - healed
		if longest = max(longest, took); took > 2*time.Second+2*w.roundTrip() {
			t.Fatalf("seed %d: renewals are back %v after the heal\n%s", seed, took, w.tail())
		}
	}
	t.Logf("longest: %v", longest)
}
