package replica

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/hashicorp/raft-wal/fs"
	"github.com/hashicorp/raft-wal/metadb"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// repairTail makes a write-ahead log usable whose process ended between the
// append that filled a file and the beginning of the next one, which raft-wal
// v0.4.2 does afterwards, in the background. It then opens the log with a full
// last file and never begins another: every append fails with "segment is
// sealed", after each restart again. The same follows when that append was itself
// cut off by the crash (docs/decisions/0045).
//
// The entries of such a file are copied into a new one with room for more, which
// then takes its place; a crash on the way changes nothing.
func repairTail(dir string, db *metadb.BoltMetaDB, segmentSize int) (repaired bool, err error) {
	st, err := db.Load(dir)
	if err != nil || len(st.Segments) == 0 {
		return false, err
	}
	tail := &st.Segments[len(st.Segments)-1]
	if !tail.SealTime.IsZero() {
		return false, nil
	}
	files := segment.NewFiler(dir, fs.New())
	whole := *tail
	whole.MinIndex = tail.BaseIndex // to read entries that are removed, too: the new file begins as the old one
	old, err := files.RecoverTail(whole)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil // the log makes it
	}
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, old.Close()) }()
	full, _, err := old.Sealed()
	if err != nil || !full {
		return false, err
	}

	next := *tail
	next.ID, next.CreateTime = st.NextSegmentID, time.Now()
	entries, size, err := readSegment(old, tail.BaseIndex)
	if err != nil {
		return false, fmt.Errorf("read the log's last file: %w", err)
	}
	// An index of 4 bytes an entry ends a full file.
	next.SizeLimit = uint32(size + 16*len(entries) + segmentSize)
	if err := files.Delete(next.BaseIndex, next.ID); err != nil && !errors.Is(err, os.ErrNotExist) {
		return false, err // left by a crash on the way
	}
	w, err := files.Create(next)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	if err := w.Append(entries); err != nil {
		return false, err
	}
	*tail = next
	st.NextSegmentID++
	return true, db.CommitState(st)
}

func readSegment(r types.SegmentWriter, first uint64) (entries []types.LogEntry, size int, err error) {
	for i := first; i <= r.LastIndex(); i++ {
		b, err := r.GetLog(i)
		if err != nil {
			return nil, 0, fmt.Errorf("entry %d: %w", i, err)
		}
		e := types.LogEntry{Index: i, Data: append([]byte(nil), b.Bs...)}
		_ = b.Close()
		entries = append(entries, e)
		size += len(e.Data)
	}
	return entries, size, nil
}
