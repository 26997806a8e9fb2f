package state

import (
	"fmt"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// answerAgain repeats the answer to a request that was seen before. It changes
// nothing.
func (m *Machine) answerAgain(s *session, p *partition, r *resource, c *pb.AcquireCommand) *pb.CommandResult {
	id := c.GetRequestId()
	q, open := s.open.Get(id)
	if open && (q.slots != c.GetSlots() || q.asked() != c.GetResource()) {
		return failed(errInvalid("request_id", fmt.Sprintf("request %d asked for %s; use a new id for another resource", id, q.asked())))
	}
	switch {
	case open && q.token == 0:
		if queue, _ := m.queueOf(q); queue != nil {
			return queued(queue.ahead(q.place))
		}
	case open:
		held, ok := m.lookup(q.resource)
		if ok && !held.revoked { // a revoked token gets no more validity
			return q.granted(true)
		}
	case c.GetWait():
	// A try, whose answer may have been lost on the way.
	case c.GetSlots() > 0:
		sem, _ := m.semaphores.Get(c.GetResource())
		_, free := m.freeSlot(sem, c.GetResource(), int(c.GetSlots()))
		if delayed := free && p.unsettled && c.GetLockDelayMs() > 0; delayed || !free {
			return m.busySemaphore(sem, delayed)
		}
	case r == nil && p.unsettled && c.GetLockDelayMs() > 0:
		return busyResult(&pb.BusyLease{Delayed: true})
	case r != nil && (r.token != 0 && r.session != s.id || r.delay > 0):
		return m.busy(r)
	}
	return failed(errStaleRequest(id))
}

// asked returns the resource that the request named.
func (q request) asked() string {
	if q.slots > 0 && q.token != 0 {
		return baseOf(q.resource)
	}
	return q.resource
}

// granted names the slot, if the request asked for any.
func (q request) granted(repeated bool) *pb.CommandResult {
	res := granted(q.token, repeated)
	if q.slots > 0 {
		res.GetAcquire().GetGranted().Resource = q.resource
	}
	return res
}

func (m *Machine) busy(r *resource) *pb.CommandResult {
	return busyResult(&pb.BusyLease{
		Token: uint64(r.token), Waiters: uint32(r.queue.len()), Holder: m.identity(r.session), Delayed: r.delay > 0,
	})
}

func busyResult(b *pb.BusyLease) *pb.CommandResult {
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
