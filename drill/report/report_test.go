package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
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

// isolated is a record of an owner that was cut off.
func isolated() (*check.Record, check.Verdict) {
	tok := func(epoch, seq uint64) fence.Token { return fence.Token(epoch<<32 | seq) }
	r := &check.Record{
		D: 2 * time.Second, RTT: 100 * time.Millisecond, TTL: 5 * time.Second, Partitions: []string{"p"},
		Began: at(1000), Ended: at(11000), SettledAt: at(9500),
		Faults: []check.Fault{
			{Step: 0, Title: "isolate owner of p", Kind: plan.Isolate, Of: []string{"eu", "us"}, From: at(2000), Full: at(2010), Until: at(9000), Effect: "it was felt"},
			{Step: 1, Title: "await settled", Kind: plan.Await, From: at(9000), Until: at(9500), Effect: "it came"},
		},
		Journal: []check.Entry{{N: 1, Op: "write", Resource: "lock/x", Writer: "w", Token: tok(1, 1), Accepted: true}},
	}
	for ms := 0.0; ms < 3800; ms += 100 {
		left := 1900 * time.Millisecond
		if ms > 2000 {
			left = time.Duration(3900-ms) * time.Millisecond
		}
		r.Answers = append(r.Answers, check.Answer{Region: "eu", Asked: at(ms), Answered: at(ms + 2), Says: []check.Said{{Partition: "p", Epoch: 1, Left: left}}})
	}
	for ms := 5000.0; ms < 11000; ms += 100 {
		r.Answers = append(r.Answers, check.Answer{Region: "us", Asked: at(ms), Answered: at(ms + 2), Says: []check.Said{{Partition: "p", Epoch: 2, Left: 1900 * time.Millisecond}}})
	}
	w := check.Actor{Name: "worker 1.1", Lock: "lock/x", Partition: "p"}
	for ms := 1100.0; ms < 3500; ms += 200 {
		w.Events = append(w.Events, check.Event{Kind: check.Wrote, Sent: at(ms), At: at(ms + 3), Token: tok(1, 1), Until: at(min(ms+1200, 3600))})
	}
	w.Events = append(w.Events,
		check.Event{Kind: check.Lost, Sent: at(3600), At: at(3600), Token: tok(1, 1), Reason: "its validity runs out"},
		check.Event{Kind: check.Acquired, Sent: at(5050), At: at(5100), Token: tok(2, 1), Region: "us", Until: at(6500)},
		check.Event{Kind: check.Wrote, Sent: at(5101), At: at(5104), Token: tok(2, 1), Until: at(6500)},
		check.Event{Kind: check.Refused, Sent: at(5201), At: at(5204), Token: tok(2, 1), Until: at(6500), Reason: "stale"})
	r.Actors = []check.Actor{w}
	r.Watched = []check.Watched{{Name: "eu"}}
	for ms := 0.0; ms < 11000; ms += 400 {
		r.Watched[0].Heard = append(r.Watched[0].Heard, at(ms))
	}
	var expect []plan.Expectation
	for _, text := range []string{"promoted within D + 4RTT + 1s", "no promotion", "no write refused", "at least 20 writes", "at least 1 grant"} {
		e, err := plan.ParseExpectation(text)
		if err != nil {
			panic(err)
		}
		expect = append(expect, e)
	}
	return r, check.Check(r, expect)
}

func example() *Report {
	r, v := isolated()
	out := New(Header{
		Scenario: "region-isolated", Summary: "an owner is cut off", About: "It stops at the end of its head lease.", Began: time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC),
		Seed: 7, Cluster: "dev", Private: true, Regions: []string{"eu", "us"}, Servers: 6, Witnesses: 3,
	}, r, v)
	for ms := 0; ms < 10000; ms += 250 {
		phi := 0.1
		if ms > 2000 && ms < 8000 {
			phi = float64(ms-2000) / 100
		}
		out.AddPhi(time.Duration(ms)*time.Millisecond, "us", "eu", phi)
	}
	return out
}

func TestReportText(t *testing.T) {
	var b bytes.Buffer
	r := example()
	if err := errors.Join(r.Render(&b), WriteJSON(&b, r), r.WriteJUnit(&b)); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.txt", b.Bytes())
}

// A table of drills begins with these.
func TestSums(t *testing.T) {
	r := example()
	if r.Promotions != 1 || r.Lost != 1 || r.UnownedMS < 1000 || r.UnownedMS > 1300 {
		t.Errorf("%d promotions, %d lost, %v ms unowned", r.Promotions, r.Lost, r.UnownedMS)
	}
	r.FailoverMS = 3104
	want := fmt.Sprintf("D 2000 ms, 1 promotions, %.0f ms unowned, 1 leases lost, failover 3104 ms; promoted within ", r.UnownedMS)
	if got := r.Figures(); !strings.HasPrefix(got, want) {
		t.Errorf("%s; want %s", got, want)
	}
	r.Reigns = r.Reigns[:1] // nobody took over
	r.Promotions, r.UnownedMS, r.Lost = 0, 0, 0
	r.addSums(&check.Record{Began: at(1000), Ended: at(11000)})
	if r.UnownedMS < 7000 {
		t.Errorf("%v ms unowned, up to the end", r.UnownedMS)
	}
}

