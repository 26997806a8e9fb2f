// Package drill plays what a cluster must survive, against a private one on
// this machine (internal/devcluster), with a fenced workload beside it, and
// checks the invariants of docs/design.md §7. Everything in it is real: the
// processes, their disks and sockets, the signals, the resource and its
// journal.
//
// A scenario fails, with the violations named, when an invariant does not
// hold. It is inconclusive when what it wanted to break did not break.
//
// Goroutines of a run: those of devcluster, and one per region that asks for
// its status; the run ends them all before it returns.
package drill
