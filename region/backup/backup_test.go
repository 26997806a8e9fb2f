package backup

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// region is a small region with sessions and leases.
func region(t testing.TB, sessions int) state.View {
	t.Helper()
	m := state.New()
	var index uint64
	do := func(c *pb.Command) *pb.CommandResult {
		t.Helper()
		index++
		c.Term = 3
		res, _ := m.Apply(index, 3, c)
		if res.GetError() != nil || m.Poisoned() != nil {
			t.Fatal(c, res.GetError(), m.Poisoned())
		}
		return res
	}
	conf := &pb.ClusterConfiguration{
		ClusterId: "id", ClusterName: "test", Version: 1, Shards: 4, DNs: 4e9, Voters: []*pb.Voter{{Id: "region/eu", Incarnation: 7}},
		Partitions: []*pb.PartitionSpec{{Name: "all", Shards: []*pb.ShardRange{{First: 0, Last: 3}}, Prefer: []string{"eu"}}}, AllowEvenWitnesses: true,
	}
	do(&pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: "eu", Incarnation: 7}}})
	do(&pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: conf}}})
	b := do(&pb.Command{Kind: &pb.Command_ReserveBallot{ReserveBallot: &pb.ReserveBallotCommand{}}}).GetReserved().GetBallot()
	guard := &pb.RegisterGuard{}
	res := do(&pb.Command{Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{Items: []*pb.AcceptedItem{{
		Partition: "all", Guard: guard, Ballot: b, Value: &pb.Value{Owner: "eu", OwnerIncarnation: 7, Epoch: 5, DNs: 4e9},
	}}}}})
	if !res.GetItems().GetItems()[0].GetDone() {
		t.Fatal(res)
	}
	do(&pb.Command{Kind: &pb.Command_Adopt{Adopt: &pb.AdoptCommand{Partition: "all", Epoch: 5, Ballot: b}}})
	for i := range sessions {
		id := fmt.Sprintf("s%04d", i)
		hash := sha256.Sum256([]byte(id))
		do(&pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{SessionId: id, SecretHash: hash[:], TtlMs: 10_000, Identity: "client/x"}}})
		do(&pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
			SessionId: id, RequestId: 1, LowestOpenRequest: 1, Resource: "lock/" + id, Partition: "all", Epoch: 5,
		}}})
	}
	return m.View()
}

// frames are those that a server sends.
func frames(t testing.TB, v state.View) []*pb.BackupFrame {
	t.Helper()
	var out []*pb.BackupFrame
	put := func(f *pb.BackupFrame) error { out = append(out, f); return nil }
	_ = put(Header(&pb.BackupHeader{
		Cluster: "test", ClusterId: "id", Region: v.Region(), Incarnation: uint64(v.Incarnation()), ConfigurationVersion: 1,
		Index: v.AppliedIndex(), Term: 3, UnixMs: 1_700_000_000_000, Version: "test", FeatureLevel: v.Level(), Server: "eu-1",
	}))
	data := NewData(put)
	if err := v.WriteSnapshot(data); err != nil {
		t.Fatal(err)
	}
	if err := data.Close(); err != nil {
		t.Fatal(err)
	}
	return out
}

