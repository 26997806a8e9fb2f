package history

import (
	"cmp"
	"encoding/json"
	"math"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Kind of a call.
type Kind string

// The calls.
const (
	Open    Kind = "open"
	Close   Kind = "close"
	Acquire Kind = "acquire"
	Cancel  Kind = "cancel"
	Release Kind = "release"
	Get     Kind = "get"
	Revoke  Kind = "revoke" // an operator's
)

// Never is the return of a call whose outcome is unknown.
const Never = time.Duration(math.MaxInt64)

// Op is one attempt of one call.
type Op struct {
	Client   string        `json:"client"`
	Kind     Kind          `json:"kind"`
	Call     time.Duration `json:"call"`
	Return   time.Duration `json:"return"`
	Session  string        `json:"session,omitempty"`
	Resource string        `json:"resource,omitempty"`
	Request  uint64        `json:"request,omitempty"`
	Lowest   uint64        `json:"lowest,omitempty"`
	Wait     bool          `json:"wait,omitempty"`
	// Slots of the semaphore that any slot is asked for of; 0: Resource itself is.
	Slots uint32 `json:"slots,omitempty"`
	// Value and lock delay that are asked for.
	Value string        `json:"value,omitempty"`
	Delay time.Duration `json:"delay,omitempty"`
	// Token that is released or revoked.
	Token  uint64 `json:"token,omitempty"`
	Answer Answer `json:"answer"`
}

// part names the part of a history that the call belongs to.
func (o *Op) part() string {
	if o.Slots > 0 {
		return partOf(o.Resource + "#")
	}
	return partOf(o.Resource)
}

// granted is the hold that an answer granted.
func (o *Op) granted() hold {
	return hold{o.Session, cmp.Or(o.Answer.Resource, o.Resource), o.Answer.Token}
}

// Unknown reports whether the call may or may not have taken effect.
func (o *Op) Unknown() bool { return o.Return == Never }

// Code is how a call ended.
type Code string

// The codes; refusals that say nothing of the call's effect are Unknown.
const (
	OK             Code = "ok"
	Unknown        Code = "unknown"
	SessionExpired Code = "session expired"
	Stale          Code = "stale request"
	NotHolder      Code = "not holder"
	// Refused before anything was tried.
	Refused Code = "refused"
)

// Answer to a call.
type Answer struct {
	Code Code `json:"code"`
	// Error is the text of a refusal.
	Error string `json:"error,omitempty"`
	// Token granted (Acquire, Cancel), in the way (a busy Acquire), or held (Get).
	Token uint64 `json:"token,omitempty"`
	// Resource that the token granted is of; empty: the one asked for.
	Resource string `json:"resource,omitempty"`
	Granted  bool   `json:"granted,omitempty"`
	Queued   bool   `json:"queued,omitempty"`
	Busy     bool   `json:"busy,omitempty"`
	// Ahead of this one in the queue.
	Ahead uint32 `json:"ahead,omitempty"`
	// Waiters of a busy or a read lock.
	Waiters uint32 `json:"waiters,omitempty"`
	// Session that was opened, or that holds a lock that was read.
	Session string `json:"session,omitempty"`
	// Value beside a lock that was read.
	Value string `json:"value,omitempty"`
	// TTL of the session that was opened.
	TTL time.Duration `json:"ttl,omitempty"`
	// Term, ReceivedAt and Until of a grant, on the clock of that term's leader.
	Term       uint64 `json:"term,omitempty"`
	ReceivedAt int64  `json:"received_at,omitempty"`
	Until      int64  `json:"until,omitempty"`
}

// Message is what passed on an Attach stream.
type Message struct {
	At     time.Duration
	Client string
	Stream int
	// One of the two is set.
	Sent  *pb.Keepalive
	Heard *pb.AttachResponse
}

// savedMessage is a Message in JSON.
type savedMessage struct {
	At     time.Duration   `json:"at"`
	Client string          `json:"client"`
	Stream int             `json:"stream"`
	Sent   json.RawMessage `json:"sent,omitempty"`
	Heard  json.RawMessage `json:"heard,omitempty"`
}

// MarshalJSON writes the messages as protojson does.
func (m Message) MarshalJSON() ([]byte, error) {
	s := savedMessage{At: m.At, Client: m.Client, Stream: m.Stream}
	var err error
	if m.Sent != nil {
		s.Sent, err = protojson.Marshal(m.Sent)
	}
	if m.Heard != nil && err == nil {
		s.Heard, err = protojson.Marshal(m.Heard)
	}
	if err != nil {
		return nil, err
	}
	return json.Marshal(s)
}

// UnmarshalJSON is its inverse.
func (m *Message) UnmarshalJSON(b []byte) error {
	var s savedMessage
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	*m = Message{At: s.At, Client: s.Client, Stream: s.Stream}
	if s.Sent != nil {
		m.Sent = &pb.Keepalive{}
		return protojson.Unmarshal(s.Sent, m.Sent)
	}
	if s.Heard != nil {
		m.Heard = &pb.AttachResponse{}
		return protojson.Unmarshal(s.Heard, m.Heard)
	}
	return nil
}

// Belief is an instant at which package client said that a lease is valid.
type Belief struct {
	At       time.Duration `json:"at"`
	Client   string        `json:"client"`
	Session  string        `json:"session"`
	Resource string        `json:"resource"`
	Token    uint64        `json:"token"`
}

// Fact is what the log of the region says happened to a lock, at the instant
// at which the first server applied it.
type Fact struct {
	At       time.Duration `json:"at"`
	Index    uint64        `json:"index"`
	Kind     FactKind      `json:"kind"`
	Session  string        `json:"session,omitempty"`
	Request  uint64        `json:"request,omitempty"`
	Resource string        `json:"resource,omitempty"`
	Token    uint64        `json:"token,omitempty"`
	// Offered: granted from the queue.
	Offered bool `json:"offered,omitempty"`
	// Delay that began.
	Delay time.Duration `json:"delay,omitempty"`
	// Reason of an end of a lease or of a session.
	Reason EndReason `json:"reason,omitempty"`
}

// FactKind is what happened.
type FactKind string

// The facts.
const (
	Granted       FactKind = "granted"
	Revoked       FactKind = "revoked"
	Ended         FactKind = "ended"
	Queued        FactKind = "queued"
	LeftQueue     FactKind = "left the queue"
	SessionClosed FactKind = "session closed"
	DelayBegun    FactKind = "delay begun"
	DelayEnded    FactKind = "delay ended"
	// Of the region.
	TermBegun FactKind = "term begun"
	// Of the partition.
	DrainBegun FactKind = "drain begun"
	DrainEnded FactKind = "drain ended"
)

// EndReason is why a lease ended.
type EndReason string

// The reasons that a history knows.
const (
	ByRelease    EndReason = "release"
	ByRevocation EndReason = "revocation"
	BySession    EndReason = "session"
	ByOther      EndReason = "other"
	// Of a session.
	ByClose  EndReason = "close"
	ByExpiry EndReason = "expiry"
)

// History is everything that was recorded, each part in the order of its time.
type History struct {
	Ops      []*Op     `json:"ops"`
	Messages []Message `json:"messages"`
	Beliefs  []Belief  `json:"beliefs"`
	// Facts may be missing: then every unknown outcome is tried both ways.
	Facts []Fact `json:"facts,omitempty"`
}

// Contended counts the grants of a history that went to a request which had
// waited for another holder.
func Contended(h History) int {
	queued := map[request]bool{}
	given := map[uint64]bool{}
	for _, op := range h.Ops {
		if op.Kind == Acquire && op.Answer.Queued {
			queued[request{op.Session, op.Request}] = true
		}
	}
	for _, op := range h.Ops {
		if op.Kind == Acquire && op.Answer.Granted && queued[request{op.Session, op.Request}] {
			given[op.Answer.Token] = true
		}
	}
	for _, m := range h.Messages {
		if g := m.Heard.GetGrant(); g != nil && g.GetHeld().GetUntil() != 0 {
			given[g.GetHeld().GetToken()] = true
		}
	}
	return len(given)
}
