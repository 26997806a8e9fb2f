package replica

import (
	"errors"
	"fmt"
	"hash/crc64"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"io"

	"github.com/hashicorp/raft"

	"github.com/headlease/headlease/internal/fsync"
	"github.com/headlease/headlease/internal/wake"
)

// snapStore keeps snapshots in directories. It differs from hashicorp/raft's
// file store, whose files it reads and writes, in this: it writes to disk in
// pieces, its meta has a checksum, a damaged snapshot is neither listed nor
// opened, and one at a time goes out to a follower [F37].
type snapStore struct {
	dir    string
	guard  *guard
	log    *slog.Logger
	outlet *outlet
	// leading tells an Open for a follower from one for the own state machine.
	leading func() bool

	stop chan struct{}
	once sync.Once

	newest atomic.Uint64 // index

	mu      sync.Mutex
	last    uint64              // milliseconds of the newest name given
	damaged map[string]struct{} // found while running
	readers map[string]int
	gone    map[string]struct{} // being removed
	// trusted is the one snapshot, already read to its end, that a start uses: no
	// other is listed or opened until then.
	trusted string
	// wanted is closed and made anew when a damaged snapshot must be replaced.
	wanted chan struct{}
}

var _ raft.SnapshotStore = (*snapStore)(nil)

func openSnapStore(base string, g *guard, log *slog.Logger) (*snapStore, error) {
	s := &snapStore{
		dir: filepath.Join(base, snapsName), guard: g, log: log, outlet: newOutlet(), leading: func() bool { return false },
		stop: make(chan struct{}), damaged: make(map[string]struct{}), readers: make(map[string]int),
		gone: make(map[string]struct{}), wanted: make(chan struct{}, 1),
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, err
	}
	return s, nil
}

// halt ends what is being written and sent.
func (s *snapStore) halt() { s.once.Do(func() { close(s.stop) }) }

func (s *snapStore) isStopping() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

// names are the snapshots on disk, newest first, whatever their content.
func (s *snapStore) names() ([]snapName, error) {
	list, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, err
	}
	var out []snapName
	for _, e := range list {
		if !e.IsDir() || strings.HasSuffix(e.Name(), snapTemp) || strings.HasSuffix(e.Name(), snapDamaged) {
			continue
		}
		n, err := parseSnapName(e.Name())
		if err != nil {
			return nil, fmt.Errorf("%s: %w; move it away", s.dir, err)
		}
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b snapName) int { return b.compare(a) })
	return out, nil
}

// Create begins a snapshot.
func (s *snapStore) Create(version raft.SnapshotVersion, index, term uint64, c raft.Configuration, cIndex uint64, _ raft.Transport) (raft.SnapshotSink, error) {
	if version != raft.SnapshotVersionMax {
		return nil, fmt.Errorf("snapshot version %d is not known", version)
	}
	name := snapName{term: term, index: index, millis: s.stamp()}
	sink := &snapSink{
		store: s, name: name, temp: filepath.Join(s.dir, name.String()+snapTemp), buf: make([]byte, 0, snapPiece), sum: crc64.New(crc64Table),
		meta: snapMeta{SnapshotMeta: raft.SnapshotMeta{
			Version: version, ID: name.String(), Index: index, Term: term, Configuration: c, ConfigurationIndex: cIndex,
		}},
	}
	err := s.guard.piece(opSnapshot, func() (err error) {
		if err = os.Mkdir(sink.temp, 0o700); err != nil {
			return err
		}
		sink.file, err = os.OpenFile(filepath.Join(sink.temp, snapStateName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("snapshot %s: %w", name, err), os.RemoveAll(sink.temp))
	}
	return sink, nil
}

// stamp is the time in milliseconds, never twice the same.
func (s *snapStore) stamp() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = max(s.last+1, uint64(time.Now().UnixMilli()))
	return s.last
}

// List returns the metas of the sound snapshots, newest first.
func (s *snapStore) List() ([]*raft.SnapshotMeta, error) {
	names, err := s.names()
	if err != nil {
		return nil, err
	}
	var out []*raft.SnapshotMeta
	for _, n := range names {
		if !s.usable(n.String()) {
			continue
		}
		m, err := readSnapMeta(s.dir, n)
		if errors.Is(err, errDamaged) {
			s.foundDamaged(n.String(), err)
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("snapshot %s: %w", filepath.Join(s.dir, n.String()), err)
		}
		out = append(out, &m.SnapshotMeta)
	}
	return out, nil
}

func (s *snapStore) usable(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.usableLocked(id)
}

func (s *snapStore) usableLocked(id string) bool {
	_, bad := s.damaged[id]
	_, gone := s.gone[id]
	return !bad && !gone && (s.trusted == "" || s.trusted == id)
}

// read counts a reader of a snapshot, and unread ends that.
func (s *snapStore) read(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.usableLocked(id) {
		return false
	}
	s.readers[id]++
	return true
}

func (s *snapStore) unread(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.readers[id]--; s.readers[id] == 0 {
		delete(s.readers, id)
	}
}

// foundDamaged puts a snapshot out of use and asks for another.
func (s *snapStore) foundDamaged(id string, err error) {
	s.mu.Lock()
	_, known := s.damaged[id]
	s.damaged[id] = struct{}{}
	s.mu.Unlock()
	if !known {
		s.log.Error("a snapshot is damaged and not used any more; writing another", "path", filepath.Join(s.dir, id), "error", err)
	}
	wake.Up(s.wanted)
}

// Open returns a snapshot's state once all of it has been read and found sound.
// On a leader it is for a follower: one at a time, the next waits.
func (s *snapStore) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	release := func() {}
	if s.leading() {
		var err error
		if release, err = s.outlet.take(s.stop); err != nil {
			return nil, nil, err
		}
	}
	if !s.read(id) {
		release()
		return nil, nil, fmt.Errorf("snapshot %s is not used any more", id)
	}
	meta, f, err := s.openSound(id)
	if err != nil {
		s.unread(id)
		release()
		return nil, nil, err
	}
	return &meta.SnapshotMeta, newOutgoing(f, s.stop, release, func() { s.unread(id) }), nil
}

