package report

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// RegionLoss is the result of the drill of that name, as `--json` prints it.
type RegionLoss struct {
	OK bool `json:"ok"`
	// FailoverMS is from the first SIGKILL to the first write accepted under
	// the new token.
	FailoverMS int64 `json:"failover_ms"`
	// PromotedMS is from the first SIGKILL to the new owner's head lease.
	PromotedMS int64       `json:"promoted_ms"`
	DMS        int64       `json:"d_ms"`
	OldToken   fence.Token `json:"old_token"`
	NewToken   fence.Token `json:"new_token"`
	// StaleWriteRefused: the late write is in the resource's journal as refused.
	StaleWriteRefused bool `json:"stale_write_refused"`
	// GuardOffViolated: with the guard off the journal shows the late write
	// accepted, so that the drill can fail.
	GuardOffViolated bool     `json:"guard_off_violated"`
	Violations       []string `json:"violations"`
}

// RegionLossRun is what was measured in one run.
type RegionLossRun struct {
	// D is the length of a head lease, and RTT the longest round trip from the
	// promoted region to a voter that its majority needs.
	D, RTT time.Duration
	// Killed is the first SIGKILL; Promoted when the new owner held, Written
	// when the first write under the new token was accepted. 0: not seen.
	Killed, Promoted, Written instant.Instant
	OldToken, NewToken        fence.Token
	// LateRefused and LateAccepted say what the journal has of the late write.
	LateRefused, LateAccepted bool
	// Violations found by checking the journal, the regions' words and the
	// workers' beliefs; in a control run without what the guard's absence causes.
	Violations []string
}

// JudgeRegionLoss makes the result of a guarded run and its control run with
// the guard off. Whatever must hold and does not is a violation, named by its
// invariant (I1 to I7 of the design) where it has one.
func JudgeRegionLoss(guarded, control RegionLossRun) RegionLoss {
	r := RegionLoss{
		DMS: ms(guarded.D), OldToken: guarded.OldToken, NewToken: guarded.NewToken,
		StaleWriteRefused: guarded.LateRefused && !guarded.LateAccepted,
		GuardOffViolated:  control.LateAccepted,
		Violations:        []string{},
	}
	violated := func(format string, args ...any) { r.Violations = append(r.Violations, fmt.Sprintf(format, args...)) }
	r.Violations = append(r.Violations, guarded.Violations...)
	for _, v := range control.Violations {
		violated("control run: %s", v)
	}
	if guarded.Promoted != 0 {
		r.PromotedMS = ms(guarded.Promoted.Sub(guarded.Killed))
	}
	for i, run := range []RegionLossRun{guarded, control} {
		word := []string{"", "control run: "}[i]
		if run.Promoted == 0 {
			violated("%sI7: no region was promoted", word)
			continue
		}
		took, most := run.Promoted.Sub(run.Killed), MostPromotion(run.D, run.RTT)
		if took > most {
			violated("%sI7: the promotion took %s; at most %s (D + 4 RTT + 1 s) are allowed", word, Millis(took), Millis(most))
		}
	}
	if guarded.Written == 0 {
		violated("no write was accepted under a new token")
	} else {
		r.FailoverMS = ms(guarded.Written.Sub(guarded.Killed))
		if guarded.NewToken <= guarded.OldToken {
			violated("I2: the new token %s is not above the old one, %s", guarded.NewToken, guarded.OldToken)
		}
	}
	switch {
	case guarded.LateAccepted:
		violated("I5: the late write was accepted with the guard on")
	case !guarded.LateRefused:
		violated("the late write did not reach the resource, so nothing was shown")
	}
	if !r.GuardOffViolated {
		violated("the control run with the guard off shows no violation, so the drill cannot fail")
	}
	r.OK = len(r.Violations) == 0
	return r
}

// MostPromotion is I7's bound on a promotion: D + 4 RTT + 1 s after the owner
// fell silent.
func MostPromotion(d, rtt time.Duration) time.Duration { return d + 4*rtt + time.Second }

