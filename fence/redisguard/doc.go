// Package redisguard is a fence guard for data in Redis: the highest token
// seen of each resource is a key beside the data, its mark, and a write with a
// lower token is refused by the same Lua script that would have written.
//
// What it guarantees, whatever clocks, pauses and networks do, as long as the
// server keeps its marks:
//   - check and write are one atomic step of the server: a write that was
//     checked, delayed and then overtaken does not exist;
//   - once Claim returned nil no write of a lower token is executed, also not
//     one that was on its way; a script that was running has ended [F15];
//   - a write of a higher token raises the mark as it writes;
//   - a resource without a mark takes no guarded write (*fence.UnclaimedError):
//     only Claim makes marks, so a server that lost all its data refuses
//     everybody until a holder claims again;
//   - marks have no TTL, and nothing in this package deletes one or lowers it;
//   - tokens are compared exactly: they are below 2^53 and Lua's numbers are
//     doubles.
//
// Faults survived: a holder frozen between its check and its write, a write
// repeated or delayed by the network, a client that dies at any point, a
// server restarted or killed with its data kept, scripts flushed from the
// server, Redis Cluster (all keys of a step are in the mark's slot, or the
// call is refused before it is sent).
//
// Faults that lose marks, and with them the guarantee:
//   - A server without AOF forgets at a crash all since its last snapshot; with
//     appendfsync everysec, up to about 2 s if its machine loses power (not if
//     only its process is killed). A mark that is lost altogether is safe, the
//     resource is unclaimed; one that falls back to an older value accepts
//     tokens from there on. Data written with the newer token is lost by the
//     same crash, but a holder that already acted on it is not told. Use
//     appendonly yes and appendfsync always where this matters.
//   - A failover to a replica that lagged behind, for the same reason: until the
//     holder claims again, an earlier one's late write is let in. Guard.Keep claims
//     again by itself, while lease.Valid(), as soon as the server's run id is another
//     one: before the holder's next write on a new connection, and by Guard.Watch within
//     Options.CheckEvery. Options.Replicas (WAIT) makes the loss less likely. Neither closes the
//     gap between the failover and the claim: where that matters, use PostgreSQL.
//   - Eviction: under an allkeys-* maxmemory-policy Redis drops marks to make
//     room. The first Claim warns about it; use noeviction or volatile-*.
//   - Writes that do not go through a guard, and FLUSHALL, see no mark.
//
// One goroutine is the package's: the caller's, in Watch. Looks at a server are
// serialized per server and wait for no other one.
//
// After an error other than this project's and redis' refusals the outcome of
// a write is unknown: it may have been executed. go-redis itself repeats a
// command after a network error (Options.MaxRetries), so that Incr and XAdd may
// then count twice; set MaxRetries to -1 or make the write idempotent. Redis
// does not roll back: what a script did before it failed stays.
//
// # Keys
//
// The mark of a resource has the resource's hash tag: what is between its
// first "{" and the next "}", or all of its name if it has no braces. Every
// data key must have the same tag; Key makes such keys. With resource
// "orders/7" the data is in "{orders/7}:total", the mark in
// "headlease:mark:{orders/7}:orders/7".
package redisguard
