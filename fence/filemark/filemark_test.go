package filemark

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func open(t testing.TB, dir string) *Guard {
	t.Helper()
	g, err := Open(Options{Dir: dir, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.Close() })
	return g
}

func nothing(context.Context) error { return nil }

// The guard does what a map does, over reopens and crashes in the middle of a
// mark's write.
func TestGuardAgainstMapModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp(t.TempDir(), "marks")
		if err != nil {
			rt.Fatal(err)
		}
		ctx := context.Background()
		model := map[string]fence.Token{}
		g := open(t, dir)
		for range rapid.IntRange(1, 12).Draw(rt, "steps") {
			name := rapid.SampledFrom([]string{"lock/a", "lock/b", "shard/1"}).Draw(rt, "resource")
			token := tok(fence.Epoch(rapid.Uint32Range(1, 3).Draw(rt, "epoch")), fence.Seq(rapid.Uint32Range(1, 3).Draw(rt, "seq")))
			switch rapid.SampledFrom([]string{"claim", "do", "do", "reopen", "crash"}).Draw(rt, "step") {
			case "claim":
				err := g.Claim(ctx, name, token)
				if (err == nil) != (token >= model[name]) {
					rt.Fatalf("claim %s %v with mark %v: %v", name, token, model[name], err)
				}
				model[name] = max(model[name], token)
			case "do":
				ran := false
				err := g.Do(ctx, name, token, func(context.Context) error { ran = true; return nil })
				var stale *fence.StaleError
				var unclaimed *fence.UnclaimedError
				switch mark := model[name]; {
				case mark == 0 && (ran || !errors.As(err, &unclaimed)):
					rt.Fatalf("write without a mark: ran %v, %v", ran, err)
				case mark > token && (ran || !errors.As(err, &stale) || stale.Seen != mark || stale.Given != token):
					rt.Fatalf("write %v below mark %v: ran %v, %v", token, mark, ran, err)
				case mark != 0 && mark <= token && (!ran || err != nil):
					rt.Fatalf("write %v at mark %v: ran %v, %v", token, mark, ran, err)
				case mark != 0:
					model[name] = max(mark, token)
				}
			case "reopen":
				if err := g.Close(); err != nil {
					rt.Fatal(err)
				}
				g = open(t, dir)
			case "crash":
				// The next mark's record is cut at a byte: nobody was told.
				if err := g.Close(); err != nil {
					rt.Fatal(err)
				}
				record := appendRecord(nil, name, tok(1000, 1))
				n := rapid.IntRange(0, len(record)-2).Draw(rt, "cut")
				appendTo(rt, filepath.Join(dir, journalName), record[:n])
				g = open(t, dir)
			}
			for name, mark := range model {
				if g.Mark(name) != mark {
					rt.Fatalf("mark of %s is %v, want %v", name, g.Mark(name), mark)
				}
			}
		}
		if err := g.Close(); err != nil {
			rt.Fatal(err)
		}
	})
}

func appendTo(t *rapid.T, path string, b []byte) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// [F15] A new holder's Claim returns only when the old holder's effect, which
// hears of it, has returned; and meanwhile the old holder begins nothing new.
func TestF15ClaimWaitsForRunningEffectsOfLowerTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := open(t, t.TempDir())
		ctx := t.Context()
		old, current := tok(1, 1), tok(1, 2)
		if err := g.Claim(ctx, "lock/a", old); err != nil {
			t.Fatal(err)
		}
		release, ended := make(chan struct{}), make(chan error, 1)
		var cause error
		go func() {
			ended <- g.Do(ctx, "lock/a", old, func(ctx context.Context) error {
				<-ctx.Done()
				cause = context.Cause(ctx)
				<-release
				return cause
			})
		}()
		synctest.Wait()
		claimed := make(chan error, 1)
		go func() { claimed <- g.Claim(ctx, "lock/a", current) }()
		synctest.Wait()
		var stale *fence.StaleError
		if !errors.As(cause, &stale) || stale.Seen != current {
			t.Fatalf("the running effect heard %v, want a StaleError naming %v", cause, current)
		}
		select {
		case err := <-claimed:
			t.Fatalf("claim returned (%v) while an effect of a lower token was running", err)
		default:
		}
		if err := g.Do(ctx, "lock/a", old, nothing); !errors.As(err, &stale) {
			t.Fatalf("a lower write during the claim: %v", err)
		}
		if err := g.Claim(ctx, "lock/other", old); err != nil {
			t.Fatalf("another resource is held up: %v", err)
		}
		close(release)
		if err := <-claimed; err != nil {
			t.Fatal(err)
		}
		if err := <-ended; !errors.As(err, &stale) {
			t.Fatalf("the old effect returned %v", err)
		}
	})
}

