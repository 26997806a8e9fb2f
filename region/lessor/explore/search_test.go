package explore

import (
	"fmt"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
)

// result of a search.
type result struct {
	states, transitions int
	depth               int
	complete            bool
	violation           string
	trace               []string
	took                time.Duration
}

func (r result) String() string {
	s := fmt.Sprintf("%d states, %d transitions, depth %d, %v", r.states, r.transitions, r.depth, r.took.Round(time.Millisecond))
	if r.violation != "" {
		return fmt.Sprintf("VIOLATION %s in %d steps (%s)", r.violation, len(r.trace), s)
	}
	if r.complete {
		return s + ", complete"
	}
	return s + ", limit"
}

// search goes breadth first from a world.
func search(from *world) result {
	begin := time.Now()
	over := func(i, states int) bool {
		return states >= from.o.limit || from.o.time > 0 && i%64 == 0 && time.Since(begin) > from.o.time
	}
	var r result
	seen := map[uint64]struct{}{}
	type node struct {
		parent int32
		step   step
	}
	var nodes []node
	type open struct {
		w  *world
		id int32
	}
	var buf []byte
	var frontier, next []open
	add := func(w *world, parent int32, s step) {
		w.normalise()
		buf = w.key(buf[:0])
		h := xxhash.Sum64(buf)
		if _, ok := seen[h]; ok {
			return
		}
		seen[h] = struct{}{}
		nodes = append(nodes, node{parent, s})
		id := int32(len(nodes) - 1)
		if v := w.violation(); v != "" && r.violation == "" {
			r.violation = v
			for at := id; at > 0; at = nodes[at].parent {
				r.trace = append(r.trace, nodes[at].step.String())
			}
			for i, j := 0, len(r.trace)-1; i < j; i, j = i+1, j-1 {
				r.trace[i], r.trace[j] = r.trace[j], r.trace[i]
			}
			return
		}
		next = append(next, open{w, id})
	}
	add(from, -1, step{op: "start", a: -1})
	stop := false
	for len(next) > 0 && !stop {
		frontier, next = next, nil
		for i := range frontier {
			f := frontier[i]
			frontier[i] = open{}
			f.w.successors(func(s step, n *world) {
				if r.violation == "" {
					r.transitions++
					add(n, f.id, s)
				}
			})
			if stop = r.violation != "" || over(i, len(seen)); stop {
				break
			}
		}
		if !stop {
			r.depth++
		}
	}
	r.states, r.complete = len(seen), !stop
	r.took = time.Since(begin)
	return r
}

func (r result) path() string { return strings.Join(r.trace, " → ") }
