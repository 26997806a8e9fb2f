package watch

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
	"pgregory.net/rapid"
)

// translate is encode by the messages' own code.
func translate(revision uint64, region string, events []state.Event) (out []*pb.WatchEvent) {
	add := func(e *pb.WatchEvent) {
		e.Revision, e.Position = revision, uint32(len(out))
		out = append(out, e)
	}
	for _, e := range events {
		switch e := e.(type) {
		case state.LeaseGranted:
			add(&pb.WatchEvent{Kind: &pb.WatchEvent_Granted{Granted: &pb.LeaseInfo{
				Resource: e.Resource, Token: uint64(e.Token), SessionId: e.Session, Holder: e.Holder, Partition: e.Partition,
				Region: region, Value: []byte(e.Value), LockDelayMs: e.LockDelayMillis, Revision: e.Revision,
			}}})
		case state.ValueChanged:
			add(&pb.WatchEvent{Kind: &pb.WatchEvent_Value{Value: &pb.WatchValue{
				Resource: e.Resource, Token: uint64(e.Token), Value: []byte(e.Value),
			}}})
		case state.LeaseRevoked:
			add(&pb.WatchEvent{Kind: &pb.WatchEvent_Revoked{Revoked: &pb.WatchRevoked{
				Resource: e.Resource, Token: uint64(e.Token), Reason: e.Reason,
			}}})
		case state.LeaseEnded:
			add(&pb.WatchEvent{Kind: &pb.WatchEvent_Ended{Ended: &pb.WatchEnded{
				Resource: e.Resource, Token: uint64(e.Token), Reason: e.Reason.String(),
			}}})
		case state.PartitionAdopted:
			add(&pb.WatchEvent{Kind: &pb.WatchEvent_Partition{Partition: &pb.WatchPartition{
				Partition: e.Partition, Epoch: uint32(e.Epoch), Live: true,
			}}})
		case state.PartitionDropped:
			add(&pb.WatchEvent{Kind: &pb.WatchEvent_Partition{Partition: &pb.WatchPartition{
				Partition: e.Partition, Epoch: uint32(e.Epoch),
			}}})
		}
	}
	return out
}

func TestWhatIsRememberedIsWhatHappened(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := func() string {
			return strings.Repeat(rapid.SampledFrom([]string{"", "a", "lock/x", "\u00e9", "\x00"}).Draw(t, "text"), rapid.SampledFrom([]int{1, 2, 127, 200, 20_000}).Draw(t, "times"))
		}
		number := func() uint64 {
			return rapid.SampledFrom([]uint64{0, 1, 127, 128, 1 << 31, 1<<53 - 1, 1<<64 - 1}).Draw(t, "number")
		}
		kinds := []func() state.Event{
			func() state.Event {
				return state.LeaseGranted{
					Resource: text(), Token: fence.Token(number()), Session: text(), Holder: text(), Partition: text(), Value: text(),
					LockDelayMillis: int64(number()), Revision: number(), Offered: true, Request: 1,
				}
			},
			func() state.Event {
				return state.ValueChanged{Resource: text(), Token: fence.Token(number()), Value: text()}
			},
			func() state.Event {
				return state.LeaseRevoked{Resource: text(), Token: fence.Token(number()), Reason: text()}
			},
			func() state.Event {
				return state.LeaseEnded{Resource: text(), Token: fence.Token(number()), Reason: state.EndReason(rapid.IntRange(0, 6).Draw(t, "reason"))}
			},
			func() state.Event {
				return state.PartitionAdopted{Partition: text(), Epoch: fence.Epoch(uint32(number()))}
			},
			func() state.Event {
				return state.PartitionDropped{Partition: text(), Epoch: fence.Epoch(uint32(number()))}
			},
			func() state.Event { return state.PulseCommitted{Index: 5} },
			func() state.Event { return state.SessionClosed{ID: "s"} },
		}
		r := ring{maxEvents: 1000, maxBytes: 1 << 30}
		var want [][]*pb.WatchEvent
		for revision := range rapid.Uint64Range(1, 9).Draw(t, "entries") {
			var events []state.Event
			for range rapid.IntRange(0, 4).Draw(t, "events") {
				events = append(events, kinds[rapid.IntRange(0, len(kinds)-1).Draw(t, "kind")]())
			}
			region := text()
			r.add(revision+1, func(data []byte) ([]byte, int) { return encode(data, revision+1, region, events) })
			if w := translate(revision+1, region, events); len(w) > 0 {
				want = append(want, w)
			}
		}
		parts, ok := r.after(0)
		for _, p := range parts {
			for _, e := range p.entries {
				got, err := p.decode(e)
				if err != nil || len(want) == 0 || len(got) != len(want[0]) {
					t.Fatalf("%d: %v, %v, not %v", e.revision, got, err, want)
				}
				for i, g := range got {
					if !proto.Equal(g, want[0][i]) {
						t.Fatalf("%v, not %v", g, want[0][i])
					}
				}
				want = want[1:]
			}
		}
		if !ok || len(want) > 0 {
			t.Fatalf("missing: %v", want)
		}
	})
}
