package watch

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// Applied takes an applied entry's events, in the FSM goroutine, in log order.
// It waits for nobody.
func (h *Hub) Applied(revision uint64, region string, events []state.Event) {
	h.add(revision, func(data []byte) ([]byte, int) { return encode(data, revision, region, events) })
}

// Numbers of the fields that encode writes; a test compares what it writes with
// what the messages' own code makes of the same events.
const (
	eventRevision, eventPosition                                                     protowire.Number = 1, 2
	eventGranted, eventValue, eventRevoked, eventEnded, eventPartition               protowire.Number = 3, 4, 5, 6, 7
	ofResource, ofToken, ofText                                                      protowire.Number = 1, 2, 3 // text: a value, or a reason
	infoSession, infoHolder, infoPartition, infoRegion, infoValue, infoDelay, infoAt protowire.Number = 3, 4, 5, 6, 9, 10, 11
	partitionName, partitionEpoch, partitionLive                                     protowire.Number = 1, 2, 3
)

// encode appends what watchers are told of an entry: pb.WatchEvents, each
// behind its length. It is done for each entry on each server, mostly for
// nobody; the messages themselves are made for watchers alone.
func encode(data []byte, revision uint64, region string, events []state.Event) (_ []byte, n int) {
	for _, e := range events {
		switch e := e.(type) {
		case state.LeaseGranted:
			body := textSize(e.Resource) + numberSize(uint64(e.Token)) + textSize(e.Session) + textSize(e.Holder) + textSize(e.Partition) +
				textSize(region) + textSize(e.Value) + numberSize(uint64(e.LockDelayMillis)) + numberSize(e.Revision)
			data = appendHeader(data, revision, n, eventGranted, body)
			data = appendText(data, ofResource, e.Resource)
			data = appendNumber(data, ofToken, uint64(e.Token))
			data = appendText(data, infoSession, e.Session)
			data = appendText(data, infoHolder, e.Holder)
			data = appendText(data, infoPartition, e.Partition)
			data = appendText(data, infoRegion, region)
			data = appendText(data, infoValue, e.Value)
			data = appendNumber(data, infoDelay, uint64(e.LockDelayMillis))
			data = appendNumber(data, infoAt, e.Revision)
		case state.ValueChanged:
			data = appendTold(data, revision, n, eventValue, e.Resource, uint64(e.Token), e.Value)
		case state.LeaseRevoked:
			data = appendTold(data, revision, n, eventRevoked, e.Resource, uint64(e.Token), e.Reason)
		case state.LeaseEnded:
			data = appendTold(data, revision, n, eventEnded, e.Resource, uint64(e.Token), e.Reason.String())
		case state.PartitionAdopted:
			data = appendPartition(data, revision, n, e.Partition, uint64(e.Epoch), 1)
		case state.PartitionDropped:
			data = appendPartition(data, revision, n, e.Partition, uint64(e.Epoch), 0)
		default:
			continue
		}
		n++
	}
	return data, n
}

// appendTold appends a WatchValue, WatchRevoked or WatchEnded, which look alike.
func appendTold(data []byte, revision uint64, position int, kind protowire.Number, resource string, token uint64, text string) []byte {
	data = appendHeader(data, revision, position, kind, textSize(resource)+numberSize(token)+textSize(text))
	data = appendText(data, ofResource, resource)
	data = appendNumber(data, ofToken, token)
	return appendText(data, ofText, text)
}

func appendPartition(data []byte, revision uint64, position int, name string, epoch, live uint64) []byte {
	data = appendHeader(data, revision, position, eventPartition, textSize(name)+numberSize(epoch)+numberSize(live))
	data = appendText(data, partitionName, name)
	data = appendNumber(data, partitionEpoch, epoch)
	return appendNumber(data, partitionLive, live)
}

// appendHeader appends an event up to its kind's body, whose length is given.
func appendHeader(data []byte, revision uint64, position int, kind protowire.Number, body int) []byte {
	data = protowire.AppendVarint(data, uint64(numberSize(revision)+numberSize(uint64(position))+tagSize+protowire.SizeBytes(body)))
	data = appendNumber(data, eventRevision, revision)
	data = appendNumber(data, eventPosition, uint64(position))
	data = protowire.AppendTag(data, kind, protowire.BytesType)
	return protowire.AppendVarint(data, uint64(body))
}

// tagSize is that of fields up to 15.
const tagSize = 1

func textSize(s string) int {
	if s == "" {
		return 0
	}
	return tagSize + protowire.SizeBytes(len(s))
}

func numberSize(n uint64) int {
	if n == 0 {
		return 0
	}
	return tagSize + protowire.SizeVarint(n)
}

func appendText(data []byte, field protowire.Number, s string) []byte {
	if s == "" {
		return data
	}
	return protowire.AppendString(protowire.AppendTag(data, field, protowire.BytesType), s)
}

func appendNumber(data []byte, field protowire.Number, n uint64) []byte {
	if n == 0 {
		return data
	}
	return protowire.AppendVarint(protowire.AppendTag(data, field, protowire.VarintType), n)
}

// decode returns the events of an entry.
func (p part) decode(e entry) (events []*pb.WatchEvent, err error) {
	for data := p.data[e.from:e.end]; len(data) > 0; {
		b, n := protowire.ConsumeBytes(data)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		ev := &pb.WatchEvent{}
		if err := proto.Unmarshal(b, ev); err != nil {
			return nil, err
		}
		events, data = append(events, ev), data[n:]
	}
	return events, nil
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
