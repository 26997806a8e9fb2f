package api

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
	"github.com/headlease/headlease/region/lessor/run"
	"github.com/headlease/headlease/region/state"
)

const (
	// lapsedRetry is when to ask again about a lapsed head lease.
	lapsedRetry = 250 * time.Millisecond
	// A leader that has led for less than young is, mostly, some milliseconds from
	// its first renewal.
	young      = 200 * time.Millisecond
	youngRetry = 10 * time.Millisecond
)

// lapsedRetryNs is what is said of that.
func (s *Leases) lapsedRetryNs() int64 {
	if led, ok := s.Lessor.LedFor(); ok && led < young {
		return int64(youngRetry)
	}
	return int64(lapsedRetry)
}

const (
	defaultPage = 100
	maxPage     = 1000
	// maxPageBytes bounds a page with values; a lease without one has some
	// leaseBytes.
	maxPageBytes = 1 << 20
	leaseBytes   = 512
)

// Leases is the LeaseService on the leader.
type Leases struct {
	pb.UnimplementedLeaseServiceServer
	Region string
	Raft   Raft
	Lessor *run.Shell
	Clock  clock.Clock
	// Identify returns who calls.
	Identify func(context.Context) (policy.Caller, bool)
	// Addresses are the API addresses of a region's servers.
	Addresses func(region string) []string

	places atomic.Pointer[places]
}

// places is the resource map of one configuration.
type places struct {
	conf *pb.ClusterConfiguration
	m    *config.Map
}

// locate finds a resource's partition under the region's configuration.
func (s *Leases) locate(view state.View, resource string) (config.Place, error) {
	conf := view.Configuration()
	if conf == nil {
		return config.Place{}, uninitialised("of region " + s.Region)
	}
	p := s.places.Load()
	if p == nil || p.conf != conf {
		m, err := config.NewMap(conf)
		if err != nil {
			return config.Place{}, err
		}
		p = &places{conf: conf, m: m}
		s.places.Store(p)
	}
	place, err := p.m.Locate(resource)
	if err != nil {
		return config.Place{}, invalid("resource", "%v", err)
	}
	return place, nil
}

// known checks a resource's name. One that is held is known, also when its
// dedicated shard is none any more.
func (s *Leases) known(view state.View, resource string) error {
	if _, held := view.Lease(resource); held {
		return nil
	}
	_, err := s.locate(view, resource)
	return err
}

// notHeld says why the region may not grant in a partition: another region
// owns it, or the head lease has lapsed.
func (s *Leases) notHeld(view state.View, partition string) error {
	p, _ := view.Partition(partition)
	v := p.Register.Value
	if p.Live() && v.Owner.Name == s.Region {
		return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_Lapsed{Lapsed: &pb.Lapsed{Partition: partition, RetryNs: s.lapsedRetryNs()}}})
	}
	n := &pb.NotOwner{Partition: partition}
	if !v.Released() && v.Owner.Name != s.Region {
		n.Owner, n.Epoch, n.Addresses = v.Owner.Name, uint32(v.Epoch), s.Addresses(v.Owner.Name)
	}
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_NotOwner{NotOwner: n}})
}

// explain completes a refusal of the state machine with what only a server
// knows.
func (s *Leases) explain(d *pb.ErrorDetail) *pb.ErrorDetail {
	if n := d.GetNotOwner(); n.GetOwner() != "" && len(n.GetAddresses()) == 0 {
		n.Addresses = s.Addresses(n.GetOwner())
	}
	if l := d.GetLapsed(); l != nil && l.GetRetryNs() == 0 {
		l.RetryNs = s.lapsedRetryNs()
	}
	return d
}

// checkAcquire names the first field of a request that cannot be right.
func checkAcquire(req *pb.AcquireRequest) error {
	name := req.GetResource()
	switch {
	case req.GetRequestId() == 0:
		return invalid("request_id", "is 0; number the session's requests from 1")
	case req.GetLowestOpenRequest() > req.GetRequestId():
		return invalid("lowest_open_request", "%d is above this very request's id %d", req.GetLowestOpenRequest(), req.GetRequestId())
	case req.GetLockDelayMs() < 0 || req.GetLockDelayMs() > state.MaxLockDelayMillis:
		return invalid("lock_delay_ms", "%d is out of range; choose 0 to %d", req.GetLockDelayMs(), state.MaxLockDelayMillis)
	case req.GetWaitMs() < 0 || req.GetWaitMs() > state.MaxWaitMillis:
		return invalid("wait_ms", "%d is out of range; choose up to %d, or 0 to wait until it is cancelled", req.GetWaitMs(), state.MaxWaitMillis)
	case req.GetWaitMs() > 0 && !req.GetWait():
		return invalid("wait_ms", "is given without wait; set wait, or leave wait_ms out")
	case req.GetSlots() > state.MaxSlots:
		return invalid("slots", "%d are too many; a semaphore has up to %d", req.GetSlots(), state.MaxSlots)
	case req.GetSlots() > 0 && strings.HasPrefix(name, "shard/"):
		return invalid("slots", "%d are asked for of %s; only a lock/NAME has slots", req.GetSlots(), name)
	case req.GetSlots() > 0 && strings.Contains(name, "#"):
		return invalid("resource", "%q has a slot's number already; with slots name the semaphore without one", name)
	}
	return checkValue(req.GetValue())
}