// Render writes the result as text.
func (r RegionLoss) Render(w io.Writer) error {
	var b strings.Builder
	row := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "  %-13s %s\n", name, fmt.Sprintf(format, args...))
	}
	row("tokens", "%s, then %s", tokenText(r.OldToken), tokenText(r.NewToken))
	row("promoted", "%d ms after the first SIGKILL (D is %d ms)", r.PromotedMS, r.DMS)
	row("failover", "%d ms from the first SIGKILL to the first write accepted under the new token", r.FailoverMS)
	row("late write", "%s", yesNo(r.StaleWriteRefused, "refused by the resource", "NOT refused by the resource"))
	row("control run", "%s", yesNo(r.GuardOffViolated, "with the guard off the late write is accepted: the guard is what refuses it",
		"with the guard off NO violation was seen"))
	verdict(&b, r.OK, r.Violations)
	_, err := io.WriteString(w, b.String())
	return err
}

// CableCut is the result of the drill of that name.
type CableCut struct {
	OK  bool  `json:"ok"`
	DMS int64 `json:"d_ms"`
	// CutMS is how long the two regions were cut from each other.
	CutMS int64 `json:"cut_ms"`
	// Promotions are changes of owner, Lapses times at which an owner's head
	// lease ran out, over the cut and its heal.
	Promotions int `json:"promotions"`
	Lapses     int `json:"lapses"`
	// WritesAccepted under the leases held from before the cut.
	WritesAccepted int      `json:"writes_accepted"`
	Violations     []string `json:"violations"`
	// Inconclusive says why nothing was shown: the cut did not cut.
	Inconclusive string `json:"inconclusive,omitempty"`
}

// JudgeCableCut completes a result: with the witnesses seen by both regions a
// cut changes nothing.
func JudgeCableCut(r CableCut) CableCut {
	r.Violations = append([]string{}, r.Violations...)
	violated := func(format string, args ...any) { r.Violations = append(r.Violations, fmt.Sprintf(format, args...)) }
	if r.Promotions > 0 {
		violated("%d changes of owner; a cut between two regions that see the witnesses must cause none", r.Promotions)
	}
	if r.Lapses > 0 {
		violated("%d lapses of a head lease; a cut between two regions that see the witnesses must cause none", r.Lapses)
	}
	if r.CutMS < 2*r.DMS {
		violated("the cut lasted %d ms, under 2 D (%d ms), so nothing was shown", r.CutMS, 2*r.DMS)
	}
	if r.WritesAccepted == 0 {
		violated("no write was accepted during the cut, so nothing was shown")
	}
	if len(r.Violations) > 0 {
		r.Inconclusive = "" // something was shown
	}
	r.OK = len(r.Violations) == 0 && r.Inconclusive == ""
	return r
}

// Render writes the result as text.
func (r CableCut) Render(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "  %-13s %d ms (D is %d ms)\n", "cut", r.CutMS, r.DMS)
	fmt.Fprintf(&b, "  %-13s %d promotions, %d lapses, %d writes accepted\n", "meanwhile", r.Promotions, r.Lapses, r.WritesAccepted)
	if r.Inconclusive != "" {
		fmt.Fprintf(&b, "  %-13s inconclusive: %s\n", "result", r.Inconclusive)
	}
	if r.Inconclusive == "" || len(r.Violations) > 0 {
		verdict(&b, r.OK, r.Violations)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteJSON writes a result as one line of JSON.
func WriteJSON(w io.Writer, result any) error { return json.NewEncoder(w).Encode(result) }

func verdict(b *strings.Builder, ok bool, violations []string) {
	if len(violations) == 0 {
		fmt.Fprintf(b, "  %-13s none\n", "violations")
	}
	for i, v := range violations {
		fmt.Fprintf(b, "  %-13s %s\n", yesNo(i == 0, "violations", ""), v)
	}
	fmt.Fprintf(b, "  %-13s %s\n", "result", yesNo(ok, "ok", "FAILED"))
}

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