// [F15] A write that comes with a higher token, without Claim, waits too, and
// loses its place to a still higher one that comes while it waits.
func TestF15HigherWriteWaitsAndIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := open(t, t.TempDir())
		ctx := t.Context()
		if err := g.Claim(ctx, "lock/a", tok(1, 1)); err != nil {
			t.Fatal(err)
		}
		release := make(chan struct{})
		done := make(chan error, 3)
		go func() {
			done <- g.Do(ctx, "lock/a", tok(1, 1), func(context.Context) error { <-release; return nil })
		}()
		synctest.Wait()
		middle := make(chan error, 1)
		go func() {
			middle <- g.Do(ctx, "lock/a", tok(1, 2), func(context.Context) error { t.Error("ran below the mark"); return nil })
		}()
		synctest.Wait()
		go func() { done <- g.Claim(ctx, "lock/a", tok(1, 3)) }()
		synctest.Wait()
		close(release)
		var stale *fence.StaleError
		if err := <-middle; !errors.As(err, &stale) || stale.Seen != tok(1, 3) {
			t.Fatalf("the write between: %v", err)
		}
		for range 2 {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
	})
}

// A claim given up while it waits has raised the mark all the same.
func TestClaimGivenUpKeepsMark(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := open(t, t.TempDir())
		if err := g.Claim(t.Context(), "lock/a", tok(1, 1)); err != nil {
			t.Fatal(err)
		}
		release, done := make(chan struct{}), make(chan error, 1)
		go func() {
			done <- g.Do(t.Context(), "lock/a", tok(1, 1), func(context.Context) error { <-release; return nil })
		}()
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		claimed := make(chan error, 1)
		go func() { claimed <- g.Claim(ctx, "lock/a", tok(1, 2)) }()
		synctest.Wait()
		cancel()
		if err := <-claimed; !errors.Is(err, context.Canceled) {
			t.Fatalf("claim: %v", err)
		}
		if g.Mark("lock/a") != tok(1, 2) {
			t.Fatalf("mark is %v", g.Mark("lock/a"))
		}
		close(release)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

// Effects of one token run side by side; a panic in one leaves the guard whole.
func TestEffectsOfOneTokenAndPanics(t *testing.T) {
	g := open(t, t.TempDir())
	ctx := t.Context()
	if err := g.Claim(ctx, "lock/a", tok(1, 1)); err != nil {
		t.Fatal(err)
	}
	err := g.Do(ctx, "lock/a", tok(1, 1), func(ctx context.Context) error {
		return g.Do(ctx, "lock/a", tok(1, 1), nothing)
	})
	if err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		_ = g.Do(ctx, "lock/a", tok(1, 1), func(context.Context) error { panic("effect") })
	}()
	if err := g.Claim(ctx, "lock/a", tok(1, 2)); err != nil {
		t.Fatal(err)
	}
}

