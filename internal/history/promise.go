package history

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Clocks says when, on the history's clock, the clock of a term's leader shows
// an instant.
type Clocks func(term uint64, at int64) time.Duration

// hold names a token of a session.
type hold struct {
	session, resource string
	token             uint64
}

// span is a time in which a client may believe that it holds a token.
type span struct {
	hold
	client   string
	from, to time.Duration
}

// promises is what clients were told, and so may believe.
type promises struct {
	clocks Clocks // nil: nothing that a clock shows is told
	share  float64

	clients map[string]*listener
	spans   map[hold][]*span
	// session is the latest end that a session was promised.
	session map[string]time.Duration
	// confirmed are the offers of which the client was told that they are
	// confirmed, and offered the ends of those of which it was not.
	confirmed map[hold]bool
	offered   map[request]time.Duration
}

// listener follows the streams of one client, as design §3 tells clients to.
type listener struct {
	term     uint64
	streams  map[streamTerm]*heardStream
	sessions map[string]*heardSession
}

// streamTerm is what one leader says on a stream.
type streamTerm struct {
	stream int
	term   uint64
}

// heardStream has instants as its leader's clock shows them: how long they are
// from now for the client is told by the newest pair of stamps, also of what it
// heard before.
type heardStream struct {
	term uint64
	// stamp is when the leader received the keepalive of the newest ack, and shown
	// what its clock showed then.
	stamped bool
	stamp   time.Duration
	shown   int64
	// parts are the ends of partitions by epoch.
	parts map[uint64]int64
}

type heardSession struct {
	// current is where the newest complete ack came from: what spoke before is out
	// of date.
	current *heardStream
	until   int64
	named   map[string]*heardToken
	// streamed are the tokens that a stream has named at some time. One that only
	// an answer has named may be newer than a list of what is held.
	streamed map[hold]bool
	// dead is the highest token of a resource that has ended for the client.
	dead map[string]uint64
	live map[hold]*span
	// over: its client has asked to close it, or was told that it has ended. Of a
	// grant that was on its way then, it believes nothing.
	over bool
}

type heardToken struct {
	token     uint64
	until     int64 // its own end; maximal: none
	withdrawn bool
}

const epochShift = 32

// listen goes through a history in the order of its time.
func listen(h History, clocks Clocks, share float64) *promises {
	p := &promises{
		clocks: clocks, share: share, clients: map[string]*listener{}, spans: map[hold][]*span{},
		session: map[string]time.Duration{}, confirmed: map[hold]bool{}, offered: map[request]time.Duration{},
	}
	type event struct {
		at   time.Duration
		rank int
		do   func()
	}
	// What came at one instant may have been taken in any order, and a stream may
	// speak for a newer term than an answer: in this order most is believed.
	const (
		answers = iota
		messages
		ends
	)
	var events []event
	for _, m := range h.Messages {
		if m.Heard != nil {
			events = append(events, event{m.At, messages, func() { p.heard(m) }})
		}
	}
	for _, op := range h.Ops {
		switch {
		case op.Kind == Release:
			events = append(events, event{op.Call, ends, func() { p.letGo(op.Call, op.Client, op.Session, op.Resource, op.Token) }})
		case op.Kind == Close:
			events = append(events, event{op.Call, ends, func() { p.sessionOver(op.Call, op.Client, op.Session) }})
		case op.Kind == Acquire && op.Answer.Granted:
			events = append(events, event{op.Return, answers, func() { p.answer(op) }})
		}
	}
	slices.SortStableFunc(events, func(a, b event) int { return cmp.Or(cmp.Compare(a.at, b.at), a.rank-b.rank) })
	for _, e := range events {
		e.do()
	}
	return p
}

func (p *promises) listener(client string) *listener {
	l := p.clients[client]
	if l == nil {
		l = &listener{streams: map[streamTerm]*heardStream{}, sessions: map[string]*heardSession{}}
		p.clients[client] = l
	}
	return l
}

func (l *listener) session(id string) *heardSession {
	s := l.sessions[id]
	if s == nil {
		s = &heardSession{named: map[string]*heardToken{}, streamed: map[hold]bool{}, dead: map[string]uint64{}, live: map[hold]*span{}}
		l.sessions[id] = s
	}
	return s
}

// end is the latest instant that a client may take for what the leader's clock
// shows at the given one. What is left of it at the stamp, a client counts on a
// clock that may be the slowest, from a keepalive that it sent before the stamp.
func (p *promises) end(st *heardStream, at int64) time.Duration {
	switch left := float64(at) - float64(st.shown); {
	case p.clocks == nil:
		return 0
	case !st.stamped || left <= 0:
		return p.clocks(st.term, at)
	default:
		return st.stamp + time.Duration(left*p.share)
	}
}

