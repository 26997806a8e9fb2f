package drill

import (
	"context"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/pause"
)

const (
	stallTick = 20 * time.Millisecond
	// stallFloor is the lateness that a busy machine has all the time.
	stallFloor = 60 * time.Millisecond
)

// stalls measures when this process did not run though it was due: what the
// machine did to the drill it did to the cluster beside it. Close it.
type stalls struct {
	cancel context.CancelFunc
	work   sync.WaitGroup

	began    time.Time
	pressure map[string]time.Duration

	mu  sync.Mutex
	all []check.Stall
}

func watchStalls(c clock.Clock) *stalls {
	ctx, cancel := context.WithCancel(context.Background())
	s := &stalls{cancel: cancel, began: time.Now(), pressure: map[string]time.Duration{}}
	for what, path := range pressures {
		if waited, ok := pressure(path); ok {
			s.pressure[what] = waited
		}
	}
	s.work.Go(func() {
		for last := c.Now(); pause.For(ctx, stallTick) == nil; {
			now := c.Now()
			if late := now.Sub(last) - stallTick; late > stallFloor {
				s.mu.Lock()
				if len(s.all) < maxKept {
					s.all = append(s.all, check.Stall{At: last, For: late})
				}
				s.mu.Unlock()
			}
			last = now
		}
	})
	return s
}

func (s *stalls) close() ([]check.Stall, []check.Pressure) {
	s.cancel()
	s.work.Wait()
	var out []check.Pressure
	for _, what := range sortedKeys(s.pressure) {
		if waited, ok := pressure(pressures[what]); ok {
			out = append(out, check.Pressure{For: what, Share: float64(waited-s.pressure[what]) / float64(time.Since(s.began))})
		}
	}
	return s.all, out
}

// pressures are the kernel's accounts of waiting, where it keeps them.
var pressures = map[string]string{"a processor": "/proc/pressure/cpu", "the disk": "/proc/pressure/io"}

// pressure reads for how long in all something has waited.
func pressure(path string) (time.Duration, bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	return parsePressure(string(text))
}

// parsePressure finds the total of the line "some": in microseconds.
func parsePressure(text string) (time.Duration, bool) {
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(line, "some ")
		if !ok {
			continue
		}
		for _, field := range strings.Fields(rest) {
			if total, ok := strings.CutPrefix(field, "total="); ok {
				n, err := strconv.ParseInt(total, 10, 64)
				return time.Duration(n) * time.Microsecond, err == nil
			}
		}
	}
	return 0, false
}
