package resource

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func tok(epoch fence.Epoch, seq fence.Seq) fence.Token {
	t, err := fence.NewToken(epoch, seq)
	if err != nil {
		panic(err)
	}
	return t
}

// ticking is a wall clock that moves a second at each look.
func ticking() func() time.Time {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	return func() time.Time { now = now.Add(time.Second); return now }
}

func store(t *testing.T, dir string, unguarded bool) *Store {
	t.Helper()
	s, err := OpenStore(dir, unguarded, ticking(), quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func client(t *testing.T, s *Store, writer string) *Client {
	t.Helper()
	server := httptest.NewServer(Handler(s))
	c := NewClient(strings.TrimPrefix(server.URL, "http://"), writer)
	t.Cleanup(server.Close)
	return c
}

// The drill's own story, with and without the guard: the write that the old
// holder had in hand when it was frozen.
func TestLateWriteIsRefusedAndWithoutGuardIsTheViolation(t *testing.T) {
	const name = "lock/ledger"
	for _, unguarded := range []bool{false, true} {
		ctx := t.Context()
		s := store(t, t.TempDir(), unguarded)
		old, current := client(t, s, "old"), client(t, s, "new")
		if _, err := old.Claim(ctx, name, tok(1, 7)); err != nil {
			t.Fatal(err)
		}
		if _, err := old.Write(ctx, name, tok(1, 7), "a"); err != nil {
			t.Fatal(err)
		}
		if _, err := current.Claim(ctx, name, tok(2, 1)); err != nil {
			t.Fatal(err)
		}
		if v, err := current.Read(ctx, name); err != nil || v.Written.Value != "a" || v.Mark != tok(2, 1) {
			t.Fatalf("after the claim the new holder reads %+v, %v", v, err)
		}
		if _, err := current.Write(ctx, name, tok(2, 1), "b"); err != nil {
			t.Fatal(err)
		}
		e, err := old.Write(ctx, name, tok(1, 7), "late")
		journal, jerr := current.Journal(ctx)
		if jerr != nil {
			t.Fatal(jerr)
		}
		found := Violations(journal)
		v, rerr := current.Read(ctx, name)
		if rerr != nil {
			t.Fatal(rerr)
		}
		if unguarded {
			if err != nil || e.Outcome != Accepted || e.Mark != tok(2, 1) || v.Written.Value != "late" {
				t.Errorf("guard off: late write %+v, %v; value %+v", e, err, v)
			}
			if len(found) != 1 || !strings.Contains(found[0], "I5: entry 5: a write to lock/ledger by old") {
				t.Errorf("guard off: violations %q", found)
			}
			continue
		}
		var stale *fence.StaleError
		if !errors.As(err, &stale) || stale.Seen != tok(2, 1) || e.Outcome != Stale || v.Written.Value != "b" {
			t.Errorf("guard on: late write %+v, %v; value %+v", e, err, v)
		}
		if len(found) != 0 {
			t.Errorf("guard on: violations %q", found)
		}
		last := journal[len(journal)-1]
		if last != e || last.Writer != "old" || last.Mark != tok(2, 1) || last.Value != "late" || last.N != 5 || last.Time.IsZero() {
			t.Errorf("the journal's refusal is %+v, answered was %+v", last, e)
		}
	}
}

func TestUnclaimedIsRefusedAndJournaled(t *testing.T) {
	s := store(t, t.TempDir(), false)
	c := client(t, s, "w")
	e, err := c.Write(t.Context(), "lock/a", tok(1, 1), "x")
	var unclaimed *fence.UnclaimedError
	if !errors.As(err, &unclaimed) || e.Outcome != Unclaimed || e.Mark != 0 {
		t.Fatalf("%+v, %v", e, err)
	}
	if v, err := c.Read(t.Context(), "lock/a"); err != nil || v.Written != nil || v.Mark != 0 {
		t.Fatalf("%+v, %v", v, err)
	}
	if _, err := c.Claim(t.Context(), "lock/a", tok(1, 2)); err != nil {
		t.Fatal(err)
	}
	var stale *fence.StaleError
	if e, err := c.Claim(t.Context(), "lock/a", tok(1, 1)); !errors.As(err, &stale) || e.Op != OpClaim || e.Outcome != Stale {
		t.Fatalf("a lower claim: %+v, %v", e, err)
	}
}

// Killed at any moment and started again: what was answered is there, the marks
// with it, and a line that was cut off is gone.
func TestCrashKeepsAnsweredWritesAndMarks(t *testing.T) {
	dir := t.TempDir()
	s := store(t, dir, false)
	ctx := t.Context()
	for _, token := range []fence.Token{tok(1, 1), tok(1, 2)} {
		if _, err := s.Claim(ctx, "lock/a", token, "w"); err != nil {
			t.Fatal(err)
		}
		if e, err := s.Write(ctx, "lock/a", token, "w", "v"+token.String()); err != nil || e.Outcome != Accepted {
			t.Fatalf("%+v, %v", e, err)
		}
	}
	before := s.Journal()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, journalName)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for cut := range len(`{"n":5,"time"`) {
		if err := os.WriteFile(path, append(bytes.Clone(data), `{"n":5,"time"`[:cut]...), 0o600); err != nil {
			t.Fatal(err)
		}
		s := store(t, dir, false)
		if got := s.Journal(); len(got) != len(before) || got[3] != before[3] {
			t.Fatalf("cut at %d: journal %+v, was %+v", cut, got, before)
		}
		if v, ok := s.Read("lock/a"); !ok || v.Value != "v"+tok(1, 2).String() {
			t.Fatalf("cut at %d: value %+v", cut, v)
		}
		if e, err := s.Write(ctx, "lock/a", tok(1, 1), "w", "late"); err != nil || e.Outcome != Stale || e.N != 5 {
			t.Fatalf("cut at %d: late write %+v, %v", cut, e, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	damaged := bytes.Replace(data, []byte(`"n":2`), []byte(`"n":3`), 1)
	if err := os.WriteFile(path, damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenStore(dir, false, ticking(), quiet); err == nil || !strings.Contains(err.Error(), "line 2 is entry 3") {
		t.Fatalf("a journal with a line missing: %v", err)
	}
}

func TestBadRequestsSayWhatIsWrongAndAreNotJournaled(t *testing.T) {
	s := store(t, t.TempDir(), false)
	h := Handler(s)
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"POST", PathWrite, `{"resource":"lock/a","token":7,"writer":"w"}`, 400, "out of range"},
		{"POST", PathWrite, `{"resource":"lock/a","writer":"w"}`, 400, "token: "},
		{"POST", PathWrite, `{"token":4294967297,"writer":"w"}`, 400, "resource: has 0 bytes; 1 to 1024"},
		{"POST", PathWrite, `{"resource":"lock/a","token":4294967297}`, 400, "writer: has 0 bytes"},
		{"POST", PathWrite, `{"resource":"lock/a","token":4294967297,"writer":"w","value":"` + strings.Repeat("x", MaxValue+1) + `"}`, 400, "value: has 65537 bytes"},
		{"POST", PathWrite, `{"resource":"lock/a","tokn":4294967297}`, 400, "tokn"},
		{"POST", PathWrite, `{} {}`, 400, "more than one"},
		{"POST", PathWrite, strings.Repeat(" ", maxBody+1), 400, "too large"},
		{"POST", PathClaim, `{"resource":"lock/a","token":4294967297,"writer":"w","value":"x"}`, 400, "a claim has none"},
		{"GET", PathWrite, ``, 405, ""},
		{"GET", PathValue, ``, 400, "resource: missing"},
		{"GET", PathHealth, ``, 200, ""},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(c.method, c.path, strings.NewReader(c.body)))
		if w.Code != c.status || !strings.Contains(w.Body.String(), c.want) {
			t.Errorf("%s %s %.80s: %d %s, want %d %q", c.method, c.path, c.body, w.Code, w.Body, c.status, c.want)
		}
	}
	if j := s.Journal(); len(j) != 0 {
		t.Errorf("journal has %+v", j)
	}
}

func TestRunServesUntilItsContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	dir := filepath.Join(t.TempDir(), "resource")
	address, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		ended <- Run(ctx, Config{Dir: dir, Ready: func(a string) { address <- a }, Logger: quiet})
	}()
	select {
	case err := <-ended:
		t.Fatal(err)
	case a := <-address:
		c := NewClient(a, "w")
		if _, err := c.Claim(ctx, "lock/a", tok(1, 1)); err != nil {
			t.Fatal(err)
		}
	}
	// A second one is kept away from the data.
	if err := Run(ctx, Config{Dir: dir, Logger: quiet}); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("second process: %v", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func TestRunRefusesWhatMakesNoSense(t *testing.T) {
	err := Run(t.Context(), Config{Address: "0.0.0.0:80"})
	if err == nil || !strings.Contains(err.Error(), "dir: empty") || !strings.Contains(err.Error(), "not host:port on loopback") {
		t.Errorf("%v", err)
	}
	s := store(t, t.TempDir(), false)
	server := httptest.NewServer(Handler(s))
	defer server.Close()
	err = Run(t.Context(), Config{Dir: t.TempDir(), Address: strings.TrimPrefix(server.URL, "http://"), Logger: quiet})
	if err == nil || !strings.Contains(err.Error(), "use 127.0.0.1:0") {
		t.Errorf("occupied port: %v", err)
	}
}

// A client tells "refused" from "unknown": only the former is a fence error.
func TestClientErrors(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer(w, http.StatusInternalServerError, problem{"disk on fire"})
	}))
	c := NewClient(strings.TrimPrefix(server.URL, "http://"), "w")
	defer server.Close()
	_, err := c.Write(t.Context(), "lock/a", tok(1, 1), "x")
	var stale *fence.StaleError
	if err == nil || errors.As(err, &stale) || !strings.Contains(err.Error(), "500: disk on fire") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Write(ctx, "lock/a", tok(1, 1), "x"); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestViolationsSeesClaimsAndKeepsResourcesApart(t *testing.T) {
	entry := func(n uint64, op Op, resource string, token fence.Token, outcome Outcome) Entry {
		return Entry{N: n, Op: op, Resource: resource, Token: token, Outcome: outcome, Writer: "w"}
	}
	good := []Entry{
		entry(1, OpClaim, "a", tok(2, 1), Accepted),
		entry(2, OpWrite, "b", tok(1, 1), Accepted),
		entry(3, OpWrite, "a", tok(1, 1), Stale),
		entry(4, OpWrite, "a", tok(2, 1), Accepted),
		entry(5, OpClaim, "a", tok(1, 1), Stale),
	}
	if found := Violations(good); len(found) != 0 {
		t.Errorf("%q", found)
	}
	bad := append(good, entry(6, OpWrite, "a", tok(1, 9), Accepted), entry(7, OpWrite, "b", tok(1, 1), Accepted))
	if found := Violations(bad); len(found) != 1 || !strings.Contains(found[0], "entry 6") {
		t.Errorf("%q", found)
	}
}
