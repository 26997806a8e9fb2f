// Package histories has no code of its own: its tests run a region of three
// servers under faults, with clients that contend for a few locks, and judge
// what the clients were told (internal/history).
//
// # What runs
//
// The shipped Raft shell with its log on disk, state machine, lessor, voter,
// campaign, API services, forwarding and client, in one process, in the virtual
// time of a testing/synctest bubble, over connections in memory. The region is
// its partition's only voter, so no witness is needed for its head lease.
//
// # Faults
//
//   - kill: from that instant nobody hears the process or is heard by it, and the
//     server starts again with what was on its disk at that instant: with a copy
//     of it, since its goroutines end in order and write what they have begun to.
//     Writes under way are lost. A power failure, which loses what was written and
//     not synced, is not simulated.
//   - crash of a leader that is behind: it is killed while another server has
//     entries that are not on its own disk (docs/decisions/0175), and leads on,
//     without them, with the third.
//   - transfer from afar: leadership goes from a leader that hears the others late,
//     and so goes on hearing answers while the next one leads.
//   - pause: nothing passes to or from a server, its disk stands still and so
//     does its clock, as it sees it; then all go on, the clock with a jump. The
//     goroutines of one process cannot be frozen, so a paused server notices
//     that it is alone, which a stopped process would not (internal/e2e stops
//     real ones).
//   - cut, one-way or full, between two servers or between a client and a
//     server: bytes wait, and connections that waited over 3 s are reset.
//   - stall: each write of one disk waits, for less or for more than the
//     watchdog allows. With a cut of the same server it is what leaves a leader
//     that does not know that it is none: its main loop hangs in the write. That
//     is so where a leader writes before it sends, as with every other seed; with
//     the others it sends first, as shipped (docs/decisions/0175).
//   - drain: a planned transfer is begun and taken back.
//   - flap: leadership is transferred every 100 ms.
//   - lag: what a server proposes, and what its leadership checks say, reaches
//     the next step late, as if the goroutine had not been run.
//   - drift: clocks run fast or slow, within ρ; and steps, beyond it. Then only
//     what rests on no clock is judged.
//
// Each fault counts how often it took effect, in its own terms: connections
// broken, bytes held, writes that waited, leaders that changed.
//
// # Running
//
//	go test ./region/histories                        # some tens of runs
//	go test ./region/histories -runs 1000 -timeout 0  # a soak; make soak-histories
//	go test ./region/histories -seed 7 -runs 1        # one again
//
// A seed repeats what clients ask and which faults come when. It does not repeat
// the interleaving of goroutines, nor what Raft and gRPC draw themselves. So a
// history that fails is saved, in the directory that the failure names, with
// porcupine's picture of each lock that has no order.
//
// Mutants (testdata/mutants) are the test of these tests: each takes one rule
// out of the code, and the histories must show it; make mutants runs them all.
package histories
