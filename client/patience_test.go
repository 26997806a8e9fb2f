package client_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/regiontest"
)

// However often its client has moved of late, a server that hangs is left before the
// leases end, whatever the TTL.
func TestAHungServerIsLeftInTimeAfterMoves(t *testing.T) {
	for _, ttl := range []time.Duration{2 * time.Second, 6 * time.Second, 10 * time.Second, time.Minute} {
		for moves := range 4 {
			for phase := time.Duration(0); phase < 800*time.Millisecond; phase += 200 * time.Millisecond {
				inWorld(t, func(w *world) {
					w.Delay(func() time.Duration { return time.Millisecond })
					w.eu.Elect(1)
					c := w.client("a", func(cfg *client.Config) { cfg.TTL = ttl })
					l := w.acquire(c, "lock/x")
					time.Sleep(3*time.Second + phase) // virtual
					c.Move("eu", moves)
					w.eu.Server(0).Freeze()
					least := l.Remaining()
					for range 80 {
						time.Sleep(100 * time.Millisecond) // virtual
						least = min(least, l.Remaining())
					}
					if least < 200*time.Millisecond {
						t.Errorf("ttl %v, %d moves, frozen at +%v: only %v were left", ttl, moves, phase, least)
					}
				})
			}
		}
	}
}

// Two servers of five may hang: patience with the second, as its client has just
// moved, does not cost the leases.
func TestTwoHungServersAreLeftInTime(t *testing.T) {
	for phase := time.Duration(0); phase < 800*time.Millisecond; phase += 200 * time.Millisecond {
		synctest.Test(t, func(t *testing.T) {
			w := &world{T: t, Network: regiontest.NewNetwork(t)}
			w.eu = w.Region(regiontest.Config{Name: "eu", Servers: 5})
			w.eu.Own(1)
			w.Delay(func() time.Duration { return time.Millisecond })
			w.eu.Elect(4)
			l := w.acquire(w.client("a"), "lock/x")
			time.Sleep(3*time.Second + phase) // virtual
			w.eu.Server(0).Freeze()
			w.eu.Server(1).Freeze()
			time.Sleep(8 * time.Second) // virtual
			if l.Context().Err() != nil {
				t.Errorf("frozen at +%v: lost, %v", phase, context.Cause(l.Context()))
			}
		})
	}
}
