package state

import (
	"fmt"
	"strings"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// MaxLeases of the region.
const MaxLeases = 4_000_000

// acquire answers a request for a resource, or for a slot of a semaphore:
// granted, queued or busy.
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
	r, exists := m.lookup(c.GetResource())
	if c.GetSlots() > 0 {
		r, exists = nil, false
		if sem, ok := m.semaphores.Get(c.GetResource()); ok && sem.waiters(m) > 0 && sem.partition != p.name {
			return failed(errOtherPartition(sem.name, sem.partition, p.name))
		}
	}
	if exists && r.partition != p.name {
		return failed(errOtherPartition(r.name, r.partition, p.name))
	}
	if s.sawRequest(id) {
		return m.answerAgain(s, p, r, c)
	}
	if p.phase == phaseDraining {
		return failed(errMoved(p)) // no grant passes a drain [F26]
	}
	switch {
	case c.GetSlots() > 0:
		return m.acquireSlot(s, p, c)
	case !exists && p.unsettled && c.GetLockDelayMs() > 0:
		return m.delayFirst(s, p, c)
	case !exists:
		return m.grantFree(s, p, c, c.GetResource())
	case r.session == s.id && !r.revoked:
		return m.reacquire(s, r, c)
	case !c.GetWait():
		s = m.editSession(s)
		if !s.remember(id) {
			return failed(errTooManyGaps(s.id))
		}
		return m.busy(r)
	}
	return m.waitFor(s, r, c)
}

func checkAcquire(c *pb.AcquireCommand) *pb.ErrorDetail {
	switch {
	case c.GetRequestId() == 0:
		return errInvalid("request_id", "request ids rise from 1")
	case c.GetLowestOpenRequest() > c.GetRequestId():
		return errInvalid("lowest_open_request", "the request itself is open: its id is an upper bound")
	case c.GetResource() == "" || len(c.GetResource()) > maxResource:
		return errInvalid("resource", "write shard/N or lock/NAME")
	case len(c.GetValue()) > MaxValue:
		return errValueTooLong(len(c.GetValue()))
	case c.GetLockDelayMs() < 0 || c.GetLockDelayMs() > MaxLockDelayMillis:
		return errInvalid("lock_delay_ms", fmt.Sprintf("%d is out of range; use 0 to %d", c.GetLockDelayMs(), MaxLockDelayMillis))
	case c.GetWaitMs() < 0 || c.GetWaitMs() > MaxWaitMillis:
		return errInvalid("wait_ms", fmt.Sprintf("%d is out of range; use up to %d, or 0 to wait until cancelled", c.GetWaitMs(), MaxWaitMillis))
	case c.GetSlots() == 0:
		return nil
	case c.GetSlots() > MaxSlots:
		return errInvalid("slots", fmt.Sprintf("%d slots are too many; use up to %d", c.GetSlots(), MaxSlots))
	case strings.ContainsRune(c.GetResource(), '#') || strings.HasPrefix(c.GetResource(), "shard/"):
		return errInvalid("resource", "with slots, name the semaphore lock/NAME without a slot's number")
	case len(c.GetResource())+len("#9999") > maxResource:
		return errInvalid("resource", fmt.Sprintf("with slots, keep the name under %d bytes", maxResource-len("#9999")))
	}
	return nil
}

// termsOf returns what a request names beside its resource, nil if nothing.
func termsOf(c *pb.AcquireCommand) *terms {
	if len(c.GetValue()) == 0 && c.GetLockDelayMs() == 0 && c.GetWaitMs() == 0 && c.GetSlots() == 0 {
		return nil
	}
	return &terms{value: string(c.GetValue()), lockDelay: uint32(c.GetLockDelayMs()), waitMillis: c.GetWaitMs(), slots: c.GetSlots()}
}

// grantFree grants a resource that nobody holds or waits for.
func (m *Machine) grantFree(s *session, p *partition, c *pb.AcquireCommand, name string) *pb.CommandResult {
	switch {
	case p.seq == fence.MaxSeq:
		return failed(errTokensUsedUp(p))
	case m.leased+m.delayed.Len() >= MaxLeases:
		return failed(errRegionFull(m.leased + m.delayed.Len()))
	case s.held.Len()+s.waits >= MaxSessionLeases:
		return failed(errSessionFull(s))
	}
	if e := m.roomForValue(len(c.GetValue()), 0); e != nil {
		return failed(e)
	}
	s = m.editSession(s)
	if !s.remember(c.GetRequestId()) {
		return failed(errTooManyGaps(s.id))
	}
	r := m.newResource(p, name)
	return m.grant(s.id, p, r, c.GetRequestId(), termsOf(c), false).granted(false)
}

