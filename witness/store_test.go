package witness

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/headlease/headlease/global/register"
)

// hashDir is a hash over every name and byte below dir.
func hashDir(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		h.Write([]byte(path + "\x00"))
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
	return hex.EncodeToString(h.Sum(nil))
}

// made returns a directory with a witness's data.
func made(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "w1")
	r := start(t, dir, &disk{}).setUp(t)
	r.mustPrepare(t, prepareOf(eu, 7, "p"))
	if err := r.store.close(); err != nil {
		t.Fatal(err)
	}
	return dir
}

// edit changes the data behind the witness's back.
func edit(t *testing.T, dir string, change func(meta, registers *bolt.Bucket) error) {
	t.Helper()
	db, err := bolt.Open(filepath.Join(dir, storeFile), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error { return change(tx.Bucket(bucketMeta), tx.Bucket(bucketRegisters)) })
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestForeignDataIsRefusedUntouched(t *testing.T) {
	write := func(t *testing.T, dir, name string, raw []byte) {
		t.Helper()
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		prepare func(t *testing.T, dir string)
		config  storeConfig
		want    string // DIR stands for the directory
	}{
		"another witness": {config: storeConfig{name: "w2", cluster: "test"},
			want: `data_dir: DIR belongs to witness "w1", not to "w2"; name the right directory, or an empty one for a new witness`},
		"another cluster": {config: storeConfig{name: "w1", cluster: "prod"},
			want: `data_dir: DIR belongs to cluster "test", not to "prod"; name the right directory, or an empty one for a new witness`},
		"another format": {
			prepare: func(t *testing.T, dir string) {
				edit(t, dir, func(meta, _ *bolt.Bucket) error { return meta.Put(keyFormat, number(9)) })
			},
			want: `data_dir: DIR has format 9, this build knows format 1; start the build that wrote it`},
		"a damaged register": {
			prepare: func(t *testing.T, dir string) {
				edit(t, dir, func(_, registers *bolt.Bucket) error { return registers.Put([]byte("q"), []byte{0xff}) })
			},
			want: `is damaged at its register "q"`},
		"a damaged configuration": {
			prepare: func(t *testing.T, dir string) {
				edit(t, dir, func(meta, _ *bolt.Bucket) error { return meta.Put(keyConfiguration, []byte{0xff}) })
			},
			want: `is damaged at its configuration`},
		"no incarnation": {
			prepare: func(t *testing.T, dir string) {
				edit(t, dir, func(meta, _ *bolt.Bucket) error { return meta.Delete(keyIncarnation) })
			},
			want: `is damaged at its meta`},
		"no bbolt file": {
			prepare: func(t *testing.T, dir string) { write(t, dir, storeFile, bytes.Repeat([]byte("nonsense"), 4096)) },
			want:    `is not a witness's store or is damaged`},
		"cut short": {
			prepare: func(t *testing.T, dir string) { write(t, dir, storeFile, []byte("short")) },
			want:    `is not a witness's store or is damaged`},
		"a region's directory": {
			prepare: func(t *testing.T, dir string) {
				if err := os.Remove(filepath.Join(dir, storeFile)); err != nil {
					t.Fatal(err)
				}
				write(t, dir, "raft.db", []byte("x"))
			},
			want: `data_dir: DIR has "raft.db" in it and no witness.db: it is not a witness's; name an empty directory or the right one`},
		"another bbolt file": {
			prepare: func(t *testing.T, dir string) {
				if err := os.Remove(filepath.Join(dir, storeFile)); err != nil {
					t.Fatal(err)
				}
				db, err := bolt.Open(filepath.Join(dir, storeFile), 0o600, nil)
				if err != nil {
					t.Fatal(err)
				}
				err = db.Update(func(tx *bolt.Tx) error { _, err := tx.CreateBucket([]byte("logs")); return err })
				if err != nil {
					t.Fatal(err)
				}
				if err := db.Close(); err != nil {
					t.Fatal(err)
				}
			},
			want: `is a bbolt file with bucket "logs", not a witness's store`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := made(t)
			if c.prepare != nil {
				c.prepare(t, dir)
			}
			before := hashDir(t, dir)
			cfg := c.config
			if cfg.name == "" {
				cfg.name, cfg.cluster = "w1", "test"
			}
			cfg.dir, cfg.disk = dir, &disk{}
			s, _, err := openStore(cfg)
			if err == nil {
				_ = s.close()
				t.Fatal("taken")
			}
			if want := strings.ReplaceAll(c.want, "DIR", dir); !strings.Contains(err.Error(), want) {
				t.Errorf("message %q, want %q in it", err, want)
			}
			if hashDir(t, dir) != before {
				t.Error("the refused directory was changed")
			}
		})
	}
}

func TestTwoProcessesOnOneDirectory(t *testing.T) {
	r := newRig(t)
	before := hashDir(t, r.dir)
	_, _, err := openStore(storeConfig{dir: r.dir, name: "w1", cluster: "test", disk: &disk{}})
	if want := "data_dir: " + r.dir + " is in use by another process; stop it, or give each witness a directory of its own"; err == nil || err.Error() != want {
		t.Errorf("message %q, want %q", err, want)
	}
	if hashDir(t, r.dir) != before {
		t.Error("the directory was changed")
	}
}

func TestUnwritableDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"", file, filepath.Join(file, "below")} {
		if _, _, err := openStore(storeConfig{dir: dir, name: "w1", cluster: "test", disk: &disk{}}); err == nil || !strings.Contains(err.Error(), "data_dir: ") {
			t.Errorf("%q: %v", dir, err)
		}
	}
}

func TestWhatIsWrittenIsReadAgain(t *testing.T) {
	dir := made(t)
	s, got, err := openStore(storeConfig{dir: dir, name: "w1", cluster: "test", disk: &disk{}})
	if err != nil {
		t.Fatal(err)
	}
	if want := (register.Record{Promised: ballot(7, eu)}); got.registers["p"] != want || len(got.registers) != 1 {
		t.Errorf("registers %v", got.registers)
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
	// A crash between the file's creation and its first transaction.
	empty := filepath.Join(t.TempDir(), "w")
	if err := os.MkdirAll(empty, 0o700); err != nil {
		t.Fatal(err)
	}
	db, err := bolt.Open(filepath.Join(empty, storeFile), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	s, fresh, err := openStore(storeConfig{dir: empty, name: "w1", cluster: "test", disk: &disk{}})
	if err != nil {
		t.Fatalf("after a crash while it was made: %v", err)
	}
	if fresh.incarnation == 0 || fresh.incarnation == got.incarnation || fresh.life == 0 || fresh.previous != 0 || fresh.writes != 1 {
		t.Errorf("a new witness is %+v", fresh.identity)
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
}

func TestAfterAFailedWriteTheStoreWritesNothing(t *testing.T) {
	d := &disk{}
	s, got, err := openStore(storeConfig{dir: filepath.Join(t.TempDir(), "w1"), name: "w1", cluster: "test", disk: d})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.close() }()
	broken := errors.New("input/output error")
	d.set(func(string) error { return broken })
	records := map[string]register.Record{"p": {Promised: ballot(1, eu)}}
	if err := s.write(records, got.writes+1); !errors.Is(err, broken) {
		t.Fatalf("write on a broken disk: %v", err)
	}
	d.set(nil)
	before := hashDir(t, filepath.Dir(s.path))
	if err := s.write(records, got.writes+1); !errors.Is(err, broken) {
		t.Errorf("write after a failed one: %v", err)
	}
	if hashDir(t, filepath.Dir(s.path)) != before {
		t.Error("it was written all the same")
	}
}
