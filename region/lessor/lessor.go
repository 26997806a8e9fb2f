package lessor

import (
	"errors"
	"fmt"
	"time"

	"github.com/headlease/headlease/client/validity"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// Defaults and bounds.
const (
	// DefaultConfirmWithin is how long an offer may stay unconfirmed.
	DefaultConfirmWithin = 5 * time.Second
	// DefaultRetryAfter is the pause before a failed command is proposed
	// again.
	DefaultRetryAfter = 500 * time.Millisecond
	// DefaultD stands in where no configuration names one.
	DefaultD = 4 * time.Second
	// OfferExpired is the reason of the revocation of an unconfirmed offer.
	OfferExpired = "offer expired"

	// maxHistory bounds the changes of a held set that an ack of the client
	// may lag behind.
	maxHistory = 1024
	// maxUnnamed bounds the grants that a stream names later.
	maxUnnamed = 1024
)

// Config of a Lessor.
type Config struct {
	// ConfirmWithin bounds how long an offer may stay unconfirmed, if the
	// session's TTL does not; 0 means 5 s.
	ConfirmWithin time.Duration
	// RetryAfter is the pause before a command that failed is proposed again;
	// 0 means 500 ms.
	RetryAfter time.Duration
	// PushEvery is the least pause between two pushes of partition ends to a stream,
	// a fifth of what stands for D in when they are due; 0 means D/5.
	PushEvery time.Duration
}

func (c Config) withDefaults() Config {
	if c.ConfirmWithin == 0 {
		c.ConfirmWithin = DefaultConfirmWithin
	}
	if c.RetryAfter == 0 {
		c.RetryAfter = DefaultRetryAfter
	}
	return c
}

// Validate reports all faults of the configuration.
func (c Config) Validate() error {
	var errs []error
	if c.ConfirmWithin < 0 {
		errs = append(errs, fmt.Errorf("confirm_within %v: must not be negative", c.ConfirmWithin))
	}
	if c.RetryAfter < 0 {
		errs = append(errs, fmt.Errorf("retry_after %v: must not be negative", c.RetryAfter))
	}
	if c.PushEvery < 0 {
		errs = append(errs, fmt.Errorf("push_every %v: must not be negative", c.PushEvery))
	}
	return errors.Join(errs...)
}

// StreamID names one attachment as the shell knows it, unique within the
// process.
type StreamID uint64

// Send is a message for a stream. The message is shared and must not be
// changed.
type Send struct {
	Stream  StreamID
	Message *pb.AttachResponse
}

// Command is to be proposed; its outcome comes back by CommandDone.
type Command struct {
	ID      uint64
	Command *pb.Command
}

// Outbox is what the shell must do. Sends come before Closes.
type Outbox struct {
	Sends    []Send
	Commands []Command
	// Closes are streams to end after their sends; the Lessor has forgotten
	// them, StreamClosed need not be called.
	Closes []StreamID
	// Drained: the last lease of a draining partition has ended; see Drain.
	Drained bool
}

// Empty reports whether there is nothing to do.
func (o *Outbox) Empty() bool {
	return len(o.Sends) == 0 && len(o.Commands) == 0 && len(o.Closes) == 0 && !o.Drained
}

// Ticket stands for a leadership check: what it covers.
type Ticket struct {
	order, generation uint64
}

// Lessor is the time of one term. It is not safe for concurrent use.
type Lessor struct {
	cfg   Config
	term  uint64
	start instant.Instant
	now   instant.Instant
	// d is the smallest head lease of the region's partitions, for pushes, and
	// maxTTL the longest of the sessions found at the start.
	d      time.Duration
	maxTTL time.Duration

	// checked: a check begun in this term (since the last clock gap) passed.
	checked bool
	pulse   bool
	over    bool
	// Orders count everything that a check can cover: order is the last one,
	// wanted the last for which somebody waits, begun what the newest running
	// or passed check covers, passed what is covered. A clock gap starts a new
	// generation, in which older tickets count for nothing.
	order, wanted, begun, passed, generation uint64
	// checkBy is when the check that is wanted is to begin at the latest.
	checkBy instant.Instant
	// arrivals are the sessions of which something waits for a check, strangers
	// the streams on which an unknown session does.
	arrivals  []*session
	strangers []*stream

	parts    map[string]*partition
	sessions map[string]*session
	streams  map[StreamID]*stream
	delays   map[string]*delay
	timers   timers
	inflight map[uint64]*inflight
	commands uint64
	// expiries and backlog wait for their turn to be proposed.
	expiries, backlog []*inflight
	// ending is the weight of the expiries that are proposed.
	ending int
	// closed sessions of the events being applied.
	closed []*session
	out    Outbox
}

// partition is what the leader knows of a partition's time.
type partition struct {
	name string
	// d is the longest head lease that any leader of the region may have had.
	d     time.Duration
	live  bool
	epoch fence.Epoch
	// hold is the head lease from the campaign.
	holdEpoch fence.Epoch
	holdUntil instant.Instant
	// sent is the latest end that may have been sent, by an earlier leader
	// (assumed) or by this one.
	sent instant.Instant
	// end is holdUntil as it is sent, push the message for streams with this
	// partition alone. Both are shared by all that they go to.
	end  *pb.PartitionEnd
	push *pb.AttachResponse
	// adopted is when the epoch was adopted, or the start of the term; unsettled:
	// lock delays of the owner before may run, until timer.
	adopted   instant.Instant
	unsettled bool
	timer     *timer
	// leases is how many there are.
	leases int
	// draining: all leases are revoked, and may be used until drainEnd. grace is
	// what was asked for before the drain's begin.
	draining  bool
	successor string
	drainEnd  instant.Instant
	grace     time.Duration
}

// session is a client process as the leader's clock sees it.
type session struct {
	id  string
	ttl time.Duration
	// deadline is for expiry; sendable is the one that may be sent [L2].
	deadline, sendable instant.Instant
	// expiring: its Expire is proposed; its outcome decides [F7].
	expiring bool
	// closing: closed in the state; leases are left to be emptied.
	closing bool
	gone    bool
	// begun: the stream's first ack is sent; it names all tokens.
	begun bool
	// again: the client's hash matched nothing; the next ack is complete.
	again bool
	// ackDue: the newest covered keepalive of this stream, below, is to be answered.
	ackDue bool

	leases  small[string, *lease]
	waiting map[uint64]*waiter // nil: none yet
	refs    refs
	// offers are unconfirmed; nil: none yet.
	offers map[*lease]struct{}
	// hash of the held tokens that are listed and not revoked, and changes how
	// often it changed.
	hash    uint64
	changes uint64

	// Arrivals that wait for a check: the newest, and the newest of those that a
	// check which runs covers; so no flood of keepalives puts off its own ack.
	newest, covered arrival
	arrivalAt       int // place in the Lessor's list plus 1; 0: nothing waits
	timer           *timer

	stream *stream
	// history of hash since the client's last confirmed point.
	history []point
	// rename are confirmed offers to be told.
	rename []*lease
	// The newest covered keepalive of this stream.
	ackSequence uint64
	ackAt       instant.Instant
}

// point is the hash after a change of the held set.
type point struct {
	hash, change uint64
}

// lease is a session's hold.
type lease struct {
	resource  string
	token     fence.Token
	session   *session
	partition *partition
	// change of the session's held set that brought it.
	change uint64
	// found at the start of the term: an earlier leader may have sent validity
	// up to assumed.
	assumed instant.Instant
	// offerEnd is when an unconfirmed offer is revoked; 0: confirmed, or none.
	offerEnd instant.Instant
	// until is the end of the last validity sent before the revocation.
	until   instant.Instant
	revoked bool
	offer   bool // revoked, or being so, because it was not confirmed
	// proposed: a Revoke or EndRevocation is under way.
	proposed bool
	// moving: the Revoke that is proposed is a drain's.
	moving bool
	gone   bool
	// unnamed: granted, to request, since the stream began, which has not named it
	// yet.
	unnamed bool
	request uint64
	timer   *timer // of the offer or the revocation
}

// stream is one attachment.
type stream struct {
	id       StreamID
	sessions map[*session]struct{}
	refs     refs
	closed   bool
	timer    *timer // of the pushes
	// told is the soonest of the ends of all its partitions when they were last told
	// together; 0: none was.
	told instant.Instant
	// unnamed leases wait for the next push, and may have ended meanwhile.
	unnamed []*lease
	// unknown sessions whose keepalive waits for a check, which decides whether it
	// may be said that they have ended, by the arrival's order.
	unknown map[string]uint64
}

// maxUnknown bounds the unknown sessions per stream that wait for a check; the
// keepalive of one more is dropped, and its next one asks again.
const maxUnknown = 1024

// arrival is a keepalive, or a session's opening, that waits for a check.
type arrival struct {
	order    uint64 // 0: there is none
	at       instant.Instant
	stream   *stream
	sequence uint64
}

// New builds the tables of a term from the state at its TermBegun event. The
// configuration must be valid.
func New(cfg Config, view state.View, term uint64, now instant.Instant) *Lessor {
	l := &Lessor{
		cfg: cfg.withDefaults(), term: term, start: now, now: now, generation: 1,
		parts: map[string]*partition{}, sessions: map[string]*session{}, streams: map[StreamID]*stream{},
		inflight: map[uint64]*inflight{}, delays: map[string]*delay{},
	}
	l.configure(view.Configuration())
	for p := range view.Partitions() {
		q := l.partition(p.Name)
		q.live, q.epoch = p.Live(), p.Epoch
		q.d = max(q.d, p.Register.Value.D)
		if q.live {
			q.sent = now.Add(q.d) // assumed as sent by an earlier leader [L3]
			l.adopted(q, p.Unsettled)
		}
		q.draining, q.successor, q.drainEnd = p.Draining(), p.Successor, now
	}
	for s := range view.Sessions() {
		l.maxTTL = max(l.maxTTL, time.Duration(s.TTLMillis)*time.Millisecond)
	}
	for s := range view.Sessions() {
		q := l.open(s, now)
		q.sendable = q.deadline // gated by checked [L2]
		for w := range view.SessionWaiters(s.ID) {
			l.wait(q, w)
		}
		for h := range view.SessionLeases(s.ID) {
			l.found(q, h)
		}
		if s.Closing {
			q.closing = true
			l.closed = append(l.closed, q)
		}
	}
	for d := range view.Delays() {
		l.begin(d.Resource, d.Partition, d.Token, time.Duration(d.DelayMillis)*time.Millisecond, now)
	}
	for _, p := range l.parts {
		l.drain(p)
	}
	l.empty()
	return l
}

// found takes a lease that an earlier leader has granted.
func (l *Lessor) found(s *session, h state.Lease) {
	p := l.partition(h.Partition)
	e := l.hold(s, h.Resource, p, h.Token)
	e.list()
	e.assumed = l.start.Add(min(s.ttl, p.d))
	switch {
	case h.Revoked:
		// An earlier leader fixed the end; we do not know it [L3].
		e.until = l.start.Add(min(l.maxTTL, p.d))
		e.offer = h.RevokeReason == OfferExpired
		l.unlist(e)
		l.wake(e, timerRevocation, e.until)
	case h.Offered:
		l.inherit(e)
	}
}

// inherit times an offer that may have been confirmed to an earlier leader, who
// alone knew. A client that is not heard loses it with its session, and no
// sooner; one that is heard has time to confirm it again [F23].
func (l *Lessor) inherit(e *lease) {
	l.offerFrom(e, l.now.Add(e.session.ttl))
}

// Term of the Lessor.
func (l *Lessor) Term() uint64 { return l.term }

// Over reports that a command was refused because the term is over: nothing
// that this Lessor proposes can take effect any more.
func (l *Lessor) Over() bool { return l.over }

// Take returns what the shell must do since the last call.
func (l *Lessor) Take() Outbox {
	o := l.out
	l.out = Outbox{}
	return o
}

// HeadLease notes that the region holds the partition under epoch until an
// instant of its clock, from a complete round whose majority has the own vote.
func (l *Lessor) HeadLease(now instant.Instant, name string, epoch fence.Epoch, until instant.Instant) {
	l.tick(now)
	p := l.partition(name)
	if p.holdEpoch == epoch && until <= p.holdUntil {
		return
	}
	resumed := p.holdUntil <= l.now || p.holdEpoch != epoch
	p.holdEpoch, p.holdUntil = epoch, until
	p.changed()
	if !resumed || !p.held(l.now) {
		return
	}
	// Do not let clients wait for the next push after a lapse.
	for _, st := range l.streams {
		if n, _ := st.refs.get(p); n > 0 {
			l.push(st, p)
		}
	}
}

// Lapsed ends a head lease before its time, or notes that it is over.
func (l *Lessor) Lapsed(now instant.Instant, name string, epoch fence.Epoch) {
	l.tick(now)
	if p := l.partition(name); p.holdEpoch == epoch {
		p.holdEpoch, p.holdUntil = 0, 0
		p.changed()
	}
}

// Hold returns the epoch under which leases of the partition may be granted
// now, and until when; ok is false if the region does not hold it.
func (l *Lessor) Hold(now instant.Instant, name string) (epoch fence.Epoch, until instant.Instant, ok bool) {
	p, found := l.parts[name]
	if !found || !p.held(now) {
		return 0, 0, false
	}
	return p.holdEpoch, p.holdUntil, true
}

// changed: what was said of the partition's end is said no more.
func (p *partition) changed() { p.end, p.push = nil, nil }

// held: a head lease runs, of the epoch that is live in the state.
func (p *partition) held(now instant.Instant) bool {
	return p.live && p.holdEpoch == p.epoch && p.holdUntil > now
}

// PulseFresh says whether the newest committed pulse is fresh. Until it is,
// and while it is not, nothing is acknowledged [F30].
func (l *Lessor) PulseFresh(now instant.Instant, fresh bool) {
	l.tick(now)
	l.pulse = fresh
}

// Stats are sizes for metrics and status.
type Stats struct {
	Sessions, Streams, Attached, Expiring, Leases, Offers, Revocations, Arrivals, Commands int
	// Delays are the lock delays that run.
	Delays int
	// Timers set, and commands that wait for their turn.
	Timers, Waiting int
}

// Stats counts, in time proportional to the sessions.
func (l *Lessor) Stats() Stats {
	st := Stats{Sessions: len(l.sessions), Streams: len(l.streams), Arrivals: len(l.arrivals), Commands: len(l.inflight), Timers: len(l.timers), Delays: len(l.delays)}
	st.Waiting = len(l.expiries) + len(l.backlog)
	for _, s := range l.sessions {
		if s.stream != nil {
			st.Attached++
		}
		if s.expiring {
			st.Expiring++
		}
		st.Leases += s.leases.len()
		st.Offers += len(s.offers)
		for _, e := range s.leases.all() {
			if e.revoked {
				st.Revocations++
			}
		}
	}
	return st
}

func (l *Lessor) partition(name string) *partition {
	p, ok := l.parts[name]
	if !ok {
		p = &partition{name: name, d: l.defaultD()}
		l.parts[name] = p
	}
	return p
}

func (l *Lessor) defaultD() time.Duration {
	if l.d == 0 {
		return DefaultD
	}
	return l.d
}

// configure takes D from a configuration; nil has none.
func (l *Lessor) configure(c *pb.ClusterConfiguration) {
	if d := time.Duration(c.GetDNs()); d > 0 {
		l.d = d
		for _, p := range l.parts {
			p.d = max(p.d, d)
		}
	}
}

// TokensHash is the hash of a set of held tokens, by resource, as a keepalive
// carries it [F17].
func TokensHash(held map[string]fence.Token) uint64 { return validity.TokensHash(held) }
