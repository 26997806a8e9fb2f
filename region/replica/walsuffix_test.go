package replica

import (
	"errors"
	"testing"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"
)

// A follower takes back the end of its log when a new leader has another one.
// raft-wal v0.4.0 then wrote no index into the file that it closed, and after a
// restart the entries before were unreadable: hashicorp/raft panicked at start
// (https://github.com/hashicorp/raft-wal/issues/31).
func TestALogWhoseEndWasTakenBackOpensAgain(t *testing.T) {
	dir := t.TempDir()
	within := func(f func(*wal.WAL)) {
		t.Helper()
		db := &metadb.BoltMetaDB{}
		w, err := wal.Open(dir, wal.WithMetaStore(db), wal.WithSegmentSize(1<<20))
		if err != nil {
			t.Fatal(err)
		}
		f(w)
		if err := errors.Join(w.Close(), db.Close()); err != nil {
			t.Fatal(err)
		}
	}
	within(func(w *wal.WAL) {
		for i := range uint64(10) {
			if err := w.StoreLog(&raft.Log{Index: i + 1, Term: 1}); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.DeleteRange(6, 10); err != nil {
			t.Fatal(err)
		}
		if err := w.StoreLog(&raft.Log{Index: 6, Term: 2}); err != nil {
			t.Fatal(err)
		}
	})
	within(func(w *wal.WAL) {
		for i, term := range []uint64{1, 1, 1, 1, 1, 2} {
			var l raft.Log
			if err := w.GetLog(uint64(i+1), &l); err != nil || l.Term != term {
				t.Errorf("entry %d: term %d, %v; want %d", i+1, l.Term, err, term)
			}
		}
	})
}
