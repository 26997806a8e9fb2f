package state

import (
	"fmt"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// A lease that named a lock delay and ends without a release (its session
// expires, or it is revoked and the revocation runs out) leaves its resource in
// a delay: nobody is granted it until the leader, which counts the time, ends
// the delay. Waiters keep their places and new ones may queue. A release, and a
// session closed by its client, begin no delay: the holder itself says that it
// has stopped. A dropped epoch takes its delays along.

// beginDelay keeps an editable resource from everybody. token is the one whose
// end began it, or 0.
func (m *Machine) beginDelay(r *resource, millis uint32, token fence.Token) {
	r.delay, r.delayToken = millis, token
	m.delayed.Set(r.name, struct{}{})
	m.emit(DelayBegun{Resource: r.name, Partition: r.partition, Token: token, DelayMillis: int64(millis)})
}

// stopDelay ends the delay that runs. The caller hands the resource over, or
// discards it.
func (m *Machine) stopDelay(r *resource) *resource {
	r = m.editResource(r)
	m.delayed.Delete(r.name)
	m.emit(DelayEnded{Resource: r.name, Partition: r.partition, Token: r.delayToken})
	r.delay, r.delayToken = 0, 0
	return r
}

// endDelay ends the delay that the end of a token began, and hands the
// resource on.
func (m *Machine) endDelay(c *pb.EndDelayCommand) *pb.CommandResult {
	r, ok := m.lookup(c.GetResource())
	if !ok || r.delay == 0 || r.delayToken != fence.Token(c.GetToken()) {
		return failed(errRefused(fmt.Sprintf("no lock delay of token %d runs on %q", c.GetToken(), c.GetResource())))
	}
	m.stopDelay(r)
	m.handOver(r.name)
	return &pb.CommandResult{}
}

// delayFirst answers a request that names a lock delay, for a resource that
// nobody holds, in a partition that came here without a release: a delay of
// the owner before may still run [I6]. A request that waits begins one, which
// the leader counts from the adoption; one that does not wait would leave
// nothing for which to end it, so it finds the resource busy until the
// partition is settled.
func (m *Machine) delayFirst(s *session, p *partition, c *pb.AcquireCommand) *pb.CommandResult {
	if c.GetWait() {
		if e := m.roomToWait(s, c, c.GetResource(), 0); e != nil {
			return failed(e)
		}
		if n := m.leased + m.delayed.Len(); n >= MaxLeases {
			return failed(errRegionFull(n))
		}
	}
	s = m.editSession(s)
	if !s.remember(c.GetRequestId()) {
		return failed(errTooManyGaps(s.id))
	}
	if !c.GetWait() {
		return busyResult(&pb.BusyLease{Delayed: true})
	}
	r := m.newResource(p, c.GetResource())
	r.queue = &queue{}
	res := m.enqueue(s, r.queue, r.name, r.partition, c)
	m.beginDelay(r, uint32(c.GetLockDelayMs()), 0)
	return res
}

// settle ends a partition's time after a promotion without a release. Delays
// that run go on.
func (m *Machine) settle(c *pb.SettleCommand) *pb.CommandResult {
	p, e := m.liveEpoch(c.GetPartition(), c.GetEpoch())
	if e != nil {
		return failed(e)
	}
	if p.unsettled {
		p = m.editPartition(p)
		p.unsettled = false
		m.emit(PartitionSettled{Partition: p.name, Epoch: p.epoch})
	}
	return &pb.CommandResult{}
}
