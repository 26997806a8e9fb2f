package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"headlease": main, "call": call, "fetch": fetch})
}

// TestScripts runs testdata/script. Beside testscript's own commands there is
//
//	hashdir DIR FILE
//
// which lists DIR's entries with their modes and the hashes of their contents
// in FILE; compare two of them with cmp to show that nothing was changed. The
// other commands, and the programs call and fetch, are in script_cmds_test.go and
// script_fetch_test.go.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			for _, kv := range os.Environ() { // a developer's own settings are none of the scripts'
				if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "HEADLEASE_") {
					env.Setenv(name, "")
				}
			}
			env.Values[occupiedKey{}] = occupied{}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"await": await, "fill": fill, "hashdir": hashdir, "occupy": occupy, "ports": ports, "setformat": setformat, "vacate": vacate,
		},
	})
}

func hashdir(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: hashdir DIR FILE")
	}
	listing, err := listDir(ts.MkAbs(args[0]))
	ts.Check(err)
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), []byte(listing), 0o600))
}

// listDir lists a directory: one line per entry, with its mode and, of a file,
// its content's hash.
func listDir(dir string) (string, error) {
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && path == dir {
			b.WriteString("absent\n")
			return nil
		}
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		sum := "-"
		switch {
		case info.Mode().IsRegular():
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			sum = fmt.Sprintf("%x", sha256.Sum256(data))
		case info.Mode()&fs.ModeSymlink != 0:
			if sum, err = os.Readlink(path); err != nil {
				return err
			}
		}
		fmt.Fprintf(&b, "%v %s %s\n", info.Mode(), sum, name)
		return nil
	})
	return b.String(), err
}

func TestListDirSeesEveryChange(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "a")
	seen := map[string]string{}
	look := func(what string) {
		t.Helper()
		l, err := listDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		if before, dup := seen[l]; dup {
			t.Errorf("%s looks like %s", what, before)
		}
		seen[l] = what
	}
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	look("empty")
	do(os.WriteFile(file, nil, 0o600))
	look("new file")
	do(os.WriteFile(file, []byte("x"), 0o600))
	look("content")
	do(os.Chmod(file, 0o644))
	look("mode")
	do(os.Rename(file, file+"b"))
	look("name")
	do(os.Mkdir(file, 0o700))
	look("directory")
	do(os.RemoveAll(dir))
	look("absent")
}
