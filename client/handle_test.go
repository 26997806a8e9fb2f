package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
)

func TestALeftSessionLivesForItsTTLAndItsHandleReleases(t *testing.T) {
	inWorld(t, func(w *world) {
		first := w.acquire(w.client("first"), "lock/x")
		c := w.client("a")
		// Handed over from the queue: it must be confirmed before it is left.
		q := w.queue(c, "lock/x", w.Context())
		w.release(first)
		r := <-q
		if r.err != nil {
			t.Fatal(r.err)
		}
		l := r.lease
		if err := c.Leave(w.Context()); err != nil {
			t.Fatal(err)
		}
		left := time.Now()
		if cause := context.Cause(l.Context()); !errors.Is(cause, client.ErrLeft) || l.Valid() {
			t.Error("the client believes in a lease that it has left")
		}
		h := l.Handle()
		// The last keepalive's ack may wait TTL/200 for others.
		if d := h.Expires.Sub(left); d < ttl-10*time.Millisecond-ttl/200 || d > ttl {
			t.Errorf("expires in %v", d)
		}
		raw, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		var again client.Handle
		if err := json.Unmarshal(raw, &again); err != nil || again.Validate() != nil {
			t.Fatalf("%s: %v, %v", raw, err, again.Validate())
		}
		time.Sleep(ttl - 100*time.Millisecond) // virtual
		if w.holder("lock/x") != "client/a" {
			t.Fatalf("%q holds it before the TTL was over", w.holder("lock/x"))
		}
		cfg := client.Config{Cluster: "test", Regions: w.Regions(), Links: w.Links("b")}
		if err := client.ReleaseHandle(w.Context(), cfg, again); err != nil {
			t.Fatal(err)
		}
		if w.holder("lock/x") != "" {
			t.Error("held after its release")
		}
		if err := client.ReleaseHandle(w.Context(), cfg, again); !errors.Is(err, client.ErrNotHolder) {
			t.Errorf("a second release: %v", err)
		}
		time.Sleep(ttl) // virtual
		if err := client.ReleaseHandle(w.Context(), cfg, again); !errors.Is(err, client.ErrSessionExpired) {
			t.Errorf("after the session: %v", err)
		}
		cfg.Cluster = "other"
		if err := client.ReleaseHandle(w.Context(), cfg, again); err == nil || !strings.Contains(err.Error(), `of cluster "test" and this is "other"`) {
			t.Errorf("another cluster's: %v", err)
		}
		cfg.Cluster, again.Region = "test", "us"
		if err := client.ReleaseHandle(w.Context(), cfg, again); err == nil || !strings.Contains(err.Error(), `region "us" is not configured`) {
			t.Errorf("another region's: %v", err)
		}
	})
}

func TestReleaseIsIdempotent(t *testing.T) {
	inWorld(t, func(w *world) {
		c := w.client("a")
		l := w.acquire(c, "lock/x")
		w.release(l)
		w.release(l)
		next := w.acquire(w.client("b"), "lock/x")
		w.release(l) // must not touch the next one's
		w.valid(next, ttl)
		// While the region has no leader it is told on in the background.
		w.eu.Depose()
		released := make(chan error, 1)
		go func() { released <- next.Release(w.Context()) }()
		time.Sleep(time.Second) // virtual
		if next.Valid() {
			t.Error("valid while it is being released")
		}
		w.eu.Elect(1)
		if err := <-released; err != nil {
			t.Error(err)
		}
		if w.holder("lock/x") != "" {
			t.Error("held after its release")
		}
	})
}

func TestConfigFaultsAreReportedAtOnce(t *testing.T) {
	_, err := client.New(client.Config{
		Regions: []client.Region{{Name: "eu"}}, Home: "us", TTL: time.Hour,
	})
	for _, want := range []string{`"eu" has no servers`, `home: region "us"`, "links: missing", "ttl: 1h0m0s is out of range"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
}