// hears takes the stamp of an answer.
func (p *promises) hears(st *heardStream, received int64) {
	if p.clocks != nil && (!st.stamped || received > st.shown) {
		st.stamped, st.stamp, st.shown = true, p.clocks(st.term, received), received
	}
}

func (p *promises) promise(session string, until time.Duration) {
	p.session[session] = max(p.session[session], until)
}

// believe makes a token believed until then, at least.
func (p *promises) believe(now time.Duration, client string, s *heardSession, h hold, until time.Duration) {
	if s.over || until <= now || h.token <= s.dead[h.resource] {
		return
	}
	sp := s.live[h]
	if sp == nil || sp.to < now {
		sp = &span{hold: h, client: client, from: now, to: until}
		s.live[h] = sp
		p.spans[h] = append(p.spans[h], sp)
	}
	sp.to = max(sp.to, until)
}

// bury ends the belief in a token, and in lower ones of its resource, for good.
func (s *heardSession) bury(now time.Duration, session, resource string, token uint64) {
	s.dead[resource] = max(s.dead[resource], token)
	for h, sp := range s.live {
		if h.resource == resource && h.token <= token {
			sp.to = min(sp.to, now)
		}
	}
}

func (p *promises) letGo(now time.Duration, client, session, resource string, token uint64) {
	p.listener(client).session(session).bury(now, session, resource, token)
}

func (p *promises) sessionOver(now time.Duration, client, session string) {
	s := p.listener(client).session(session)
	for h := range s.live {
		s.bury(now, session, h.resource, h.token)
	}
	s.named = map[string]*heardToken{}
	s.over = true
}

func (p *promises) answer(op *Op) {
	l := p.listener(op.Client)
	a := op.Answer
	if a.Term < l.term {
		return
	}
	l.saw(a.Term)
	st := &heardStream{term: a.Term}
	p.hears(st, a.ReceivedAt)
	until := p.end(st, a.Until)
	p.promise(op.Session, until)
	p.believe(op.Return, op.Client, l.session(op.Session), op.granted(), until)
}

func (l *listener) saw(term uint64) { l.term = max(l.term, term) }

func (p *promises) heard(m Message) {
	l := p.listener(m.Client)
	if m.Heard.GetTerm() < l.term {
		return // [L5]
	}
	if m.Heard.GetTerm() > l.term {
		l.saw(m.Heard.GetTerm())
	}
	key := streamTerm{m.Stream, m.Heard.GetTerm()}
	st := l.streams[key]
	if st == nil {
		st = &heardStream{term: key.term, parts: map[uint64]int64{}}
		l.streams[key] = st
	}
	switch k := m.Heard.GetKind().(type) {
	case *pb.AttachResponse_Ack:
		p.ack(m, l, st, k.Ack)
	case *pb.AttachResponse_Push:
		p.parts(m, l, st, k.Push.GetPartitions())
	case *pb.AttachResponse_Grant:
		s := l.session(k.Grant.GetSessionId())
		until := k.Grant.GetHeld().GetUntil()
		if until != 0 {
			r := request{k.Grant.GetSessionId(), k.Grant.GetRequestId()}
			p.offered[r] = max(p.offered[r], p.end(st, until))
		}
		if k.Grant.GetPartition() != nil {
			p.parts(m, l, st, []*pb.PartitionEnd{k.Grant.GetPartition()})
		}
		if s.current == st {
			p.name(k.Grant.GetSessionId(), s, k.Grant.GetHeld())
			p.renew(m, l, st)
		}
	case *pb.AttachResponse_Withdrawal:
		w := k.Withdrawal
		s := l.session(w.GetSessionId())
		if w.GetUntil() == 0 {
			s.bury(m.At, w.GetSessionId(), w.GetResource(), w.GetToken())
			return
		}
		if n := s.named[w.GetResource()]; n != nil && n.token == w.GetToken() {
			n.withdrawn = true
		}
		h := hold{w.GetSessionId(), w.GetResource(), w.GetToken()}
		s.dead[w.GetResource()] = max(s.dead[w.GetResource()], w.GetToken())
		if sp := s.live[h]; sp != nil {
			sp.to = min(sp.to, max(m.At, p.end(st, w.GetUntil())))
		}
	case *pb.AttachResponse_Ended:
		p.sessionOver(m.At, m.Client, k.Ended.GetSessionId())
	}
}

