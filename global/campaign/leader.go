package campaign

import (
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// never is an instant that does not come.
const never = instant.Instant(1<<63 - 1)

// Leader is the proposer of one term of a region's Raft leader. It is not safe
// for concurrent use.
type Leader struct {
	cfg *Config
	q   *quorum

	start instant.Instant
	now   instant.Instant
	parts []part
	runs  []run
	// rounds are the Accept rounds that may still count, oldest first.
	rounds []acceptRound
	// last numbers rounds and reservations of this term alike.
	last     uint64
	renewAt  instant.Instant
	verdicts map[string]register.Verdict
	stale    bool

	out []Effect
}

// part is what a Leader knows of one partition.
type part struct {
	own Own
	// seen is the highest round known to be promised anywhere; the next ballot
	// goes above it.
	seen uint64
	// base is when to ask next, before the wait by rank.
	base  instant.Instant
	fails int
	// failed is the last attempt that came to nothing, at failedAt; for Explain.
	failed   tally
	failedAt instant.Instant
	// running says that a run has this partition.
	running bool
	// hurry asks at once, whatever else waits.
	hurry bool

	// ballot and value are what Accept rounds carry; no ballot: none.
	ballot register.Ballot
	value  register.Value
	// won is the end of the hold by the newest complete round of this ballot;
	// zero: no round was complete yet.
	won instant.Instant
	// renewUntil is when Accepts stop going out if no round is complete before:
	// D after the newest complete one, or after the first of this ballot. Voters
	// count each as a renewal, so an owner that reaches too few of them would
	// keep all others out. From then on asks is set: a dry Prepare, which
	// restarts no clock, goes first.
	renewUntil instant.Instant
	asks       bool
	// blocked are voters that have promised a higher ballot: they will never
	// accept this one again.
	blocked votes
	// healAt is when an owner takes a new ballot to win blocked voters back,
	// or to change D; zero: no need.
	healAt instant.Instant

	// release is set from Release until the released value is chosen.
	release *release
	// raise: Raise was asked for and the next epoch is not adopted yet.
	raise bool
	// planned is Adopt's, for value.
	planned bool
	// spreading: value is a release that is chosen; it goes out again until the
	// successor's voter is among those told, which have it or come after it. Not for
	// long: each time restarts the clocks of voters that keep all but the successor
	// out.
	spreading   bool
	spreadUntil instant.Instant
	told        votes

	adopting bool
	// dropping is an epoch whose Drop is proposed. It is dead from then on
	// here, whatever becomes of the command.
	dropping fence.Epoch

	// held is what the last Held effect said; epoch zero: nothing.
	held      fence.Epoch
	heldUntil instant.Instant
}

// release is what a planned transfer asked for; it does not change.
type release struct{ successor, reason string }

// New returns the proposer of a term that begins at start. own is the state of
// each partition of cfg, in its order. The first Tick, due at once, sends what
// a predecessor may have left half done: a value under which the own register
// names this region owner is sent again at its recorded ballot.
func New(cfg Config, own []Own, start instant.Instant) (*Leader, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("campaign: %w", err)
	}
	if len(own) != len(cfg.Partitions) {
		return nil, fmt.Errorf("campaign: have own state of %d partitions, configuration has %d", len(own), len(cfg.Partitions))
	}
	cfg = cfg.withDefaults()
	l := &Leader{
		cfg: &cfg, q: newQuorum(cfg), start: start, now: start, renewAt: never,
		parts: make([]part, len(own)), verdicts: map[string]register.Verdict{},
	}
	for i, o := range own {
		p := &l.parts[i]
		*p = part{own: o, seen: o.Record.Promised.Round, base: start}
		rec := o.Record
		if rec.Accepted.IsZero() || rec.Alarm != "" || rec.Promised != rec.Accepted || !l.resumable(p) {
			continue
		}
		p.ballot, p.value = rec.Accepted, rec.Value
		p.renewUntil = start.Add(rec.Value.D)
		l.renewAt = start
		if rec.Value.D != cfg.D {
			p.healAt = start.Add(cfg.D)
		}
	}
	return l, nil
}

// resumable reports whether the own register's value may be sent again as it
// is: it names this region, and its epoch is live or was never adopted or
// dropped here; or it is this region's release of the live epoch.
func (l *Leader) resumable(p *part) bool {
	v := p.own.Record.Value
	if v.Era != l.cfg.Era {
		return false
	}
	if l.releasedHere(p.own.Record) {
		return v.Epoch == p.own.Live
	}
	return v.Owner == l.cfg.Self && (v.Epoch == p.own.Live || v.Epoch > p.own.Floor)
}

