package explore

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"time"
)

// seen is a set of hashes: open addressing, 64 bits a state. A state could be
// taken for another with a probability of about n²/2^65.
type seen struct {
	table []uint64
	n     int
}

func (h *seen) add(v uint64) bool {
	if v == 0 {
		v = 1
	}
	if 4*(h.n+1) > 3*len(h.table) {
		old := h.table
		h.table = make([]uint64, max(1<<16, 2*len(old)))
		for _, w := range old {
			if w != 0 {
				h.table[h.find(w)] = w
			}
		}
	}
	i := h.find(v)
	if h.table[i] == v {
		return false
	}
	h.table[i] = v
	h.n++
	return true
}

func (h *seen) find(v uint64) int {
	mask := uint64(len(h.table) - 1)
	i := v & mask
	for h.table[i] != 0 && h.table[i] != v {
		i = (i + 1) & mask
	}
	return int(i)
}

// link leads back to the state that a state was first reached from.
type link struct {
	from uint32
	act  action
}

type result struct {
	states, steps, depth int
	leaders              int
	complete             bool
	bad                  string
	trace                []string
	took                 time.Duration
}

func (r result) String() string {
	s := fmt.Sprintf("%d states, %d steps, depth %d, %d states of a leader, %v", r.states, r.steps, r.depth, r.leaders, r.took.Round(10*time.Millisecond))
	if r.complete {
		s += ", complete"
	}
	return s
}

// search explores breadth first, so that the first violation is a shortest one.
func search(opt option) result {
	x := newExplorer(opt)
	began := time.Now()
	var set seen
	var links []link
	var level, following []state
	seed := maphash.MakeSeed()
	res := result{}
	add := func(s state, from uint32, a action) {
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
		res.states, res.leaders, res.took = len(links), len(x.nodes)-1, time.Since(began)
		return res
	}
	for len(following) > 0 {
		level, following = following, level[:0]
		res.depth++
		for i := range level {
			if opt.states > 0 && len(links) >= opt.states || opt.limit > 0 && i&0x3ff == 0 && time.Since(began) > opt.limit {
				return finish()
			}
			var bad string
			var by action
			x.actions(&level[i], func(a action) {
				if bad != "" {
					return
				}
				s, ok, b := x.do(level[i], a)
				if b != "" {
					bad, by = b, a
					return
				}
				if ok {
					res.steps++
					add(s, uint32(base+i), a)
				}
			})
			if bad != "" {
				res.bad = bad
				res.trace = x.trace(starts, links, base+i, by)
				return finish()
			}
		}
		base += len(level)
	}
	res.complete = true
	return finish()
}

// trace replays the way to a violation.
func (x *explorer) trace(starts []state, links []link, at int, last action) []string {
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
		line := fmt.Sprintf("%v: %s", a, x.show(t))
		if bad != "" {
			line += " <- " + bad
		}
		out = append(out, line)
		s = t
	}
	return out
}

func (x *explorer) show(s state) string {
	var b strings.Builder
	for v := range voters {
		vs := x.voters[s.voter[v]]
		fmt.Fprintf(&b, "[%s p%v a%v", voterID(v)[:1]+voterID(v)[len(voterID(v))-1:], vs.rec.Promised, vs.rec.Accepted)
		if !vs.rec.Accepted.IsZero() {
			fmt.Fprintf(&b, "={%s %d} left %d", vs.rec.Value.Owner.Name, vs.rec.Value.Epoch, dv-vs.age)
		}
		if !vs.pending.IsZero() {
			fmt.Fprintf(&b, " pending %v", vs.pending)
		}
		b.WriteString("] ")
	}
	for slot := range slots {
		n := x.nodes[s.slot[slot]]
		if n == nil {
			continue
		}
		who := "stale"
		if s.current(slot) {
			who = "leader"
		}
		fmt.Fprintf(&b, "%s %s", regionName[slot/2], who)
		if !n.prep.ballot.IsZero() {
			fmt.Fprintf(&b, " prepares %v yes %03b", n.prep.ballot, n.prep.yes)
		}
		for _, r := range n.rounds {
			fmt.Fprintf(&b, " r%d@%v:%03b", r.id, ballotAt(r.ballot), r.votes)
			if r.late != 0 {
				fmt.Fprintf(&b, "+%03b", r.late)
			}
		}
		if s.hold[slot] > 0 {
			fmt.Fprintf(&b, " HOLDS %d for %d", s.epoch[slot], s.hold[slot])
		}
		b.WriteString("; ")
	}
	return b.String()
}
