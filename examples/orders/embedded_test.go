package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestEmbedded plays a small run on the stand-ins, without a store in PATH.
func TestEmbedded(t *testing.T) {
	dir := t.TempDir()
	for name, pkg := range map[string]string{"headlease": "../../cmd/headlease", "orders": "."} {
		build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, name), pkg)
		if !strings.Contains(os.Getenv("GOFLAGS"), "-tags") { // make's are what is built already
			build.Env = append(os.Environ(), "GOFLAGS=-tags=hashicorpmetrics")
		}
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", name, err, out)
		}
	}
	reported := filepath.Join(dir, "report.json")
	cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "orders"), "run", "--embedded", "--headlease", filepath.Join(dir, "headlease"),
		"--messages", "1500", "--accounts", "100", "--over", "5s", "--report", reported)
	// Its own directory is not below the test's, whose name makes paths of sockets too long.
	cmd.Env = []string{"PATH=" + dir, "HOME=" + dir, "TMPDIR=" + os.TempDir()}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	if first, _, _ := strings.Cut(string(out), "\n"); !strings.Contains(first, "EMBEDDED: stand-ins") {
		t.Errorf("the first line does not say what it runs on: %s", first)
	}
	b, err := os.ReadFile(reported)
	if err != nil {
		t.Fatal(err)
	}
	var r result
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	if r.Verdict != "ok" || !r.Embedded || r.Frozen == 0 || r.Regions == 0 || r.Rows < 1500 || r.Refused[inPostgres] == 0 || r.Refused[inRedis] == 0 {
		t.Errorf("the report is %s", b)
	}
}
