package check

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/internal/instant"
)

// Claim is somebody's word that it alone holds something over a span of time:
// a region its head lease on a partition, with the epoch as number, or a worker
// its lock, with the token. The span is the surest part of it: from when the
// answer was there to its end counted from before the question.
type Claim struct {
	Of, By      string
	Number      uint64
	From, Until instant.Instant
}

// Lapse is an owner's word that it holds its partition no more.
type Lapse struct {
	Partition, Region string
	Epoch             uint64
	At                instant.Instant
}

// Ledger collects the regions' words. It is not safe for concurrent use.
type Ledger struct {
	Claims []Claim
	Lapses []Lapse
	// Owners is the newest claim of each partition.
	Owners map[string]Claim
	// until is the latest end of a partition's claims, lapsed whether it was
	// seen to have passed.
	until  map[string]instant.Instant
	lapsed map[string]bool
	// asked is when the question of a partition's newest claim was asked, gaveUp
	// when an owner had given it up.
	asked  map[string]instant.Instant
	gaveUp map[string]Claim
}

// Observe takes an answer; they must come in the order in which they were
// answered.
func (l *Ledger) Observe(a Answer) {
	if l.Owners == nil {
		l.Owners, l.until, l.lapsed = map[string]Claim{}, map[string]instant.Instant{}, map[string]bool{}
		l.asked, l.gaveUp = map[string]instant.Instant{}, map[string]Claim{}
	}
	for _, h := range a.Says {
		last, known := l.Owners[h.Partition]
		if h.Left <= 0 && h.Released && known && last.By == a.Region && a.Answered < l.until[h.Partition] {
			l.giveUp(last, a.Answered)
			continue
		}
		if h.Left <= 0 {
			// A new leader holds nothing before a round of its own; the partition
			// has not lapsed while what the one before held goes on.
			over := known && last.By == a.Region && last.Number == h.Epoch && a.Answered >= l.until[h.Partition]
			if over && !l.lapsed[h.Partition] {
				l.Lapses = append(l.Lapses, Lapse{h.Partition, a.Region, h.Epoch, a.Answered})
				l.lapsed[h.Partition] = true
			}
			continue
		}
		c := Claim{Of: h.Partition, By: a.Region, Number: h.Epoch, From: a.Answered, Until: a.Asked.Add(h.Left)}
		if g, ok := l.gaveUp[h.Partition]; ok && g.By == c.By && g.Number == c.Number && a.Asked < g.Until {
			continue // said before it gave up, and heard after
		}
		l.Claims = append(l.Claims, c)
		if !known || c.Number >= last.Number {
			l.Owners[h.Partition] = c
			l.asked[h.Partition] = max(l.asked[h.Partition], a.Asked)
			l.until[h.Partition] = max(l.until[h.Partition], c.Until)
			l.lapsed[h.Partition] = false
		}
	}
}

// giveUp: an owner says before its time that it has released a partition, as at a
// planned transfer. For certain it held it when it was last asked and said that
// it does. That an owner says 0 is not enough: a leader that began anew holds
// nothing either, and what it had sent before stays good.
func (l *Ledger) giveUp(last Claim, at instant.Instant) {
	held := l.asked[last.Of]
	for i := range l.Claims {
		if c := &l.Claims[i]; c.Of == last.Of && c.By == last.By && c.Number == last.Number {
			c.Until = min(c.Until, held)
		}
	}
	l.until[last.Of], l.lapsed[last.Of] = held, true
	last.Until = at
	l.gaveUp[last.Of] = last
}

func ledgerOf(answers []Answer) *Ledger {
	sorted := slices.Clone(answers)
	slices.SortStableFunc(sorted, func(a, b Answer) int { return cmp.Compare(a.Answered, b.Answered) })
	l := &Ledger{}
	for _, a := range sorted {
		l.Observe(a)
	}
	return l
}

// Change is a change of a partition's owner or epoch.
type Change struct{ Was, Is Claim }

// changes returns the changes of owner or epoch among claims that began after
// an instant, each partition's last claim before it included.
func (l *Ledger) changes(after instant.Instant) []Change {
	var found []Change
	last := map[string]Claim{}
	for _, c := range inOrder(l.Claims) {
		p, known := last[c.Of]
		if known && c.Number < p.Number {
			continue // an old owner that still counts its time
		}
		last[c.Of] = c
		if known && c.From > after && (p.By != c.By || p.Number != c.Number) {
			found = append(found, Change{p, c})
		}
	}
	return found
}

