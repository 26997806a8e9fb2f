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
func explain(slots int, ops []porcupine.Operation, info porcupine.LinearizationInfo) string {
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
	l := newLock(slots)
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

func describe(in *input) string {
	what := string(in.Kind)
	if in.place != 0 {
		what += " of " + in.Resource
	}
	if in.Session != "" {
		what += " " + short(in.Session)
	}
	for _, session := range in.sessions {
		what += " " + short(session)
	}
	if in.Request != 0 {
		what += fmt.Sprintf("/%d", in.Request)
	}
	if in.Token != 0 {
		what += fmt.Sprintf(" token %d", in.Token)
	}
	if in.Kind == Acquire && in.Wait {
		what += " wait"
	}
	a := in.Answer
	switch {
	case in.maybe:
		return what + "?"
	case in.forced:
		return what + "!"
	case a.Granted:
		what += fmt.Sprintf(" -> %s, token %d", in.Op.granted().resource, a.Token)
	case a.Queued:
		what += fmt.Sprintf(" -> %d ahead", a.Ahead)
	case a.Busy:
		what += fmt.Sprintf(" -> busy, token %d, %d wait", a.Token, a.Waiters)
	case in.Kind == Get && a.Session == "":
		what += " -> free"
	case in.Kind == Get:
		what += fmt.Sprintf(" -> %s holds %d with %q, %d wait", short(a.Session), a.Token, a.Value, a.Waiters)
	case in.Kind == Cancel && a.Token != 0:
		what += fmt.Sprintf(" -> has token %d", a.Token)
	case a.Code != "":
		what += " -> " + string(a.Code)
	}
	return what
}