// ownRaise reports whether v is this region's own raise of its live epoch.
func (l *Leader) ownRaise(p *part, v register.Value) bool {
	return v.Reason == register.ReasonRaised && v.Owner == l.cfg.Self &&
		p.own.Live != 0 && p.dropping == 0 && v.Epoch == p.own.Live+1
}

// raised reports whether the raise is proposed: rounds do the rest.
func (l *Leader) raised(p *part) bool { return !p.ballot.IsZero() && l.ownRaise(p, p.value) }

// releasedHere reports whether rec is a release that this region proposed.
func (l *Leader) releasedHere(rec register.Record) bool {
	return !rec.Accepted.IsZero() && rec.Value.Released() &&
		rec.Accepted.Region == l.cfg.Self.Name && rec.Accepted.Incarnation == l.cfg.Self.Incarnation
}

// offered reports whether rec is another region's release that this one may
// take at once.
func (l *Leader) offered(rec register.Record) bool {
	v := rec.Value
	return !rec.Accepted.IsZero() && v.Released() && !l.releasedHere(rec) && (v.Successor == "" || v.Successor == l.cfg.Self.Name)
}

// promotion reports whether v needs a majority of the witnesses too. An epoch
// that is live here was chosen by a promotion before, so only its renewals,
// resumptions and raise are free of that.
func (l *Leader) promotion(p *part, v register.Value) bool {
	return v.Epoch != p.own.Live && !l.ownRaise(p, v)
}

// Tick does what is due.
func (l *Leader) Tick(now instant.Instant) []Effect {
	l.advance(now)
	return l.take()
}

// Reserved reports the ballot of a Reserve.
func (l *Leader) Reserved(now instant.Instant, id uint64, ballot register.Ballot) []Effect {
	l.clock(now)
	l.reserved(id, ballot)
	return l.Tick(now)
}

// ReserveFailed reports that a Reserve is certain to have no effect.
func (l *Leader) ReserveFailed(now instant.Instant, id uint64) []Effect {
	l.clock(now)
	l.reserved(id, register.Ballot{})
	return l.Tick(now)
}

// PrepareAnswered reports a voter's answers to a Prepare or dry Prepare.
// Answers of other rounds, of strangers and of another incarnation have no
// effect.
func (l *Leader) PrepareAnswered(now instant.Instant, voter string, inc register.Incarnation, round uint64, answers []PrepareAnswer) []Effect {
	l.clock(now)
	if v, ok := l.voter(voter, inc); ok {
		l.prepareAnswered(v, round, answers)
	}
	return l.Tick(now)
}

// AcceptAnswered reports a voter's answers to an Accept round; see
// PrepareAnswered.
func (l *Leader) AcceptAnswered(now instant.Instant, voter string, inc register.Incarnation, round uint64, answers []AcceptAnswer) []Effect {
	l.clock(now)
	if v, ok := l.voter(voter, inc); ok {
		l.acceptAnswered(v, round, answers)
	}
	return l.Tick(now)
}

// Adopted reports that an Adopt took effect.
func (l *Leader) Adopted(now instant.Instant, partition string, epoch fence.Epoch) []Effect {
	l.clock(now)
	if i, p := l.part(partition); p != nil {
		p.own.Live, p.own.Floor = epoch, max(p.own.Floor, epoch)
		p.adopting, p.raise = false, false
		l.settle(i)
	}
	return l.Tick(now)
}

// AdoptFailed reports that an Adopt was refused or is certain to have no
// effect.
func (l *Leader) AdoptFailed(now instant.Instant, partition string, epoch fence.Epoch) []Effect {
	l.clock(now)
	if _, p := l.part(partition); p != nil && p.adopting {
		p.adopting = false
		if p.value.Epoch == epoch {
			l.abandon(p)
		}
	}
	return l.Tick(now)
}

// Dropped reports that a Drop took effect.
func (l *Leader) Dropped(now instant.Instant, partition string, epoch fence.Epoch) []Effect {
	l.clock(now)
	if i, p := l.part(partition); p != nil {
		if p.own.Live == epoch {
			p.own.Live, p.raise = 0, false
		}
		p.own.Floor = max(p.own.Floor, epoch)
		p.dropping = 0
		l.settle(i)
	}
	return l.Tick(now)
}

// DropFailed reports that a Drop is certain to have no effect.
func (l *Leader) DropFailed(now instant.Instant, partition string, epoch fence.Epoch) []Effect {
	l.clock(now)
	if i, p := l.part(partition); p != nil && p.dropping == epoch {
		p.dropping = 0
		l.settle(i)
	}
	return l.Tick(now)
}