// Scripts were promised these keys of a drill with a frozen worker.
func TestKeysOfAFailover(t *testing.T) {
	r, v := isolated()
	r.Late = check.Late{Sent: true, Seen: true, Token: 1<<32 | 1, Mark: 2<<32 | 1}
	out := New(Header{}, r, v)
	out.Failover(r, "old", "worker 1.1")
	out.AddControl(&Report{Details: []Detail{{Rule: "I5"}}})
	var b bytes.Buffer
	if err := WriteJSON(&b, out); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{
		`"ok":false`, `"failover_ms":3104`, `"promoted_ms":3002`, `"d_ms":2000`, `"old_token":4294967297`, `"new_token":8589934593`,
		`"stale_write_refused":true`, `"guard_off_violated":true`, `"violations":["expected`,
	} {
		if !strings.Contains(b.String(), key) {
			t.Errorf("no %s in %.300s", key, b.String())
		}
	}
}

// A control run that shows nothing means that the drill cannot fail, and what
// else is wrong in it counts.
func TestControlRun(t *testing.T) {
	for name, c := range map[string]struct {
		control Report
		verdict string
	}{
		"it shows what it must":  {Report{Details: []Detail{{Rule: "I5"}}}, "ok"},
		"it shows nothing":       {Report{}, "FAILED"},
		"something else as well": {Report{Details: []Detail{{Rule: "I5"}, {Rule: "I1"}}}, "FAILED"},
		"nothing broke in it":    {Report{Details: []Detail{{Rule: "I5"}}, Inconclusive: []string{"step 1 (kill) did not take effect"}}, "inconclusive"},
	} {
		r := &Report{OK: true, Verdict: "ok"}
		r.AddControl(&c.control)
		if r.Verdict != c.verdict || r.OK != (c.verdict == "ok") {
			t.Errorf("%s: %s, ok %v, %q", name, r.Verdict, r.OK, r.Violations)
		}
	}
}

// JUnit has no word for inconclusive; it must be an error, never a success.
func TestJUnitOfAnInconclusiveDrill(t *testing.T) {
	r := &Report{Scenario: "x", Verdict: "inconclusive", Inconclusive: []string{"us was not heard"}, Expectations: []Expectation{{Text: "no lapse", State: "inconclusive", Why: "stalled"}}}
	var b bytes.Buffer
	if err := r.WriteJUnit(&b); err != nil {
		t.Fatal(err)
	}
	var got junitSuites
	if err := xml.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if s := got.Suites[0]; s.Errors != 2 || s.Failures != 0 || s.Tests != 3 {
		t.Errorf("%+v", s)
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

// The page needs nothing but itself, and no text of a drill can break out of
// its place.
func TestHTMLIsOneSafeFile(t *testing.T) {
	r := example()
	evil := `</script><script>alert("x")</script>`
	r.Summary, r.Events[0].Text = evil, evil
	r.Details = append(r.Details, Detail{Rule: "I4", Text: evil, AtMS: 5, Around: []Moment{{1, "w", evil}}})
	r.Violations = append(r.Violations, "I4: "+evil)
	var b bytes.Buffer
	if err := r.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	if strings.Contains(text, evil) || strings.Count(text, "<script") != strings.Count(text, "</script>") {
		t.Error("a text breaks out of its place")
	}
	for _, what := range []string{"<link", "src=", "@import", "url("} {
		if page, _, _ := strings.Cut(text, `id="data"`); strings.Contains(page, what) {
			t.Errorf("the page loads something: %s", what)
		}
	}
	for _, want := range []string{"region-isolated", "FAILED", "3002 ms, of 3400 ms", "prefers-color-scheme: dark", "@media print", "Mike Bostock", "Observable, Inc."} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in the page", want)
		}
	}
	// What was not in the invariants' details is told as well, once.
	if n := strings.Count(text, "expected &#34;no promotion&#34;"); n != 1 {
		t.Errorf("a broken expectation is told %d times", n)
	}
}

// A report that was read again from its JSON makes the same page.
func TestReportFromItsJSON(t *testing.T) {
	var raw, first, second bytes.Buffer
	r := example()
	if err := errors.Join(WriteJSON(&raw, r), r.WriteHTML(&first)); err != nil {
		t.Fatal(err)
	}
	var again Report
	if err := json.Unmarshal(raw.Bytes(), &again); err != nil {
		t.Fatal(err)
	}
	if err := again.WriteHTML(&second); err != nil || !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Errorf("another page, %v", err)
	}
}
