// Package plan is the scenario file of a drill: what is broken and when, beside
// which workload, and what must hold. Parse reads it strictly, with the line
// and the field of everything that is wrong, and Bind resolves its spans of
// time for a cluster. It breaks nothing itself.
//
// A scenario names what it breaks by its role ("the leader of the owner of
// partition 1"), so that one file fits every cluster; who that is is decided
// when the step begins.
package plan
