package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// Read the diff before you commit what -rewrite wrote.
var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs; got:\n%s\nwant:\n%s", path, got, want)
	}
}

// at is an instant some milliseconds into a run.
func at(ms float64) instant.Instant {
	return instant.Instant(5 * time.Hour).Add(time.Duration(ms * float64(time.Millisecond)))
}

func regionLoss() Timeline {
	t := Timeline{Title: "region-loss, guard on", Zero: at(2000)}
	t.Enter(at(0), "eu-frankfurt", Holds)
	t.Enter(at(0), "us-virginia", Waits)
	t.Enter(at(0), "worker old", Holds)
	t.Enter(at(3), "worker new", Waits)
	t.Add(at(0), "worker old", "acquired lock/ledger with token 4294967297, claimed and wrote")
	t.Add(at(1990.4), "worker old", "stopped itself between lease.Valid() and its send")
	t.Enter(at(1990.4), "worker old", Frozen)
	// Out of order, as the observers report.
	t.Add(at(6712.2), "us-virginia", "promoted: epoch 2")
	t.Enter(at(6712.2), "us-virginia", Holds)
	t.Add(at(2000), "eu-frankfurt", "SIGKILL to eu-frankfurt-1, -2, -3")
	t.Enter(at(2000), "eu-frankfurt", Dead)
	t.Add(at(6804), "worker new", "acquired with token 8589934593")
	t.Enter(at(6804), "worker new", Holds)
	t.Add(at(6811), "resource", "accepted claim of worker new")
	t.Add(at(6815.6), "resource", "accepted write of worker new")
	t.Add(at(7100), "worker old", "resumed;\nits write goes out")
	t.Add(at(7103), "resource", "REFUSED write of worker old: token 4294967297 is below 8589934593")
	return t
}

func good() (guarded, control RegionLossRun) {
	guarded = RegionLossRun{
		D: 4 * time.Second, RTT: 150 * time.Millisecond,
		Killed: at(2000), Promoted: at(6712.2), Written: at(6815.6),
		OldToken: 1<<32 | 1, NewToken: 2<<32 | 1, LateRefused: true,
	}
	control = guarded
	control.LateRefused, control.LateAccepted = false, true
	return guarded, control
}

func TestTimelineText(t *testing.T) {
	var b bytes.Buffer
	if err := regionLoss().Render(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "region-loss.txt", b.Bytes())
}

func TestTimelineAtItsEdges(t *testing.T) {
	var b bytes.Buffer
	one := Timeline{Title: "one event"}
	one.Add(at(1), "x", "happened")
	same := Timeline{Title: "all at once, and more events than names"}
	for range len(marks) + 5 {
		same.Add(at(1), "x", "again")
	}
	for _, tl := range []Timeline{{Title: "nothing"}, one, same} {
		if err := tl.Render(&b); err != nil {
			t.Fatal(err)
		}
	}
	golden(t, "edges.txt", b.Bytes())
}

func TestResults(t *testing.T) {
	var b bytes.Buffer
	guarded, control := good()
	bad, broken := guarded, control
	bad.Promoted, bad.LateAccepted, bad.NewToken = at(8000.5), true, bad.OldToken
	bad.Violations = []string{"I5: entry 9: …"}
	broken.LateAccepted = false
	for _, r := range []RegionLoss{JudgeRegionLoss(guarded, control), JudgeRegionLoss(bad, broken), JudgeRegionLoss(RegionLossRun{D: time.Second}, RegionLossRun{})} {
		if err := errors.Join(r.Render(&b), WriteJSON(&b, r)); err != nil {
			t.Fatal(err)
		}
		b.WriteByte('\n')
	}
	for _, c := range []CableCut{{DMS: 4000, CutMS: 12000, WritesAccepted: 97}, {DMS: 4000, CutMS: 7999, Promotions: 1, Lapses: 2}, {DMS: 4000, CutMS: 12000, WritesAccepted: 97, Inconclusive: "the cut did not cut"}} {
		r := JudgeCableCut(c)
		if err := errors.Join(r.Render(&b), WriteJSON(&b, r)); err != nil {
			t.Fatal(err)
		}
		b.WriteByte('\n')
	}
	golden(t, "results.txt", b.Bytes())
}

