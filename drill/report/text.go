package report

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/headlease/headlease/fence"
)

// Render writes the report as text.
func (r *Report) Render(w io.Writer) error {
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	if err := r.timeline.Render(w); err != nil {
		return err
	}
	var b strings.Builder
	row := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "  %-13s %s\n", name, fmt.Sprintf(format, args...))
	}
	for _, f := range r.Faults {
		switch {
		case f.NoEffect != "":
			row("no effect", "step %d, %s: %s", f.Step, f.Title, f.NoEffect)
		case f.Disrupts:
			row("effect", "step %d, %s: %s", f.Step, f.Title, f.Effect)
		}
	}
	if r.StaleWriteRefused != nil {
		row("tokens", "%s, then %s", tokenText(r.OldToken), tokenText(r.NewToken))
		row("failover", "%d ms from the first fault to the first write accepted under the new token", r.FailoverMS)
	}
	for _, e := range r.Expectations {
		text := e.Text
		if e.Measured != "" {
			text += " (" + e.Measured + ")"
		}
		if e.Why != "" {
			text += ": " + e.Why
		}
		row(e.State, "%s", text)
	}
	if r.GuardOffViolated != nil {
		row("control run", "%s", yesNo(*r.GuardOffViolated, "with the guard off the late write is accepted: the guard is what refuses it",
			"with the guard off NO violation was seen"))
	}
	for _, c := range r.Checked {
		row("checked", "%s", c)
	}
	for _, x := range r.Inconclusive {
		row("inconclusive", "%s", x)
	}
	if len(r.Violations) == 0 {
		row("violations", "none")
	}
	for i, v := range r.Violations {
		row(yesNo(i == 0, "violations", ""), "%s", v)
	}
	row("result", "%s", r.Verdict)
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteJSON writes the report as one line of JSON.
func WriteJSON(w io.Writer, result any) error { return json.NewEncoder(w).Encode(result) }

func tokenText(t fence.Token) string {
	if t == 0 {
		return "none"
	}
	return fmt.Sprintf("%s (epoch %d, grant %d)", t, t.Epoch(), t.Seq())
}

func yesNo(b bool, yes, no string) string {
	if b {
		return yes
	}
	return no
}
