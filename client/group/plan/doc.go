// Package plan decides which member of a group has which shards.
//
// [Assign] is one assignment: even by capacity, and with the fewest moves from
// the one before. [Planner] is the sequence of them, as members come, stop,
// come back and are lost.
//
// What it guarantees:
//   - every shard has one member, once there are enough of them;
//   - a member's count is its exact share by capacity, rounded down or up: 256
//     shards over three equal members are 85, 85 and 86;
//   - no other assignment with such counts moves fewer shards;
//   - what a member has that stops and says that it comes back stays its own
//     until the grace is over, and is even again when it is back.
//
// It is no authority: whoever has a shard's lease holds it, whatever an
// assignment says.
package plan
