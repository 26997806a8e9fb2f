package plan

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Fact is what an expectation is about.
type Fact string

// The facts.
const (
	// Promotions are changes of owner or epoch after the first step; Lapses
	// head leases that ran out; LeasesLost leases that ended otherwise than by
	// their holder's release.
	Promotions Fact = "promotions"
	Lapses     Fact = "lapses"
	LeasesLost Fact = "leases lost"
	// WritesRefused by the guard, of workers that did not freeze.
	WritesRefused Fact = "writes refused"
	// Promoted is how long after the first step's fault a partition had
	// another owner.
	Promoted Fact = "promoted"
	// Unavailable is the longest time in which no acquire and no write of any
	// client was answered, over partitions.
	Unavailable Fact = "unavailable"
	// Acquire and Write are latencies, by Quantile.
	Acquire Fact = "acquire"
	Write   Fact = "write"
	// StaleWrite: the late write of the frozen worker was refused.
	StaleWrite Fact = "stale write"
	// Grants and Writes are how many there were; too few show nothing.
	Grants Fact = "grants"
	Writes Fact = "writes"
	// LookupsWrong are answers to look-ups that had ceased to be true for longer
	// than they said they were old; LookupAge is the oldest answer; Lookups how
	// many there were; Lookup is their latency; Cached is how long after the last
	// fault of a lease cache every region's look-ups came out of it again.
	LookupsWrong Fact = "look-ups wrong"
	LookupAge    Fact = "look-up age"
	Lookups      Fact = "look-ups"
	Lookup       Fact = "look-up"
	Cached       Fact = "cached again"
	// Settled is how long after the last fault every partition had an owner
	// whose ballot all voters have.
	Settled Fact = "settled"
)

// Expectation is what must hold beside the invariants.
type Expectation struct {
	Line int
	// Text as it was written.
	Text string
	Fact Fact
	// Quantile of a latency, 0 to 1; 1 is the largest.
	Quantile float64
	// Most is the largest number allowed, Least the smallest, Bound the
	// longest time.
	Most, Least int
	Bound       Span
	// Partition it is about; zero: all.
	Partition Part
}

// Timed reports whether a slow machine alone can break it.
func (e Expectation) Timed() bool {
	return e.Fact != StaleWrite && e.Fact != WritesRefused && e.Fact != LookupsWrong
}

const expectHelp = `write for example "no promotion", "at most 1 promotion", "no lapse", "no lease lost", "no write refused", ` +
	`"promoted within D + 1s", "settled within 30s", "p99 acquire < 50ms", "max write < 1s", "unavailable <= 2s", ` +
	`"stale write refused", "no look-up wrong", "cached again within 5s", "look-up age <= 10s", "max look-up < 1s", ` +
	`"at least 20 writes", "at least 5 grants" or "at least 20 look-ups"`

var (
	countPattern   = regexp.MustCompile(`^(no|at most (\d+)) (promotion|lapse|lease lost|leases lost|write refused|writes refused|look-up wrong|look-ups wrong)s?( of (.+))?$`)
	leastPattern   = regexp.MustCompile(`^at least (\d+) (grant|write|look-up)s?$`)
	withinPattern  = regexp.MustCompile(`^(promoted|settled|cached again) within (.+?)( of (.+))?$`)
	latencyPattern = regexp.MustCompile(`^(max|p\d{2}(?:\.\d)?) (acquire|write|look-up) (?:<|<=|≤) (.+)$`)
	agePattern     = regexp.MustCompile(`^look-up age (?:<|<=|≤) (.+)$`)
	awayPattern    = regexp.MustCompile(`^unavailable (?:<|<=|≤) (.+?)( of (.+))?$`)
)

// ParseExpectation reads one line of `expect`.
func ParseExpectation(s string) (Expectation, error) {
	e, err := expectation(strings.Join(strings.Fields(s), " "))
	if err != nil {
		return Expectation{}, fmt.Errorf("%q: %w; %s", s, err, expectHelp)
	}
	e.Text = strings.TrimSpace(s)
	return e, nil
}

func expectation(s string) (e Expectation, err error) {
	if s == "stale write refused" {
		return Expectation{Fact: StaleWrite}, nil
	}
	if m := countPattern.FindStringSubmatch(s); m != nil {
		e.Fact = map[string]Fact{
			"promotion": Promotions, "lapse": Lapses, "lease lost": LeasesLost, "leases lost": LeasesLost,
			"write refused": WritesRefused, "writes refused": WritesRefused, "look-up wrong": LookupsWrong, "look-ups wrong": LookupsWrong,
		}[m[3]]
		if m[2] != "" {
			if e.Most, err = count(m[2]); err != nil {
				return e, err
			}
		}
		return e, e.of(m[5])
	}
	if m := leastPattern.FindStringSubmatch(s); m != nil {
		e.Fact = map[string]Fact{"grant": Grants, "write": Writes, "look-up": Lookups}[m[2]]
		e.Least, err = count(m[1])
		return e, err
	}
	if m := withinPattern.FindStringSubmatch(s); m != nil {
		e.Fact = Fact(m[1])
		if e.Bound, err = ParseSpan(m[2]); err != nil {
			return e, err
		}
		return e, e.of(m[4])
	}
	if m := latencyPattern.FindStringSubmatch(s); m != nil {
		e.Fact, e.Quantile = Fact(m[2]), 1
		if m[1] != "max" {
			n, err := strconv.ParseFloat(m[1][1:], 64)
			if err != nil {
				return e, err
			}
			e.Quantile = n / 100
		}
		e.Bound, err = ParseSpan(m[3])
		return e, err
	}
	if m := agePattern.FindStringSubmatch(s); m != nil {
		e.Fact = LookupAge
		e.Bound, err = ParseSpan(m[1])
		return e, err
	}
	if m := awayPattern.FindStringSubmatch(s); m != nil {
		e.Fact = Unavailable
		if e.Bound, err = ParseSpan(m[1]); err != nil {
			return e, err
		}
		return e, e.of(m[3])
	}
	return e, fmt.Errorf("is no expectation that a drill knows")
}

func (e *Expectation) of(part string) (err error) {
	if part != "" {
		e.Partition, err = ParsePart(part)
	}
	return err
}

func count(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n > 1_000_000 {
		return 0, fmt.Errorf("%s: use a number up to 1,000,000", s)
	}
	return n, nil
}
