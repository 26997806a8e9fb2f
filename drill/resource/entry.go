package resource

import (
	"fmt"
	"time"

	"github.com/headlease/headlease/fence"
)

// Op is what was asked of the resource.
type Op string

// Operations.
const (
	OpClaim Op = "claim"
	OpWrite Op = "write"
)

// Outcome is what became of it.
type Outcome string

// Outcomes.
const (
	Accepted Outcome = "accepted"
	// Stale: a higher token was seen before.
	Stale Outcome = "stale"
	// Unclaimed: nobody made a mark yet.
	Unclaimed Outcome = "unclaimed"
)

// Entry is one line of the journal: an operation as it was decided, in the
// order in which they took effect.
type Entry struct {
	// N counts the entries from 1.
	N uint64 `json:"n"`
	// Time is by the resource's wall clock: for people, and for measuring on
	// one machine.
	Time     time.Time   `json:"time"`
	Op       Op          `json:"op"`
	Resource string      `json:"resource"`
	Token    fence.Token `json:"token"`
	Writer   string      `json:"writer,omitempty"`
	Outcome  Outcome     `json:"outcome"`
	// Mark is the highest token seen when it was decided, this one included
	// unless it was refused.
	Mark  fence.Token `json:"mark"`
	Value string      `json:"value,omitempty"`
}

// Violations checks I5 over a journal: no write is accepted with a token lower
// than one claimed or accepted before it. It knows nothing of the guard; what
// it trusts is the order of the entries.
func Violations(entries []Entry) []string {
	type seen struct {
		token fence.Token
		by    Entry
	}
	highest := map[string]seen{}
	var found []string
	for _, e := range entries {
		if e.Outcome != Accepted {
			continue
		}
		h := highest[e.Resource]
		if e.Token < h.token && e.Op == OpWrite {
			found = append(found, fmt.Sprintf("I5: entry %d: a write to %s by %s with token %s was accepted after entry %d, a %s by %s with token %s",
				e.N, e.Resource, e.Writer, e.Token, h.by.N, h.by.Op, h.by.Writer, h.token))
		}
		if e.Token > h.token {
			highest[e.Resource] = seen{e.Token, e}
		}
	}
	return found
}
