package lessor

import (
	"time"

	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// Applied takes the events of applied commands, in order, each once.
func (l *Lessor) Applied(now instant.Instant, events []state.Event) {
	l.tick(now)
	for _, ev := range events {
		l.apply(ev)
	}
	l.empty()
}

func (l *Lessor) apply(ev state.Event) {
	switch ev := ev.(type) {
	case state.SessionOpened:
		s := l.open(ev.Session, l.now)
		// The opening is an arrival; nobody waits for its check.
		l.arrive(s, arrival{at: l.now}, false)
	case state.SessionClosed:
		if s, ok := l.sessions[ev.ID]; ok {
			s.closing = true
			l.stop(s.timer)
			l.depart(s)
			l.end(s, ev.Reason)
			l.closed = append(l.closed, s)
		}
	case state.LeaseGranted:
		l.granted(ev)
	case state.LeaseRevoked:
		if e := l.lease(ev.Session, ev.Resource); e != nil && e.token == ev.Token && !e.revoked {
			l.revoked(e, ev.Reason)
		}
	case state.LeaseEnded:
		if e := l.lease(ev.Session, ev.Resource); e != nil && e.token == ev.Token {
			l.ended(e, ev.Reason)
		}
	case state.WaiterEnqueued:
		if s, ok := l.sessions[ev.Session]; ok {
			l.wait(s, state.Waiter{Request: ev.Request, Partition: ev.Partition, WaitMillis: ev.WaitMillis})
		}
	case state.WaiterEnded:
		if s, ok := l.sessions[ev.Session]; ok {
			l.unwait(s, ev.Request)
			if s.begun {
				l.send(s.stream, &pb.AttachResponse{Kind: &pb.AttachResponse_Failed{Failed: &pb.RequestFailed{
					SessionId: s.id, RequestId: ev.Request, Error: ev.Error,
				}}})
			}
		}
	case state.PartitionAdopted:
		p := l.partition(ev.Partition)
		p.live, p.epoch = true, ev.Epoch
		if !ev.Resumed {
			p.draining = false
		}
		p.changed()
		l.adopted(p, ev.Unsettled)
	case state.PartitionDropped:
		p := l.partition(ev.Partition)
		p.live, p.draining = false, false
		p.changed()
		l.settled(p)
	case state.PartitionDraining:
		p := l.partition(ev.Partition)
		p.draining, p.successor, p.drainEnd = true, ev.Successor, l.now.Add(p.grace)
		p.grace = 0
		l.drain(p)
	case state.DrainAborted:
		l.partition(ev.Partition).draining = false
	case state.PartitionSettled:
		l.settled(l.partition(ev.Partition))
	case state.DelayBegun:
		from := l.now
		if ev.Token == 0 {
			from = l.partition(ev.Partition).adopted
		}
		l.begin(ev.Resource, ev.Partition, ev.Token, time.Duration(ev.DelayMillis)*time.Millisecond, from)
	case state.DelayEnded:
		l.endedDelay(ev.Resource)
	case state.RegisterChanged:
		p := l.partition(ev.Partition)
		p.d = max(p.d, ev.Record.Value.D)
	case state.Configured:
		l.configure(ev.Configuration)
	case state.TermBegun, state.Initialised, state.PulseCommitted, state.ValueChanged, state.LevelRaised:
	}
}

func (l *Lessor) lease(session, resource string) *lease {
	s, ok := l.sessions[session]
	if !ok {
		return nil
	}
	e, _ := s.leases.get(resource)
	return e
}

// granted takes a new token. What was handed over is named on the session's
// stream at once, for nothing else tells of it. What was asked for is told by the
// answer to Acquire, with an end of its own that reaches beyond the next push:
// the stream names it just before that, or before an ack. If it has been given
// back by then, as a short lock mostly has, the stream says nothing of it.
func (l *Lessor) granted(ev state.LeaseGranted) {
	s, ok := l.sessions[ev.Session]
	if !ok {
		return
	}
	l.unwait(s, ev.Request)
	if old, ok := s.leases.get(ev.Resource); ok {
		l.ended(old, state.EndDropped) // of an epoch that is dropped piece by piece
	}
	e := l.hold(s, ev.Resource, l.partition(ev.Partition), ev.Token)
	if s.begun && !ev.Offered {
		e.unnamed, e.request = true, ev.Request
		s.stream.unnamed = append(s.stream.unnamed, e)
		if due := l.pushAt(max(e.partition.holdUntil.Add(-l.known()), l.now.Add(minPush))); due < s.stream.timer.due {
			l.at(due, s.stream.timer)
		}
		if len(s.stream.unnamed) >= maxUnnamed {
			l.nameAll(s.stream)
		}
		return
	}
	e.list()
	if ev.Offered {
		l.offer(e)
	}
	if !s.begun {
		return // the first ack names it [L1]
	}
	g := &pb.Grant{SessionId: s.id, RequestId: ev.Request, Held: held(e)}
	if end := l.end1(e.partition); end != nil {
		g.Partition = end
	}
	l.send(s.stream, &pb.AttachResponse{Kind: &pb.AttachResponse_Grant{Grant: g}})
}

// nameAll names what the stream has not named and its sessions still hold.
func (l *Lessor) nameAll(st *stream) {
	for _, e := range st.unnamed {
		if !e.unnamed || e.gone {
			continue // named by an ack, given back, or attached elsewhere
		}
		e.list()
		l.send(st, &pb.AttachResponse{Kind: &pb.AttachResponse_Grant{Grant: &pb.Grant{
			SessionId: e.session.id, RequestId: e.request, Held: held(e),
		}}})
	}
	st.unnamed = nil
}

// revoked fixes when the last validity sent for the token is over, and
// withdraws it before any later validity [F9].
func (l *Lessor) revoked(e *lease, reason string) {
	s := e.session
	if e.unnamed {
		l.nameAll(s.stream) // or what is withdrawn would be a token never heard of
	}
	e.until = l.lastSent(e)
	if e.moving && e.offerEnd == 0 {
		e.until = max(e.until, e.partition.drainEnd) // what is sent until then counts, as the client caps it there
	}
	e.proposed, e.moving = false, false
	e.offer = reason == OfferExpired
	l.unlist(e)
	l.wake(e, timerRevocation, max(e.until, l.now))
	if s.begun {
		why := pb.WithdrawalReason_WITHDRAWAL_REASON_REVOKED
		if e.offer {
			why = pb.WithdrawalReason_WITHDRAWAL_REASON_OFFER_EXPIRED
		}
		l.withdraw(e, e.until, why)
	}
}

// lastSent is the end of all validity that was ever sent for a token: the
// earlier of the session's and the partition's part, both counted from what an
// earlier leader may have sent [L3].
func (l *Lessor) lastSent(e *lease) instant.Instant {
	until := min(e.session.sendable, e.partition.sent)
	if e.offerEnd != 0 {
		// This leader has sent nothing beyond the offer's end [L4].
		until = max(e.assumed, min(until, e.offerEnd))
	}
	return until
}

// ended withdraws a token that nobody holds any more.
func (l *Lessor) ended(e *lease, reason state.EndReason) {
	s, withdrawn := e.session, e.revoked
	if e.unnamed && reason != state.EndReleased {
		l.nameAll(s.stream)
	}
	l.drop(e)
	if !s.begun || withdrawn || e.unnamed {
		return
	}
	why := pb.WithdrawalReason_WITHDRAWAL_REASON_RELEASED
	switch reason {
	case state.EndDropped:
		why = pb.WithdrawalReason_WITHDRAWAL_REASON_DROPPED
	case state.EndRevoked:
		why = pb.WithdrawalReason_WITHDRAWAL_REASON_REVOKED
	case state.EndReleased, state.EndClosed, state.EndExpired:
	}
	l.withdraw(e, 0, why)
}

// end tells a session's stream that it is over.
func (l *Lessor) end(s *session, reason state.EndReason) {
	st := s.stream
	if st == nil {
		return
	}
	l.detach(s)
	if l.checked {
		l.sendEnded(st, s.id, reason.String())
		return
	}
	l.arriveUnknown(st, s.id)
}

// empty deals with the sessions that were closed: those without leases are
// gone, the others are emptied by more commands.
func (l *Lessor) empty() {
	var left []*session
	for _, s := range l.closed {
		switch {
		case s.gone:
		case s.leases.len() == 0:
			l.forget(s)
		case !s.expiring:
			left = append(left, s)
		}
	}
	l.closed = nil
	l.expire(left)
}
