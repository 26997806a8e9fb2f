package load

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/internal/clusterfile"
)

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cluster.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFileUnderTheEnvironment(t *testing.T) {
	path := write(t, clusterfile.Example())
	t.Setenv("HEADLEASE_D", "7s")
	t.Setenv("HEADLEASE_TIMNG", "calm")
	f, warnings, err := File(path)
	if err != nil || f.D != 7*time.Second || f.Cluster != "example" {
		t.Errorf("%+v, %v", f, err)
	}
	if len(warnings) != 1 || warnings[0] != "HEADLEASE_TIMNG names no key; did you mean HEADLEASE_TIMING?" {
		t.Errorf("warnings %q", warnings)
	}
}

func TestErrorsNameTheFile(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none.yaml")
	if _, _, err := File(missing); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), missing) {
		t.Errorf("missing: %v", err)
	}
	dir := t.TempDir()
	if _, _, err := File(dir); err == nil || err.Error() != "cluster file "+dir+" is a directory; name the file in it" {
		t.Errorf("directory: %v", err)
	}
	bad := write(t, clusterfile.Example()+"\nd2: 1s\n")
	_, _, err := File(bad)
	var e *clusterfile.Error
	if !errors.As(err, &e) || e.Source != bad || err.Error() != bad+": d2: unknown key; did you mean d?" {
		t.Errorf("bad: %v", err)
	}
	huge := write(t, strings.Repeat("#", maxSize+1))
	if _, _, err := File(huge); err == nil || !strings.Contains(err.Error(), "is it the right file?") {
		t.Errorf("huge: %v", err)
	}
}
