// Package campaign is the proposer of the global layer: what one term of a
// region's Raft leader does to become, stay and stop being the owner of
// partitions. It is pure: time, randomness, votes and commit results go in,
// ordered effects come out; package campaign/run is the shell.
//
// The protocol is single-decree Paxos per ballot with read-modify-write
// (CASPaxos, arXiv:1802.07000) whose accepted value is a lease (PaxosLease,
// arXiv:1209.4187); rules are numbered as in docs/design.md, §2.
//
// # Guarantees
//
// As long as all clocks run within the rate bound ρ and every voter keeps its
// rules (package register):
//
//   - I1: the intervals in which leaders believe a Hold never overlap between
//     two regions, nor between two epochs of one partition.
//   - I2: of two Holds, the later one has the higher epoch, or the same epoch
//     and the same owner.
//   - An epoch is never held again after its Drop was emitted, and no Drop is
//     emitted while any leader of the region, a deposed one included, holds.
//
// They survive: messages lost, doubled, reordered, and late by any time; a
// crash or a change of leader between any two steps; a deposed leader that
// has not noticed; a restart of any voter; a candidate that had its value
// accepted by a minority. global/explore checks all of it with this code.
//
// # One campaign
//
//	wait by rank -> dry Prepare -> Reserve -> Prepare -> choose value, T0 -> Accept -> Adopt -> Hold
//
// One campaign takes along all partitions that are due at one time: one ballot
// and one message per voter serve them all, while majorities and holds are
// counted per partition [F38]. A dry Prepare asks without a trace, so a
// candidate that cannot win disturbs nobody [F31]. Who is refused because a
// head lease runs (V2) asks again exactly when the returned time is over; who
// is refused otherwise backs off with jitter [F39].
//
// After an Accept round the Leader renews every D/5, whatever is outstanding:
// rounds are pipelined, each with its own number and T0, an answer counts for
// its own round only, a voter once by id and incarnation [F33]. The hold runs
// from the T0 of the newest complete round for D·(1-ρ)/(1+ρ), D being the
// value's. A round is complete only with the own vote in its majority [H2].
//
// Under a newer configuration the Leader goes on: what it holds runs to its
// end, what it has proposed is sent again at the same ballot, and the counts of
// answers start again ([Leader.Reconfigure]).
//
// # What the caller must do
//
// One Leader belongs to one term of one leader and is made from the state
// machine's view at that term's first entry. All calls are serialised. After
// each call the caller carries out the returned effects in their order.
//
//   - now is read before the call and is never later than the moment at which
//     an effect's message leaves: it becomes T0. It never goes back.
//   - The own voter gets the same messages as the others, but from this very
//     leader's own table of this very term, never over the network: else a
//     successor in the same region would vote for a deposed leader [H2]. Its
//     answer is given only after a commit, or after a leadership check that
//     began after the round was sent. A pulse proposed after the round was
//     sent, and committed, serves as that check.
//   - Reserve, Adopt and Drop are proposed with the term. Their *Failed inputs
//     mean that the command is certain never to take effect; a leader that
//     cannot know gives up its term.
//   - A Hold may be believed only until its instant, read off the same clock
//     after each suspension; Lapse says so once more, and comes late if the
//     caller's timer does. Nothing may be granted without a Hold.
//   - A voter whose line of lives or count of writes went backwards is not
//     counted [F5]: the caller keeps such answers away from the Leader.
//   - Tick at the instant that Next returns, or later.
package campaign