// grant gives a resource without holder its next holder. The resource must be
// editable, and the partition must have a token left.
func (m *Machine) grant(session string, p *partition, r *resource, id uint64, t *terms, offered bool) request {
	p = m.editPartition(p)
	token, err := fence.NewToken(p.epoch, p.seq+1)
	if err != nil { // callers check the parts; a token out of range must never be
		panic(fmt.Sprintf("state: partition %q: %v", p.name, err))
	}
	p.seq++
	s, _ := m.sessions.Get(session)
	s = m.editSession(s)
	r.session, r.token, r.request, r.offered, r.revoked, r.revokeReason = s.id, token, id, offered, false, ""
	r.epoch, r.revision = p.epoch, m.revision()
	q := request{resource: r.name, token: token}
	if t != nil {
		r.lockDelay, q.slots = t.lockDelay, t.slots
		m.setValue(r, t.value)
	}
	s.setOpen(id, q)
	s.held.Set(r.name, struct{}{})
	m.leased++
	m.emit(LeaseGranted{
		Session: s.id, Request: id, Resource: r.name, Partition: p.name, Token: token, Offered: offered,
		Holder: s.identity, Value: r.value, LockDelayMillis: int64(r.lockDelay), Revision: r.revision,
	})
	return q
}

// revision of what is written now. Below level 2 there is none: it would be
// lost with a snapshot.
func (m *Machine) revision() uint64 {
	if m.level < 2 {
		return 0
	}
	return m.applied
}

// reacquire answers a session that asks for what it holds: the same token. The
// lease answers for its newest request from now on, and has the value and the
// lock delay that it names.
func (m *Machine) reacquire(s *session, r *resource, c *pb.AcquireCommand) *pb.CommandResult {
	if e := m.roomForValue(len(c.GetValue()), len(r.value)); e != nil && len(c.GetValue()) > 0 {
		return failed(e)
	}
	s = m.editSession(s)
	if !s.remember(c.GetRequestId()) {
		return failed(errTooManyGaps(s.id))
	}
	r = m.editResource(r)
	s.forgetOpen(r)
	r.request = c.GetRequestId()
	q := request{resource: r.name, token: r.token}
	s.setOpen(r.request, q)
	if c.GetLockDelayMs() > 0 {
		r.lockDelay = uint32(c.GetLockDelayMs())
	}
	if len(c.GetValue()) > 0 {
		m.changeValue(s, r, string(c.GetValue()))
	}
	return q.granted(true)
}

// forgetOpen removes the request that the lease on r answered, if it is still
// remembered.
func (s *session) forgetOpen(r *resource) {
	if q, ok := s.open.Get(r.request); ok && q.token == r.token {
		s.deleteOpen(r.request)
	}
}

// waitFor takes a place in a resource's queue.
func (m *Machine) waitFor(s *session, r *resource, c *pb.AcquireCommand) *pb.CommandResult {
	if e := m.roomToWait(s, c, r.name, r.queue.len()); e != nil {
		return failed(e)
	}
	s = m.editSession(s)
	if !s.remember(c.GetRequestId()) {
		return failed(errTooManyGaps(s.id))
	}
	r = m.editResource(r)
	if r.queue == nil {
		r.queue = &queue{}
	}
	return m.enqueue(s, r.queue, r.name, r.partition, c)
}

// roomToWait returns why a request cannot take a place, or nil.
func (m *Machine) roomToWait(s *session, c *pb.AcquireCommand, name string, ahead int) *pb.ErrorDetail {
	switch {
	case ahead >= MaxQueue:
		return errOverloaded(fmt.Sprintf("%d requests wait for %s", MaxQueue, name))
	case m.waiting >= MaxWaiters:
		return errOverloaded(fmt.Sprintf("%d requests wait in the region", MaxWaiters))
	case s.held.Len()+s.waits >= MaxSessionLeases:
		return errSessionFull(s)
	}
	return m.roomForValue(len(c.GetValue()), 0)
}

