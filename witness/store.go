package witness

import (
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/fault"
	"github.com/headlease/headlease/internal/fsync"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	storeFile = "witness.db"
	// storeFormat is raised when an older build must not open the data.
	storeFormat = 1
	// lockTimeout is how long a second process waits before it says why.
	lockTimeout = time.Second
)

// The buckets and the keys of bucketMeta. Every value that decides a vote must
// be durable before the answer that rests on it is sent.
var (
	bucketMeta      = []byte("meta")
	bucketRegisters = []byte("registers")

	keyFormat  = []byte("format")
	keyName    = []byte("name")    // of the witness: the data of one must not speak for another
	keyCluster = []byte("cluster") // its name; the id comes with the configuration
	// keyIncarnation: if it were lost, a wiped witness would vote as the one
	// that promised.
	keyIncarnation = []byte("incarnation")
	// keyLife, keyPrevious, keyWrites: by them a region sees that a witness
	// runs on an old copy of its data, or twice [F5].
	keyLife          = []byte("life")
	keyPrevious      = []byte("previous_life")
	keyLives         = []byte("lives")
	keyWrites        = []byte("writes")
	keyConfiguration = []byte("configuration")
	// keyConfigRegister: if it were lost, two next configurations could be
	// decided.
	keyConfigRegister = []byte("config_register")
	// keyEraStop: if it were lost, a witness declared destroyed would vote again.
	keyEraStop = []byte("era_stop")
)

// maxLives bounds the lives that are remembered, 8 bytes each: a region that
// has not heard of this witness for more starts takes its data for another's.
const maxLives = 4096

// storeConfig names whose data is meant.
type storeConfig struct {
	dir, name, cluster string
	// disk is asked before each operation; never nil.
	disk fault.Disk
}

// identity is what the store knows of itself.
type identity struct {
	incarnation    register.Incarnation
	life, previous uint64
	// lives are all of this data's that are remembered, oldest first, the
	// present one last.
	lives  []uint64
	writes uint64
}

// contents is everything that was durable when the store was opened.
type contents struct {
	identity
	configuration  *pb.ClusterConfiguration
	configRegister config.Register
	eraStop        *pb.EraStop
	registers      map[string]register.Record
}

// store keeps a witness's registers on bbolt: each write is one transaction,
// durable when it returns. After a failed write nothing is known about the
// disk, so every later one fails too. The caller serialises all calls.
type store struct {
	db     *bolt.DB
	path   string
	disk   fault.Disk
	failed error
}

// openStore opens the data of a witness, made anew if the directory is empty,
// and begins a new life in it. A directory that belongs to anything else is
// refused and left as it is.
func openStore(c storeConfig) (st *store, got contents, err error) {
	path := filepath.Join(c.dir, storeFile)
	defer func() {
		if p := recover(); p != nil { // bbolt asserts on what it reads
			st, got, err = nil, contents{}, openError(c.dir, path, fmt.Errorf("%w: %v", bolterrors.ErrInvalid, p))
		}
	}()
	if err := checkDirectory(c.dir); err != nil {
		return nil, contents{}, err
	}
	if err := c.disk.Before("register/open"); err != nil {
		return nil, contents{}, fmt.Errorf("data_dir: open %s: %w", path, err)
	}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, contents{}, fmt.Errorf("data_dir: %w; name a directory that this user may write", err)
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: lockTimeout})
	if err != nil {
		return nil, contents{}, openError(c.dir, path, err)
	}
	s := &store{db: db, path: path, disk: c.disk}
	if got, err = s.begin(c); err != nil {
		return nil, contents{}, errors.Join(err, db.Close())
	}
	return s, got, nil
}

// checkDirectory refuses a directory with files in it but without a witness's.
func checkDirectory(dir string) error {
	if dir == "" {
		return errors.New("data_dir: is empty; name a directory for this witness alone")
	}
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("data_dir: %w; name a directory that this user may write", err)
	}
	other := ""
	for _, e := range entries {
		switch e.Name() {
		case storeFile:
			return nil
		case "lost+found":
		default:
			other = e.Name()
		}
	}
	if other != "" {
		return fmt.Errorf("data_dir: %s has %q in it and no %s: it is not a witness's; name an empty directory or the right one", dir, other, storeFile)
	}
	return nil
}

