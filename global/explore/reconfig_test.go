package explore

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/global/config"
)

// searchCfg explores breadth first, so that the first violation is a shortest
// one.
func searchCfg(opt cfgOption) (r result) {
	x := newCfgExplorer(opt)
	began := time.Now()
	var set seen
	var links []link
	var level, following []cfgState
	seed := maphash.MakeSeed()
	add := func(s cfgState, from uint32, a action) {
		if set.add(maphash.Comparable(seed, s)) {
			links = append(links, link{from, a})
			following = append(following, s)
		}
	}
	starts := x.start()
	for _, s := range starts {
		add(s, 0, action{})
	}
	base := 0
	finish := func() result {
		r.states, r.leaders, r.took = len(links), len(x.nodes)-1, time.Since(began)
		return r
	}
	for len(following) > 0 {
		level, following = following, level[:0]
		r.depth++
		for i := range level {
			if opt.states > 0 && len(links) >= opt.states {
				return finish()
			}
			x.actions(&level[i], func(a action) {
				if r.bad != "" {
					return
				}
				s, ok, bad := x.do(level[i], a)
				if bad != "" {
					r.bad = bad
					r.trace = x.trace(starts, links, base+i, a)
				} else if ok {
					r.steps++
					add(s, uint32(base+i), a)
				}
			})
			if r.bad != "" {
				return finish()
			}
		}
		base += len(level)
	}
	r.complete = true
	return finish()
}

func (x *cfgExplorer) trace(starts []cfgState, links []link, at int, last action) []string {
	acts := []action{last}
	for at >= len(starts) {
		acts = append(acts, links[at].act)
		at = int(links[at].from)
	}
	slices.Reverse(acts)
	s := starts[at]
	out := []string{"start: " + x.show(s)}
	for _, a := range acts {
		t, _, bad := x.do(s, a)
		line := fmt.Sprintf("%s(%d,%d,%d): %s", cName[a.kind], a.a, a.b, a.c, x.show(t))
		if bad != "" {
			line += " <- " + bad
		}
		out = append(out, line)
		s = t
	}
	return out
}

// TestChainsAreWhatTheRulesAllow: the explored chains are steps by the shipped
// check, and the swap is none.
func TestChainsAreWhatTheRulesAllow(t *testing.T) {
	for name, chain := range map[string][]uint8{"replace": chainReplace, "grow": chainGrow, "swap": chainSwap} {
		x := newCfgExplorer(cfgOption{chain: chain})
		for v := 2; v <= len(chain); v++ {
			x.confs[v-1].AllowEvenWitnesses, x.confs[v].AllowEvenWitnesses = true, true
			if err := config.CheckChange(x.confs[v-1], x.confs[v]); (err == nil) != (name != "swap") {
				t.Errorf("%s, version %d: %v", name, v, err)
			}
		}
	}
}

// without are all steps but those.
func without(names ...string) map[string]bool {
	m := slice(cName[:]...)
	for _, n := range names {
		delete(m, n)
	}
	return m
}

// atTheEnd lets b campaign only under the last configuration.
func atTheEnd(s *cfgState, a action) bool { return a.kind != cCampaign || s.dec == cVersions }

func TestReconfigurationKeepsTheInvariants(t *testing.T) {
	for _, c := range []struct {
		name string
		opt  cfgOption
	}{
		// Complete within its slice: b campaigns once, at any time.
		{"a wiped witness is replaced", cfgOption{chain: chainReplace, ballots: 1, only: without("late", "drop"), states: 1_300_000}},
		{"a witness joins and another leaves", cfgOption{chain: chainGrow, ballots: 1, only: without("late", "drop"), guide: atTheEnd, states: 400_000}},
		{"with late messages and more ballots", cfgOption{chain: chainReplace, ballots: 2, states: 300_000}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.opt.states /= raceShare; *exploreTime > 0 {
				c.opt.states = 8_000_000
			}
			r := searchCfg(c.opt)
			t.Log(r)
			if r.bad != "" {
				t.Fatalf("%s\n%s", r.bad, strings.Join(r.trace, "\n"))
			}
		})
	}
}

// TestEveryBrokenRuleOfReconfigurationIsFound names spec/README.md's flags in
// brackets.
func TestEveryBrokenRuleOfReconfigurationIsFound(t *testing.T) {
	quiet := without("late", "drop")
	for _, bug := range []struct {
		name string
		opt  cfgOption
	}{
		{"H8 two members in one step (X_SWAP)", cfgOption{chain: chainSwap, ballots: 1, only: quiet}},
		{"H10 voters answer under older versions (X_OLDOK)", cfgOption{
			chain: chainReplace, ballots: 1, only: quiet, guide: atTheEnd, rules: cfgRules{oldVersions: true},
		}},
		{"H10 answers counted over versions (X_MIX)", cfgOption{chain: chainReplace, ballots: 1, only: quiet, rules: cfgRules{mixCounts: true}}},
		{"rule 4 (b) skipped (X_NOREACC)", cfgOption{chain: chainReplace, ballots: 1, only: quiet, rules: cfgRules{noSettle: true}}},
		{"rule 4 (a) skipped", cfgOption{chain: chainReplace, ballots: 1, only: quiet, guide: atTheEnd, rules: cfgRules{noStore: true}}},
		{"registers only read for rule 4 (b)", cfgOption{chain: chainReplace, ballots: 1, only: quiet, guide: atTheEnd, rules: cfgRules{readOnly: true}}},
		{"rule 5, a joining voter's copy counts as its accept", cfgOption{
			chain: chainGrow, ballots: 1, only: quiet, rules: cfgRules{copyClock: true},
			guide: func(s *cfgState, a action) bool { return atTheEnd(s, a) && (a.kind != cSwitch || a.a == 1) },
		}},
	} {
		t.Run(bug.name, func(t *testing.T) {
			opt := bug.opt
			opt.states = 3_000_000
			r := searchCfg(opt)
			t.Logf("%v: %s", r, r.bad)
			if *showTraces {
				t.Log("\n" + strings.Join(r.trace, "\n"))
			}
			if r.bad == "" {
				t.Error("not found")
			}
			// The same part of the space without the bug has none.
			if opt.rules == (cfgRules{}) {
				return
			}
			opt.rules, opt.states = cfgRules{}, r.states/raceShare
			if r := searchCfg(opt); r.bad != "" {
				t.Errorf("the shipped rules: %s\n%s", r.bad, strings.Join(r.trace, "\n"))
			}
		})
	}
}
