//go:build !race

package explore

// raceShare divides the bounds of the searches under the race detector.
const raceShare = 1
