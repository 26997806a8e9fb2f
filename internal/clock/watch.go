package clock

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// MaxGap between two readings that should be 100 ms apart: more, and the process
// was frozen or suspended, and what it held in memory about time counts as lost
// [F19].
const MaxGap = time.Second

const (
	tick = 100 * time.Millisecond
	// maxAhead is how far REALTIME may get ahead of the lease clock from one
	// tick to the next: more, and the lease clock stood while the world went on
	// (a paused virtual machine whose host sets the wall clock) [F19].
	maxAhead = 100 * time.Millisecond
	// maxSlept is how far the lease clock may get ahead of Go's timers from one tick
	// to the next: more, and the machine was suspended.
	maxSlept = 20 * time.Millisecond
)

// WatchConfig of Watch.
type WatchConfig struct {
	// Clock is the lease clock.
	Clock Clock
	// Wall reads REALTIME; default the machine's.
	Wall func() time.Time
	// Restarted is called from Watch's goroutine when the clock's past must
	// count as before a restart [F19]; the reason is for the log.
	Restarted func(reason string)
	// Slept is called from there, and before Restarted, when timers that were set by
	// the clock are late, for they count no suspend. nil: nobody's are.
	Slept func()
}

func (c WatchConfig) withDefaults() WatchConfig {
	if c.Wall == nil {
		c.Wall = time.Now
	}
	return c
}

// Validate reports all faults at once.
func (c WatchConfig) Validate() error {
	var errs []error
	if c.Clock == nil {
		errs = append(errs, errors.New("clock watch: clock must be given"))
	}
	if c.Restarted == nil {
		errs = append(errs, errors.New("clock watch: restarted must be given"))
	}
	return errors.Join(errs...)
}

// Watch reads the clocks every 100 ms until ctx ends and tells of every gap. A
// step of the wall clock forward is told too, since it cannot be told from a
// pause; a step back is not.
//
// It tells of a gap after it is over: whoever acts on a lease reads the clock
// before each act all the same.
func Watch(ctx context.Context, c WatchConfig) error {
	c = c.withDefaults()
	if err := c.Validate(); err != nil {
		return err
	}
	t := time.NewTicker(tick)
	defer t.Stop()
	last, wall, timers := c.Clock.Now(), c.Wall().UnixNano(), time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		// The wall is read first: a freeze between the two readings must not
		// hide, and shows in the next tick at the latest.
		nextWall := c.Wall().UnixNano()
		next := c.Clock.Now()
		gap := next.Sub(last)
		ahead := time.Duration(nextWall-wall) - gap
		nextTimers := time.Now()
		slept := gap - nextTimers.Sub(timers)
		last, wall, timers = next, nextWall, nextTimers
		if slept > maxSlept && c.Slept != nil {
			c.Slept()
		}
		switch {
		case gap > MaxGap:
			c.Restarted(fmt.Sprintf("no tick for %v", gap))
		case ahead > maxAhead:
			c.Restarted(fmt.Sprintf("wall clock advanced %v more than the lease clock", ahead))
		}
	}
}
