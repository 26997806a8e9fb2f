package history

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// lastSteps and nextSteps are how much of a broken history is shown.
const (
	lastSteps = 14
	nextSteps = 8
)

// explain shows where the search for an order got stuck: the end of the longest
// order that it found, and the calls that had to come next.
func explain(ops []porcupine.Operation, info porcupine.LinearizationInfo) string {
	var longest []int
	for _, part := range info.PartialLinearizations() {
		for _, l := range part {
			if len(l) > len(longest) {
				longest = l
			}
		}
	}
	var b strings.Builder
	show := func(op porcupine.Operation) {
		ret := "-"
		if op.Return != math.MaxInt64 {
			ret = time.Duration(op.Return).Round(time.Microsecond).String()
		}
		fmt.Fprintf(&b, "    [%v %v] %s\n", time.Duration(op.Call).Round(time.Microsecond), ret, describe(op.Input.(*input)))
	}
	l := &lock{}
	done := map[int]bool{}
	fmt.Fprintf(&b, "  an order of %d of %d operations was found; it ends with\n", len(longest), len(ops))
	for i, id := range longest {
		done[id] = true
		if i >= len(longest)-lastSteps {
			show(ops[id])
		}
		_, l = step(l, ops[id].Input.(*input))
		if l == nil {
			return b.String()
		}
	}
	fmt.Fprintf(&b, "  then the lock is: %v\n  and next, in this or another order, had to come\n", l)
	var left []porcupine.Operation
	for id, op := range ops {
		if !done[id] && !op.Input.(*input).maybe {
			left = append(left, op)
		}
	}
	slices.SortFunc(left, func(a, b porcupine.Operation) int { return cmp.Compare(a.Return, b.Return) })
	for _, op := range left[:min(nextSteps, len(left))] {
		show(op)
	}
	return b.String()
}
