package plan

import (
	"maps"
	"slices"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// State of a member, as it says of itself.
type State int

// States.
const (
	// Active: it takes shards.
	Active State = iota + 1
	// Returning: it stops and comes back; its shards stay its own.
	Returning
	// Leaving: it stops for good; its shards move at once.
	Leaving
)

// Seen is a member's registration. Of several with one name, that with the
// highest token counts.
type Seen struct {
	Member
	State State
	Token fence.Token
}

// Config of a Planner.
type Config struct {
	// Shards to assign.
	Shards []uint32
	// MinMembers active before anything is assigned at first, so that the first
	// one that starts does not take, and then hand over, everything.
	MinMembers int
	// RejoinGrace is how long the shards of a member that went to come back
	// stay its own, from when it was last seen.
	RejoinGrace time.Duration
}

// Planner follows the members of a group, for the one that assigns.
type Planner struct {
	cfg        Config
	assignment Assignment
	// seen are the members of the last observation.
	seen map[string]Seen
	// away are members that are not there, and until when they are waited for.
	away map[string]instant.Instant
}

// NewPlanner begins with an assignment, of another Planner, or nil.
func NewPlanner(cfg Config, before Assignment) *Planner {
	return &Planner{cfg: cfg, assignment: maps.Clone(before), seen: map[string]Seen{}, away: map[string]instant.Instant{}}
}

// Await waits until then for members of the assignment that were not seen yet:
// after their leases were lost with a region, which they take again one by one.
func (p *Planner) Await(until instant.Instant) {
	for _, member := range p.assignment {
		if _, ok := p.seen[member]; !ok {
			p.away[member] = until
		}
	}
}

// Serve changes the shards that are assigned, with the next Plan.
func (p *Planner) Serve(shards []uint32) { p.cfg.Shards = shards }

// Assignment is the present one. Do not change it.
func (p *Planner) Assignment() Assignment { return p.assignment }

// Observe takes in who is there now. Every member calls it with whatever it
// hears, so that the next one that assigns knows who went to come back. It
// returns when it has to be called again though nothing changes, or 0.
func (p *Planner) Observe(now instant.Instant, members []Seen) (again instant.Instant) {
	newest := Newest(members)
	for name, m := range p.seen {
		if _, ok := newest[name]; !ok && m.State == Returning {
			p.away[name] = now.Add(p.cfg.RejoinGrace)
		}
	}
	p.seen = newest
	for name, until := range p.away {
		if _, back := newest[name]; back || !now.Before(until) {
			delete(p.away, name)
			continue
		}
		if again == 0 || until.Before(again) {
			again = until
		}
	}
	return again
}

// Follow takes over what another member has assigned.
func (p *Planner) Follow(told Assignment) { p.assignment = told }

// Plan assigns anew, by what was observed last, and reports whether that has
// changed anything.
func (p *Planner) Plan() bool {
	var active []Member
	for _, m := range p.seen {
		if m.State == Active {
			active = append(active, m.Member)
		}
	}
	if len(active) == 0 || len(p.assignment) == 0 && len(active) < p.cfg.MinMembers {
		return false
	}
	// kept are the shards of those that come back, though nobody serves them.
	kept := Assignment{}
	var shards []uint32
	for _, s := range p.cfg.Shards {
		member := p.assignment[s]
		if _, away := p.away[member]; away || p.seen[member].State == Returning {
			kept[s] = member
		} else {
			shards = append(shards, s)
		}
	}
	next := Assign(shards, active, p.assignment)
	maps.Copy(next, kept)
	if next.Equal(p.assignment) {
		return false
	}
	p.assignment = next
	return true
}

// Newest is the registration that counts of each name.
func Newest(members []Seen) map[string]Seen {
	newest := make(map[string]Seen, len(members))
	for _, m := range members {
		if old, ok := newest[m.Name]; !ok || old.Token < m.Token {
			newest[m.Name] = m
		}
	}
	return newest
}

// Grows reports whether one set of members has an active one that the other has
// not: others may follow soon, and it is worth waiting for them.
func Grows(before, now []Seen) bool {
	old := Newest(before)
	return slices.ContainsFunc(now, func(m Seen) bool { return m.State == Active && old[m.Name].State != Active })
}
