// Package explore searches the states of the global layer for a violation of
// its invariants. What it explores is the code that ships: package register
// judges and changes every voter's record, package campaign decides every step
// of every leader. The world around them is as in spec/register.pml: messages
// that are lost, doubled, late and reordered, a crash between any two steps, a
// deposed leader that has not noticed, restarts, and time in ticks with clocks
// at the edge of their bound.
//
// All of it is test code, and so are the broken rules (bugs_test.go) that
// prove that the search has teeth: nothing of either is in any binary. Run
//
//	go test ./global/explore -v                        # bounded by states
//	go test ./global/explore -v -run Exhaustive -explore.time 3m -timeout 10m
//
// The files: rules_test.go, what a seeded bug may break; state_test.go, states
// and leaders in compact form; step_test.go, the steps; search_test.go,
// breadth-first search; walk_test.go, random walks of a bigger world with real
// timers; reconfig_*_test.go, changes of the configuration with packages config
// and reconfigure, as in spec/reconfig.pml.
package explore