func openError(dir, path string, err error) error {
	switch {
	case errors.Is(err, bolterrors.ErrTimeout):
		return fmt.Errorf("data_dir: %s is in use by another process; stop it, or give each witness a directory of its own", dir)
	case errors.Is(err, bolterrors.ErrInvalid), errors.Is(err, bolterrors.ErrVersionMismatch), errors.Is(err, bolterrors.ErrChecksum):
		return fmt.Errorf("data_dir: %s is not a witness's store or is damaged (%w); a witness that lost its data must be replaced, move the directory away and add it as a new one", path, err)
	}
	return fmt.Errorf("data_dir: open %s: %w", path, err)
}

// begin checks whose data it is, reads it, and writes the new life.
func (s *store) begin(c storeConfig) (contents, error) {
	got := contents{registers: map[string]register.Record{}}
	fresh := false
	err := s.db.View(func(tx *bolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		if meta == nil { // new, or a crash came between the file and its first transaction
			fresh = true
			return tx.ForEach(func(name []byte, _ *bolt.Bucket) error {
				return fmt.Errorf("data_dir: %s is a bbolt file with bucket %q, not a witness's store; name the right directory", s.path, name)
			})
		}
		if err := s.checkOwner(meta, c); err != nil {
			return err
		}
		return s.read(tx, meta, &got)
	})
	if err != nil {
		return contents{}, err
	}
	if fresh {
		got.incarnation = register.Incarnation(randomID())
	}
	got.previous, got.life = got.life, randomID()
	got.lives = append(got.lives, got.life)
	got.lives = got.lives[max(0, len(got.lives)-maxLives):]
	got.writes++
	err = s.update("begin", func(tx *bolt.Tx) error {
		meta, err := tx.CreateBucketIfNotExists(bucketMeta)
		if err != nil {
			return err
		}
		if _, err := tx.CreateBucketIfNotExists(bucketRegisters); err != nil {
			return err
		}
		return errors.Join(
			meta.Put(keyFormat, number(storeFormat)), meta.Put(keyName, []byte(c.name)), meta.Put(keyCluster, []byte(c.cluster)),
			meta.Put(keyIncarnation, number(uint64(got.incarnation))),
			meta.Put(keyLife, number(got.life)), meta.Put(keyPrevious, number(got.previous)),
			meta.Put(keyLives, numbers(got.lives)), meta.Put(keyWrites, number(got.writes)))
	})
	if err == nil && fresh {
		err = errors.Join(fsync.Dir(filepath.Dir(s.path)), fsync.Dir(filepath.Dir(filepath.Dir(s.path))))
	}
	if err != nil {
		return contents{}, fmt.Errorf("data_dir: %w", err)
	}
	return got, nil
}

func (s *store) checkOwner(meta *bolt.Bucket, c storeConfig) error {
	dir := filepath.Dir(s.path)
	if f := readNumber(meta, keyFormat); f != storeFormat {
		return fmt.Errorf("data_dir: %s has format %d, this build knows format %d; start the build that wrote it", dir, f, storeFormat)
	}
	if cluster := string(meta.Get(keyCluster)); cluster != c.cluster {
		return fmt.Errorf("data_dir: %s belongs to cluster %q, not to %q; name the right directory, or an empty one for a new witness", dir, cluster, c.cluster)
	}
	if name := string(meta.Get(keyName)); name != c.name {
		return fmt.Errorf("data_dir: %s belongs to witness %q, not to %q; name the right directory, or an empty one for a new witness", dir, name, c.name)
	}
	return nil
}

func (s *store) read(tx *bolt.Tx, meta *bolt.Bucket, got *contents) error {
	got.incarnation = register.Incarnation(readNumber(meta, keyIncarnation))
	got.life, got.previous = readNumber(meta, keyLife), readNumber(meta, keyPrevious)
	got.writes = readNumber(meta, keyWrites)
	if got.lives = readNumbers(meta, keyLives); len(got.lives) == 0 {
		got.lives = []uint64{got.life} // written before lives were kept
	}
	if raw := meta.Get(keyConfiguration); raw != nil {
		got.configuration = &pb.ClusterConfiguration{}
		if err := proto.Unmarshal(raw, got.configuration); err != nil {
			return s.damaged("configuration", err)
		}
	}
	if raw := meta.Get(keyConfigRegister); raw != nil {
		var m pb.ConfigRegister
		if err := proto.Unmarshal(raw, &m); err != nil {
			return s.damaged("config_register", err)
		}
		got.configRegister = config.RegisterOf(&m)
	}
	if raw := meta.Get(keyEraStop); raw != nil {
		got.eraStop = &pb.EraStop{}
		if err := proto.Unmarshal(raw, got.eraStop); err != nil {
			return s.damaged("era_stop", err)
		}
	}
	registers := tx.Bucket(bucketRegisters)
	if registers == nil || got.incarnation == 0 {
		return s.damaged("meta", errors.New("incomplete"))
	}
	return registers.ForEach(func(k, raw []byte) error {
		var m pb.Register
		if err := proto.Unmarshal(raw, &m); err != nil {
			return s.damaged(fmt.Sprintf("register %q", k), err)
		}
		got.registers[string(k)] = register.RecordOf(&m)
		return nil
	})
}

