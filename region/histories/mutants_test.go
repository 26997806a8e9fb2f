package histories

import (
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
	flagMutants    = flag.String("mutants", "few", "which mutants TestMutants makes: none, few, all, or names with commas between")
	flagMutantRuns = flag.Int("mutant-runs", 40, "runs of a mutant before it counts as not caught")
)

// fewMutants are caught within a run or two.
var fewMutants = []string{"F17-no-memory", "F7-no-check", "keepalive-does-not-exclude-expiry"}

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
			if !slices.ContainsFunc(scenarios, func(s scenario) bool { return s.name == name }) {
				t.Errorf("%s: there is no scenario %q", m.Name, name)
			}
		}
	}
}

// caught is what a run says of a fault in the region, not in itself.
var caught = regexp.MustCompile(`(?m)^.*(VIOLATION|panic:).*$`)

// TestMutants: the histories show that a rule is missing.
func TestMutants(t *testing.T) {
	chosen := strings.Split(*flagMutants, ",")
	switch *flagMutants {
	case "none":
		return
	case "few":
		chosen = fewMutants
	}
	found := 0
	for _, m := range allMutants(t) {
		if *flagMutants != "all" && !slices.Contains(chosen, m.Name) {
			continue
		}
		found++
		t.Run(m.Name, func(t *testing.T) { run(t, m) })
	}
	if *flagMutants != "all" && found != len(chosen) {
		t.Errorf("%d of %v exist", found, chosen)
	}
}

func run(t *testing.T, m mutant.Mutant) {
	dir := t.TempDir()
	binary, err := m.Build(t.Context(), root, dir)
	if err != nil {
		t.Fatal(err)
	}
	began, runs := time.Now(), 0
	for runs < *flagMutantRuns {
		for _, sc := range m.Runs {
			runs++
			run := exec.CommandContext(t.Context(), binary, "-test.run", "^TestHistories$/^"+sc+"$",
				"-runs", "1", "-seed", fmt.Sprint(runs), "-save", dir, "-undecided", "20s", "-test.timeout", "5m")
			out, err := run.CombinedOutput()
			if err == nil {
				continue
			}
			if line := caught.Find(out); line != nil {
				t.Logf("%s\ncaught in run %d, after %v: %s", m.What, runs, time.Since(began).Round(time.Second), short(string(line)))
				return
			}
			t.Logf("run %d says nothing: %s", runs, short(string(out)))
		}
	}
	t.Errorf("%s\nnot caught in %d runs", m.What, runs)
}

func short(s string) string {
	s = strings.TrimSpace(s)
	return s[:min(300, len(s))]
}
