// Package run is the shell of the campaign: it carries out what the pure
// proposer (package campaign) decides, with real votes, commits and clocks,
// for as long as the region's server leads.
//
// # Threads
//
// [Shell.Begin], [Shell.Applied] and [Shell.Deposed] are called by the
// replica, in order, and do not block. Every other input comes from goroutines
// that a term owns: one per message to a voter, one per proposed command; all
// end with the term. One lock orders them. The head leases go to [Heads] under
// that lock, so that a lapse never overtakes the hold before it.
package run
