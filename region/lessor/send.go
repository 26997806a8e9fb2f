package lessor

import (
	"cmp"
	"slices"
	"time"

	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// send queues a message of this term.
func (l *Lessor) send(st *stream, m *pb.AttachResponse) {
	if m.Term != l.term { // a push that goes to many streams may be being sent already
		m.Term = l.term
	}
	l.out.Sends = append(l.out.Sends, Send{Stream: st.id, Message: m})
}

// ack answers the newest covered keepalive of a session on its stream.
func (l *Lessor) ack(s *session) {
	s.ackDue = false
	m := &ackMessage{}
	m.response.Kind = &m.kind
	m.kind.Ack = &m.ack
	a := &m.ack
	a.SessionId, a.Sequence, a.ReceivedAt, a.SessionUntil = s.id, s.ackSequence, int64(s.ackAt), int64(s.sendable)
	a.Complete, a.Partitions = !s.begun || s.again, l.ends(&s.refs)
	if a.Complete {
		for _, e := range s.leases.all() {
			if e.unnamed {
				e.list()
			}
			if !e.revoked {
				a.Held = append(a.Held, held(e))
			}
		}
		if !s.begun {
			s.begun = true
			s.history = append(s.history[:0], point{s.hash, s.changes})
		}
	} else {
		l.nameAll(s.stream)
		for _, e := range s.rename {
			if !e.gone && !e.revoked {
				a.Held = append(a.Held, held(e))
			}
		}
	}
	if len(a.Held) > 1 {
		slices.SortFunc(a.Held, func(x, y *pb.Held) int { return cmp.Compare(x.Resource, y.Resource) })
	}
	s.again, s.rename = false, nil
	l.send(s.stream, &m.response)
	if n := len(a.Partitions); !a.Complete && n > 0 && n == s.stream.refs.len() {
		s.stream.told = soonest(a.Partitions)
		l.pushNext(s.stream)
	}
}

func soonest(ends []*pb.PartitionEnd) instant.Instant {
	out := never
	for _, e := range ends {
		out = min(out, instant.Instant(e.Until))
	}
	return out
}

// ackMessage is an ack in one piece: it is what is sent most.
type ackMessage struct {
	response pb.AttachResponse
	kind     pb.AttachResponse_Ack
	ack      pb.Ack
}

func held(e *lease) *pb.Held {
	return &pb.Held{Resource: e.resource, Token: uint64(e.token), Partition: e.partition.name, Until: int64(e.offerEnd)}
}

// ends lists how far the head leases reach; it notes them as sent.
func (l *Lessor) ends(in *refs) []*pb.PartitionEnd {
	if in.len() == 0 {
		return nil
	}
	ends := make([]*pb.PartitionEnd, 0, in.len())
	for p := range in.all() {
		if end := l.end1(p); end != nil {
			ends = append(ends, end)
		}
	}
	if len(ends) > 1 {
		slices.SortFunc(ends, func(a, b *pb.PartitionEnd) int { return cmp.Compare(a.Partition, b.Partition) })
	}
	return ends
}

// end1 is a partition's end, noted as sent; nil if the region does not hold
// it.
func (l *Lessor) end1(p *partition) *pb.PartitionEnd {
	if !p.held(l.now) {
		return nil
	}
	p.sent = max(p.sent, p.holdUntil)
	if p.end == nil {
		p.end = &pb.PartitionEnd{Partition: p.name, Epoch: uint32(p.holdEpoch), Until: int64(p.holdUntil)}
	}
	return p.end
}

// push sends the ends of the stream's partitions, or of one of them, after the
// names of the tokens that they are to reach.
func (l *Lessor) push(st *stream, only *partition) {
	l.nameAll(st)
	if !l.checked {
		return
	}
	if only == nil && st.refs.len() == 1 {
		for p := range st.refs.all() {
			only = p
		}
	}
	if only != nil {
		if only.push == nil || !only.held(l.now) {
			end := l.end1(only)
			if end == nil {
				return
			}
			only.push = &pb.AttachResponse{Kind: &pb.AttachResponse_Push{Push: &pb.PartitionPush{Partitions: []*pb.PartitionEnd{end}}}}
		}
		l.send(st, only.push)
		if st.refs.len() == 1 {
			st.told = only.holdUntil
		}
		return
	}
	if ends := l.ends(&st.refs); len(ends) > 0 {
		st.told = soonest(ends)
		l.send(st, &pb.AttachResponse{Kind: &pb.AttachResponse_Push{Push: &pb.PartitionPush{Partitions: ends}}})
	}
}

// minPush keeps a tiny D from turning pushes into a busy loop.
const minPush = 10 * time.Millisecond

func (l *Lessor) pushEvery() time.Duration {
	return max(minPush, cmp.Or(l.cfg.PushEvery, l.defaultD()/5))
}

// pushSlots is in how many instants between two pushes streams are pushed to:
// what goes to many at once is one frame of a mux, and all at once would be a
// burst.
const pushSlots = 8

// pushAt is the last instant for pushes up to one.
func (l *Lessor) pushAt(at instant.Instant) instant.Instant {
	slot := l.pushEvery() / pushSlots
	return max(l.now+1, at.Add(-(at.Sub(l.start) % slot)))
}

// known is how long before an end that was told the next one is told, half of D: a
// client that was told by an ack or a push a moment ago needs no other.
func (l *Lessor) known() time.Duration { return l.pushEvery() * 5 / 2 }

// pushNext sets when the stream is pushed to next.
func (l *Lessor) pushNext(st *stream) {
	due := l.now.Add(l.pushEvery())
	if st.told != 0 {
		due = max(due, st.told.Add(-l.known()))
	}
	l.at(l.pushAt(due), st.timer)
}

// Push sends a stream the ends of its partitions now, besides the pushes that
// Tick sends.
func (l *Lessor) Push(now instant.Instant, id StreamID) {
	l.tick(now)
	if st, ok := l.streams[id]; ok {
		l.push(st, nil)
	}
}

func (l *Lessor) withdraw(e *lease, until instant.Instant, why pb.WithdrawalReason) {
	l.send(e.session.stream, &pb.AttachResponse{Kind: &pb.AttachResponse_Withdrawal{Withdrawal: &pb.Withdrawal{
		SessionId: e.session.id, Resource: e.resource, Token: uint64(e.token), Until: int64(until), Reason: why,
	}}})
}

// tellEnded answers a keepalive of a session that is not there, after a check.
func (l *Lessor) tellEnded(st *stream, id string) {
	if s, ok := l.sessions[id]; ok && !s.closing {
		return // opened since: the next keepalive attaches it
	}
	l.sendEnded(st, id, "the region does not know the session; open a new one")
}

func (l *Lessor) sendEnded(st *stream, id, reason string) {
	l.send(st, &pb.AttachResponse{Kind: &pb.AttachResponse_Ended{Ended: &pb.SessionEnded{SessionId: id, Reason: reason}}})
}
