package client_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
)

// logged makes a client write its log there.
func logged(log *lines) option {
	return func(cfg *client.Config) { cfg.Logger = slog.New(slog.NewTextHandler(log, nil)) }
}

// settle elects a leader and waits until all servers follow it: a stream that is
// opened meanwhile may end, and the client goes to the next server.
func (w *world) settle(leader int) {
	w.eu.Elect(leader)
	time.Sleep(time.Second) // virtual
}

// try acquires lock after lock, each within a time of its own, until one is
// granted, and returns how long that took.
func (w *world) try(c *client.Client, name string, within func(n int) time.Duration) time.Duration {
	w.Helper()
	began := time.Now()
	for n := range 1000 {
		ctx, cancel := context.WithTimeout(w.Context(), within(n))
		l, err := c.Acquire(ctx, fmt.Sprintf("lock/%s-%d", name, n))
		cancel()
		if err == nil {
			d := time.Since(began)
			w.release(l)
			return d
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			w.Fatalf("try %d: %v", n, err)
		}
	}
	w.Fatalf("nothing granted in %v", time.Since(began))
	return 0
}

// A frozen server is left by those that want something of it long before the
// session's keepalives tell: also by calls none of which waits long enough.
func TestAFrozenServerIsLeftBySilentCalls(t *testing.T) {
	const ms = time.Millisecond
	for name, within := range map[string]func(n int) time.Duration{
		"long":  func(int) time.Duration { return time.Minute },
		"short": func(n int) time.Duration { return time.Duration(20+n%5*10) * ms },
		"mixed": func(n int) time.Duration { return time.Duration(40+n*90%360) * ms },
	} {
		for _, leader := range []int{0, 1} {
			inWorld(t, func(w *world) {
				var log lines
				w.settle(leader)
				c := w.client("a", logged(&log), func(cfg *client.Config) { cfg.TTL = 30 * time.Second })
				l := w.acquire(c, "lock/held")
				w.valid(l, 5*time.Second)
				w.eu.Server(0).Freeze()
				if leader == 0 {
					w.eu.Elect(1)
				}
				if d := w.try(c, name, within); d < 300*ms || d > 400*ms {
					t.Errorf("%s calls, leader %d: granted after %v, want 350 ms", name, leader, d)
				}
				w.valid(l, 100*ms)
				// The stream goes where the calls are answered.
				if s := log.String(); strings.Count(s, "server hangs; leaving it for another") != 1 {
					t.Errorf("%s calls, leader %d: the stream stays:\n%s", name, leader, s)
				}
				w.valid(l, time.Minute)
			})
		}
	}
}

// Calls may go to another server than the stream, since one failed at the
// stream's: a frozen one is passed over there, too, its connection is closed, and
// the stream stays.
func TestAFrozenServerThatHasCallsAloneIsPassedOver(t *testing.T) {
	const ms = time.Millisecond
	inWorld(t, func(w *world) {
		var log lines
		c := w.client("a", logged(&log))
		l := w.acquire(c, "lock/held")
		w.valid(l, time.Second)
		c.MoveCalls("eu")
		w.release(w.acquire(c, "lock/x"))
		w.eu.Server(1).Freeze()
		if d := w.try(c, "y", func(int) time.Duration { return 50 * ms }); d > 400*ms {
			t.Errorf("granted after %v", d)
		}
		w.valid(l, 2*ttl)
		s := log.String()
		if strings.Count(s, "\n") != 1 || !strings.Contains(s, "others are asked") || !strings.Contains(s, "server=eu-2") {
			t.Errorf("want eu-2 passed over, and nothing else:\n%s", s)
		}
		if got := c.Connected("eu"); !slices.Equal(got, []string{"eu-1", "eu-3"}) {
			t.Errorf("connections to %q, want none to the frozen one", got)
		}
	})
}

// A region without a leader answers no call, at whatever server. One that says
// that it lives is neither passed over nor left: all clients would come to the
// next one at once.
func TestASlowLeaderMovesNobody(t *testing.T) {
	const ms = time.Millisecond
	inWorld(t, func(w *world) {
		var log lines
		w.settle(1)
		c := w.client("a", logged(&log))
		l := w.acquire(c, "lock/held")
		w.valid(l, ttl)
		w.eu.Server(1).Freeze() // a follower forwards to it what it gets
		done := make(chan time.Duration, 1)
		go func() { done <- w.try(c, "x", func(n int) time.Duration { return time.Duration(40+n*90%360) * ms }) }()
		w.valid(l, 1200*ms)
		w.eu.Server(1).Thaw()
		w.valid(l, 2*ttl)
		if d := <-done; d < 1200*ms || d > 1700*ms {
			t.Errorf("granted after %v", d)
		}
		if s := log.String(); s != "" {
			t.Errorf("moved:\n%s", s)
		}
	})
}

// A server that lives but takes its time, as all of a busy machine: calls go to
// another one in vain, once, and the next time it is given longer. The stream
// stays where it is.
func TestAServerThatAnswersLateKeepsTheStream(t *testing.T) {
	const ms = time.Millisecond
	inWorld(t, func(w *world) {
		var log lines
		c := w.client("a", logged(&log), func(cfg *client.Config) { cfg.TTL = 30 * time.Second })
		l := w.acquire(c, "lock/held")
		w.valid(l, 5*time.Second)
		for range 5 {
			w.Delay(func() time.Duration { return 200 * ms })
			w.release(w.acquire(c, "lock/x"))
			w.Delay(nil)
			w.release(w.acquire(c, "lock/y"))
			w.valid(l, time.Second)
		}
		s := log.String()
		if n := strings.Count(s, "others are asked"); n > 1 {
			t.Errorf("passed over %d times:\n%s", n, s)
		}
		if strings.Contains(s, "leaving it") {
			t.Errorf("the stream has moved:\n%s", s)
		}
	})
}

// A call that the client's server has passed on to a leader that froze goes on
// there when another one leads, and not to the next server, which is the frozen one.
func TestACallGoesOnWhereTheNewLeaderIsKnown(t *testing.T) {
	inWorld(t, func(w *world) {
		w.settle(0)
		c := w.client("a", func(cfg *client.Config) {
			s := cfg.Regions[0].Servers
			cfg.Regions[0].Servers = []client.Server{s[1], s[0], s[2]}
		})
		w.release(w.acquire(c, "lock/before"))
		w.eu.Server(0).Freeze()
		got := make(chan error, 1)
		go func() {
			_, err := c.Acquire(w.Context(), "lock/after")
			got <- err
		}()
		time.Sleep(200 * time.Millisecond) // virtual
		w.eu.Elect(2)
		elected := time.Now()
		if err := <-got; err != nil || time.Since(elected) > 50*time.Millisecond {
			t.Errorf("granted %v after another server leads: %v", time.Since(elected), err)
		}
	})
}
