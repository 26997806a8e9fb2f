package client_test

import (
	"testing"
	"time"

	"github.com/headlease/headlease/client"
)

// A short lock that was waited for costs its client no keepalive, wherever in its
// session's time it comes; one that is kept is confirmed soon, by one.
func TestAShortLockIsNotConfirmed(t *testing.T) {
	inWorld(t, func(w *world) {
		holder := w.session(w.client("a"), client.SessionOptions{})
		links := &countingLinks{Links: w.Links("b")}
		s := w.session(w.client("b", func(cfg *client.Config) { cfg.Links = links }), client.SessionOptions{TTL: time.Minute})
		w.take(s, "lock/other")
		// The next one that the session needs anyway comes 18.75 s after the last.
		for n := links.keepalives.Load(); links.keepalives.Load() == n; {
			time.Sleep(100 * time.Millisecond) // virtual
		}
		for i := range 20 {
			l := w.take(holder, "lock/x")
			got := make(chan *client.Lease, 1)
			go func() {
				l, err := s.Acquire(w.Context(), "lock/x", client.Wait())
				if err != nil {
					t.Error(err)
				}
				got <- l
			}()
			time.Sleep(200 * time.Millisecond) // virtual
			before := links.keepalives.Load()
			if err := l.Release(w.Context()); err != nil {
				t.Fatal(err)
			}
			mine := <-got
			want := int64(i % 2)
			if want == 0 {
				time.Sleep(20 * time.Millisecond) // virtual
			} else {
				time.Sleep(200 * time.Millisecond) // virtual
			}
			if n := links.keepalives.Load() - before; n != want {
				t.Errorf("%d. lock: %d keepalives while it was held, want %d", i, n, want)
			}
			if err := mine.Release(w.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond) // virtual
			if n := links.keepalives.Load() - before; n != want {
				t.Errorf("%d. lock: %d keepalives in all, want %d", i, n, want)
			}
		}
	})
}