func (p *promises) parts(m Message, l *listener, st *heardStream, ends []*pb.PartitionEnd) {
	for _, e := range ends {
		epoch := uint64(e.GetEpoch())
		st.parts[epoch] = max(st.parts[epoch], e.GetUntil())
	}
	p.renew(m, l, st)
}

func (p *promises) ack(m Message, l *listener, st *heardStream, a *pb.Ack) {
	id := a.GetSessionId()
	s := l.session(id)
	if s.current != st && !a.GetComplete() {
		return
	}
	p.hears(st, a.GetReceivedAt())
	if s.current != st {
		s.current, s.until, s.named = st, 0, map[string]*heardToken{}
	}
	s.until = max(s.until, a.GetSessionUntil())
	p.promise(id, p.end(st, s.until))
	if a.GetComplete() {
		listed := map[string]uint64{}
		for _, h := range a.GetHeld() {
			listed[h.GetResource()] = h.GetToken()
		}
		for h := range s.live {
			n := s.named[h.resource]
			if s.streamed[h] && listed[h.resource] != h.token && (n == nil || !n.withdrawn) {
				s.bury(m.At, id, h.resource, h.token)
			}
		}
		for resource, n := range s.named {
			if listed[resource] != n.token && !n.withdrawn {
				delete(s.named, resource)
			}
		}
	}
	for _, h := range a.GetHeld() {
		p.name(id, s, h)
		if h.GetUntil() == 0 {
			p.confirmed[hold{id, h.GetResource(), h.GetToken()}] = true
		}
	}
	p.parts(m, l, st, a.GetPartitions())
}

func (p *promises) name(id string, s *heardSession, h *pb.Held) {
	n := s.named[h.GetResource()]
	if n != nil && (n.token > h.GetToken() || n.token == h.GetToken() && n.withdrawn) {
		return
	}
	s.streamed[hold{id, h.GetResource(), h.GetToken()}] = true
	until := int64(math.MaxInt64)
	if h.GetUntil() != 0 {
		until = h.GetUntil()
	}
	s.named[h.GetResource()] = &heardToken{token: h.GetToken(), until: until}
}

// renew takes what the stream says by now for all that it has named.
func (p *promises) renew(m Message, l *listener, st *heardStream) {
	for id, s := range l.sessions {
		if s.current != st {
			continue
		}
		for resource, n := range s.named {
			if n.withdrawn {
				continue
			}
			until, ok := st.parts[n.token>>epochShift]
			if ok {
				p.believe(m.At, m.Client, s, hold{id, resource, n.token}, p.end(st, min(s.until, n.until, until)))
			}
		}
	}
}

// overlaps finds two tokens of one resource that were believed at one instant
// (I4).
func (p *promises) overlaps() []string {
	byResource := map[string][]*span{}
	for _, spans := range p.spans {
		for _, s := range spans {
			if s.to > s.from {
				byResource[s.resource] = append(byResource[s.resource], s)
			}
		}
	}
	var found []string
	for resource, spans := range byResource {
		slices.SortFunc(spans, func(a, b *span) int {
			return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.token, b.token))
		})
		var open []*span
		for _, s := range spans {
			open = slices.DeleteFunc(open, func(o *span) bool { return o.to <= s.from })
			for _, o := range open {
				if o.token != s.token || o.session != s.session {
					found = append(found, fmt.Sprintf("I4: %s: token %d may be believed by session %s (%s) from %v, and token %d by session %s (%s) until %v",
						resource, s.token, short(s.session), s.client, s.from, o.token, short(o.session), o.client, o.to))
				}
			}
			open = append(open, s)
		}
	}
	slices.Sort(found)
	return found
}

// unfounded finds instants at which package client believed more than it was
// told.
func (p *promises) unfounded(beliefs []Belief) []string {
	var found []string
	told := map[hold]bool{}
	for _, b := range beliefs {
		h := hold{b.Session, b.Resource, b.Token}
		ok := slices.ContainsFunc(p.spans[h], func(s *span) bool { return s.from <= b.At && b.At < s.to })
		if ok || told[h] {
			continue
		}
		told[h] = true
		last := time.Duration(0)
		for _, s := range p.spans[h] {
			last = max(last, s.to)
		}
		found = append(found, fmt.Sprintf("I3: %s: %s believes in token %d of session %s at %v, which was promised until %v",
			b.Resource, b.Client, b.Token, short(b.Session), b.At, last))
	}
	return found
}

// last is when the last promise made for a token ends.
func (p *promises) last(h hold) time.Duration {
	var last time.Duration
	for _, s := range p.spans[h] {
		last = max(last, s.to)
	}
	return last
}
