package check

import (
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/instant"
)

const (
	// maxSilence is how long a process may go unheard without a fault that
	// explains it, if D is not longer.
	maxSilence = 2 * time.Second
	// afterFault is how long the silence of a fault may outlast it: the
	// process starts, or its region elects a leader.
	afterFault = 6 * time.Second
	// maxPressure is the share of its time in which something may wait for a
	// processor or the disk on a machine that shows what rests on time. Twelve
	// processes on two cores with nothing beside them stay under a half.
	maxPressure = 0.75
)

// Verdict on a drill.
type Verdict struct {
	Violations []Violation
	Results    []Result
	// Inconclusive are the reasons for which nothing was shown.
	Inconclusive []string
	// Stalled: every reason is that this machine did not run when it had to.
	Stalled bool
	// Checked says what the checks rest on, in words.
	Checked []string
}

// OK reports that everything held and that it was shown.
func (v Verdict) OK() bool { return !v.Failed() && len(v.Inconclusive) == 0 }

// Failed reports a violation, or an expectation that was broken.
func (v Verdict) Failed() bool {
	return len(v.Violations) > 0 || slices.ContainsFunc(v.Results, func(r Result) bool { return r.State == Broken })
}

// Word is "ok", "FAILED" or "inconclusive".
func (v Verdict) Word() string {
	switch {
	case v.Failed():
		return "FAILED"
	case len(v.Inconclusive) > 0:
		return "inconclusive"
	default:
		return "ok"
	}
}

// Check judges a record by the invariants and by expectations.
func Check(r *Record, expect []plan.Expectation) Verdict {
	l := ledgerOf(r.Answers)
	v := Verdict{Violations: invariants(r, l), Stalled: true}
	j := &judgement{r: r, l: l, changes: l.changes(r.Began)}
	stall := stalled(r)
	doubt := func(machine bool, format string, args ...any) {
		v.Inconclusive = append(v.Inconclusive, fmt.Sprintf(format, args...))
		v.Stalled = v.Stalled && machine
	}
	for _, f := range r.Faults {
		if f.NoEffect != "" {
			doubt(false, "step %d (%s) did not take effect: %s", f.Step+1, f.Title, f.NoEffect)
		}
	}
	for _, gap := range gaps(r) {
		doubt(stall != "", "%s", gap)
	}
	for _, h := range r.Histories {
		for _, u := range h.Undecided {
			doubt(stall != "", "%s: no order of the history of %s was found in time, nor that there is none", h.Region, u)
		}
	}
	for _, e := range expect {
		res := j.result(e)
		if res.State == Broken && e.Timed() && stall != "" {
			// What a machine that stood still did in time says nothing.
			res.State, res.Why = Inconclusive, stall
		}
		if res.State == Inconclusive {
			doubt(res.Why == stall && stall != "", "%s: %s", res.Text, res.Why)
		}
		v.Results = append(v.Results, res)
	}
	if r.SettledAt == 0 {
		text := "with all faults over the cluster did not settle: " + r.Unsettled
		if stall == "" {
			v.Violations = append(v.Violations, Violation{Rule: "I7", Text: text})
		} else {
			doubt(true, "%s; %s", text, stall)
		}
	}
	v.Stalled = v.Stalled && len(v.Inconclusive) > 0
	v.Checked = j.checked()
	return v
}

// gaps are the times in which something was not heard and no fault says why.
func gaps(r *Record) []string {
	var found []string
	limit := max(maxSilence, r.D)
	for _, w := range r.Watched {
		last := r.Began
		for _, at := range append(slices.Clone(w.Heard), r.Ended) {
			at = min(at, r.Ended)
			if at <= last {
				continue
			}
			if silent := r.unexplained(w.Name, last, at); silent > limit {
				found = append(found, fmt.Sprintf("%s was not heard from %s to %s, and no fault explains %s of it",
					w.Name, seconds(last.Sub(r.Began)), seconds(at.Sub(r.Began)), seconds(silent)))
			}
			last = at
		}
	}
	return found
}

// unexplained is the longest part of a silence outside all faults that silence
// the process.
func (r *Record) unexplained(name string, from, to instant.Instant) time.Duration {
	var longest time.Duration
	at := from
	faults := slices.Clone(r.Faults)
	slices.SortStableFunc(faults, func(a, b Fault) int { return int(min(max(a.From-b.From, -1), 1)) })
	for _, f := range faults {
		if !slices.Contains(f.Silences, name) {
			continue
		}
		begin, end := f.From, max(f.Until, f.From).Add(afterFault)
		if end <= at || begin >= to {
			continue
		}
		longest = max(longest, begin.Sub(at))
		at = max(at, end)
	}
	if at < to {
		longest = max(longest, to.Sub(at))
	}
	return longest
}

// stalled says how long this machine did not run the drill, if that was long
// enough to break what rests on time.
func stalled(r *Record) string {
	var longest, sum time.Duration
	var at instant.Instant
	for _, s := range r.Stalls {
		if s.At < r.Began || s.At > r.Ended {
			continue
		}
		sum += s.For
		if s.For > longest {
			longest, at = s.For, s.At
		}
	}
	for _, p := range r.Pressure {
		if p.Share > maxPressure {
			return fmt.Sprintf("the machine itself was overloaded: %.0f %% of the time something waited for %s", 100*p.Share, p.For)
		}
	}
	if longest < r.D/8 && sum < r.Ended.Sub(r.Began)/10 {
		return ""
	}
	return fmt.Sprintf("the machine itself stalled: for %s at %s, %s in all", millis(longest), seconds(at.Sub(r.Began)), millis(sum))
}

func (j *judgement) checked() []string {
	ops, histLocks := 0, 0
	var partly []string
	for _, h := range j.r.Histories {
		ops += h.Operations
		histLocks += h.Locks
		partly = append(partly, h.Partly...)
	}
	refused := 0
	for _, e := range j.r.Journal {
		if !e.Accepted {
			refused++
		}
	}
	out := []string{
		fmt.Sprintf("I1, I2: %d words of regions about their head leases", len(j.l.Claims)),
		fmt.Sprintf("I3, I4: %d beliefs of %d workers", len(beliefs(j.r.Actors)), len(j.r.Actors)),
		fmt.Sprintf("I5: %d entries of the resource's journal, %d of them refused", len(j.r.Journal), refused),
		fmt.Sprintf("I6: %d operations on %d locks, by porcupine", ops, histLocks),
	}
	if answered, cached := j.lookups(); len(answered) > 0 {
		out = append(out, fmt.Sprintf("look-ups: %d, of which %d came out of a lease cache", len(answered), cached))
	}
	return append(out, partly...)
}