func (s *store) damaged(what string, err error) error {
	return fmt.Errorf("data_dir: %s is damaged at its %s (%w); a witness that lost its data must be replaced, move the directory away and add it as a new one", s.path, what, err)
}

// write makes the records durable together; writes is the count from now on.
func (s *store) write(records map[string]register.Record, writes uint64) error {
	return s.update("write", func(tx *bolt.Tx) error { return put(tx, records, writes) })
}

func put(tx *bolt.Tx, records map[string]register.Record, writes uint64) error {
	registers := tx.Bucket(bucketRegisters)
	for partition, rec := range records {
		raw, err := proto.Marshal(rec.Proto())
		if err != nil {
			return err
		}
		if err := registers.Put([]byte(partition), raw); err != nil {
			return err
		}
	}
	return tx.Bucket(bucketMeta).Put(keyWrites, number(writes))
}

// stop makes durable that the witness met another era.
func (s *store) stop(e *pb.EraStop, writes uint64) error {
	raw, err := proto.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode the era's stop: %w", err)
	}
	return s.update("configure", func(tx *bolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		return errors.Join(meta.Put(keyEraStop, raw), meta.Put(keyWrites, number(writes)))
	})
}

// configure makes a decided configuration durable, with the register that
// begins afresh with it.
func (s *store) configure(v config.Voter, writes uint64) error {
	return s.putConfig("configure", writes, v.Register, v.Decided)
}

// decide makes the register of the next configuration durable.
func (s *store) decide(r config.Register, writes uint64) error {
	return s.putConfig("configure", writes, r, nil)
}

func (s *store) putConfig(op string, writes uint64, r config.Register, decided *pb.ClusterConfiguration) error {
	marshal := proto.MarshalOptions{Deterministic: true}.Marshal
	rawRegister, err := marshal(r.Proto())
	if err != nil {
		return fmt.Errorf("encode the configuration's register: %w", err)
	}
	raw, err := marshal(decided)
	if err != nil {
		return fmt.Errorf("encode configuration: %w", err)
	}
	return s.update(op, func(tx *bolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		errs := []error{meta.Put(keyConfigRegister, rawRegister), meta.Put(keyWrites, number(writes))}
		if decided != nil {
			errs = append(errs, meta.Put(keyConfiguration, raw))
		}
		return errors.Join(errs...)
	})
}

// update runs one transaction; bbolt syncs the pages and then the page that
// makes them current, before Update returns.
func (s *store) update(op string, change func(*bolt.Tx) error) error {
	if s.failed != nil {
		return s.failed
	}
	err := s.disk.Before("register/" + op)
	if err == nil {
		err = s.db.Update(change)
	}
	if err != nil {
		s.failed = fmt.Errorf("%s %s: %w", op, s.path, err)
	}
	return s.failed
}

func (s *store) close() error {
	if err := s.db.Close(); err != nil {
		return fmt.Errorf("close %s: %w", s.path, err)
	}
	return nil
}

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func readNumber(b *bolt.Bucket, key []byte) uint64 {
	raw := b.Get(key)
	if len(raw) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(raw)
}

func numbers(ns []uint64) []byte {
	raw := make([]byte, 0, 8*len(ns))
	for _, n := range ns {
		raw = binary.BigEndian.AppendUint64(raw, n)
	}
	return raw
}

func readNumbers(b *bolt.Bucket, key []byte) []uint64 {
	var ns []uint64
	for raw := range slices.Chunk(b.Get(key), 8) {
		if len(raw) == 8 {
			ns = append(ns, binary.BigEndian.Uint64(raw))
		}
	}
	return ns
}

// randomID is never 0, which means none.
func randomID() uint64 {
	var raw [8]byte
	for {
		_, _ = crand.Read(raw[:]) // never fails
		if id := binary.BigEndian.Uint64(raw[:]); id != 0 {
			return id
		}
	}
}
