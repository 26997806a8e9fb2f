package check

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/instant"
)

// State of an expectation.
type State string

// The states.
const (
	Held         State = "held"
	Broken       State = "broken"
	Inconclusive State = "inconclusive"
)

// Result of an expectation.
type Result struct {
	Text  string
	State State
	// Measured in words, and Why it is inconclusive.
	Measured, Why string
	// Value in milliseconds or as a count; NaN if nothing was measured.
	Value float64
}

// judgement evaluates expectations.
type judgement struct {
	r       *Record
	l       *Ledger
	changes []Change
}

// partition resolves what an expectation names; "" means all.
func (j *judgement) partition(p plan.Part) (string, bool) {
	switch {
	case p.IsZero():
		return "", true
	case p.Number > 0:
		if p.Number > len(j.r.Partitions) {
			return "", false
		}
		return j.r.Partitions[p.Number-1], true
	default:
		return p.Name, slices.Contains(j.r.Partitions, p.Name)
	}
}

func (j *judgement) result(e plan.Expectation) Result {
	out := Result{Text: e.Text, Value: math.NaN()}
	part, ok := j.partition(e.Partition)
	if !ok {
		out.State, out.Why = Inconclusive, fmt.Sprintf("the cluster has no %v", e.Partition)
		return out
	}
	switch e.Fact {
	case plan.Promotions:
		n, texts := 0, []string{}
		for _, c := range j.changes {
			if part == "" || c.Is.Of == part {
				n++
				texts = append(texts, fmt.Sprintf("%s from %s (epoch %d) to %s (epoch %d)", c.Is.Of, c.Was.By, c.Was.Number, c.Is.By, c.Is.Number))
			}
		}
		out.most(n, e.Most, texts)
	case plan.Lapses:
		n, texts := 0, []string{}
		for _, x := range j.l.Lapses {
			if x.At > j.r.Began && (part == "" || x.Partition == part) {
				n++
				texts = append(texts, fmt.Sprintf("%s by %s %s in", x.Partition, x.Region, seconds(x.At.Sub(j.r.Began))))
			}
		}
		out.most(n, e.Most, texts)
	case plan.LeasesLost, plan.WritesRefused:
		kind := map[plan.Fact]Kind{plan.LeasesLost: Lost, plan.WritesRefused: Refused}[e.Fact]
		n, texts := 0, []string{}
		for _, a := range j.r.Actors {
			for _, ev := range a.Events {
				if ev.Kind == kind && !a.Freezes && ev.At > j.r.Began && (part == "" || a.Partition == part) {
					n++
					texts = append(texts, fmt.Sprintf("%s %s in: %s", a.Name, seconds(ev.At.Sub(j.r.Began)), ev.Reason))
				}
			}
		}
		out.most(n, e.Most, texts)
	case plan.Grants, plan.Writes:
		kind := map[plan.Fact]Kind{plan.Grants: Acquired, plan.Writes: Wrote}[e.Fact]
		out.least(j.count(kind), e)
	case plan.LookupsWrong, plan.Lookups, plan.LookupAge, plan.Lookup, plan.Cached:
		j.lookup(&out, e)
	case plan.Promoted:
		j.promoted(&out, e, part)
	case plan.Settled:
		if j.r.SettledAt == 0 {
			out.State, out.Measured = Broken, "not at all: "+j.r.Unsettled
			break
		}
		out.within(j.r.SettledAt.Sub(j.lastFault()), e.Bound.Of(j.r.D, j.r.RTT))
	case plan.Acquire, plan.Write:
		all := Latencies(j.r.Actors, map[plan.Fact]Kind{plan.Acquire: Acquired, plan.Write: Wrote}[e.Fact], j.r.Began, j.r.Ended)
		if len(all) == 0 {
			out.State, out.Why = Inconclusive, "there was none"
			break
		}
		out.within(Quantile(all, e.Quantile), e.Bound.Of(j.r.D, j.r.RTT))
	case plan.Unavailable:
		gap, of := j.unavailable(part)
		out.within(gap, e.Bound.Of(j.r.D, j.r.RTT))
		if of != "" {
			out.Measured += " (" + of + ")"
		}
	case plan.StaleWrite:
		switch late := j.r.Late; {
		case !late.Sent || !late.Seen:
			out.State, out.Why = Inconclusive, "the late write did not reach the resource"
		case late.Accepted:
			out.State, out.Measured = Broken, fmt.Sprintf("token %s was accepted", late.Token)
		default:
			out.State, out.Measured = Held, fmt.Sprintf("token %s is below %s", late.Token, late.Mark)
		}
	}
	return out
}

