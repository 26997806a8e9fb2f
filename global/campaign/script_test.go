package campaign

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// TestScripts plays the interaction traces under testdata: inputs to one
// Leader, and the effects it answers with. Time counts from the start of its
// term. Rewrite with -rewrite, and read the diff.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		s := &script{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.do(t, d) })
	})
}

const origin = instant.Instant(1000 * time.Second)

type script struct {
	l   *Leader
	now instant.Instant
}

var rules = map[string]register.Rule{
	"yes": register.RuleNone, "v1": register.RuleV1Ballot, "v2": register.RuleV2Running, "v3": register.RuleV3Alive,
	"pending": register.RulePending, "alarm": register.RuleAlarm, "conflict": register.RuleConflict, "retry": register.RuleRetry,
}

func arg[T any](t *testing.T, d *datadriven.TestData, key string, def T, parse func(string) (T, error)) T {
	for _, a := range d.CmdArgs {
		if a.Key == key && len(a.Vals) > 0 {
			v, err := parse(a.Vals[0])
			if err != nil {
				d.Fatalf(t, "%s: %v", key, err)
			}
			return v
		}
	}
	return def
}

func text(s string) (string, error) { return s, nil }

func epoch(s string) (fence.Epoch, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	return fence.Epoch(n), err
}

// parseBallot reads ROUND.REGION.
func parseBallot(s string) (register.Ballot, error) {
	round, name, ok := strings.Cut(s, ".")
	n, err := strconv.ParseUint(round, 10, 64)
	if !ok || err != nil {
		return register.Ballot{}, fmt.Errorf("ballot %q is not ROUND.REGION", s)
	}
	return register.Ballot{Round: n, Region: name, Incarnation: 1}, nil
}

// record reads promised=, accepted=, owner=, epoch=, successor= and reason=. An
// accepted ballot is promised too unless told.
func record(t *testing.T, d *datadriven.TestData) register.Record {
	acc := arg(t, d, "accepted", register.Ballot{}, parseBallot)
	rec := register.Record{Accepted: acc, Promised: arg(t, d, "promised", acc, parseBallot)}
	if !acc.IsZero() {
		rec.Value = register.Value{Epoch: arg(t, d, "epoch", 0, epoch), D: arg(t, d, "d", 4*sec, time.ParseDuration), Successor: arg(t, d, "successor", "", text), Reason: strings.ReplaceAll(arg(t, d, "reason", "", text), "_", " ")}
		if owner := arg(t, d, "owner", "", text); owner != "" {
			rec.Value.Owner = region(owner)
		}
	}
	return rec
}

func (s *script) do(t *testing.T, d *datadriven.TestData) string {
	number := func(key string) uint64 {
		return arg(t, d, key, 0, func(v string) (uint64, error) { return strconv.ParseUint(v, 10, 64) })
	}
	p := arg(t, d, "p", "p", text)
	ep := arg(t, d, "epoch", 0, epoch)
	var out []Effect
	switch d.Cmd {
	case "new":
		cfg := testConfig(func(c *Config) {
			name := arg(t, d, "region", "eu", text)
			c.Self, c.OwnVoter = region(name), "region/"+name
			c.Rho = arg(t, d, "rho", 0, func(v string) (float64, error) { return strconv.ParseFloat(v, 64) })
			if n := number("witnesses"); n > 0 {
				c.Voters = c.Voters[:2]
				for i := range n {
					c.Voters = append(c.Voters, Voter{fmt.Sprintf("witness/w%d", i+1), 1, true})
				}
			}
			for i := uint64(1); i < number("partitions"); i++ {
				c.Partitions = append(c.Partitions, Partition{fmt.Sprintf("p%d", i+1), []string{"eu", "us"}})
			}
		})
		own := make([]Own, len(cfg.Partitions))
		own[0] = Own{Record: record(t, d), Live: arg(t, d, "live", 0, epoch)}
		own[0].Floor = arg(t, d, "floor", own[0].Live, epoch)
		var err error
		if s.l, err = New(cfg, own, origin); err != nil {
			return err.Error()
		}
		s.now = origin
		out = s.l.Tick(s.now)
	case "pass": // time passes without a timer
		s.now = s.now.Add(arg(t, d, "for", 0, time.ParseDuration))
		return ""
	case "tick":
		s.now = s.now.Add(arg(t, d, "after", 0, time.ParseDuration))
		out = s.l.Tick(s.now)
	case "wait": // until the next timer
		s.now = max(s.now, s.l.Next())
		return fmt.Sprintf("at %v\n%s", s.now.Sub(origin), show(s.l.Tick(s.now)))
	case "next":
		return s.l.Next().Sub(origin).String()
	case "prepare-answer":
		a := PrepareAnswer{Partition: p, Rule: rules[arg(t, d, "rule", "yes", text)], Record: record(t, d), Remaining: arg(t, d, "left", 0, time.ParseDuration)}
		inc := register.Incarnation(arg(t, d, "incarnation", 1, strconv.Atoi))
		out = s.l.PrepareAnswered(s.now, arg(t, d, "voter", "", text), inc, number("round"), repeat(a, s.l, p, func(a *PrepareAnswer, name string) { a.Partition = name }))
	case "accept-answer":
		a := AcceptAnswer{Partition: p, Rule: rules[arg(t, d, "rule", "yes", text)], Record: record(t, d)}
		inc := register.Incarnation(arg(t, d, "incarnation", 1, strconv.Atoi))
		out = s.l.AcceptAnswered(s.now, arg(t, d, "voter", "", text), inc, number("round"), repeat(a, s.l, p, func(a *AcceptAnswer, name string) { a.Partition = name }))
	case "reserved":
		out = s.l.Reserved(s.now, number("id"), arg(t, d, "ballot", register.Ballot{}, parseBallot))
	case "reserve-failed":
		out = s.l.ReserveFailed(s.now, number("id"))
	case "adopted":
		out = s.l.Adopted(s.now, p, ep)
	case "adopt-failed":
		out = s.l.AdoptFailed(s.now, p, ep)
	case "dropped":
		out = s.l.Dropped(s.now, p, ep)
	case "drop-failed":
		out = s.l.DropFailed(s.now, p, ep)
	case "register":
		out = s.l.RegisterChanged(s.now, p, record(t, d))
	case "suspect":
		verdicts := map[string]register.Verdict{"healthy": register.VerdictHealthy, "slow": register.VerdictSlow, "crashed": register.VerdictCrashed}
		out = s.l.Suspicion(s.now, arg(t, d, "region", "", text), verdicts[arg(t, d, "verdict", "", text)])
	case "pulse":
		out = s.l.PulseStale(s.now, arg(t, d, "stale", false, strconv.ParseBool))
	case "hurry":
		out = s.l.Hurry(s.now, p)
	case "release":
		out = s.l.Release(s.now, p, arg(t, d, "successor", "", text), "test")
	case "raise":
		out = s.l.Raise(s.now, p)
	case "keep-on":
		var ok bool
		out, ok = s.l.KeepOn(s.now, p)
		return strings.TrimPrefix(fmt.Sprintf("%v\n%s", ok, show(out)), "\n")
	case "explain":
		var b strings.Builder
		for _, st := range s.l.Explain(s.now) {
			fmt.Fprintf(&b, "%s: %s\n", st.Partition, st.Text)
		}
		return b.String()
	default:
		d.Fatalf(t, "unknown command %q", d.Cmd)
	}
	return show(out)
}

