package validity

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// DefaultDriftPPM is ρ: how far a clock's rate may be from true, in parts per
// million.
const DefaultDriftPPM = 10_000

// Bounds of what a Table keeps per session.
const (
	// maxOutstanding keepalives wait for their ack; the oldest is forgotten.
	maxOutstanding = 32
	// floorTTLs is for how many TTLs the token of an ended lease is
	// remembered. No message that can name it is valid after one.
	floorTTLs = 3
	// maxSpan bounds X-s against overflow; no validity is that long.
	maxSpan = time.Hour
)

// Config of a Table.
type Config struct {
	// DriftPPM is the clock-rate bound ρ in parts per million, the same as the
	// cluster's; 0 means 10,000 (1 %), at most 200,000.
	DriftPPM int64
}

func (c Config) withDefaults() Config {
	if c.DriftPPM == 0 {
		c.DriftPPM = DefaultDriftPPM
	}
	return c
}

// Validate reports all faults of the configuration.
func (c Config) Validate() error {
	var errs []error
	if c.DriftPPM < 0 || c.DriftPPM > 200_000 {
		errs = append(errs, fmt.Errorf("drift_ppm %d: must be 0 (the default of %d) to 200000", c.DriftPPM, DefaultDriftPPM))
	}
	return errors.Join(errs...)
}

// StreamID names one Attach call. Ids rise.
type StreamID uint64

// Table is what one client believes about its leases in one region. It is not
// safe for concurrent use.
type Table struct {
	drift int64
	// term is the highest one of which a message was taken [L5].
	term       uint64
	lastStream StreamID
	// gap is the last clock gap: what was sent before it makes no pair.
	gap      instant.Instant
	open     map[StreamID]bool
	streams  map[key]*stream
	sessions map[string]*session
}

// key orders what was said about a session: by term, then by stream.
type key struct {
	term uint64
	id   StreamID
}

func (k key) less(o key) bool {
	return k.term < o.term || k.term == o.term && k.id < o.id
}

type session struct {
	id       string
	ttl      time.Duration
	sequence uint64
	// minSequence: acks of earlier keepalives are from before a detach.
	minSequence uint64
	sent        []sentKeepalive
	lastSent    instant.Instant
	everSent    bool
	urgent      bool
	// confirmBy is when the offers told since the last keepalive, unconfirmed in
	// number, are to be confirmed; 0: there are none, or all were let go of.
	confirmBy   instant.Instant
	unconfirmed int
	// remap: the instants of a new term need a pair.
	remap bool
	// lastAcked is when the newest acknowledged keepalive was sent.
	acked     bool
	lastAcked instant.Instant
	// current is the newest that spoke for the session; older ones are
	// ignored.
	current key
	views   []*view
	leases  map[string]*lease
	floors  map[string]floor
	// requests are the open Acquires.
	requests    map[uint64]want
	lastRequest uint64
}

// want is what an Acquire asks for: the resource, or any of so many slots of it.
type want struct {
	resource string
	slots    uint32
}

// takes reports whether a token of the resource answers the request.
func (w want) takes(resource string) bool {
	if w.slots == 0 {
		return w.resource == resource
	}
	slot, ok := strings.CutPrefix(resource, w.resource+"#")
	if !ok {
		return false
	}
	n, err := strconv.ParseUint(slot, 10, 32)
	return err == nil && n < uint64(w.slots)
}

type sentKeepalive struct {
	stream   StreamID
	sequence uint64
	at       instant.Instant
}

// lease is a token that the client was told of and has not let go of.
type lease struct {
	token     fence.Token
	partition string
	// until is the end that an answer to Acquire gave, on our clock, and sent
	// when that Acquire was sent.
	until, sent instant.Instant
	revoked     bool
	// offered is the session's last keepalive, plus 1, when an offer told of it; 0:
	// none did.
	offered uint64
}

// floor is the highest token of a resource that is dead for us.
type floor struct {
	token fence.Token
	at    instant.Instant
	fate  fate
}

// fate of a dead token at the region, as far as we know.
type fate int

const (
	fateEnded     fate = iota // the region has said so
	fateReleasing             // a release is under way
	fateReleased              // the region has answered the release
)

// New returns an empty Table. The configuration must be valid.
func New(cfg Config) *Table {
	cfg = cfg.withDefaults()
	return &Table{drift: cfg.DriftPPM, open: map[StreamID]bool{}, streams: map[key]*stream{}, sessions: map[string]*session{}}
}

