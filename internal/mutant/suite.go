package mutant

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Suite is the mutants of a directory, and the tests that are to catch them.
type Suite struct {
	// Dir is the mutants', Root the module's.
	Dir, Root string
}

func (s Suite) all(t *testing.T) []Mutant {
	t.Helper()
	all, err := All(s.Dir)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// FitTheCode fails where a mutant does not find what it replaces, or names a run
// that there is not.
func (s Suite) FitTheCode(t *testing.T, known func(m Mutant, run string) bool) {
	t.Helper()
	for _, m := range s.all(t) {
		if _, err := m.Overlay(s.Root, t.TempDir()); err != nil {
			t.Error(err)
		}
		for _, name := range m.Runs {
			if !known(m, name) {
				t.Errorf("%s: there is no run %q", m.Name, name)
			}
		}
	}
}

// Each builds the chosen mutants, a sub-test each: none, few (those with "few:
// yes", which are caught soon), all, or names with commas between. run runs the
// program in dir, which is the mutant's to use, and returns the line that tells
// what is broken; empty: it was not caught.
func (s Suite) Each(t *testing.T, chosen string, run func(t *testing.T, m Mutant, program, dir string) (line string)) {
	t.Helper()
	if chosen == "none" {
		return
	}
	names := strings.Split(chosen, ",")
	made := 0
	for _, m := range s.all(t) {
		switch {
		case chosen == "few" && m.Headers["few"] == "":
			continue
		case chosen != "few" && chosen != "all" && !slices.Contains(names, m.Name):
			continue
		}
		made++
		t.Run(m.Name, func(t *testing.T) {
			dir := t.TempDir()
			program, err := m.Build(t.Context(), s.Root, dir)
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			line := strings.TrimSpace(run(t, m, program, dir))
			if line == "" {
				t.Fatalf("%s\nnot caught, in %v", m.What, time.Since(began).Round(time.Second))
			}
			t.Logf("%s\ncaught after %v: %s", m.What, time.Since(began).Round(10*time.Millisecond), line[:min(300, len(line))])
		})
	}
	if made == 0 || chosen != "few" && chosen != "all" && made != len(names) {
		t.Errorf("%d of the mutants %q exist in %s", made, chosen, filepath.Base(s.Dir))
	}
}
