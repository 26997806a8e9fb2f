package conventions

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestEveryRuleHasARowOfWhatCatchesIt: each F and H rule that §2 of docs/design.md
// names has one in docs/testing.md, and each mutant that is kept is named there.
func TestEveryRuleHasARowOfWhatCatchesIt(t *testing.T) {
	read := func(path string) string {
		t.Helper()
		raw, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	_, rest, _ := strings.Cut(read("docs/design.md"), "\n## 2.")
	section, _, _ := strings.Cut(rest, "\n## 3.")
	page := read("docs/testing.md")
	rows := map[string]bool{}
	for _, row := range regexp.MustCompile(`(?m)^\| ([^|]+) \|`).FindAllStringSubmatch(page, -1) {
		for rule := range strings.SplitSeq(row[1], ", ") {
			rows[rule] = true
		}
	}
	var rules []string
	for _, group := range regexp.MustCompile(`\[((?:[FH]\d+ ?)+)\]`).FindAllStringSubmatch(section, -1) {
		for _, rule := range strings.Fields(group[1]) {
			if !slices.Contains(rules, rule) {
				rules = append(rules, rule)
			}
		}
	}
	if len(rules) < 20 {
		t.Fatalf("only %d rules found in §2 of docs/design.md: %v", len(rules), rules)
	}
	for _, rule := range rules {
		if !rows[rule] {
			t.Errorf("docs/testing.md has no row for rule %s: break it on purpose, and say what catches that", rule)
		}
	}
	for _, dir := range []string{"internal/simulation/testdata/mutants", "internal/mutant/testdata/rules"} {
		files, err := filepath.Glob(filepath.Join(root, dir, "*.txt"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d mutants, %v", dir, len(files), err)
		}
		for _, f := range files {
			if name := strings.TrimSuffix(filepath.Base(f), ".txt"); !strings.Contains(page, name) {
				t.Errorf("docs/testing.md does not name mutant %s of %s", name, dir)
			}
		}
	}
}
