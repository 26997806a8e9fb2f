package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"pgregory.net/rapid"
)

// cutDisk fails every operation of a kind after so many of them, as if the
// process had died before it.
type cutDisk struct {
	op   string
	left int
}

var errCut = errors.New("the process dies here")

func (d *cutDisk) Before(op string) error {
	if op != d.op {
		return nil
	}
	if d.left == 0 {
		return errCut
	}
	d.left--
	return nil
}

func testStores(t testing.TB, dir string, bolt bool, disk Disk) *stores {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	s, err := openStores(storeOptions{
		dir: dir, segmentSize: 64 << 10, boltLog: bolt, logCache: 16, logger: newHlog(log, "raft"), log: log,
		guard: newGuard(disk, func(error) {}, func(string, time.Duration, error) {}),
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// entries are entries first to last, whose content follows from their index.
func entries(first, last, term uint64) []*raft.Log {
	var out []*raft.Log
	for i := first; i <= last; i++ {
		out = append(out, &raft.Log{Index: i, Term: term, Type: raft.LogCommand, Data: bytes.Repeat([]byte{byte(i)}, int(i%200))})
	}
	return out
}

func store(t testing.TB, s *stores, first, last, term uint64) {
	t.Helper()
	for ; first <= last; first += 1000 {
		if err := s.logs.StoreLogs(entries(first, min(last, first+999), term)); err != nil {
			t.Fatal(err)
		}
	}
}

// contiguous checks that the log on disk is first to last without a gap.
func contiguous(t testing.TB, s *stores, first, last uint64) {
	t.Helper()
	f, err := s.logs.FirstIndex()
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.logs.LastIndex()
	if err != nil {
		t.Fatal(err)
	}
	if f != first || l != last {
		t.Fatalf("log has %d to %d, want %d to %d", f, l, first, last)
	}
	for i := f; i <= l; i++ {
		var e raft.Log
		if err := s.logs.disk.GetLog(i, &e); err != nil {
			t.Fatalf("entry %d: %v", i, err)
		}
		if e.Index != i || len(e.Data) != int(i%200) {
			t.Fatalf("entry %d is %d with %d bytes", i, e.Index, len(e.Data))
		}
	}
}

// TestF36TrimInPiecesAcrossCrashes: the prefix goes in pieces, the oldest first;
// wherever the process dies, the log has no gap, and the next trim goes on.
func TestF36TrimInPiecesAcrossCrashes(t *testing.T) {
	for _, bolt := range []bool{false, true} {
		t.Run(fmt.Sprintf("bolt=%v", bolt), func(t *testing.T) {
			const last, to = 4*trimPiece + 500, 3*trimPiece + 100
			for pieces := range 5 {
				dir := t.TempDir()
				disk := &cutDisk{op: opCompact, left: pieces}
				s := testStores(t, dir, bolt, disk)
				store(t, s, 1, last, 1)
				removed, err := s.logs.trim(context.Background(), to)
				want := uint64(min(pieces*trimPiece, to-1))
				if finished := pieces >= 4; finished != (err == nil) || removed != want {
					t.Fatalf("%d pieces: removed %d, %v; want %d", pieces, removed, err, want)
				}
				if err := s.close(); err != nil {
					t.Fatal(err)
				}
				s = testStores(t, dir, bolt, nil)
				contiguous(t, s, want+1, last)
				if _, err := s.logs.trim(context.Background(), to); err != nil {
					t.Fatal(err)
				}
				contiguous(t, s, to, last)
				store(t, s, last+1, last+10, 1) // and takes what follows
				contiguous(t, s, to, last+10)
				if err := s.close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestTrimLeavesTheNewestEntry whatever it is asked for.
func TestTrimLeavesTheNewestEntry(t *testing.T) {
	s := testStores(t, t.TempDir(), false, nil)
	store(t, s, 1, 100, 1)
	if _, err := s.logs.trim(context.Background(), 1000); err != nil {
		t.Fatal(err)
	}
	contiguous(t, s, 100, 100)
	if n, err := s.logs.trim(context.Background(), 1000); n != 0 || err != nil {
		t.Errorf("again: %d, %v", n, err)
	}
	// Raft may still remove all of it.
	if err := s.logs.DeleteRange(100, 100); err != nil {
		t.Fatal(err)
	}
	if n, err := s.logs.trim(context.Background(), 1000); n != 0 || err != nil {
		t.Errorf("empty: %d, %v", n, err)
	}
	store(t, s, 500, 510, 2)
	contiguous(t, s, 500, 510)
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
}

// TestF36AppendsGoOnDuringTrim: while a long prefix goes, an append waits for
// one piece at most.
func TestF36AppendsGoOnDuringTrim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const piece = 20 * time.Millisecond // virtual: what a removal takes
		logs, err := newLogStore(&slowStore{InmemStore: raft.NewInmemStore(), each: piece, turn: make(chan struct{}, 1)}, 16, 0)
		if err != nil {
			t.Fatal(err)
		}
		const n = 20 * trimPiece
		if err := logs.StoreLogs(entries(1, n, 1)); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			_, err := logs.trim(context.Background(), n)
			done <- err
		}()
		var worst time.Duration
		appends := 0
		for i := uint64(n + 1); ; i++ {
			at := time.Now()
			if err := logs.StoreLogs(entries(i, i, 1)); err != nil {
				t.Fatal(err)
			}
			worst = max(worst, time.Since(at))
			appends++
			select {
			case err := <-done:
				if err != nil {
					t.Fatal(err)
				}
				if worst > piece || appends < 20 {
					t.Errorf("%d appends, the slowest took %v; a piece takes %v", appends, worst, piece)
				}
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
}

// slowStore has one writer, as stores do, and takes long to remove.
type slowStore struct {
	*raft.InmemStore
	each time.Duration
	turn chan struct{}
}

func (s *slowStore) StoreLogs(logs []*raft.Log) error {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	return s.InmemStore.StoreLogs(logs)
}

func (s *slowStore) DeleteRange(first, last uint64) error {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	time.Sleep(s.each) // virtual
	return s.InmemStore.DeleteRange(first, last)
}

// TestLogSizeIsKnown: sizes agree with a plain sum to within a mark, through
// appends, conflicts, trims and installs.
func TestLogSizeIsKnown(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mem := raft.NewInmemStore()
		logs, err := newLogStore(mem, 16, 0)
		if err != nil {
			t.Fatal(err)
		}
		sizes := map[uint64]uint64{} // by index
		next := uint64(1)
		lowest := func() uint64 {
			low := next
			for i := range sizes {
				low = min(low, i)
			}
			return low
		}
		sum := func(from uint64) (n uint64) {
			for i, s := range sizes {
				if i >= from {
					n += s
				}
			}
			return n
		}
		const entry = 40 << 10 // so that an entry is no more than a sixth of a mark
		t.Repeat(map[string]func(*rapid.T){
			"append": func(t *rapid.T) {
				for range rapid.IntRange(1, 30).Draw(t, "entries") {
					size := rapid.IntRange(0, entry).Draw(t, "size")
					if err := logs.StoreLog(&raft.Log{Index: next, Data: make([]byte, size)}); err != nil {
						t.Fatal(err)
					}
					sizes[next] = uint64(size) + entryOverhead
					next++
				}
			},
			"conflict": func(t *rapid.T) {
				low := lowest()
				if low == next {
					t.Skip("empty")
				}
				from := rapid.Uint64Range(low, next-1).Draw(t, "from")
				if err := logs.DeleteRange(from, next-1); err != nil {
					t.Fatal(err)
				}
				for i := from; i < next; i++ {
					delete(sizes, i)
				}
				next = from
			},
			"trim": func(t *rapid.T) {
				low := lowest()
				if low == next {
					t.Skip("empty")
				}
				to := rapid.Uint64Range(low, next-1).Draw(t, "to")
				if _, err := logs.trim(context.Background(), to); err != nil {
					t.Fatal(err)
				}
				for i := low; i < to; i++ {
					delete(sizes, i)
				}
			},
			"install": func(t *rapid.T) {
				low := lowest()
				if low == next {
					t.Skip("empty")
				}
				if err := logs.DeleteRange(low, next-1); err != nil {
					t.Fatal(err)
				}
				clear(sizes)
				next += rapid.Uint64Range(0, 1000).Draw(t, "further")
			},
			"": func(t *rapid.T) {
				low := lowest()
				if low == next {
					return
				}
				near := func(what string, got, want uint64) {
					const most = markBytes + entry + entryOverhead
					if got > want+most || want > got+most {
						t.Fatalf("%s: %d bytes, really %d", what, got, want)
					}
				}
				for _, i := range []uint64{low, (low + next) / 2, next - 1, next} {
					near(fmt.Sprint("from ", i), logs.bytesFrom(i), sum(i))
				}
				for _, room := range []uint64{1, 1 << 20, 1 << 30} {
					from := logs.newestWithin(room)
					if got := sum(from); got > room+markBytes+entry+entryOverhead {
						t.Fatalf("entries from %d take %d bytes, over %d", from, got, room)
					}
					if from > low && sum(from-1)+markBytes+entry+entryOverhead < room {
						t.Fatalf("entries from %d take %d bytes, and %d are allowed", from-1, sum(from-1), room)
					}
				}
			},
		})
	})
}
