package clock

import (
	"sync"
	"time"

	"github.com/headlease/headlease/internal/instant"
)

// Runtime is a clock over Go's own monotonic time, which in a testing/synctest
// bubble is the bubble's time. It is for tests only: outside of a bubble it
// counts no suspend and is slewed.
type Runtime struct{ start time.Time }

var _ Clock = Runtime{}

// NewRuntime starts a clock at instant 1 (0 means never).
func NewRuntime() Runtime { return Runtime{start: time.Now()} }

// Now is Clock.
func (r Runtime) Now() instant.Instant { return instant.Instant(1 + time.Since(r.start)) }

// Manual is a clock for tests that stands still until it is moved. The zero
// value is ready, at instant 1.
type Manual struct {
	mu  sync.Mutex
	add time.Duration
}

var _ Clock = (*Manual)(nil)

// Now is Clock.
func (m *Manual) Now() instant.Instant {
	m.mu.Lock()
	defer m.mu.Unlock()
	return instant.Instant(1 + m.add)
}

// Advance moves the clock by d and returns the new instant; it panics if d is
// negative: no lease clock goes back.
func (m *Manual) Advance(d time.Duration) instant.Instant {
	if d < 0 {
		panic("clock: a manual clock was to go back")
	}
	m.mu.Lock()
	m.add += d
	m.mu.Unlock()
	return m.Now()
}