// RegisterChanged reports a change of the own register.
func (l *Leader) RegisterChanged(now instant.Instant, partition string, rec register.Record) []Effect {
	l.clock(now)
	if _, p := l.part(partition); p != nil {
		p.own.Record = rec
		p.seen = max(p.seen, rec.Promised.Round)
		if p.spreading && rec.Accepted != p.ballot {
			l.stopSpreading(p) // another value has come after it
		}
		if l.offered(rec) {
			p.base, p.fails = min(p.base, l.now), 0
		}
	}
	return l.Tick(now)
}

// Suspicion reports a change in the own detector's verdict on a region. It is
// a hint: it moves when the Leader asks, never what it may do.
func (l *Leader) Suspicion(now instant.Instant, region string, verdict register.Verdict) []Effect {
	l.clock(now)
	l.verdicts[region] = verdict
	if verdict == register.VerdictCrashed {
		for i := range l.parts {
			if p := &l.parts[i]; p.own.Record.Value.Owner.Name == region {
				// The places count from here: all candidates begin to hope at
				// about this time, and the end of the lease, which may be well
				// before, would let the second start into the first.
				p.base, p.fails = l.now, 0
			}
		}
	}
	return l.Tick(now)
}

// Hurry begins a campaign for the partition now, whatever it waits for and
// whatever it owns: a running campaign is given up, back-off starts afresh, and
// an owner takes a new ballot.
func (l *Leader) Hurry(now instant.Instant, partition string) []Effect {
	l.clock(now)
	if i, p := l.part(partition); p != nil {
		l.leaveRun(i)
		p.hurry, p.base, p.fails = true, l.now, 0
	}
	return l.Tick(now)
}

// Release gives the live epoch away: once this leader has led for D, so that
// none before it can still hold, it takes a new ballot, and if the Prepare
// majority shows this region as owner it lets go of its hold, counts no older
// round any more, and proposes the released value [H2]. Until then it holds on.
// Released tells when that is chosen. The caller has drained the partition
// before. Without a live epoch, or when another owner turns up, nothing is
// released.
func (l *Leader) Release(now instant.Instant, partition, successor, reason string) []Effect {
	l.clock(now)
	if i, p := l.part(partition); p != nil && p.own.Live != 0 && p.dropping == 0 && p.release == nil && !p.raise && !l.raised(p) && !l.releasing(p) {
		l.leaveRun(i)
		p.release, p.base, p.fails = &release{successor, reason}, l.now, 0
	}
	return l.Tick(now)
}

// KeepOn takes a Release back. It reports whether it could: not once the
// released value is proposed, since it may be chosen at any time from then on.
func (l *Leader) KeepOn(now instant.Instant, partition string) (effects []Effect, ok bool) {
	l.clock(now)
	i, p := l.part(partition)
	if p == nil || p.own.Live == 0 || p.dropping != 0 || l.releasing(p) || l.releasedHere(p.own.Record) {
		return l.Tick(now), false
	}
	if p.release != nil {
		l.leaveRun(i)
		p.release, p.base, p.fails = nil, l.now, 0
		if p.blocked != 0 || !p.ballot.IsZero() && p.own.Record.Promised != p.ballot {
			p.healAt = l.now // the Prepare may have taken voters away from the present ballot
		}
	}
	return l.Tick(now), true
}

// Releasing reports whether a release of the partition is proposed, by this
// leader or one before it, and not superseded as far as the own register knows.
func (l *Leader) Releasing(partition string) bool {
	_, p := l.part(partition)
	return p != nil && (l.releasing(p) || l.releasedHere(p.own.Record))
}

// releasing reports whether a release is proposed.
func (l *Leader) releasing(p *part) bool { return !p.ballot.IsZero() && p.value.Released() }

// Raise gives the live epoch up for the next one of the same owner, before the
// epoch's sequence numbers run out [F47]: like a Release, by a new ballot whose
// Prepare majority shows this region as owner, once this leader has led for D.
// The Adopt of the next epoch follows; there is no Drop, and no other region
// comes in between. Without a live epoch, or while it is being released,
// nothing is raised.
func (l *Leader) Raise(now instant.Instant, partition string) []Effect {
	l.clock(now)
	if i, p := l.part(partition); p != nil && p.own.Live != 0 && p.own.Live < fence.MaxEpoch && p.dropping == 0 &&
		p.release == nil && !p.raise && !l.raised(p) && !l.releasing(p) {
		l.leaveRun(i)
		p.raise, p.base, p.fails = true, l.now, 0
	}
	return l.Tick(now)
}

// PulseStale says whether the newest committed pulse is too old for anything
// to count. While it is, answers are kept and no round becomes complete.
func (l *Leader) PulseStale(now instant.Instant, stale bool) []Effect {
	l.clock(now)
	l.stale = stale
	if !stale {
		l.recount()
	}
	return l.Tick(now)
}

