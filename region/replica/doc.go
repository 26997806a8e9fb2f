// Package replica is the Raft shell of a region server: it keeps the region's
// state machine (package state) on hashicorp/raft, proposes commands in
// batches, tells who leads, proves leadership, and notices a dead disk.
//
// # Life
//
// Open checks, locks and opens the data directory and starts nothing. Run
// starts Raft (at once for an initialised directory, else when Bootstrap is
// called), owns every goroutine, and returns after an orderly stop: leadership
// handed to another voter, outstanding proposals answered, Raft stopped,
// streams closed, stores closed, lock released. Close releases what Open took
// if Run is never called.
//
// # Guarantees
//
//   - A command that Propose answers is committed by a quorum and applied here.
//     NotLeaderError and ErrOverloaded mean that it surely never will be;
//     ErrUnknown means that nobody knows. No command is proposed twice or
//     forwarded [H4].
//   - The first own entry of a leader's term is BeginTerm. Leading is true only
//     after it has been applied here, in that term, and the observer has been
//     told; nothing can be proposed before.
//   - Check passes only if no other leader had been elected at some instant
//     after Check was called [F1].
//   - A Raft stream reaches only the very data directory (name/uuid) it was
//     meant for: a server whose directory was wiped or swapped neither votes nor
//     stores under its old name [F3].
//   - A snapshot that is damaged is neither restored nor sent. A directory that
//     has lost what it acknowledged does not start [F37].
//   - The log behind the snapshots is removed in pieces, between appends, so that
//     a crash leaves no gap [F36], and not while a server that lags within bounds
//     needs it [F37].
//   - An entry is committed only when it is on the disks of a majority of the
//     voters, the leader's among them, which sends an entry before it writes it.
//   - A store call that hangs makes the pulse stale within min(D/2, 1.5 s) and
//     ends the process after Config.StoreLimit [F30]. A store call that fails
//     stops the server.
//
// # Threads
//
// Raft: its main loop (elections, appends, a follower's store writes), the FSM
// goroutine (state.Machine.Apply, Observer.Applied), the snapshot goroutine, and a
// few per peer. Ours, all owned by Run: leadership watch, the watch for a leader's
// silence and its questions to the others, proposer, one waiter per entry in
// flight, a leader's writer while it has something to write, leadership check,
// pulse, compactor (asks how far the others are) and its worker (has snapshots
// written, shortens the log), watchdog.
package replica