func (r *Result) most(n, most int, texts []string) {
	r.Value, r.Measured, r.State = float64(n), fmt.Sprint(n), Held
	if n > most {
		r.State = Broken
		if len(texts) > 3 {
			texts = append(texts[:3], fmt.Sprintf("and %d more", len(texts)-3))
		}
		r.Measured += ": " + strings.Join(texts, "; ")
	}
}

func (r *Result) least(n int, e plan.Expectation) {
	r.Value, r.Measured, r.State = float64(n), fmt.Sprint(n), Held
	if n < e.Least {
		// Too little work shows nothing, neither good nor bad.
		r.State, r.Why = Inconclusive, fmt.Sprintf("the workload was too small: %d %s", n, e.Fact)
	}
}

func (r *Result) within(d, bound time.Duration) {
	r.Value = float64(d) / float64(time.Millisecond)
	r.Measured = fmt.Sprintf("%s, of %s", millisFine(d), millisFine(bound))
	r.State = Held
	if d > bound {
		r.State = Broken
	}
}

func (j *judgement) count(kind Kind) (n int) {
	for _, a := range j.r.Actors {
		for _, e := range a.Events {
			if e.Kind == kind && e.At > j.r.Began && !a.Probes {
				n++
			}
		}
	}
	return n
}

// Disrupts reports whether the fault breaks something, other than a step that
// only waits or works.
func (f Fault) Disrupts() bool {
	return !slices.Contains([]plan.Kind{plan.Await, plan.Freeze, plan.Thaw, plan.Herd}, f.Kind)
}

func (j *judgement) firstFault() (instant.Instant, bool) {
	for _, f := range j.r.Faults {
		if f.Disrupts() {
			return f.From, true
		}
	}
	return 0, false
}

func (j *judgement) lastFault() instant.Instant {
	last := j.r.Began
	for _, f := range j.r.Faults {
		if f.Disrupts() {
			last = max(last, f.Until, f.From)
		}
	}
	return last
}

// promoted measures I7's time: from the first fault to another owner's first
// word.
func (j *judgement) promoted(out *Result, e plan.Expectation, part string) {
	from, ok := j.firstFault()
	if !ok {
		out.State, out.Why = Inconclusive, "nothing was broken"
		return
	}
	parts := j.r.Partitions
	if part != "" {
		parts = []string{part}
	}
	took, seen := time.Duration(0), 0
	for _, p := range parts {
		i := slices.IndexFunc(j.changes, func(c Change) bool { return c.Is.Of == p && c.Is.By != c.Was.By && c.Is.From > from })
		if i < 0 {
			continue
		}
		seen++
		took = max(took, j.changes[i].Is.From.Sub(from))
	}
	if seen == 0 {
		out.State, out.Measured = Broken, "no other region was promoted"
		return
	}
	out.within(took, e.Bound.Of(j.r.D, j.r.RTT))
}

// unavailable is the longest time without an answered call, over partitions.
func (j *judgement) unavailable(part string) (longest time.Duration, of string) {
	for _, p := range j.r.Partitions {
		if part != "" && p != part {
			continue
		}
		var served []instant.Instant
		any := false
		for _, a := range j.r.Actors {
			if a.Partition != p {
				continue
			}
			any = true
			for _, e := range a.Events {
				if (e.Kind == Acquired || e.Kind == Wrote) && e.At > j.r.Began && e.At <= j.r.Ended {
					served = append(served, e.At)
				}
			}
		}
		if !any {
			continue
		}
		slices.Sort(served)
		last := j.r.Began
		for _, at := range append(served, j.r.Ended) {
			if gap := at.Sub(last); gap > longest {
				longest, of = gap, p
			}
			last = at
		}
	}
	return longest, of
}

// Latencies of the calls of a kind that were answered in a span, sorted.
// An acquire that waited for another holder is none of its latency.
func Latencies(actors []Actor, kind Kind, from, until instant.Instant) []time.Duration {
	var out []time.Duration
	for _, a := range actors {
		for _, e := range a.Events {
			if e.Kind == kind && !e.Waited && e.At > from && e.At <= until && e.Sent > 0 {
				out = append(out, e.At.Sub(e.Sent))
			}
		}
	}
	slices.SortFunc(out, cmp.Compare[time.Duration])
	return out
}

// Quantile of sorted values: the smallest that at least a share q of them does
// not exceed.
func Quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	i := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

func millisFine(d time.Duration) string {
	if d < 10*time.Millisecond {
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	}
	return millis(d)
}