// The mark is on disk before the effect runs: a copy of the directory taken
// inside the effect has it.
func TestMarkIsWrittenBeforeEffect(t *testing.T) {
	dir := t.TempDir()
	g := open(t, dir)
	ctx := t.Context()
	if err := g.Claim(ctx, "lock/a", tok(1, 1)); err != nil {
		t.Fatal(err)
	}
	err := g.Do(ctx, "lock/a", tok(4, 4), func(context.Context) error {
		data, err := os.ReadFile(filepath.Join(dir, journalName))
		if err != nil {
			return err
		}
		marks, _, err := decode(journalName, data)
		if err == nil && marks["lock/a"] != tok(4, 4) {
			t.Errorf("on disk while the effect runs: %v", marks)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// failing is a journal file whose disk gives up.
type failing struct {
	writer
	write, sync error
}

func (f *failing) Write(b []byte) (int, error) {
	if f.write != nil {
		n, _ := f.writer.Write(b[:len(b)/2])
		return n, f.write
	}
	return f.writer.Write(b)
}

func (f *failing) Sync() error {
	if f.sync != nil {
		return f.sync
	}
	return f.writer.Sync()
}

// After a failed write or fsync nothing is accepted until the guard is opened
// again, and then the acknowledged marks are there.
func TestFailedDiskStopsTheGuard(t *testing.T) {
	bad := errors.New("input/output error")
	for name, fail := range map[string]failing{"write": {write: bad}, "sync": {sync: bad}} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			g := open(t, dir)
			ctx := t.Context()
			if err := g.Claim(ctx, "lock/a", tok(1, 1)); err != nil {
				t.Fatal(err)
			}
			fail.writer = g.journal.file
			g.journal.file = &fail
			if err := g.Claim(ctx, "lock/a", tok(1, 2)); !errors.Is(err, bad) {
				t.Fatalf("claim: %v", err)
			}
			fail.write, fail.sync = nil, nil
			for _, token := range []fence.Token{tok(1, 1), tok(1, 2)} {
				err := g.Do(ctx, "lock/a", token, func(context.Context) error { t.Error("ran after a failed fsync"); return nil })
				if !errors.Is(err, bad) || !strings.Contains(err.Error(), "opened again") {
					t.Fatalf("write: %v", err)
				}
			}
			if err := g.Close(); err != nil {
				t.Fatal(err)
			}
			if mark := open(t, dir).Mark("lock/a"); mark < tok(1, 1) || name == "write" && mark != tok(1, 1) {
				t.Fatalf("mark after reopening: %v", mark)
			}
		})
	}
}

func TestSecondGuardIsKeptOut(t *testing.T) {
	dir := t.TempDir()
	g := open(t, dir)
	_, err := Open(Options{Dir: dir, Logger: quiet})
	if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), dir) {
		t.Fatalf("second guard on one directory: %v", err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	open(t, dir)
}

func TestDamagedJournalIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	g := open(t, dir)
	for seq := fence.Seq(1); seq <= 3; seq++ {
		if err := g.Claim(t.Context(), "lock/a", tok(1, seq)); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, journalName)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[len(header)+12] ^= 1
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	var corrupt *CorruptError
	if _, err := Open(Options{Dir: dir, Logger: quiet}); !errors.As(err, &corrupt) || corrupt.Line != 2 {
		t.Fatalf("damaged journal: %v", err)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(data) {
		t.Fatalf("the damaged journal was changed: %v", err)
	}
}

// The control run of a drill: lower tokens pass, and the mark stays.
func TestUnguardedForDrillLetsLateWritesPass(t *testing.T) {
	var log strings.Builder
	g, err := Open(Options{Dir: t.TempDir(), UnguardedForDrill: true, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if err := g.Claim(ctx, "lock/a", tok(2, 1)); err != nil {
		t.Fatal(err)
	}
	ran := false
	if err := g.Do(ctx, "lock/a", tok(1, 1), func(context.Context) error { ran = true; return nil }); err != nil || !ran {
		t.Fatalf("ran %v, %v", ran, err)
	}
	if g.Mark("lock/a") != tok(2, 1) || !strings.Contains(log.String(), "guard is off") {
		t.Fatalf("mark %v, log %q", g.Mark("lock/a"), log.String())
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestCloseCancelsAndRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := open(t, t.TempDir())
		if err := g.Claim(t.Context(), "lock/a", tok(1, 1)); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			done <- g.Do(t.Context(), "lock/a", tok(1, 1), func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) })
		}()
		synctest.Wait()
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-done; !errors.Is(err, ErrClosed) {
			t.Fatalf("running effect: %v", err)
		}
		if err := g.Do(t.Context(), "lock/new", tok(1, 1), nothing); !errors.Is(err, ErrClosed) {
			t.Fatalf("after close: %v", err)
		}
		if err := g.Claim(t.Context(), "lock/a", tok(1, 1)); !errors.Is(err, ErrClosed) {
			t.Fatalf("after close: %v", err)
		}
	})
}

