package plan

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func shardsTo(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i)
	}
	return out
}

func named(names ...string) []Member {
	out := make([]Member, len(names))
	for i, n := range names {
		out[i].Name = n
	}
	return out
}

func counts(a Assignment, members []Member) []int {
	var out []int
	for _, m := range members {
		out = append(out, len(a.Of(m.Name)))
	}
	return out
}

func TestGroupOf256OverThreeIs85_85_86(t *testing.T) {
	members := named("a", "b", "c")
	got := counts(Assign(shardsTo(256), members, nil), members)
	slices.Sort(got)
	if !slices.Equal(got, []int{85, 85, 86}) {
		t.Errorf("%v", got)
	}
}

func TestGroupJoinAndLeaveMoveTheFewest(t *testing.T) {
	shards := shardsTo(256)
	three := Assign(shards, named("a", "b", "c"), nil)
	four := Assign(shards, named("a", "b", "c", "d"), three)
	if n := Moves(three, four); n != 64 {
		t.Errorf("a join moved %d shards, want the joiner's 64", n)
	}
	for s, m := range four {
		if m != three[s] && m != "d" {
			t.Errorf("the join moved shard %d from %s to %s", s, three[s], m)
		}
	}
	again := Assign(shards, named("a", "c", "d"), four)
	if n := Moves(four, again); n != 64 {
		t.Errorf("a leave moved %d shards, want the leaver's 64", n)
	}
}

func TestGroupCapacityIsARatio(t *testing.T) {
	members := []Member{{"a", 1}, {"b", 3}, {"c", 0}}
	if got := counts(Assign(shardsTo(100), members, nil), members); !slices.Equal(got, []int{20, 60, 20}) {
		t.Errorf("%v", got)
	}
}

func drawMembers(t *rapid.T, most int) []Member {
	n := rapid.IntRange(1, most).Draw(t, "members")
	out := make([]Member, n)
	for i := range out {
		out[i] = Member{Name: fmt.Sprintf("m%d", i), Capacity: rapid.Uint32Range(0, 4).Draw(t, "capacity")}
	}
	return out
}

func drawBefore(t *rapid.T, shards []uint32, names int) Assignment {
	before := Assignment{}
	for _, s := range shards {
		// One more than there are: of a member that left. -1: of nobody.
		if m := rapid.IntRange(-1, names).Draw(t, "had"); m >= 0 {
			before[s] = fmt.Sprintf("m%d", m)
		}
	}
	return before
}

// even reports whether each count is the exact share rounded down or up, by
// integers alone.
func even(counts []int, members []Member, shards int) bool {
	total := 0
	for _, m := range members {
		total += int(m.capacity())
	}
	for i, m := range members {
		exact := shards * int(m.capacity())
		if counts[i]*total > exact+total-1 || counts[i]*total < exact-total+1 {
			return false
		}
	}
	return true
}

// The second implementation tries every assignment there is.
func TestGroupNoEvenAssignmentMovesFewer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members := drawMembers(t, 4)
		shards := shardsTo(rapid.IntRange(0, 6).Draw(t, "shards"))
		before := drawBefore(t, shards, len(members))
		got := Assign(shards, members, before)
		if len(got) != len(shards) || !even(counts(got, members), members, len(shards)) {
			t.Fatalf("%v over %v: %v is not even", shards, members, got)
		}
		best, try := -1, make([]int, len(shards))
		for done := false; !done; {
			a, n := Assignment{}, make([]int, len(members))
			for i, m := range try {
				a[shards[i]] = members[m].Name
				n[m]++
			}
			if moves := Moves(before, a); even(n, members, len(shards)) && (best < 0 || moves < best) {
				best = moves
			}
			done = true
			for i := range try {
				if try[i]++; try[i] < len(members) {
					done = false
					break
				}
				try[i] = 0
			}
		}
		if moves := Moves(before, got); moves != best {
			t.Fatalf("%v over %v from %v: %d moves, %d would do: %v", shards, members, before, moves, best, got)
		}
	})
}

func TestGroupAssignIsEvenStableAndDeterministic(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members := drawMembers(t, 12)
		shards := shardsTo(rapid.IntRange(0, 300).Draw(t, "shards"))
		before := drawBefore(t, shards, len(members))
		got := Assign(shards, members, before)
		if len(got) != len(shards) || !even(counts(got, members), members, len(shards)) {
			t.Fatalf("not even: %v of %v", counts(got, members), members)
		}
		if again := Assign(shards, members, got); Moves(got, again) != 0 {
			t.Fatalf("nothing changed, and %d shards move", Moves(got, again))
		}
		mixed := rapid.Permutation(members).Draw(t, "order")
		if !Assign(rapid.Permutation(shards).Draw(t, "shards"), mixed, before).Equal(got) {
			t.Fatal("the order of the arguments shows")
		}
	})
}
