package simulation

import (
	"errors"
	"flag"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/internal/mutant"
)

var (
	flagMutants     = flag.String("mutants", "few", "which mutants TestMutants makes: none, few, all, or names with commas between")
	flagMutantHours = flag.Float64("mutant-hours", 150, "simulated hours of a mutant before it counts as not caught")
)

const root = "../.."

func allMutants(t *testing.T) []mutant.Mutant {
	t.Helper()
	all, err := mutant.All("testdata/mutants")
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestMutantsFitTheCode: each mutant still finds what it replaces.
func TestMutantsFitTheCode(t *testing.T) {
	for _, m := range allMutants(t) {
		if _, err := m.Overlay(root, t.TempDir()); err != nil {
			t.Error(err)
		}
		for _, name := range m.Runs {
			if !slices.Contains([]string{"worlds", "scenarios"}, name) {
				t.Errorf("%s: there is no run %q", m.Name, name)
			}
		}
	}
}

// caught is what a run says of a broken invariant.
var caught = regexp.MustCompile(`(?m)^.*(VIOLATION|scenarios_test.go:\d+: (seed|\d)).*$`)

// TestMutants: the simulation shows that a rule is missing. A mutant with
// "few: yes" is caught soon, and is made in each run of the tests.
func TestMutants(t *testing.T) {
	if *flagMutants == "none" {
		return
	}
	names := strings.Split(*flagMutants, ",")
	made := 0
	for _, m := range allMutants(t) {
		if *flagMutants == "few" && m.Headers["few"] == "" || *flagMutants != "few" && *flagMutants != "all" && !slices.Contains(names, m.Name) {
			continue
		}
		made++
		t.Run(m.Name, func(t *testing.T) { make1(t, m) })
	}
	if made == 0 {
		t.Errorf("there is no mutant %q", *flagMutants)
	}
}

func make1(t *testing.T, m mutant.Mutant) {
	binary, err := m.Build(t.Context(), root, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	run := func(args ...string) bool {
		args = append(args, "-mutants", "none", "-test.timeout", "30m")
		out, err := exec.CommandContext(t.Context(), binary, args...).CombinedOutput()
		if err == nil {
			return false
		}
		if !errors.As(err, new(*exec.ExitError)) {
			t.Fatal(err)
		}
		line := caught.Find(out)
		if line == nil {
			t.Fatalf("%s\nit fails, and not by an invariant: %v\n%s", m.What, err, out)
		}
		t.Logf("%s\ncaught after %v: %s", m.What, time.Since(began).Round(10*time.Millisecond), strings.TrimSpace(string(line)))
		return true
	}
	for _, name := range m.Runs {
		if name == "scenarios" {
			if run("-test.run", "TestScenarios|TestF50") {
				return
			}
			continue
		}
		if seed := m.Headers["seed"]; seed != "" && run("-test.run", "TestWorlds", "-seed", seed, "-hours", "1") {
			return
		}
		if run("-test.run", "TestWorlds", "-hours", fmt.Sprint(*flagMutantHours)) {
			return
		}
	}
	t.Errorf("%s\nnot caught", m.What)
}
