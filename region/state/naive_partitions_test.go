package state

import (
	"slices"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func (n *naive) itemResult(items []*pb.ItemResult, name string, done bool) []*pb.ItemResult {
	r := &pb.ItemResult{Partition: name, Done: done}
	if p := n.parts[name]; p != nil {
		r.Register = p.rec.Proto()
		if done {
			n.emit(RegisterChanged{Partition: name, Record: p.rec})
		}
	}
	return append(items, r)
}

func (n *naive) promise(c *pb.PromiseCommand) *pb.CommandResult {
	var items []*pb.ItemResult
	for _, it := range c.GetItems() {
		p, b := n.parts[it.GetPartition()], register.BallotOf(it.GetBallot())
		done := p != nil && p.rec.Alarm == "" && register.GuardOf(it.GetGuard()) == p.rec.Guard() && p.rec.Promised.Less(b)
		if done {
			p.rec.Promised = b
		}
		items = n.itemResult(items, it.GetPartition(), done)
	}
	return itemResults(items)
}

func (n *naive) accepted(c *pb.AcceptedCommand) *pb.CommandResult {
	var items []*pb.ItemResult
	for _, it := range c.GetItems() {
		p, b, v := n.parts[it.GetPartition()], register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue())
		switch {
		case p == nil || b.IsZero() || p.rec.Alarm != "":
			items = n.itemResult(items, it.GetPartition(), false)
		case b == p.rec.Accepted && v != p.rec.Value:
			items = n.itemResult(items, it.GetPartition(), false)
			p.rec.Alarm = "alarmed"
			items[len(items)-1].Register.Alarm = "alarmed"
			n.emit(RegisterChanged{Partition: it.GetPartition(), Record: p.rec})
		case b == p.rec.Accepted:
			items = append(items, &pb.ItemResult{Partition: it.GetPartition(), Done: b == p.rec.Promised, Register: p.rec.Proto()})
		case register.GuardOf(it.GetGuard()) == p.rec.Guard() && !b.Less(p.rec.Promised):
			p.rec.Promised, p.rec.Accepted, p.rec.Value = b, b, v
			items = n.itemResult(items, it.GetPartition(), true)
		default:
			items = n.itemResult(items, it.GetPartition(), false)
		}
	}
	return itemResults(items)
}

func (n *naive) adopt(c *pb.AdoptCommand) *pb.CommandResult {
	name, epoch := c.GetPartition(), fence.Epoch(c.GetEpoch())
	p := n.parts[name]
	if p == nil || epoch == 0 || epoch > fence.MaxEpoch {
		return failed(errInvalid("", ""))
	}
	live := p.phase != phaseAbsent
	owned := p.rec.Alarm == "" && !p.rec.Accepted.IsZero() && p.rec.Accepted == register.BallotOf(c.GetBallot()) &&
		p.rec.Value.Owner == register.Region{Name: n.region, Incarnation: n.inc} && p.rec.Value.Epoch == epoch
	if !owned || !(live && epoch == p.epoch) && (epoch <= p.epoch || epoch <= p.dropped) {
		return failed(errRefused(""))
	}
	if live && epoch == p.epoch {
		n.emit(PartitionAdopted{Partition: name, Epoch: epoch, Resumed: true, Unsettled: p.unsettled})
		return nil
	}
	unsettled := n.level >= 2 && !c.GetPlanned() && epoch != 1
	switch {
	case live && epoch == p.epoch+1:
		unsettled = p.unsettled
		for _, of := range sortedKeys(n.res) {
			if r := n.res[of]; r.partition == name && r.lease.Token != 0 {
				n.mark(r, RaisedReason)
			}
		}
	case live:
		n.endEpoch(name, errLapsed(""))
	}
	*p = naivePart{rec: p.rec, epoch: epoch, dropped: p.dropped, phase: phaseActive, unsettled: unsettled}
	n.emit(PartitionAdopted{Partition: name, Epoch: epoch, Unsettled: unsettled})
	n.serveStalled(name)
	return nil
}

func (n *naive) serveStalled(partition string) {
	for _, name := range sortedKeys(n.res) {
		if n.res[name].partition == partition {
			n.next(name)
		}
	}
	for _, base := range sortedKeys(n.sems) {
		if n.sems[base].partition == partition {
			n.serve(base)
		}
	}
}

func (n *naive) drop(c *pb.DropCommand) *pb.CommandResult {
	p, epoch := n.parts[c.GetPartition()], fence.Epoch(c.GetEpoch())
	switch {
	case p == nil:
		return failed(errInvalid("", ""))
	case p.phase != phaseAbsent && epoch == p.epoch:
		n.endEpoch(c.GetPartition(), notOwner("", "", 0))
	case epoch == 0 || epoch > p.dropped:
		return failed(errRefused(""))
	}
	return nil
}

