// Package cache is the region's lease cache in Redis: who holds what, for
// look-ups that would otherwise each ask the region.
//
// It is a hint and nothing more. Nobody is granted anything because of it, and
// a region with its Redis down, slow, flushed, full, failed over or shut off by
// a wrong password grants and keeps alive as one without: a Mirror's entry points
// take one short lock, and what they leave behind is bounded [F45].
//
// # Entries
//
// The entry of a resource is one string under PREFIX CLUSTER ":" RESOURCE:
//
//	TOKEN " " STATE " " WRITTEN " " UNTIL " " REGION " " HOLDER
//
// STATE is L for a lease and T for the tombstone of one that ended. WRITTEN, of the entry or its
// newest renewal, and UNTIL, its expiry, are milliseconds of the server's clock. The epoch is
// the token's. A lease's entry expires when its session does, if it is not kept alive, and after
// MaxAge at the latest.
//
// # What is guaranteed
//
//   - An entry goes upward only: to a higher token, and at one token from the
//     lease to its tombstone.
//   - A tombstone outlives every late write [F24]: a write says, on the server's own
//     clock, from when on it is void (WriteWithin), which is far below Tombstone.
//     So a region server that was frozen before it sent, or a command that a
//     paused Redis had in its buffers, brings no old lease back. This holds as
//     long as the server's clock does not jump back by the difference.
//   - An entry that is wrong, because the server lost writes, is right again when
//     the cache is next rebuilt, and gone after MaxAge at the latest.
//
// # How
//
// The FSM goroutine of a region server tells its Mirror of grants and ends; only the
// leader's writes. What waits is kept by resource, the newest only; beyond
// QueueLimit all of it is dropped, and the cache rebuilt from the region's state. A
// pass each second renews what is due (compare-and-PEXPIRE, pipelined) and writes
// what is missing. A new connection, a failure, a term's begin and a missing entry
// have everything written anew, the ends of the last minute first; these every
// server of the region remembers, so that a new leader brings what the one before it
// could not write any more.
//
// # Threads
//
// Mirror.Run is its one goroutine and owns the client. Granted, Ended, Begin and End
// may be called from any goroutine and wait for nothing. A Reader is safe for
// concurrent use.
package cache
