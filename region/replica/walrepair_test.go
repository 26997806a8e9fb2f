package replica

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/fs"
	"github.com/hashicorp/raft-wal/metadb"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// fillTail appends entries to the log's last file as the log does, until it is
// full, and goes no further: the process ends before the next file is begun. It
// returns the newest entry and the file.
func fillTail(t *testing.T, dir string) (last uint64, file string) {
	t.Helper()
	db := &metadb.BoltMetaDB{}
	st, err := db.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	tail := st.Segments[len(st.Segments)-1]
	w, err := segment.NewFiler(dir, fs.New()).RecoverTail(tail)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for last = w.LastIndex(); ; {
		var batch []types.LogEntry
		for _, e := range entries(last+1, last+50, 1) {
			var b bytes.Buffer
			if err := (&wal.BinaryCodec{}).Encode(e, &b); err != nil {
				t.Fatal(err)
			}
			batch = append(batch, types.LogEntry{Index: e.Index, Data: b.Bytes()})
		}
		if err := w.Append(batch); err != nil {
			t.Fatal(err)
		}
		last += 50
		if full, _, err := w.Sealed(); err != nil {
			t.Fatal(err)
		} else if full {
			return last, filepath.Join(dir, segment.FileName(tail))
		}
	}
}

// lastCommit is where the newest commit frame of a segment begins.
func lastCommit(t *testing.T, raw []byte) int {
	t.Helper()
	end := len(bytes.TrimRight(raw, "\x00"))
	for i := (end - 1) / 8 * 8; i > 0; i -= 8 { // frames begin at multiples of 8
		if raw[i] == segment.FrameCommit && raw[i+1] == 0 && raw[i+2] == 0 && raw[i+3] == 0 {
			return i
		}
	}
	t.Fatal("no commit frame")
	return 0
}

// TestLogFilledRightBeforeACrash: raft-wal alone never takes an entry again.
func TestLogFilledRightBeforeACrash(t *testing.T) {
	for _, c := range []struct {
		name string
		cut  func(t *testing.T, file string)
		lost uint64 // entries that were not acknowledged
	}{
		{"after its append", func(*testing.T, string) {}, 0},
		{"in the middle of it", func(t *testing.T, file string) {
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			at := lastCommit(t, raw)
			copy(raw[at:], make([]byte, 8))
			if err := os.WriteFile(file, raw, 0o600); err != nil {
				t.Fatal(err)
			}
		}, 50},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			s := testStores(t, dir, false, nil)
			store(t, s, 1, 1200, 1) // some files
			if _, err := s.logs.trim(t.Context(), 1100); err != nil {
				t.Fatal(err)
			}
			if err := s.close(); err != nil {
				t.Fatal(err)
			}
			logDir := filepath.Join(dir, logName)
			last, file := fillTail(t, logDir)
			c.cut(t, file)
			last -= c.lost

			db := &metadb.BoltMetaDB{}
			w, err := wal.Open(logDir, wal.WithMetaStore(db))
			if err != nil {
				t.Fatal(err)
			}
			if err := w.StoreLogs([]*raft.Log{{Index: last + 1}}); err == nil {
				t.Error("raft-wal has learned it: repairTail may go")
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}

			for range 3 {
				s = testStores(t, dir, false, nil)
				contiguous(t, s, 1100, last)
				store(t, s, last+1, last+300, 1)
				last += 300
				contiguous(t, s, 1100, last)
				if err := s.close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}
