package drill

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/history"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/shard"
)

const (
	// searchSteps bound the search for an order of one lock's history: some 10 s of
	// one core. searchLimit is for a machine that has no core to give.
	searchSteps = 10_000_000
	searchLimit = time.Minute
	// clockShare is the part of a validity that a client uses (1 - 2ρ).
	clockShare = 0.98
)

// histories judges what the clients of each region were told. A history is one
// region's; where a partition changed hands, its locks are judged up to then.
func (p *player) histories(changes map[string]instant.Instant) []check.History {
	var out []check.History
	for _, region := range p.rig.file().RegionNames() {
		rec := p.load.recorders[region]
		h := rec.History()
		if len(h.Ops) == 0 {
			continue
		}
		// The history's clock began before the steps did.
		zero := p.rig.clock.Now().Add(-rec.Now())
		out = append(out, p.history(region, h, zero, changes))
	}
	return out
}

func (p *player) history(region string, h history.History, zero instant.Instant, changes map[string]instant.Instant) check.History {
	cfg := history.Config{Share: clockShare, Steps: searchSteps, Timeout: searchLimit, Partition: p.partitionOf}
	out := check.History{Region: region}
	steps := slices.ContainsFunc(p.plan.Steps, func(s plan.Step) bool { return s.Do == plan.ClockStep && s.Clock == plan.LeaseClock })
	switch {
	case !p.rig.oneMachine:
		out.Partly = append(out.Partly, region+": clocks of several machines: of its histories only what rests on no clock was checked")
	case steps:
		out.Partly = append(out.Partly, region+": clocks that step: of its histories only what rests on no clock was checked")
	default:
		// The leaders' clocks are this machine's.
		cfg.Clocks = func(_ uint64, at int64) time.Duration { return instant.Instant(at).Sub(zero) }
	}
	moved := map[string]bool{} // locks
	first := instant.Instant(0)
	locks := map[string]bool{}
	for _, op := range h.Ops {
		if op.Resource == "" {
			continue
		}
		locks[op.Resource] = true
		if at, ok := changes[p.partitionOf(op.Resource)]; ok {
			moved[op.Resource] = true
			if first == 0 || at < first {
				first = at
			}
		}
	}
	out.Locks, out.Operations = len(locks), len(h.Ops)
	if len(moved) == 0 {
		v := history.Check(h, cfg)
		take(&out, v, nil)
		p.save(&out, h, v)
		return out
	}
	out.Partly = append(out.Partly, fmt.Sprintf("%s: the order of %d locks whose partition changed hands was checked up to then", region, len(moved)))
	before := prefix(h, first.Sub(zero))
	v := history.Check(h, cfg)
	take(&out, v, func(r string) bool { return !moved[r] })
	take(&out, history.Check(before, cfg), func(r string) bool { return moved[r] })
	p.save(&out, h, v)
	return out
}

// save keeps a history in which something is wrong beside the drill's logs.
func (p *player) save(out *check.History, h history.History, v *history.Verdict) {
	if len(out.Violations)+len(out.Undecided) == 0 {
		return
	}
	dir := filepath.Join(p.rig.dir, "history-"+out.Region)
	if err := history.Save(dir, h, v); err != nil {
		p.rig.log.Error("history not saved", "dir", dir, "error", err)
	}
}

func (p *player) partitionOf(lock string) string {
	res, err := shard.Parse(lock)
	if err != nil {
		return ""
	}
	n, err := res.Shard(p.rig.file().Shards)
	if err != nil {
		return ""
	}
	for _, q := range p.rig.file().Partitions {
		for _, s := range q.Shards {
			if s.First <= n && n <= s.Last {
				return q.Name
			}
		}
	}
	return ""
}

// prefix is a history as it was at an instant: what came later is not known.
func prefix(h history.History, until time.Duration) history.History {
	out := history.History{}
	for _, op := range h.Ops {
		if op.Call >= until {
			continue
		}
		c := *op
		if c.Return >= until {
			c.Return, c.Answer = history.Never, history.Answer{Code: history.Unknown, Error: "cut off"}
		}
		out.Ops = append(out.Ops, &c)
	}
	for _, m := range h.Messages {
		if m.At < until {
			out.Messages = append(out.Messages, m)
		}
	}
	for _, b := range h.Beliefs {
		if b.At < until {
			out.Beliefs = append(out.Beliefs, b)
		}
	}
	return out
}

// take adds a verdict, of the locks that are wanted.
func take(out *check.History, v *history.Verdict, want func(lock string) bool) {
	for _, x := range v.Violations {
		if !slices.Contains(out.Violations, x) {
			out.Violations = append(out.Violations, x)
		}
	}
	for _, lock := range v.Disordered {
		if want == nil || want(lock) {
			out.Violations = append(out.Violations, fmt.Sprintf("I6: %s: no order of its operations fits the answers; the search ended at %s",
				lock, strings.TrimSpace(v.Stuck[lock])))
		}
	}
	for _, lock := range v.Undecided {
		if want == nil || want(lock) {
			out.Undecided = append(out.Undecided, lock)
		}
	}
}
