// Package vote is a region as a voter of the global quorum: the Voter holds
// the leader's registers with their clocks and answers Prepare and Accept by
// the pure rules of global/register, making every change durable by a commit
// of the region's Raft group.
//
// # Guarantees
//
//   - Nothing is answered before the leader has applied its own first entry
//     of the term; the tables are built there, with full clocks [H5].
//
//   - A promise or a value is answered only after it is committed. The command
//     carries what it was checked against, and the term [H3 H4].
//
//   - From the V2 check until the promise's fate is known, no Accept and no
//     renewal of that register is proposed or answered [H3]. An unknown fate
//     lasts until the term ends.
//
//   - A renewal is answered only after a leadership check begun after it
//     arrived, and never while the newest pulse is stale.
//
//   - Everything is answered under exactly one configuration: a message of
//     another version is refused, with the newer one attached, and what was
//     judged under a version takes no effect after a newer one is stored [H10].
//
// # Faults survived
//
// A deposed leader that has not noticed: its commands name its term, its
// leadership check fails. A hung disk: no commit, no answer, and the pulse goes
// stale. A frozen process: [Voter.ClockGap] restarts all clocks.
package vote
