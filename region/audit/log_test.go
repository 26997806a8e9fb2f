package audit

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newLog(t *testing.T, dir string, max int64) *Log {
	t.Helper()
	at := time.Unix(0, 0)
	return New(Config{Dir: dir, Region: "eu", Server: "eu-1", MaxBytes: max, Now: func() time.Time { at = at.Add(time.Second); return at }})
}

// run runs a log until what is queued is written.
func run(t *testing.T, l *Log) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Run(ctx); err != nil {
		t.Fatal(err)
	}
}

func exported(t *testing.T, l *Log) (out []Record) {
	t.Helper()
	if err := l.Export(func(line []byte) error {
		var r Record
		if err := json.Unmarshal(line, &r); err != nil {
			t.Errorf("%s: %v", line, err)
		}
		out = append(out, r)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

func draining(partition string) []state.Event {
	return []state.Event{state.PartitionDraining{Partition: partition, Epoch: 1, Successor: "us", By: "admin/a"}}
}

func TestEntriesAppliedAgainAreWrittenOnce(t *testing.T) {
	dir := t.TempDir()
	for restart := range 3 {
		l := newLog(t, dir, 0)
		for i := range uint64(5 + restart) {
			l.Applied(i+1, 1, append(draining("p"), state.DrainAborted{Partition: "p", Epoch: 1}))
		}
		run(t, l)
		got := exported(t, l)
		if len(got) != 2*(5+restart) {
			t.Fatalf("start %d: %d records", restart, len(got))
		}
		for i, r := range got {
			if r.Index != uint64(i/2+1) || r.N != i%2 || r.Region != "eu" || r.Server != "eu-1" {
				t.Fatalf("record %d: %+v", i, r)
			}
		}
	}
}

func TestTheFilesAreBoundedAndTheNewestStays(t *testing.T) {
	dir := t.TempDir()
	l := newLog(t, dir, 2000)
	for i := range uint64(100) {
		l.Applied(i+1, 1, draining("p"))
		run(t, l)
	}
	got := exported(t, l)
	if n := len(got); n < 5 || n > 40 || got[n-1].Index != 100 {
		t.Fatalf("%d records, the last %+v", n, got[n-1])
	}
	for i := 1; i < len(got); i++ {
		if got[i].Index != got[i-1].Index+1 {
			t.Fatalf("record %d follows %d", got[i].Index, got[i-1].Index)
		}
	}
	for _, name := range []string{FileName, FileName + Older} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Size() > 2000 {
			t.Errorf("%s: %v %v", name, info, err)
		}
	}
}

// An export that its reader holds up keeps nobody from writing.
func TestAnExportDoesNotHoldTheLogUp(t *testing.T) {
	l := newLog(t, t.TempDir(), 0)
	l.Applied(1, 1, draining("a"))
	run(t, l)
	seen := 0
	if err := l.Export(func([]byte) error {
		seen++
		l.Applied(2, 1, draining("b"))
		run(t, l)
		return nil
	}); err != nil || seen != 1 {
		t.Fatalf("%d lines, %v", seen, err)
	}
	if got := exported(t, l); len(got) != 2 {
		t.Errorf("%+v", got)
	}
}

// A crash leaves a part of a line: what comes after it is whole, and what was cut
// off is written again when the entry is applied again.
func TestALineThatACrashCutOffIsWrittenAgain(t *testing.T) {
	dir := t.TempDir()
	l := newLog(t, dir, 0)
	l.Applied(1, 1, draining("a"))
	l.Applied(2, 1, draining("b"))
	run(t, l)
	raw, err := os.ReadFile(filepath.Join(dir, FileName))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, FileName), raw[:len(raw)-10], 0o600); err != nil {
		t.Fatal(err)
	}
	l = newLog(t, dir, 0)
	for i, p := range []string{"a", "b", "c"} {
		l.Applied(uint64(i+1), 1, draining(p))
	}
	run(t, l)
	var got []string
	for _, r := range exported(t, l) {
		got = append(got, r.Partition)
	}
	if fmt.Sprint(got) != "[a b c]" {
		t.Errorf("records of %v", got)
	}
}

// A disk that refuses costs at most what the queue does not hold, and that is
// told.
func TestWhatIsLostIsTold(t *testing.T) {
	dir := t.TempDir()
	l := newLog(t, filepath.Join(dir, "missing"), 0)
	for i := range uint64(maxQueue + 7) {
		l.Applied(i+1, 1, draining("p"))
	}
	run(t, l)
	if err := os.Mkdir(filepath.Join(dir, "missing"), 0o700); err != nil {
		t.Fatal(err)
	}
	run(t, l)
	got := exported(t, l)
	if len(got) != maxQueue+1 || got[maxQueue].Kind != Gap {
		t.Fatalf("%d records, the last %+v", len(got), got[len(got)-1])
	}
}

func TestRecordsOfEvents(t *testing.T) {
	w := newTranslator()
	conf := func(version uint64, prefer ...string) *pb.ClusterConfiguration {
		return &pb.ClusterConfiguration{Version: version, Partitions: []*pb.PartitionSpec{{Name: "p", Prefer: prefer}}}
	}
	accepted := func(round uint64, owner string, epoch uint32) state.Event {
		b := register.Ballot{Round: round, Region: "eu", Incarnation: 1}
		v := register.ValueOf(&pb.Value{Owner: owner, OwnerIncarnation: 1, Epoch: epoch, Successor: "us", Reason: "why"})
		return state.RegisterChanged{Partition: "p", Record: register.Record{Promised: b, Accepted: b, Value: v}}
	}
	var got []string
	for i, e := range []state.Event{
		state.Configured{Configuration: conf(1, "eu")},
		accepted(1, "eu", 1),
		accepted(2, "eu", 1), // a new ballot alone is nothing
		state.RegisterChanged{Partition: "p", Record: register.Record{Promised: register.Ballot{Round: 9}}},
		state.PartitionAdopted{Partition: "p", Epoch: 1, Unsettled: true},
		state.PartitionAdopted{Partition: "p", Epoch: 1, Resumed: true},
		state.LeaseGranted{Partition: "p"},
		state.PulseCommitted{Index: 4},
		state.Configured{Configuration: conf(2, "us", "eu")},
		state.PartitionDropped{Partition: "p", Epoch: 1},
		state.TermBegun{Term: 3, Server: "eu-2"},
		state.LevelRaised{Level: 2},
	} {
		for _, r := range w.records(uint64(i), 3, []state.Event{e}) {
			got = append(got, fmt.Sprintf("%s %s %d %s %d %v %s", r.Kind, r.Partition, r.Epoch, r.Owner, r.Version, r.Changes, r.Text))
		}
	}
	want := []string{
		"configured  0  1 [] ", "accepted p 1 eu 0 [] ", "adopted p 1  0 [] without a release: lock delays are waited out", "resumed p 1  0 [] ",
		"configured  0  2 [~ partition p: prefer [eu] -> [us eu]] ", "dropped p 1  0 [] ", "leader  0  0 [] eu-2", "feature level  0  0 [] 2",
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("records\n%q\nwant\n%q", got, want)
	}
}
