package clock

import (
	"errors"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headlease/headlease/internal/instant"
)

// machine is a set of clocks that a test moves.
type machine struct {
	raw, mono, boot time.Duration
	// onRead is called with the clock's id before each reading.
	onRead func(id int32)
}

func (m *machine) read(id int32) (time.Duration, error) {
	if m.onRead != nil {
		m.onRead(id)
	}
	switch id {
	case unix.CLOCK_MONOTONIC_RAW:
		return m.raw, nil
	case unix.CLOCK_MONOTONIC:
		return m.mono, nil
	case unix.CLOCK_BOOTTIME:
		return m.boot, nil
	}
	return 0, errors.New("unknown clock")
}

func (m *machine) run(d time.Duration) { m.raw += d; m.mono += d; m.boot += d }

func boot(t *testing.T) (*machine, *System) {
	t.Helper()
	m := &machine{raw: time.Hour, mono: time.Hour, boot: 2 * time.Hour}
	s, err := newSystem(m.read)
	if err != nil {
		t.Fatal(err)
	}
	return m, s
}

func TestSystemCountsSuspends(t *testing.T) {
	m, s := boot(t)
	before := s.Now()
	m.run(time.Second)
	m.boot += time.Minute // suspended
	if got := s.Now().Sub(before); got != time.Minute+time.Second {
		t.Errorf("advanced %v", got)
	}
}

func TestSystemIsNotSlewed(t *testing.T) {
	m, s := boot(t)
	before := s.Now()
	m.raw += time.Second // MONOTONIC and BOOTTIME run 5 % slow under NTP
	m.mono += 950 * time.Millisecond
	m.boot += 950 * time.Millisecond
	if got := s.Now().Sub(before); got != time.Second {
		t.Errorf("advanced %v", got)
	}
}

func TestSystemTakesOnlyALargeChangeForASuspend(t *testing.T) {
	m, s := boot(t)
	before := s.Now()
	m.boot += 10 * time.Millisecond
	if got := s.Now().Sub(before); got != 0 {
		t.Errorf("a reading error of 10 ms moved the clock by %v", got)
	}
	m.boot += time.Nanosecond
	if got := s.Now().Sub(before); got != 10*time.Millisecond+1 {
		t.Errorf("advanced %v", got)
	}
}

func TestSystemReadsTheSuspendPartUndisturbed(t *testing.T) {
	m, s := boot(t)
	before := s.Now()
	// Preempted for 20 ms between MONOTONIC and BOOTTIME, twice.
	disturbed := 0
	m.onRead = func(id int32) {
		if id == unix.CLOCK_BOOTTIME && disturbed < 2 {
			disturbed++
			m.run(20 * time.Millisecond)
		}
	}
	got := s.Now().Sub(before)
	if disturbed != 2 || got != 0 {
		t.Errorf("disturbed %d times, advanced %v: the freeze was taken for a suspend", disturbed, got)
	}
}

func TestSystemReadsRawFirst(t *testing.T) {
	m, s := boot(t)
	before := s.Now()
	var order []int32
	m.onRead = func(id int32) {
		order = append(order, id)
		if len(order) == 2 {
			m.run(time.Hour) // frozen after the first reading
		}
	}
	if got := s.Now().Sub(before); order[0] != unix.CLOCK_MONOTONIC_RAW || got != 0 {
		t.Errorf("read %v, advanced %v: a freeze made the instant younger", order, got)
	}
}

func TestSystemNeverGoesBack(t *testing.T) {
	m, s := boot(t)
	m.boot += time.Minute
	before := s.Now()
	m.boot -= time.Minute
	m.raw -= time.Second
	if got := s.Now(); got != before {
		t.Errorf("went from %d to %d", before, got)
	}
}

func TestSystemIsMonotonicConcurrently(t *testing.T) {
	s, err := NewSystem()
	if err != nil {
		t.Fatal(err)
	}
	var newest struct {
		sync.Mutex
		at instant.Instant
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 2000 {
				newest.Lock()
				floor := newest.at
				newest.Unlock()
				now := s.Now()
				if now.Before(floor) {
					t.Errorf("read %d after %d was read", now, floor)
				}
				newest.Lock()
				newest.at = instant.Max(newest.at, now)
				newest.Unlock()
			}
		})
	}
	wg.Wait()
}

func TestSystemNeedsItsClocks(t *testing.T) {
	if _, err := newSystem(func(int32) (time.Duration, error) { return 0, unix.EINVAL }); !errors.Is(err, unix.EINVAL) {
		t.Error(err)
	}
}

// The runtime's reading of MONOTONIC, through the vDSO, is the system call's.
func TestMonotonicIsTheKernels(t *testing.T) {
	const id = unix.CLOCK_MONOTONIC
	for range 100 {
		var before, after unix.Timespec
		if err := unix.ClockGettime(id, &before); err != nil {
			t.Fatal(err)
		}
		got, err := gettime(id)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.ClockGettime(id, &after); err != nil {
			t.Fatal(err)
		}
		// The base was read a moment before the runtime's.
		const base = suspendOver / 2
		if got < time.Duration(before.Nano())-base || got > time.Duration(after.Nano())+base {
			t.Fatalf("read %v, between the kernel's %v and %v", got, time.Duration(before.Nano()), time.Duration(after.Nano()))
		}
	}
}

func BenchmarkNow(b *testing.B) {
	s, err := NewSystem()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		s.Now()
	}
}