func TestBadArgumentsChangeNothing(t *testing.T) {
	dir := t.TempDir()
	g := open(t, dir)
	before, _ := os.ReadFile(filepath.Join(dir, journalName))
	for _, c := range []struct {
		resource string
		token    fence.Token
		want     string
	}{
		{"", tok(1, 1), "resource"},
		{strings.Repeat("x", MaxResource+1), tok(1, 1), "resource"},
		{"lock/a", 0, "token"},
		{"lock/a", 1 << 53, "token"},
	} {
		for _, err := range []error{g.Claim(t.Context(), c.resource, c.token), g.Do(t.Context(), c.resource, c.token, nothing)} {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%.10q %d: %v", c.resource, c.token, err)
			}
		}
	}
	after, _ := os.ReadFile(filepath.Join(dir, journalName))
	if string(before) != string(after) {
		t.Errorf("journal changed to %q", after)
	}
	if _, err := Open(Options{}); err == nil || !strings.Contains(err.Error(), "dir") {
		t.Errorf("open without a directory: %v", err)
	}
}

// The journal does not grow for ever, and is the same marks after it shrank.
func TestJournalIsCompacted(t *testing.T) {
	dir := t.TempDir()
	g := open(t, dir)
	if err := g.Claim(t.Context(), "lock/a", tok(1, 1)); err != nil {
		t.Fatal(err)
	}
	g.journal.size = compactAbove // as after many marks
	if err := g.Claim(t.Context(), "lock/a", tok(1, 2)); err != nil {
		t.Fatal(err)
	}
	if err := g.Claim(t.Context(), "lock/b", tok(1, 3)); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, journalName))
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(string(data), "\n"); lines != 3 {
		t.Errorf("after compaction the journal has %d lines:\n%s", lines, data)
	}
	marks, _, err := decode("j", data)
	if want := map[string]fence.Token{"lock/a": tok(1, 2), "lock/b": tok(1, 3)}; err != nil || !maps.Equal(marks, want) {
		t.Errorf("marks %v, %v", marks, err)
	}
}

// [F15] Under a crowd: while an effect runs, nobody has been told that a higher
// token's claim is complete.
func TestF15NoEffectBelowACompletedClaim(t *testing.T) {
	g := open(t, t.TempDir())
	var claimed atomic.Uint64
	var ran, refused atomic.Int64
	var group sync.WaitGroup
	for holder := range 8 {
		group.Go(func() {
			for i := range 5 {
				token := tok(fence.Epoch(i+1), fence.Seq(holder+1))
				if err := g.Claim(t.Context(), "lock/a", token); err == nil {
					for old := claimed.Load(); old < uint64(token); old = claimed.Load() {
						if claimed.CompareAndSwap(old, uint64(token)) {
							break
						}
					}
				}
				for range 3 {
					err := g.Do(t.Context(), "lock/a", token, func(context.Context) error {
						ran.Add(1)
						for range 20 {
							if c := claimed.Load(); c > uint64(token) {
								t.Errorf("an effect of %s runs after the claim of %d was complete", token, c)
							}
							runtime.Gosched()
						}
						return nil
					})
					if err != nil {
						refused.Add(1)
					}
				}
			}
		})
	}
	group.Wait()
	if ran.Load() == 0 || refused.Load() == 0 {
		t.Errorf("%d effects ran, %d were refused: the test shows nothing", ran.Load(), refused.Load())
	}
}