// repeat gives the same answer for every partition when p is "all".
func repeat[T any](a T, l *Leader, p string, set func(*T, string)) []T {
	if p != "all" {
		return []T{a}
	}
	var out []T
	for _, part := range l.cfg.Partitions {
		b := a
		set(&b, part.Name)
		out = append(out, b)
	}
	return out
}

// show writes effects one a line; a message to several voters is one line.
func show(effects []Effect) string {
	var lines []string
	to := func(line, voter string) {
		if n := len(lines); n > 0 && strings.HasPrefix(lines[n-1], line+" -> ") {
			lines[n-1] += " " + voter
			return
		}
		lines = append(lines, line+" -> "+voter)
	}
	for _, e := range effects {
		switch e := e.(type) {
		case SendPrepare:
			if e.Dry {
				to(fmt.Sprintf("dry prepare, round %d, %v", e.Round, e.Partitions), e.Voter.ID)
			} else {
				to(fmt.Sprintf("prepare %v, round %d, %v", e.Ballot, e.Round, e.Partitions), e.Voter.ID)
			}
		case SendAccept:
			var items []string
			for _, it := range e.Items {
				what := fmt.Sprintf("%s: %v {%s %d}", it.Partition, it.Ballot, it.Value.Owner.Name, it.Value.Epoch)
				if it.Value.Successor != "" {
					what += " for " + it.Value.Successor
				}
				if !it.Value.Released() && it.Value.Reason != "" {
					what += " (" + it.Value.Reason + ")"
				}
				items = append(items, what)
			}
			to(fmt.Sprintf("accept, round %d, %s", e.Round, strings.Join(items, ", ")), e.Voter.ID)
		case Reserve:
			lines = append(lines, fmt.Sprintf("reserve %d above round %d", e.ID, e.Above))
		case Adopt:
			planned := ""
			if e.Planned {
				planned = ", planned"
			}
			lines = append(lines, fmt.Sprintf("ADOPT %s %d at %v%s", e.Partition, e.Epoch, e.Ballot, planned))
		case Drop:
			lines = append(lines, fmt.Sprintf("DROP %s %d", e.Partition, e.Epoch))
		case Held:
			lines = append(lines, fmt.Sprintf("HELD %s %d until %v", e.Partition, e.Epoch, e.Until.Sub(origin)))
		case Lapsed:
			lines = append(lines, fmt.Sprintf("LAPSED %s %d", e.Partition, e.Epoch))
		case Released:
			lines = append(lines, fmt.Sprintf("RELEASED %s %d", e.Partition, e.Epoch))
		}
	}
	return strings.Join(lines, "\n")
}
