// Package reconfigure is what changes the cluster's configuration: which step
// comes next, when it is decided, and when the one after it may be. It is pure;
// the shell, an operator's command, is in client/admin. All state is in the
// voters: whoever asks them knows how far a change has come, and goes on.
//
// # One step
//
//	gather -> settle c -> Prepare, Accept (V1 only, voters of c) -> store c+1 everywhere -> settle c+1
//
// A step adds or removes one member, or changes what is no member ([Goal]). The
// decision on c+1 is a register of its own among the voters of c ([Decision]).
// A proposal that somebody else has left half accepted is finished first.
// Before c+1 is proposed, c is settled [H10]: it is stored by majorities of its
// own voters and of those before ([Stored]), and after that every register was
// accepted once more, under c, by a majority of c ([Settling]).
//
// # Why a register is accepted again, and not only read
//
// Majorities of c-1 and c+1 need not meet. What c-1 has decided is carried over
// by a majority of c, which meets both; and the running head lease of an owner
// is carried over by the clocks of that majority, which an Accept restarts. So
// the accepts count only if they were sent after c was stored: a round that the
// voters of c-1 answer can begin up to that moment. global/explore breaks each
// of these rules and finds two owners.
package reconfigure
