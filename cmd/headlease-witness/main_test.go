package main

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// tags of a released witness. grpcnotrace leaves out x/net/trace, whose
// templates keep the linker from dropping what is not called.
const tags = "hashicorpmetrics,grpcnotrace"

func TestLinksNoRaft(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-tags", tags, ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	if !slices.Contains(deps, "github.com/hashicorp/memberlist") {
		t.Fatalf("the list is not one of this program: %d packages", len(deps))
	}
	for _, d := range deps {
		if strings.HasPrefix(d, "github.com/hashicorp/raft") || strings.HasPrefix(d, "github.com/headlease/headlease/region") {
			t.Errorf("the witness links %s", d)
		}
	}
}

func TestIsSmallAndStatic(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the program")
	}
	path := filepath.Join(t.TempDir(), "headlease-witness")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-tags", tags, "-ldflags", "-s -w", "-o", path, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if limit := int64(16_000_000); info.Size() > limit {
		t.Errorf("the program has %d bytes; at most %d", info.Size(), limit)
	}
	f, err := elf.Open(path)
	if err != nil {
		t.Fatalf("not an ELF file: %v", err)
	}
	defer func() { _ = f.Close() }()
	if libs, err := f.ImportedLibraries(); err != nil || len(libs) > 0 {
		t.Errorf("the program needs %v (%v)", libs, err)
	}
}
