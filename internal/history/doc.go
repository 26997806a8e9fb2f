// Package history records what clients of a region asked and were told, and
// judges it: is there an order of events, each within its call, in which every
// answer is what the design allows (docs/design.md §3)?
//
// A Recorder sits in a client's gRPC connections as interceptors, so it sees
// each attempt of each call and each message of each stream, of a bare gRPC
// client and of package client alike. All instants are of one clock, the
// test's.
//
// # What is checked
//
// Check runs porcupine over a model of one lock, or of one semaphore: its holder
// or those of its slots, their tokens and values, the queues, the requests that were
// answered, the sessions that have ended. Of a semaphore a request for any slot gets
// the lowest free one or waits in the semaphore's queue, one for a slot by its name
// comes before that queue, and tokens rise with the grants, whatever slot they are
// of. The model is a description of the rules of its own; it shares no code with the
// state machine. A call without an answer may have taken effect at any later
// time, or never. What nobody calls has an operation of its own that may happen
// or not: a session expires, but not before the end that its client was
// promised; an offer lapses, unless the client was told that it is confirmed;
// a revoked lease passes on. Drains and the ends of lock delays are known from
// the log's facts only.
//
// Beside it, Check follows what each client may believe, message by message,
// from the rules of design §3: no two tokens of a resource may be believed at
// one instant (I4), nor any token that its stream did not name (F9) or whose
// session or head lease is over (I3), and package client may believe no more
// than was said (F8).
//
// # Why one lock at a time
//
// Sessions and request ids reach over all locks, so a history of one lock is
// not independent of the others. It is checked alone all the same, with what
// the others say about its sessions put in as bounds: an end of a session is an
// operation of every lock that it touched. Whatever order the whole history has
// is then an order of each part, so no correct history is refused; a fault that
// shows only in the order of two locks is not found.
package history
