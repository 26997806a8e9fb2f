package explore

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// TestDeepWalks goes where a bounded breadth-first search does not reach: many
// steps, three ballots each, late answers, planned transfers, clocks at their
// bounds, at random.
func TestDeepWalks(t *testing.T) {
	budget := 5 * time.Second
	if *exploreTime > 0 {
		budget = *exploreTime * 8 / 100
	}
	for i, opt := range []option{
		{ballots: 3, release: true},
		{ballots: 4, late: true, release: true, raise: true},
		{ballots: 3, rates: true, release: true, late: true},
	} {
		opt.rules = shipped()
		t.Run(fmt.Sprintf("%d", i), func(t *testing.T) {
			x := newExplorer(opt)
			starts := x.start()
			rnd := rand.New(rand.NewPCG(uint64(i), 1))
			began := time.Now()
			walks, steps, holds := 0, 0, 0
			var acts []action
			for time.Since(began) < budget/3 && (*exploreTime > 0 || walks < 20_000/raceShare) {
				s := starts[walks%len(starts)]
				lines := []string{x.show(s)}
				for range 120 {
					acts = acts[:0]
					x.actions(&s, func(a action) {
						// Of the steps that are nearly always possible a walk would do little else.
						often := a.kind == actTick || a.kind == actLeader || a.kind == actRestart || a.kind == actLost || a.kind == actRelease || a.kind == actRaise
						if !often || rnd.IntN(4) == 0 {
							acts = append(acts, a)
						}
					})
					if len(acts) == 0 {
						continue
					}
					a := acts[rnd.IntN(len(acts))]
					next, ok, bad := x.do(s, a)
					if bad != "" {
						t.Fatalf("walk %d: %s\n%s\n%v", walks, bad, strings.Join(lines, "\n"), a)
					}
					if !ok {
						continue
					}
					if next.lastEpoch > s.lastEpoch {
						holds++
					}
					s = next
					steps++
					lines = append(lines, fmt.Sprint(a))
				}
				walks++
			}
			t.Logf("%d walks, %d steps, %d changes of owner, %d states of a leader", walks, steps, holds, len(x.nodes)-1)
			if holds == 0 {
				t.Error("no walk ever reached another owner: the walks explore nothing")
			}
		})
	}
}
