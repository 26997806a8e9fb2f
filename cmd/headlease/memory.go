package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"github.com/headlease/headlease/internal/wake"
)

// A region server that has little to do lets its heap grow by half between
// collections (docs/decisions/0171). One that is busy lets it grow as the runtime
// does, by as much again, or by what it allocates in busyGap if that is more, up
// to busyGrowth (0178). GOGC overrides all of it.
const (
	calmPercent, busyPercent = 50, 100
	// lookEvery is how often the load is looked at.
	lookEvery = time.Second
	// calmGap is the time between two collections of a calm server, at the least.
	calmGap = 2 * time.Second
	// calmAfter is how many looks in a row must find little to do.
	calmAfter = 5
	// busyGap is the time between two collections that a busy server is after.
	busyGap = time.Second
	// busyGrowth is how many bytes the heap may grow for that.
	busyGrowth = 64 << 20
)

// heap is what the runtime says, in bytes.
type heap struct {
	allocated uint64 // ever
	live      uint64 // what the last collection left
	roots     uint64 // stacks and globals: the runtime counts them as if live
}

// tuner decides how far the heap may grow.
type tuner struct {
	allocated uint64  // up to the last look
	rate      float64 // of the time before it, in bytes a second
	quiet     int     // looks in a row that found little to do
}

// look takes what the runtime says, a look after the one before.
func (t *tuner) look(h heap) (percent int) {
	t.rate = float64(h.allocated-t.allocated) / lookEvery.Seconds()
	t.allocated = h.allocated
	if t.rate*calmGap.Seconds() > float64(h.live)*calmPercent/100 {
		t.quiet = 0
	} else {
		t.quiet = min(t.quiet+1, calmAfter)
	}
	return t.percent(h)
}

// percent is for a heap of another size under the load of the last look.
func (t *tuner) percent(h heap) int {
	if t.quiet == calmAfter {
		return calmPercent
	}
	growth := min(t.rate*busyGap.Seconds(), busyGrowth)
	return max(busyPercent, int(100*growth/float64(max(h.live+h.roots, minLive))))
}

// minLive bounds the percentage, and the runtime's own least heap, which it
// multiplies by that.
const minLive = 4 << 20

// sentinel calls collected after each collection, until stopped is closed.
func sentinel(stopped <-chan struct{}, collected func()) {
	runtime.AddCleanup(new(*int), func(struct{}) {
		select {
		case <-stopped:
		default:
			collected()
			sentinel(stopped, collected)
		}
	}, struct{}{})
}

// followLoad sets how far the heap may grow until stop is called.
func followLoad() (stop func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	done, ended, collected := make(chan struct{}), make(chan struct{}), make(chan struct{}, 1)
	// A percentage for a small heap would let one that has grown run away: it is
	// computed anew after each collection.
	sentinel(done, func() { wake.Up(collected) })
	go func() {
		defer close(ended)
		ticker := time.NewTicker(lookEvery)
		defer ticker.Stop()
		samples := []metrics.Sample{
			{Name: "/gc/heap/allocs:bytes"}, {Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/stack:bytes"}, {Name: "/gc/scan/globals:bytes"},
		}
		read := func() heap {
			metrics.Read(samples)
			return heap{samples[0].Value.Uint64(), samples[1].Value.Uint64(), samples[2].Value.Uint64() + samples[3].Value.Uint64()}
		}
		var t tuner
		for set := busyPercent; ; {
			var p int
			select {
			case <-done:
				return
			case <-ticker.C:
				p = t.look(read())
			case <-collected:
				p = t.percent(read())
			}
			if worthSetting(set, p) {
				debug.SetGCPercent(p)
				set = p
			}
		}
	}()
	return func() { close(done); <-ended }
}

// worthSetting reports whether a percentage is far enough from the one that is
// set: setting it stops the world.
func worthSetting(set, p int) bool {
	return p != set && (p <= busyPercent || p > set+set/4 || p < set-set/8)
}
