// Package clock is the lease clock: the one place that turns the machine's
// time into instants.
package clock

import "github.com/headlease/headlease/internal/instant"

// Clock tells the current instant. Implementations never go back and are safe
// for concurrent use. A holder must read the clock again before each act that
// rests on a lease: timers count neither suspends nor freezes.
type Clock interface {
	Now() instant.Instant
}
