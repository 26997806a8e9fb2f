package run

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
	"github.com/headlease/headlease/region/state"
)

const (
	// tick is the longest time between two looks at the clock.
	tick = 100 * time.Millisecond
	// checkEvery is the time from one leadership check to the next, after
	// checksAtOnce without a pause: so thousands of keepalives share them, and a few
	// are answered at once.
	checkEvery   = 5 * time.Millisecond
	checksAtOnce = 8
	// noCheck and noCheckIn: none is wanted, and who wants one wakes the goroutine.
	noCheck   = instant.Instant(math.MaxInt64)
	noCheckIn = time.Hour
	// afterFailure of a check it is wanted again at once; the network may need a
	// moment.
	afterFailure = 10 * time.Millisecond
)

// ErrNotLeading is returned while this server does not lead its region, or
// has not applied its own first entry of the term.
var ErrNotLeading = errors.New("this server does not lead its region now; ask another one")

// Raft is what the shell needs of the replica.
type Raft interface {
	ProposeUrgent(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error)
	// Check is a leadership check begun after the call.
	Check(ctx context.Context) (term uint64, err error)
	PulseFresh(now instant.Instant) bool
}

// Config of a Shell; all fields but Lessor and Logger are needed.
type Config struct {
	Raft   Raft
	Clock  clock.Clock
	Lessor lessor.Config
	// Drained is told when the last lease of a draining partition has ended; nil:
	// nobody. It must not block, nor call the shell.
	Drained func()
	// Registerer of the shell's metrics; may be nil.
	Registerer prometheus.Registerer
	Logger     *slog.Logger
}

// Shell drives the lessor of the term that this server leads. It is safe for
// concurrent use.
type Shell struct {
	cfg    Config
	base   context.Context
	stop   context.CancelFunc
	work   sync.WaitGroup
	wake   chan struct{} // the clock's
	ask    chan struct{} // the checks'
	metric *metrics

	mu      sync.Mutex
	closed  bool
	lessor  *lessor.Lessor
	term    uint64
	streams map[lessor.StreamID]*Stream
	last    lessor.StreamID
	// read is the clock's last reading.
	read instant.Instant
	// armed is when the clock's goroutine looks next at the latest, asked the
	// checks'.
	armed, asked instant.Instant
	// began is when the term's tables were built.
	began instant.Instant
	// passed is closed and made anew when a check passes or the term ends.
	passed chan struct{}
	// over is closed when the term ends.
	over chan struct{}
}

// New returns a shell that leads nothing yet.
func New(cfg Config) *Shell {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	base, stop := context.WithCancel(context.Background())
	s := &Shell{
		cfg: cfg, base: base, stop: stop, wake: make(chan struct{}, 1), ask: make(chan struct{}, 1),
		streams: map[lessor.StreamID]*Stream{}, passed: make(chan struct{}),
	}
	s.metric = newMetrics(cfg.Registerer, s)
	return s
}

// Begin builds the tables of a term from the view at its first own entry.
func (s *Shell) Begin(term uint64, view state.View) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
	if s.closed {
		return
	}
	s.term, s.over = term, make(chan struct{})
	s.began = s.now()
	s.lessor = lessor.New(s.cfg.Lessor, view, term, s.began)
	s.flush()
}

// Deposed ends the tables of a term and all streams.
func (s *Shell) Deposed(term uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term <= term {
		s.end()
	}
}

// end forgets the term. s.mu is held.
func (s *Shell) end() {
	if s.over != nil {
		close(s.over)
	}
	s.lessor, s.term, s.over = nil, 0, nil
	for id, st := range s.streams {
		st.sink.End(ErrNotLeading)
		delete(s.streams, id)
	}
	s.announce()
}

// Leads returns the term that this server leads, and what is closed at its
// end; over is nil if it leads none.
func (s *Shell) Leads() (term uint64, over <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.term, s.over
}

// LedFor returns for how long this server has led; false if it does not.
func (s *Shell) LedFor() (d time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lessor == nil {
		return 0, false
	}
	return s.cfg.Clock.Now().Sub(s.began), true
}

func (s *Shell) announce() {
	close(s.passed)
	s.passed = make(chan struct{})
}

// Applied feeds the events of an applied entry, in order.
func (s *Shell) Applied(events []state.Event) {
	s.with(func(l *lessor.Lessor, now instant.Instant) { l.Applied(now, events) })
}

