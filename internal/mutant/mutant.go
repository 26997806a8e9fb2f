// Package mutant takes rules out of the code for tests of tests: a mutant is a
// text file that says which lines of which files are replaced by what, and it
// is compiled by `go test -overlay`, so the shipped files hold no seam for it.
//
// The file's first line says what is broken. Then come headers "runs: A,B" (what
// to run, as the tests understand it), "package: PATH" (whose tests they are, if
// not those of the working directory), "KEY: VALUE" of the tests' own, and
// edits: "file: PATH", and any number of
//
//	<<<<
//	text that is in the file exactly once
//	====
//	what stands there instead
//	>>>>
package mutant

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// Mutant takes a rule out of the code.
type Mutant struct {
	// Name is the file's, What its first line.
	Name, What string
	Runs       []string
	// Headers are the other ones.
	Headers map[string]string
	edits   []edit
}

// edit replaces a text that must be in the file exactly once.
type edit struct{ file, old, new string }

// All reads the mutants of a directory, by name.
func All(dir string) ([]Mutant, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("%s has no mutants", dir)
	}
	var out []Mutant
	for _, p := range paths {
		m, err := read(p)
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

var header = regexp.MustCompile(`^([a-z]+): (.+)$`)

func read(path string) (Mutant, error) {
	m := Mutant{Name: strings.TrimSuffix(filepath.Base(path), ".txt"), Headers: map[string]string{}}
	b, err := os.ReadFile(path)
	if err != nil {
		return m, err
	}
	var e *edit
	var to *string
	for i, line := range strings.Split(strings.TrimSuffix(string(b), "\n"), "\n") {
		h := header.FindStringSubmatch(line)
		switch {
		case i == 0:
			m.What = line
		case line == "<<<<" && e != nil && to == nil:
			to = &e.old
		case line == "====" && to != nil:
			to = &e.new
		case line == ">>>>" && to != nil:
			m.edits = append(m.edits, *e)
			e, to = &edit{file: e.file}, nil
		case to != nil:
			*to += line + "\n"
		case h == nil:
			return m, fmt.Errorf("%s: line %d is not understood: %q", path, i+1, line)
		case h[1] == "runs":
			m.Runs = strings.Split(h[2], ",")
		case h[1] == "file":
			e = &edit{file: h[2]}
		default:
			m.Headers[h[1]] = h[2]
		}
	}
	if len(m.edits) == 0 || len(m.Runs) == 0 {
		return m, fmt.Errorf("%s: has no edit, or does not say what to run", path)
	}
	return m, nil
}

// Overlay writes the mutated files to dir, and go's -overlay file, whose path it
// returns. root is the module's directory. An edit that does not fit the code
// any more is an error.
func (m Mutant) Overlay(root, dir string) (string, error) {
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
			return "", fmt.Errorf("%s has the text that mutant %s replaces %d times, not once; adapt the mutant to the code:\n%s", e.file, m.Name, n, e.old)
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

// Build compiles the tests of the mutant's package, or of the one in the working
// directory, with the mutant in them, and returns the program's path in dir.
func (m Mutant) Build(ctx context.Context, root, dir string) (string, error) {
	overlay, err := m.Overlay(root, dir)
	if err != nil {
		return "", err
	}
	binary, pkg := filepath.Join(dir, "mutant.test"), "."
	if of := m.Headers["package"]; of != "" {
		pkg = "./" + filepath.ToSlash(filepath.Join(root, of))
	}
	if out, err := exec.CommandContext(ctx, "go", "test", "-c", "-overlay", overlay, "-o", binary, pkg).CombinedOutput(); err != nil {
		return "", fmt.Errorf("mutant %s does not compile: %w\n%s", m.Name, err, out)
	}
	return binary, nil
}
