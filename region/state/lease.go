package state

import (
	"fmt"
	"sort"
	"strings"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// MaxLeases of the region.
const MaxLeases = 4_000_000

// acquire answers a request for a resource: granted, queued or busy.
//
// A request id is answered once [F17]: again it gets its token while that is
// held, or its queue place; after that it is stale. So a late copy of an
// answered or cancelled request can never take a lease that nobody waits for.
func (m *Machine) acquire(c *pb.AcquireCommand) *pb.CommandResult {
	s, ok := m.sessions.Get(c.GetSessionId())
	if !ok || s.closing {
		return failed(errSessionExpired(c.GetSessionId()))
	}
	if e := checkAcquire(c); e != nil {
		return failed(e)
	}
	id := c.GetRequestId()
	if id < s.lowest {
		return failed(errStaleRequest(id))
	}
	s = m.raiseLowest(s, c.GetLowestOpenRequest())

	p, ok := m.partitions.Get(c.GetPartition())
	switch {
	case !ok:
		return failed(errUnknownPartition(c.GetPartition()))
	case !p.live():
		return failed(m.errNotOwner(p))
	case p.epoch != fence.Epoch(c.GetEpoch()):
		return failed(errLapsed(p.name)) // the leader meant another epoch than is live
	}
	r, exists := m.resources.Get(c.GetResource())
	if exists && r.partition != p.name {
		return failed(errRefused(fmt.Sprintf("%s is in partition %q, not in %q", r.name, r.partition, p.name)))
	}
	if s.sawRequest(id) {
		return m.answerAgain(s, r, c)
	}
	if p.phase == phaseDraining {
		return failed(errMoved(p.name)) // no grant passes a drain [F26]
	}
	switch {
	case !exists:
		return m.grantFree(s, p, c)
	case r.session == s.id && !r.revoked:
		return m.reacquire(s, r, id)
	case !c.GetWait():
		s = m.editSession(s)
		if !s.remember(id) {
			return failed(errTooManyGaps(s.id))
		}
		return m.busy(r)
	}
	return m.enqueue(s, r, id)
}

func checkAcquire(c *pb.AcquireCommand) *pb.ErrorDetail {
	switch {
	case c.GetRequestId() == 0:
		return errInvalid("request_id", "request ids rise from 1")
	case c.GetLowestOpenRequest() > c.GetRequestId():
		return errInvalid("lowest_open_request", "the request itself is open: its id is an upper bound")
	case c.GetResource() == "" || len(c.GetResource()) > maxResource:
		return errInvalid("resource", "write shard/N or lock/NAME")
	}
	return nil
}

// answerAgain repeats the answer to a request that was seen before. It changes
// nothing.
func (m *Machine) answerAgain(s *session, r *resource, c *pb.AcquireCommand) *pb.CommandResult {
	id := c.GetRequestId()
	q, open := s.open.Get(id)
	switch {
	case open && q.resource != c.GetResource():
		return failed(errInvalid("request_id", fmt.Sprintf("request %d asked for %s; use a new id for another resource", id, q.resource)))
	case open && q.token == 0:
		return queued(r.ahead(q.place))
	case open && !r.revoked: // a revoked token gets no more validity
		return granted(q.token, true)
	case !open && !c.GetWait() && r != nil && r.token != 0 && r.session != s.id:
		return m.busy(r) // the answer to a try, lost on the way
	}
	return failed(errStaleRequest(id))
}

// grantFree grants a resource that nobody holds or waits for.
func (m *Machine) grantFree(s *session, p *partition, c *pb.AcquireCommand) *pb.CommandResult {
	switch {
	case p.seq == fence.MaxSeq:
		return failed(errTokensUsedUp(p))
	case m.leased >= MaxLeases:
		return failed(errOverloaded(fmt.Sprintf("the region has %d leases; release some", m.leased)))
	case s.held.Len()+s.waits >= MaxSessionLeases:
		return failed(errSessionFull(s))
	}
	s = m.editSession(s)
	if !s.remember(c.GetRequestId()) {
		return failed(errTooManyGaps(s.id))
	}
	r := &resource{gen: m.gen, name: c.GetResource(), partition: p.name}
	m.resources.Set(r.name, r)
	m.grant(s, p, r, c.GetRequestId(), false)
	return granted(r.token, false)
}

// grant gives a resource without holder its next holder. All three must be
// editable, and the partition must have a token left.
func (m *Machine) grant(s *session, p *partition, r *resource, id uint64, offered bool) {
	p = m.editPartition(p)
	token, err := fence.NewToken(p.epoch, p.seq+1)
	if err != nil { // callers check the parts; a token out of range must never be
		panic(fmt.Sprintf("state: partition %q: %v", p.name, err))
	}
	p.seq++
	r.session, r.token, r.request, r.offered, r.revoked, r.revokeReason = s.id, token, id, offered, false, ""
	s.open.Set(id, request{resource: r.name, token: token})
	s.held.Set(r.name, struct{}{})
	m.leased++
	m.emit(LeaseGranted{Session: s.id, Request: id, Resource: r.name, Partition: p.name, Token: token, Offered: offered})
}

// reacquire answers a session that asks for what it holds: the same token. The
// lease answers for its newest request from now on.
func (m *Machine) reacquire(s *session, r *resource, id uint64) *pb.CommandResult {
	s = m.editSession(s)
	if !s.remember(id) {
		return failed(errTooManyGaps(s.id))
	}
	r = m.editResource(r)
	s.forgetOpen(r)
	r.request = id
	s.open.Set(id, request{resource: r.name, token: r.token})
	return granted(r.token, true)
}

// forgetOpen removes the request that the lease on r answered, if it is still
// remembered.
func (s *session) forgetOpen(r *resource) {
	if q, ok := s.open.Get(r.request); ok && q.token == r.token {
		s.open.Delete(r.request)
	}
}

func (m *Machine) enqueue(s *session, r *resource, id uint64) *pb.CommandResult {
	switch {
	case r.queue.Len() >= MaxQueue:
		return failed(errOverloaded(fmt.Sprintf("%d requests wait for %s", MaxQueue, r.name)))
	case m.waiting >= MaxWaiters:
		return failed(errOverloaded(fmt.Sprintf("%d requests wait in the region", MaxWaiters)))
	case s.held.Len()+s.waits >= MaxSessionLeases:
		return failed(errSessionFull(s))
	}
	s = m.editSession(s)
	if !s.remember(id) {
		return failed(errTooManyGaps(s.id))
	}
	r = m.editResource(r)
	ahead := r.queue.Len()
	r.nextPlace++
	r.queue.Set(r.nextPlace, waiter{session: s.id, request: id})
	s.open.Set(id, request{resource: r.name, place: r.nextPlace})
	s.waits++
	m.waiting++
	m.emit(WaiterEnqueued{Session: s.id, Request: id, Resource: r.name, Partition: r.partition})
	return queued(ahead)
}

// ahead counts the queue places before place.
func (r *resource) ahead(place uint64) int {
	return sort.Search(r.queue.Len(), func(i int) bool {
		at, _, _ := r.queue.GetAt(i)
		return at >= place
	})
}

// cancel gives up a request. One that was granted is for the client to
// release; an unknown one leaves a tombstone, so that its late Acquire does
// nothing [F17].
func (m *Machine) cancel(c *pb.CancelCommand) *pb.CommandResult {
	s, ok := m.sessions.Get(c.GetSessionId())
	if !ok || s.closing {
		return failed(errSessionExpired(c.GetSessionId()))
	}
	id := c.GetRequestId()
	if id == 0 {
		return failed(errInvalid("request_id", "request ids rise from 1"))
	}
	res := &pb.CancelResult{}
	if q, open := s.open.Get(id); open {
		if q.token == 0 {
			m.dequeue(q, errStaleRequest(id))
		} else {
			res.GrantedToken, res.Resource = uint64(q.token), q.resource
		}
	} else if id >= s.lowest && !s.sawRequest(id) {
		s = m.editSession(s)
		if !s.remember(id) {
			return failed(errTooManyGaps(s.id))
		}
	}
	return &pb.CommandResult{Kind: &pb.CommandResult_Cancel{Cancel: res}}
}

// release ends a lease by its holder's current token and hands the resource
// over in the same command.
func (m *Machine) release(c *pb.ReleaseCommand) *pb.CommandResult {
	token := fence.Token(c.GetToken())
	r, ok := m.resources.Get(c.GetResource())
	if !ok || token == 0 || r.token != token || r.session != c.GetSessionId() {
		return failed(errNotHolder(c.GetResource(), token))
	}
	m.endLease(r, EndReleased)
	m.handOver(r.name)
	return &pb.CommandResult{}
}

// revoke marks a lease; again it changes nothing.
func (m *Machine) revoke(c *pb.RevokeCommand) *pb.CommandResult {
	token := fence.Token(c.GetToken())
	r, ok := m.resources.Get(c.GetResource())
	if !ok || token == 0 || r.token != token {
		return failed(errNotHolder(c.GetResource(), token))
	}
	m.markRevoked(r, c.GetReason())
	return &pb.CommandResult{}
}

func (m *Machine) markRevoked(r *resource, reason string) {
	if r.revoked {
		return
	}
	r = m.editResource(r)
	r.revoked, r.revokeReason = true, strings.ToValidUTF8(reason[:min(len(reason), maxName)], "")
	m.emit(LeaseRevoked{Session: r.session, Resource: r.name, Partition: r.partition, Token: r.token, Reason: r.revokeReason})
}

// endRevocation removes a revoked lease and hands the resource over: its last
// sent validity is over.
func (m *Machine) endRevocation(c *pb.EndRevocationCommand) *pb.CommandResult {
	token := fence.Token(c.GetToken())
	r, ok := m.resources.Get(c.GetResource())
	switch {
	case !ok, token == 0, r.token != token:
		return failed(errNotHolder(c.GetResource(), token))
	case !r.revoked:
		return failed(errRefused("the lease is not revoked"))
	}
	m.endLease(r, EndRevoked)
	m.handOver(r.name)
	return &pb.CommandResult{}
}

// endLease takes a resource from its holder. The caller hands it over, or
// discards it.
func (m *Machine) endLease(r *resource, reason EndReason) *resource {
	r = m.editResource(r)
	if s, ok := m.sessions.Get(r.session); ok {
		s = m.editSession(s)
		s.held.Delete(r.name)
		s.forgetOpen(r)
	}
	m.leased--
	m.emit(LeaseEnded{Session: r.session, Resource: r.name, Partition: r.partition, Token: r.token, Reason: reason})
	r.session, r.token, r.request, r.offered, r.revoked, r.revokeReason = "", 0, 0, false, false, ""
	return r
}

// endWaiter takes a waiter out of a queue and tells it why. The caller
// discards the resource if it is not needed any more.
func (m *Machine) endWaiter(r *resource, place uint64, w waiter, told *pb.ErrorDetail) *resource {
	r = m.editResource(r)
	m.leaveQueue(r, place, w)
	m.emit(WaiterEnded{Session: w.session, Request: w.request, Resource: r.name, Partition: r.partition, Error: told})
	return r
}

// leaveQueue removes a place; r must be editable.
func (m *Machine) leaveQueue(r *resource, place uint64, w waiter) {
	r.queue.Delete(place)
	m.waiting--
	if s, ok := m.sessions.Get(w.session); ok {
		s = m.editSession(s)
		s.open.Delete(w.request)
		s.waits--
	}
}

// dequeue ends a waiting request, found from its session.
func (m *Machine) dequeue(q request, told *pb.ErrorDetail) {
	r, ok := m.resources.Get(q.resource)
	if !ok {
		return
	}
	if w, ok := r.queue.Get(q.place); ok {
		m.discard(m.endWaiter(r, q.place, w, told))
	}
}

// discard removes a resource that nobody holds or waits for.
func (m *Machine) discard(r *resource) {
	if r.token == 0 && r.queue.Len() == 0 {
		m.resources.Delete(r.name)
		m.stalled.Delete(r.name)
	}
}

// handOver gives a resource without holder to the first waiter, as an offer,
// and tells that one alone: one notification per hand-over, however many wait
// [F23]. A partition that drains, or that has no token left, hands nothing
// over [F26 F47]: the queue stands still.
func (m *Machine) handOver(name string) {
	r, ok := m.resources.Get(name)
	if !ok || r.token != 0 {
		return
	}
	if r.queue.Len() == 0 {
		m.discard(r)
		return
	}
	p, ok := m.partitions.Get(r.partition)
	if !ok || p.phase != phaseActive || p.seq == fence.MaxSeq {
		m.stalled.Set(name, struct{}{})
		return
	}
	r = m.editResource(r)
	place, w, _ := r.queue.Min()
	m.leaveQueue(r, place, w)
	s, _ := m.sessions.Get(w.session)
	m.stalled.Delete(name)
	m.grant(m.editSession(s), p, r, w.request, true)
}

func (m *Machine) busy(r *resource) *pb.CommandResult {
	b := &pb.BusyLease{Token: uint64(r.token), Waiters: uint32(r.queue.Len())}
	if s, ok := m.sessions.Get(r.session); ok {
		b.Holder = s.identity
	}
	return &pb.CommandResult{Kind: &pb.CommandResult_Acquire{Acquire: &pb.AcquireResult{
		Outcome: &pb.AcquireResult_Busy{Busy: b},
	}}}
}

func queued(ahead int) *pb.CommandResult {
	return &pb.CommandResult{Kind: &pb.CommandResult_Acquire{Acquire: &pb.AcquireResult{
		Outcome: &pb.AcquireResult_Queued{Queued: &pb.QueuedRequest{Ahead: uint32(ahead)}},
	}}}
}

// granted makes the commonest result in one allocation.
func granted(token fence.Token, repeated bool) *pb.CommandResult {
	var g struct {
		result  pb.CommandResult
		kind    pb.CommandResult_Acquire
		acquire pb.AcquireResult
		outcome pb.AcquireResult_Granted
		lease   pb.GrantedLease
	}
	g.lease.Token, g.lease.Repeated = uint64(token), repeated
	g.outcome.Granted = &g.lease
	g.acquire.Outcome = &g.outcome
	g.kind.Acquire = &g.acquire
	g.result.Kind = &g.kind
	return &g.result
}

func errTokensUsedUp(p *partition) *pb.ErrorDetail {
	return errOverloaded(fmt.Sprintf("the tokens of partition %q, epoch %d are used up until its owner raises the epoch", p.name, p.epoch))
}

func errSessionFull(s *session) *pb.ErrorDetail {
	return errOverloaded(fmt.Sprintf("session %s has %d leases and queue places; release some", s.id, MaxSessionLeases))
}

func errTooManyGaps(session string) *pb.ErrorDetail {
	return errOverloaded(fmt.Sprintf("the request ids of session %s have over %d gaps; count them up one by one and raise lowest_open_request", session, MaxSeenRanges))
}