// Held is campaign's: the region holds the partition until an instant.
func (s *Shell) Held(partition string, epoch fence.Epoch, until instant.Instant) {
	s.with(func(l *lessor.Lessor, now instant.Instant) { l.HeadLease(now, partition, epoch, until) })
}

// Lapsed is campaign's: the region holds the partition no more.
func (s *Shell) Lapsed(partition string, epoch fence.Epoch) {
	s.with(func(l *lessor.Lessor, now instant.Instant) { l.Lapsed(now, partition, epoch) })
}

// ClockGap: this process or its clock stood still [F19].
func (s *Shell) ClockGap() {
	s.with(func(l *lessor.Lessor, now instant.Instant) { l.ClockGap(now) })
}

// Hold returns the epoch under which leases of the partition may be granted
// now, and until when.
func (s *Shell) Hold(partition string) (epoch fence.Epoch, until instant.Instant, ok bool) {
	s.with(func(l *lessor.Lessor, now instant.Instant) { epoch, until, ok = l.Hold(now, partition) })
	return epoch, until, ok
}

// SessionLeft returns the time until a session expires if it is not heard from;
// false if this server does not lead or knows no such session.
func (s *Shell) SessionLeft(id string) (left time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lessor == nil {
		return 0, false
	}
	expiry, _, ok := s.lessor.Deadlines(id)
	return expiry.Sub(s.cfg.Clock.Now()), ok
}

// Grace sets how long holders may go on once the partition's drain begins, which
// is the caller's next proposal.
func (s *Shell) Grace(partition string, grace time.Duration) {
	s.with(func(l *lessor.Lessor, now instant.Instant) { l.Grace(now, partition, grace) })
}

// Drain tells how far the drain of a partition is; ok is false if none runs or
// this server does not lead.
func (s *Shell) Drain(partition string) (d lessor.Draining, ok bool) {
	s.with(func(l *lessor.Lessor, now instant.Instant) { d, ok = l.Drain(now, partition) })
	return d, ok
}

// Drained reports whether a draining partition may be released, and whether no
// lock delay of it is left.
func (s *Shell) Drained(partition string, epoch fence.Epoch) (settled, drained bool) {
	s.with(func(l *lessor.Lessor, now instant.Instant) { settled, drained = l.Drained(now, partition, epoch) })
	return settled, drained
}

// Stats are the lessor's; zero while not leading.
func (s *Shell) Stats() (st lessor.Stats) {
	s.with(func(l *lessor.Lessor, _ instant.Instant) { st = l.Stats() })
	return st
}

// Answer returns what the answer to a granted Acquire may say, after the
// leadership check that it needs. Errors are the lessor's, ErrNotLeading and
// the context's.
func (s *Shell) Answer(ctx context.Context, session, resource string, token fence.Token) (held *pb.Held, term uint64, err error) {
	for {
		var wait chan struct{}
		err = ErrNotLeading
		s.with(func(l *lessor.Lessor, now instant.Instant) {
			held, err = l.Answer(now, session, resource, token)
			term, wait = l.Term(), s.passed
		})
		if !errors.Is(err, lessor.ErrWait) {
			return held, term, err
		}
		select {
		case <-ctx.Done():
			return nil, 0, context.Cause(ctx)
		case <-wait:
		case <-time.After(tick): // an expiry's outcome, or a pulse, announces nothing
		}
	}
}

// now reads the clock, and tells the lessor of a gap before anything else: by a
// clock that jumped, every session would be over. It is read at each tick at
// least; the clock's watch, which also looks for gaps, may come later [F19].
// s.mu is held.
func (s *Shell) now() instant.Instant {
	now := s.cfg.Clock.Now()
	gap := now.Sub(s.read)
	s.read = now
	if s.lessor != nil && gap > clock.MaxGap {
		s.cfg.Logger.Warn("clock gap: nobody's time counts from before it", "gap", gap)
		s.lessor.ClockGap(now)
	}
	return now
}

// with calls f under the lock, with the clock read there and the pulse
// looked at, and then does what the lessor wants done. Without a lessor it does
// nothing.
func (s *Shell) with(f func(l *lessor.Lessor, now instant.Instant)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lessor == nil {
		return
	}
	now := s.now()
	s.lessor.PulseFresh(now, s.cfg.Raft.PulseFresh(now))
	f(s.lessor, now)
	s.flush()
}