func (s *snapStore) openSound(id string) (snapMeta, *os.File, error) {
	name, err := parseSnapName(id)
	if err != nil {
		return snapMeta{}, nil, err
	}
	meta, err := readSnapMeta(s.dir, name)
	var f *os.File
	if err == nil {
		f, err = openSnapState(s.dir, meta)
	}
	if errors.Is(err, errDamaged) {
		s.foundDamaged(id, err)
	}
	if err != nil {
		return snapMeta{}, nil, fmt.Errorf("snapshot %s: %w", filepath.Join(s.dir, id), err)
	}
	return meta, f, nil
}

// added follows the end of a snapshot's writing: it becomes the newest, and old
// ones go.
func (s *snapStore) added(n snapName) {
	s.newest.Store(max(s.newest.Load(), n.index))
	names, err := s.names()
	if err != nil {
		s.log.Warn("old snapshots are not removed", "error", err)
		return
	}
	kept := 0
	for _, old := range names {
		if s.usable(old.String()) && kept < retainSnapshots {
			kept++
			continue
		}
		if err := s.remove(old.String()); err != nil {
			s.log.Warn("an old snapshot is not removed", "path", filepath.Join(s.dir, old.String()), "error", err)
		}
	}
}

// remove removes a snapshot. Whoever is reading it goes on.
func (s *snapStore) remove(id string) error {
	s.mu.Lock()
	s.gone[id] = struct{}{}
	read := s.readers[id] > 0
	s.mu.Unlock()
	// A start removes what a crash leaves.
	path := filepath.Join(s.dir, id)
	err := os.Rename(path, path+snapTemp)
	if err == nil && read {
		err = os.RemoveAll(path + snapTemp)
	} else if err == nil {
		err = removeSlowly(path + snapTemp)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.gone, id)
	if err == nil {
		delete(s.damaged, id)
	}
	return err
}

// trust names the one snapshot that the start uses; "" ends that.
func (s *snapStore) trust(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trusted = id
}

// setAside renames a damaged snapshot, for whoever wants to look at it; of those
// only the newest is kept.
func (s *snapStore) setAside(n snapName) error {
	old, err := filepath.Glob(filepath.Join(s.dir, "*"+snapDamaged))
	if err != nil {
		return err
	}
	for _, o := range old {
		if err := os.RemoveAll(o); err != nil {
			return err
		}
	}
	path := filepath.Join(s.dir, n.String())
	return errors.Join(os.Rename(path, path+snapDamaged), fsync.Dir(s.dir))
}
