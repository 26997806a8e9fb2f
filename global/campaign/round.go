package campaign

import (
	"slices"
	"time"

	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// acceptRound is one Accept round, first or renewal.
type acceptRound struct {
	id uint64
	// t0 was read before any of its messages left.
	t0    instant.Instant
	items []item // ascending by part
}

type item struct {
	part   int
	ballot register.Ballot
	votes  votes
	done   bool
}

// renewEvery is D/5, by the smallest D in use.
func (l *Leader) renewEvery() time.Duration {
	d := l.cfg.D
	for i := range l.parts {
		if p := &l.parts[i]; !p.ballot.IsZero() && p.value.D > 0 {
			d = min(d, p.value.D)
		}
	}
	return max(d/5, time.Millisecond)
}

// renew sends a round for every proposal, whatever is outstanding [F33]. What
// was proposed and not seen chosen is sent again this way too. One that no round
// of the last D completed goes over to asking first.
func (l *Leader) renew() {
	var parts []int
	for i := range l.parts {
		p := &l.parts[i]
		switch {
		case p.spreading && p.spreadUntil <= l.now:
			l.stopSpreading(p)
		case p.ballot.IsZero(), p.asks:
		case p.renewUntil > l.now, p.value.Released(), l.cfg.Manual:
			parts = append(parts, i)
		default:
			p.asks, p.base, p.fails = true, l.now, 0
		}
	}
	if len(parts) == 0 {
		l.renewAt = never
		return
	}
	l.renewAt = l.now.Add(l.renewEvery())
	l.accept(parts)
}

// again sends Accepts once more for proposals of which a dry Prepare has shown
// that a majority hears them.
func (l *Leader) again(parts []int) {
	for _, i := range parts {
		p := &l.parts[i]
		p.running, p.asks, p.renewUntil = false, false, l.now.Add(p.value.D)
	}
	l.propose(parts)
}

// propose sends the first round of values just chosen.
func (l *Leader) propose(parts []int) {
	parts = slices.DeleteFunc(parts, func(i int) bool { return l.parts[i].ballot.IsZero() })
	if len(parts) == 0 {
		return
	}
	l.accept(parts)
	l.renewAt = min(l.renewAt, l.now.Add(l.renewEvery()))
}

// accept sends one Accept round: one message per voter for all parts, each
// with its own ballot and value [F38].
func (l *Leader) accept(parts []int) {
	l.last++
	r := acceptRound{id: l.last, t0: l.now, items: make([]item, len(parts))}
	items := make([]Item, len(parts))
	for k, i := range parts {
		p := &l.parts[i]
		r.items[k] = item{part: i, ballot: p.ballot}
		items[k] = Item{l.cfg.Partitions[i].Name, p.ballot, p.value}
	}
	l.rounds = append(l.rounds, r)
	for _, v := range l.cfg.Voters {
		l.emit(SendAccept{Voter: v, Round: r.id, Items: items})
	}
}

func (l *Leader) acceptAnswered(voter int, id uint64, answers []AcceptAnswer) {
	k := slices.IndexFunc(l.rounds, func(r acceptRound) bool { return r.id == id })
	for _, in := range answers {
		i, ok := l.q.partitions[in.Partition]
		if !ok {
			continue
		}
		if in.Rule != register.RuleNone {
			l.refused(&l.parts[i], voter, in)
			continue
		}
		if k < 0 {
			continue
		}
		items := l.rounds[k].items
		if j, ok := slices.BinarySearchFunc(items, i, func(it item, part int) int { return it.part - part }); ok {
			items[j].votes |= 1 << voter
			if items[j].ballot == l.parts[i].ballot {
				l.tell(&l.parts[i], 1<<voter)
			}
		}
	}
	if k >= 0 {
		l.countRound(&l.rounds[k])
	}
}

// refused learns from a refusal, to whatever round: a promise above the
// proposal's ballot stays, so that voter will never accept it again.
func (l *Leader) refused(p *part, voter int, in AcceptAnswer) {
	p.seen = max(p.seen, in.Record.Promised.Round)
	switch {
	case p.ballot.IsZero():
		return
	case in.Rule == register.RuleAlarm, in.Rule == register.RuleConflict:
	case in.Rule == register.RuleV1Ballot && p.ballot.Less(in.Record.Promised):
	default:
		return // passing: the next round asks again
	}
	if p.spreading {
		l.tell(p, 1<<voter) // it has promised to somebody who comes after the release
		return
	}
	p.blocked |= 1 << voter
	switch {
	case !l.q.reached(l.q.all&^p.blocked, l.promotion(p, p.value)):
		l.abandon(p)
	case p.healAt == 0:
		p.healAt = l.now.Add(l.cfg.D/2 + l.backoff(maxFails))
	}
}

// abandon gives up a proposal that can never be complete again, and asks for a
// new ballot. What is held runs to its end.
func (l *Leader) abandon(p *part) {
	p.ballot, p.value = register.Ballot{}, register.Value{}
	p.won, p.blocked, p.healAt, p.asks = 0, 0, 0, false
	p.base = l.now
	if p.fails > 0 {
		p.base = l.now.Add(l.backoff(p.fails))
	}
	p.fails++
}

// countRound sees which items of a round are complete.
func (l *Leader) countRound(r *acceptRound) {
	if l.stale {
		return
	}
	for j := range r.items {
		it := &r.items[j]
		p := &l.parts[it.part]
		if it.done || it.ballot != p.ballot || !l.q.reached(it.votes, l.promotion(p, p.value)) {
			continue
		}
		it.done = true
		p.fails = 0
		p.won = max(p.won, r.t0.Add(Hold(p.value.D, l.cfg.Rho)))
		p.renewUntil = max(p.renewUntil, r.t0.Add(p.value.D))
		l.settle(it.part)
	}
}

// settle turns complete rounds into what they allow: Adopt for an epoch that
// is not live yet, a hold for one that is.
func (l *Leader) settle(i int) {
	p := &l.parts[i]
	if p.won == 0 || p.ballot.IsZero() || p.dropping != 0 || p.adopting {
		return
	}
	name := l.cfg.Partitions[i].Name
	switch {
	case p.spreading:
	case p.value.Released():
		l.emit(Released{name, p.value.Epoch})
		p.release, p.healAt, p.asks = nil, 0, false
		p.spreading, p.spreadUntil = true, l.now.Add(l.cfg.D/2)
		p.base = l.now.Add(2 * l.cfg.D) // the others first
		l.tell(p, 0)
		if p.own.Live != 0 {
			l.drop(i)
		}
	case p.value.Epoch != p.own.Live && p.own.Live != 0 && !l.ownRaise(p, p.value):
		l.drop(i) // a higher epoch is chosen: the live one can never be resumed
	case p.value.Epoch != p.own.Live:
		p.adopting = true
		l.emit(Adopt{Partition: name, Epoch: p.value.Epoch, Ballot: p.ballot, Planned: p.planned})
	case p.won > l.now && (p.held == 0 || p.won > p.heldUntil):
		p.held, p.heldUntil = p.value.Epoch, p.won
		l.emit(Held{name, p.held, p.heldUntil})
	}
}

// tell notes that voters need not hear of a chosen release any more.
func (l *Leader) tell(p *part, told votes) {
	if !p.value.Released() {
		return
	}
	successor, known := l.q.index[regionVoter(p.value.Successor)]
	if p.told |= told; p.spreading && (!known || p.told.has(successor)) {
		l.stopSpreading(p)
	}
}

// regionVoter is the id of a region's voter.
func regionVoter(region string) string { return "region/" + region }

func (l *Leader) stopSpreading(p *part) {
	p.ballot, p.value, p.won, p.blocked = register.Ballot{}, register.Value{}, 0, 0
	p.spreading, p.spreadUntil, p.told = false, 0, 0
}

// forget lets go of rounds that can move no hold any more.
func (l *Leader) forget() {
	l.rounds = slices.DeleteFunc(l.rounds, func(r acceptRound) bool {
		for _, it := range r.items {
			p := &l.parts[it.part]
			end := r.t0.Add(Hold(p.value.D, l.cfg.Rho))
			if !it.done && it.ballot == p.ballot && end > max(l.now, p.won) {
				return false
			}
		}
		return true
	})
}