// Term is the highest term of which a message was taken.
func (t *Table) Term() uint64 { return t.term }

// OpenSession adds a session that the region has opened.
func (t *Table) OpenSession(id string, ttl time.Duration) {
	if _, ok := t.sessions[id]; ok {
		return
	}
	t.sessions[id] = &session{
		id: id, ttl: ttl, urgent: true,
		leases: map[string]*lease{}, floors: map[string]floor{}, requests: map[uint64]want{},
	}
}

// CloseSession ends all belief of a session, before its close is sent.
func (t *Table) CloseSession(id string) {
	s, ok := t.sessions[id]
	if !ok {
		return
	}
	t.dropViews(s, func(*view) bool { return false })
	delete(t.sessions, id)
}

// DetachSession ends all belief of a session, before its detach is sent; the
// next keepalive attaches it again.
func (t *Table) DetachSession(id string) {
	s, ok := t.sessions[id]
	if !ok {
		return
	}
	t.dropViews(s, func(*view) bool { return false })
	s.minSequence = s.sequence + 1
	for _, l := range s.leases {
		l.until = 0
	}
}

// StreamOpened returns the id of a new Attach call. A session must send its
// keepalives on the newest one only.
func (t *Table) StreamOpened() StreamID {
	t.lastStream++
	t.open[t.lastStream] = true
	for _, s := range t.sessions {
		s.urgent = true
	}
	return t.lastStream
}

// StreamBroken: the call has ended. What it said stays true until it runs
// out; what was in flight is lost with its validity.
func (t *Table) StreamBroken(id StreamID) {
	delete(t.open, id)
	for k, st := range t.streams {
		if k.id == id {
			st.broken = true
			t.collect(st)
		}
	}
	for _, s := range t.sessions {
		keep := s.sent[:0]
		for _, k := range s.sent {
			if k.stream != id {
				keep = append(keep, k)
			}
		}
		s.sent = keep
	}
}

// ClockGap: our clock stood still or jumped for more than a second. All pairs
// end, also those of messages still under way.
func (t *Table) ClockGap(now instant.Instant) {
	t.gap = now
	for _, st := range t.streams {
		st.paired = false
	}
	for _, s := range t.sessions {
		s.sent, s.acked, s.urgent = nil, false, true
		for _, l := range s.leases {
			l.until = 0
		}
	}
}

// Keepalive notes that a keepalive is about to be sent on the stream; now was
// read before. The caller adds the secret. It returns nil for an unknown
// session.
func (t *Table) Keepalive(now instant.Instant, id string, on StreamID) *pb.Keepalive {
	s, ok := t.sessions[id]
	if !ok {
		return nil
	}
	s.sequence++
	if len(s.sent) == maxOutstanding {
		s.sent = append(s.sent[:0], s.sent[1:]...)
	}
	if t.pairs(now) {
		s.sent = append(s.sent, sentKeepalive{stream: on, sequence: s.sequence, at: now})
	}
	s.lastSent, s.everSent, s.urgent, s.remap = now, true, false, false
	s.confirmBy, s.unconfirmed = 0, 0
	return &pb.Keepalive{
		SessionId: id, Sequence: s.sequence, TokensHash: s.hash(), LowestOpenRequest: s.lowestOpen(),
	}
}

// pairs reports whether something sent then can still make a pair.
func (t *Table) pairs(sent instant.Instant) bool { return t.gap == 0 || sent > t.gap }

// NextKeepalive is when the session's next keepalive is due: TTL/3 after the
// last one, sooner if an offer is to be confirmed, or at once (zero) if something
// must be mapped.
func (t *Table) NextKeepalive(id string) instant.Instant {
	s, ok := t.sessions[id]
	if !ok || s.urgent || s.remap || !s.everSent {
		return 0
	}
	due := s.lastSent.Add(s.ttl / 3)
	if s.confirmBy != 0 {
		due = instant.Min(due, s.confirmBy)
	}
	return due
}

// ConfirmBy is when offers that the session was told of are to be confirmed; 0:
// there are none.
func (t *Table) ConfirmBy(id string) instant.Instant {
	s, ok := t.sessions[id]
	if !ok {
		return 0
	}
	return s.confirmBy
}

// An offer is confirmed so long after it was told of, TTL/confirmPart or
// maxConfirm: a short lock is released by then, and needs no keepalive.
const (
	maxConfirm  = 50 * time.Millisecond
	confirmPart = 40
)

