package histories

import (
	"flag"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/headlease/headlease/internal/mutant"
)

var (
	flagMutants    = flag.String("mutants", "few", "which mutants TestMutants makes: none, few, all, or names with commas between")
	flagMutantRuns = flag.Int("mutant-runs", 40, "runs of a mutant before it counts as not caught")
)

var mutants = mutant.Suite{Dir: "testdata/mutants", Root: "../.."}

// TestMutantsFitTheCode: each mutant still finds what it replaces.
func TestMutantsFitTheCode(t *testing.T) {
	mutants.FitTheCode(t, func(_ mutant.Mutant, run string) bool {
		return slices.ContainsFunc(scenarios, func(s scenario) bool { return s.name == run })
	})
}

// caught is what a run says of a fault in the region, not in itself.
var caught = regexp.MustCompile(`(?m)^.*(VIOLATION|panic:).*$`)

// TestMutants: the histories show that a rule is missing.
func TestMutants(t *testing.T) {
	mutants.Each(t, *flagMutants, func(t *testing.T, m mutant.Mutant, program, dir string) string {
		for seed := 1; seed <= *flagMutantRuns; seed++ {
			for _, sc := range m.Runs {
				run := exec.CommandContext(t.Context(), program, "-test.run", "^TestHistories$/^"+sc+"$",
					"-runs", "1", "-seed", fmt.Sprint(seed), "-save", dir, "-undecided", "20s", "-test.timeout", "5m")
				out, err := run.CombinedOutput()
				if err == nil {
					continue
				}
				if line := caught.Find(out); line != nil {
					return fmt.Sprintf("seed %d: %s", seed, line)
				}
				text := strings.TrimSpace(string(out))
				t.Logf("seed %d says nothing: %s", seed, text[:min(300, len(text))])
			}
		}
		return ""
	})
}
