//go:build !linux

package clock

import (
	"errors"

	"github.com/headlease/headlease/internal/instant"
)

// System is made on Linux only.
type System struct{}

var _ Clock = (*System)(nil)

// NewSystem fails: other systems lack a clock that is neither slewed nor
// stopped by a suspend.
func NewSystem() (*System, error) {
	return nil, errors.New("lease clock: needs Linux (CLOCK_MONOTONIC_RAW and CLOCK_BOOTTIME)")
}

// Now is never reached: no System can be made.
func (*System) Now() instant.Instant { panic("lease clock: needs Linux") }
