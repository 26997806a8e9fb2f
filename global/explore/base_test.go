package explore

import (
	"flag"
	"strings"
	"testing"
	"time"
)

var exploreTime = flag.Duration("explore.time", 0, "explore for so long in all, instead of a bounded number of states")

// bound sets a search's end: a number of states, or with -explore.time its
// share in percent of that.
func bound(opt option, states, share int) option {
	if *exploreTime > 0 {
		opt.states, opt.limit = 0, *exploreTime*time.Duration(share)/100
		return opt
	}
	opt.states, opt.limit = states/raceShare, time.Minute
	return opt
}

func TestExhaustive(t *testing.T) {
	for _, c := range []struct {
		name          string
		states, share int
		opt           option
	}{
		{"two ballots each", 1_500_000, 40, option{ballots: 2}},
		{"two ballots each, nothing restarts", 500_000, 20, option{ballots: 2, upsets: 1}},
		{"clock rates at their bounds", 300_000, 6, option{ballots: 2, rates: true}},
		{"late answers", 300_000, 6, option{ballots: 2, late: true}},
		{"planned transfer", 500_000, 6, option{ballots: 2, release: true}},
		{"an owner raises its epoch", 300_000, 6, option{ballots: 3, release: true, raise: true}},
		{"three ballots each", 300_000, 6, option{ballots: 3, release: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.opt.rules = shipped()
			r := search(bound(c.opt, c.states, c.share))
			t.Log(r)
			if r.bad != "" {
				t.Fatalf("%s\n%s", r.bad, strings.Join(r.trace, "\n"))
			}
		})
	}
}
