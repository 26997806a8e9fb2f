package replica

import (
	"io"
	"testing"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

type deaf struct{}

func (deaf) Applied(uint64, uint64, []state.Event) {}
func (deaf) Restored()                             {}
func (deaf) Deposed(uint64)                        {}

// A View is of the newest entry, whether Views are asked for after each entry or
// seldom, and stays as it was.
func TestViewsAreMadeForWhoAsks(t *testing.T) {
	f := newFSM("s", deaf{}, nil, func(err error) { t.Fatal(err) })
	index := uint64(0)
	apply := func(kind *pb.Command) {
		t.Helper()
		data, err := proto.Marshal(&pb.Entry{Commands: []*pb.Command{kind, {Kind: &pb.Command_Pulse{Pulse: &pb.PulseCommand{}}}}})
		if err != nil {
			t.Fatal(err)
		}
		index++
		if err, failed := f.Apply(&raft.Log{Index: index, Term: 1, Type: raft.LogCommand, Data: data}).(error); failed {
			t.Fatal(err)
		}
	}
	open := func(id string) *pb.Command {
		return &pb.Command{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{SessionId: id, SecretHash: make([]byte, 32), TtlMs: 1000}}}
	}
	apply(&pb.Command{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: "r", Incarnation: 1}}})
	var views []state.View
	names := "abcdefghijklmnopqrstuvwxyz"
	for i := range names {
		apply(open(names[i : i+1]))
		if i%3 == 2 {
			if f.view.Load() != nil && i > 2 {
				t.Fatalf("entry %d: a View was made for nobody", index)
			}
		}
		if i%6 != 0 && i%6 != 5 { // asks after two entries in a row, then after none of four
			continue
		}
		v := f.View()
		if v.PulseIndex() != index || v.AppliedIndex() != index {
			t.Errorf("the View is of entry %d, not %d", v.AppliedIndex(), index)
		}
		views = append(views, v)
		if i%6 == 0 && i > 0 && f.view.Load() == nil {
			t.Error("the View that was asked for is not kept")
		}
	}
	for i, v := range views {
		n := 0
		for j := range names {
			if _, ok := v.Session(names[j : j+1]); ok {
				n++
			}
		}
		if want := int(v.AppliedIndex()) - 1; n != want {
			t.Errorf("View %d of entry %d has %d sessions, not %d", i, v.AppliedIndex(), n, want)
		}
	}
	s, err := f.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	before := f.View()
	r, w := io.Pipe()
	go func() {
		snap, _ := s.(snapshot)
		w.CloseWithError(snap.view.WriteSnapshot(w))
	}()
	apply(open("later"))
	if err := f.Restore(r); err != nil {
		t.Fatal(err)
	}
	if v := f.View(); v.AppliedIndex() != before.AppliedIndex() {
		t.Errorf("after a restore of entry %d the View is of entry %d", before.AppliedIndex(), v.AppliedIndex())
	}
}