// flush does what the lessor wants done. s.mu is held.
func (s *Shell) flush() {
	out := s.lessor.Take()
	for _, m := range out.Sends {
		st, ok := s.streams[m.Stream]
		if !ok {
			continue
		}
		if m.Message.GetAck() != nil {
			s.metric.acked.Inc()
		}
		if !st.sink.Push(m.Message) {
			s.cfg.Logger.Warn("a client reads too slowly; closing its stream")
			s.metric.slow.Inc()
			st.sink.End(ErrSlow)
			delete(s.streams, m.Stream)
			s.lessor.StreamClosed(s.cfg.Clock.Now(), m.Stream)
		}
	}
	for _, id := range out.Closes {
		if st, ok := s.streams[id]; ok {
			st.sink.End(ErrDetached)
			delete(s.streams, id)
		}
	}
	for _, c := range out.Commands {
		s.propose(s.term, c)
	}
	if out.Drained && s.cfg.Drained != nil {
		s.cfg.Drained()
	}
	if by, wanted := s.lessor.CheckBy(); wanted && by < s.asked {
		wake.Up(s.ask)
	}
	if at, ok := s.lessor.Next(); ok && at < s.armed {
		wake.Up(s.wake)
	}
}

// propose commits a command in a goroutine of its own. s.mu is held.
func (s *Shell) propose(term uint64, c lessor.Command) {
	s.work.Go(func() {
		res, err := s.cfg.Raft.ProposeUrgent(s.base, c.Command)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.term != term || s.lessor == nil {
			return
		}
		s.lessor.CommandDone(s.now(), c.ID, res, err)
		s.flush()
	})
}

// Run drives the clock and the leadership checks until ctx ends, then ends
// the term and waits for what it started.
func (s *Shell) Run(ctx context.Context) error {
	s.work.Go(func() { s.check(ctx) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			s.mu.Lock()
			s.closed = true
			s.end()
			s.mu.Unlock()
			s.stop()
			s.work.Wait()
			return nil
		case <-timer.C:
		case <-s.wake:
		}
		timer.Reset(s.tick())
	}
}

// tick does what is due and returns when to look again.
func (s *Shell) tick() (wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	wait = tick
	if s.lessor != nil {
		s.lessor.PulseFresh(now, s.cfg.Raft.PulseFresh(now))
		if at, ok := s.lessor.Next(); ok && at <= now {
			s.lessor.Tick(now)
		}
		s.armed = 0 // it is set below
		s.flush()
		if at, ok := s.lessor.Next(); ok {
			wait = min(tick, max(time.Millisecond, at.Sub(now)))
		}
	}
	s.armed = now.Add(wait)
	return wait
}

// check runs one leadership check after the other while one is wanted; what
// arrives meanwhile is for the next one.
func (s *Shell) check(ctx context.Context) {
	pace := rate.NewLimiter(rate.Every(checkEvery), checksAtOnce)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		timer.Reset(s.checkIn())
		select {
		case <-ctx.Done():
			return
		case <-s.ask:
			continue // earlier than it was to be
		case <-timer.C:
		}
		if pace.Wait(ctx) != nil {
			return
		}
		if s.checkOnce(ctx) {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(afterFailure):
		}
	}
}

// checkIn returns when the next check is to begin; nothing asks for one later
// than that.
func (s *Shell) checkIn() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = noCheck
	if s.lessor == nil {
		return noCheckIn
	}
	by, wanted := s.lessor.CheckBy()
	if !wanted {
		return noCheckIn
	}
	s.asked = by
	return max(0, by.Sub(s.cfg.Clock.Now()))
}

// checkOnce runs the check that is wanted; false if it failed.
func (s *Shell) checkOnce(ctx context.Context) bool {
	s.mu.Lock()
	if s.lessor == nil || !s.lessor.CheckWanted() {
		s.mu.Unlock()
		return true
	}
	term := s.term
	ticket := s.lessor.CheckBegun(s.now())
	s.mu.Unlock()

	passed, err := s.cfg.Raft.Check(ctx)
	ok := err == nil && passed == term

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lessor == nil || s.term != term {
		return ok
	}
	now := s.now()
	if !ok {
		s.cfg.Logger.Debug("leadership check failed", "term", term, "error", err)
		s.lessor.CheckFailed(now, ticket)
		s.flush()
		return false
	}
	s.lessor.PulseFresh(now, s.cfg.Raft.PulseFresh(now))
	s.lessor.CheckPassed(now, ticket)
	s.flush()
	s.announce()
	return true
}
