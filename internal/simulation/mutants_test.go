package simulation

import (
	"errors"
	"flag"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"testing"

	"github.com/headlease/headlease/internal/mutant"
)

var (
	flagMutants     = flag.String("mutants", "few", "which mutants TestMutants makes: none, few, all, or names with commas between")
	flagMutantHours = flag.Float64("mutant-hours", 150, "simulated hours of a mutant before it counts as not caught")
)

var mutants = mutant.Suite{Dir: "testdata/mutants", Root: "../.."}

// TestMutantsFitTheCode: each mutant still finds what it replaces.
func TestMutantsFitTheCode(t *testing.T) {
	mutants.FitTheCode(t, func(_ mutant.Mutant, run string) bool { return slices.Contains([]string{"worlds", "scenarios"}, run) })
}

// caught is what a run says of a broken invariant.
var caught = regexp.MustCompile(`(?m)^.*(VIOLATION|scenarios_test.go:\d+: (seed|\d)).*$`)

// TestMutants: the simulation shows that a rule is missing.
func TestMutants(t *testing.T) {
	mutants.Each(t, *flagMutants, func(t *testing.T, m mutant.Mutant, program, _ string) string {
		run := func(args ...string) string {
			out, err := exec.CommandContext(t.Context(), program, append(args, "-mutants", "none", "-test.timeout", "30m")...).CombinedOutput()
			if err == nil {
				return ""
			}
			line := caught.Find(out)
			if line == nil || !errors.As(err, new(*exec.ExitError)) {
				t.Fatalf("it fails, and not by an invariant: %v\n%s", err, out)
			}
			return string(line)
		}
		line := ""
		for _, name := range m.Runs {
			if name == "scenarios" {
				line = run("-test.run", "TestScenarios|TestF50")
			} else {
				if seed := m.Headers["seed"]; seed != "" {
					line = run("-test.run", "TestWorlds", "-seed", seed, "-hours", "1")
				}
				if line == "" {
					line = run("-test.run", "TestWorlds", "-hours", fmt.Sprint(*flagMutantHours))
				}
			}
			if line != "" {
				break
			}
		}
		return line
	})
}
