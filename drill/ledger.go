package drill

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/drill/report"
	"github.com/headlease/headlease/internal/instant"
)

// claim is somebody's word that it alone holds something over a span of time:
// a region its head lease on a partition, with the epoch as number, or a worker
// its lock, with the token. The span is the surest part of it: from when the
// answer was there to its end counted from before the question.
type claim struct {
	of, by      string
	number      uint64
	from, until instant.Instant
}

// lapse is an owner's word that it holds its partition no more.
type lapse struct {
	partition, region string
	at                instant.Instant
}

// held is what a region says of a partition.
type held struct {
	partition string
	epoch     uint64
	left      time.Duration
}

// ledger collects the regions' words. It is pure, and not safe for concurrent
// use.
type ledger struct {
	claims []claim
	lapses []lapse
	// owners is the newest claim of each partition.
	owners map[string]claim
}

// observe takes a region's answer to a question asked and answered then.
func (l *ledger) observe(region string, asked, answered instant.Instant, says []held) {
	if l.owners == nil {
		l.owners = map[string]claim{}
	}
	for _, h := range says {
		last, known := l.owners[h.partition]
		if h.left <= 0 {
			if known && last.by == region && last.number == h.epoch {
				if n := len(l.lapses); n == 0 || l.lapses[n-1].partition != h.partition || l.lapses[n-1].at < last.from {
					l.lapses = append(l.lapses, lapse{h.partition, region, answered})
				}
			}
			continue
		}
		c := claim{of: h.partition, by: region, number: h.epoch, from: answered, until: asked.Add(h.left)}
		l.claims = append(l.claims, c)
		if !known || c.number >= last.number {
			l.owners[h.partition] = c
		}
	}
}

// changes counts the changes of owner or epoch among claims that began after an
// instant, each partition's last claim before it included.
func (l *ledger) changes(after instant.Instant) []string {
	var found []string
	last := map[string]claim{}
	for _, c := range inOrder(l.claims) {
		p, known := last[c.of]
		last[c.of] = c
		if known && c.from > after && (p.by != c.by || p.number != c.number) {
			found = append(found, fmt.Sprintf("partition %s passed from %s (epoch %d) to %s (epoch %d)", c.of, p.by, p.number, c.by, c.number))
		}
	}
	return found
}

func inOrder(claims []claim) []claim {
	sorted := slices.Clone(claims)
	slices.SortStableFunc(sorted, func(a, b claim) int { return cmp.Compare(a.from, b.from) })
	return sorted
}

// names of what claims are about, for the texts of violations.
type names struct{ alone, rising, number string }

var (
	headLeases = names{"I1", "I2", "epoch"}
	locks      = names{"I4", "I2", "token"}
)

// judge returns what is wrong with claims: two holders at one instant, or a
// number that does not rise from holder to holder. Each pair is named once.
func judge(n names, claims []claim) []string {
	type pair struct{ of, a, b string }
	var found []string
	told := map[pair]bool{}
	tell := func(rule string, a, b claim, format string, args ...any) {
		if p := (pair{rule + a.of, a.by, b.by}); !told[p] {
			told[p] = true
			found = append(found, rule+": "+fmt.Sprintf(format, args...))
		}
	}
	// Of each thing, each holder's claim with the latest end and the highest number.
	longest, highest := map[string]map[string]claim{}, map[string]map[string]claim{}
	for _, c := range inOrder(claims) {
		if c.until <= c.from {
			continue // it says nothing for certain
		}
		if longest[c.of] == nil {
			longest[c.of], highest[c.of] = map[string]claim{}, map[string]claim{}
		}
		for _, by := range sortedKeys(longest[c.of]) {
			o, h := longest[c.of][by], highest[c.of][by]
			if by != c.by && o.until > c.from {
				tell(n.alone, o, c, "%s: %s (%s %d) and %s (%s %d) both hold it for %s",
					c.of, by, n.number, o.number, c.by, n.number, c.number, report.Millis(min(o.until, c.until).Sub(c.from)))
			}
			if h.number > c.number || h.number == c.number && by != c.by {
				tell(n.rising, h, c, "%s: %s holds it with %s %d after %s had it with %d", c.of, c.by, n.number, c.number, by, h.number)
			}
		}
		if c.until > longest[c.of][c.by].until {
			longest[c.of][c.by] = c
		}
		if c.number > highest[c.of][c.by].number {
			highest[c.of][c.by] = c
		}
	}
	return found
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
