package plan

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Span is a length of time that may be counted in head leases (D) and round
// trips (RTT): "3D + 4RTT + 1s", "D/2", "250ms".
type Span struct {
	D, RTT float64
	Fixed  time.Duration
}

// Of is the span in a cluster with this D, and this round trip between the
// sites concerned.
func (s Span) Of(d, rtt time.Duration) time.Duration {
	return time.Duration(s.D*float64(d)) + time.Duration(s.RTT*float64(rtt)) + s.Fixed
}

// IsZero reports whether the span is of no length, whatever D is.
func (s Span) IsZero() bool { return s == Span{} }

func (s Span) String() string {
	var parts []string
	unit := func(n float64, name string) {
		switch {
		case n == 1:
			parts = append(parts, name)
		case n != 0:
			parts = append(parts, strconv.FormatFloat(n, 'g', -1, 64)+name)
		}
	}
	unit(s.D, "D")
	unit(s.RTT, "RTT")
	if s.Fixed != 0 || len(parts) == 0 {
		parts = append(parts, s.Fixed.String())
	}
	return strings.Join(parts, " + ")
}

// maxSpan is longer than any drill.
const maxSpan = 24 * time.Hour

// ParseSpan reads a sum of lengths, each a time ("1s") or a multiple or a part
// of D or RTT ("3D", "D/2", "4 RTT").
func ParseSpan(s string) (Span, error) {
	var out Span
	if strings.TrimSpace(s) == "" {
		return out, errors.New(`empty; write a time such as 5s, 3D or "D + 1s"`)
	}
	for term := range strings.SplitSeq(s, "+") {
		term = strings.ReplaceAll(term, " ", "")
		number, unit, divisor := term, "", 1.0
		if head, tail, ok := strings.Cut(term, "/"); ok {
			n, err := strconv.ParseFloat(tail, 64)
			if err != nil || !(n >= 1 && n <= 1000) {
				return Span{}, fmt.Errorf("%q: divide by a number from 1 to 1000", term)
			}
			number, divisor = head, n
		}
		for _, u := range []string{"RTT", "D"} {
			if head, ok := strings.CutSuffix(number, u); ok {
				number, unit = head, u
				break
			}
		}
		if unit == "" {
			d, err := time.ParseDuration(term)
			if err != nil {
				return Span{}, fmt.Errorf("%q is not a length of time; write 5s, 3D, D/2, 4RTT, or a sum of such", term)
			}
			if d < 0 || d > maxSpan {
				return Span{}, fmt.Errorf("%q is outside 0 to %v", term, maxSpan)
			}
			if out.Fixed += d; out.Fixed > maxSpan {
				return Span{}, fmt.Errorf("%q is over %v", s, maxSpan)
			}
			continue
		}
		n := 1.0
		if number != "" {
			var err error
			if n, err = strconv.ParseFloat(number, 64); err != nil || !(n >= 0 && n <= 1000) {
				return Span{}, fmt.Errorf("%q: write a number from 0 to 1000 before %s", term, unit)
			}
		}
		if unit == "D" {
			out.D += n / divisor
		} else {
			out.RTT += n / divisor
		}
	}
	return out, nil
}
