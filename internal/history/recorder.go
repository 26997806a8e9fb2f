package history

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Recorder collects a History. It is safe for concurrent use.
type Recorder struct {
	now func() time.Duration

	mu      sync.Mutex
	history History
	streams int
	open    map[*Op]struct{}
	index   uint64 // of the newest entry with facts
	// handOvers counts facts.
	handOvers int
}

// NewRecorder begins a history now.
func NewRecorder() *Recorder {
	began := time.Now()
	return NewRecorderOn(func() time.Duration { return time.Since(began) })
}

// NewRecorderOn begins a history on a clock of the caller's, which shows the
// time since the history began.
func NewRecorderOn(now func() time.Duration) *Recorder {
	return &Recorder{now: now, open: map[*Op]struct{}{}}
}

// Now is the time since the history began.
func (r *Recorder) Now() time.Duration { return r.now() }

// History returns what was recorded so far; calls still open are unknown.
func (r *Recorder) History() History {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := History{Messages: slices.Clone(r.history.Messages), Beliefs: slices.Clone(r.history.Beliefs), Facts: slices.Clone(r.history.Facts)}
	for _, op := range r.history.Ops {
		c := *op
		if _, open := r.open[op]; open {
			c.Return, c.Answer = Never, Answer{Code: Unknown, Error: "still open"}
		}
		h.Ops = append(h.Ops, &c)
	}
	slices.SortStableFunc(h.Ops, func(a, b *Op) int { return cmp.Compare(a.Call, b.Call) })
	return h
}

// Believe notes that package client says now that a lease is valid.
func (r *Recorder) Believe(b Belief) {
	r.mu.Lock()
	defer r.mu.Unlock()
	b.At = r.now()
	r.history.Beliefs = append(r.history.Beliefs, b)
}

// Applied notes the facts of an applied entry; every server tells its own, the
// first counts.
func (r *Recorder) Applied(index uint64, facts []Fact) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if index <= r.index {
		return
	}
	r.index = index
	for _, f := range facts {
		f.At, f.Index = r.now(), index
		r.history.Facts = append(r.history.Facts, f)
		if f.Kind == Granted && f.Offered {
			r.handOvers++
		}
	}
}

// HandOvers counts the grants so far that went to a request from the queue.
func (r *Recorder) HandOvers() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.handOvers
}

// Begin notes a call, and End its answer; both are for calls that are not made
// over a recorded connection.
func (r *Recorder) Begin(op Op) *Op {
	r.mu.Lock()
	defer r.mu.Unlock()
	op.Call = r.now()
	r.history.Ops = append(r.history.Ops, &op)
	r.open[&op] = struct{}{}
	return &op
}

// End notes the answer to a call.
func (r *Recorder) End(op *Op, a Answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	op.Answer, op.Return = a, r.now()
	if a.Code == Unknown {
		op.Return = Never
	}
	delete(r.open, op)
}

// Unary records the calls of a client's connection.
func (r *Recorder) Unary(client string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		asked, known := asked(req)
		if !known {
			return invoke(ctx, method, req, reply, cc, opts...)
		}
		asked.Client = client
		op := r.Begin(asked)
		err := invoke(ctx, method, req, reply, cc, opts...)
		r.End(op, answered(asked.Kind, reply, err))
		return err
	}
}

func asked(req any) (Op, bool) {
	switch q := req.(type) {
	case *pb.OpenSessionRequest:
		return Op{Kind: Open}, true
	case *pb.CloseSessionRequest:
		return Op{Kind: Close, Session: q.GetSessionId()}, true
	case *pb.AcquireRequest:
		return Op{
			Kind: Acquire, Session: q.GetSessionId(), Resource: q.GetResource(), Request: q.GetRequestId(),
			Lowest: q.GetLowestOpenRequest(), Wait: q.GetWait(), Slots: q.GetSlots(),
			Value: string(q.GetValue()), Delay: time.Duration(q.GetLockDelayMs()) * time.Millisecond,
		}, true
	case *pb.CancelAcquireRequest:
		return Op{Kind: Cancel, Session: q.GetSessionId(), Request: q.GetRequestId()}, true
	case *pb.ReleaseRequest:
		return Op{Kind: Release, Session: q.GetSessionId(), Resource: q.GetResource(), Token: q.GetToken()}, true
	case *pb.GetLeaseRequest:
		return Op{Kind: Get, Resource: q.GetResource()}, true
	}
	return Op{}, false
}

