package check

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// Lookup is a client's look-up of a lock: a hint that says how old it is.
type Lookup struct {
	// Home is the region whose lease cache was asked first.
	Home, Lock string
	Sent, At   instant.Instant
	// Held with Token, as it was Age ago at most; Cached: out of the cache.
	Held   bool
	Token  fence.Token
	Age    time.Duration
	Cached bool
	// Failed says why there was no answer; empty: there was one.
	Failed string
}

// ageSlack is what an age may be too young by: caches count milliseconds of a
// clock that is read once a second, and write a moment after what they say.
const ageSlack = 250 * time.Millisecond

// life is what a token's holder knows of its lease: it was surely held from
// granted to let, and surely not any more from over on. Both are 0 while it is
// held, and where nothing is sure: of a lease that was lost, and of a release
// that failed.
type life struct {
	granted, let, over instant.Instant
	unsure             bool
}

// lives are the lives of all tokens, by lock.
func lives(actors []Actor) map[string]map[fence.Token]life {
	out := map[string]map[fence.Token]life{}
	for _, a := range actors {
		if out[a.Lock] == nil {
			out[a.Lock] = map[fence.Token]life{}
		}
		for _, e := range a.Events {
			x, known := out[a.Lock][e.Token]
			switch {
			case e.Kind == Acquired:
				x = life{granted: e.At}
			case !known:
				continue
			case e.Kind == Lost, e.Kind == Released && e.Reason != "":
				x.unsure = true
			case e.Kind == Released:
				x.let, x.over = e.Sent, e.At
			}
			out[a.Lock][e.Token] = x
		}
	}
	return out
}

// wrong says what is wrong with an answer: it was true at no time that its age
// allows.
func (l Lookup) wrong(tokens map[fence.Token]life) string {
	from := l.Sent.Add(-l.Age - ageSlack)
	if x, known := tokens[l.Token]; l.Held {
		if known && x.over != 0 && x.over < from {
			return fmt.Sprintf("token %s, %s old, was released %s before that", l.Token, millis(l.Age), millis(from.Sub(x.over)))
		}
		return "" // a token that nobody heard of may have been granted all the same
	}
	for _, token := range slices.Sorted(maps.Keys(tokens)) {
		if x := tokens[token]; !x.unsure && x.granted < from && (x.let == 0 || x.let > l.At) {
			return fmt.Sprintf("nobody, %s old, while token %s was held all that time", millis(l.Age), token)
		}
	}
	return ""
}

// lookupsWrong counts answers that were wrong, and says which.
func (j *judgement) lookupsWrong() (n int, texts []string) {
	all := lives(j.r.Actors)
	for _, l := range j.r.Lookups {
		if l.Failed != "" || l.Sent <= j.r.Began {
			continue
		}
		if text := l.wrong(all[l.Lock]); text != "" {
			n++
			texts = append(texts, fmt.Sprintf("%s by %s %s in: %s", l.Lock, l.Home, seconds(l.Sent.Sub(j.r.Began)), text))
		}
	}
	return n, texts
}

// lookups are the answered ones of the drill, and how many came out of a cache.
func (j *judgement) lookups() (answered []Lookup, cached int) {
	for _, l := range j.r.Lookups {
		if l.Failed == "" && l.Sent > j.r.Began && l.At <= j.r.Ended {
			answered = append(answered, l)
			if l.Cached {
				cached++
			}
		}
	}
	return answered, cached
}

// lookup evaluates an expectation about look-ups.
func (j *judgement) lookup(out *Result, e plan.Expectation) {
	answered, cached := j.lookups()
	if len(answered) == 0 || cached == 0 {
		out.State, out.Why = Inconclusive, fmt.Sprintf("of %d look-ups none came out of a lease cache", len(answered))
		return
	}
	switch e.Fact {
	case plan.LookupsWrong:
		n, texts := j.lookupsWrong()
		out.most(n, e.Most, texts)
	case plan.Lookups:
		out.least(len(answered), e)
	case plan.LookupAge:
		oldest := slices.MaxFunc(answered, func(a, b Lookup) int { return cmp.Compare(a.Age, b.Age) })
		out.within(oldest.Age, e.Bound.Of(j.r.D, j.r.RTT))
	case plan.Lookup:
		var took []time.Duration
		for _, l := range answered {
			took = append(took, l.At.Sub(l.Sent))
		}
		slices.Sort(took)
		out.within(Quantile(took, e.Quantile), e.Bound.Of(j.r.D, j.r.RTT))
	case plan.Cached:
		j.cachedAgain(out, e, answered)
	default:
	}
}

// cachedAgain measures from the end of the last fault of a cache until an
// answer out of it, over the regions whose caches had answered before: one that
// owns no partition looks nothing up.
func (j *judgement) cachedAgain(out *Result, e plan.Expectation, answered []Lookup) {
	ended := map[string]instant.Instant{}
	for _, f := range j.r.Faults {
		if f.Kind == plan.RedisDown {
			for _, region := range f.Of {
				if slices.ContainsFunc(answered, func(l Lookup) bool { return l.Home == region && l.Cached && l.At < f.From }) {
					ended[region] = max(ended[region], f.Until)
				}
			}
		}
	}
	if len(ended) == 0 {
		out.State, out.Why = Inconclusive, "no lease cache that had answered was down"
		return
	}
	var took time.Duration
	for _, region := range keys(ended) {
		i := slices.IndexFunc(answered, func(l Lookup) bool { return l.Home == region && l.Cached && l.Sent >= ended[region] })
		if i < 0 {
			out.State, out.Measured = Broken, region+" never looked up in its lease cache again"
			return
		}
		took = max(took, answered[i].At.Sub(ended[region]))
	}
	out.within(took, e.Bound.Of(j.r.D, j.r.RTT))
}
