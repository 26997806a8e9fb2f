package admission

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// fataler is a testing.TB or a rapid.T.
type fataler interface {
	Helper()
	Fatal(...any)
}

func control(t fataler, l Limits) *Control {
	t.Helper()
	c, err := New(l)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestReliefIsNeverRefused(t *testing.T) {
	c := control(t, Limits{InFlight: 1, Rate: 1, Burst: 1})
	for range 3 {
		c.Admit(start, Work, "flood")
	}
	for range 100 {
		if _, refused := c.Admit(start, Relief, "flood"); refused != nil {
			t.Fatalf("relief refused: %+v", refused)
		}
	}
}

func TestAFullLaneRefusesAndEmpties(t *testing.T) {
	c := control(t, Limits{InFlight: 4})
	var dones []func()
	for i := range 4 {
		done, refused := c.Admit(start, Work, fmt.Sprint("w", i))
		if refused != nil {
			t.Fatalf("call %d refused: %+v", i, refused)
		}
		dones = append(dones, done)
	}
	if _, refused := c.Admit(start, Work, "late"); refused == nil || refused.ByIdentity || refused.Retry <= 0 {
		t.Fatalf("fifth of four: %+v", refused)
	}
	if _, refused := c.Admit(start, Read, "late"); refused != nil {
		t.Fatalf("reads wait behind work: %+v", refused)
	}
	dones[0]()
	if _, refused := c.Admit(start, Work, "late"); refused != nil {
		t.Fatalf("room, and refused: %+v", refused)
	}
}

// TestOneIdentityLeavesRoom: a flood of one client is refused before the lane is
// full, and others are not.
func TestOneIdentityLeavesRoom(t *testing.T) {
	c := control(t, Limits{InFlight: 8})
	admitted := 0
	for range 20 {
		if _, refused := c.Admit(start, Work, "flood"); refused == nil {
			admitted++
		} else if !refused.ByIdentity || !strings.Contains(refused.What, "flood") {
			t.Fatalf("refused as %+v", refused)
		}
	}
	if admitted != 6 {
		t.Fatalf("one identity has %d of 8 places, want 6", admitted)
	}
	if _, refused := c.Admit(start, Work, "calm"); refused != nil {
		t.Fatalf("another identity refused: %+v", refused)
	}
}

func TestRateByIdentity(t *testing.T) {
	c := control(t, Limits{Rate: 10, Burst: 5})
	call := func(now time.Time, who string) *Refusal {
		done, refused := c.Admit(now, Work, who)
		if refused == nil {
			done()
		}
		return refused
	}
	for i := range 5 {
		if r := call(start, "a"); r != nil {
			t.Fatalf("call %d of the burst: %+v", i, r)
		}
	}
	r := call(start, "a")
	if r == nil || !r.ByIdentity || r.Retry != 100*time.Millisecond {
		t.Fatalf("beyond the burst: %+v, want a retry after 100ms", r)
	}
	if r := call(start, "b"); r != nil {
		t.Fatalf("another identity: %+v", r)
	}
	if r := call(start.Add(r.Retry), "a"); r != nil {
		t.Fatalf("after the named time: %+v", r)
	}
	if r := call(start.Add(100*time.Millisecond), "a"); r == nil {
		t.Fatal("two calls for one token")
	}
}

func TestMemoryIsBounded(t *testing.T) {
	c := control(t, Limits{})
	for i := range 3 * maxIdentities {
		if done, refused := c.Admit(start, Work, fmt.Sprint(i)); refused == nil {
			done()
		}
	}
	if n := c.identities.Len(); n != maxIdentities {
		t.Fatalf("%d identities are kept, want %d", n, maxIdentities)
	}
}

// TestCountsAreExact: whatever is admitted and answered in whatever order, a
// lane has never more inside than its limit, and what was answered is out.
func TestCountsAreExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 10).Draw(t, "limit")
		c := control(t, Limits{InFlight: limit, Rate: 1e6, Burst: 1 << 20})
		type call struct {
			lane Lane
			who  string
			done func()
		}
		var calls []call
		count := func(l Lane, who string) (all, own int) {
			for _, k := range calls {
				if k.lane == l {
					all++
					if k.who == who {
						own++
					}
				}
			}
			return all, own
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			if len(calls) > 0 && rapid.Bool().Draw(t, "answer") {
				i := rapid.IntRange(0, len(calls)-1).Draw(t, "which")
				calls[i].done()
				calls = append(calls[:i], calls[i+1:]...)
				continue
			}
			l := rapid.SampledFrom([]Lane{Work, Read}).Draw(t, "lane")
			who := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "who")
			all, own := count(l, who)
			want := all < limit && own < max(limit*3/4, 1)
			done, refused := c.Admit(start, l, who)
			if (refused == nil) != want {
				t.Fatalf("lane %s of %d has %d inside, %d of %s: refused %+v", l, limit, all, own, who, refused)
			}
			if refused == nil {
				calls = append(calls, call{l, who, done})
			}
		}
		for _, l := range []Lane{Work, Read} {
			if all, _ := count(l, ""); c.Inside(l) != all {
				t.Fatalf("lane %s counts %d, want %d", l, c.Inside(l), all)
			}
		}
	})
}

func TestLimitsNameTheField(t *testing.T) {
	for field, l := range map[string]Limits{
		"limits.in_flight": {InFlight: -1},
		"limits.rate":      {Rate: -1},
		"limits.burst":     {Burst: -1},
	} {
		if _, err := New(l); err == nil || !strings.HasPrefix(err.Error(), field+":") {
			t.Errorf("%+v: %v, want it to name %s", l, err, field)
		}
	}
}
