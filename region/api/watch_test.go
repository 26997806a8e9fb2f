package api_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// watching is an open watch.
type watching struct {
	t      *testing.T
	stream grpc.ServerStreamingClient[pb.WatchResponse]
}

func watchOn(t *testing.T, c *grpc.ClientConn, req *pb.WatchRequest) *watching {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	s, err := pb.NewWatchServiceClient(c).Watch(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	return &watching{t, s}
}

func one(resource string) *pb.WatchRequest {
	return &pb.WatchRequest{What: &pb.WatchRequest_Resource{Resource: resource}}
}

func prefix(p string) *pb.WatchRequest {
	return &pb.WatchRequest{What: &pb.WatchRequest_Prefix{Prefix: p}}
}

func (w *watching) next() *pb.WatchResponse {
	w.t.Helper()
	r, err := w.stream.Recv()
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// event returns the next event; progress is passed over.
func (w *watching) event() *pb.WatchEvent {
	w.t.Helper()
	for {
		r := w.next()
		if r.GetProgress() != nil {
			continue
		}
		if n := len(r.GetEvents().GetEvents()); n != 1 {
			w.t.Fatalf("not one event: %v", r)
		}
		return r.GetEvents().GetEvents()[0]
	}
}

func TestWatchTellsWhatWasAppliedOnAnyServer(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.leader)
		leases := pb.NewLeaseServiceClient(w.leader)
		take := func(resource string, request uint64) uint64 {
			res, err := leases.Acquire(t.Context(), acquire(s, resource, request))
			if err != nil {
				t.Fatal(err)
			}
			return res.GetGranted().GetToken()
		}
		first := take("lock/x", 1)
		w.region.Depose() // no leader is needed to watch
		for who, c := range w.both() {
			snapshot := watchOn(t, c, one("lock/x")).next()
			l := snapshot.GetSnapshot().GetLeases()
			if len(l) != 1 || l[0].GetToken() != first || l[0].GetHolder() != "client/alice" || l[0].GetRegion() != "eu" ||
				!snapshot.GetSnapshot().GetFirst() || !snapshot.GetSnapshot().GetLast() || snapshot.GetRevision() != w.region.View().AppliedIndex() {
				t.Fatalf("%s: %v", who, snapshot)
			}
		}
		w.region.Elect(0)
		all, x := watchOn(t, w.follower, prefix("lock/")), watchOn(t, w.follower, one("lock/x"))
		begin := all.next()
		if p := begin.GetSnapshot().GetPartitions(); len(p) != 1 || !p[0].GetLive() || p[0].GetEpoch() != 1 {
			t.Fatalf("partitions: %v", p)
		}
		x.next()
		second := take("lock/y", 2)
		if e := all.event(); e.GetGranted().GetToken() != second || e.GetGranted().GetResource() != "lock/y" || e.GetRevision() <= begin.GetRevision() {
			t.Fatalf("%v", e)
		}
		take("shard/1", 3)
		if _, err := leases.Release(t.Context(), &pb.ReleaseRequest{SessionId: s.GetSessionId(), Secret: s.GetSecret(), Resource: "lock/x", Token: first}); err != nil {
			t.Fatal(err)
		}
		for _, w := range []*watching{all, x} {
			if e := w.event(); e.GetEnded().GetToken() != first || e.GetEnded().GetReason() != "released" {
				t.Fatalf("%v", e)
			}
		}
		// It goes on where another watch was, on another server.
		again := prefix("lock/")
		again.AfterRevision, again.Incarnation = begin.GetRevision(), begin.GetIncarnation()
		r := watchOn(t, w.leader, again).next()
		if e := r.GetEvents().GetEvents(); len(e) != 2 || e[0].GetGranted().GetResource() != "lock/y" || e[1].GetEnded().GetToken() != first {
			t.Fatalf("after %d: %v", begin.GetRevision(), r)
		}
	})
}

func TestAWatchOfOneResourceEndsWithItsPartition(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.leader)
		if _, err := pb.NewLeaseServiceClient(w.leader).Acquire(t.Context(), acquire(s, "lock/x", 1)); err != nil {
			t.Fatal(err)
		}
		x, all := watchOn(t, w.follower, one("lock/x")), watchOn(t, w.follower, prefix(""))
		x.next()
		all.next()
		w.region.Lose(1, "us")
		var last error
		var told []string
		for {
			r, err := x.stream.Recv()
			if last = err; err != nil {
				break
			}
			for _, e := range r.GetEvents().GetEvents() {
				if e.GetEnded() != nil {
					told = append(told, e.GetEnded().GetReason())
				}
			}
		}
		if n := detail(last).GetNotOwner(); n.GetOwner() != "us" || fmt.Sprint(told) != "[dropped]" {
			t.Errorf("ended by %v, after %v", last, told)
		}
		var e []*pb.WatchEvent
		for len(e) < 2 { // the leases go in a later entry than the partition
			e = append(e, all.next().GetEvents().GetEvents()...)
		}
		if len(e) != 2 || e[0].GetPartition().GetLive() || e[1].GetEnded().GetReason() != "dropped" {
			t.Errorf("the prefix was told %v", e)
		}
		if _, err := watchOn(t, w.leader, one("lock/x")).stream.Recv(); detail(err).GetNotOwner().GetOwner() != "us" {
			t.Errorf("a new watch: %v", err)
		}
	})
}

func TestBadWatches(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		every := func(ms int64) *pb.WatchRequest {
			r := prefix("")
			r.ProgressMs = ms
			return r
		}
		for _, c := range []struct {
			req  *pb.WatchRequest
			text string
		}{
			{&pb.WatchRequest{}, "what: is missing; name a resource or a prefix"},
			{one("lock"), `resource: resource "lock": has no '/'; write shard/N or lock/NAME`},
			{prefix("locks/"), `prefix: "locks/" begins no resource's name; write for example lock/ or shard/`},
			{prefix("lock/" + strings.Repeat("x", 600)), "prefix: has 605 bytes; at most 512 are allowed"},
			{every(499), "progress_ms: 499 is out of range; choose 500 to 60000, or 0 for the default of 10000"},
			{every(-1), "progress_ms: -1 is out of range; choose 500 to 60000, or 0 for the default of 10000"},
			{every(1 << 62), "progress_ms: 4611686018427387904 is out of range; choose 500 to 60000, or 0 for the default of 10000"},
		} {
			_, err := watchOn(t, w.follower, c.req).stream.Recv()
			if st := status.Convert(err); st.Code() != codes.InvalidArgument || st.Message() != c.text {
				t.Errorf("%v: %v", c.req, err)
			}
		}
	})
}

func TestWatchesOfOneConnectionAreBounded(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		refused := 0
		for range 1001 {
			if _, err := watchOn(t, w.leader, one("lock/x")).stream.Recv(); err != nil {
				if o := detail(err).GetOverloaded(); o == nil || time.Duration(o.GetRetryNs()) != time.Second {
					t.Fatal(err)
				}
				refused++
			}
		}
		if refused != 1 {
			t.Errorf("%d refused", refused)
		}
	})
}
