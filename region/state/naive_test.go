package state

import (
	"slices"
	"sort"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// naive is the second implementation: the same rules on maps and slices, as
// plain as they can be written, with no index, no sharing and no care for
// speed. What it keeps differs from the Machine on purpose: every request id
// ever seen, every lease by resource, one slice per queue.
type naive struct {
	region     string
	inc        register.Incarnation
	round      uint64
	parts      map[string]*naivePart
	voters     map[string]VoterRecord
	sessions   map[string]*naiveSession
	leases     map[string]Lease
	queues     map[string][]Waiter
	configured bool
	events     []Event
}

type naivePart struct {
	rec            register.Record
	epoch, dropped fence.Epoch
	seq            fence.Seq
	phase          pb.PartitionPhase
}

type naiveSession struct {
	identity string
	lowest   uint64
	closing  bool
	// resource asked for by every id ever seen; cancelled ids have "".
	asked map[uint64]string
}

func newNaive() *naive {
	return &naive{
		parts: map[string]*naivePart{}, voters: map[string]VoterRecord{}, sessions: map[string]*naiveSession{},
		leases: map[string]Lease{}, queues: map[string][]Waiter{},
	}
}

func (n *naive) emit(e Event) { n.events = append(n.events, e) }

func (n *naive) apply(index, term uint64, c *pb.Command) (*pb.CommandResult, []Event) {
	n.events = nil
	res := n.command(index, term, c)
	if res == nil {
		res = &pb.CommandResult{}
	}
	return res, n.events
}

func (n *naive) command(index, term uint64, c *pb.Command) *pb.CommandResult {
	if c.GetTerm() != 0 && c.GetTerm() != term {
		return failed(errWrongTerm(term))
	}
	stamped := c.GetPromise() != nil || c.GetAccepted() != nil || c.GetAdopt() != nil || c.GetDrop() != nil ||
		c.GetRecordVoters() != nil || c.GetExpire() != nil || c.GetRevoke() != nil || c.GetEndRevocation() != nil || c.GetBeginTerm() != nil
	if stamped && c.GetTerm() == 0 {
		return failed(errInvalid("", ""))
	}
	switch k := c.GetKind().(type) {
	case *pb.Command_BeginTerm:
		n.emit(TermBegun{Term: term, Index: index, Server: k.BeginTerm.GetServer()})
		return nil
	case *pb.Command_Pulse:
		n.emit(PulseCommitted{Index: index})
		return nil
	case *pb.Command_InitRegion:
		return n.init(k.InitRegion)
	}
	if n.inc == 0 {
		return failed(errUninitialised())
	}
	switch k := c.GetKind().(type) {
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
		n.sessions[k.OpenSession.GetSessionId()] = &naiveSession{identity: k.OpenSession.GetIdentity(), lowest: 1, asked: map[uint64]string{}}
		n.emit(SessionOpened{Session: Session{ID: k.OpenSession.GetSessionId()}})
	case *pb.Command_CloseSession:
		n.end([]string{k.CloseSession.GetSessionId()}, EndClosed)
	case *pb.Command_Expire:
		n.end(k.Expire.GetSessionIds(), EndExpired)
	case *pb.Command_Acquire:
		return n.acquire(k.Acquire)
	case *pb.Command_Cancel:
		return n.cancel(k.Cancel)
	case *pb.Command_Release:
		l, ok := n.leases[k.Release.GetResource()]
		if !ok || uint64(l.Token) != k.Release.GetToken() || l.Session != k.Release.GetSessionId() {
			return failed(errNotHolder("", 0))
		}
		n.endLease(l, EndReleased)
		n.next(l.Resource)
	case *pb.Command_Revoke:
		l, ok := n.leases[k.Revoke.GetResource()]
		if !ok || uint64(l.Token) != k.Revoke.GetToken() {
			return failed(errNotHolder("", 0))
		}
		n.mark(l, k.Revoke.GetReason())
	case *pb.Command_EndRevocation:
		l, ok := n.leases[k.EndRevocation.GetResource()]
		if !ok || uint64(l.Token) != k.EndRevocation.GetToken() {
			return failed(errNotHolder("", 0))
		}
		if !l.Revoked {
			return failed(errRefused(""))
		}
		n.endLease(l, EndRevoked)
		n.next(l.Resource)
	}
	return nil
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
	p, epoch := n.parts[c.GetPartition()], fence.Epoch(c.GetEpoch())
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
		n.emit(PartitionAdopted{Partition: c.GetPartition(), Epoch: epoch, Resumed: true})
		return nil
	}
	switch {
	case live && epoch == p.epoch+1:
		for _, name := range n.names(c.GetPartition()) {
			if l, ok := n.leases[name]; ok {
				n.mark(l, RaisedReason)
			}
		}
	case live:
		n.endEpoch(c.GetPartition(), errLapsed(""))
	}
	p.epoch, p.seq, p.phase = epoch, 0, phaseActive
	n.emit(PartitionAdopted{Partition: c.GetPartition(), Epoch: epoch})
	for _, name := range n.names(c.GetPartition()) {
		n.next(name)
	}
	return nil
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

func (n *naive) endEpoch(partition string, told *pb.ErrorDetail) {
	p := n.parts[partition]
	p.phase, p.dropped = phaseAbsent, p.epoch
	n.emit(PartitionDropped{Partition: partition, Epoch: p.epoch})
	for _, name := range n.names(partition) {
		if l, ok := n.leases[name]; ok {
			n.endLease(l, EndDropped)
		}
		for _, w := range n.queues[name] {
			n.emit(WaiterEnded{Session: w.Session, Request: w.Request, Resource: name, Partition: partition, Error: told})
		}
		delete(n.queues, name)
	}
}

// names of a partition's resources, sorted.
func (n *naive) names(partition string) []string {
	var names []string
	for name, l := range n.leases {
		if l.Partition == partition {
			names = append(names, name)
		}
	}
	for name, q := range n.queues {
		if _, held := n.leases[name]; !held && len(q) > 0 && q[0].Partition == partition {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	return names
}

func (n *naive) endLease(l Lease, why EndReason) {
	delete(n.leases, l.Resource)
	n.emit(LeaseEnded{Session: l.Session, Resource: l.Resource, Partition: l.Partition, Token: l.Token, Reason: why})
}

func (n *naive) mark(l Lease, why string) {
	if l.Revoked {
		return
	}
	l.Revoked, l.RevokeReason = true, why
	n.leases[l.Resource] = l
	n.emit(LeaseRevoked{Session: l.Session, Resource: l.Resource, Partition: l.Partition, Token: l.Token, Reason: why})
}

// next gives a free resource to the first in its queue, if that may be.
func (n *naive) next(resource string) {
	q := n.queues[resource]
	if _, held := n.leases[resource]; held || len(q) == 0 {
		return
	}
	p := n.parts[q[0].Partition]
	if p.phase != phaseActive || p.seq == fence.MaxSeq {
		return
	}
	n.queues[resource] = q[1:]
	n.give(q[0], true)
}

func (n *naive) give(w Waiter, offered bool) fence.Token {
	p := n.parts[w.Partition]
	p.seq++
	tok := token(p.epoch, p.seq)
	n.leases[w.Resource] = Lease{Resource: w.Resource, Partition: w.Partition, Session: w.Session, Token: tok, Request: w.Request, Offered: offered}
	n.emit(LeaseGranted{Session: w.Session, Request: w.Request, Resource: w.Resource, Partition: w.Partition, Token: tok, Offered: offered})
	return tok
}

// leave takes all waiters that gone names out of the queues, in the order of
// their request ids.
func (n *naive) leave(session string, gone func(id uint64) bool, told func(id uint64) *pb.ErrorDetail) {
	var ws []Waiter
	for _, q := range n.queues {
		for _, w := range q {
			if w.Session == session && gone(w.Request) {
				ws = append(ws, w)
			}
		}
	}
	sort.Slice(ws, func(i, j int) bool { return ws[i].Request < ws[j].Request })
	for _, w := range ws {
		n.queues[w.Resource] = slices.DeleteFunc(slices.Clone(n.queues[w.Resource]), func(o Waiter) bool { return o == w })
		n.emit(WaiterEnded{Session: session, Request: w.Request, Resource: w.Resource, Partition: w.Partition, Error: told(w.Request)})
	}
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
		var held []string
		for name, l := range n.leases {
			if l.Session == id {
				held = append(held, name)
			}
		}
		sort.Strings(held)
		for _, name := range held {
			n.endLease(n.leases[name], why)
		}
		freed = append(freed, held...)
		delete(n.sessions, id)
	}
	for _, name := range freed {
		n.next(name)
	}
}

func (n *naive) busy(resource string) *pb.CommandResult {
	l := n.leases[resource]
	b := &pb.BusyLease{Token: uint64(l.Token), Waiters: uint32(len(n.queues[resource]))}
	if s := n.sessions[l.Session]; s != nil {
		b.Holder = s.identity
	}
	return &pb.CommandResult{Kind: &pb.CommandResult_Acquire{Acquire: &pb.AcquireResult{Outcome: &pb.AcquireResult_Busy{Busy: b}}}}
}

func (n *naive) acquire(c *pb.AcquireCommand) *pb.CommandResult {
	s, id, res := n.sessions[c.GetSessionId()], c.GetRequestId(), c.GetResource()
	switch {
	case s == nil || s.closing:
		return failed(errSessionExpired(""))
	case id == 0 || c.GetLowestOpenRequest() > id || res == "":
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
	l, held := n.leases[res]
	q := n.queues[res]
	if held && l.Partition != c.GetPartition() || len(q) > 0 && q[0].Partition != c.GetPartition() {
		return failed(errRefused(""))
	}
	me := Waiter{Session: c.GetSessionId(), Request: id, Resource: res, Partition: c.GetPartition()}
	if _, seen := s.asked[id]; seen {
		return n.again(s, me, c.GetWait())
	}
	if p.phase == phaseDraining {
		return failed(errMoved(""))
	}
	switch {
	case !held && len(q) == 0:
		if p.seq == fence.MaxSeq {
			return failed(errOverloaded(""))
		}
		s.asked[id] = res
		return granted(n.give(me, false), false)
	case held && l.Session == me.Session && !l.Revoked:
		s.asked[id] = res
		l.Request = id
		n.leases[res] = l
		return granted(l.Token, true)
	case !c.GetWait():
		s.asked[id] = res
		return n.busy(res)
	}
	s.asked[id] = res
	n.queues[res] = append(slices.Clone(q), me)
	n.emit(WaiterEnqueued(me))
	return queued(len(q))
}

func (n *naive) again(s *naiveSession, me Waiter, wait bool) *pb.CommandResult {
	// A request is open while it waits, or while its grant is held.
	for res, q := range n.queues {
		for i, w := range q {
			if w.Session == me.Session && w.Request == me.Request {
				if res != me.Resource {
					return failed(errInvalid("", ""))
				}
				return queued(i)
			}
		}
	}
	for res, l := range n.leases {
		if l.Session == me.Session && l.Request == me.Request {
			switch {
			case res != me.Resource:
				return failed(errInvalid("", ""))
			case l.Revoked:
				return failed(errStaleRequest(me.Request))
			}
			return granted(l.Token, true)
		}
	}
	if l, held := n.leases[me.Resource]; held && l.Session != me.Session && !wait {
		return n.busy(me.Resource)
	}
	return failed(errStaleRequest(me.Request))
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
	for name, l := range n.leases {
		if l.Session == c.GetSessionId() && l.Request == id && id >= s.lowest {
			res.GrantedToken, res.Resource = uint64(l.Token), name
		}
	}
	n.leave(c.GetSessionId(), func(r uint64) bool { return r == id }, errStaleRequest)
	if _, seen := s.asked[id]; !seen {
		s.asked[id] = ""
	}
	return &pb.CommandResult{Kind: &pb.CommandResult_Cancel{Cancel: res}}
}
