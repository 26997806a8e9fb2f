package shard

import (
	"strings"
	"testing"
)

// Known values of xxhash64 with seed 0, reduced to 256 shards; other
// implementations are checked against the same.
func TestHashShardIsXXHash64(t *testing.T) {
	for key, hash := range map[string]uint64{
		"":    0xef46db3751d8e999,
		"a":   0xd24ec4f1a98c6e5b,
		"abc": 0x44bc2cf5ad770999,
	} {
		for _, count := range []uint32{1, 2, 256, MaxCount} {
			if got, want := HashShard(key, count), uint32(hash%uint64(count)); got != want {
				t.Errorf("HashShard(%q, %d) = %d, want %d", key, count, got, want)
			}
		}
	}
}

func TestParse(t *testing.T) {
	for name, want := range map[string]Resource{
		"shard/0":             {Name: "shard/0", Kind: KindShard, Key: "0", Slot: -1},
		"shard/68":            {Name: "shard/68", Kind: KindShard, Key: "68", Slot: -1, Number: 68},
		"lock/nightly-report": {Name: "lock/nightly-report", Kind: KindLock, Key: "nightly-report", Slot: -1},
		"lock/a/b:c.d_e":      {Name: "lock/a/b:c.d_e", Kind: KindLock, Key: "a/b:c.d_e", Slot: -1},
		"lock/x#3":            {Name: "lock/x#3", Kind: KindLock, Key: "x", Slot: 3},
	} {
		if got, err := Parse(name); err != nil || got != want {
			t.Errorf("Parse(%q) = %+v, %v; want %+v", name, got, err, want)
		}
	}
}

func TestParseNamesThePartAndTheRemedy(t *testing.T) {
	for name, want := range map[string]string{
		"":                                      "has no '/'",
		"lock":                                  "has no '/'",
		"queue/x":                               "unknown kind \"queue\"",
		"shard/":                                "not a shard number",
		"shard/-1":                              "not a shard number",
		"shard/01":                              "not a shard number",
		"shard/4294967296":                      "not a shard number",
		"lock/":                                 "key has 0 bytes",
		"lock/#1":                               "key has 0 bytes",
		"lock/" + strings.Repeat("k", MaxKey+1): "key has 257 bytes",
		"lock/a b":                              "outside [A-Za-z0-9._:/-]",
		"lock/a#b#1":                            "outside [A-Za-z0-9._:/-]",
		"lock/é":                                "outside [A-Za-z0-9._:/-]",
		"lock/x#":                               "slot \"\" is not a number",
		"lock/x#-1":                             "slot \"-1\" is not a number",
		"lock/x#007":                            "slot \"007\" is not a number",
	} {
		if got, err := Parse(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Parse(%q) = %+v, %v; want an error with %q", name, got, err, want)
		}
	}
}

// All slots of a semaphore are in one shard, and a shard is itself.
func TestShard(t *testing.T) {
	place := func(name string) uint32 {
		t.Helper()
		r, err := Parse(name)
		if err != nil {
			t.Fatal(err)
		}
		s, err := r.Shard(DefaultCount)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	if place("lock/x#0") != place("lock/x") || place("lock/x#1") != place("lock/x#17") {
		t.Error("the slots of a semaphore are in different shards")
	}
	if got := place("shard/255"); got != 255 {
		t.Errorf("shard/255 is in shard %d", got)
	}
	r, err := Parse("shard/256")
	if err != nil {
		t.Fatal(err)
	}
	if s, err := r.Shard(DefaultCount); err == nil || !strings.Contains(err.Error(), "shard/0 to shard/255") {
		t.Errorf("shard/256 of 256 = %d, %v", s, err)
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"shard/1", "lock/x#3", "lock/a/b", "#", "lock/##"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		r, err := Parse(name)
		if err != nil {
			return
		}
		if r.Name != name || len(r.Key) == 0 || len(r.Key) > MaxKey || strings.ContainsAny(r.Key, "# ") {
			t.Errorf("Parse(%q) = %+v", name, r)
		}
		if s, err := r.Shard(DefaultCount); err == nil && s >= DefaultCount {
			t.Errorf("%q is in shard %d of %d", name, s, DefaultCount)
		}
	})
}
