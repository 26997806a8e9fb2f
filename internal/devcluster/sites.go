package devcluster

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// regionNames are the regions of a development cluster, in order.
var regionNames = []string{"eu-frankfurt", "us-virginia", "ap-tokyo", "sa-saopaulo", "au-sydney"}

var witnessNames = []string{"w-oregon", "w-london", "w-singapore", "w-mumbai", "w-montreal", "w-stockholm", "w-seoul"}

// Bounds of a development cluster.
var (
	MaxRegions   = len(regionNames)
	MaxWitnesses = len(witnessNames)
)

const maxRTT = 10 * time.Second

// defaultRTT is round trips in milliseconds as the public networks of large
// clouds show them, rounded; the upper triangle of regionNames followed by
// witnessNames.
var defaultRTT = [][]int{
	/* eu-frankfurt */ {90, 220, 200, 250, 150, 15, 160, 120, 95, 25, 230},
	/* us-virginia  */ {150, 115, 200, 65, 76, 215, 190, 16, 105, 175},
	/* ap-tokyo     */ {255, 105, 100, 210, 70, 125, 155, 240, 35},
	/* sa-saopaulo  */ {310, 175, 185, 320, 300, 125, 215, 290},
	/* au-sydney    */ {140, 265, 92, 150, 200, 275, 135},
	/* w-oregon     */ {130, 165, 215, 60, 150, 125},
	/* w-london     */ {170, 115, 80, 30, 240},
	/* w-singapore  */ {60, 215, 175, 75},
	/* w-mumbai     */ {190, 140, 115},
	/* w-montreal   */ {105, 175},
	/* w-stockholm  */ {235},
	/* w-seoul      */ {},
}

// pair is two sites, the lesser name first.
type pair [2]string

func pairOf(a, b string) pair {
	if a > b {
		a, b = b, a
	}
	return pair{a, b}
}

// Matrix is the round trip times between sites: regions by name, witnesses by
// name. Within a site there is no delay. It is immutable; the zero value has no
// delay anywhere.
type Matrix struct {
	rtt map[pair]time.Duration
}

// DefaultMatrix is a plausible planet: 90 ms between eu-frankfurt and
// us-virginia, 150 ms from there to ap-tokyo, 220 ms around.
func DefaultMatrix() Matrix {
	sites := slices.Concat(regionNames, witnessNames)
	m := Matrix{rtt: map[pair]time.Duration{}}
	for i, row := range defaultRTT {
		for j, ms := range row {
			m.rtt[pairOf(sites[i], sites[i+1+j])] = time.Duration(ms) * time.Millisecond
		}
	}
	return m
}

// UniformMatrix has one round trip time between all sites.
func UniformMatrix(rtt time.Duration) Matrix {
	m := DefaultMatrix()
	for p := range m.rtt {
		m.rtt[p] = rtt
	}
	return m
}

// RTT returns the round trip time between two sites.
func (m Matrix) RTT(a, b string) time.Duration {
	if a == b {
		return 0
	}
	return m.rtt[pairOf(a, b)]
}

// ParseMatrix reads the value of --rtt: "default", "off", one time for all
// pairs ("80ms"), or the default with changes ("eu-frankfurt/us-virginia=30ms",
// several with commas between). All faults are reported at once.
func ParseMatrix(s string) (Matrix, error) {
	switch s {
	case "", "default":
		return DefaultMatrix(), nil
	case "off", "none", "0":
		return Matrix{}, nil
	}
	if !strings.Contains(s, "=") {
		rtt, err := parseRTT(s)
		if err != nil {
			return Matrix{}, fmt.Errorf("rtt %q: %w; write default, off, a time such as 80ms, or A/B=80ms", s, err)
		}
		return UniformMatrix(rtt), nil
	}
	m := Matrix{rtt: maps.Clone(DefaultMatrix().rtt)}
	var errs []error
	for part := range strings.SplitSeq(s, ",") {
		sites, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		a, b, _ := strings.Cut(sites, "/")
		if _, known := m.rtt[pairOf(a, b)]; !known {
			errs = append(errs, fmt.Errorf("rtt %q: %q are not two sites; use two of %s", part, sites,
				strings.Join(slices.Concat(regionNames, witnessNames), ", ")))
			continue
		}
		rtt, err := parseRTT(value)
		if err != nil {
			errs = append(errs, fmt.Errorf("rtt %q: %w", part, err))
			continue
		}
		m.rtt[pairOf(a, b)] = rtt
	}
	if len(errs) > 0 {
		return Matrix{}, errors.Join(errs...)
	}
	return m, nil
}

func parseRTT(s string) (time.Duration, error) {
	rtt, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("%q is not a time", s)
	}
	if rtt < 0 || rtt > maxRTT {
		return 0, fmt.Errorf("%v is outside 0 to %v", rtt, maxRTT)
	}
	return rtt, nil
}
