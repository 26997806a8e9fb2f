package check

import (
	"slices"
	"testing"
	"time"

	"github.com/headlease/headlease/internal/instant"
)

func at(ms int64) instant.Instant { return instant.Instant(ms * int64(time.Millisecond)) }

func span(of, by string, number uint64, from, until int64) Claim {
	return Claim{Of: of, By: by, Number: number, From: at(from), Until: at(until)}
}

func TestJudgeClaims(t *testing.T) {
	for name, c := range map[string]struct {
		claims []Claim
		want   []string
	}{
		"a quiet life":               {claims: []Claim{span("p", "eu", 1, 10, 30), span("p", "eu", 1, 20, 40), span("p", "us", 2, 41, 60), span("q", "us", 1, 20, 40)}},
		"in any order":               {claims: []Claim{span("p", "us", 2, 41, 60), span("p", "eu", 1, 10, 40)}},
		"its own raise of the epoch": {claims: []Claim{span("p", "eu", 1, 10, 40), span("p", "eu", 2, 20, 50)}},
		"nothing for certain":        {claims: []Claim{span("p", "eu", 1, 40, 40), span("p", "us", 2, 40, 60), span("p", "eu", 1, 50, 45)}},
		"two at one instant": {
			claims: []Claim{span("p", "eu", 1, 10, 40), span("p", "us", 2, 39, 60), span("p", "us", 2, 39, 70)},
			want:   []string{"I1: p: eu (epoch 1) and us (epoch 2) both hold it for 1 ms"},
		},
		"a long claim behind a short one": {
			claims: []Claim{span("p", "eu", 1, 10, 90), span("p", "eu", 1, 20, 30), span("p", "us", 2, 50, 60)},
			want:   []string{"I1: p: eu (epoch 1) and us (epoch 2) both hold it for 10 ms"},
		},
		"the epoch goes down": {
			claims: []Claim{span("p", "eu", 2, 10, 20), span("p", "us", 1, 30, 40)},
			want:   []string{"I2: p: us holds it with epoch 1 after eu had it with 2"},
		},
		"the epoch stays": {
			claims: []Claim{span("p", "eu", 2, 10, 20), span("p", "us", 2, 30, 40)},
			want:   []string{"I2: p: us holds it with epoch 2 after eu had it with 2"},
		},
		"back to an old epoch": {
			claims: []Claim{span("p", "eu", 1, 10, 20), span("p", "us", 2, 30, 40), span("p", "eu", 1, 50, 60)},
			want:   []string{"I2: p: eu holds it with epoch 1 after us had it with 2"},
		},
		"its own epoch goes down": {
			claims: []Claim{span("p", "eu", 2, 10, 20), span("p", "eu", 1, 30, 40)},
			want:   []string{"I2: p: eu holds it with epoch 1 after eu had it with 2"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, v := range judge(headLeases, c.claims) {
				got = append(got, v.String())
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestLedgerTakesTheSurestSpan(t *testing.T) {
	var l Ledger
	l.Observe(Answer{Region: "eu", Asked: at(10), Answered: at(14), Says: []Said{{Partition: "p", Epoch: 3, Left: 20 * time.Millisecond}, {Partition: "q"}}})
	want := Claim{Of: "p", By: "eu", Number: 3, From: at(14), Until: at(30)}
	if !slices.Equal(l.Claims, []Claim{want}) || l.Owners["p"] != want || len(l.Lapses) != 0 {
		t.Errorf("%+v", l)
	}
}

// An owner that says before its time that it has released a partition has given
// it up, and the next one may have it at once; that it holds nothing says less.
func TestLedgerCutsWhatIsGivenUp(t *testing.T) {
	held := func(asked, left int64) Answer {
		return Answer{Region: "eu", Asked: at(asked), Answered: at(asked + 2), Says: []Said{{Partition: "p", Epoch: 1, Left: time.Duration(left) * time.Millisecond}}}
	}
	released := held(40, 0)
	released.Says[0].Released = true
	elsewhere := released
	elsewhere.Region = "ap"
	next := Answer{Region: "us", Asked: at(60), Answered: at(62), Says: []Said{{Partition: "p", Epoch: 2, Left: 50 * time.Millisecond}}}
	late := held(25, 100) // to another server, and slow
	late.Answered = at(45)
	for name, c := range map[string]struct {
		answers []Answer
		overlap bool
	}{
		"given up":                  {[]Answer{held(10, 100), held(30, 100), released, next}, false},
		"not given up":              {[]Answer{held(10, 100), held(30, 100), next}, true},
		"a leader that began anew":  {[]Answer{held(10, 100), held(30, 100), held(40, 0), next}, true},
		"another region's register": {[]Answer{held(10, 100), held(30, 100), elsewhere, next}, true},
		"an answer from before":     {[]Answer{held(10, 100), released, late, next}, false},
		"held all the same":         {[]Answer{held(10, 100), released, held(50, 100), next}, true},
	} {
		l := ledgerOf(c.answers)
		if found := judge(headLeases, l.Claims); len(found) > 0 != c.overlap {
			t.Errorf("%s: %v", name, found)
		}
		if len(l.Lapses) > 0 {
			t.Errorf("%s: to give up is no lapse: %v", name, l.Lapses)
		}
	}
}

func TestLedgerSeesLapsesOnce(t *testing.T) {
	var l Ledger
	say := func(region string, ms int64, epoch uint64, left time.Duration) {
		l.Observe(Answer{Region: region, Asked: at(ms), Answered: at(ms + 1), Says: []Said{{Partition: "p", Epoch: epoch, Left: left}}})
	}
	say("eu", 10, 1, 15*time.Millisecond)
	say("us", 20, 0, 0) // never held it
	say("eu", 22, 1, 0) // a new leader; what the one before holds goes on
	say("eu", 30, 1, 0)
	say("eu", 40, 1, 0)
	say("eu", 50, 1, 5*time.Millisecond) // resumed
	say("eu", 60, 1, 0)
	say("us", 70, 2, time.Second)
	say("eu", 80, 1, 0) // it is another's by now
	want := []Lapse{{"p", "eu", 1, at(31)}, {"p", "eu", 1, at(61)}}
	if !slices.Equal(l.Lapses, want) {
		t.Errorf("lapses %+v, want %+v", l.Lapses, want)
	}
	if found := l.changes(at(0)); len(found) != 1 || found[0].Was.By != "eu" || found[0].Is.By != "us" || found[0].Is.Number != 2 {
		t.Errorf("changes %+v", found)
	}
	if found := l.changes(at(71)); len(found) != 0 {
		t.Errorf("changes before the instant: %+v", found)
	}
}

// A word that comes late does not make an old owner the newest.
func TestLedgerOwnerIsTheHighestEpochs(t *testing.T) {
	var l Ledger
	l.Observe(Answer{Region: "us", Asked: at(10), Answered: at(11), Says: []Said{{Partition: "p", Epoch: 2, Left: time.Second}}})
	l.Observe(Answer{Region: "eu", Asked: at(12), Answered: at(13), Says: []Said{{Partition: "p", Epoch: 1, Left: time.Second}}})
	if o := l.Owners["p"]; o.By != "us" {
		t.Errorf("owner %+v", o)
	}
}