// The keys are those that scripts were promised, no more and no fewer.
func TestRegionLossKeys(t *testing.T) {
	var b bytes.Buffer
	if err := WriteJSON(&b, JudgeRegionLoss(good())); err != nil {
		t.Fatal(err)
	}
	var keys map[string]any
	if err := json.Unmarshal(b.Bytes(), &keys); err != nil {
		t.Fatal(err)
	}
	want := "ok failover_ms promoted_ms d_ms old_token new_token stale_write_refused guard_off_violated violations"
	for _, k := range strings.Fields(want) {
		if _, ok := keys[k]; !ok {
			t.Errorf("no key %s in %s", k, b.String())
		}
		delete(keys, k)
	}
	if len(keys) > 0 || !strings.Contains(b.String(), `"violations":[]`) {
		t.Errorf("unexpected %v in %s", keys, b.String())
	}
}

// A result is ok only if every single thing that it must show was seen.
func TestOneFaultIsEnoughToFail(t *testing.T) {
	if r := JudgeRegionLoss(good()); !r.OK {
		t.Fatalf("a good run fails: %q", r.Violations)
	}
	for name, change := range map[string]func(g, c *RegionLossRun){
		"I7: the promotion took 5601 ms; at most 5600 ms": func(g, _ *RegionLossRun) { g.Promoted = g.Killed.Add(5601 * time.Millisecond) },
		"I7: no region was promoted":                      func(g, _ *RegionLossRun) { g.Promoted = 0 },
		"no write was accepted":                           func(g, _ *RegionLossRun) { g.Written = 0 },
		"I2: the new token":                               func(g, _ *RegionLossRun) { g.NewToken = g.OldToken },
		"I5: the late write was accepted":                 func(g, _ *RegionLossRun) { g.LateAccepted = true },
		"did not reach the resource":                      func(g, _ *RegionLossRun) { g.LateRefused = false },
		"the drill cannot fail":                           func(_, c *RegionLossRun) { c.LateAccepted = false },
		"I1: two owners":                                  func(g, _ *RegionLossRun) { g.Violations = []string{"I1: two owners"} },
		"control run: I7: the promotion took 5601 ms":     func(_, c *RegionLossRun) { c.Promoted = c.Killed.Add(5601 * time.Millisecond) },
		"control run: I7: no region was promoted":         func(_, c *RegionLossRun) { c.Promoted = 0 },
		"control run: I4: two holders":                    func(_, c *RegionLossRun) { c.Violations = []string{"I4: two holders"} },
	} {
		g, c := good()
		change(&g, &c)
		if r := JudgeRegionLoss(g, c); r.OK || len(r.Violations) != 1 || !strings.Contains(r.Violations[0], name) {
			t.Errorf("%s: ok %v, violations %q", name, r.OK, r.Violations)
		}
	}
}

// Whatever happened, the text shows every event once, in order, and every line
// of the picture has its width.
func TestTimelineShowsEveryEvent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tl Timeline
		actors := []string{"a", "região", "worker"}
		n := rapid.IntRange(1, 70).Draw(t, "events")
		for i := range n {
			actor := rapid.SampledFrom(actors).Draw(t, "actor")
			when := instant.Instant(rapid.Int64Range(1, int64(time.Hour)).Draw(t, "at"))
			tl.Add(when, actor, "event <%d>", i)
			tl.Enter(when, actor, rapid.SampledFrom([]State{Holds, Waits, Frozen, Dead}).Draw(t, "state"))
		}
		var b bytes.Buffer
		if err := tl.Render(&b); err != nil {
			t.Fatal(err)
		}
		text := b.String()
		for i := range n {
			if strings.Count(text, "event <"+fence.Token(i).String()+">") != 1 {
				t.Fatalf("event %d is not shown once:\n%s", i, text)
			}
		}
		for l := range strings.SplitSeq(text, "\n") {
			if !strings.Contains(l, "event <") && len([]rune(l)) > pictureWidth+2+8+2 {
				t.Fatalf("a line of the picture is too long: %q", l)
			}
		}
	})
}
