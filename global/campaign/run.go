package campaign

import (
	"math/bits"
	"slices"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

type stage uint8

const (
	stageDry stage = iota
	stageReserve
	stagePrepare
)

func (s stage) String() string {
	return [...]string{"asking (dry Prepare)", "reserving a ballot", "preparing"}[s]
}

// run is one campaign up to the choice of values, for the partitions that were
// due together. Those that go on sooner than the rest split off.
type run struct {
	stage stage
	// id is the round's number, or the reservation's.
	id     uint64
	ballot register.Ballot
	until  instant.Instant
	// sure: the reservation was not preceded by a dry Prepare.
	sure  bool
	parts []tally // ascending
}

// tally is what the voters answered on one partition.
type tally struct {
	part    int
	answers []answer // by voter
}

type answer struct {
	given  bool
	rule   register.Rule
	record register.Record
	// over is when the head lease is over by this voter's word (V2).
	over instant.Instant
}

func count(v votes) int { return bits.OnesCount64(uint64(v)) }

func (t *tally) yes() (v votes) {
	for i, a := range t.answers {
		if a.given && a.rule == register.RuleNone {
			v |= 1 << i
		}
	}
	return v
}

// no returns the voters that refused: for good, and until a head lease is over.
func (t *tally) no() (refused, running votes) {
	for i, a := range t.answers {
		switch {
		case !a.given || a.rule == register.RuleNone:
		case a.rule == register.RuleV2Running:
			running |= 1 << i
		default:
			refused |= 1 << i
		}
	}
	return refused, running
}

// highest returns the record of the highest accepted ballot among promises.
func (t *tally) highest() (rec register.Record) {
	for _, a := range t.answers {
		if a.given && a.rule == register.RuleNone && rec.Accepted.Less(a.record.Accepted) {
			rec = a.record
		}
	}
	return rec
}

// chosen returns a record that a majority has accepted under one ballot.
func (t *tally) chosen(maj int) (register.Record, bool) {
	for i, a := range t.answers {
		n := 0
		for _, b := range t.answers[i:] {
			if a.given && b.given && !a.record.Accepted.IsZero() && a.record.Accepted == b.record.Accepted {
				n++
			}
		}
		if n >= maj {
			return a.record, true
		}
	}
	return register.Record{}, false
}

// ask begins a campaign for all partitions that are due, with one dry Prepare
// [F31 F38]. An owner that releases and the successor that is named go without
// one at their first attempt: they disturb nobody, and each round trip of theirs
// is a time in which nobody can be granted a lease.
func (l *Leader) ask() {
	var due, sure []int
	for i := range l.parts {
		p := &l.parts[i]
		switch {
		case l.dueAt(i) > l.now:
		case p.fails == 0 && l.sure(p):
			p.running, p.hurry = true, false
			sure = append(sure, i)
		default:
			due = append(due, i)
		}
	}
	if len(sure) > 0 {
		l.reserve(sure)
		l.runs[len(l.runs)-1].sure = true
	}
	if len(due) > 0 {
		l.prepare(run{stage: stageDry, parts: l.tallies(due)})
	}
}

// sure: by the own register, the region is the owner that releases, or the
// successor that a release names.
func (l *Leader) sure(p *part) bool {
	rec := p.own.Record
	if p.release != nil {
		return rec.Value.Owner == l.cfg.Self || l.releasedHere(rec)
	}
	return l.offered(rec) && rec.Value.Successor == l.cfg.Self.Name
}

func (l *Leader) tallies(parts []int) []tally {
	ts := make([]tally, len(parts))
	for i, p := range parts {
		ts[i] = tally{part: p, answers: make([]answer, len(l.cfg.Voters))}
	}
	return ts
}

// prepare sends a dry or real Prepare and adds its run.
func (l *Leader) prepare(r run) {
	l.last++
	r.id, r.until = l.last, l.now.Add(l.cfg.GiveUp)
	names := make([]string, len(r.parts))
	for i, t := range r.parts {
		l.parts[t.part].running, l.parts[t.part].hurry = true, false
		names[i] = l.cfg.Partitions[t.part].Name
	}
	l.runs = append(l.runs, r)
	for _, v := range l.cfg.Voters {
		l.emit(SendPrepare{Voter: v, Round: r.id, Ballot: r.ballot, Dry: r.stage == stageDry, Partitions: names})
	}
}

func (l *Leader) prepareAnswered(voter int, id uint64, answers []PrepareAnswer) {
	k := slices.IndexFunc(l.runs, func(r run) bool { return r.id == id && r.stage != stageReserve })
	if k < 0 {
		return
	}
	r := &l.runs[k]
	for _, in := range answers {
		i, ok := l.q.partitions[in.Partition]
		if !ok {
			continue
		}
		p := &l.parts[i]
		p.seen = max(p.seen, in.Record.Promised.Round)
		j, ok := slices.BinarySearchFunc(r.parts, i, func(t tally, part int) int { return t.part - part })
		if !ok {
			continue
		}
		// A promise given stays given; what came before it in the same round may have been a passing refusal.
		if a := &r.parts[j].answers[voter]; !a.given || a.rule != register.RuleNone {
			*a = answer{given: true, rule: in.Rule, record: in.Record, over: l.now.Add(in.Remaining)}
		}
	}
	l.judge(k)
}

// judge moves on what a run's answers allow, and ends what they exclude.
func (l *Leader) judge(k int) {
	if l.stale {
		return
	}
	r := &l.runs[k]
	var open []tally
	var won, again []int
	for _, t := range r.parts {
		l.dropChosen(&t)
		yes := t.yes()
		p := &l.parts[t.part]
		switch {
		case r.stage == stageDry && l.q.reached(yes, l.promotion(p, l.choose(p, t.highest()))):
			if p.asks && p.release == nil {
				again = append(again, t.part)
			} else {
				won = append(won, t.part)
			}
		case r.stage == stagePrepare && l.win(r.ballot, &t):
			won = append(won, t.part)
		case l.hopeless(p, &t):
			l.failed(&t)
		default:
			open = append(open, t)
		}
	}
	r.parts = open
	dry := r.stage == stageDry
	if len(open) == 0 {
		l.runs = slices.Delete(l.runs, k, k+1)
	}
	if len(again) > 0 {
		l.again(again)
	}
	switch {
	case len(won) == 0:
	case dry:
		l.reserve(won)
	default:
		l.propose(won)
	}
}

// hopeless reports whether waiting for more answers makes no sense: they cannot
// bring a majority, or it is known when asking again will.
func (l *Leader) hopeless(p *part, t *tally) bool {
	refused, running := t.no()
	promotion := p.own.Live == 0 // with a live epoch, what is not heard yet may show that this is a resumption
	switch {
	case !l.q.reached(l.q.all&^refused, promotion):
		return true
	case t.yes()|refused|running == l.q.all:
		return true
	}
	return !l.q.reached(l.q.all&^(refused|running), promotion) && l.againAt(t) != never
}

// dropChosen drops the live epoch when a majority of voters reports one ballot
// with another owner or a higher epoch as accepted: that value is chosen,
// which is what a Prepare majority would show [H6], and an owner that renews
// in health never gives one a Prepare majority.
func (l *Leader) dropChosen(t *tally) {
	p := &l.parts[t.part]
	if p.own.Live == 0 || p.dropping != 0 {
		return
	}
	if rec, ok := t.chosen(l.q.maj); ok && (rec.Value.Owner != l.cfg.Self || rec.Value.Epoch > p.own.Live) && !l.ownRaise(p, rec.Value) {
		l.drop(t.part)
	}
}

func (l *Leader) drop(i int) {
	p := &l.parts[i]
	if p.held != 0 {
		l.lapse(i)
	}
	p.dropping = p.own.Live
	l.emit(Drop{l.cfg.Partitions[i].Name, p.dropping})
}

// choose is the value for a ballot whose Prepare majority has rec as its
// highest: the same, if it names this incarnation and that epoch is live here,
// else the next epoch [F11 H6].
func (l *Leader) choose(p *part, rec register.Record) register.Value {
	v := rec.Value
	if p.release != nil && (v.Owner == l.cfg.Self || l.releasedHere(rec)) && v.Epoch == p.own.Live && p.dropping == 0 {
		return register.Value{Era: l.cfg.Era, Epoch: v.Epoch, D: l.cfg.D, Successor: p.release.successor, Reason: p.release.reason}
	}
	next := register.Value{Era: l.cfg.Era, Owner: l.cfg.Self, Epoch: max(v.Epoch, p.own.Floor) + 1, D: l.cfg.D}
	live := !rec.Accepted.IsZero() && v.Owner == l.cfg.Self && v.Epoch == p.own.Live && p.dropping != v.Epoch
	switch {
	case live && p.raise:
		next.Reason = register.ReasonRaised
	case live, l.ownRaise(p, v):
		v.D = l.cfg.D
		return v
	case v.Released() && v.Successor == l.cfg.Self.Name:
		next.Reason = register.ReasonTransferred
	}
	return next
}

// win takes the value of a partition whose Prepare majority is complete.
func (l *Leader) win(ballot register.Ballot, t *tally) bool {
	p := &l.parts[t.part]
	rec := t.highest()
	v := l.choose(p, rec)
	if !l.q.reached(t.yes(), l.promotion(p, v)) {
		return false
	}
	if v.Epoch > fence.MaxEpoch {
		l.failed(t) // epochs are used up; Explain says so
		return true
	}
	if p.own.Live != 0 && p.dropping == 0 && (rec.Value.Owner != l.cfg.Self || rec.Value.Epoch > p.own.Live) && !l.ownRaise(p, rec.Value) {
		if !l.releasedHere(rec) || p.release == nil {
			l.drop(t.part)
		}
	}
	p.ballot, p.value = ballot, v
	p.planned = rec.Value.Released() && rec.Value.Reason == register.ReasonDrained && !v.Released()
	p.won, p.blocked, p.healAt = 0, 0, 0
	p.spreading, p.spreadUntil, p.told = false, 0, 0
	p.running, p.adopting = false, false
	p.asks, p.renewUntil = false, l.now.Add(v.D)
	switch {
	case p.held != 0 && (v.Released() || l.ownRaise(p, v)):
		l.lapse(t.part) // no leader of this region holds the old epoch beyond the Accept that ends it
	case !v.Released() && p.release != nil:
		// Another owner was there: nothing to release, and nothing wanted.
		p.release, p.ballot, p.value = nil, register.Ballot{}, register.Value{}
		p.base = l.now.Add(2 * l.cfg.D)
	}
	return true
}

// failed ends a partition's part in a run: ask again exactly when the head
// lease is over by enough voters' words, else after a back-off.
func (l *Leader) failed(t *tally) {
	p := &l.parts[t.part]
	p.running = false
	p.failed, p.failedAt = *t, l.now
	switch at := l.againAt(t); {
	case l.offered(p.own.Record):
		p.base = l.now.Add(l.backoff(p.fails)) // the others are about to hear of the release
	case at != never:
		p.base = max(at, l.now.Add(time.Millisecond))
	default:
		p.base = l.now.Add(l.backoff(p.fails))
		if own := t.answers[l.q.own]; own.given && own.rule == register.RuleV2Running {
			p.base = max(p.base, own.over)
		}
	}
	p.fails++
	if !p.ballot.IsZero() && p.healAt != 0 {
		p.healAt = p.base
	}
}

// againAt is when, by what was answered, enough voters will have seen the head
// lease end.
func (l *Leader) againAt(t *tally) instant.Instant {
	p := &l.parts[t.part]
	promotion := l.promotion(p, l.choose(p, t.highest()))
	type end struct {
		at    instant.Instant
		voter int
	}
	ends := make([]end, 0, len(t.answers))
	for i, a := range t.answers {
		if a.given && a.rule == register.RuleV2Running {
			ends = append(ends, end{a.over, i})
		}
	}
	slices.SortFunc(ends, func(a, b end) int { return int(a.at.Sub(b.at)) })
	have := t.yes()
	for _, e := range ends {
		if have |= 1 << e.voter; l.q.reached(have, promotion) {
			return e.at
		}
	}
	return never
}

// leaveRun takes a partition out of its run, if it is in one.
func (l *Leader) leaveRun(i int) {
	l.parts[i].running = false
	for k := range l.runs {
		r := &l.runs[k]
		r.parts = slices.DeleteFunc(r.parts, func(t tally) bool { return t.part == i })
	}
	l.runs = slices.DeleteFunc(l.runs, func(r run) bool { return len(r.parts) == 0 })
}

// next is when the run itself has something to do.
func (r *run) next(l *Leader) instant.Instant {
	if r.stage == stageReserve {
		return never
	}
	at := r.until
	if r.stage == stageDry {
		for i := range r.parts {
			at = min(at, l.againAt(&r.parts[i]))
		}
	}
	return at
}

// timeRuns ends runs that stay undecided, and those parts of a dry one that
// could win by now if asked again.
func (l *Leader) timeRuns() {
	for k := len(l.runs) - 1; k >= 0; k-- {
		r := &l.runs[k]
		if r.stage == stageReserve {
			continue
		}
		r.parts = slices.DeleteFunc(r.parts, func(t tally) bool {
			if r.until > l.now && (r.stage != stageDry || l.againAt(&t) > l.now) {
				return false
			}
			l.failed(&t)
			return true
		})
		if len(r.parts) == 0 {
			l.runs = slices.Delete(l.runs, k, k+1)
		}
	}
}

// reserve asks for the ballot of the partitions whose dry Prepare passed.
func (l *Leader) reserve(parts []int) {
	l.last++
	above := uint64(0)
	for _, i := range parts {
		above = max(above, l.parts[i].seen)
	}
	l.runs = append(l.runs, run{stage: stageReserve, id: l.last, until: never, parts: l.tallies(parts)})
	l.emit(Reserve{ID: l.last, Above: above})
}

// reserved goes on with a Prepare, or backs off when there is no ballot.
func (l *Leader) reserved(id uint64, ballot register.Ballot) {
	k := slices.IndexFunc(l.runs, func(r run) bool { return r.id == id && r.stage == stageReserve })
	if k < 0 {
		return
	}
	r := l.runs[k]
	l.runs = slices.Delete(l.runs, k, k+1)
	if ballot.Era != l.cfg.Era || ballot.Region != l.cfg.Self.Name || ballot.Incarnation != l.cfg.Self.Incarnation {
		for i := range r.parts {
			l.failed(&r.parts[i])
		}
		return
	}
	r.parts = slices.DeleteFunc(r.parts, func(t tally) bool {
		p := &l.parts[t.part]
		p.seen = max(p.seen, ballot.Round)
		if r.sure && !l.sure(p) { // not any more: ask first
			l.failed(&t)
			return true
		}
		return false
	})
	if len(r.parts) > 0 {
		l.prepare(run{stage: stagePrepare, ballot: ballot, parts: r.parts})
	}
}

func (l *Leader) recount() {
	for k := len(l.runs) - 1; k >= 0; k-- {
		if l.runs[k].stage != stageReserve {
			l.judge(k)
		}
	}
	for k := range l.rounds {
		l.countRound(&l.rounds[k])
	}
}
