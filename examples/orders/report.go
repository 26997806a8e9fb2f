package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/headlease/headlease/internal/pause"
)

// result of a run.
type result struct {
	// Verdict is ok, violated, inconclusive or failed; Why what it lacks.
	Verdict string        `json:"verdict"`
	Why     string        `json:"why,omitempty"`
	Took    time.Duration `json:"took_ns"`

	Seed      uint64 `json:"seed"`
	Guarded   bool   `json:"guarded"`
	Embedded  bool   `json:"embedded"`
	Redeploys int    `json:"redeploys"`
	Killed    int    `json:"workers_killed"`
	Frozen    int    `json:"workers_frozen"`
	// Producers that were killed.
	Producers int `json:"producers_killed"`
	Redis     int `json:"redis_restarts"`
	// Regions that were lost, and how long the longest took until its partitions
	// had owners again.
	Regions  int           `json:"regions_lost"`
	Failover time.Duration `json:"longest_failover_ns"`

	// Sent orders that a producer knows of; Orders that the streams had, of so
	// many Accounts; Rows and Entries of them that PostgreSQL and the ledger have.
	Sent     int    `json:"sent"`
	Orders   uint64 `json:"orders"`
	Accounts int    `json:"accounts"`
	Rows     int    `json:"rows"`
	Entries  int    `json:"entries"`
	// Late writes attempted after a freeze and those of them Refused, by store, as
	// the workers tell; Counted refusals as the stores tell, which count claims
	// and writes of all kinds.
	Late    map[string]int `json:"late"`
	Refused map[string]int `json:"refused"`
	Counted map[string]int `json:"counted_by_store"`
	// Stale writes accepted; Disorder: orders missing, twice or out of order.
	Stale    []string `json:"stale,omitempty"`
	Disorder []string `json:"disorder,omitempty"`
}

func newResult(o options) result {
	return result{
		Seed: o.seed, Guarded: !o.unguarded, Embedded: o.embedded,
		Late: map[string]int{}, Refused: map[string]int{}, Counted: map[string]int{},
	}
}

// mostExamples of each kind in a file; a control run has thousands.
const mostExamples = 100

func (r result) write(path string, took time.Duration, err error) error {
	var nothing inconclusive
	r.Took, r.Verdict = took, "ok"
	if err != nil {
		r.Why = err.Error()
	}
	switch {
	case err == nil:
	case errors.Is(err, errViolated):
		r.Verdict = "violated"
	case errors.As(err, &nothing):
		r.Verdict = "inconclusive"
	default:
		r.Verdict = "failed"
	}
	r.Stale, r.Disorder = r.Stale[:min(len(r.Stale), mostExamples)], r.Disorder[:min(len(r.Disorder), mostExamples)]
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// errViolated is of a run with the guard in which an order, or the order of
// orders, was lost.
var errViolated = errors.New("VIOLATIONS")

// judge says what the result shows.
func (r result) judge(o options) error {
	bad := slices.Concat(r.Stale, r.Disorder)
	switch {
	case len(bad) > 0 && !o.unguarded: // whatever else
		return fmt.Errorf("%w:\n  %s", errViolated, list(bad, 20))
	case r.Orders < uint64(o.messages) || r.Accounts < o.users:
		return inconclusive(fmt.Sprintf("%d orders of %d were produced, of %d accounts of %d", r.Orders, o.messages, r.Accounts, o.users))
	case min(r.Late[inPostgres], r.Late[inRedis]) < o.late:
		return inconclusive(fmt.Sprintf("late writes attempted: %s; %d are needed at each", summary(r.Late), o.late))
	case o.unguarded && len(r.Stale) == 0:
		return inconclusive("no stale write was accepted without the guard")
	case !o.unguarded && min(r.Refused[inPostgres], r.Refused[inRedis]) == 0:
		return inconclusive(fmt.Sprintf("late writes refused: %s", summary(r.Refused)))
	}
	// A stand-in may keep no count.
	for store, n := range r.Counted {
		if !o.unguarded && n == 0 {
			return inconclusive(store + " itself has counted no refusal")
		}
	}
	return nil
}

// print tells the result, but for its verdict.
func (r result) print(say func(format string, args ...any)) {
	say("broken: %d workers killed, %d frozen, %d redeployments, %d producers killed, %d restarts of Redis", r.Killed, r.Frozen, r.Redeploys, r.Producers, r.Redis)
	say("        %d regions lost, their partitions owned again after at most %.1f s", r.Regions, r.Failover.Seconds())
	say("%d orders of %d accounts in the streams, %d of them known to their producers; %d rows in PostgreSQL, %d entries in the ledger", r.Orders, r.Accounts, r.Sent, r.Rows, r.Entries)
	say("late writes attempted: %s; refused: %s", summary(r.Late), summary(r.Refused))
	if r.Embedded {
		say("refusals of any kind, by the table's own count: %d", r.Counted[inPostgres])
	} else {
		say("refusals of any kind, by the stores' own count: %s", summary(r.Counted))
	}
	say("stale writes accepted: %d; orders missing, twice or out of order: %d", len(r.Stale), len(r.Disorder))
}

// summary of counts by store.
func summary(counts map[string]int) string {
	return fmt.Sprintf("%d at PostgreSQL, %d at Redis", counts[inPostgres], counts[inRedis])
}

func list(v []string, most int) string {
	if len(v) > most {
		v = append(v[:most:most], fmt.Sprintf("… and %d more", len(v)-most))
	}
	return strings.Join(v, "\n  ")
}

// tellEvery is the pace of progress.
const tellEvery = 10 * time.Second

// tell prints how far everything is, until ctx ends.
func (t *theatre) tell(ctx context.Context) {
	for pause.For(ctx, tellEvery) == nil {
		n, err := t.book.Orders(ctx)
		if err != nil {
			continue // the run itself finds out
		}
		t.mu.Lock()
		sent, late := t.res.Sent, summary(t.res.Late)
		t.mu.Unlock()
		t.say("  … %d orders sent, %d handled; late writes: %s", sent, n, late)
	}
}