func checkValue(value []byte) error {
	if len(value) > state.MaxValue {
		return invalid("value", "has %d bytes; at most %d are kept beside a lease, put the rest elsewhere and its name here", len(value), state.MaxValue)
	}
	return nil
}

// Acquire tries once, or takes a place in the queue.
func (s *Leases) Acquire(ctx context.Context, req *pb.AcquireRequest) (*pb.AcquireResponse, error) {
	arrived := s.Clock.Now()
	view := s.Raft.View()
	if err := checkAcquire(req); err != nil {
		return nil, err
	}
	place, err := s.locate(view, req.GetResource())
	if err != nil {
		return nil, err
	}
	if err := authorize(ctx, s.Identify, s.Raft, req.GetSessionId(), req.GetSecret()); err != nil {
		return nil, err
	}
	epoch, _, ok := s.Lessor.Hold(place.Partition)
	if !ok {
		return nil, s.notHeld(view, place.Partition)
	}
	res, err := s.Raft.Propose(ctx, &pb.Command{Kind: &pb.Command_Acquire{Acquire: &pb.AcquireCommand{
		SessionId: req.GetSessionId(), RequestId: req.GetRequestId(), LowestOpenRequest: req.GetLowestOpenRequest(),
		Resource: req.GetResource(), Partition: place.Partition, Epoch: uint32(epoch), Wait: req.GetWait(),
		Value: req.GetValue(), LockDelayMs: req.GetLockDelayMs(), WaitMs: req.GetWaitMs(), Slots: req.GetSlots(),
	}}})
	if res.GetError() != nil {
		s.explain(res.GetError())
	}
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	out := &pb.AcquireResponse{ReceivedAt: int64(arrived)}
	switch o := res.GetAcquire().GetOutcome().(type) {
	case *pb.AcquireResult_Granted:
		// With slots, the state machine names the one that it granted.
		resource := cmp.Or(o.Granted.GetResource(), req.GetResource())
		held, term, err := s.Lessor.Answer(ctx, req.GetSessionId(), resource, fence.Token(o.Granted.GetToken()))
		switch {
		case errors.Is(err, lessor.ErrLapsed):
			return nil, s.notHeld(s.Raft.View(), place.Partition)
		case errors.Is(err, lessor.ErrNotHeld):
			return nil, fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_NotHolder{NotHolder: &pb.NotHolder{Resource: resource, Token: o.Granted.GetToken()}}})
		case errors.Is(err, run.ErrNotLeading):
			return nil, notLeader("")
		case err != nil:
			return nil, resultError(nil, err)
		}
		out.Term, out.Outcome = term, &pb.AcquireResponse_Granted{Granted: held}
	case *pb.AcquireResult_Queued:
		out.Outcome = &pb.AcquireResponse_Queued{Queued: &pb.Queued{Ahead: o.Queued.GetAhead()}}
	case *pb.AcquireResult_Busy:
		out.Outcome = &pb.AcquireResponse_Busy{Busy: &pb.Busy{
			Holder: o.Busy.GetHolder(), Token: o.Busy.GetToken(), Waiters: o.Busy.GetWaiters(), Delayed: o.Busy.GetDelayed(),
		}}
	default:
		return nil, errors.New("internal: an Acquire without an outcome")
	}
	return out, nil
}

