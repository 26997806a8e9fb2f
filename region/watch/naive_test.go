package watch

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// naive is the model: the state after each entry, kept whole.
type naive struct {
	first  uint64 // revision of states[0]
	states []map[string]*pb.LeaseInfo
}

func newNaive(revision uint64) *naive {
	return &naive{first: revision, states: []map[string]*pb.LeaseInfo{{}}}
}

func (n *naive) last() uint64 { return n.first + uint64(len(n.states)) - 1 }

// at returns the state at a revision.
func (n *naive) at(revision uint64) map[string]*pb.LeaseInfo { return n.states[revision-n.first] }

// apply adds an entry with these events.
func (n *naive) apply(events []*pb.WatchEvent) {
	s := maps.Clone(n.at(n.last()))
	for _, e := range events {
		change(s, e)
	}
	n.states = append(n.states, s)
}

func change(s map[string]*pb.LeaseInfo, e *pb.WatchEvent) {
	switch k := e.GetKind().(type) {
	case *pb.WatchEvent_Granted:
		s[k.Granted.GetResource()] = k.Granted
	case *pb.WatchEvent_Value:
		l := proto.CloneOf(s[k.Value.GetResource()])
		l.Value = k.Value.GetValue()
		s[l.GetResource()] = l
	case *pb.WatchEvent_Ended:
		delete(s, k.Ended.GetResource())
	}
}

func (n *naive) State() State { return naiveState{n.at(n.last()), n.last()} }

type naiveState struct {
	leases   map[string]*pb.LeaseInfo
	revision uint64
}

func (s naiveState) Revision() uint64                    { return s.revision }
func (naiveState) Incarnation() uint64                   { return 7 }
func (naiveState) Partitions() []*pb.WatchPartition      { return nil }
func (s naiveState) Lease(resource string) *pb.LeaseInfo { return s.leases[resource] }

func (s naiveState) Leases(prefix, after string, limit int) (page []*pb.LeaseInfo, next string) {
	for _, r := range slices.Sorted(maps.Keys(s.leases)) {
		switch {
		case !strings.HasPrefix(r, prefix) || r <= after:
		case len(page) == limit:
			return page, page[limit-1].GetResource()
		default:
			page = append(page, s.leases[r])
		}
	}
	return page, ""
}

// consumer applies what a watcher is told, and refuses what makes no sense.
type consumer struct {
	query    Query
	held     map[string]*pb.LeaseInfo
	complete uint64
	revision uint64 // and
	position uint32 // of the newest event
	partial  bool   // in a snapshot, or between a resync and its snapshot
	known    bool   // has ever had a whole snapshot
	resyncs  int
}

func (c *consumer) take(r *pb.WatchResponse) error {
	if r.GetIncarnation() != 7 {
		return fmt.Errorf("incarnation %d", r.GetIncarnation())
	}
	if r.GetResync() == nil && r.GetRevision() < c.complete {
		return fmt.Errorf("revision %d after %d", r.GetRevision(), c.complete)
	}
	switch k := r.GetKind().(type) {
	case *pb.WatchResponse_Resync:
		c.resyncs++
		c.partial, c.known = true, false
		return nil
	case *pb.WatchResponse_Snapshot:
		if k.Snapshot.GetFirst() {
			c.held, c.partial = map[string]*pb.LeaseInfo{}, true
			c.revision, c.position = r.GetRevision(), ^uint32(0)
		} else if !c.partial {
			return fmt.Errorf("a snapshot's later part without its first")
		}
		for _, l := range k.Snapshot.GetLeases() {
			if c.held[l.GetResource()] != nil {
				return fmt.Errorf("%s is twice in a snapshot", l.GetResource())
			}
			c.held[l.GetResource()] = l
		}
		if k.Snapshot.GetLast() {
			c.partial, c.known = false, true
		}
	case *pb.WatchResponse_Events:
		if c.partial || !c.known {
			return fmt.Errorf("events before the end of a snapshot")
		}
		for _, e := range k.Events.GetEvents() {
			if e.GetRevision() < c.revision || e.GetRevision() == c.revision && e.GetPosition() <= c.position {
				return fmt.Errorf("event %d.%d after %d.%d", e.GetRevision(), e.GetPosition(), c.revision, c.position)
			}
			c.revision, c.position = e.GetRevision(), e.GetPosition()
			if !c.query.matches(e) {
				return fmt.Errorf("an event that was not asked for: %v", e)
			}
			if v := e.GetValue(); v != nil && c.held[v.GetResource()].GetToken() != v.GetToken() {
				return fmt.Errorf("a value for a lease that is not held: %v", e)
			}
			if v := e.GetEnded(); v != nil && c.held[v.GetResource()].GetToken() != v.GetToken() {
				return fmt.Errorf("the end of a lease that is not held: %v", e)
			}
			change(c.held, e)
		}
	}
	c.complete = r.GetRevision()
	return nil
}

// check compares with the model where the consumer has everything.
func (c *consumer) check(n *naive) error {
	if c.partial || !c.known || c.complete > n.last() || c.revision > c.complete {
		return nil
	}
	want := map[string]*pb.LeaseInfo{}
	for r, l := range n.at(c.complete) {
		if c.query.Resource == r || c.query.Resource == "" && strings.HasPrefix(r, c.query.Prefix) {
			want[r] = l
		}
	}
	if !maps.EqualFunc(want, c.held, func(a, b *pb.LeaseInfo) bool { return proto.Equal(a, b) }) {
		return fmt.Errorf("at revision %d it has %v; the region had %v", c.complete, c.held, want)
	}
	return nil
}

func granted(resource string, token uint64, value string) *pb.WatchEvent {
	return &pb.WatchEvent{Kind: &pb.WatchEvent_Granted{Granted: &pb.LeaseInfo{Resource: resource, Token: token, Value: []byte(value)}}}
}

func ended(resource string, token uint64) *pb.WatchEvent {
	return &pb.WatchEvent{Kind: &pb.WatchEvent_Ended{Ended: &pb.WatchEnded{Resource: resource, Token: token}}}
}

func valued(resource string, token uint64, value string) *pb.WatchEvent {
	return &pb.WatchEvent{Kind: &pb.WatchEvent_Value{Value: &pb.WatchValue{Resource: resource, Token: token, Value: []byte(value)}}}
}

// apply adds an entry with these events.
func (h *Hub) apply(revision uint64, events []*pb.WatchEvent) {
	h.add(revision, func(data []byte) ([]byte, int) {
		for i, e := range events {
			e = proto.CloneOf(e)
			e.Revision, e.Position = revision, uint32(i)
			b, err := proto.Marshal(e)
			if err != nil {
				panic(err)
			}
			data = protowire.AppendBytes(data, b)
		}
		return data, len(events)
	})
}
