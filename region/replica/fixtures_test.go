package replica

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// TestOlderVersionsDataIsRead: a directory that an older version wrote, built
// from its commit (scripts/fixture.sh), means to this version what it meant to
// that one: the snapshot, and the log after it.
func TestOlderVersionsDataIsRead(t *testing.T) {
	fixtures, err := filepath.Glob(filepath.Join("testdata", "fixtures", "*", "want.json"))
	if err != nil || len(fixtures) == 0 {
		t.Fatalf("no fixtures: %v", err)
	}
	for _, want := range fixtures {
		dir := filepath.Dir(want)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			c := newCluster(t, nil, []string{"eu-1"}, nil)
			unpack(t, filepath.Join(dir, "data.tar.gz"), c.dir)
			n := c.open("eu-1")
			n.run()
			c.leader()
			got := dump(t, n.r.View())
			c.stop()
			if n.obs.restored != 1 {
				t.Errorf("restored %d snapshots, want 1", n.obs.restored)
			}
			raw, err := os.ReadFile(want)
			if err != nil {
				t.Fatal(err)
			}
			compare(t, raw, got)
		})
	}
}

// compare reports what differs, part by part.
func compare(t *testing.T, want, got []byte) {
	t.Helper()
	var w, g map[string]any
	if err := errors.Join(json.Unmarshal(want, &w), json.Unmarshal(got, &g)); err != nil {
		t.Fatal(err)
	}
	if len(w) == 0 || len(w) != len(g) {
		t.Errorf("%d parts, want %d", len(g), len(w))
	}
	for part, value := range w {
		if !reflect.DeepEqual(value, g[part]) {
			t.Errorf("%s:\n%v\nwant\n%v", part, g[part], value)
		}
	}
}

// unpack writes a tar archive of regular files below dir.
func unpack(t *testing.T, archive, dir string) {
	t.Helper()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		path := filepath.Join(dir, filepath.FromSlash(h.Name))
		if !filepath.IsLocal(filepath.FromSlash(h.Name)) {
			t.Fatalf("%s leaves the directory", h.Name)
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
