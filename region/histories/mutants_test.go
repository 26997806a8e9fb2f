package histories

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	flagMutants    = flag.String("mutants", "few", "which mutants TestMutants makes: none, few, all, or names with commas between")
	flagMutantRuns = flag.Int("mutant-runs", 40, "runs of a mutant before it counts as not caught")
)

// fewMutants are caught within a run or two.
var fewMutants = []string{"F17-no-memory", "F7-no-check", "keepalive-does-not-exclude-expiry"}

// mutant takes a rule out of the code.
type mutant struct {
	name, what string
	scenarios  []string
	edits      []edit
}

// edit replaces a text that must be in the file exactly once.
type edit struct{ file, old, new string }

const root = "../.."

func readMutant(path string) (mutant, error) {
	m := mutant{name: strings.TrimSuffix(filepath.Base(path), ".txt")}
	b, err := os.ReadFile(path)
	if err != nil {
		return m, err
	}
	var e *edit
	var to *string
	for i, line := range strings.Split(strings.TrimSuffix(string(b), "\n"), "\n") {
		switch {
		case i == 0:
			m.what = line
		case line == "<<<<" && e != nil:
			to = &e.old
		case line == "====" && to != nil:
			to = &e.new
		case line == ">>>>" && to != nil:
			m.edits = append(m.edits, *e)
			e, to = &edit{file: e.file}, nil
		case to != nil:
			*to += line + "\n"
		case strings.HasPrefix(line, "runs: "):
			m.scenarios = strings.Split(strings.TrimPrefix(line, "runs: "), ",")
		case strings.HasPrefix(line, "file: "):
			e = &edit{file: strings.TrimPrefix(line, "file: ")}
		default:
			return m, fmt.Errorf("%s: line %d is not understood: %q", path, i+1, line)
		}
	}
	if len(m.edits) == 0 || len(m.scenarios) == 0 {
		return m, fmt.Errorf("%s: has no edit, or does not say which scenarios to run", path)
	}
	return m, nil
}

// overlay writes the mutated files and go's -overlay file.
func (m mutant) overlay(dir string) (string, error) {
	files := map[string]string{} // by path in the module
	for _, e := range m.edits {
		src, ok := files[e.file]
		if !ok {
			b, err := os.ReadFile(filepath.Join(root, e.file))
			if err != nil {
				return "", err
			}
			src = string(b)
		}
		old, fresh := strings.TrimSuffix(e.old, "\n"), strings.TrimSuffix(e.new, "\n")
		if n := strings.Count(src, old); n != 1 {
			return "", fmt.Errorf("%s has the text that mutant %s replaces %d times, not once; adapt testdata/mutants/%s.txt to the code:\n%s",
				e.file, m.name, n, m.name, e.old)
		}
		files[e.file] = strings.Replace(src, old, fresh, 1)
	}
	replace := map[string]string{}
	for file, src := range files {
		from, err := filepath.Abs(filepath.Join(root, file))
		if err != nil {
			return "", err
		}
		to := filepath.Join(dir, strings.ReplaceAll(file, "/", "-"))
		if err := os.WriteFile(to, []byte(src), 0o600); err != nil {
			return "", err
		}
		replace[from] = to
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, b, 0o600)
}

func allMutants(t *testing.T) []mutant {
	t.Helper()
	paths, err := filepath.Glob("testdata/mutants/*.txt")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no mutants: %v", err)
	}
	var out []mutant
	for _, p := range paths {
		m, err := readMutant(p)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

// TestMutantsFitTheCode: each mutant still finds what it replaces.
func TestMutantsFitTheCode(t *testing.T) {
	for _, m := range allMutants(t) {
		if _, err := m.overlay(t.TempDir()); err != nil {
			t.Error(err)
		}
		for _, name := range m.scenarios {
			if !slices.ContainsFunc(scenarios, func(s scenario) bool { return s.name == name }) {
				t.Errorf("%s: there is no scenario %q", m.name, name)
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
		if *flagMutants != "all" && !slices.Contains(chosen, m.name) {
			continue
		}
		found++
		t.Run(m.name, func(t *testing.T) { m.run(t) })
	}
	if *flagMutants != "all" && found != len(chosen) {
		t.Errorf("%d of %v exist", found, chosen)
	}
}

func (m mutant) run(t *testing.T) {
	dir := t.TempDir()
	overlay, err := m.overlay(dir)
	if err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(dir, "mutant.test")
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-overlay", overlay, "-o", binary, ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("the mutant does not compile: %v\n%s", err, out)
	}
	began, runs := time.Now(), 0
	for runs < *flagMutantRuns {
		for _, sc := range m.scenarios {
			runs++
			run := exec.CommandContext(t.Context(), binary, "-test.run", "^TestHistories$/^"+sc+"$",
				"-runs", "1", "-seed", fmt.Sprint(runs), "-save", dir, "-undecided", "20s", "-test.timeout", "5m")
			out, err := run.CombinedOutput()
			if err == nil {
				continue
			}
			if line := caught.Find(out); line != nil {
				t.Logf("%s\ncaught in run %d, after %v: %s", m.what, runs, time.Since(began).Round(time.Second), short(string(line)))
				return
			}
			t.Logf("run %d says nothing: %s", runs, short(string(out)))
		}
	}
	t.Errorf("%s\nnot caught in %d runs", m.what, runs)
}

func short(s string) string {
	s = strings.TrimSpace(s)
	return s[:min(300, len(s))]
}
