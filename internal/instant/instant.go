// Package instant is time as the pure packages see it: points on one process's
// own lease clock. Pure code takes instants as arguments and never reads a
// clock; package internal/clock makes them.
package instant

import "time"

// Instant is a point on one lease clock, in nanoseconds from an origin that
// only that clock knows. Instants of different processes, or of one process
// before and after a restart, must not be compared. The zero value means
// "never" where a field says so.
type Instant int64

// Add returns i moved by d.
func (i Instant) Add(d time.Duration) Instant { return i + Instant(d) }

// Sub returns the time from o to i.
func (i Instant) Sub(o Instant) time.Duration { return time.Duration(i - o) }

// Before reports whether i is earlier than o.
func (i Instant) Before(o Instant) bool { return i < o }

// After reports whether i is later than o.
func (i Instant) After(o Instant) bool { return i > o }

// Min returns the earlier of a and b.
func Min(a, b Instant) Instant { return min(a, b) }

// Max returns the later of a and b.
func Max(a, b Instant) Instant { return max(a, b) }
