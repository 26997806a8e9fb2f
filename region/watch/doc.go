// Package watch tells watchers what the applied entries of a region server did
// to leases.
//
// # How
//
// Applied, in the FSM goroutine, appends an entry's events, encoded, to a ring
// and returns; while there are watchers, the hub's own goroutine (Run) decodes
// them and hands them to those that they concern, found by resource and by
// prefix. Each watcher has a bounded queue
// and takes responses from it with Next.
//
// # Guarantees
//
// A consumer that takes a snapshot as the whole state and applies the events
// after it has, at each revision that a response names as complete, exactly the
// region's state at that revision, whatever it was too slow for: events are
// neither left out, nor told twice, nor reordered. Where that cannot be kept it
// is told to begin again (resync) and gets a fresh snapshot. A watcher that goes
// on after a revision gets what came after it, if the ring still has it, and a
// snapshot otherwise.
//
// All of it is a hint: a server tells what it has applied, and it may lag.
//
// # Bounds
//
// The ring is bounded by events and bytes, each queue by both, all queues
// together by bytes; the number of watchers is bounded in all and per
// connection. A watcher whose queue is full is resynced, and waits for nobody.
//
// # Threads
//
// Applied and Restored are the FSM goroutine's and take one short lock. Run is
// the hub's own goroutine. Watch, Next and Close are a gRPC handler's; Next of one
// Watcher must not be called concurrently.
package watch
