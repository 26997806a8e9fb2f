package replica

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
)

var oneServer = raft.Configuration{Servers: []raft.Server{{ID: "eu-1/x", Address: "eu-1"}}}

func writeSnap(t testing.TB, s *stores, index, term uint64, state []byte) string {
	t.Helper()
	sink, err := s.snaps.Create(1, index, term, oneServer, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sink.Write(state); err != nil {
		t.Fatal(err)
	}
	if err := sink.Close(); err != nil {
		t.Fatal(err)
	}
	if err := sink.Cancel(); err != nil { // as raft does not, after Close
		t.Error(err)
	}
	return sink.ID()
}

func shut(t testing.TB, s *stores) {
	t.Helper()
	if err := s.close(); err != nil {
		t.Error(err)
	}
}

func readSnap(s *stores, id string) ([]byte, error) {
	_, r, err := s.snaps.Open(id)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	return b, errors.Join(err, r.Close())
}

func TestSnapshotFilesRoundTrip(t *testing.T) {
	s := testStores(t, t.TempDir(), false, nil)
	defer shut(t, s)
	for i, size := range []int{1, snapPiece - 1, snapPiece, snapPiece + 1, 3*snapPiece + 7} {
		state := bytes.Repeat([]byte{1, 2, 3, byte(i)}, size)[:size]
		index := uint64(i + 10)
		id := writeSnap(t, s, index, 2, state)
		list, err := s.snaps.List()
		if err != nil {
			t.Fatal(err)
		}
		if len(list) != min(i+1, retainSnapshots) || list[0].ID != id || list[0].Index != index || list[0].Term != 2 ||
			list[0].Size != int64(size) || list[0].Configuration.Servers[0].ID != "eu-1/x" || s.snaps.newest.Load() != index {
			t.Fatalf("%d: %+v", i, list)
		}
		if got, err := readSnap(s, id); err != nil || !bytes.Equal(got, state) {
			t.Fatalf("%d bytes: %d, %v", size, len(got), err)
		}
	}
}

// TestHashicorpReadsOurSnapshots and we read its: a program can be replaced by
// an older one, and the other way.
func TestHashicorpReadsOurSnapshots(t *testing.T) {
	dir := t.TempDir()
	s := testStores(t, dir, false, nil)
	defer shut(t, s)
	theirs, err := raft.NewFileSnapshotStoreWithLogger(dir, 2, newHlog(s.snaps.log, "x"))
	if err != nil {
		t.Fatal(err)
	}
	id := writeSnap(t, s, 5, 1, []byte("state"))
	meta, r, err := theirs.Open(id)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); string(b) != "state" || err != nil || meta.Index != 5 {
		t.Errorf("%q, %v, %+v", b, err, meta)
	}
	_ = r.Close()
	_, trans := raft.NewInmemTransport("eu-1")
	sink, err := theirs.Create(1, 9, 2, oneServer, 1, trans)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(sink, "theirs"); err != nil {
		t.Fatal(err)
	}
	if err := sink.Close(); err != nil {
		t.Fatal(err)
	}
	if list, err := s.snaps.List(); err != nil || len(list) != 2 || list[0].Index != 9 {
		t.Errorf("%+v, %v", list, err)
	}
	if b, err := readSnap(s, sink.ID()); string(b) != "theirs" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
}

