package state

import (
	"fmt"
	"slices"
	"sync"
	"testing"
)

func TestListLeases(t *testing.T) {
	h := newOwner(t, "a", "b")
	for i, name := range []string{"lock/a", "lock/b", "lock/b1", "lock/b2", "lock/c", "shard/1", "shard/2"} {
		h.grant("a", uint64(i)+1, name)
	}
	// A resource that is waited for and not held is no lease.
	p, _ := h.m.partitions.Get("p")
	h.wait("b", 1, "lock/b1")
	h.m.editPartition(p).phase = phaseDraining
	h.ok(cmdRelease("a", "lock/b1", token(1, 3)))

	for _, c := range []struct {
		prefix, after string
		limit         int
		want          []string
		next          string
	}{
		{"", "", 100, []string{"lock/a", "lock/b", "lock/b2", "lock/c", "shard/1", "shard/2"}, ""},
		{"lock/", "", 100, []string{"lock/a", "lock/b", "lock/b2", "lock/c"}, ""},
		{"lock/b", "", 1, []string{"lock/b"}, "lock/b"},
		{"lock/b", "lock/b", 1, []string{"lock/b2"}, ""},
		{"lock/", "", 4, []string{"lock/a", "lock/b", "lock/b2", "lock/c"}, ""},
		{"lock/", "", 3, []string{"lock/a", "lock/b", "lock/b2"}, "lock/b2"},
		{"lock/", "lock/b2", 3, []string{"lock/c"}, ""},
		{"lock/", "lock/bb", 3, []string{"lock/c"}, ""}, // the lease named is gone: go on after it
		{"lock/", "a", 2, []string{"lock/a", "lock/b"}, "lock/b"},
		{"lock/", "shard/1", 3, nil, ""},
		{"nothing", "", 3, nil, ""},
		{"", "", 0, nil, ""},
	} {
		page, next := h.m.View().ListLeases(c.prefix, c.after, c.limit)
		var names []string
		for _, l := range page {
			names = append(names, l.Resource)
		}
		if !slices.Equal(names, c.want) || next != c.next {
			t.Errorf("prefix %q after %q limit %d: %v, next %q; want %v, %q", c.prefix, c.after, c.limit, names, next, c.want, c.next)
		}
	}
}

func TestSessionLeasesAndWaiters(t *testing.T) {
	h := newOwner(t, "a", "b")
	h.grant("a", 1, "x")
	h.grant("a", 2, "y")
	h.grant("b", 1, "z")
	h.wait("a", 3, "z")
	v := h.m.View()
	var names []string
	for l := range v.SessionLeases("a") {
		names = append(names, l.Resource)
	}
	if !slices.Equal(names, []string{"x", "y"}) {
		t.Fatalf("leases %v", names)
	}
	want := []Waiter{{Session: "a", Request: 3, Resource: "z", Partition: "p"}}
	if got := slices.Collect(v.SessionWaiters("a")); !slices.Equal(got, want) {
		t.Fatalf("waiters %v", got)
	}
	if got := slices.Collect(v.Waiters("z")); !slices.Equal(got, want) {
		t.Fatalf("queue %v", got)
	}
	for range v.SessionLeases("nobody") {
		t.Fatal("a lease of nobody")
	}
	for range v.SessionWaiters("nobody") {
		t.Fatal("a waiter of nobody")
	}
	for range v.Waiters("nothing") {
		t.Fatal("a waiter for nothing")
	}
	for range v.Sessions() { // an iteration may end early
		break
	}
}

// Views are read by other goroutines while commands go on; run with -race.
func TestViewsAreReadWhileCommandsApply(t *testing.T) {
	h := newOwner(t, "a", "b")
	views := make(chan View)
	var wg sync.WaitGroup
	for range 2 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for v := range views {
				if a, b := v.StateHash(), v.StateHash(); a != b {
					t.Error("a View changed while it was read")
				}
			}
		}()
	}
	for i := range uint64(200) {
		id := 2*i + 1
		name := fmt.Sprintf("x%d", i%40)
		tok := h.grant("a", id, name)
		h.wait("b", id, name)
		views <- h.m.View()
		h.ok(cmdRelease("a", name, tok))
		h.ok(cmdRelease("b", name, tok+1))
		h.grant("a", id+1, fmt.Sprintf("kept%d", i))
		views <- h.m.View()
	}
	close(views)
	wg.Wait()
}
