// Package validity decides what a client may believe about its leases. It is
// pure: a Table is driven by one shell (the SDK's connection to one region),
// which tells it every message, every keepalive and every clock gap, and asks
// it before each act that rests on a lease.
//
// # What it guarantees
//
// As long as clock rates stay within Config.DriftPPM of true time and the
// shell does its duties below:
//   - no token is believed longer than the leader that granted it has promised
//     (I3), so two clients never believe in one resource at a time (I4);
//   - a lease that was released, revoked, dropped or lost is never believed
//     again, whatever arrives late [L1 L5];
//   - a token of an epoch is covered by that epoch's ends only [L6].
//
// # How
//
// Leaders speak in instants on their own clock, of a named term. A keepalive
// or an Acquire sent at c on the client's clock and stamped s by the leader is
// a pair: the leader's instant X is at c + (X-s)(1-2ρ) here [F8 F18]. Pairs
// are per stream and term, the newest counts, and a gap in the client's clock
// ends them all. Without a pair nothing is valid.
//
// Validity is positive [F9 L1]. Per stream and term, and per session, the
// Table keeps the set of tokens that the leader has named as held and not
// withdrawn since. A stream's first ack of a session names all of them: one that
// it does not name is lost, and for the others the promises of older streams run
// on to their ends [L3]. On a stream a token ends at the earliest of the session's
// end, its partition's end for the token's epoch, and its own end if it has one.
// An answer to Acquire gives a token an end of its own and nothing more until the
// stream names it.
//
// A message of a lower term than one taken before is dropped, on whatever
// stream [L5].
//
// # Faults survived
//
// A stale leader, a broken or reordered-by-reconnect connection, lost answers,
// late answers, a paused or suspended client (the shell reports the gap), a
// leader whose clock jumped (it ends the streams).
//
// # Duties of the shell, in this order
//
//  1. One Table per region, under one lock, or owned by one goroutine.
//  2. For Keepalive and Acquire read the clock before sending: c must not be
//     later than the send. For all that takes a message or asks for belief read
//     it afterwards, as late as possible.
//  3. StreamOpened for each new Attach call, and only messages of that call
//     under that id, in the order of arrival. StreamBroken when it ends.
//  4. RequestBegun before an Acquire is sent; AcquireAnswered with the clock
//     read before *that* attempt was sent; RequestOver when nobody waits any
//     more. A token that nobody waits for is a Stranger: release it.
//  5. Releasing before a release is sent: belief ends first.
//  6. ClockGap as soon as a gap is seen, before anything else.
//  7. Ask Valid with the clock read after whatever took time, immediately
//     before the act. Context ends are at ContextEnd, which is earlier.
//  8. Send a keepalive when NextKeepalive says so, Poll about once a second.
package validity
