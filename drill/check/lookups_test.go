package check

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// What a look-up says must have been true at a time that its age allows.
func TestAnAnswerToALookupIsWrong(t *testing.T) {
	first, second := token(1, 1), token(1, 2)
	actors := []Actor{
		{Lock: "lock/x", Events: []Event{
			{Kind: Acquired, Sent: at(990), At: at(1000), Token: first},
			{Kind: Wrote, Sent: at(1100), At: at(1110), Token: first},
			{Kind: Released, Sent: at(4000), At: at(4020), Token: first},
		}},
		{Lock: "lock/x", Events: []Event{{Kind: Acquired, Sent: at(4010), At: at(4030), Token: second, Waited: true}}},
		{Lock: "lock/lost", Events: []Event{
			{Kind: Acquired, Sent: at(990), At: at(1000), Token: first}, {Kind: Lost, Sent: at(3000), At: at(3000), Token: first},
		}},
		{Lock: "lock/unsure", Events: []Event{
			{Kind: Acquired, Sent: at(990), At: at(1000), Token: first},
			{Kind: Released, Sent: at(3000), At: at(3100), Token: first, Reason: "no answer"},
		}},
	}
	all := lives(actors)
	for name, c := range map[string]struct {
		lock  string
		held  bool
		token fence.Token
		sent  int64
		age   time.Duration
		want  string
	}{
		"as it is":                        {lock: "lock/x", held: true, token: first, sent: 2000},
		"as it was, and its age says so":  {lock: "lock/x", held: true, token: first, sent: 6000, age: 1800 * time.Millisecond},
		"as it was, and its age does not": {lock: "lock/x", held: true, token: first, sent: 6000, age: 1500 * time.Millisecond, want: "was released 230 ms before that"},
		"the next one":                    {lock: "lock/x", held: true, token: second, sent: 6000},
		"nobody, while it goes over":      {lock: "lock/x", sent: 4100},
		"nobody, while somebody held it":  {lock: "lock/x", sent: 3000, want: "while token 4294967297 was held all that time"},
		"nobody, while somebody holds it": {lock: "lock/x", sent: 6000, want: "while token 4294967298 was held all that time"},
		"nobody, as old as the grant":     {lock: "lock/x", sent: 3000, age: 2 * time.Second},
		"nobody, after a loss":            {lock: "lock/lost", sent: 3500},
		"held, after a loss":              {lock: "lock/lost", held: true, token: first, sent: 9000},
		"nobody, after a failed release":  {lock: "lock/unsure", sent: 9000},
		"a token that nobody heard of":    {lock: "lock/x", held: true, token: token(1, 9), sent: 9000},
		"a lock that nobody took":         {lock: "lock/none", sent: 9000},
	} {
		l := Lookup{Lock: c.lock, Held: c.held, Token: c.token, Sent: at(c.sent), At: at(c.sent + 5), Age: c.age}
		if got := l.wrong(all[c.lock]); got != c.want && (c.want == "" || !strings.HasSuffix(got, c.want)) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// looked is the quiet record with a Redis that was down, and look-ups of which
// those within the fault and shortly after came out of the region.
func looked(back instant.Instant) *Record {
	r := quiet()
	r.Faults = append(r.Faults, Fault{Step: 1, Title: "redis-down", Kind: plan.RedisDown, Of: []string{"eu"}, From: at(3000), Full: at(3000), Until: at(5000), Effect: "felt"})
	for t := at(1100); t < at(10900); t = t.Add(100 * time.Millisecond) {
		cached := t < at(3000) || t >= back
		r.Lookups = append(r.Lookups, Lookup{
			Home: "eu", Lock: "lock/x", Sent: t, At: t.Add(5 * time.Millisecond), Held: true, Token: token(1, 1), Age: 300 * time.Millisecond, Cached: cached,
		})
	}
	return r
}

func TestExpectationsOfLookups(t *testing.T) {
	states := func(r *Record, texts ...string) (out []State) {
		for _, x := range Check(r, expect(t, texts...)).Results {
			out = append(out, x.State)
		}
		return out
	}
	texts := []string{"no look-up wrong", "cached again within 1s", "look-up age <= 300ms", "max look-up < 5ms", "at least 90 look-ups"}
	if got := states(looked(at(5900)), texts...); !slices.Equal(got, []State{Held, Held, Held, Held, Held}) {
		t.Errorf("%v", got)
	}
	r := looked(at(6000))
	r.Lookups[60].Held, r.Lookups[60].Age = false, time.Second
	r.Lookups = r.Lookups[:80]
	if got := states(r, texts...); !slices.Equal(got, []State{Broken, Broken, Broken, Held, Inconclusive}) {
		t.Errorf("%v", got)
	}
	r.Lookups = slices.DeleteFunc(r.Lookups, func(l Lookup) bool { return l.Cached })
	if got := states(r, texts...); !slices.Equal(got, []State{Inconclusive, Inconclusive, Inconclusive, Inconclusive, Inconclusive}) {
		t.Errorf("nothing was cached: %v", got)
	}
	r = looked(at(5900))
	r.Faults[1].Of = []string{"eu", "us"} // us owns nothing
	if got := states(r, texts[1]); !slices.Equal(got, []State{Held}) {
		t.Errorf("a region without a partition: %v", got)
	}
	r = looked(at(20_000))
	if got := states(r, texts[1]); !slices.Equal(got, []State{Broken}) {
		t.Errorf("never again: %v", got)
	}
}