// enqueue takes the place; session and queue must be editable.
func (m *Machine) enqueue(s *session, q *queue, name, partition string, c *pb.AcquireCommand) *pb.CommandResult {
	w := waiter{session: s.id, request: c.GetRequestId(), terms: termsOf(c)}
	t, ahead := w.the(), q.len()
	place := q.push(w)
	s.setOpen(w.request, request{resource: name, place: place, slots: t.slots})
	s.waits++
	m.waiting++
	m.valueBytes += int64(len(t.value))
	m.emit(WaiterEnqueued(w.export(name, partition)))
	return queued(ahead)
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
		} else if _, held := m.lookup(q.resource); held {
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

// endWait takes out a request that has waited as long as it asked to. One that
// was granted or cancelled meanwhile stays as it is.
func (m *Machine) endWait(c *pb.EndWaitCommand) *pb.CommandResult {
	if s, ok := m.sessions.Get(c.GetSessionId()); ok {
		if q, open := s.open.Get(c.GetRequestId()); open && q.token == 0 {
			queue, _ := m.queueOf(q)
			w, _ := queue.get(q.place)
			m.dequeue(q, errWaitEnded(q.resource, w.the().waitMillis))
		}
	}
	return &pb.CommandResult{}
}

// release ends a lease by its holder's current token and hands the resource
// over in the same command.
func (m *Machine) release(c *pb.ReleaseCommand) *pb.CommandResult {
	r, e := m.holding(c.GetSessionId(), c.GetResource(), fence.Token(c.GetToken()))
	if e != nil {
		return failed(e)
	}
	m.endLease(r, EndReleased)
	m.handOver(r.name)
	return &pb.CommandResult{}
}

// holding returns the resource that a session holds by its current token.
func (m *Machine) holding(session, resource string, token fence.Token) (*resource, *pb.ErrorDetail) {
	r, ok := m.lookup(resource)
	if !ok || token == 0 || r.token != token || r.session != session {
		return nil, errNotHolder(resource, token)
	}
	return r, nil
}

// revoke marks a lease; again it changes nothing.
func (m *Machine) revoke(c *pb.RevokeCommand) *pb.CommandResult {
	token := fence.Token(c.GetToken())
	r, ok := m.lookup(c.GetResource())
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
	m.emit(LeaseRevoked{
		Session: r.session, Resource: r.name, Partition: r.partition, Token: r.token, Reason: r.revokeReason,
		Holder: m.identity(r.session),
	})
}

// endRevocation removes a revoked lease and hands the resource over: its last
// sent validity is over.
func (m *Machine) endRevocation(c *pb.EndRevocationCommand) *pb.CommandResult {
	token := fence.Token(c.GetToken())
	r, ok := m.lookup(c.GetResource())
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
// discards it. An end without a release begins the lock delay.
func (m *Machine) endLease(r *resource, reason EndReason) *resource {
	if m.stale(r) {
		reason = EndDropped
	}
	r = m.editResource(r)
	ended := LeaseEnded{Session: r.session, Resource: r.name, Partition: r.partition, Token: r.token, Reason: reason}
	if s, ok := m.sessions.Get(r.session); ok {
		s = m.editSession(s)
		s.held.Delete(r.name)
		s.forgetOpen(r)
		ended.Holder = s.identity
	}
	m.leased--
	m.emit(ended)
	m.setValue(r, "")
	delay := r.lockDelay
	r.session, r.token, r.request, r.offered, r.revoked, r.revokeReason = "", 0, 0, false, false, ""
	r.lockDelay, r.revision = 0, 0
	if delay > 0 && (reason == EndExpired || reason == EndRevoked) {
		m.beginDelay(r, delay, ended.Token)
	}
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
	r.queue.remove(place)
	if r.queue.len() == 0 {
		r.queue = nil
	}
	m.left(w)
}

// left forgets a waiter that has left its queue.
func (m *Machine) left(w waiter) {
	m.waiting--
	if w.terms != nil {
		m.valueBytes -= int64(len(w.terms.value))
	}
	if s, ok := m.sessions.Get(w.session); ok {
		s = m.editSession(s)
		s.deleteOpen(w.request)
		s.waits--
	}
}

// dequeue ends a waiting request, found from its session.
func (m *Machine) dequeue(q request, told *pb.ErrorDetail) {
	if q.slots > 0 {
		if s, ok := m.semaphores.Get(q.resource); ok {
			if w, ok := s.queue.get(q.place); ok {
				m.endSlotWaiter(s.name, q.place, w, told)
			}
		}
		return
	}
	r, ok := m.resources.Get(q.resource)
	if !ok {
		return
	}
	if w, ok := r.queue.get(q.place); ok {
		m.discard(m.endWaiter(r, q.place, w, told))
	}
}

// discard removes a resource that nobody holds, waits for, or is kept from.
func (m *Machine) discard(r *resource) {
	if r.token == 0 && r.queue.len() == 0 && r.delay == 0 {
		m.removeResource(r)
	}
}

// handOver gives a resource without holder to the first waiter, as an offer,
// and tells that one alone: one notification per hand-over, however many wait
// [F23]. A slot that nobody waits for goes to its semaphore's queue. While a
// lock delay runs nobody gets it. A partition that drains, or that has no
// token left, hands nothing over [F26 F47]: the queue stands still.
func (m *Machine) handOver(name string) {
	r, ok := m.resources.Get(name)
	if !ok || r.token != 0 || r.delay > 0 {
		return
	}
	if r.queue.len() == 0 {
		over := m.stale(r)
		m.discard(r)
		if r.slot >= 0 && !over { // one of a dropped epoch was free before
			m.serveSlot(baseOf(name), int(r.slot))
		}
		return
	}
	p, ok := m.partitions.Get(r.partition)
	if !ok || m.stale(r) || !p.grants() {
		if r = m.editResource(r); ok && !m.stale(r) {
			r.epoch = p.epoch // as after a restore of format 1, which does not say
		}
		m.stalled.Set(name, struct{}{})
		return
	}
	r = m.editResource(r)
	place, w, _ := r.queue.min()
	m.leaveQueue(r, place, w)
	m.stalled.Delete(name)
	m.grant(w.session, p, r, w.request, w.terms, true)
}
