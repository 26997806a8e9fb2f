package mutant

import (
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var flagMutants = flag.String("mutants", "few", "which mutants TestRules makes: none, few, all, or names with commas between")

// rules are broken where ordinary tests catch it: "package" is the tests', the
// runs are names of tests.
var rules = Suite{Dir: "testdata/rules", Root: "../.."}

// TestRulesFitTheCode: each mutant finds what it replaces, and its tests exist.
func TestRulesFitTheCode(t *testing.T) {
	rules.FitTheCode(t, func(m Mutant, run string) bool {
		files, err := filepath.Glob(filepath.Join(rules.Root, m.Headers["package"], "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(text), "\nfunc "+run+"(t *testing.T)") {
				return true
			}
		}
		return false
	})
}

var failed = regexp.MustCompile(`(?m)^ *--- FAIL: .*$`)

// TestRules: with the rule gone, its test fails.
func TestRules(t *testing.T) {
	rules.Each(t, *flagMutants, func(t *testing.T, m Mutant, program, _ string) string {
		run := exec.CommandContext(t.Context(), program, "-test.run", "^("+strings.Join(m.Runs, "|")+")$", "-test.timeout", "5m")
		run.Dir = filepath.Join(rules.Root, m.Headers["package"])
		out, err := run.CombinedOutput()
		if err != nil && !errors.As(err, new(*exec.ExitError)) {
			t.Fatal(err)
		}
		line := failed.Find(out)
		if err != nil && line == nil {
			t.Fatalf("it ends, and no test fails: %v\n%s", err, out)
		}
		return string(line)
	})
}
