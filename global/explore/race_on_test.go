//go:build race

package explore

// raceShare divides the bounds of the searches under the race detector, which
// has nothing to find in this sequential code but slows it tenfold.
const raceShare = 20
