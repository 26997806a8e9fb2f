package members

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func voter(name string, live bool) Member {
	m := Member{Name: name, RaftID: name + "/u", Voter: true, Live: live, Level: 1, LastIndex: 100}
	if !live {
		m.Problem = "no answer"
	}
	return m
}

func nonvoter(name string, last uint64) Member {
	return Member{Name: name, RaftID: name + "/u", Live: true, Level: 1, LastIndex: last}
}

// TestF3AKnownNameWithAnotherUUID is refused with the way out, the same one is a
// member already, and a malformed id is nobody's.
func TestF3AKnownNameWithAnotherUUID(t *testing.T) {
	group := []Member{voter("a", true), voter("b", false), nonvoter("c", 0)}
	for _, c := range []struct {
		name, id string
		already  bool
		refused  string
	}{
		{"a", "a/u", true, ""},
		{"b", "b/new", false, "headlease server replace b b"},
		{"c", "c/new", false, "headlease server replace c c"},
		{"d", "d/x", false, ""},
		{"d", "e/x", false, "is not"},
		{"d", "d/", false, "is not"},
		{"d", "d/x/y", false, "is not"},
		{"", "/x", false, "is not"},
	} {
		already, r := MayJoin(group, c.name, c.id)
		if already != c.already || (r != nil) != (c.refused != "") || r != nil && !strings.Contains(r.Reason, c.refused) {
			t.Errorf("%s as %q: already %v, %v", c.name, c.id, already, r)
		}
	}
}

func TestPromotion(t *testing.T) {
	full := []Member{voter("a", true), voter("b", true), voter("c", true)}
	dead := nonvoter("n", 1000)
	dead.Live, dead.Problem = false, "is in term 3"
	old := nonvoter("n", 1000)
	old.Level = 0
	for _, c := range []struct {
		what            string
		group           []Member
		already, caught bool
		refused         string
	}{
		{"caught up", append(full[:3:3], nonvoter("n", 1000)), false, true, ""},
		{"a few behind", append(full[:3:3], nonvoter("n", 1000-MaxLag)), false, true, ""},
		{"too far behind", append(full[:3:3], nonvoter("n", 1000-MaxLag-1)), false, false, ""},
		{"a voter", append(full[:3:3], voter("n", false)), true, true, ""},
		{"no member", full, false, false, "--join"},
		{"silent", append(full[:3:3], dead), false, false, "is in term 3"},
		{"too old a program", append(full[:3:3], old), false, false, "upgrade"},
		{"one of three dead", []Member{voter("a", true), voter("b", true), voter("c", false), nonvoter("n", 1000)}, false, true, ""},
		{"two of five dead", []Member{voter("a", true), voter("b", true), voter("c", true), voter("d", false), voter("e", false), nonvoter("n", 1000)}, false, true, ""},
		{"no majority even with it", []Member{voter("a", true), voter("b", false), voter("c", false), nonvoter("n", 1000)}, false, true, "b (no answer), c (no answer)"},
	} {
		already, caught, r := MayPromote(c.group, "n", 1000, 1)
		if already != c.already || caught != c.caught || (r != nil) != (c.refused != "") || r != nil && !strings.Contains(r.Reason, c.refused) {
			t.Errorf("%s: already %v, caught up %v, %v", c.what, already, caught, r)
		}
	}
}

func TestRemoval(t *testing.T) {
	for _, c := range []struct {
		what           string
		group          []Member
		force          bool
		already        bool
		refused, named string
	}{
		{"of four", []Member{voter("x", true), voter("b", true), voter("c", true), voter("d", true)}, false, false, "", ""},
		{"of five", []Member{voter("x", true), voter("b", true), voter("c", true), voter("d", true), voter("e", true)}, false, false, "", ""},
		{"dead of three", []Member{voter("x", false), voter("b", true), voter("c", true)}, false, false, "", ""},
		{"live of three", []Member{voter("x", true), voter("b", true), voter("c", true)}, false, false, "survive no loss", ""},
		{"live of three, forced", []Member{voter("x", true), voter("b", true), voter("c", true)}, true, false, "", ""},
		{"live of three with a dead one, forced", []Member{voter("x", true), voter("b", true), voter("c", false)}, true, false, "too few", "c (no answer)"},
		{"the only one, forced", []Member{voter("x", true)}, true, false, "only voter", ""},
		{"a non-voter", []Member{nonvoter("x", 0), voter("b", true)}, false, false, "", ""},
		{"no member", []Member{voter("b", true)}, false, true, "", ""},
	} {
		already, r := MayRemove(c.group, "x", "", c.force)
		if already != c.already || (r != nil) != (c.refused != "") || r != nil && (!strings.Contains(r.Reason, c.refused) || !strings.Contains(r.Reason, c.named)) {
			t.Errorf("%s: already %v, %v", c.what, already, r)
		}
	}
	if _, r := MayRemove([]Member{voter("x", false), voter("b", true), voter("c", true)}, "x", "x/other", false); r == nil || !strings.Contains(r.Reason, "x/u") {
		t.Errorf("a member under another id than meant: %v", r)
	}
}

