// Package group divides shards among workers: each member of a group holds the
// leases on its part, and parts move when members come, stop or are lost.
//
//	err := group.Run(ctx, group.Config{
//		Client: c, Name: "orders", Member: "worker-1", Shards: group.Shards(256),
//		Work: func(ctx context.Context, s *group.Shard) error { … },
//	})
//
// # How
//
// A member keeps a lease on a slot of lock/group/NAME, with its name and
// capacity as value. One of them holds lock/group/NAME itself: it assigns
// (package plan) and keeps the assignment as that lease's value, in the region's
// replicated state. All watch both. A member waits in the queue for the lease
// of each shard assigned to it, and on one that is not its own any more it stops
// its work and releases. So a move is: assign, drain, release, grant; the
// release and the next grant are one command of the region.
//
// # What it guarantees
//
//   - A shard is worked on under its lease and nothing else: at most one member
//     believes at any instant that it has it, and its token fences the writes.
//     An assignment that is late, lost or made by two members delays moves and
//     breaks nothing.
//   - Counts are even by capacity, and moves the fewest: see package plan.
//   - Without a member that assigns, or without the region that has the group,
//     everything stays as it is; shards in other partitions go on.
//   - The shards of a member that is lost move when its validity is over, for
//     a member that hangs does not prolong it.
//   - A member that stops with Return set, and is back within RejoinGrace, gets
//     its shards back and no other shard moves; without Return they move at
//     once.
//
// # Threads
//
// Run owns all goroutines: a watcher, the slot's and the assigner's loops, one
// that decides, one per assigned shard, which calls Work. It returns when all of
// them have ended.
package group