// offer notes that one was told of, which is to be confirmed [F23].
func (s *session) offer(now instant.Instant, l *lease) {
	if s.confirmBy == 0 {
		s.confirmBy = now.Add(min(maxConfirm, s.ttl/confirmPart))
	}
	if l.offered != s.sequence+1 {
		l.offered = s.sequence + 1
		s.unconfirmed++
	}
}

// RequestBegun: an Acquire with this id, rising per session, will be sent.
func (t *Table) RequestBegun(id string, request uint64, resource string) {
	t.SlotRequestBegun(id, request, resource, 0)
}

// SlotRequestBegun is RequestBegun of an Acquire of any of so many slots of the
// resource, or with 0 of the resource itself.
func (t *Table) SlotRequestBegun(id string, request uint64, resource string, slots uint32) {
	if s, ok := t.sessions[id]; ok {
		s.requests[request] = want{resource, slots}
		s.lastRequest = max(s.lastRequest, request)
	}
}

// RequestOver: nobody waits for the request any more. A token that comes for
// it is a Stranger.
func (t *Table) RequestOver(id string, request uint64) {
	if s, ok := t.sessions[id]; ok {
		delete(s.requests, request)
	}
}

// LowestOpenRequest is what an Acquire or a keepalive of the session says.
func (t *Table) LowestOpenRequest(id string) uint64 {
	s, ok := t.sessions[id]
	if !ok {
		return 0
	}
	return s.lowestOpen()
}

// Releasing ends the belief in a token, before its release is sent. The
// caller sends the release until it succeeds or the session has ended.
func (t *Table) Releasing(now instant.Instant, id, resource string, token fence.Token) {
	s, ok := t.sessions[id]
	if !ok {
		return
	}
	s.bury(now, resource, token, fateReleasing)
}

// Released notes that the release was answered, or that the token was not held
// any more.
func (t *Table) Released(now instant.Instant, id, resource string, token fence.Token) {
	if s, ok := t.sessions[id]; ok && s.floors[resource].token == token {
		s.bury(now, resource, token, fateReleased)
	}
}

// Poll forgets what has run out. It reports as Lost the revoked leases whose
// end has come, and those that only an answer to Acquire spoke for and that
// the stream never named.
func (t *Table) Poll(now instant.Instant) []Event {
	var events []Event
	for _, s := range t.sessions {
		if len(s.views) > 1 {
			t.dropViews(s, func(v *view) bool { return v.st.key == s.current || t.speaks(now, s, v) })
		}
		for _, v := range s.views {
			for resource, n := range v.named {
				if n.withdrawn && v.st.local(n.until, t.drift) <= now {
					delete(v.named, resource)
				}
			}
		}
		for resource, l := range s.leases {
			if l.until > now || s.isNamed(resource, l.token) || s.view(s.current) == nil {
				continue
			}
			events = append(events, Event{Kind: Lost, Session: s.id, Resource: resource, Token: l.token, Partition: l.partition})
			s.bury(now, resource, l.token, fateEnded)
		}
		for resource, f := range s.floors {
			if f.fate != fateReleasing && now.Sub(f.at) > floorTTLs*s.ttl {
				delete(s.floors, resource)
			}
		}
	}
	return events
}

// Named reports whether the newest stream has named the token, so that the next
// keepalive confirms it [F23].
func (t *Table) Named(id, resource string, token fence.Token) bool {
	s, ok := t.sessions[id]
	if !ok {
		return false
	}
	v := s.newest()
	return v != nil && v.named[resource].token == token
}

func (s *session) lowestOpen() uint64 {
	lowest := s.lastRequest + 1
	for id := range s.requests {
		lowest = min(lowest, id)
	}
	return lowest
}

// bury makes a token, and all lower ones of the resource, dead for us.
func (s *session) bury(now instant.Instant, resource string, token fence.Token, to fate) {
	if l, ok := s.leases[resource]; ok && l.token <= token {
		delete(s.leases, resource)
		if l.offered == s.sequence+1 {
			if s.unconfirmed--; s.unconfirmed == 0 {
				s.confirmBy = 0
			}
		}
	}
	f := s.floors[resource]
	if token > f.token {
		f = floor{token: token}
	}
	if token == f.token {
		f.at, f.fate = now, max(f.fate, to)
	}
	s.floors[resource] = f
}
