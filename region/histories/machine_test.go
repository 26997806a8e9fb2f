package histories

import (
	"sync"
	"time"

	"github.com/headlease/headlease/internal/instant"
)

// machineClock is a server's or a client's lease clock: the bubble's time at a
// rate, from an offset. It can be frozen, and stepped.
type machineClock struct {
	began time.Time
	rate  float64

	mu     sync.Mutex
	offset time.Duration
	frozen instant.Instant // 0: it runs
	steps  int
}

func newClock(began time.Time, offset time.Duration, rate float64) *machineClock {
	return &machineClock{began: began, offset: offset, rate: rate}
}

// true is what the clock shows when it is not frozen.
func (c *machineClock) reading() instant.Instant {
	return instant.Instant(1 + c.offset + time.Duration(float64(time.Since(c.began))*c.rate))
}

func (c *machineClock) Now() instant.Instant {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.frozen != 0 {
		return c.frozen
	}
	return c.reading()
}

// wall is REALTIME on the same machine.
func (c *machineClock) wall() time.Time { return c.began.Add(time.Duration(c.Now())) }

func (c *machineClock) freeze(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.frozen = 0
	if on {
		c.frozen = c.reading()
	}
}

func (c *machineClock) step(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.offset += d
	c.steps++
}

// when the clock shows an instant, as time since it began.
func (c *machineClock) when(at int64) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Duration(float64(time.Duration(at)-1-c.offset) / c.rate)
}

// disk makes writes wait.
type disk struct {
	mu     sync.Mutex
	stalls int
	open   chan struct{} // closed when the last stall ends
	waited int           // writes
	waits  int           // writes, now
}

// Before is called before each write.
func (d *disk) Before(string) error {
	for {
		d.mu.Lock()
		stalled, open := d.stalls > 0, d.open
		if stalled {
			d.waited++
			d.waits++
		}
		d.mu.Unlock()
		if !stalled {
			return nil
		}
		<-open
		d.mu.Lock()
		d.waits--
		d.mu.Unlock()
	}
}

func (d *disk) stall(on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case on:
		if d.stalls == 0 {
			d.open = make(chan struct{})
		}
		d.stalls++
	case d.stalls > 0:
		if d.stalls--; d.stalls == 0 {
			close(d.open)
		}
	}
}

// release ends all stalls.
func (d *disk) release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stalls > 0 {
		d.stalls = 0
		close(d.open)
	}
}

func (d *disk) writesThatWait() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.waits
}

func (d *disk) writesThatWaited() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.waited
}
