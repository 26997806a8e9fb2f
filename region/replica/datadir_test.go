package replica

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// treeHash covers names, modes and contents of everything under dir.
func treeHash(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		fmt.Fprintln(h, path, info.Mode(), info.ModTime().UnixNano())
		if d.Type().IsRegular() {
			raw, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			h.Write(raw)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

func dirConfig(t *testing.T, dir string) Config {
	t.Helper()
	return Config{
		Name: "eu-1", Cluster: "c", Region: "eu", DataDir: dir, Stream: newSimNet().listen("eu-1"), Clock: goClock{time.Now()},
		Terms: asker{}, Logger: slog.New(slog.DiscardHandler), segmentSize: 256 << 10,
	}
}

func mustOpen(t *testing.T, cfg Config) *Replica {
	t.Helper()
	r, err := Open(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestRefusedDirectories: another server's, region's or format's directory, or
// one in use, is refused with a message that names the field and the remedy, and
// nothing is changed on disk.
func TestRefusedDirectories(t *testing.T) {
	write := func(name, content string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	made := func(t *testing.T, dir string) {
		if err := mustOpen(t, dirConfig(t, dir)).Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name string
		make func(t *testing.T, dir string)
		edit func(*Config)
		want string
	}{
		{"another server", made, func(c *Config) { c.Name = "eu-2" },
			`data directory DIR: belongs to server "eu-1", not "eu-2"; give this server its own directory`},
		{"another cluster", made, func(c *Config) { c.Cluster = "d" },
			`data directory DIR: belongs to a server of cluster "c", not "d"; give this server its own directory`},
		{"another region", made, func(c *Config) { c.Region = "us" },
			`data directory DIR: belongs to a server of region "eu", not "us"; give this server its own directory`},
		{"another format", write(metaName, `{"format":9,"server":"eu-1","region":"eu","uuid":""}`), nil,
			`data directory DIR: format 9, this program reads format 1; use the program's version that made it, or an empty directory`},
		{"not ours", write("notes.txt", "x"), nil,
			`data directory DIR: not empty (notes.txt) and without server.json, so not a server's data; give an empty directory`},
		{"garbage", write(metaName, "{"), nil,
			`data directory DIR: server.json: not readable: unexpected EOF; restore it, or use an empty directory`},
		{"no uuid", write(metaName, `{"format":1,"cluster":"c","server":"eu-1","region":"eu","uuid":"x"}`), nil,
			`data directory DIR: server.json: uuid "x": invalid UUID length: 1; restore the file, or use an empty directory`},
		{"in use", func(t *testing.T, dir string) {
			r := mustOpen(t, dirConfig(t, dir))
			t.Cleanup(func() { _ = r.Close() })
		}, nil, `data directory DIR: in use by another process; stop that process, or give this server its own directory`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "d")
			tc.make(t, dir)
			before := treeHash(t, dir)
			cfg := dirConfig(t, dir)
			if tc.edit != nil {
				tc.edit(&cfg)
			}
			r, err := Open(context.Background(), cfg)
			if err == nil {
				_ = r.Close()
				t.Fatal("opened")
			}
			if got := strings.ReplaceAll(err.Error(), dir, "DIR"); got != tc.want {
				t.Errorf("got  %s\nwant %s", got, tc.want)
			}
			if after := treeHash(t, dir); after != before {
				t.Error("the directory was changed")
			}
		})
	}
}

// TestF3DirectoryKeepsItsID: the id lives and dies with the directory, also
// when the directory's making was cut short.
func TestF3DirectoryKeepsItsID(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, metaTemp+"cut"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	ids := make([]string, 3)
	for i := range ids {
		if i == 2 {
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
		}
		r := mustOpen(t, dirConfig(t, dir))
		ids[i] = r.RaftID()
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if ids[0] != ids[1] || ids[1] == ids[2] || !strings.HasPrefix(ids[0], "eu-1/") {
		t.Errorf("ids %v: want the same twice, then another", ids)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, metaTemp+"*")); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
}

// TestBootstrapAfterCrash: a crash between the two writes of a bootstrap leaves
// a directory that can be bootstrapped.
func TestBootstrapAfterCrash(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	r := mustOpen(t, dirConfig(t, dir))
	if err := r.stores.stable.SetUint64(keyCurrentTerm, 1); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	r = mustOpen(t, dirConfig(t, dir))
	if r.Initialised() {
		t.Fatal("half a bootstrap counts as a whole one")
	}
	if err := r.Bootstrap([]Server{{Name: "eu-1", RaftID: r.RaftID(), Voter: true}}); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	r = mustOpen(t, dirConfig(t, dir))
	if !r.Initialised() {
		t.Error("bootstrapped and not initialised")
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestValidateNamesAllFaults at once.
func TestValidateNamesAllFaults(t *testing.T) {
	err := Config{Name: "a/b", Timing: Timing{Heartbeat: time.Second, Election: time.Millisecond}, QueueLimit: -1}.Validate()
	if err == nil {
		t.Fatal("valid")
	}
	for _, want := range []string{
		`name: "a/b" contains a slash`, "cluster: empty", "region: empty", "data directory: empty", "stream: nil", "clock: nil", "terms: nil",
		"timing: election 1ms is under heartbeat 1s", "timing: leader lease 0s is under 5ms", "queue limit: -1",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in:\n%v", want, err)
		}
	}
}

// TestBootstrapLists: a list that cannot be this server's is refused.
func TestBootstrapLists(t *testing.T) {
	r := mustOpen(t, dirConfig(t, filepath.Join(t.TempDir(), "d")))
	defer func() { _ = r.Close() }()
	self := Server{Name: "eu-1", RaftID: r.RaftID(), Voter: true}
	for _, tc := range []struct {
		list []Server
		want string
	}{
		{nil, "is not among them"},
		{[]Server{{Name: "eu-1", RaftID: "eu-1/other", Voter: true}}, "made for another data directory"},
		{[]Server{self, self}, "listed twice"},
		{[]Server{self, {Name: "eu-2", RaftID: "eu-3/x", Voter: true}}, `raft id "eu-3/x" is not "eu-2/" with a uuid`},
		{[]Server{self, {Name: "eu-2", RaftID: "eu-2/", Voter: true}}, "with a uuid"},
		{[]Server{{Name: "eu-1", RaftID: r.RaftID()}}, "is to be a voter"},
	} {
		if err := r.Bootstrap(tc.list); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v: %v, want %q", tc.list, err, tc.want)
		}
	}
	if r.Initialised() {
		t.Error("a refused list initialised the server")
	}
}
