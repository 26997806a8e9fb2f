package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// addEvents tells the story: faults, changes of owner, leases lost, writes
// refused; of the workers that freeze, all.
func (r *Report) addEvents(rec *check.Record) {
	add := func(at instant.Instant, who, format string, args ...any) {
		if at < rec.Began || at > rec.Ended {
			return
		}
		r.Events = append(r.Events, Moment{r.ms(at), who, fmt.Sprintf(format, args...)})
		r.timeline.Add(at, who, format, args...)
	}
	for _, f := range rec.Faults {
		who := "drill"
		if len(f.Of) == 1 {
			who = f.Of[0]
		}
		if !f.Disrupts() {
			continue
		}
		of := ""
		if len(f.Of) > 1 {
			of = " (" + strings.Join(f.Of, ", ") + ")"
		}
		add(f.From, who, "%s%s", f.Title, of)
		if f.Until > f.From && f.Until < rec.Ended {
			add(f.Until, who, "over: %s", f.Title)
		}
	}
	for _, c := range check.Changes(rec) {
		add(c.Is.From, c.Is.By, "holds partition %s with epoch %d; %s had it with epoch %d", c.Is.Of, c.Is.Number, c.Was.By, c.Was.Number)
	}
	for _, x := range check.Lapses(rec) {
		add(x.At, x.Region, "holds partition %s (epoch %d) no more", x.Partition, x.Epoch)
	}
	for _, a := range rec.Actors {
		r.addActor(a, add)
	}
	if rec.SettledAt != 0 {
		add(rec.SettledAt, "drill", "the cluster is settled again")
	}
	slices.SortStableFunc(r.Events, byTime)
	r.spans(rec)
}

func (r *Report) addActor(a check.Actor, add func(instant.Instant, string, string, ...any)) {
	told := map[fence.Token]bool{}
	pair := slices.ContainsFunc(a.Events, func(e check.Event) bool { return e.Kind == check.Asked || e.Kind == check.Frozen })
	for _, e := range a.Events {
		switch e.Kind {
		case check.Lost:
			add(e.At, a.Name, "lost %s (token %s): %s", a.Lock, e.Token, e.Reason)
		case check.Refused:
			add(e.At, a.Name, "its write to %s with token %s was REFUSED, %s", a.Lock, e.Token, e.Reason)
		case check.Failed:
			add(e.At, a.Name, "a write to %s got no answer: %s", a.Lock, e.Reason)
		case check.Acquired:
			if pair {
				add(e.At, a.Name, "acquired the lock in %s with token %s", e.Region, e.Token)
			}
		case check.Frozen:
			add(e.At, a.Name, "lease.Valid() says yes; stopped before its send")
		case check.Thawed:
			add(e.At, a.Name, "wakes up, knows nothing of it all, and its write goes out")
		case check.Wrote:
			if pair && !told[e.Token] {
				add(e.At, a.Name, "its first write under token %s is accepted", e.Token)
			}
			told[e.Token] = true
		default:
		}
	}
}

// spans are the picture in text: regions that hold, and workers that freeze.
func (r *Report) spans(rec *check.Record) {
	r.timeline.Title, r.timeline.Zero = r.Scenario, rec.Began
	for _, x := range r.Regions {
		r.timeline.Enter(rec.Began, x, Waits)
	}
	for _, x := range check.Reigns(rec) {
		if x.Until <= rec.Began || len(rec.Partitions) > 0 && x.Partition != rec.Partitions[0] {
			continue
		}
		r.timeline.Enter(max(x.From, rec.Began), x.Region, Holds)
		r.timeline.Enter(min(x.Until, rec.Ended), x.Region, Waits)
	}
	for _, a := range rec.Actors {
		for _, e := range a.Events {
			if e.Kind == check.Frozen {
				r.timeline.Enter(max(e.At, rec.Began), a.Name, Frozen)
			}
			if e.Kind == check.Thawed {
				r.timeline.Enter(e.At, a.Name, Waits)
			}
		}
	}
}

// around returns what happened near a violation, of whatever it is about.
func (r *Report) around(rec *check.Record, v check.Violation) []Moment {
	var out []Moment
	from, until := v.At.Add(-around), v.At.Add(around)
	add := func(at instant.Instant, who, format string, args ...any) {
		if at >= from && at <= until {
			out = append(out, Moment{r.ms(at), who, fmt.Sprintf(format, args...)})
		}
	}
	for _, m := range r.Events {
		if at := r.zero.Add(time.Duration(m.AtMS * float64(time.Millisecond))); at >= from && at <= until {
			out = append(out, m)
		}
	}
	for _, a := range rec.Actors {
		if a.Lock != v.About && a.Partition != v.About {
			continue
		}
		for _, e := range a.Events {
			switch e.Kind {
			case check.Acquired, check.Released:
				add(e.At, a.Name, "%s %s with token %s", e.Kind, a.Lock, e.Token)
			case check.Wrote:
				add(e.At, a.Name, "wrote with token %s, and believes in it for %s more", e.Token, Millis(max(0, e.Until.Sub(e.At))))
			default:
			}
		}
	}
	slices.SortStableFunc(out, byTime)
	if extra := len(out) - mostAround; extra > 0 {
		mid := r.ms(v.At)
		// Those nearest to it.
		slices.SortStableFunc(out, func(a, b Moment) int { return cmp.Compare(math.Abs(a.AtMS-mid), math.Abs(b.AtMS-mid)) })
		out = out[:mostAround]
		slices.SortStableFunc(out, byTime)
	}
	return out
}

func byTime(a, b Moment) int { return cmp.Compare(a.AtMS, b.AtMS) }