func file(t testing.TB, fs []*pb.BackupFrame) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := NewWriter(&b)
	for _, f := range fs {
		err = errors.Join(err, w.Put(f))
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestABackupIsWhatWasSaved(t *testing.T) {
	v := region(t, 3000) // more than one data frame
	fs := frames(t, v)
	if len(fs) < 4 {
		t.Fatalf("%d frames: the test shows little", len(fs))
	}
	path := filepath.Join(t.TempDir(), "eu.backup")
	if err := os.WriteFile(path, file(t, fs), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if c.View.StateHash() != v.StateHash() || !proto.Equal(c.Header, fs[0].GetHeader()) {
		t.Errorf("read %v, hash %x; saved %v, hash %x", c.Header, c.View.StateHash(), fs[0], v.StateHash())
	}
	if info, err := os.Stat(path); err != nil || info.Size() != c.Bytes {
		t.Errorf("%d bytes of %v, %v", c.Bytes, info, err)
	}
}

// TestEveryFlippedBitAndEveryCutIsFound, with the offset of the frame.
func TestEveryFlippedBitAndEveryCutIsFound(t *testing.T) {
	good := file(t, frames(t, region(t, 2)))
	if _, err := read(bytes.NewReader(good)); err != nil {
		t.Fatal(err)
	}
	begins := []int64{0, int64(len(magic))} // where frames begin, and the magic
	for at := len(magic); at < len(good); {
		n := int(uint32(good[at])<<24 | uint32(good[at+1])<<16 | uint32(good[at+2])<<8 | uint32(good[at+3]))
		at += prefix + n
		begins = append(begins, int64(at))
	}
	frameOf := func(at int) int64 {
		found := int64(0)
		for _, b := range begins {
			if b <= int64(at) {
				found = b
			}
		}
		return found
	}
	check := func(what string, raw []byte, at int64) {
		t.Helper()
		_, err := read(bytes.NewReader(raw))
		var damage *DamageError
		if !errors.As(err, &damage) || damage.Offset != at {
			t.Fatalf("%s: %v; want damage at offset %d", what, err, at)
		}
	}
	for i := range good {
		for bit := range 8 {
			raw := bytes.Clone(good)
			raw[i] ^= 1 << bit
			check(fmt.Sprintf("bit %d of byte %d", bit, i), raw, frameOf(i))
		}
		check(fmt.Sprintf("cut after %d bytes", i), good[:i], frameOf(i))
	}
	check("a byte more", append(bytes.Clone(good), 0), int64(len(good)))
	check("another file", []byte("#!/bin/sh\necho\n"), 0)
}

func TestFramesOutOfOrder(t *testing.T) {
	fs := frames(t, region(t, 2))
	header, data, footer := fs[0], fs[1], fs[len(fs)-1]
	other := proto.CloneOf(header)
	other.GetHeader().Incarnation++
	newer := proto.CloneOf(header)
	newer.GetHeader().Format = 9
	for name, c := range map[string]struct {
		fs   []*pb.BackupFrame
		want string
	}{
		"no header":        {fs[1:], "does not begin with a header"},
		"two headers":      {[]*pb.BackupFrame{header, header, data, footer}, "second header"},
		"data twice":       {[]*pb.BackupFrame{header, data, data, footer}, "bytes follow the footer"}, // the snapshot's own
		"no data":          {[]*pb.BackupFrame{header, footer}, "the footer counts"},
		"an empty frame":   {[]*pb.BackupFrame{header, {}, data, footer}, "unknown kind"},
		"another's header": {append([]*pb.BackupFrame{other}, fs[1:]...), "the header is of region eu"},
		"a newer format":   {append([]*pb.BackupFrame{newer}, fs[1:]...), "backup of format 9; this program reads format 1"},
	} {
		if _, err := read(bytes.NewReader(file(t, c.fs))); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %s", name, err, c.want)
		}
	}
}

// TestSaveLeavesAWholeFileOrNone: what was there before stays until the new one
// is whole, and nothing else is left behind.
func TestSaveLeavesAWholeFileOrNone(t *testing.T) {
	fs := frames(t, region(t, 2))
	dir := t.TempDir()
	path := filepath.Join(dir, "eu.backup")
	save := func(fs []*pb.BackupFrame, after error) error {
		return Save(path, func(put func(*pb.BackupFrame) error) error {
			for _, f := range fs {
				if err := put(f); err != nil {
					return err
				}
			}
			return after
		}, func(int64) {})
	}
	only := func(names ...string) {
		t.Helper()
		list, err := os.ReadDir(dir)
		if err != nil || len(list) != len(names) {
			t.Fatalf("%v, %v; want %v", list, err, names)
		}
	}
	if err := save(fs[:2], errors.New("the server died")); err == nil || !strings.Contains(err.Error(), "the server died") {
		t.Error(err)
	}
	only()
	if err := save(fs[:2], nil); err == nil || !strings.Contains(err.Error(), "before the footer") {
		t.Error(err)
	}
	only()
	if err := save(fs, nil); err != nil {
		t.Fatal(err)
	}
	only("eu.backup")
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := save(fs[:2], errors.New("again")); err == nil {
		t.Error("no error")
	}
	only("eu.backup")
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
		t.Errorf("a failed save changed the file that was there (%v)", err)
	}
	if err := Save(dir, func(func(*pb.BackupFrame) error) error { return nil }, func(int64) {}); err == nil {
		t.Error("saved over a directory")
	}
}

func FuzzRead(f *testing.F) {
	f.Add(file(f, frames(f, region(f, 2))))
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := read(bytes.NewReader(raw))
		if err == nil && !c.View.Initialised() {
			t.Error("a backup of nothing was taken")
		}
	})
}
