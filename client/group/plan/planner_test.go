package plan

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

const grace = 30 * time.Second

func newTestPlanner(min int) *Planner {
	return NewPlanner(Config{Shards: shardsTo(256), MinMembers: min, RejoinGrace: grace}, nil)
}

func observe(p *Planner, now instant.Instant, members []Seen) (again instant.Instant) {
	again = p.Observe(now, members)
	before := p.Assignment()
	if changed := p.Plan(); changed == before.Equal(p.Assignment()) {
		panic("Plan does not say what it did")
	}
	return again
}

// roster is who is registered; its methods change it.
type roster []Seen

func (r roster) with(name string, state State) roster {
	out := slices.DeleteFunc(slices.Clone(r), func(s Seen) bool { return s.Name == name })
	return append(out, Seen{Member: Member{Name: name}, State: state, Token: fence.Token(len(r) + 1)})
}

func (r roster) without(name string) roster {
	return slices.DeleteFunc(slices.Clone(r), func(s Seen) bool { return s.Name == name })
}

func TestGroupNothingIsAssignedBeforeMinMembers(t *testing.T) {
	p := newTestPlanner(3)
	var r roster
	for _, name := range []string{"a", "b"} {
		r = r.with(name, Active)
		observe(p, 1, r)
		if len(p.Assignment()) != 0 {
			t.Fatalf("%d members of at least 3, and shards are assigned", len(r))
		}
	}
	observe(p, 1, r.with("c", Active))
	if got := len(p.Assignment().Of("a")); got < 85 || len(p.Assignment()) != 256 {
		t.Errorf("a has %d of %d", got, len(p.Assignment()))
	}
	observe(p, 1, r) // c is lost: two go on
	if len(p.Assignment().Of("c")) != 0 || len(p.Assignment()) != 256 {
		t.Error("below the minimum again, the lost one's shards were not moved")
	}
}

// Each of three goes and comes back, one after the other: nothing moves.
func TestGroupRollingDeployMovesNoShard(t *testing.T) {
	p, now := newTestPlanner(3), instant.Instant(1)
	r := roster{}.with("a", Active).with("b", Active).with("c", Active)
	observe(p, now, r)
	before := p.Assignment()
	step := func(r roster) {
		now = now.Add(grace / 3)
		observe(p, now, r)
		if n := Moves(before, p.Assignment()); n != 0 {
			t.Fatalf("%d shards moved", n)
		}
	}
	for _, name := range []string{"b", "c", "a"} {
		step(r.with(name, Returning))
		r = r.without(name)
		step(r)
		r = r.with(name, Active)
		step(r)
	}
}

func TestGroupWhoDoesNotComeBackLosesItsShards(t *testing.T) {
	p, now := newTestPlanner(0), instant.Instant(1)
	r := roster{}.with("a", Active).with("b", Active).with("c", Active)
	observe(p, now, r)
	before := p.Assignment()
	observe(p, now, r.with("b", Returning))
	again := observe(p, now, r.without("b"))
	if again != now.Add(grace) {
		t.Fatalf("called again at %d, want %d", again, now.Add(grace))
	}
	observe(p, again.Add(-1), r.without("b"))
	if Moves(before, p.Assignment()) != 0 {
		t.Fatal("moved within the grace")
	}
	observe(p, again, r.without("b"))
	if n := Moves(before, p.Assignment()); n != len(before.Of("b")) {
		t.Errorf("%d shards moved, want the %d of b", n, len(before.Of("b")))
	}
}

func TestGroupTheLostAndTheLeavingAreReplacedAtOnce(t *testing.T) {
	r := roster{}.with("a", Active).with("b", Active).with("c", Active)
	for name, next := range map[string]roster{"lost": r.without("b"), "leaving": r.with("b", Leaving)} {
		p := newTestPlanner(0)
		observe(p, 1, r)
		before := p.Assignment()
		observe(p, 2, next)
		if n := Moves(before, p.Assignment()); n != len(before.Of("b")) || len(p.Assignment().Of("b")) != 0 {
			t.Errorf("%s: %d shards moved, want the %d of b", name, n, len(before.Of("b")))
		}
	}
}

func TestGroupMembersOfALostRegionAreAwaited(t *testing.T) {
	p := newTestPlanner(0)
	r := roster{}.with("a", Active).with("b", Active).with("c", Active)
	observe(p, 1, r)
	before := p.Assignment()
	p = NewPlanner(p.cfg, before)
	p.Await(100)
	if again := observe(p, 10, roster{}.with("c", Active)); again != 100 || Moves(before, p.Assignment()) != 0 {
		t.Fatalf("again at %d, %d moves", again, Moves(before, p.Assignment()))
	}
	if observe(p, 20, r); Moves(before, p.Assignment()) != 0 {
		t.Error("all are back, and shards moved")
	}
}

// Whatever comes and goes: all shards are assigned, to members that are there
// or awaited, and those of an active member are within its share by at most
// what is set aside.
func TestGroupPlannerProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := NewPlanner(Config{Shards: shardsTo(rapid.IntRange(1, 40).Draw(t, "shards")), RejoinGrace: 10}, nil)
		var r roster
		now := instant.Instant(1)
		states := map[string]State{}
		for range rapid.IntRange(1, 25).Draw(t, "steps") {
			name := fmt.Sprintf("m%d", rapid.IntRange(0, 4).Draw(t, "who"))
			switch state := State(rapid.IntRange(0, 3).Draw(t, "state")); state {
			case 0:
				r = r.without(name)
			default:
				r = r.with(name, state)
				states[name] = state
			}
			now = now.Add(time.Duration(rapid.IntRange(0, 6).Draw(t, "time")))
			before := p.Assignment()
			again := observe(p, now, r)
			if again != 0 && !again.After(now) {
				t.Fatalf("again at %d, now is %d", again, now)
			}
			var active []string
			for _, m := range r {
				if m.State == Active {
					active = append(active, m.Name)
				}
			}
			if len(active) == 0 {
				if !p.Assignment().Equal(before) {
					t.Fatal("nobody is active, and the assignment changed")
				}
				continue
			}
			if len(p.Assignment()) != len(p.cfg.Shards) {
				t.Fatalf("%d of %d shards are assigned", len(p.Assignment()), len(p.cfg.Shards))
			}
			free := 0
			for s, m := range p.Assignment() {
				if slices.Contains(active, m) {
					free++
					continue
				}
				if states[m] != Returning || before[s] != m {
					t.Fatalf("shard %d went to %s, which is not active", s, m)
				}
			}
			for _, m := range active {
				if n := len(p.Assignment().Of(m)); n < free/len(active) || n > (free+len(active)-1)/len(active) {
					t.Fatalf("%s has %d of %d shards of %d", m, n, free, len(active))
				}
			}
		}
	})
}
