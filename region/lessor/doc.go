// Package lessor is a region leader's time: session deadlines, the validity
// that may be sent to clients, revocations and offers. It is pure. One Lessor
// lives for one term of one leader, is built from the state at the term's
// first own entry, and is driven under one lock by its shell (lessor/run).
//
// # What it guarantees
//
// As long as clock rates stay within ρ, whatever is lost, late or repeated:
//   - a session is expired only after all validity sent for it by any leader of
//     the region has run out (I3) [F7 L2];
//   - validity sent for a token ends with the session's and with the head
//     lease's end that this leader knew (I3) [F8 L6];
//   - a revoked lease, and an offer that was not confirmed, passes on only when
//     the last validity sent for it, by this leader or an earlier one, is over
//     (I4) [F9 L3 L4];
//   - on one stream no validity reaches a token that was withdrawn [L1].
//
// # How
//
// Time starts anew with the term: every session has its full TTL, every head
// lease counts as promised for D (by an earlier leader) and not held (by this
// one) [L3]. A session has two deadlines. An arriving keepalive extends the
// expiry deadline at once. The sendable deadline, the only one that clients
// are told, follows when a leadership check that was begun after the arrival
// has passed [F1 L2], so a deposed leader, which still takes keepalives, can
// promise nothing new. Nothing at all is sent before the first check of the
// term has passed [L7].
//
// A stream's first ack for a session is complete: it names all that the
// session holds. From then on the stream follows the state machine: grants
// name, revocations and ends withdraw, in the order of the log. So the set that
// a client should know is the history of the session's held set since, and the
// hash in a keepalive either matches a point of that history, which confirms
// the offers up to there, or the next ack is complete again [F17 F23]. When a
// session attaches elsewhere its old stream is closed: pushes there must not
// reach tokens whose withdrawal would go to the new one.
//
// Partition ends go out per stream, for the partitions in which the stream's
// sessions hold or wait: with each ack, and when D/2 is left of what was told
// last [F8 F18 F32].
//
// # Faults survived
//
// Any loss, delay or break of streams; a leader deposed without noticing,
// paused at any point; commands whose outcome is unknown (they are proposed
// again in the same term, and a session that is being expired takes no
// keepalive meanwhile); a clock that stood still or jumped (ClockGap): time starts
// anew within the term [L3].
//
// # Duties of the shell, in this order
//
//  1. Build with New in the FSM goroutine at the own TermBegun event; throw the
//     Lessor away when the term is over. Nothing of one term goes to another.
//  2. Hold one lock over each call; after each, take the Outbox and hand its
//     messages to the streams' queues before the lock is let go, so that the
//     order in which the Lessor decided is the order on each stream [L5]. A
//     stream whose queue is full is closed, never skipped.
//  3. Give every state.Event to Applied, in order, before any later entry's
//     proposer learns its outcome. HeadLease and Lapsed come from the campaign.
//  4. StreamOpened before anything from a stream, StreamClosed when it has
//     ended. Authenticate before Keepalive: the Lessor checks no secrets. Read the
//     clock before the call, not earlier than the message arrived.
//  5. While CheckWanted, begin a leadership check: CheckBegun under the lock,
//     then the network round, then CheckPassed or CheckFailed. Two may run at
//     once; one that runs is never joined by later arrivals: the ticket says
//     what it covers.
//  6. PulseFresh(false) as soon as the newest committed pulse is too old, and
//     true again when one is fresh; it begins as false. While it is false no
//     ack and no answer to Acquire leaves the Lessor [F30].
//  7. Propose the Outbox's commands, in any order, and call CommandDone once
//     for each, with the error if the outcome is unknown.
//  8. Answer an Acquire only with what Answer returns; on ErrWait wait for the
//     next CheckPassed and ask again.
//  9. Call Tick at Next, and at least every 100 ms; ClockGap before anything
//     else when the clock had a gap.
package lessor
