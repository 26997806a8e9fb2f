package lessor

import (
	"slices"
	"strings"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// A planned transfer first drains the partition (docs/design.md, §2): the state
// machine grants nothing more, and the leader revokes every lease. A holder hears
// so at once and may go on until the drain's end, as long as its validity is
// renewed; then, or when it has released, the lease is gone. When the last one
// is, the campaign may release the partition.

// MovesTo begins the reason of a drain's revocations.
const MovesTo = "moves to region "

// Draining is how far a drain is.
type Draining struct {
	Epoch     fence.Epoch
	Successor string
	// Leases that are not gone, and lock delays that run.
	Leases, Delays int
	// Left is the time until the end that holders were told; zero: it is over.
	Left time.Duration
}

// Grace sets how long holders may go on after the partition's drain begins,
// before the StartDrain is proposed. Without, and after a change of leader, it is
// what was last sent to each.
func (l *Lessor) Grace(now instant.Instant, name string, grace time.Duration) {
	l.tick(now)
	if p := l.partition(name); !p.draining {
		p.grace = grace
	}
}

// Drain tells how far the drain of a partition is; ok is false if it does not
// drain.
func (l *Lessor) Drain(now instant.Instant, name string) (d Draining, ok bool) {
	p, found := l.parts[name]
	if !found || !p.live || !p.draining {
		return Draining{}, false
	}
	d = Draining{Epoch: p.epoch, Successor: p.successor, Leases: p.leases, Left: max(0, p.drainEnd.Sub(max(now, l.now)))}
	for _, q := range l.delays {
		if q.partition == name {
			d.Delays++
		}
	}
	return d, true
}

// Drained reports whether a draining partition may be released: no lease of it
// is left [F26], so that all validity ever sent has run out or was given up.
// Lock delays are waited for until the drain's end; settled says that none is
// left.
func (l *Lessor) Drained(now instant.Instant, name string, epoch fence.Epoch) (settled, drained bool) {
	d, ok := l.Drain(now, name)
	if !ok || d.Epoch != epoch || d.Leases > 0 {
		return false, false
	}
	return d.Delays == 0, d.Delays == 0 || d.Left == 0
}

// drain revokes the leases of a draining partition.
func (l *Lessor) drain(p *partition) {
	if !p.draining {
		return
	}
	if p.leases == 0 {
		l.out.Drained = true
		return
	}
	var moving []*lease
	for _, s := range l.sessions {
		for _, e := range s.leases.all() {
			if e.partition == p && !e.revoked && !e.proposed {
				moving = append(moving, e)
			}
		}
	}
	slices.SortFunc(moving, func(a, b *lease) int { return strings.Compare(a.resource, b.resource) })
	for _, e := range moving {
		e.moving = true
		l.revokeFor(e, MovesTo+p.successor)
	}
}

// keep takes a command back that a drain had brought and its abort has voided.
func (l *Lessor) keep(f *inflight) {
	if e := f.lease; e != nil && e.moving && !e.gone && !e.revoked {
		e.moving, e.proposed = false, false
		if e.offerEnd != 0 {
			l.wake(e, timerOffer, e.offerEnd) // it may have come and gone meanwhile
		}
	}
}
