// Package drill plays scenarios (drill/plan) that break a cluster: a private
// one on this machine (internal/devcluster), or one that runs. A fenced
// workload runs beside it, every process is asked all the time, and what was
// collected is judged (drill/check) by the invariants of docs/design.md §7 and
// by the scenario's expectations. Everything in it is real: the processes,
// their disks and sockets, the signals, the resource and its journal.
//
// A drill fails, with the violations named, when an invariant or an expectation
// does not hold. It is inconclusive when what it wanted to break did not break,
// a process or a time was not seen, there was too little work, or the machine
// itself stalled.
//
// Every fault of a link, a disk or a clock is a rule in the process that
// carries it, and expires there by itself. When a drill ends, in whatever way,
// it also ends them, lets stopped processes go on and starts dead ones.
//
// Goroutines of a run: those of devcluster; two per server and one per witness
// that ask; one per worker of the workload; one per step in progress; the live
// view and the watch for stalls. The run ends them all before it returns.
package drill
