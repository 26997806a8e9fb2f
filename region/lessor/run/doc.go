// Package run is the shell of the lessor: it gives the pure tables of a term
// (package lessor) their clock, their leadership checks, their commits and
// their streams.
//
// # Threads
//
// The replica calls [Shell.Begin], [Shell.Applied] and [Shell.Deposed] from its
// own goroutines, in order; they do not block. [Shell.Run] owns three kinds of
// goroutine: the clock, the leadership checks, and one per proposed command.
// One lock covers the lessor, and messages enter the streams' queues under it,
// so that the order in which the lessor decided is the order on each stream
// [L5].
package run
