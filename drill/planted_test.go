package drill

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/headlease/headlease/drill/report"
	"github.com/headlease/headlease/drill/scenarios"
	"github.com/headlease/headlease/internal/mutant"
)

var (
	flagPlanted = flag.String("planted", "none", "which planted faults TestPlanted builds and drills: none, all, or names with commas between")
	flagSeeds   = flag.String("planted-seeds", "1,2", "seeds of their drills")
	flagSave    = flag.String("planted-save", "", "directory for the reports (testdata/planted keeps them)")
)

const (
	plantedDir = "testdata/planted"
	module     = ".."
)

func planted(t *testing.T) []mutant.Mutant {
	t.Helper()
	all, err := mutant.All(plantedDir)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// details are the violations of one of a mutant's rules.
func details(r *report.Report, m mutant.Mutant) []string {
	var out []string
	for _, d := range r.Details {
		if slices.Contains(strings.Split(m.Headers["rule"], ","), d.Rule) {
			out = append(out, d.Rule+": "+d.Text)
		}
	}
	return out
}

// TestPlantedFaultsFitTheCode: each still finds what it replaces, and names a
// scenario that is shipped; reports of its drills are kept, in which a reader
// sees the violation with what happened around it.
func TestPlantedFaultsFitTheCode(t *testing.T) {
	for _, m := range planted(t) {
		if _, err := m.Overlay(module, t.TempDir()); err != nil {
			t.Error(err)
		}
		if m.Headers["rule"] == "" {
			t.Errorf("%s does not say which rule it breaks", m.Name)
		}
		for _, s := range m.Runs {
			if !slices.Contains(scenarios.Names(), s) {
				t.Errorf("%s: there is no scenario %s", m.Name, s)
			}
		}
		kept, err := filepath.Glob(filepath.Join(plantedDir, m.Name+"-seed*.json"))
		if err != nil || len(kept) == 0 {
			t.Errorf("%s: %d reports are kept, %v", m.Name, len(kept), err)
		}
		for _, path := range kept {
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			var r report.Report
			if err := json.Unmarshal(raw, &r); err != nil {
				t.Errorf("%s: %v", path, err)
			}
			if r.Verdict != "FAILED" || len(details(&r, m)) == 0 {
				t.Errorf("%s: %s, and no violation of %s", path, r.Verdict, m.Headers["rule"])
			}
			var page bytes.Buffer
			if err := r.WriteHTML(&page); err != nil || !strings.Contains(page.String(), `<div class="violation"><strong>I`) {
				t.Errorf("%s: the page does not tell the violation, %v", path, err)
			}
		}
	}
}

// TestPlanted: a shipped drill reports each planted fault as a violation.
func TestPlanted(t *testing.T) {
	if *flagPlanted == "none" {
		t.Skip("`make planted` builds and drills them; it takes minutes")
	}
	for _, m := range planted(t) {
		if *flagPlanted != "all" && !slices.Contains(strings.Split(*flagPlanted, ","), m.Name) {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			dir := t.TempDir()
			overlay, err := m.Overlay(module, dir)
			if err != nil {
				t.Fatal(err)
			}
			binary := filepath.Join(dir, "headlease")
			if out, err := exec.CommandContext(t.Context(), "go", "build", "-overlay", overlay, "-o", binary, "../cmd/headlease").CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for _, scenario := range m.Runs {
				for seed := range strings.SplitSeq(*flagSeeds, ",") {
					drillPlanted(t, m, binary, scenario, seed)
				}
			}
		})
	}
}

func drillPlanted(t *testing.T, m mutant.Mutant, binary, scenario, seed string) {
	cmd := exec.CommandContext(t.Context(), binary, "drill", "run", scenario, "--seed", seed, "--json", "--dir", filepath.Join(t.TempDir(), "d"))
	var out, progress bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &progress
	err := cmd.Run()
	var r report.Report
	if jsonErr := json.Unmarshal(out.Bytes(), &r); jsonErr != nil {
		t.Errorf("%s, seed %s: no report: %v, %v\n%s", scenario, seed, jsonErr, err, progress.String())
		return
	}
	found := details(&r, m)
	if r.Verdict != "FAILED" || len(found) == 0 {
		t.Errorf("%s, seed %s: %s is not seen: %s, %q", scenario, seed, m.What, r.Verdict, r.Violations)
		return
	}
	t.Logf("%s, seed %s: %s", scenario, seed, found[0][:min(len(found[0]), 200)])
	if *flagSave != "" {
		path := filepath.Join(*flagSave, fmt.Sprintf("%s-seed%s.json", m.Name, seed))
		if err := os.WriteFile(path, out.Bytes(), 0o644); err != nil {
			t.Error(err)
		}
	}
}