// TestF37DamagedSnapshotsAreNotServed: each byte of both files flipped, each
// length cut, files missing or empty: never opened, and another is asked for.
func TestF37DamagedSnapshotsAreNotServed(t *testing.T) {
	s := testStores(t, t.TempDir(), false, nil)
	defer shut(t, s)
	writeSnap(t, s, 3, 1, []byte("older"))
	id := writeSnap(t, s, 5, 1, []byte("the state of the region"))
	dir := filepath.Join(s.snaps.dir, id)
	try := func(what, file string, content []byte) {
		t.Helper()
		path := filepath.Join(dir, file)
		sound, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if content == nil {
			err = os.Remove(path)
		} else {
			err = os.WriteFile(path, content, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		if b, err := readSnap(s, id); err == nil {
			t.Errorf("%s of %s: opened, %q", what, file, b)
		} else if !errors.Is(err, errDamaged) || !strings.Contains(err.Error(), id) {
			t.Errorf("%s of %s: %v", what, file, err)
		}
		list, err := s.snaps.List()
		if err != nil || len(list) != 1 || list[0].Index != 3 {
			t.Errorf("%s of %s: listed %+v, %v", what, file, list, err)
		}
		select {
		case <-s.snaps.wanted:
		default:
			t.Errorf("%s of %s: no other snapshot is asked for", what, file)
		}
		clear(s.snaps.damaged)
		if err := os.WriteFile(path, sound, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{snapMetaName, snapStateName} {
		sound, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		try("absence", file, nil)
		end := len(sound)
		if file == snapMetaName {
			end-- // without its line feed it says the same
		}
		for n := range end {
			try(fmt.Sprintf("cut to %d", n), file, sound[:n:n])
			for bit := range 8 {
				flipped := bytes.Clone(sound)
				flipped[n] ^= 1 << bit
				if file == snapMetaName && sameMeta(sound, flipped) {
					continue // a letter's case in a field's name
				}
				try(fmt.Sprintf("bit %d of byte %d", bit, n), file, flipped)
			}
		}
		try("empty file", file, []byte{})
	}
	if b, err := readSnap(s, id); err != nil || len(b) == 0 {
		t.Fatalf("restored: %v: this test shows nothing", err)
	}
	// The next snapshot takes the place of a damaged one.
	if err := os.Remove(filepath.Join(dir, snapStateName)); err != nil {
		t.Fatal(err)
	}
	if _, err := readSnap(s, id); err == nil {
		t.Fatal("opened")
	}
	writeSnap(t, s, 8, 1, []byte("newer"))
	if names, _ := s.snaps.names(); len(names) != 2 || names[0].index != 8 || names[1].index != 3 {
		t.Errorf("%v", names)
	}
}

func sameMeta(a, b []byte) bool {
	var x, y snapMeta
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return false
	}
	return fmt.Sprintf("%+v", x) == fmt.Sprintf("%+v", y)
}

// TestAReaderKeepsARemovedSnapshot: what is being sent stays whole while newer
// snapshots push it out, and is not found any more.
func TestAReaderKeepsARemovedSnapshot(t *testing.T) {
	s := testStores(t, t.TempDir(), false, nil)
	defer shut(t, s)
	state := bytes.Repeat([]byte("0123456789abcdef"), 3*shrinkStep/16)
	id := writeSnap(t, s, 1, 1, state)
	_, r, err := s.snaps.Open(id)
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint64(3) {
		writeSnap(t, s, 10+i, 1, state)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, state) {
		t.Errorf("read %d of %d bytes, %v", len(got), len(state), err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(s.snaps.dir); len(left) != retainSnapshots || len(s.snaps.readers) != 0 || len(s.snaps.gone) != 0 {
		t.Errorf("left %v, readers %v, gone %v", left, s.snaps.readers, s.snaps.gone)
	}
}

// TestFailedSnapshotsLeaveNothing: a full disk at any write, an empty state, a
// stop.
func TestFailedSnapshotsLeaveNothing(t *testing.T) {
	state := make([]byte, 2*snapPiece+5)
	for writes := range 5 {
		disk := &cutDisk{op: opSnapshot, left: writes}
		s := testStores(t, t.TempDir(), false, disk)
		err := func() error {
			sink, err := s.snaps.Create(1, 5, 1, oneServer, 1, nil)
			if err != nil {
				return err
			}
			if _, err := sink.Write(state); err != nil {
				return errors.Join(err, sink.Cancel())
			}
			return sink.Close()
		}()
		if !errors.Is(err, errCut) {
			t.Fatalf("after %d writes: %v", writes, err)
		}
		left, _ := os.ReadDir(s.snaps.dir)
		if len(left) != 0 || s.snaps.newest.Load() != 0 {
			t.Errorf("after %d writes: %v is left", writes, left)
		}
		if s.guard.err != nil {
			t.Errorf("a failed snapshot stops the server: %v", s.guard.err)
		}
		_ = s.close()
	}
	s := testStores(t, t.TempDir(), false, nil)
	defer shut(t, s)
	sink, err := s.snaps.Create(1, 5, 1, oneServer, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := sink.Close(); err == nil || !strings.Contains(err.Error(), "empty") {
		t.Errorf("an empty snapshot: %v", err)
	}
	if sink, err = s.snaps.Create(1, 5, 1, oneServer, 1, nil); err != nil {
		t.Fatal(err)
	}
	s.snaps.halt()
	if _, err := sink.Write(state); !errors.Is(err, errStopping) {
		t.Errorf("during a stop: %v", err)
	}
	if err := sink.Cancel(); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(s.snaps.dir); len(left) != 0 {
		t.Errorf("%v is left", left)
	}
}

// TestReconcile: what log and snapshots may look like at a start.
func TestReconcile(t *testing.T) {
	damage := func(t *testing.T, s *stores, id string) {
		t.Helper()
		if err := os.Truncate(filepath.Join(s.snaps.dir, id, snapStateName), 2); err != nil {
			t.Fatal(err)
		}
	}
	trim := func(t *testing.T, s *stores, to uint64) {
		t.Helper()
		if _, err := s.logs.trim(t.Context(), to); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name   string
		make   func(t *testing.T, s *stores)
		refuse string // part of the error
		base   uint64
		first  uint64
	}{
		{name: "nothing", make: func(*testing.T, *stores) {}},
		{name: "log only", make: func(t *testing.T, s *stores) { store(t, s, 1, 50, 1) }, first: 1},
		{name: "snapshot within the log", make: func(t *testing.T, s *stores) {
			store(t, s, 1, 50, 1)
			writeSnap(t, s, 30, 1, []byte("x"))
			trim(t, s, 20)
		}, base: 30, first: 20},
		{name: "snapshot at the log's end", make: func(t *testing.T, s *stores) {
			store(t, s, 1, 50, 1)
			writeSnap(t, s, 50, 1, []byte("x"))
		}, base: 50, first: 1},
		{name: "log right behind the snapshot", make: func(t *testing.T, s *stores) {
			store(t, s, 1, 50, 1)
			writeSnap(t, s, 30, 1, []byte("x"))
			trim(t, s, 31)
		}, base: 30, first: 31},
		{name: "installed, the log not yet removed", make: func(t *testing.T, s *stores) {
			store(t, s, 1, 50, 1)
			writeSnap(t, s, 80, 2, []byte("x"))
		}, base: 80, first: 0},
		{name: "installed over a log that disagrees", make: func(t *testing.T, s *stores) {
			store(t, s, 1, 50, 1)
			writeSnap(t, s, 40, 2, []byte("x"))
		}, base: 40, first: 0},
		{name: "installed, the log removed", make: func(t *testing.T, s *stores) { writeSnap(t, s, 40, 2, []byte("x")) }, base: 40},
		{name: "newest damaged, the log makes up for it", make: func(t *testing.T, s *stores) {
			store(t, s, 1, 50, 1)
			writeSnap(t, s, 20, 1, []byte("x"))
			damage(t, s, writeSnap(t, s, 40, 1, []byte("xyz")))
			trim(t, s, 15)
		}, base: 20, first: 15},
		{name: "only snapshot damaged, the log is whole", make: func(t *testing.T, s *stores) {
			store(t, s, 1, 50, 1)
			damage(t, s, writeSnap(t, s, 40, 1, []byte("xyz")))
		}, base: 0, first: 1},
		{name: "newest damaged, log shortened to it", make: func(t *testing.T, s *stores) {
			store(t, s, 1, 50, 1)
			writeSnap(t, s, 20, 1, []byte("x"))
			damage(t, s, writeSnap(t, s, 40, 1, []byte("xyz")))
			trim(t, s, 30)
		}, refuse: "damaged"},
		{name: "installed one damaged, the log removed", make: func(t *testing.T, s *stores) {
			writeSnap(t, s, 20, 1, []byte("x"))
			damage(t, s, writeSnap(t, s, 40, 1, []byte("xyz")))
		}, refuse: "damaged"},
		{name: "only snapshot damaged", make: func(t *testing.T, s *stores) {
			damage(t, s, writeSnap(t, s, 40, 1, []byte("xyz")))
		}, refuse: "damaged"},
		{name: "snapshots gone", make: func(t *testing.T, s *stores) {
			store(t, s, 1, 50, 1)
			trim(t, s, 30)
		}, refuse: "begins at entry 30"},
		{name: "newest gone", make: func(t *testing.T, s *stores) {
			store(t, s, 1, 50, 1)
			writeSnap(t, s, 20, 1, []byte("x"))
			trim(t, s, 30)
		}, refuse: "begins at entry 30"},
		{name: "something else in the directory", make: func(t *testing.T, s *stores) {
			if err := os.Mkdir(filepath.Join(s.snaps.dir, "old stuff"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, refuse: "move it away"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			s := testStores(t, dir, false, nil)
			c.make(t, s)
			if err := s.close(); err != nil {
				t.Fatal(err)
			}
			s = testStores(t, dir, false, nil)
			defer shut(t, s)
			before, _ := s.logs.FirstIndex()
			err := s.reconcile()
			first, _ := s.logs.FirstIndex()
			if c.refuse != "" {
				if err == nil || !strings.Contains(err.Error(), c.refuse) {
					t.Fatalf("%v, want %q", err, c.refuse)
				}
				if c.refuse != "move it away" && !strings.Contains(err.Error(), "add it again") {
					t.Errorf("no remedy: %v", err)
				}
				if first != before {
					t.Error("a refusal changed the log")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if s.snaps.newest.Load() != c.base || first != c.first {
				t.Errorf("snapshot at %d, log from %d; want %d, %d", s.snaps.newest.Load(), first, c.base, c.first)
			}
			list, err := s.snaps.List()
			if err != nil || (c.base == 0) != (len(list) == 0) || len(list) > 0 && list[0].Index != c.base {
				t.Errorf("raft would restore %+v, %v", list, err)
			}
			if err := s.reconcile(); err != nil {
				t.Errorf("again: %v", err)
			}
		})
	}
}

// TestF37OneSnapshotGoesOutAtATime: the next waits, gets its turn when the one
// before is closed or its receiver takes nothing any more, and not for ever.
func TestF37OneSnapshotGoesOutAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := testStores(t, t.TempDir(), false, nil)
		defer shut(t, s)
		id := writeSnap(t, s, 5, 1, []byte("the state"))
		leading := true
		s.snaps.leading = func() bool { return leading }
		open := func() (io.ReadCloser, time.Duration, error) {
			at := time.Now()
			_, r, err := s.snaps.Open(id)
			return r, time.Since(at), err
		}
		first, _, err := open()
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 2)
		if _, err := first.Read(buf); err != nil {
			t.Fatal(err)
		}
		// A receiver that is slow keeps its turn; the next gives up and comes again.
		go func() {
			for range 5 {
				time.Sleep(outletIdle - time.Second) // virtual
				if _, err := first.Read(buf[:1]); err != nil {
					t.Error(err)
				}
			}
		}()
		if _, took, err := open(); !errors.Is(err, errOutletBusy) || took != outletWait {
			t.Errorf("beside a slow one: %v after %v", err, took)
		}
		// The own state machine waits for nobody.
		leading = false
		own, took, err := open()
		if err != nil || took != 0 {
			t.Errorf("for the own state machine: %v after %v", err, took)
		}
		_ = own.Close()
		leading = true
		time.Sleep(20 * time.Second) // virtual: its last read has been
		second, took, err := open()
		if err != nil || took > outletIdle {
			t.Fatalf("after a receiver that died: %v after %v", err, took)
		}
		if _, err := first.Read(buf); !errors.Is(err, errReceiverSlow) {
			t.Errorf("the one that lost its turn reads: %v", err)
		}
		_ = first.Close()
		if _, err := io.ReadAll(second); err != nil {
			t.Fatal(err)
		}
		// A receiver that has all of it restores it before it answers.
		go func() {
			time.Sleep(outletIdle + 5*time.Second) // virtual
			_ = second.Close()
			_ = second.Close()
		}()
		third, took, err := open()
		if err != nil || took != outletIdle+5*time.Second {
			t.Errorf("after a restore: %v after %v", err, took)
		}
		go func() {
			time.Sleep(time.Second) // virtual
			s.snaps.halt()
		}()
		if _, took, err := open(); !errors.Is(err, errStopping) || took != time.Second {
			t.Errorf("at a stop: %v after %v", err, took)
		}
		if _, err := third.Read(buf); !errors.Is(err, errStopping) {
			t.Errorf("read at a stop: %v", err)
		}
		_ = third.Close()
	})
}

// A snapshot for which there is no room fails and may be written again.
func TestSnapshotOnAFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, newSimNet(), three[:1], func(cfg *Config) {
			cfg.SnapshotThreshold, cfg.TrailingLogs = 50, 10
		})
		c.start()
		n := c.setup()
		n.disk.failOp(opSnapshot, syscall.ENOSPC)
		for i := range 100 {
			if _, err := n.r.Propose(t.Context(), openSession(fmt.Sprint("s", i))); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(10 * time.Second) // virtual
		if s := n.r.Stats(); s.Snapshot != 0 || s.First != 1 {
			t.Errorf("%+v", s)
		}
		n.disk.failOp(opSnapshot, nil)
		c.until("snapshot", func() bool { return n.r.Stats().Snapshot > 0 })
		c.stop()
	})
}
