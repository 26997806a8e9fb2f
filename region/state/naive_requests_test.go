package state

import (
	"slices"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func (n *naive) busy(resource string) *pb.CommandResult {
	r := n.res[resource]
	b := &pb.BusyLease{Token: uint64(r.lease.Token), Waiters: uint32(len(r.waiters)), Delayed: r.delay.DelayMillis > 0}
	if s := n.sessions[r.lease.Session]; s != nil {
		b.Holder = s.identity
	}
	return busyResult(b)
}

func (n *naive) acquire(c *pb.AcquireCommand) *pb.CommandResult {
	s, id, name := n.sessions[c.GetSessionId()], c.GetRequestId(), c.GetResource()
	switch {
	case s == nil || s.closing:
		return failed(errSessionExpired(""))
	case id == 0 || c.GetLowestOpenRequest() > id || name == "":
		return failed(errInvalid("", ""))
	case id < s.lowest:
		return failed(errStaleRequest(id))
	}
	if low := c.GetLowestOpenRequest(); low > s.lowest {
		s.lowest = low
		n.leave(c.GetSessionId(), func(id uint64) bool { return id < low }, errStaleRequest)
	}
	p := n.parts[c.GetPartition()]
	switch {
	case p == nil:
		return failed(errInvalid("", ""))
	case p.phase == phaseAbsent:
		return failed(notOwner("", "", 0))
	case p.epoch != fence.Epoch(c.GetEpoch()):
		return failed(errLapsed(""))
	}
	if r := n.res[name]; r != nil && c.GetSlots() == 0 && r.partition != c.GetPartition() {
		return failed(errRefused(""))
	}
	if q := n.sems[name]; q != nil && c.GetSlots() > 0 && q.partition != c.GetPartition() {
		return failed(errRefused(""))
	}
	me := naiveWaiter{
		Waiter: Waiter{Session: c.GetSessionId(), Request: id, Resource: name, Partition: c.GetPartition(), Slots: c.GetSlots(), WaitMillis: c.GetWaitMs()},
		value:  string(c.GetValue()), delay: c.GetLockDelayMs(),
	}
	if _, seen := s.asked[id]; seen {
		return n.again(p, me, c.GetWait())
	}
	if p.phase == phaseDraining {
		return failed(moved("", ""))
	}
	res := n.first(p, me, c.GetWait())
	if res.GetError() == nil {
		s.asked[id] = naiveAsked{name, c.GetSlots()}
	}
	return res
}

// first answers a request that was not seen before.
func (n *naive) first(p *naivePart, me naiveWaiter, wait bool) *pb.CommandResult {
	name, delayed := me.Resource, p.unsettled && me.delay > 0
	target, free := name, n.res[name] == nil
	if me.Slots > 0 {
		target, free = n.freeSlot(name, me.Slots)
	}
	r := n.res[target]
	switch {
	case free && !delayed && p.seq == fence.MaxSeq:
		return failed(errOverloaded(""))
	case free && !delayed:
		return n.granted(target, n.give(target, me, false), me.Slots, false)
	case !free && me.Slots == 0 && r.lease.Token != 0 && r.lease.Session == me.Session && !r.lease.Revoked:
		r.lease.Request = me.Request
		if me.delay > 0 {
			r.lease.LockDelayMillis = me.delay
		}
		if me.value != "" {
			n.setValue(r, me.value)
		}
		return granted(r.lease.Token, true)
	case !wait:
		return n.tryAgain(me, free)
	}
	var q *naiveQueue
	if me.Slots == 0 {
		if free {
			r = n.create(name, me.Partition)
		}
		q = &r.naiveQueue
	} else if q = n.sems[name]; q == nil {
		if old := n.gone[name]; old != nil {
			n.endWaiters(old, n.over(old.partition), 1<<30)
			n.tidy()
		}
		q = &naiveQueue{partition: me.Partition}
		n.sems[name] = q
	}
	q.waiters = append(slices.Clone(q.waiters), me)
	n.emit(WaiterEnqueued(me.Waiter))
	if free {
		if me.Slots > 0 {
			r = n.create(target, me.Partition)
		}
		n.beginDelay(target, r, 0, me.delay)
	}
	return queued(len(q.waiters) - 1)
}

func (n *naive) tryAgain(me naiveWaiter, free bool) *pb.CommandResult {
	b := &pb.BusyLease{Delayed: free}
	if me.Slots == 0 && !free {
		return n.busy(me.Resource)
	}
	if q := n.sems[me.Resource]; q != nil && me.Slots > 0 {
		b.Waiters = uint32(len(q.waiters))
	}
	return busyResult(b)
}

func (n *naive) granted(name string, t fence.Token, slots uint32, repeated bool) *pb.CommandResult {
	res := granted(t, repeated)
	if slots > 0 {
		res.GetAcquire().GetGranted().Resource = name
	}
	return res
}

// again answers a request that was seen before: it is open while it waits, or
// while its grant is held.
func (n *naive) again(p *naivePart, me naiveWaiter, wait bool) *pb.CommandResult {
	asked := n.sessions[me.Session].asked[me.Request]
	other := failed(errInvalid("", ""))
	stale := failed(errStaleRequest(me.Request))
	for _, q := range n.queues() {
		for i, w := range q.waiters {
			switch {
			case w.Session != me.Session || w.Request != me.Request:
			case w.Resource != me.Resource || w.Slots != me.Slots:
				return other
			case slices.ContainsFunc(sortedKeys(n.left), func(name string) bool { return q == &n.left[name].naiveQueue }),
				slices.ContainsFunc(sortedKeys(n.gone), func(name string) bool { return q == n.gone[name] }):
				return stale
			default:
				return queued(i)
			}
		}
	}
	for _, m := range []map[string]*naiveResource{n.res, n.left} {
		for name, r := range m {
			if l := r.lease; l.Token != 0 && l.Session == me.Session && l.Request == me.Request {
				switch {
				case asked != naiveAsked{me.Resource, me.Slots}:
					return other
				case l.Revoked || n.left[name] != nil:
					return stale
				}
				return n.granted(name, l.Token, me.Slots, true)
			}
		}
	}
	r, delayed := n.res[me.Resource], p.unsettled && me.delay > 0
	switch {
	case wait:
	case me.Slots > 0:
		if _, free := n.freeSlot(me.Resource, me.Slots); !free || delayed {
			return n.tryAgain(me, free)
		}
	case r == nil && delayed, r != nil && (r.lease.Token != 0 && r.lease.Session != me.Session || r.delay.DelayMillis > 0):
		return n.tryAgain(me, r == nil)
	}
	return stale
}

func (n *naive) cancel(c *pb.CancelCommand) *pb.CommandResult {
	s, id := n.sessions[c.GetSessionId()], c.GetRequestId()
	switch {
	case s == nil || s.closing:
		return failed(errSessionExpired(""))
	case id == 0:
		return failed(errInvalid("", ""))
	}
	res := &pb.CancelResult{}
	for name, r := range n.res {
		if l := r.lease; l.Token != 0 && l.Session == c.GetSessionId() && l.Request == id && id >= s.lowest {
			res.GrantedToken, res.Resource = uint64(l.Token), name
		}
	}
	n.leave(c.GetSessionId(), func(r uint64) bool { return r == id }, errStaleRequest)
	if _, seen := s.asked[id]; !seen {
		s.asked[id] = naiveAsked{}
	}
	return &pb.CommandResult{Kind: &pb.CommandResult_Cancel{Cancel: res}}
}
