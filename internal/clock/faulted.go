package clock

import (
	"sync"
	"time"

	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/instant"
)

// Faulted is a clock that does what the clock rules of a fault table say. A
// step is taken once, at the first reading under its rule; a rate holds from
// the first reading under its rule to the first one after it (the watch reads
// every 100 ms). What was gained or lost stays.
type Faulted struct {
	base  Clock
	table *fault.Table

	mu    sync.Mutex
	begun bool
	read  instant.Instant // base, at the last reading
	at    float64         // this clock's advance over base, in ns
	last  instant.Instant
	rate  float64
	taken map[uint64]bool
}

var _ Clock = (*Faulted)(nil)

// WithFaults puts a table before a clock. With a nil table it returns base.
func WithFaults(base Clock, table *fault.Table) Clock {
	if table == nil {
		return base
	}
	return &Faulted{base: base, table: table, taken: map[uint64]bool{}}
}

// Now is Clock. It never goes back: a step back, or a rate of -1, makes it
// stand.
func (f *Faulted) Now() instant.Instant {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.base.Now()
	if f.begun {
		f.at += float64(now.Sub(f.read)) * f.rate
	}
	f.begun, f.read = true, now
	steps, rate := f.table.Clock()
	f.rate = rate
	for seq, step := range steps {
		if !f.taken[seq] {
			f.taken[seq] = true
			f.at += float64(step)
		}
	}
	f.last = instant.Max(f.last, now.Add(time.Duration(f.at)))
	return f.last
}

// WallWithFaults puts a table before the machine's wall clock, for Watch.
func WallWithFaults(table *fault.Table) func() time.Time {
	return func() time.Time { return time.Now().Add(table.WallStep()) }
}
