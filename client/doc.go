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
// The Client finds the owner of a resource's partition by asking its home region
// first, and all regions at once when that does not help. When a region is lost,
// its leases end here by the clock alone, and Acquire goes on in the region that
// is promoted; a waiter keeps its old place until another owner is found, and
// never has two leases.
//
// # Sessions
//
// A session is one holder: users of one resource in one session take turns. The
// Client has one of its own for its methods; [Client.NewSession] makes more,
// which share connections and streams. [Session.Close] gives everything back;
// [Session.Leave] leaves the session to its TTL, and [ReleaseHandle] ends a lease
// of it from elsewhere.
//
// # Hints
//
// [Client.Watch], [Client.WatchPrefix] and [Election.Observe] tell what servers
// have applied, and [Client.Lookup] what a region's cache says; nobody holds a lease because they say so.
//
// # Threads
//
// A region with open sessions has three goroutines, however many sessions: its
// stream's owner, that stream's reader, and the sweep, which ends contexts by the
// clock whatever the stream waits for. A watch has its own two, a search for an
// owner one per region, and a server that leaves calls unanswered one that asks
// it whether it lives. Close and Leave wait for them and for everything begun
// in the background (releases, cancels). One lock per region covers its sessions,
// leases and belief; nobody waits for a network under it.
//
// # Faults survived
//
// Leader changes, servers that hang (left before half the TTL; after some 350 ms
// by calls that they do not answer), lost answers (requests carry ids), region
// loss, suspends and freezes of this process.
package client
