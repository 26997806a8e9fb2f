package clusterfile

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// keysOf returns the keys that a struct of the raw file knows, in order.
func keysOf(v any) []string {
	t := reflect.TypeOf(v)
	keys := make([]string, t.NumField())
	for i := range keys {
		keys[i] = t.Field(i).Tag.Get("mapstructure")
	}
	return keys
}

var (
	topKeys       = keysOf(raw{})
	regionKeys    = keysOf(rawRegion{})
	serverKeys    = keysOf(rawServer{})
	witnessKeys   = keysOf(rawWitness{})
	partitionKeys = keysOf(rawPartition{})
	limitKeys     = keysOf(rawLimits{})
	cacheKeys     = keysOf(rawCache{})

	indexPattern = regexp.MustCompile(`\[\d+\]`)
)

// unknownKey is the fault of a key that is not known at its place.
func unknownKey(path string) Fault {
	parent, key := "", path
	if i := strings.LastIndexByte(path, '.'); i >= 0 {
		parent, key = path[:i], path[i+1:]
	}
	known := map[string][]string{
		"": topKeys, "regions": regionKeys, "regions.servers": serverKeys, "regions.cache": cacheKeys,
		"witnesses": witnessKeys, "partitions": partitionKeys, "limits": limitKeys,
	}[indexPattern.ReplaceAllString(parent, "")]
	if strings.HasPrefix(parent, "partitions[") && key != "" && key[0] >= '0' && key[0] <= '9' {
		return Fault{path, `unknown key; put a list of shards in quotes, such as "0-3,8"`}
	}
	if near := nearest(key, known); near != "" {
		return Fault{path, fmt.Sprintf("unknown key; did you mean %s?", near)}
	}
	if len(known) == 0 {
		return Fault{path, "unknown key; remove it"}
	}
	return Fault{path, "unknown key; known here: " + strings.Join(known, ", ")}
}

// nearest returns the known word that key is most likely a slip of, or "".
func nearest(key string, known []string) string {
	best, at := "", 1+max(2, len(key)/3)
	for _, k := range known {
		if d := distance(key, k); d < at && 2*d <= max(len(k), len(key)) {
			best, at = k, d
		}
	}
	return best
}

// distance is the Levenshtein distance: how many bytes to insert, remove or
// replace to get from a to b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// faultyPaths says where there is a fault already, so that Validate does not
// report the default that stands there. A mapping with a fault is entered as
// path.*: its missing keys may well be there under a wrong name.
func faultyPaths(faults []Fault) map[string]bool {
	at := make(map[string]bool, len(faults))
	for _, f := range faults {
		at[f.Path] = true
		at[f.Path+".*"] = true
		at[parentOf(f.Path)+".*"] = true
	}
	return at
}

func parentOf(path string) string {
	return path[:max(0, strings.LastIndexByte(path, '.'))]
}

// inOrder sorts faults as the keys stand in the file's documentation; those of
// one place stay as found. Duplicates go.
func inOrder(faults []Fault) []Fault {
	rank := func(f Fault) int {
		top, _, _ := strings.Cut(f.Path, ".")
		return slices.Index(topKeys, indexPattern.ReplaceAllString(top, ""))
	}
	slices.SortStableFunc(faults, func(a, b Fault) int { return rank(a) - rank(b) })
	seen := map[Fault]bool{}
	return slices.DeleteFunc(faults, func(f Fault) bool {
		dup := seen[f]
		seen[f] = true
		return dup
	})
}