// Next returns when Tick has something to do; very far when nothing waits.
func (l *Leader) Next() instant.Instant {
	next := l.renewAt
	if l.stale {
		next = never
	}
	for i := range l.parts {
		p := &l.parts[i]
		if p.held != 0 {
			next = min(next, p.heldUntil)
		}
		next = min(next, l.dueAt(i))
	}
	for i := range l.runs {
		next = min(next, l.runs[i].next(l))
	}
	return next
}

// Open reports whether a yes to a round can still have an effect. The caller
// may end its retries for one that is not open; a refusal that still comes is
// worth passing on.
func (l *Leader) Open(round uint64) bool {
	return slices.ContainsFunc(l.runs, func(r run) bool { return r.id == round && r.stage != stageReserve }) ||
		slices.ContainsFunc(l.rounds, func(r acceptRound) bool { return r.id == round })
}

// Forget lets go of an Accept round whose answers the caller has given up: it
// will never be complete. Renewals go on.
func (l *Leader) Forget(round uint64) {
	l.rounds = slices.DeleteFunc(l.rounds, func(r acceptRound) bool { return r.id == round })
}

func (l *Leader) clock(now instant.Instant) { l.now = max(l.now, now) }

func (l *Leader) emit(e Effect) {
	if l.out == nil {
		l.out = make([]Effect, 0, len(l.cfg.Voters)+2) // a round, and a little
	}
	l.out = append(l.out, e)
}

func (l *Leader) take() []Effect {
	out := l.out
	l.out = nil
	return out
}

func (l *Leader) voter(id string, inc register.Incarnation) (int, bool) {
	i, ok := l.q.index[id]
	return i, ok && l.cfg.Voters[i].Incarnation == inc
}

func (l *Leader) part(name string) (int, *part) {
	i, ok := l.q.partitions[name]
	if !ok {
		return 0, nil
	}
	return i, &l.parts[i]
}

// advance does everything that time alone brings.
func (l *Leader) advance(now instant.Instant) {
	l.clock(now)
	for i := range l.parts {
		if p := &l.parts[i]; p.held != 0 && p.heldUntil <= l.now {
			l.lapse(i)
		}
	}
	l.forget()
	l.timeRuns()
	// What cannot count here must not keep others out: a renewal restarts the
	// clocks of the voters that hear it [F30].
	if l.renewAt <= l.now && !l.stale {
		l.renew()
	}
	l.ask()
}

func (l *Leader) lapse(i int) {
	p := &l.parts[i]
	l.emit(Lapsed{l.cfg.Partitions[i].Name, p.held})
	p.held, p.heldUntil = 0, 0
}

// backoff returns the wait after the n-th failure in a row, with jitter [F39].
func (l *Leader) backoff(n int) time.Duration {
	d := max(l.cfg.D/32<<min(n, maxFails), time.Millisecond)
	return d/2 + time.Duration(l.cfg.Rand.Int64N(int64(d/2)+1))
}

// rank is the region's place among those in the preference list that are
// believed healthy; zero for an owner and a named successor.
func (l *Leader) rank(i int) int {
	v := l.parts[i].own.Record.Value
	if v.Owner == l.cfg.Self || v.Successor == l.cfg.Self.Name {
		return 0
	}
	n := 0
	for _, region := range l.cfg.Partitions[i].Prefer {
		if region == l.cfg.Self.Name {
			break
		}
		if l.verdicts[region] != register.VerdictCrashed {
			n++
		}
	}
	return n
}

// dueAt is when the partition should begin a campaign.
func (l *Leader) dueAt(i int) instant.Instant {
	p := &l.parts[i]
	switch {
	case l.stale, p.running, p.own.Record.Alarm != "":
		return never
	case !p.ballot.IsZero() && p.value.Released() && !p.spreading:
		return never // sent again until it is chosen
	case p.release != nil, p.raise && !l.raised(p):
		return max(p.base, l.start.Add(max(l.cfg.D, p.value.D)))
	case p.hurry:
		return l.now
	case l.cfg.Manual:
		return never
	case p.asks:
		return p.base
	case !p.ballot.IsZero() && !p.spreading:
		if p.healAt == 0 {
			return never
		}
		return max(p.healAt, p.base)
	case l.cfg.prefers(i) < 0 && !(p.own.Record.Value.Owner == l.cfg.Self && p.own.Live != 0):
		return never
	}
	return p.base.Add(time.Duration(l.rank(i)) * l.cfg.D / 4)
}

// Self returns the region that campaigns.
func (l *Leader) Self() register.Region { return l.cfg.Self }
