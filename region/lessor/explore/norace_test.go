//go:build !race

package explore

const raceCost = 1
