package main

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/headlease/headlease/fence"
)

func TestTheJournalShowsWhatIsWrong(t *testing.T) {
	type line struct {
		token   fence.Token
		account string
		seq     uint64
	}
	for name, c := range map[string]struct {
		lines           []line
		repeats         bool
		stale, disorder int
	}{
		"in order":                              {lines: []line{{5, "a", 1}, {5, "b", 1}, {6, "a", 2}}},
		"a token falls":                         {lines: []line{{6, "a", 1}, {5, "a", 2}}, stale: 1},
		"a gap":                                 {lines: []line{{5, "a", 1}, {5, "a", 3}}, disorder: 1},
		"the first one is missing":              {lines: []line{{5, "a", 2}}, disorder: 1},
		"two are swapped":                       {lines: []line{{5, "a", 1}, {5, "a", 3}, {5, "a", 2}}, disorder: 2},
		"twice":                                 {lines: []line{{5, "a", 1}, {5, "a", 1}}, disorder: 1},
		"a batch again, where that is no fault": {lines: []line{{5, "a", 1}, {5, "a", 2}, {6, "a", 1}, {6, "a", 2}, {6, "a", 3}}, repeats: true},
		"a gap after a batch again":             {lines: []line{{5, "a", 1}, {6, "a", 1}, {6, "a", 3}}, repeats: true, disorder: 1},
		"a late batch again is stale all the same": {lines: []line{{5, "a", 1}, {6, "a", 2}, {5, "a", 1}}, repeats: true, stale: 1},
	} {
		t.Run(name, func(t *testing.T) {
			var r result
			j := newJournal(inPostgres, c.repeats, &r)
			for _, l := range c.lines {
				j.write("shard/1", l.token, l.account, l.seq)
			}
			if len(r.Stale) != c.stale || len(r.Disorder) != c.disorder {
				t.Errorf("stale: %q, want %d; disorder: %q, want %d", r.Stale, c.stale, r.Disorder, c.disorder)
			}
		})
	}
}

func TestVerdicts(t *testing.T) {
	counts := func(n int) map[string]int { return map[string]int{inPostgres: n, inRedis: n} }
	guarded, unguarded := options{messages: 10, users: 2, late: 5}, options{messages: 10, users: 2, late: 5, unguarded: true}
	good := func() result {
		return result{Orders: 10, Accounts: 2, Late: counts(5), Refused: counts(5), Counted: counts(5)}
	}
	for name, c := range map[string]struct {
		options options
		change  func(r *result)
		want    int // exit code
	}{
		"all is well":                    {guarded, func(*result) {}, 0},
		"a stale write":                  {guarded, func(r *result) { r.Stale = []string{"x"} }, 1},
		"an order is missing":            {guarded, func(r *result) { r.Disorder = []string{"x"} }, 1},
		"a violation among too little":   {guarded, func(r *result) { r.Disorder, r.Late = []string{"x"}, counts(0) }, 1},
		"too few orders":                 {guarded, func(r *result) { r.Orders = 9 }, 2},
		"too few accounts":               {guarded, func(r *result) { r.Accounts = 1 }, 2},
		"too few late writes at one":     {guarded, func(r *result) { r.Late[inRedis] = 4 }, 2},
		"no late write refused at one":   {guarded, func(r *result) { r.Refused[inPostgres] = 0 }, 2},
		"a store has counted none":       {guarded, func(r *result) { r.Counted[inRedis] = 0 }, 2},
		"a stand-in does not count":      {guarded, func(r *result) { delete(r.Counted, inRedis) }, 0},
		"no stale write, guard off":      {unguarded, func(r *result) { r.Disorder = []string{"x"} }, 2},
		"stale writes, guard off":        {unguarded, func(r *result) { r.Stale, r.Refused, r.Counted = []string{"x"}, counts(0), counts(0) }, 0},
		"too few late writes, guard off": {unguarded, func(r *result) { r.Stale, r.Late = []string{"x"}, counts(4) }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			r := good()
			c.change(&r)
			err := r.judge(c.options)
			if got := exitCode(err); got != c.want {
				t.Errorf("exit code %d, %v; want %d", got, err, c.want)
			}
		})
	}
	if err := fmt.Errorf("%w: and so on", errViolated); exitCode(errors.Join(err, inconclusive("too"))) != 1 {
		t.Error("a violation is one, whatever else there was")
	}
}

func TestCommandLines(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--messages 100 --accounts 50", "3 orders of each account"},
		{"--rounds 0", "at least one account and round"},
		{"more", "give flags only"},
		{"--embedded --messages 300 --accounts 100", ""},
	} {
		_, err := parseRun(strings.Fields(c.args))
		if (c.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", c.args, err, c.want)
		}
	}
}
