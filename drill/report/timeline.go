// Package report is what a drill found: a timeline of events with measured
// times, as text for people, and the results as JSON for scripts. It is pure:
// instants come from the caller, all of one clock.
package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/headlease/headlease/internal/instant"
)

// Event is something that happened to an actor at an instant.
type Event struct {
	At    instant.Instant
	Actor string
	Text  string
}

// State is what an actor does over a span of time; the picture shows it as one
// character.
type State byte

// States.
const (
	// Holds: a region its head lease, a worker its lease.
	Holds State = '='
	// Waits: alive, without what it wants.
	Waits State = '.'
	// Frozen: stopped by SIGSTOP.
	Frozen State = '~'
	// Dead: its processes are gone.
	Dead State = 'x'
)

var stateNames = []struct {
	state State
	name  string
}{{Holds, "holds"}, {Waits, "waits"}, {Frozen, "frozen"}, {Dead, "dead"}}

// Span is an actor's state from an instant until its next span, or the last
// event of the timeline.
type Span struct {
	From  instant.Instant
	Actor string
	State State
}

// Timeline is the events and spans of one run. It is not safe for concurrent
// use. The zero value is ready.
type Timeline struct {
	Title string
	// Zero is the instant that the times count from; if it is 0, the first
	// event.
	Zero   instant.Instant
	Events []Event
	Spans  []Span
}

// Add records an event. Order does not matter.
func (t *Timeline) Add(at instant.Instant, actor, format string, args ...any) {
	t.Events = append(t.Events, Event{At: at, Actor: actor, Text: fmt.Sprintf(format, args...)})
}

// Enter records that an actor's state changed.
func (t *Timeline) Enter(at instant.Instant, actor string, state State) {
	t.Spans = append(t.Spans, Span{From: at, Actor: actor, State: state})
}

// marks name the events in the picture.
const marks = "abcdefghijklmnopqrstuvwyzABCDEFGHIJKLMNOPQRSTUVWYZ0123456789"

// pictureWidth is the time axis in characters.
const pictureWidth = 80

// Render writes the timeline as text: a picture with a line per actor, then the
// events with the time since Zero and since the event before.
func (t Timeline) Render(w io.Writer) error {
	var b strings.Builder
	events := slices.Clone(t.Events)
	slices.SortStableFunc(events, func(a, b Event) int { return cmp.Compare(a.At, b.At) })
	b.WriteString(t.Title + "\n")
	if len(events) == 0 {
		b.WriteString("  (no events)\n")
	} else {
		if t.Zero == 0 {
			t.Zero = events[0].At
		}
		t.picture(&b, events)
		t.list(&b, events)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (t Timeline) list(b *strings.Builder, events []Event) {
	wide := 0
	for _, e := range events {
		wide = max(wide, utf8.RuneCountInString(e.Actor))
	}
	before := events[0].At
	for i, e := range events {
		fmt.Fprintf(b, "  %s %11s  %10s  %-*s  %s\n", markOf(i), Millis(e.At.Sub(t.Zero)), "+"+Millis(e.At.Sub(before)), wide, e.Actor,
			strings.ReplaceAll(e.Text, "\n", " "))
		before = e.At
	}
	b.WriteByte('\n')
}

func markOf(i int) string {
	if i < len(marks) {
		return marks[i : i+1]
	}
	return "+"
}

// picture draws a line per actor, in the order in which they first appear.
func (t Timeline) picture(b *strings.Builder, events []Event) {
	first, last := events[0].At, events[len(events)-1].At
	spans := slices.Clone(t.Spans)
	slices.SortStableFunc(spans, func(a, b Span) int { return cmp.Compare(a.From, b.From) })
	if len(spans) > 0 {
		first, last = min(first, spans[0].From), max(last, spans[len(spans)-1].From)
	}
	column := func(at instant.Instant) int {
		if last == first {
			return 0
		}
		return int(int64(at.Sub(first)) * (pictureWidth - 1) / int64(last.Sub(first)))
	}
	lines := map[string][]byte{}
	var actors []string
	wide := 0
	line := func(actor string) []byte {
		if lines[actor] == nil {
			lines[actor] = []byte(strings.Repeat(" ", pictureWidth))
			actors = append(actors, actor)
			wide = max(wide, utf8.RuneCountInString(actor))
		}
		return lines[actor]
	}
	used := map[State]bool{}
	for _, s := range spans {
		l := line(s.Actor)
		for c := column(s.From); c < pictureWidth; c++ {
			l[c] = byte(s.State)
		}
		used[s.State] = true
	}
	for i, e := range events {
		l := line(e.Actor)
		c := column(e.At)
		// Events that fall on one column move right, so that each is seen.
		for c < pictureWidth-1 && strings.IndexByte(marks+"+", l[c]) >= 0 {
			c++
		}
		l[c] = markOf(i)[0]
	}
	for _, actor := range actors {
		fmt.Fprintf(b, "  %-*s  %s\n", wide, actor, strings.TrimRight(string(lines[actor]), " "))
	}
	from, to := Millis(first.Sub(t.Zero)), Millis(last.Sub(t.Zero))
	fmt.Fprintf(b, "  %*s  %s%*s\n", wide, "", from, pictureWidth-utf8.RuneCountInString(from), to)
	var legend []string
	for _, n := range stateNames {
		if used[n.state] {
			legend = append(legend, fmt.Sprintf("%c %s", n.state, n.name))
		}
	}
	if len(legend) > 0 {
		fmt.Fprintf(b, "  %*s  %s\n", wide, "", strings.Join(legend, "   "))
	}
	b.WriteByte('\n')
}

// Millis writes a time in whole milliseconds: "4812 ms".
func Millis(d time.Duration) string { return fmt.Sprintf("%d ms", ms(d)) }

// ms rounds to the nearest millisecond.
func ms(d time.Duration) int64 { return d.Round(time.Millisecond).Milliseconds() }
