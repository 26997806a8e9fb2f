package admin

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

func auditRecord(t *testing.T, region, server string, index uint64, n int, kind string, at int) auditLine {
	t.Helper()
	l := auditLine{auditKey: auditKey{Time: time.Unix(int64(at), 0).UTC(), Region: region, Server: server, Index: index, N: n, Kind: kind}}
	raw, err := json.Marshal(l.auditKey)
	if err != nil {
		t.Fatal(err)
	}
	l.raw = string(raw)
	return l
}

// Each server of a region lacks some records and says so; together they have
// every one once, in the log's order, whatever their clocks say.
func TestAuditIsMergedFromServersThatLackSome(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 5))
		var found [][]auditLine
		for _, region := range []string{"eu", "us"} {
			servers := make([][]auditLine, 3)
			for index := range uint64(30) {
				keeps := rng.IntN(3)
				for s := range servers {
					kind := "adopted"
					if s != keeps && rng.IntN(3) == 0 {
						if rng.IntN(2) == 0 {
							continue
						}
						kind = gapKind
					}
					servers[s] = append(servers[s], auditRecord(t, region, fmt.Sprintf("%s-%d", region, s), index+1, 0, kind, 10*int(index)+rng.IntN(40)))
				}
			}
			found = append(found, servers...)
		}
		next := map[string]uint64{"eu": 1, "us": 1}
		for _, line := range mergeAudit(found) {
			var k auditKey
			if err := json.Unmarshal([]byte(line), &k); err != nil {
				t.Fatal(err)
			}
			if k.Index != next[k.Region] || k.Kind != "adopted" {
				t.Fatalf("seed %d: %s, want index %d", seed, line, next[k.Region])
			}
			next[k.Region]++
		}
		if next["eu"] != 31 || next["us"] != 31 {
			t.Fatalf("seed %d: ends at %v", seed, next)
		}
	}
}

// What no server has is told.
func TestAuditTellsWhatNobodyHas(t *testing.T) {
	got := mergeAudit([][]auditLine{
		{auditRecord(t, "eu", "eu-1", 1, 0, "adopted", 1), auditRecord(t, "eu", "eu-1", 5, 0, gapKind, 2)},
		{auditRecord(t, "eu", "eu-2", 1, 0, "adopted", 1)},
	})
	if len(got) != 2 || !strings.Contains(got[1], gapKind) {
		t.Errorf("%q", got)
	}
}
