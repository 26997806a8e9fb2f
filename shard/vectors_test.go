package shard

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"
)

const vectorsFile = "testdata/shard-vectors.json"

var rewrite = flag.Bool("shard.rewrite", false, "write "+vectorsFile+" anew; read the difference")

// vectors is the published file: for each key and count the hash and the shard.
type vectors struct {
	About      string     `json:"about"`
	Exceptions Exceptions `json:"exceptions"`
	Vectors    []vector   `json:"vectors"`
}

type vector struct {
	Key    string `json:"key"`
	Shards uint32 `json:"shards"`
	Hash   string `json:"hash"` // 16 hexadecimal digits
	Shard  uint32 `json:"shard"`
}

// newVectors has a key of each length, so that every branch of xxhash64 is
// taken at each of its edges, names as people use them, and exceptions.
func newVectors() vectors {
	v := vectors{
		About:      "shard = exceptions[key], else xxhash64(UTF-8 of key, seed 0) & (shards-1)",
		Exceptions: Exceptions{"account/whale": FirstDedicated, "hot": FirstDedicated + 7},
	}
	add := func(key string, shards ...uint32) {
		for _, n := range shards {
			v.Vectors = append(v.Vectors, vector{Key: key, Shards: n, Hash: fmt.Sprintf("%016x", xxhash.Sum64String(key)), Shard: Of(key, n, v.Exceptions)})
		}
	}
	alphabet := strings.Repeat("abcdefghijklmnopqrstuvwxyz0123456789._:/-", 7)
	for n := 1; n <= 100; n++ {
		add(alphabet[n:2*n], 256)
	}
	add(alphabet[:MaxKey], 1, 2, 256, MaxCount)
	for _, key := range []string{"user/1", "user/2", "account/whale", "account/whale2", "hot", "nightly-report", "eu:equities/7203.T", "Zürich", "日本語", "\x7f"} {
		add(key, 1, 16, 256, 4096, MaxCount)
	}
	return v
}

func TestVectors(t *testing.T) {
	want := newVectors()
	if *rewrite {
		b, err := json.MarshalIndent(want, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(vectorsFile), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(vectorsFile, append(b, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(vectorsFile)
	if err != nil {
		t.Fatal(err)
	}
	var file vectors
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Vectors) != len(want.Vectors) {
		t.Fatalf("%d vectors, want %d", len(file.Vectors), len(want.Vectors))
	}
	for i, v := range file.Vectors {
		if v != want.Vectors[i] {
			t.Errorf("vector %d is %+v; this package says %+v: workers in other languages would disagree", i, v, want.Vectors[i])
		}
		if got := Of(v.Key, v.Shards, file.Exceptions); got != v.Shard {
			t.Errorf("Of(%q, %d) = %d, want %d", v.Key, v.Shards, got, v.Shard)
		}
	}
}

// A reference that finds a changed vector finds a wrong one.
func TestReferencesAgree(t *testing.T) {
	script := filepath.Join(t.TempDir(), "shards.mjs")
	compile := command(t, "esbuild", "reference/shards.ts", "--format=esm", "--target=es2022", "--outfile="+script, "--log-level=warning")
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("esbuild: %v\n%s", err, out)
	}
	broken := filepath.Join(t.TempDir(), "broken.json")
	v := newVectors()
	v.Vectors[0].Shard ^= 1
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(broken, b, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, line := range [][]string{{"python3", "reference/shards.py"}, {"node", script}} {
		out, err := command(t, line[0], line[1], vectorsFile).CombinedOutput()
		if want := fmt.Sprintf("%d vectors, 0 wrong", len(v.Vectors)); err != nil || !bytes.Contains(out, []byte(want)) {
			t.Errorf("%s: %v, want %q\n%s", line[0], err, want, out)
		}
		out, err = command(t, line[0], line[1], broken).CombinedOutput()
		if err == nil || !bytes.Contains(out, []byte("1 wrong")) {
			t.Errorf("%s does not see a wrong vector: %v\n%s", line[0], err, out)
		}
	}
}

func command(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%v: run make need-references, which installs it", err)
	}
	return exec.CommandContext(t.Context(), path, args...)
}
