package clock

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// watched runs Watch in a bubble over a clock and a wall that the test moves
// apart from the bubble's time, and returns what it told.
func watched(t *testing.T, f func(add func(lease, wall time.Duration), told func() []string)) {
	synctest.Test(t, func(t *testing.T) {
		tbl, err := fault.NewTable(fault.Rules{})
		if err != nil {
			t.Fatal(err)
		}
		defer tbl.Close()
		c := WithFaults(NewRuntime(), tbl)
		var mu sync.Mutex
		var wall time.Duration
		var reasons []string
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error)
		go func() {
			done <- Watch(ctx, WatchConfig{
				Clock: c,
				Wall: func() time.Time {
					mu.Lock()
					defer mu.Unlock()
					return time.Now().Add(wall)
				},
				Restarted: func(r string) { reasons = append(reasons, r) },
			})
		}()
		synctest.Wait()
		add := func(lease, w time.Duration) {
			mu.Lock()
			wall += w
			mu.Unlock()
			if lease != 0 {
				if err := tbl.Set(fault.Rules{Clocks: []fault.ClockRule{{ID: "step", Step: lease, Expires: time.Minute}}}); err != nil {
					t.Fatal(err)
				}
			}
		}
		f(add, func() []string {
			time.Sleep(5 * tick)
			synctest.Wait()
			return reasons
		})
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestF19GapBetweenTicksCountsAsRestart(t *testing.T) {
	watched(t, func(add func(lease, wall time.Duration), told func() []string) {
		if got := told(); len(got) != 0 {
			t.Fatalf("told without a gap: %q", got)
		}
		add(900*time.Millisecond, 900*time.Millisecond) // with the tick: 1 s, not over
		if got := told(); len(got) != 0 {
			t.Fatalf("told of a gap of 1 s: %q", got)
		}
		add(901*time.Millisecond, 901*time.Millisecond)
		if got := told(); len(got) != 1 {
			t.Errorf("told %q", got)
		}
	})
}

func TestF19WallAheadCountsAsRestart(t *testing.T) {
	watched(t, func(add func(lease, wall time.Duration), told func() []string) {
		add(0, 100*time.Millisecond)
		if got := told(); len(got) != 0 {
			t.Fatalf("told of 100 ms: %q", got)
		}
		add(0, 101*time.Millisecond)
		if got := told(); len(got) != 1 {
			t.Errorf("told %q", got)
		}
		add(0, -time.Hour)
		if got := told(); len(got) != 1 {
			t.Errorf("a wall clock set back: told %q", got)
		}
	})
}

// Who waits by Go's timers hears of each suspend, also of one that is no gap.
func TestWatchTellsOfSuspends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tbl, err := fault.NewTable(fault.Rules{})
		if err != nil {
			t.Fatal(err)
		}
		defer tbl.Close()
		slept := 0
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error)
		go func() {
			done <- Watch(ctx, WatchConfig{
				Clock: WithFaults(NewRuntime(), tbl), Restarted: func(r string) { t.Error(r) }, Slept: func() { slept++ },
			})
		}()
		step := func(d time.Duration, want int) {
			t.Helper()
			if err := tbl.Set(fault.Rules{Clocks: []fault.ClockRule{{ID: "step", Step: d, Expires: time.Minute}}}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * tick)
			synctest.Wait()
			if slept != want {
				t.Errorf("told %d times in all after a step of %v, want %d", slept, d, want)
			}
		}
		step(maxSlept, 0)
		step(maxSlept+time.Millisecond, 1)
		step(800*time.Millisecond, 2)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestWatchRefusesAnIncompleteConfig(t *testing.T) {
	if err := Watch(context.Background(), WatchConfig{}); err == nil {
		t.Error("ran without a clock")
	}
}

func TestFaultedClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tbl, err := fault.NewTable(fault.Rules{})
		if err != nil {
			t.Fatal(err)
		}
		defer tbl.Close()
		base := &Manual{}
		c := WithFaults(base, tbl)
		set := func(r fault.ClockRule) {
			t.Helper()
			r.ID, r.Expires = "r", time.Hour
			if err := tbl.Set(fault.Rules{Clocks: []fault.ClockRule{r}}); err != nil {
				t.Fatal(err)
			}
		}
		at := c.Now()
		advanced := func(real, want time.Duration) {
			t.Helper()
			base.Advance(real)
			now := c.Now()
			if got := now.Sub(at); got != want {
				t.Errorf("advanced %v, not %v", got, want)
			}
			at = now
		}
		advanced(time.Second, time.Second)
		set(fault.ClockRule{Step: 5 * time.Second})
		advanced(time.Second, 6*time.Second)
		advanced(time.Second, time.Second) // a step is taken once
		set(fault.ClockRule{Rate: 0.5})
		advanced(0, 0)
		advanced(2*time.Second, 3*time.Second)
		set(fault.ClockRule{Rate: -1})
		advanced(0, 0)
		advanced(time.Second, 0) // stopped
		set(fault.ClockRule{Step: -2 * time.Second})
		advanced(0, 0)
		advanced(time.Second, 0) // stands instead of going back
		advanced(2*time.Second, time.Second)
		tbl.Clear()
		advanced(time.Second, time.Second) // nothing is undone
	})
}

func TestWithoutATableTheClockIsItself(t *testing.T) {
	base := &Manual{}
	if WithFaults(base, nil) != Clock(base) {
		t.Error("wrapped for nothing")
	}
}
