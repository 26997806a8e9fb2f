// Package check judges a drill by what was collected while it ran: the
// regions' words about their head leases, what each worker did and believed,
// the resource's journal, the faults with their measured effect, and how far
// the collection reached. It checks the invariants of docs/design.md §7 and
// the scenario's expectations.
//
// All instants of a Record are of one clock, the drill's; what another process
// says of a length of time ("held for 1.2 s more") is placed between the
// question and the answer. So an interval is judged only where it is certain,
// and what may be a violation or not is none.
//
// A verdict is not ok because nothing was found: where the collection misses a
// process or an interval, a fault had no effect or there was too little work,
// it is inconclusive.
package check