func inOrder(claims []Claim) []Claim {
	sorted := slices.Clone(claims)
	slices.SortStableFunc(sorted, func(a, b Claim) int { return cmp.Compare(a.From, b.From) })
	return sorted
}

// words of what claims are about, for the texts of violations.
type words struct{ alone, rising, number string }

var (
	headLeases = words{"I1", "I2", "epoch"}
	locks      = words{"I4", "I2", "token"}
)

// judge returns what is wrong with claims: two holders at one instant, or a
// number that does not rise from holder to holder. Each pair is named once.
func judge(n words, claims []Claim) []Violation {
	type pair struct{ of, a, b string }
	var found []Violation
	told := map[pair]bool{}
	tell := func(rule string, at instant.Instant, a, b Claim, format string, args ...any) {
		if p := (pair{rule + a.Of, a.By, b.By}); !told[p] {
			told[p] = true
			found = append(found, Violation{Rule: rule, At: at, About: a.Of, Text: fmt.Sprintf(format, args...)})
		}
	}
	// Of each thing, each holder's claim with the latest end and the highest number.
	longest, highest := map[string]map[string]Claim{}, map[string]map[string]Claim{}
	for _, c := range inOrder(claims) {
		if c.Until <= c.From {
			continue // it says nothing for certain
		}
		if longest[c.Of] == nil {
			longest[c.Of], highest[c.Of] = map[string]Claim{}, map[string]Claim{}
		}
		for _, by := range keys(longest[c.Of]) {
			o, h := longest[c.Of][by], highest[c.Of][by]
			if by != c.By && o.Until > c.From {
				tell(n.alone, c.From, o, c, "%s: %s (%s %d) and %s (%s %d) both hold it for %s",
					c.Of, by, n.number, o.Number, c.By, n.number, c.Number, millis(min(o.Until, c.Until).Sub(c.From)))
			}
			if h.Number > c.Number || h.Number == c.Number && by != c.By {
				tell(n.rising, c.From, h, c, "%s: %s holds it with %s %d after %s had it with %d", c.Of, c.By, n.number, c.Number, by, h.Number)
			}
		}
		if c.Until > longest[c.Of][c.By].Until {
			longest[c.Of][c.By] = c
		}
		if c.Number > highest[c.Of][c.By].Number {
			highest[c.Of][c.By] = c
		}
	}
	return found
}

func keys[V any](m map[string]V) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

func millis(d time.Duration) string {
	return fmt.Sprintf("%d ms", d.Round(time.Millisecond).Milliseconds())
}

// Moved returns the partitions that changed owner or epoch, each with the last
// instant at which its owner of before held it for certain.
func Moved(r *Record) map[string]instant.Instant {
	out := map[string]instant.Instant{}
	for _, c := range ledgerOf(r.Answers).changes(r.Began) {
		if _, ok := out[c.Is.Of]; !ok {
			out[c.Is.Of] = c.Was.From
		}
	}
	return out
}

// Reign is a span over which a region held a partition, by its own words.
type Reign struct {
	Partition, Region string
	Epoch             uint64
	From, Until       instant.Instant
}

// Reigns joins the claims of a record: two of one owner and epoch are one
// reign if the first had not run out before the second was heard.
func Reigns(r *Record) []Reign {
	var out []Reign
	last := map[string]int{}
	for _, c := range inOrder(ledgerOf(r.Answers).Claims) {
		if c.Until <= c.From {
			continue
		}
		key := fmt.Sprintf("%s %s %d", c.Of, c.By, c.Number)
		i, ok := last[key]
		if ok && c.From <= out[i].Until {
			out[i].Until = max(out[i].Until, c.Until)
			continue
		}
		last[key] = len(out)
		out = append(out, Reign{c.Of, c.By, c.Number, c.From, c.Until})
	}
	return out
}

// Changes returns the changes of owner or epoch after the steps began.
func Changes(r *Record) []Change { return ledgerOf(r.Answers).changes(r.Began) }

// Lapses returns what owners said after the steps began of holding a partition
// no more.
func Lapses(r *Record) []Lapse {
	all := ledgerOf(r.Answers).Lapses
	return slices.DeleteFunc(all, func(x Lapse) bool { return x.At <= r.Began })
}
