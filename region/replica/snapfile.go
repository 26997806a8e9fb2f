package replica

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"hash/crc64"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/internal/fsync"
)

// A snapshot is a directory TERM-INDEX-MILLISECONDS with two files, as
// hashicorp/raft's file snapshot store writes them: meta.json, whose CRC is the
// CRC64 (ECMA) of state.bin, and state.bin, the state. The meta has a checksum of
// its own besides; what older versions wrote has none and is compared with the
// directory's name.
const (
	snapMetaName  = "meta.json"
	snapStateName = "state.bin"
	snapTemp      = ".tmp"
	snapDamaged   = ".damaged"
	// snapPiece is how much of a snapshot is written out at once. One large fsync
	// holds up the log's on the same file system: beside 100 MiB, 1 in 100 of the
	// log's took 45 ms, with pieces 8 ms, alone 7 ms.
	snapPiece = 256 << 10
	// shrinkStep is how much of an old snapshot is removed at once, shrinkRest the
	// time between two steps: likewise for the removal of one large file, 30 to 40 ms
	// against 8 ms.
	shrinkStep = 4 << 20
	shrinkRest = 2 * time.Millisecond
)

var (
	crc64Table = crc64.MakeTable(crc64.ECMA)
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// snapMeta is meta.json.
type snapMeta struct {
	raft.SnapshotMeta
	CRC []byte
	// Check is the CRC32C of the fields before it, as JSON, in hex.
	Check string `json:",omitempty"`
}

func (m snapMeta) check() (string, error) {
	m.Check = ""
	raw, err := json.Marshal(m)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%08x", crc32.Checksum(raw, castagnoli)), nil
}

// snapName is the name of a snapshot's directory.
type snapName struct{ term, index, millis uint64 }

func (n snapName) String() string { return fmt.Sprintf("%d-%d-%d", n.term, n.index, n.millis) }

func parseSnapName(s string) (n snapName, err error) {
	parts := strings.Split(s, "-")
	if len(parts) != 3 {
		return n, fmt.Errorf("%q is not TERM-INDEX-MILLISECONDS", s)
	}
	for i, to := range []*uint64{&n.term, &n.index, &n.millis} {
		if *to, err = strconv.ParseUint(parts[i], 10, 64); err != nil {
			return n, fmt.Errorf("%q is not TERM-INDEX-MILLISECONDS: %w", s, err)
		}
	}
	if n.String() != s {
		return n, fmt.Errorf("%q is not TERM-INDEX-MILLISECONDS", s)
	}
	return n, nil
}

// compare orders by term, index, time.
func (n snapName) compare(o snapName) int {
	for _, p := range [][2]uint64{{n.term, o.term}, {n.index, o.index}, {n.millis, o.millis}} {
		if p[0] != p[1] {
			if p[0] < p[1] {
				return -1
			}
			return 1
		}
	}
	return 0
}

// errDamaged is what every error about the content of a snapshot is.
var errDamaged = errors.New("damaged")

// readSnapMeta reads and checks what meta.json says, not the state.
func readSnapMeta(dir string, name snapName) (m snapMeta, err error) {
	raw, err := os.ReadFile(filepath.Join(dir, name.String(), snapMetaName))
	if errors.Is(err, os.ErrNotExist) {
		return m, fmt.Errorf("%w: %s is missing", errDamaged, snapMetaName)
	}
	if err != nil {
		return m, err
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields() // a flipped letter must not make a field go away
	if err := dec.Decode(&m); err != nil {
		return m, fmt.Errorf("%w: %s: %w", errDamaged, snapMetaName, err)
	}
	if m.Check != "" {
		want, err := m.check()
		if err != nil {
			return m, fmt.Errorf("%w: %s: %w", errDamaged, snapMetaName, err)
		}
		if m.Check != want {
			return m, fmt.Errorf("%w: %s: its checksum is %s, not %s", errDamaged, snapMetaName, want, m.Check)
		}
	}
	switch {
	case m.Version < raft.SnapshotVersionMin || m.Version > raft.SnapshotVersionMax:
		return m, fmt.Errorf("%w: %s: version %d is not known", errDamaged, snapMetaName, m.Version)
	case m.ID != name.String() || m.Index != name.index || m.Term != name.term:
		return m, fmt.Errorf("%w: %s: is of snapshot %s at index %d, term %d", errDamaged, snapMetaName, m.ID, m.Index, m.Term)
	case len(m.Configuration.Servers) == 0:
		return m, fmt.Errorf("%w: %s: lists no servers", errDamaged, snapMetaName)
	case m.Size == 0:
		return m, fmt.Errorf("%w: %s is empty", errDamaged, snapStateName)
	}
	return m, nil
}

// openSnapState opens the state and checks all of it against the meta.
func openSnapState(dir string, m snapMeta) (_ *os.File, err error) {
	f, err := os.Open(filepath.Join(dir, m.ID, snapStateName))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s is missing", errDamaged, snapStateName)
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	sum := crc64.New(crc64Table)
	n, err := io.CopyBuffer(sum, struct{ io.Reader }{f}, make([]byte, snapPiece))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: read %s: %w", errDamaged, snapStateName, err)
	case n != m.Size:
		return nil, fmt.Errorf("%w: %s has %d bytes, not %d", errDamaged, snapStateName, n, m.Size)
	case !bytes.Equal(sum.Sum(nil), m.CRC):
		return nil, fmt.Errorf("%w: %s: its checksum is not the one that was written", errDamaged, snapStateName)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return f, nil
}

// errStopping ends a snapshot's writing or sending when the server stops.
var errStopping = errors.New("the server stops")

// snapSink writes one snapshot. Its directory has a temporary name until all of
// it is on disk.
type snapSink struct {
	store *snapStore
	name  snapName
	meta  snapMeta
	temp  string
	file  *os.File
	buf   []byte
	sum   hash.Hash64
	done  bool
}

var _ raft.SnapshotSink = (*snapSink)(nil)

// ID is the snapshot's name.
func (s *snapSink) ID() string { return s.name.String() }

// Write takes the next bytes of the state.
func (s *snapSink) Write(b []byte) (int, error) {
	n := len(b)
	for len(b) > 0 {
		k := min(len(b), snapPiece-len(s.buf))
		s.buf = append(s.buf, b[:k]...)
		b = b[k:]
		if len(s.buf) == snapPiece {
			if err := s.flush(); err != nil {
				return n - len(b), err
			}
		}
	}
	return n, nil
}

func (s *snapSink) flush() error {
	if s.store.isStopping() {
		return errStopping
	}
	err := s.store.guard.piece(opSnapshot, func() error {
		if _, err := s.file.Write(s.buf); err != nil {
			return err
		}
		return writeOut(s.file, s.meta.Size, int64(len(s.buf)))
	})
	if err != nil {
		return err
	}
	_, _ = s.sum.Write(s.buf)
	s.meta.Size += int64(len(s.buf))
	s.buf = s.buf[:0]
	return nil
}

// Close makes the snapshot the newest one, once it is on disk, and removes those
// that are no longer retained.
func (s *snapSink) Close() error {
	if s.done {
		return nil
	}
	s.done = true
	if err := s.finish(); err != nil {
		return errors.Join(fmt.Errorf("snapshot %s: %w", s.name, err), s.file.Close(), os.RemoveAll(s.temp))
	}
	s.store.added(s.name)
	return nil
}

func (s *snapSink) finish() error {
	if err := s.flush(); err != nil {
		return err
	}
	if s.meta.Size == 0 {
		return errors.New("it is empty")
	}
	s.meta.CRC = s.sum.Sum(nil)
	check, err := s.meta.check()
	if err != nil {
		return err
	}
	s.meta.Check = check
	raw, err := json.Marshal(s.meta)
	if err != nil {
		return err
	}
	return s.store.guard.piece(opSnapshot, func() error {
		if err := s.file.Sync(); err != nil {
			return err
		}
		if err := writeSynced(filepath.Join(s.temp, snapMetaName), append(raw, '\n')); err != nil {
			return err
		}
		if err := fsync.Dir(s.temp); err != nil {
			return err
		}
		if err := s.file.Close(); err != nil {
			return err
		}
		if err := os.Rename(s.temp, filepath.Join(s.store.dir, s.name.String())); err != nil {
			return err
		}
		return fsync.Dir(s.store.dir)
	})
}

// Cancel removes what is written.
func (s *snapSink) Cancel() error {
	if s.done {
		return nil
	}
	s.done = true
	return errors.Join(s.file.Close(), os.RemoveAll(s.temp))
}

// removeSlowly removes a snapshot's directory that nobody reads.
func removeSlowly(dir string) error {
	path := filepath.Join(dir, snapStateName)
	if info, err := os.Stat(path); err == nil {
		for size := info.Size() - shrinkStep; size > 0; size -= shrinkStep {
			if os.Truncate(path, size) != nil {
				break
			}
			time.Sleep(shrinkRest)
		}
	}
	return os.RemoveAll(dir)
}
