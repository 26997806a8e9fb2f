package client_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/regiontest"
)

// TestTrafficOfIdleSessions: what clients and servers write to keep many sessions
// alive, of which each costs a system call and a TLS record at either end. It
// depends on the connections, not on their sessions.
func TestTrafficOfIdleSessions(t *testing.T) {
	// Four gangs each 3.1 s, their acks, and no pushes beside them: 1.3, 1.3 and 2.1. How many
	// frames go in one write is the scheduler's to say; with what was there before it was 3.8, 5.1 and 8.2.
	idle(t, 60, traffic{2, 2, 3.2, 1.3})
}

// One keepalive each 3.1 s, its ack, and a push or two in between.
func TestTrafficOfALoneSession(t *testing.T) {
	idle(t, 1, traffic{0.35, 1, 2.2, 0.4})
}

// traffic a second and client, at most: writes by a client to its server, by a
// server to a client and between servers, and leadership checks.
type traffic struct{ up, down, between, checks float64 }

func idle(t *testing.T, sessions int, most traffic) {
	const clients, seconds = 12, 40
	inWorld(t, func(w *world) {
		for i := range clients {
			c := w.client(name(i), func(cfg *client.Config) {
				cfg.TTL = 10 * time.Second
				at := i % 3 // each server has a third of them
				servers := cfg.Regions[0].Servers
				cfg.Regions[0].Servers = append(servers[at:len(servers):len(servers)], servers[:at]...)
			})
			for j := range sessions {
				s, err := c.NewSession(client.SessionOptions{TTL: 10 * time.Second})
				if err != nil {
					t.Fatal(err)
				}
				if _, err := s.Acquire(w.Context(), fmt.Sprintf("lock/%d-%d", i, j)); err != nil {
					t.Fatal(err)
				}
			}
		}
		time.Sleep(20 * time.Second) // virtual
		look := func() (out [3]regiontest.Traffic, checks int) {
			return [3]regiontest.Traffic{w.Written(false, true), w.Written(true, false), w.Written(true, true)}, w.eu.Checks()
		}
		before, checked := look()
		time.Sleep(seconds * time.Second) // virtual
		after, checks := look()
		perConn := func(i int) (writes, bytes float64) {
			return float64(after[i].Writes-before[i].Writes) / clients / seconds, float64(after[i].Bytes-before[i].Bytes) / clients / seconds
		}
		for i, x := range []struct {
			what string
			most float64
		}{
			{"by a client to its server", most.up},
			{"by a server to a client", most.down},
			{"between servers, for a client", most.between},
		} {
			writes, bytes := perConn(i)
			t.Logf("%s: %.2f writes/s, %.0f B/s", x.what, writes, bytes)
			if writes > x.most {
				t.Errorf("%s: %.2f writes/s, at most %.2f are needed", x.what, writes, x.most)
			}
		}
		n := float64(checks-checked) / clients / seconds
		t.Logf("%.2f checks/s a client", n)
		if n > most.checks {
			t.Errorf("%.2f leadership checks/s a client", n)
		}
	})
}
