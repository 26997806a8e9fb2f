package campaign

import (
	"errors"
	"fmt"
	"slices"

	"github.com/headlease/headlease/internal/instant"
)

// Reconfigure goes on under a newer decided configuration. What is held runs
// on, what was chosen or proposed is sent again at its ballot, and the counts
// of answers start again: none that was given under another configuration
// counts under this one [H10]. Campaigns that were under way begin anew.
//
// own is the state of each partition of cfg, in its order; it counts for those
// that the Leader does not know yet. The own region must be a member; with an
// error nothing has changed, and the caller gives the Leader up.
func (l *Leader) Reconfigure(now instant.Instant, cfg Config, own []Own) ([]Effect, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("campaign: %w", err)
	}
	if cfg.Self != l.cfg.Self {
		return nil, errors.New("campaign: another region, or another incarnation of it, cannot go on where this one is")
	}
	if cfg.Era != l.cfg.Era {
		return nil, errors.New("campaign: nothing that was held or proposed goes on in another era")
	}
	if len(own) != len(cfg.Partitions) {
		return nil, fmt.Errorf("campaign: have own state of %d partitions, configuration has %d", len(own), len(cfg.Partitions))
	}
	l.clock(now)
	cfg = cfg.withDefaults()
	was, old := l.cfg, l.parts
	parts, place := make([]part, len(own)), make([]int, len(old)) // place: of an old part among the new ones
	for i := range place {
		place[i] = -1
	}
	for i, spec := range cfg.Partitions {
		if j, known := l.q.partitions[spec.Name]; known {
			parts[i], place[j] = old[j], i
		} else {
			parts[i] = part{own: own[i], seen: own[i].Record.Promised.Round, base: l.now}
		}
	}
	for j := range old {
		if place[j] < 0 && old[j].held != 0 {
			l.emit(Lapsed{was.Partitions[j].Name, old[j].held})
		}
	}
	runs := l.runs
	l.cfg, l.q, l.parts, l.runs, l.rounds = &cfg, newQuorum(cfg), parts, nil, nil
	l.keepReservations(runs, place)
	for i := range l.parts {
		l.parts[i].blocked, l.parts[i].told, l.parts[i].healAt = 0, 0, 0
		l.parts[i].failed, l.parts[i].failedAt = tally{}, 0              // by other voters
		l.parts[i].asks, l.parts[i].renewUntil = false, l.now.Add(cfg.D) // by other voters
		if p := &l.parts[i]; !p.ballot.IsZero() && !p.value.Released() && p.value.D != cfg.D {
			p.healAt = l.now.Add(l.backoff(maxFails)) // a change of D is a new ballot
		}
	}
	l.renew()
	return l.Tick(l.now), nil
}

// keepReservations ends the campaigns of the configuration before, whose
// partitions ask again at once; ballots that are being reserved are used all
// the same.
func (l *Leader) keepReservations(runs []run, place []int) {
	for _, r := range runs {
		var parts []int
		for _, t := range r.parts {
			if i := place[t.part]; i >= 0 {
				parts = append(parts, i)
			}
		}
		slices.Sort(parts)
		switch {
		case len(parts) == 0:
		case r.stage == stageReserve:
			r.parts = l.tallies(parts)
			l.runs = append(l.runs, r)
		default:
			for _, i := range parts {
				p := &l.parts[i]
				p.running, p.hurry, p.base = false, true, l.now
			}
		}
	}
}