// endEpoch ends all at once at level 1, and sets all apart for the sweep at
// level 2.
func (n *naive) endEpoch(partition string, told *pb.ErrorDetail) {
	p := n.parts[partition]
	p.phase, p.dropped, p.unsettled, p.successor = phaseAbsent, p.epoch, false, ""
	n.emit(PartitionDropped{Partition: partition, Epoch: p.epoch})
	for _, name := range sortedKeys(n.res) {
		if r := n.res[name]; r.partition == partition {
			delete(n.res, name)
			if n.level >= 2 {
				n.left[name] = r
				continue
			}
			n.endLeft(r, told, 1<<30)
		}
	}
	for base, q := range n.sems {
		if q.partition == partition {
			delete(n.sems, base)
			n.gone[base] = q
		}
	}
	if n.level >= 2 {
		n.startSweep()
	}
}

// endLeft ends up to budget parts of what is left of a resource.
func (n *naive) endLeft(r *naiveResource, told *pb.ErrorDetail, budget int) (used int) {
	if l := r.lease; l.Token != 0 {
		r.lease.Token = 0
		n.emit(LeaseEnded{Session: l.Session, Resource: l.Resource, Partition: l.Partition, Token: l.Token, Reason: EndDropped, Holder: "client/" + l.Session})
		used++
	}
	if r.delay.DelayMillis != 0 {
		n.stopDelay(r)
		used++
	}
	return used + n.endWaiters(&r.naiveQueue, told, budget-used)
}

func (n *naive) endWaiters(q *naiveQueue, told *pb.ErrorDetail, budget int) (used int) {
	for ; used < budget && len(q.waiters) > 0; used++ {
		w := q.waiters[0]
		q.waiters = q.waiters[1:]
		n.emit(WaiterEnded{Session: w.Session, Request: w.Request, Resource: w.Resource, Partition: w.Partition, Error: told})
	}
	return used
}

func (n *naive) over(partition string) *pb.ErrorDetail {
	if n.parts[partition].phase == phaseAbsent {
		return notOwner("", "", 0)
	}
	return errLapsed("")
}

func (n *naive) startSweep() {
	if n.sweep.passes == 0 {
		n.sweep = sweep{passes: 1}
	} else {
		n.sweep.passes = 2
	}
}

// sweepOn goes over all names, those of resources before those of semaphores,
// and ends what is set apart and what waits in a drain.
func (n *naive) sweepOn() {
	budget := n.piece
	for n.sweep.passes > 0 && budget.removals > 0 && budget.looks > 0 {
		names := map[string]bool{}
		for _, name := range slices.Concat(sortedKeys(n.res), sortedKeys(n.left)) {
			if base, _, ok := slotOf(name); n.sweep.semaphores && ok {
				names[base] = true
			} else if !n.sweep.semaphores {
				names[name] = true
			}
		}
		for _, base := range slices.Concat(sortedKeys(n.sems), sortedKeys(n.gone)) {
			if n.sweep.semaphores {
				names[base] = true
			}
		}
		for _, name := range sortedKeys(names) {
			if name < n.sweep.at {
				continue
			}
			if budget.looks == 0 {
				n.sweep.at = name
				return
			}
			budget.looks--
			used := n.clean(name, budget.removals)
			if budget.removals -= used; used > 0 && budget.removals <= 0 {
				n.sweep.at = name
				return
			}
		}
		switch {
		case !n.sweep.semaphores:
			n.sweep.semaphores, n.sweep.at = true, ""
		default:
			n.sweep = sweep{passes: n.sweep.passes - 1}
		}
	}
}

func (n *naive) clean(name string, budget int) (used int) {
	drains := func(q *naiveQueue) bool { return n.parts[q.partition].phase == phaseDraining }
	if n.sweep.semaphores {
		if q := n.gone[name]; q != nil {
			used = n.endWaiters(q, n.over(q.partition), budget)
		} else if q := n.sems[name]; q != nil && drains(q) {
			used = n.endWaiters(q, moved("", ""), budget)
		}
	} else if r := n.left[name]; r != nil {
		used = n.endLeft(r, n.over(r.partition), budget)
	} else if r := n.res[name]; r != nil && drains(&r.naiveQueue) {
		used = n.endWaiters(&r.naiveQueue, moved("", ""), budget)
	}
	n.tidy()
	return used
}

// tidy forgets what holds nothing.
func (n *naive) tidy() {
	for _, m := range []map[string]*naiveResource{n.res, n.left} {
		for name, r := range m {
			if r.lease.Token == 0 && r.delay.DelayMillis == 0 && len(r.waiters) == 0 {
				delete(m, name)
			}
		}
	}
	for _, m := range []map[string]*naiveQueue{n.sems, n.gone} {
		for name, q := range m {
			if len(q.waiters) == 0 {
				delete(m, name)
			}
		}
	}
}
