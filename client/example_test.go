package client_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/connect"
	"github.com/headlease/headlease/fence"
)

// The functions below are the examples of docs/client.md. They run against a
// region in memory.

func exampleConnect(ctx context.Context, work func(context.Context, *client.Client) error) (err error) {
	c, err := connect.Open(connect.Options{
		File: "/etc/headlease/cluster.yaml", Certs: "/etc/headlease/certs", Name: "worker",
		Client: client.Config{Home: "eu-frankfurt"}, // the region that is asked first
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close(context.WithoutCancel(ctx))) }()
	return work(ctx, c)
}

func exampleLock(ctx context.Context, c *client.Client, report func(context.Context, fence.Token) error) error {
	lease, err := c.Acquire(ctx, "lock/nightly-report", client.WaitAtMost(30*time.Second))
	if errors.Is(err, client.ErrWaitEnded) {
		return nil // somebody else is at it
	}
	if err != nil {
		return err
	}
	defer func() { _ = lease.Release(context.WithoutCancel(ctx)) }()
	// The context ends when the lease can be kept no longer; the token goes with
	// every write.
	return report(lease.Context(), lease.Token())
}

func exampleValue(ctx context.Context, c *client.Client, address string) (*client.Lease, error) {
	lease, err := c.Acquire(ctx, "shard/68", client.Wait(),
		client.WithValue([]byte(address)),    // others read it with Get or Watch
		client.WithLockDelay(10*time.Second)) // after a loss nobody has it for so long
	if err != nil {
		return nil, err
	}
	_, err = lease.SetValue(ctx, []byte(address+" ready"))
	return lease, err
}

func exampleSemaphore(ctx context.Context, c *client.Client, build func(context.Context) error) error {
	slot, err := c.AcquireSlot(ctx, "lock/build", 4, client.Wait())
	if err != nil {
		return err
	}
	defer func() { _ = slot.Release(context.WithoutCancel(ctx)) }()
	return build(slot.Context()) // slot.Resource() is lock/build#0 to lock/build#3
}

func exampleElection(ctx context.Context, c *client.Client, address string, schedule func(context.Context, fence.Token)) error {
	election := c.Election("lock/scheduler")
	for ctx.Err() == nil {
		leadership, err := election.Campaign(ctx, []byte(address))
		if err != nil {
			return err
		}
		schedule(leadership.Context(), leadership.Token()) // until the lead is lost
		if err := election.Resign(ctx); err != nil {
			return err
		}
	}
	return nil
}

func exampleObserve(ctx context.Context, c *client.Client, use func(address string)) error {
	for leader, err := range c.Election("lock/scheduler").Observe(ctx) {
		if err != nil {
			return err
		}
		if leader.Token != 0 { // 0: nobody leads
			use(string(leader.Value))
		}
	}
	return nil
}

func exampleWatch(ctx context.Context, c *client.Client, show func(*client.WatchView)) error {
	var view client.WatchView
	for event, err := range c.WatchPrefix(ctx, "lock/") {
		if err != nil {
			return err
		}
		view.Apply(event)
		if view.Complete() {
			show(&view)
		}
	}
	return nil
}

func exampleSessions(ctx context.Context, c *client.Client, tenants []string) ([]*client.Session, error) {
	var sessions []*client.Session
	for _, tenant := range tenants {
		s, err := c.NewSession(client.SessionOptions{Labels: map[string]string{"tenant": tenant}})
		if err != nil {
			return nil, err
		}
		sessions = append(sessions, s)
		if _, err := s.Acquire(ctx, "lock/tenant/"+tenant); err != nil {
			return nil, err
		}
	}
	return sessions, nil
}

func TestTheExamplesRun(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.client("a"), w.client("b")
		ran := 0
		if err := exampleLock(w.Context(), a, func(ctx context.Context, token fence.Token) error {
			ran++
			if token == 0 || ctx.Err() != nil {
				t.Error("without a lease")
			}
			return nil
		}); err != nil || ran != 1 {
			t.Errorf("lock: %v, ran %d times", err, ran)
		}
		held := w.acquire(b, "lock/nightly-report")
		if err := exampleLock(w.Context(), a, nil); err != nil {
			t.Errorf("lock that is held: %v", err)
		}
		w.release(held)
		l, err := exampleValue(w.Context(), a, "a:1")
		if err != nil {
			t.Fatal(err)
		}
		if info, err := b.Get(w.Context(), "shard/68"); err != nil || string(info.GetValue()) != "a:1 ready" {
			t.Errorf("value: %v, %v", info, err)
		}
		w.release(l)
		if err := exampleSemaphore(w.Context(), a, func(context.Context) error { ran++; return nil }); err != nil || ran != 2 {
			t.Errorf("semaphore: %v", err)
		}

		ctx, cancel := context.WithCancel(w.Context())
		var used []string
		observed, views := make(chan error), make(chan error)
		go func() {
			observed <- exampleObserve(ctx, b, func(address string) { used = append(used, address) })
		}()
		shown := 0
		go func() { views <- exampleWatch(ctx, b, func(*client.WatchView) { shown++ }) }()
		terms := 0
		if err := exampleElection(ctx, a, "a:1", func(context.Context, fence.Token) {
			if terms++; terms == 2 {
				time.Sleep(time.Second) // virtual
				cancel()
			}
		}); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("election: %v", err)
		}
		if err := errors.Join(<-observed, <-views); err != nil || terms != 2 || shown == 0 || !slices.Contains(used, "a:1") {
			t.Errorf("%v; %d terms, %d views, used %v", err, terms, shown, used)
		}

		sessions, err := exampleSessions(w.Context(), a, []string{"x", "y", "z"})
		if err != nil || len(sessions) != 3 || w.holder("lock/tenant/z") != "client/a" {
			t.Errorf("sessions: %v", err)
		}
	})
}

// Without the files that it names, the first example says how to make them.
func TestTheExampleOfConnecting(t *testing.T) {
	err := exampleConnect(t.Context(), func(context.Context, *client.Client) error { return errors.New("it connected") })
	if err == nil || !strings.Contains(err.Error(), "/etc/headlease/cluster.yaml") {
		t.Error(err)
	}
}

// Each Go block of the page is in this file, so it compiles and runs.
func TestThePagesExamplesAreThese(t *testing.T) {
	page, err := os.ReadFile("../docs/client.md")
	if err != nil {
		t.Fatal(err)
	}
	here, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	lines := func(s string) string {
		var out []string
		for l := range strings.Lines(s) {
			if l = strings.Join(strings.Fields(l), " "); l != "" {
				out = append(out, l)
			}
		}
		return strings.Join(out, "\n")
	}
	blocks := strings.Split(string(page), "```go\n")[1:]
	if len(blocks) < 6 {
		t.Fatalf("%d blocks", len(blocks))
	}
	for _, b := range blocks {
		b, _, _ = strings.Cut(b, "```")
		if !strings.Contains(lines(string(here)), lines(b)) {
			t.Errorf("this block of docs/client.md is not in example_test.go:\n%s", b)
		}
	}
}
