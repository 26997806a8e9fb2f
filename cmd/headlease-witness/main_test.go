package main

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// releaseTags reads from the Makefile, the one place for them, the build tags of a release.
func releaseTags(t *testing.T) string {
	t.Helper()
	makefile, err := os.ReadFile(filepath.Join("..", "..", "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^export GOFLAGS := .* -tags=(\S+)`).FindSubmatch(makefile)
	if found == nil {
		t.Fatal("the Makefile exports no GOFLAGS with -tags")
	}
	return string(found[1])
}

func TestLinksNoRaft(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-tags", releaseTags(t), ".").Output()
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
	path := program(t)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if limit := int64(15_000_000); info.Size() > limit {
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
