package replica

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/hashicorp/raft"
)

// lostData is what to do about a directory whose content cannot be trusted. It
// must not go on under its old Raft id: it would have forgotten what it
// acknowledged, and could elect a leader that lacks it [F3].
const lostData = "this server's data is lost: remove the server from its region, give it an empty data directory, and add it again"

// reconcile makes log and snapshots fit before Raft reads them, and refuses what
// does not. hashicorp/raft takes the newest snapshot that opens, whatever the log
// says, and panics at a gap between the two.
//
//   - A damaged snapshot is set aside if an older one and the log from there on
//     make up for it.
//   - A log that ends below the snapshot, or does not agree with it, was
//     overtaken by an installed snapshot and a crash came before its removal: it is
//     removed now. The write-ahead log takes no gap.
func (s *stores) reconcile() error {
	first, err := s.logs.FirstIndex()
	if err != nil {
		return fmt.Errorf("read the log's first index: %w", err)
	}
	last, err := s.logs.LastIndex()
	if err != nil {
		return fmt.Errorf("read the log's last index: %w", err)
	}
	names, err := s.snaps.names()
	if err != nil {
		return err
	}
	var (
		base *snapMeta
		bad  []snapName
		why  error // of the newest damaged one
	)
	for _, n := range names {
		m, f, err := s.snaps.openSound(n.String())
		if err == nil {
			if err := f.Close(); err != nil {
				return err
			}
			base = &m
			break
		}
		if !errors.Is(err, errDamaged) {
			return err
		}
		if why == nil {
			why = err
		}
		bad = append(bad, n)
	}
	var index uint64 // of base
	if base != nil {
		index = base.Index
	}
	if len(bad) > 0 && (first > index+1 || last < bad[0].index) {
		return fmt.Errorf("%w; the log has entries %d to %d and cannot make up for it; %s", why, first, last, lostData)
	}
	if last > 0 && first > index+1 {
		return fmt.Errorf("the log begins at entry %d and the newest snapshot in %s ends at %d: entries between them are missing; %s",
			first, s.snaps.dir, index, lostData)
	}
	for _, n := range bad {
		if err := s.snaps.setAside(n); err != nil {
			return fmt.Errorf("set a damaged snapshot aside: %w", err)
		}
	}
	if len(bad) > 0 {
		s.snaps.log.Warn("a damaged snapshot is set aside; going on from an older one and the log",
			"path", filepath.Join(s.snaps.dir, bad[0].String()+snapDamaged), "from", index, "error", why)
	}
	if base == nil {
		return nil
	}
	s.snaps.newest.Store(index)
	s.snaps.trust(base.ID)
	if last == 0 {
		return nil
	}
	overtaken := last < index
	if !overtaken && first <= index {
		var e raft.Log
		if err := s.logs.GetLog(index, &e); err != nil {
			return fmt.Errorf("read log entry %d: %w", index, err)
		}
		overtaken = e.Term != base.Term
	}
	if !overtaken {
		return nil
	}
	s.snaps.log.Info("the log was overtaken by an installed snapshot; removing it", "first", first, "last", last, "snapshot", index)
	if err := s.logs.DeleteRange(first, last); err != nil {
		return fmt.Errorf("remove the overtaken log: %w", err)
	}
	return nil
}