func answered(kind Kind, reply any, err error) Answer {
	if err != nil {
		return Answer{Code: codeOf(kind, err), Error: status.Convert(err).Message()}
	}
	a := Answer{Code: OK}
	switch p := reply.(type) {
	case *pb.OpenSessionResponse:
		a.Session, a.TTL = p.GetSessionId(), time.Duration(p.GetTtlMs())*time.Millisecond
	case *pb.AcquireResponse:
		switch o := p.GetOutcome().(type) {
		case *pb.AcquireResponse_Granted:
			a.Granted, a.Token, a.Until, a.Resource = true, o.Granted.GetToken(), o.Granted.GetUntil(), o.Granted.GetResource()
			a.Term, a.ReceivedAt = p.GetTerm(), p.GetReceivedAt()
		case *pb.AcquireResponse_Queued:
			a.Queued, a.Ahead = true, o.Queued.GetAhead()
		case *pb.AcquireResponse_Busy:
			a.Busy, a.Token, a.Waiters = true, o.Busy.GetToken(), o.Busy.GetWaiters()
		}
	case *pb.CancelAcquireResponse:
		a.Token, a.Resource = p.GetGrantedToken(), p.GetResource()
	case *pb.GetLeaseResponse:
		if l := p.GetLease(); l != nil {
			a.Token, a.Session, a.Waiters, a.Value = l.GetToken(), l.GetSessionId(), l.GetWaiters(), string(l.GetValue())
		}
	}
	return a
}

// codeOf says what an error tells of a call's effect: nothing, unless it is a
// refusal by the state machine itself or one before anything was proposed. An
// Acquire may be granted and then refused its answer, by NOT_HOLDER if it is
// lost by then, by NOT_LEADER or LAPSED if nothing may be said of it.
func codeOf(kind Kind, err error) Code {
	st := status.Convert(err)
	for _, d := range st.Details() {
		detail, ok := d.(*pb.ErrorDetail)
		if !ok {
			continue
		}
		switch detail.GetKind().(type) {
		case *pb.ErrorDetail_SessionExpired:
			return SessionExpired
		case *pb.ErrorDetail_StaleRequest:
			return Stale
		case *pb.ErrorDetail_NotHolder:
			if kind != Acquire {
				return NotHolder
			}
		case *pb.ErrorDetail_NotLeader, *pb.ErrorDetail_Overloaded:
			if kind != Acquire {
				return Refused
			}
		case *pb.ErrorDetail_Invalid:
			return Refused
		}
	}
	// gRPC has no other sign of a call that was never sent.
	never := st.Code() == codes.Unavailable && strings.Contains(st.Message(), "Error while dialing")
	if never || st.Code() == codes.InvalidArgument {
		return Refused
	}
	return Unknown
}

// Stream records the messages of a client's Attach streams.
func (r *Recorder) Stream(client string) grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		s, err := open(ctx, desc, cc, method, opts...)
		if err != nil || method != pb.SessionService_Attach_FullMethodName {
			return s, err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.streams++
		return &stream{ClientStream: s, r: r, client: client, id: r.streams}, nil
	}
}

type stream struct {
	grpc.ClientStream
	r      *Recorder
	client string
	id     int
}

func (s *stream) note(m Message) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	m.At, m.Client, m.Stream = s.r.now(), s.client, s.id
	s.r.history.Messages = append(s.r.history.Messages, m)
}

func (s *stream) SendMsg(m any) error {
	if q, ok := m.(*pb.AttachRequest); ok {
		for _, q := range append(q.GetBatch().GetRequests(), q) {
			if q.GetKeepalive() != nil {
				k := proto.CloneOf(q.GetKeepalive())
				k.Secret = nil
				s.note(Message{Sent: k})
			}
		}
	}
	return s.ClientStream.SendMsg(m)
}

func (s *stream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if p, ok := m.(*pb.AttachResponse); ok && err == nil {
		for _, p := range append(p.GetBatch().GetResponses(), p) {
			if p.GetBatch() == nil && p.GetPong() == nil {
				s.note(Message{Heard: proto.CloneOf(p)})
			}
		}
	}
	return err
}
