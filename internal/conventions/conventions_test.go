package conventions

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// purePackages reads the table of docs/architecture.md.
func purePackages(t *testing.T) []string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(root, "docs/architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	var pure []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| pure \\|").FindAllStringSubmatch(string(page), -1) {
		pure = append(pure, row[1])
	}
	if len(pure) < 10 {
		t.Fatalf("only %d pure packages found in the table of docs/architecture.md: %v", len(pure), pure)
	}
	return pure
}

// A pure package has no goroutine and no channel. (What it may import and call
// is for depguard and forbidigo.)
func TestPurePackagesHaveNoGoroutinesAndChannels(t *testing.T) {
	for _, pkg := range purePackages(t) {
		files, err := filepath.Glob(filepath.Join(root, pkg, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		if len(files) == 0 {
			t.Errorf("docs/architecture.md lists %s, which has no files", pkg)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			for _, finding := range impurities(t, file, nil) {
				t.Error(finding)
			}
		}
	}
}

func impurities(t *testing.T, file string, src any) []string {
	t.Helper()
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	ast.Inspect(parsed, func(n ast.Node) bool {
		what := ""
		switch n := n.(type) {
		case *ast.GoStmt:
			what = "starts a goroutine"
		case *ast.ChanType:
			what = "has a channel"
		case *ast.SelectStmt:
			what = "selects"
		case *ast.SendStmt:
			what = "sends on a channel"
		case *ast.UnaryExpr:
			if n.Op == token.ARROW {
				what = "receives from a channel"
			}
		}
		if what != "" {
			found = append(found, fmt.Sprintf("%s: a pure package %s", fset.Position(n.Pos()), what))
		}
		return true
	})
	return found
}

func TestImpuritiesAreSeen(t *testing.T) {
	for body, want := range map[string]int{
		"x := 1; _ = x":                0,
		"go f()":                       1,
		"var c chan int; _ = c":        1,
		"c <- 1":                       1,
		"<-c":                          1,
		"select {}":                    1,
		"for range (<-chan int)(c) {}": 1,
	} {
		if got := impurities(t, "x.go", "package x\nfunc g() {\n"+body+"\n}"); len(got) != want {
			t.Errorf("%s: %v", body, got)
		}
	}
}

// The linter's lists name every pure package and no other.
func TestLinterKnowsThePurePackages(t *testing.T) {
	config, err := os.ReadFile(filepath.Join(root, ".golangci.yml"))
	if err != nil {
		t.Fatal(err)
	}
	pure := purePackages(t)
	slices.Sort(pure)

	_, rule, _ := strings.Cut(string(config), "\n        pure:\n")
	rule, _, _ = strings.Cut(rule, "deny:")
	var guarded []string
	for _, m := range regexp.MustCompile(`"\*\*/(\S+)/\*\.go"`).FindAllStringSubmatch(rule, -1) {
		guarded = append(guarded, m[1])
	}
	slices.Sort(guarded)
	if !slices.Equal(guarded, pure) {
		t.Errorf("depguard guards %v\npure are      %v", guarded, pure)
	}

	m := regexp.MustCompile(`path-except: \^\(([^)]*)\)/`).FindStringSubmatch(string(config))
	if m == nil {
		t.Fatal("no rule for the pure packages' clock")
	}
	timeless := strings.Split(m[1], "|")
	slices.Sort(timeless)
	if !slices.Equal(timeless, pure) {
		t.Errorf("forbidigo keeps the clock from %v\npure are                        %v", timeless, pure)
	}
}

// A test sleeps in a synctest bubble only, where sleeping is how time passes:
// the file imports testing/synctest, or a comment on the line says "virtual".
func TestSleepOnlyInVirtualTime(t *testing.T) {
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != root {
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, finding := range sleeps(t, path, string(src)) {
			t.Error(finding)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func sleeps(t *testing.T, file, src string) []string {
	t.Helper()
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range parsed.Imports {
		if i.Path.Value == `"testing/synctest"` {
			return nil
		}
	}
	lines := strings.Split(src, "\n")
	var found []string
	ast.Inspect(parsed, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok || sel.Sel.Name != "Sleep" {
			return true
		}
		if pkg, ok := sel.X.(*ast.Ident); !ok || pkg.Name != "time" {
			return true
		}
		at := fset.Position(n.Pos())
		if _, comment, _ := strings.Cut(lines[at.Line-1], "//"); !strings.Contains(comment, "virtual") {
			found = append(found, fmt.Sprintf("%s: a test sleeps in real time; use testing/synctest or wait for what it waits for", at))
		}
		return true
	})
	return found
}

func TestSleepsAreSeen(t *testing.T) {
	const sleepy = "package x\nimport \"time\"\nfunc f() { time.Sleep(1) }"
	if len(sleeps(t, "x_test.go", sleepy)) != 1 {
		t.Error("a sleep was missed")
	}
	if len(sleeps(t, "x_test.go", strings.Replace(sleepy, "import", "import \"testing/synctest\"\nimport", 1))) != 0 {
		t.Error("a sleep in a bubble was reported")
	}
	if len(sleeps(t, "x_test.go", sleepy+" // virtual: called in a bubble")) != 0 {
		t.Error("a sleep said to be virtual was reported")
	}
}
