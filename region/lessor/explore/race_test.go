//go:build race

package explore

// raceCost: under the race detector the limits of states are smaller.
const raceCost = 10
