// Package client is the Go SDK: sessions kept alive in the background, and
// leases on shards and named locks with their fencing tokens.
//
//	c, err := client.New(client.Config{ ... })
//	lease, err := c.Acquire(ctx, "lock/nightly-report", client.Wait())
//	defer lease.Release(ctx)
//	work(lease.Context(), lease.Token())
//
// # What it guarantees
//
// A Lease is valid only while the region that granted it may still not have
// passed it on: [Lease.Valid] reads the clock at the call, so it is right also
// after the process was frozen. The lease's context ends earlier, at the
// earliest of two thirds of the session's TTL after the last acknowledged send
// (the self-kill rule), the partition's end less max(100 ms, 2 %), and a
// withdrawal. Between Valid and the effect of a write any time may pass: send
// [Lease.Token] with every write and let the resource refuse lower ones
// (package fence).
//
// # Regions
//
// The Client keeps one session per region that it needs, and finds the owner
// of a resource's partition by asking its home region first. When a region is
// lost, its leases end here by the clock alone, and Acquire goes on in the
// region that is promoted.
//
// A session is one holder: users of one resource in one client take turns.
// [Client.Close] gives everything back; [Client.Leave] leaves the session to
// its TTL, and [ReleaseHandle] ends a lease of it from elsewhere.
//
// # Threads
//
// A session has three goroutines: its stream's owner, that stream's reader, and
// the sweep, which ends contexts by the clock whatever the stream waits for.
// Close and Leave wait for them and for everything begun in the background
// (releases, cancels). One lock per region covers its session, leases and
// belief; nobody waits for a network under it.
//
// # Faults survived
//
// Leader changes, servers that hang (left before half the TTL), lost answers
// (requests carry ids), region loss, suspends and freezes of this process.
package client
