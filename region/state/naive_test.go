package state

import (
	"maps"
	"slices"
	"sort"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// naive is the second implementation: the same rules on maps and slices, as
// plain as they can be written, with no index, no sharing and no care for
// speed. What it keeps differs from the Machine on purpose: every request id
// ever seen, one slice per queue, and what a Drop ends apart from the rest.
type naive struct {
	region     string
	inc        register.Incarnation
	level      uint32
	index      uint64
	round      uint64
	parts      map[string]*naivePart
	voters     map[string]VoterRecord
	sessions   map[string]*naiveSession
	res, left  map[string]*naiveResource
	sems, gone map[string]*naiveQueue
	configured bool
	events     []Event
	piece      piece
	sweep      sweep
}

type naivePart struct {
	rec            register.Record
	epoch, dropped fence.Epoch
	seq            fence.Seq
	phase          pb.PartitionPhase
	unsettled      bool
	successor      string
}

// grants reports whether a lease may be granted.
func (p *naivePart) grants() bool { return p.phase == phaseActive && p.seq < fence.MaxSeq }

type naiveSession struct {
	identity string
	lowest   uint64
	closing  bool
	// what was asked for by every id ever seen; cancelled ids have none.
	asked map[uint64]naiveAsked
}

type naiveAsked struct {
	resource string
	slots    uint32
}

// naiveResource is held, or in a delay, or waited for.
type naiveResource struct {
	lease Lease // Token 0: none
	delay Delay // DelayMillis 0: none
	naiveQueue
}

type naiveQueue struct {
	partition string
	waiters   []naiveWaiter
}

type naiveWaiter struct {
	Waiter
	value string
	delay int64
}

func newNaive(p piece) *naive {
	return &naive{
		level: 1, piece: p, parts: map[string]*naivePart{}, voters: map[string]VoterRecord{}, sessions: map[string]*naiveSession{},
		res: map[string]*naiveResource{}, left: map[string]*naiveResource{}, sems: map[string]*naiveQueue{}, gone: map[string]*naiveQueue{},
	}
}

func (n *naive) emit(e Event) { n.events = append(n.events, e) }

func (n *naive) apply(index, term uint64, c *pb.Command) (*pb.CommandResult, []Event) {
	n.events, n.index = nil, index
	if e := n.admit(term, c); e != nil {
		return failed(e), nil
	}
	res := n.command(index, term, c)
	if res == nil {
		res = &pb.CommandResult{}
	}
	n.tidy()
	n.sweepOn()
	return res, n.events
}

func (n *naive) admit(term uint64, c *pb.Command) *pb.ErrorDetail {
	if c.GetTerm() != 0 && c.GetTerm() != term {
		return errWrongTerm(term)
	}
	a := c.GetAcquire()
	second := c.GetSetValue() != nil || c.GetEndWait() != nil || c.GetEndDelay() != nil || c.GetSettle() != nil || c.GetStartDrain() != nil ||
		c.GetAbortDrain() != nil || c.GetStateHash() != nil || c.GetAdopt().GetPlanned() ||
		len(a.GetValue()) > 0 || a.GetLockDelayMs() != 0 || a.GetWaitMs() != 0 || a.GetSlots() != 0
	if second && n.level < 2 {
		return errRefused("")
	}
	stamped := c.GetPromise() != nil || c.GetAccepted() != nil || c.GetAdopt() != nil || c.GetDrop() != nil ||
		c.GetRecordVoters() != nil || c.GetExpire() != nil || c.GetRevoke() != nil || c.GetEndRevocation() != nil || c.GetBeginTerm() != nil ||
		c.GetEndWait() != nil || c.GetEndDelay() != nil || c.GetSettle() != nil || c.GetStartDrain() != nil || c.GetAbortDrain() != nil
	if stamped && c.GetTerm() == 0 {
		return errInvalid("", "")
	}
	if n.inc == 0 && c.GetBeginTerm() == nil && c.GetPulse() == nil && c.GetInitRegion() == nil {
		return errUninitialised()
	}
	return nil
}

func (n *naive) command(index, term uint64, c *pb.Command) *pb.CommandResult {
	switch k := c.GetKind().(type) {
	case *pb.Command_BeginTerm:
		n.emit(TermBegun{Term: term, Index: index, Server: k.BeginTerm.GetServer()})
	case *pb.Command_Pulse:
		n.emit(PulseCommitted{Index: index})
	case *pb.Command_InitRegion:
		return n.init(k.InitRegion)
	case *pb.Command_Configure:
		return n.configure(k.Configure.GetConfiguration())
	case *pb.Command_ReserveBallot:
		n.round = max(n.round, k.ReserveBallot.GetAbove()) + 1
		return &pb.CommandResult{Kind: &pb.CommandResult_Reserved{Reserved: &pb.ReservedBallot{Ballot: &pb.Ballot{
			Round: n.round, Region: n.region, Incarnation: uint64(n.inc),
		}}}}
	case *pb.Command_Promise:
		return n.promise(k.Promise)
	case *pb.Command_Accepted:
		return n.accepted(k.Accepted)
	case *pb.Command_Adopt:
		return n.adopt(k.Adopt)
	case *pb.Command_Drop:
		return n.drop(k.Drop)
	case *pb.Command_RecordVoters:
		for _, v := range k.RecordVoters.GetVoters() {
			id, inc := v.GetVoter().GetId(), register.Incarnation(v.GetVoter().GetIncarnation())
			writes := v.GetWrites()
			if old, ok := n.voters[id]; ok && old.Incarnation == inc && old.Writes > writes {
				writes = old.Writes
			}
			n.voters[id] = VoterRecord{ID: id, Incarnation: inc, Life: v.GetLife(), Writes: writes}
		}
	case *pb.Command_OpenSession:
		if n.sessions[k.OpenSession.GetSessionId()] != nil {
			return failed(errRefused(""))
		}
		n.sessions[k.OpenSession.GetSessionId()] = &naiveSession{identity: k.OpenSession.GetIdentity(), lowest: 1, asked: map[uint64]naiveAsked{}}
		n.emit(SessionOpened{Session: Session{ID: k.OpenSession.GetSessionId()}})
	case *pb.Command_CloseSession:
		n.end([]string{k.CloseSession.GetSessionId()}, EndClosed)
	case *pb.Command_Expire:
		n.end(k.Expire.GetSessionIds(), EndExpired)
	case *pb.Command_Acquire:
		return n.acquire(k.Acquire)
	case *pb.Command_Cancel:
		return n.cancel(k.Cancel)
	case *pb.Command_RaiseLevel:
		if k.RaiseLevel.GetLevel() > n.level {
			n.level = k.RaiseLevel.GetLevel()
			n.emit(LevelRaised{Level: n.level})
		}
	}
	if r := n.timed(c); r != nil {
		return r
	}
	return n.onLease(c)
}

// timed are the commands for which the leader's clock is the reason.
func (n *naive) timed(c *pb.Command) *pb.CommandResult {
	switch k := c.GetKind().(type) {
	case *pb.Command_EndWait:
		if s := n.sessions[k.EndWait.GetSessionId()]; s != nil {
			id := k.EndWait.GetRequestId()
			n.leave(k.EndWait.GetSessionId(), func(r uint64) bool { return r == id }, func(uint64) *pb.ErrorDetail { return errWaitEnded("", 0) })
		}
	case *pb.Command_EndDelay:
		name := k.EndDelay.GetResource()
		r := n.res[name]
		if r == nil || r.delay.DelayMillis == 0 || uint64(r.delay.Token) != k.EndDelay.GetToken() {
			return failed(errRefused(""))
		}
		n.stopDelay(r)
		n.next(name)
	case *pb.Command_Settle, *pb.Command_StartDrain, *pb.Command_AbortDrain:
		return n.phase(c)
	}
	return nil
}

func (n *naive) phase(c *pb.Command) *pb.CommandResult {
	of := []interface {
		GetPartition() string
		GetEpoch() uint32
	}{c.GetSettle(), c.GetStartDrain(), c.GetAbortDrain()}
	name, epoch := "", uint32(0)
	for _, k := range of {
		name, epoch = name+k.GetPartition(), epoch+k.GetEpoch() // two are nil
	}
	p := n.parts[name]
	switch {
	case p == nil:
		return failed(errInvalid("", ""))
	case p.phase == phaseAbsent:
		return failed(notOwner("", "", 0))
	case p.epoch != fence.Epoch(epoch):
		return failed(errRefused(""))
	}
	to := c.GetStartDrain().GetSuccessor()
	switch {
	case c.GetSettle() != nil && p.unsettled:
		p.unsettled = false
		n.emit(PartitionSettled{Partition: name, Epoch: p.epoch})
	case c.GetSettle() != nil:
	case c.GetStartDrain() != nil && (to == "" || to == n.region):
		return failed(errInvalid("", ""))
	case c.GetStartDrain() != nil && p.phase == phaseDraining && to != p.successor:
		return failed(errRefused(""))
	case c.GetStartDrain() != nil && p.phase == phaseActive:
		p.phase, p.successor = phaseDraining, to
		n.emit(PartitionDraining{Partition: name, Epoch: p.epoch, Successor: to})
		n.startSweep()
	case c.GetAbortDrain() != nil && p.phase == phaseDraining:
		p.phase, p.successor = phaseActive, ""
		n.emit(DrainAborted{Partition: name, Epoch: p.epoch})
		n.serveStalled(name)
	}
	return nil
}

// onLease are the commands on a lease that is held.
func (n *naive) onLease(c *pb.Command) *pb.CommandResult {
	of := []interface {
		GetResource() string
		GetToken() uint64
	}{c.GetRelease(), c.GetRevoke(), c.GetEndRevocation(), c.GetSetValue()}
	if c.GetRelease() == nil && c.GetRevoke() == nil && c.GetEndRevocation() == nil && c.GetSetValue() == nil {
		return nil
	}
	name, token := "", uint64(0)
	for _, k := range of {
		name, token = name+k.GetResource(), token+k.GetToken()
	}
	r := n.res[name]
	if r == nil || token == 0 || uint64(r.lease.Token) != token ||
		c.GetRelease() != nil && r.lease.Session != c.GetRelease().GetSessionId() ||
		c.GetSetValue() != nil && r.lease.Session != c.GetSetValue().GetSessionId() {
		return failed(errNotHolder("", 0))
	}
	switch {
	case c.GetRelease() != nil:
		n.endLease(r, EndReleased)
		n.next(name)
	case c.GetRevoke() != nil:
		n.mark(r, c.GetRevoke().GetReason())
	case c.GetEndRevocation() != nil && !r.lease.Revoked:
		return failed(errRefused(""))
	case c.GetEndRevocation() != nil:
		n.endLease(r, EndRevoked)
		n.next(name)
	case c.GetSetValue() != nil:
		n.setValue(r, string(c.GetSetValue().GetValue()))
		return &pb.CommandResult{Kind: &pb.CommandResult_SetValue{SetValue: &pb.SetValueResult{Revision: n.index}}}
	}
	return nil
}

func (n *naive) setValue(r *naiveResource, v string) {
	l := &r.lease
	l.Value, l.Revision = v, n.index
	n.emit(ValueChanged{
		Session: l.Session, Resource: l.Resource, Partition: l.Partition, Token: l.Token, Holder: "client/" + l.Session, Value: v, Revision: n.index,
	})
}

func (n *naive) init(c *pb.InitRegionCommand) *pb.CommandResult {
	already := n.inc != 0
	if already && n.region != c.GetRegion() {
		return failed(errRefused(""))
	}
	if !already {
		n.region, n.inc = c.GetRegion(), register.Incarnation(c.GetIncarnation())
		n.emit(Initialised{Region: n.region, Incarnation: n.inc})
	}
	return &pb.CommandResult{Kind: &pb.CommandResult_Init{Init: &pb.InitRegionResult{Incarnation: uint64(n.inc), Already: already}}}
}

func (n *naive) configure(c *pb.ClusterConfiguration) *pb.CommandResult {
	already := n.configured
	if !already {
		n.configured = true
		for _, p := range c.GetPartitions() {
			n.parts[p.GetName()] = &naivePart{phase: phaseAbsent}
		}
		n.emit(Configured{Configuration: c})
	}
	return &pb.CommandResult{Kind: &pb.CommandResult_Configure{Configure: &pb.ConfigureResult{Already: already}}}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func (n *naive) stopDelay(r *naiveResource) {
	n.emit(DelayEnded{Resource: r.delay.Resource, Partition: r.partition, Token: r.delay.Token})
	r.delay = Delay{}
}

func (n *naive) beginDelay(name string, r *naiveResource, token fence.Token, millis int64) {
	r.delay = Delay{Resource: name, Partition: r.partition, Token: token, DelayMillis: millis}
	n.emit(DelayBegun(r.delay))
}

func (n *naive) endLease(r *naiveResource, why EndReason) {
	l := r.lease
	r.lease = Lease{}
	n.emit(LeaseEnded{Session: l.Session, Resource: l.Resource, Partition: l.Partition, Token: l.Token, Reason: why, Holder: "client/" + l.Session})
	if l.LockDelayMillis > 0 && why != EndReleased && why != EndClosed {
		n.beginDelay(l.Resource, r, l.Token, l.LockDelayMillis)
	}
}

func (n *naive) mark(r *naiveResource, why string) {
	l := &r.lease
	if l.Revoked {
		return
	}
	l.Revoked, l.RevokeReason = true, why
	n.emit(LeaseRevoked{Session: l.Session, Resource: l.Resource, Partition: l.Partition, Token: l.Token, Reason: why, Holder: "client/" + l.Session})
}

// next gives a free resource to the first in its queue, and a slot without one
// to the first of the semaphore's for whom it would do, if that may be.
func (n *naive) next(name string) {
	r := n.res[name]
	if r != nil && (r.lease.Token != 0 || r.delay.DelayMillis != 0) {
		return
	}
	if r != nil && len(r.waiters) > 0 {
		if n.parts[r.partition].grants() {
			w := r.waiters[0]
			r.waiters = r.waiters[1:]
			n.give(name, w, true)
		}
		return
	}
	n.tidy()
	base, slot, _ := slotOf(name)
	q := n.sems[base]
	if q == nil || !n.parts[q.partition].grants() {
		return
	}
	for i, w := range q.waiters {
		if int(w.Slots) > slot {
			q.waiters = slices.Delete(slices.Clone(q.waiters), i, i+1)
			n.give(name, w, true)
			return
		}
	}
}

// serve gives a semaphore's free slots to its queue.
func (n *naive) serve(base string) {
	q := n.sems[base]
	for _, w := range slices.Clone(q.waiters) {
		p := n.parts[q.partition]
		if !p.grants() {
			return
		}
		name, free := n.freeSlot(base, w.Slots)
		switch {
		case !free:
		case p.unsettled && w.delay > 0:
			n.beginDelay(name, n.create(name, q.partition), 0, w.delay)
		default:
			q.waiters = slices.DeleteFunc(slices.Clone(q.waiters), func(o naiveWaiter) bool { return o == w })
			n.give(name, w, true)
		}
	}
	n.tidy()
}

// freeSlot returns the lowest slot of which nothing is known.
func (n *naive) freeSlot(base string, slots uint32) (string, bool) {
	for i := range int(slots) {
		if name := slotName(base, i); n.res[name] == nil {
			return name, true
		}
	}
	return "", false
}

// create makes a resource; what was set apart under its name ends first.
func (n *naive) create(name, partition string) *naiveResource {
	if r := n.left[name]; r != nil {
		n.endLeft(r, n.over(r.partition), 1<<30)
		n.tidy()
	}
	n.res[name] = &naiveResource{naiveQueue: naiveQueue{partition: partition}}
	return n.res[name]
}

func (n *naive) give(name string, w naiveWaiter, offered bool) fence.Token {
	r := n.res[name]
	if r == nil {
		r = n.create(name, w.Partition)
	}
	p := n.parts[w.Partition]
	p.seq++
	r.lease = Lease{
		Resource: name, Partition: w.Partition, Session: w.Session, Token: token(p.epoch, p.seq), Request: w.Request, Offered: offered,
		Value: w.value, LockDelayMillis: w.delay,
	}
	if n.level >= 2 {
		r.lease.Revision = n.index
	}
	l := r.lease
	n.emit(LeaseGranted{
		Session: w.Session, Request: w.Request, Resource: name, Partition: w.Partition, Token: l.Token, Offered: offered,
		Holder: "client/" + w.Session, Value: w.value, LockDelayMillis: w.delay, Revision: l.Revision,
	})
	return l.Token
}

// queues yields all queues, those set apart included.
func (n *naive) queues() []*naiveQueue {
	var all []*naiveQueue
	for _, m := range []map[string]*naiveResource{n.res, n.left} {
		for _, r := range m {
			all = append(all, &r.naiveQueue)
		}
	}
	for _, m := range []map[string]*naiveQueue{n.sems, n.gone} {
		for _, q := range m {
			all = append(all, q)
		}
	}
	return all
}

// leave takes all waiters that gone names out of the queues, in the order of
// their request ids.
func (n *naive) leave(session string, gone func(id uint64) bool, told func(id uint64) *pb.ErrorDetail) {
	var ws []naiveWaiter
	for _, q := range n.queues() {
		for _, w := range q.waiters {
			if w.Session == session && gone(w.Request) {
				ws = append(ws, w)
			}
		}
	}
	sort.Slice(ws, func(i, j int) bool { return ws[i].Request < ws[j].Request })
	for _, w := range ws {
		for _, q := range n.queues() {
			q.waiters = slices.DeleteFunc(slices.Clone(q.waiters), func(o naiveWaiter) bool { return o == w })
		}
		n.emit(WaiterEnded{Session: session, Request: w.Request, Resource: w.Resource, Partition: w.Partition, Error: told(w.Request)})
	}
	n.tidy()
}

func (n *naive) end(ids []string, why EndReason) {
	for _, id := range ids {
		if s := n.sessions[id]; s != nil && !s.closing {
			s.closing = true
			n.emit(SessionClosed{ID: id, Reason: why})
			n.leave(id, func(uint64) bool { return true }, func(uint64) *pb.ErrorDetail { return errSessionExpired(id) })
		}
	}
	var freed []string
	for _, id := range ids {
		held := map[string]*naiveResource{}
		for name, r := range n.left {
			if r.lease.Token != 0 && r.lease.Session == id {
				held[name] = r
			}
		}
		for name, r := range n.res {
			if r.lease.Token != 0 && r.lease.Session == id {
				held[name] = r
			}
		}
		for _, name := range sortedKeys(held) {
			if n.left[name] != nil {
				n.endLeft(held[name], nil, 1)
				continue
			}
			n.endLease(held[name], why)
			freed = append(freed, name)
		}
		delete(n.sessions, id)
	}
	for _, name := range freed {
		n.next(name)
	}
	n.tidy()
}
