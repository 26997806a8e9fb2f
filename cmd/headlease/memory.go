package main

import (
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// A region server that has little to do lets its heap grow by half between
// collections, and one that is busy as the runtime does, by as much again
// (docs/decisions/0171). GOGC overrides both.
const (
	calmPercent, busyPercent = 50, 100
	// lookEvery is how often the load is looked at.
	lookEvery = time.Second
	// calmGap is the time between two collections of a calm server, at the least.
	calmGap = 2 * time.Second
	// calmAfter is how many looks in a row must find little to do.
	calmAfter = 5
)

// tuner decides how far the heap may grow.
type tuner struct {
	allocated uint64 // up to the last look
	quiet     int    // looks in a row that found little to do
}

// look takes what was ever allocated and what the last collection left, in
// bytes, a look after the one before.
func (t *tuner) look(allocated, live uint64) (percent int) {
	rate := float64(allocated-t.allocated) / lookEvery.Seconds()
	t.allocated = allocated
	if rate*calmGap.Seconds() > float64(live)*calmPercent/100 {
		t.quiet = 0
	} else {
		t.quiet = min(t.quiet+1, calmAfter)
	}
	if t.quiet < calmAfter {
		return busyPercent
	}
	return calmPercent
}

// followLoad sets how far the heap may grow until stop is called.
func followLoad() (stop func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		ticker := time.NewTicker(lookEvery)
		defer ticker.Stop()
		samples := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}, {Name: "/gc/heap/live:bytes"}}
		var t tuner
		for set := busyPercent; ; {
			select {
			case <-done:
				return
			case <-ticker.C:
			}
			metrics.Read(samples)
			if p := t.look(samples[0].Value.Uint64(), samples[1].Value.Uint64()); p != set { // setting it stops the world
				debug.SetGCPercent(p)
				set = p
			}
		}
	}()
	return func() { close(done); <-ended }
}
