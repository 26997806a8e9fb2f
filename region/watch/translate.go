package watch

import (
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// Applied takes an applied entry's events, in the FSM goroutine, in log order.
// It waits for nobody.
func (h *Hub) Applied(revision uint64, region string, events []state.Event) {
	h.add(revision, translate(region, events))
}

// translate keeps what watchers are told.
func translate(region string, events []state.Event) []*pb.WatchEvent {
	var out []*pb.WatchEvent
	for _, e := range events {
		switch e := e.(type) {
		case state.LeaseGranted:
			out = append(out, &pb.WatchEvent{Kind: &pb.WatchEvent_Granted{Granted: &pb.LeaseInfo{
				Resource: e.Resource, Token: uint64(e.Token), SessionId: e.Session, Holder: e.Holder, Partition: e.Partition,
				Region: region, Value: []byte(e.Value), LockDelayMs: e.LockDelayMillis, Revision: e.Revision,
			}}})
		case state.ValueChanged:
			out = append(out, &pb.WatchEvent{Kind: &pb.WatchEvent_Value{Value: &pb.WatchValue{
				Resource: e.Resource, Token: uint64(e.Token), Value: []byte(e.Value),
			}}})
		case state.LeaseRevoked:
			out = append(out, &pb.WatchEvent{Kind: &pb.WatchEvent_Revoked{Revoked: &pb.WatchRevoked{
				Resource: e.Resource, Token: uint64(e.Token), Reason: e.Reason,
			}}})
		case state.LeaseEnded:
			out = append(out, &pb.WatchEvent{Kind: &pb.WatchEvent_Ended{Ended: &pb.WatchEnded{
				Resource: e.Resource, Token: uint64(e.Token), Reason: e.Reason.String(),
			}}})
		case state.PartitionAdopted:
			out = append(out, &pb.WatchEvent{Kind: &pb.WatchEvent_Partition{Partition: &pb.WatchPartition{
				Partition: e.Partition, Epoch: uint32(e.Epoch), Live: true,
			}}})
		case state.PartitionDropped:
			out = append(out, &pb.WatchEvent{Kind: &pb.WatchEvent_Partition{Partition: &pb.WatchPartition{
				Partition: e.Partition, Epoch: uint32(e.Epoch),
			}}})
		}
	}
	return out
}

// Of makes the State of a region's view.
func Of(region string, view state.View) State { return viewState{region, view} }

type viewState struct {
	region string
	view   state.View
}

func (s viewState) Revision() uint64    { return s.view.AppliedIndex() }
func (s viewState) Incarnation() uint64 { return uint64(s.view.Incarnation()) }

func (s viewState) Lease(resource string) *pb.LeaseInfo {
	l, ok := s.view.Lease(resource)
	if !ok {
		return nil
	}
	return s.info(l)
}

func (s viewState) Leases(prefix, after string, limit int) (page []*pb.LeaseInfo, next string) {
	leases, next := s.view.ListLeases(prefix, after, limit)
	for _, l := range leases {
		page = append(page, s.info(l))
	}
	return page, next
}

func (s viewState) Partitions() (live []*pb.WatchPartition) {
	for p := range s.view.Partitions() {
		if p.Live() {
			live = append(live, &pb.WatchPartition{Partition: p.Name, Epoch: uint32(p.Epoch), Live: true})
		}
	}
	return live
}

func (s viewState) info(l state.Lease) *pb.LeaseInfo {
	return &pb.LeaseInfo{
		Resource: l.Resource, Token: uint64(l.Token), SessionId: l.Session, Holder: l.Holder, Partition: l.Partition,
		Region: s.region, Waiters: uint32(l.Waiters), Revoked: l.Revoked,
		Value: []byte(l.Value), LockDelayMs: l.LockDelayMillis, Revision: l.Revision,
	}
}