// SetValue replaces the value on a lease that the session holds with that token.
func (s *Leases) SetValue(ctx context.Context, req *pb.SetValueRequest) (*pb.SetValueResponse, error) {
	view := s.Raft.View()
	if req.GetToken() == 0 {
		return nil, invalid("token", "is 0; give the token of the lease that the value is for")
	}
	if err := checkValue(req.GetValue()); err != nil {
		return nil, err
	}
	if err := s.known(view, req.GetResource()); err != nil {
		return nil, err
	}
	if err := authorize(ctx, s.Identify, s.Raft, req.GetSessionId(), req.GetSecret()); err != nil {
		return nil, err
	}
	res, err := s.Raft.Propose(ctx, &pb.Command{Kind: &pb.Command_SetValue{SetValue: &pb.SetValueCommand{
		SessionId: req.GetSessionId(), Resource: req.GetResource(), Token: req.GetToken(), Value: req.GetValue(),
	}}})
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	return &pb.SetValueResponse{Revision: res.GetSetValue().GetRevision()}, nil
}

// CancelAcquire gives up a queue place, or tells the token that was granted
// meanwhile.
func (s *Leases) CancelAcquire(ctx context.Context, req *pb.CancelAcquireRequest) (*pb.CancelAcquireResponse, error) {
	if req.GetRequestId() == 0 {
		return nil, invalid("request_id", "is 0; name the request to cancel")
	}
	if err := authorize(ctx, s.Identify, s.Raft, req.GetSessionId(), req.GetSecret()); err != nil {
		return nil, err
	}
	res, err := s.Raft.Propose(ctx, &pb.Command{Kind: &pb.Command_Cancel{Cancel: &pb.CancelCommand{SessionId: req.GetSessionId(), RequestId: req.GetRequestId()}}})
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	return &pb.CancelAcquireResponse{GrantedToken: res.GetCancel().GetGrantedToken(), Resource: res.GetCancel().GetResource()}, nil
}

// Release gives a lease back; the first waiter has it in the same commit.
func (s *Leases) Release(ctx context.Context, req *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
	view := s.Raft.View()
	if err := s.known(view, req.GetResource()); err != nil {
		return nil, err
	}
	if err := authorize(ctx, s.Identify, s.Raft, req.GetSessionId(), req.GetSecret()); err != nil {
		return nil, err
	}
	res, err := s.Raft.Propose(ctx, &pb.Command{Kind: &pb.Command_Release{Release: &pb.ReleaseCommand{
		SessionId: req.GetSessionId(), Resource: req.GetResource(), Token: req.GetToken(),
	}}})
	if err := resultError(res, err); err != nil {
		return nil, err
	}
	return &pb.ReleaseResponse{}, nil
}

// GetLease is linearizable: it reads after a leadership check begun after the
// call.
func (s *Leases) GetLease(ctx context.Context, req *pb.GetLeaseRequest) (*pb.GetLeaseResponse, error) {
	if _, err := s.Raft.Check(ctx); err != nil {
		return nil, resultError(nil, err)
	}
	view := s.Raft.View()
	place, err := s.locate(view, req.GetResource())
	if err != nil {
		return nil, err
	}
	if _, _, ok := s.Lessor.Hold(place.Partition); !ok {
		return nil, s.notHeld(view, place.Partition)
	}
	out := &pb.GetLeaseResponse{Partition: place.Partition, Shard: place.Shard}
	if l, ok := view.Lease(req.GetResource()); ok {
		out.Lease = s.info(l)
	}
	return out, nil
}

// ListLeases is linearizable per page.
func (s *Leases) ListLeases(ctx context.Context, req *pb.ListLeasesRequest) (*pb.ListLeasesResponse, error) {
	limit := int(req.GetLimit())
	switch {
	case limit == 0:
		limit = defaultPage
	case limit > maxPage:
		return nil, invalid("limit", "%d is above %d; ask for pages", limit, maxPage)
	}
	if _, err := s.Raft.Check(ctx); err != nil {
		return nil, resultError(nil, err)
	}
	page, next := s.Raft.View().ListLeases(req.GetPrefix(), req.GetPage(), limit)
	out := &pb.ListLeasesResponse{NextPage: next}
	size := 0
	for i, l := range page {
		if size += len(l.Value) + leaseBytes; size > maxPageBytes && i > 0 {
			out.NextPage = page[i-1].Resource
			break
		}
		out.Leases = append(out.Leases, s.info(l))
	}
	return out, nil
}

func (s *Leases) info(l state.Lease) *pb.LeaseInfo {
	return &pb.LeaseInfo{
		Resource: l.Resource, Token: uint64(l.Token), SessionId: l.Session, Holder: l.Holder,
		Partition: l.Partition, Region: s.Region, Waiters: uint32(l.Waiters), Revoked: l.Revoked,
		Value: []byte(l.Value), LockDelayMs: l.LockDelayMillis, Revision: l.Revision,
	}
}
