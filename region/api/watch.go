package api

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
	"github.com/headlease/headlease/region/watch"
)

// Bounds of how often a watch's progress comes.
const (
	DefaultProgress = 10 * time.Second
	MinProgress     = 500 * time.Millisecond
	MaxProgress     = time.Minute

	maxPrefix = 512
	// tooManyRetry is when a refused watch may be asked for again.
	tooManyRetry = time.Second
)

// Watches is the WatchService of any server of the region: it answers from
// what this server has applied.
type Watches struct {
	pb.UnimplementedWatchServiceServer
	Region string
	Raft   interface{ View() state.View }
	Hub    *watch.Hub
	// Leases knows the places of resources.
	Leases *Leases
}

// Watch follows one resource, or all with a prefix.
func (s *Watches) Watch(req *pb.WatchRequest, ss grpc.ServerStreamingServer[pb.WatchResponse]) error {
	q, err := s.query(req)
	if err != nil {
		return err
	}
	every := time.Duration(req.GetProgressMs()) * time.Millisecond
	switch {
	case req.GetProgressMs() == 0:
		every = DefaultProgress
	case req.GetProgressMs() < 0 || req.GetProgressMs() > MaxProgress.Milliseconds() || every < MinProgress:
		return invalid("progress_ms", "%d is out of range; choose %d to %d, or 0 for the default of %d",
			req.GetProgressMs(), MinProgress.Milliseconds(), MaxProgress.Milliseconds(), DefaultProgress.Milliseconds())
	}
	w, err := s.Hub.Watch(q, connectionOf(ss.Context()), req.GetIncarnation(), req.GetAfterRevision())
	if err != nil {
		if errors.Is(err, watch.ErrTooMany) {
			return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_Overloaded{Overloaded: &pb.Overloaded{What: err.Error(), RetryNs: int64(tooManyRetry)}}})
		}
		return err
	}
	defer w.Close()
	// The watcher is told of what changes from here on; what has changed before
	// is in the View.
	if err := s.owned(q); err != nil {
		return err
	}
	for {
		r, err := w.Next(ss.Context(), every)
		if err != nil {
			return resultError(nil, err)
		}
		if err := ss.Send(r); err != nil {
			return err
		}
		if mayMove(r) {
			if err := s.owned(q); err != nil {
				return err
			}
		}
	}
}

// query checks what is asked for.
func (s *Watches) query(req *pb.WatchRequest) (watch.Query, error) {
	view := s.Raft.View()
	if view.Configuration() == nil {
		return watch.Query{}, uninitialised("of region " + s.Region)
	}
	switch k := req.GetWhat().(type) {
	case *pb.WatchRequest_Resource:
		place, err := s.Leases.locate(view, k.Resource)
		if err != nil {
			return watch.Query{}, err
		}
		return watch.Query{Resource: k.Resource, Partition: place.Partition}, nil
	case *pb.WatchRequest_Prefix:
		if len(k.Prefix) > maxPrefix {
			return watch.Query{}, invalid("prefix", "has %d bytes; at most %d are allowed", len(k.Prefix), maxPrefix)
		}
		if !begins(k.Prefix, "lock/") && !begins(k.Prefix, "shard/") {
			return watch.Query{}, invalid("prefix", "%q begins no resource's name; write for example lock/ or shard/", k.Prefix)
		}
		return watch.Query{Prefix: k.Prefix}, nil
	}
	return watch.Query{}, invalid("what", "is missing; name a resource or a prefix")
}

// begins reports whether a resource of a kind may begin with the prefix.
func begins(prefix, kind string) bool {
	n := min(len(prefix), len(kind))
	return prefix[:n] == kind[:n]
}

// mayMove reports whether a response may say that the region owns a partition
// no more.
func mayMove(r *pb.WatchResponse) bool {
	if r.GetSnapshot().GetLast() {
		return true
	}
	for _, e := range r.GetEvents().GetEvents() {
		if p := e.GetPartition(); p != nil && !p.GetLive() {
			return true
		}
	}
	return false
}

// owned returns an error when a single resource's partition is not live here.
func (s *Watches) owned(q watch.Query) error {
	if q.Resource == "" {
		return nil
	}
	p, _ := s.Raft.View().Partition(q.Partition)
	if p.Live() {
		return nil
	}
	n := &pb.NotOwner{Partition: q.Partition}
	if v := p.Register.Value; !v.Released() && v.Owner.Name != s.Region {
		n.Owner, n.Epoch, n.Addresses = v.Owner.Name, uint32(v.Epoch), s.Leases.Addresses(v.Owner.Name)
	}
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_NotOwner{NotOwner: n}})
}

// connectionOf names the connection that a call came on.
func connectionOf(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		return p.Addr.String()
	}
	return ""
}