// TestNoChangeLosesTheQuorum: whatever the group and whoever answers, a change
// that is allowed leaves a live majority, forced or not.
func TestNoChangeLosesTheQuorum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var group []Member
		for i := range rapid.IntRange(1, 7).Draw(t, "members") {
			m := voter(fmt.Sprintf("m%d", i), rapid.Bool().Draw(t, "live"))
			m.Voter = rapid.Bool().Draw(t, "voter")
			group = append(group, m)
		}
		name := fmt.Sprintf("m%d", rapid.IntRange(0, 7).Draw(t, "which"))
		before, _ := Find(group, name)
		// By brute force: count afterwards.
		count := func(after []Member) (voters, live int) {
			for _, m := range after {
				if m.Voter {
					voters++
					if m.Live {
						live++
					}
				}
			}
			return voters, live
		}
		if already, r := MayRemove(group, name, "", rapid.Bool().Draw(t, "force")); r == nil && !already && before.Voter {
			var after []Member
			for _, m := range group {
				if m.Name != name {
					after = append(after, m)
				}
			}
			if voters, live := count(after); 2*live <= voters {
				t.Fatalf("removal of %s leaves %d live of %d voters", name, live, voters)
			}
		}
		if already, caught, r := MayPromote(group, name, 100, 1); r == nil && caught && !already {
			after := append([]Member(nil), group...)
			for i := range after {
				after[i].Voter = after[i].Voter || after[i].Name == name
			}
			if voters, live := count(after); 2*live <= voters {
				t.Fatalf("promotion of %s leaves %d live of %d voters", name, live, voters)
			}
			if !before.Live || before.Voter {
				t.Fatalf("promoted %+v", before)
			}
		}
	})
}

// TestLevelNeedsEveryMember: voters and non-voters alike, and all answers.
func TestLevelNeedsEveryMember(t *testing.T) {
	at := func(level uint32, live, isVoter bool) Member {
		return Member{Name: "m", Live: live, Voter: isVoter, Level: level}
	}
	for _, c := range []struct {
		what           string
		group          []Member
		committed, own uint32
		want           uint32
		raise          bool
	}{
		{"all know it", []Member{at(3, true, true), at(3, true, true)}, 1, 3, 3, true},
		{"as high as the lowest", []Member{at(3, true, true), at(2, true, true)}, 1, 3, 2, true},
		{"a non-voter holds it back", []Member{at(3, true, true), at(1, true, false)}, 1, 3, 1, false},
		{"no answer of a voter", []Member{at(3, true, true), at(0, false, true)}, 1, 3, 0, false},
		{"no answer of a non-voter", []Member{at(3, true, true), at(3, false, false)}, 1, 3, 0, false},
		{"not above the own program's", []Member{at(9, true, true)}, 1, 3, 3, true},
		{"reached", []Member{at(3, true, true)}, 3, 3, 3, false},
		{"nobody", nil, 0, 3, 3, false},
	} {
		if got, raise := Level(c.group, c.committed, c.own); raise != c.raise || raise && got != c.want {
			t.Errorf("%s: %d, %v; want %d, %v", c.what, got, raise, c.want, c.raise)
		}
	}
}

func TestWhoMayLead(t *testing.T) {
	group := []Member{voter("lead", true), voter("a", true), voter("dead", false), nonvoter("n", 100)}
	group[0].Leader = true
	for _, c := range []struct {
		name    string
		already bool
		refused string
	}{
		{"lead", true, ""},
		{"a", false, ""},
		{"dead", false, "cannot take over: no answer"},
		{"n", false, "headlease server add n"},
		{"x", false, "not a member"},
	} {
		already, r := MayLead(group, c.name)
		if already != c.already || (r != nil) != (c.refused != "") || r != nil && !strings.Contains(r.Reason, c.refused) {
			t.Errorf("%s: already %v, %v", c.name, already, r)
		}
	}
}

func TestSuccessorHasTheMostOfTheLog(t *testing.T) {
	group := []Member{voter("lead", true), voter("a", true), voter("b", true), voter("c", false), nonvoter("n", 999)}
	group[0].Leader, group[0].LastIndex = true, 500
	group[2].LastIndex = 300
	group[3].LastIndex = 400
	if m, ok := Successor(group); !ok || m.Name != "b" {
		t.Errorf("%+v, %v", m, ok)
	}
	if m, ok := Successor(group[:1]); ok {
		t.Errorf("%+v takes over from itself", m)
	}
}

func TestWarningOfEvenNumbers(t *testing.T) {
	for n, want := range map[int]bool{1: true, 2: true, 3: false, 4: true, 5: false, 6: true, 7: true} {
		if got := Warning(n); (got != "") != want {
			t.Errorf("%d voters: %q", n, got)
		}
	}
}
