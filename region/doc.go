// Package region is a region server: one member of a region's Raft group, which
// keeps sessions and leases, campaigns for partitions, and is the region's vote
// in the global quorum while it leads.
//
// It wires the parts and adds no rule of its own:
//
//	replica ── Applied ──▶ vote (registers), lessor (validity), campaign (head leases)
//	campaign ── Held ──▶ lessor
//	api ──▶ replica, lessor;   votes ──▶ vote;   detector ──▶ vote (V3), campaign
//
// # Threads
//
// [Server.Run] owns all goroutines through its run group: clock watch,
// detector, lessor and campaign shells, two gRPC servers, and the replica, which
// stops first: it hands its leadership over while the others still answer. The
// replica's FSM goroutine feeds the tables in log order (observer.go); each
// takes its own lock, one at a time, except that the campaign calls the lessor.
package region
