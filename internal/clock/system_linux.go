package clock

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/headlease/headlease/internal/instant"
)

const (
	// readWithin bounds the time between the two readings of MONOTONIC around
	// BOOTTIME, and with it the error of the suspend part.
	readWithin = 100 * time.Microsecond
	// suspendOver tells a suspend from that error.
	suspendOver = 10 * time.Millisecond
)

// System is the machine's lease clock:
//
//	MONOTONIC_RAW + (BOOTTIME - MONOTONIC)
//
// RAW is not slewed (NTP may slew MONOTONIC beyond the bound ρ on clock rates
// that leases rest on), and the difference is the time spent suspended.
type System struct {
	read func(clockID int32) (time.Duration, error)

	mu        sync.Mutex
	suspended time.Duration

	last atomic.Int64
}

var _ Clock = (*System)(nil)

// NewSystem reads every clock once; it fails on a machine that lacks one.
func NewSystem() (*System, error) { return newSystem(gettime) }

func newSystem(read func(int32) (time.Duration, error)) (*System, error) {
	for name, id := range map[string]int32{
		"CLOCK_MONOTONIC_RAW": unix.CLOCK_MONOTONIC_RAW,
		"CLOCK_MONOTONIC":     unix.CLOCK_MONOTONIC,
		"CLOCK_BOOTTIME":      unix.CLOCK_BOOTTIME,
	} {
		if _, err := read(id); err != nil {
			return nil, fmt.Errorf("lease clock: read %s: %w; this machine cannot run a process of the cluster", name, err)
		}
	}
	s := &System{read: read}
	s.suspended = s.readSuspended()
	return s, nil
}

// Now is Clock.
func (s *System) Now() instant.Instant {
	// RAW first: a freeze between the two readings then makes the instant older,
	// and what is counted from it ends sooner.
	raw := s.must(unix.CLOCK_MONOTONIC_RAW)
	now := int64(raw + s.suspend())
	for {
		last := s.last.Load()
		if now <= last {
			return instant.Instant(last) // never back
		}
		if s.last.CompareAndSwap(last, now) {
			return instant.Instant(now)
		}
	}
}

// suspend is the time suspended, kept as it was unless it grew by more than
// the error of reading it.
func (s *System) suspend() time.Duration {
	d := s.readSuspended()
	s.mu.Lock()
	defer s.mu.Unlock()
	if d > s.suspended+suspendOver {
		s.suspended = d
	}
	return s.suspended
}

// readSuspended repeats until nothing came between its readings.
func (s *System) readSuspended() time.Duration {
	for {
		before := s.must(unix.CLOCK_MONOTONIC)
		boot := s.must(unix.CLOCK_BOOTTIME)
		after := s.must(unix.CLOCK_MONOTONIC)
		if after-before < readWithin {
			return boot - before
		}
	}
}

// must panics where NewSystem has shown that reading cannot fail: without a
// clock nothing may be granted or believed.
func (s *System) must(id int32) time.Duration {
	d, err := s.read(id)
	if err != nil {
		panic(fmt.Sprintf("lease clock: read clock %d: %v", id, err))
	}
	return d
}

// started, at monotonicStart, makes MONOTONIC readable through time.Since, which
// asks the kernel's page in this process (vDSO): of the four readings of Now only
// two are system calls, which most of the cost was. Between a suspend and the next
// both stand still alike, and the base's error is that of one reading, far below
// suspendOver.
var started, monotonicStart = func() (time.Time, time.Duration) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return time.Time{}, 0 // then it is asked each time, and fails there
	}
	return time.Now(), time.Duration(ts.Nano())
}()

func gettime(id int32) (time.Duration, error) {
	if id == unix.CLOCK_MONOTONIC && !started.IsZero() {
		return monotonicStart + time.Since(started), nil
	}
	var ts unix.Timespec
	// Raw: this call never blocks, so the scheduler need not hear of it.
	if _, _, errno := unix.RawSyscall(unix.SYS_CLOCK_GETTIME, uintptr(id), uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		return 0, errno
	}
	return time.Duration(ts.Nano()), nil
}
