package check

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// Violation is an invariant that did not hold.
type Violation struct {
	// Rule is I1 to I7, or what else must hold of every drill.
	Rule string
	// At is when it shows; 0: it belongs to no instant.
	At instant.Instant
	// About is the partition or the lock.
	About string
	Text  string
}

func (v Violation) String() string { return v.Rule + ": " + v.Text }

// invariants checks I1 to I6; I7 is the bounds of the expectations.
func invariants(r *Record, l *Ledger) []Violation {
	found := judge(headLeases, l.Claims)
	found = append(found, judge(locks, beliefs(r.Actors))...)
	found = append(found, nested(r)...)
	found = append(found, journal(r.Journal)...)
	for _, h := range r.Histories {
		for _, v := range h.Violations {
			rule, text := "I6", v
			if head, tail, ok := strings.Cut(v, ": "); ok && len(head) == 2 && (head[0] == 'I' || head[0] == 'F') {
				rule, text = head, tail
			}
			found = append(found, Violation{Rule: rule, About: h.Region, Text: h.Region + ": " + text})
		}
	}
	slices.SortStableFunc(found, func(a, b Violation) int { return cmp.Or(cmp.Compare(a.Rule, b.Rule), cmp.Compare(a.At, b.At)) })
	return found
}

// beliefs are the spans over which workers believe that they hold their locks.
// Who releases a lease believes no more from when it begins to.
func beliefs(actors []Actor) []Claim {
	var out []Claim
	for _, a := range actors {
		ends := map[fence.Token]instant.Instant{}
		for _, e := range a.Events {
			if e.Kind == Released || e.Kind == Lost {
				ends[e.Token] = e.Sent
			}
		}
		for _, e := range a.Events {
			if e.Token == 0 || e.Until <= e.At || e.Kind == Released || e.Kind == Lost {
				continue
			}
			until := e.Until
			if end, ok := ends[e.Token]; ok && end < until {
				until = end
			}
			if until > e.At {
				out = append(out, Claim{Of: a.Lock, By: a.Name, Number: uint64(e.Token), From: e.At, Until: until})
			}
		}
	}
	return out
}

// nested checks I3: a worker believes no longer than its session, and than the
// head lease of the region, as far as that tells.
func nested(r *Record) []Violation {
	type key struct {
		partition string
		epoch     uint64
	}
	type word struct {
		asked, end instant.Instant
	}
	// reign is of one leader, between two restarts of its campaign.
	type reign struct {
		key
		term, restarts uint64
	}
	said := map[key][]word{}
	held := map[reign]instant.Instant{} // its first word that it holds was there
	sorted := slices.Clone(r.Answers)
	slices.SortStableFunc(sorted, func(a, b Answer) int { return cmp.Compare(a.Asked, b.Asked) })
	for _, a := range sorted {
		for _, s := range a.Says {
			by := reign{key{s.Partition, s.Epoch}, a.Term, a.Restarts}
			if first, ok := held[by]; s.Left > 0 && (!ok || a.Answered < first) {
				held[by] = a.Answered
			}
		}
	}
	for i, a := range sorted {
		if deposed(a, sorted[:i], sorted[i+1:]) {
			continue // another one may have renewed, and told clients so
		}
		for _, s := range a.Says {
			k := key{s.Partition, s.Epoch}
			first, ok := held[reign{k, a.Term, a.Restarts}]
			if s.Left <= 0 && (!ok || first > a.Asked || beginsAnew(a, sorted[i+1:])) {
				// A new leader holds nothing before its first round, and one whose clock
				// had a gap gives up what it holds, at once; what was sent stays good to
				// its end, also of a renewal that nobody was told of here.
				continue
			}
			// The latest end that the answer allows; of one who does not hold, it
			// is over by the answer.
			said[k] = append(said[k], word{a.Asked, a.Answered.Add(max(s.Left, 0))})
		}
	}
	var found []Violation
	told := map[string]bool{}
	tell := func(a Actor, e Event, what string, over time.Duration) {
		if id := a.Name + what; !told[id] {
			told[id] = true
			found = append(found, Violation{Rule: "I3", At: e.At, About: a.Lock, Text: fmt.Sprintf(
				"%s believes in its lease on %s (token %s) for %s longer than %s", a.Name, a.Lock, e.Token, millis(over), what)})
		}
	}
	for _, a := range r.Actors {
		for _, e := range a.Events {
			if e.Token == 0 || e.Until <= e.At {
				continue
			}
			if most := e.At.Add(min(r.D, r.TTL)); e.Until > most {
				tell(a, e, "any head lease or session lasts", e.Until.Sub(most))
			}
			heard := said[key{a.Partition, uint64(e.Token.Epoch())}]
			i, _ := slices.BinarySearchFunc(heard, e.At, func(w word, at instant.Instant) int { return cmp.Compare(w.asked, at) })
			if i < len(heard) && e.Until > heard[i].end {
				tell(a, e, "its region's head lease", e.Until.Sub(heard[i].end))
			}
		}
	}
	return found
}

// gapNoticed is the longest that a leader takes to notice that its clock has
// jumped. Until then all is over by its clock, and it is not counted as one that
// began anew.
const gapNoticed = 2 * time.Second

// unheard is the longest that a leader leads without being heard of: each server
// of a region is asked every 75 ms, or 250 ms after it gave no answer. How long the
// one before it goes on as if it led does not count.
const unheard = 500 * time.Millisecond

// deposed reports whether another one may have led when the leader of an answer
// gave it; before and later are the answers to what was asked before and after it.
func deposed(a Answer, before, later []Answer) bool {
	next := func(b Answer) bool { return b.Region == a.Region && b.Term > a.Term }
	for _, b := range slices.Backward(before) {
		if b.Asked < a.Asked.Add(-unheard) {
			break
		}
		if next(b) {
			return true
		}
	}
	for _, b := range later {
		if b.Asked > a.Answered.Add(unheard) {
			break
		}
		if next(b) {
			return true
		}
	}
	return false
}

// beginsAnew reports whether the leader of an answer began anew soon after it;
// later are the answers to what was asked after it.
func beginsAnew(a Answer, later []Answer) bool {
	for _, b := range later {
		if b.Asked > a.Answered.Add(gapNoticed) {
			return false
		}
		if b.Region == a.Region && b.Term == a.Term && b.Restarts > a.Restarts {
			return true
		}
	}
	return false
}

// journal checks I5, and I2 of tokens: no write is accepted with a token lower
// than one claimed or accepted before it.
func journal(entries []Entry) []Violation {
	highest := map[string]Entry{}
	var found []Violation
	for _, e := range entries {
		if !e.Accepted {
			continue
		}
		h, known := highest[e.Resource]
		if known && e.Token < h.Token && e.Op == "write" {
			found = append(found, Violation{Rule: "I5", About: e.Resource, Text: fmt.Sprintf(
				"entry %d: a write to %s by %s with token %s was accepted after entry %d, a %s by %s with token %s",
				e.N, e.Resource, e.Writer, e.Token, h.N, h.Op, h.Writer, h.Token)})
		}
		if known && e.Token == h.Token && e.Writer != h.Writer {
			found = append(found, Violation{Rule: "I2", About: e.Resource, Text: fmt.Sprintf(
				"entry %d: %s and %s wrote to %s with one token, %s", e.N, h.Writer, e.Writer, e.Resource, e.Token)})
		}
		if !known || e.Token > h.Token {
			highest[e.Resource] = e
		}
	}
	return found
}
