package lessor

import (
	"container/heap"
	"fmt"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

type timerKind uint8

const (
	timerExpiry     timerKind = iota // of a *session
	timerPush                        // *stream
	timerOffer                       // *lease
	timerRevocation                  // *lease
	timerRetry                       // *inflight
	timerWait                        // *waiter
	timerDelay                       // *delay
	timerSettle                      // *partition
)

// timer is due no later than what it waits for; one that is early is put back.
// So a keepalive costs no work on the heap. Whatever a timer belongs to stops it
// when it is gone: the heap holds nothing that has ended.
type timer struct {
	due  instant.Instant
	of   any   // a pointer to what it belongs to, as its kind says
	at   int32 // place in the heap plus 1; 0: not in it
	kind timerKind
}

// timers is a heap by due.
type timers []*timer

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].due < t[j].due }
func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].at, t[j].at = int32(i+1), int32(j+1)
}

func (t *timers) Push(x any) {
	e := x.(*timer)
	*t = append(*t, e)
	e.at = int32(len(*t))
}

func (t *timers) Pop() any {
	n := len(*t) - 1
	x := (*t)[n]
	(*t)[n] = nil
	*t = (*t)[:n]
	x.at = 0
	return x
}

// inflight is a command that is proposed, or waits for its turn.
type inflight struct {
	command  *pb.Command
	sessions []*session // Expire
	weight   int        // of the sessions' end: see maxEnding
	lease    *lease     // Revoke, EndRevocation
	end      bool       // EndRevocation
	waiter   *waiter    // EndWait
	delay    *delay     // EndDelay
	settle   *partition // Settle, of its epoch
	epoch    fence.Epoch
}

// at starts a timer, or moves it.
func (l *Lessor) at(due instant.Instant, t *timer) {
	t.due = due
	if t.at != 0 {
		heap.Fix(&l.timers, int(t.at-1))
		return
	}
	heap.Push(&l.timers, t)
}

func (l *Lessor) stop(t *timer) {
	if t != nil && t.at != 0 {
		heap.Remove(&l.timers, int(t.at-1))
	}
}

// Next is when Tick must be called at the latest; ok is false if nothing is
// due ever.
func (l *Lessor) Next() (at instant.Instant, ok bool) {
	if len(l.timers) == 0 {
		return 0, false
	}
	return l.timers[0].due, true
}

// tick moves the Lessor's time on; it never goes back.
func (l *Lessor) tick(now instant.Instant) { l.now = max(l.now, now) }

// Tick does what is due.
func (l *Lessor) Tick(now instant.Instant) {
	l.tick(now)
	var expired []*session
	var unconfirmed []*lease
	for len(l.timers) > 0 && l.timers[0].due <= l.now {
		t := heap.Pop(&l.timers).(*timer)
		switch t.kind {
		case timerExpiry:
			s := t.of.(*session)
			switch {
			case s.closing || s.expiring:
			case s.deadline > l.now:
				l.at(s.deadline, t)
			default:
				expired = append(expired, s)
			}
		case timerPush:
			st := t.of.(*stream)
			l.push(st, nil)
			l.pushNext(st)
		case timerOffer:
			unconfirmed = append(unconfirmed, t.of.(*lease))
		case timerRevocation:
			if e := t.of.(*lease); !e.proposed {
				l.endRevocation(e)
			}
		case timerRetry:
			l.again(t.of.(*inflight))
		case timerWait:
			l.endWait(t.of.(*waiter))
		case timerDelay:
			l.endDelay(t.of.(*delay))
		case timerSettle:
			l.settle(t.of.(*partition))
		}
	}
	l.expire(expired)
	for _, e := range unconfirmed {
		// A session that ends takes its offers with it: a jump of the clock makes both due.
		if !e.revoked && !e.proposed && e.offerEnd != 0 && !e.session.expiring {
			l.revoke(e)
		}
	}
}

// expire proposes the end of sessions, in batches of at most maxEnded leases and
// sessions; a session with more is alone in its command.
func (l *Lessor) expire(sessions []*session) {
	for len(sessions) > 0 {
		leases, n := 0, 0
		for n < len(sessions) && n < maxEnded {
			more := leases + sessions[n].leases.len()
			if n > 0 && more > maxEnded {
				break
			}
			leases = more
			n++
		}
		batch := sessions[:n:n]
		sessions = sessions[n:]
		ids := make([]string, n)
		for i, s := range batch {
			s.expiring = true
			ids[i] = s.id
		}
		l.propose(&pb.Command{Kind: &pb.Command_Expire{Expire: &pb.ExpireCommand{SessionIds: ids}}}, &inflight{sessions: batch, weight: min(max(n, leases), state.MaxRemovals)})
	}
}

// revoke takes back an offer that was not confirmed in time [F23 L4].
func (l *Lessor) revoke(e *lease) { l.revokeFor(e, OfferExpired) }

func (l *Lessor) revokeFor(e *lease, reason string) {
	e.proposed = true
	l.propose(&pb.Command{Kind: &pb.Command_Revoke{Revoke: &pb.RevokeCommand{
		Resource: e.resource, Token: uint64(e.token), Reason: reason,
	}}}, &inflight{lease: e})
}

// endRevocation passes on a lease whose last sent validity is over.
func (l *Lessor) endRevocation(e *lease) {
	e.proposed = true
	l.propose(&pb.Command{Kind: &pb.Command_EndRevocation{EndRevocation: &pb.EndRevocationCommand{
		Resource: e.resource, Token: uint64(e.token),
	}}}, &inflight{lease: e, end: true})
}

const (
	// maxEnded bounds the leases and the sessions that one command ends.
	maxEnded = state.MaxRemovals / 2
	// maxEnding bounds them over the commands that end sessions and are proposed at
	// a time: a command is applied in one piece, on every server, and when ten
	// thousand sessions end at once, other commands must come in between.
	maxEnding = state.MaxRemovals
)

// maxInflight bounds the commands that are proposed at a time, so that the end
// of ten thousand offers at once fills nobody's queue.
const maxInflight = 128

// propose stamps a command with the term: under another leader it must do
// nothing [F2]. Its turn comes when fewer than maxInflight are under way; ends of
// sessions go first, as far as maxEnding lets them.
func (l *Lessor) propose(c *pb.Command, f *inflight) {
	if l.over {
		return
	}
	c.Term = l.term
	f.command = c
	if f.sessions != nil {
		l.expiries = append(l.expiries, f)
	} else {
		l.backlog = append(l.backlog, f)
	}
	l.hand()
}

// hand gives the shell what may be proposed now. What waits is bounded by the
// state: a session or lease waits once.
func (l *Lessor) hand() {
	for len(l.inflight) < maxInflight {
		q := &l.expiries
		if len(*q) == 0 || l.ending > 0 && l.ending+(*q)[0].weight > maxEnding {
			q = &l.backlog
		}
		if len(*q) == 0 {
			return
		}
		f := (*q)[0]
		(*q)[0] = nil
		*q = (*q)[1:]
		if len(*q) == 0 {
			*q = nil
		}
		if !f.open() {
			l.keep(f)
			continue // it has ended meanwhile
		}
		l.commands++
		l.ending += f.weight
		l.inflight[l.commands] = f
		l.out.Commands = append(l.out.Commands, Command{ID: l.commands, Command: f.command})
	}
}

// CommandDone tells a command's outcome, after its events were applied; err
// says that it is unknown. A command that has not done its work is proposed
// again after a pause: until it has, its sessions take no keepalives and its
// leases do not pass on, so a late first copy does no harm.
func (l *Lessor) CommandDone(now instant.Instant, id uint64, result *pb.CommandResult, err error) {
	l.tick(now)
	f, ok := l.inflight[id]
	if !ok {
		return
	}
	delete(l.inflight, id)
	l.ending -= f.weight
	defer l.hand()
	if result.GetError().GetWrongTerm() != nil {
		l.over = true
		l.expiries, l.backlog = nil, nil
		return
	}
	if err == nil && result.GetError() == nil && f.sessions != nil {
		// What was closed by this command is emptied by the next.
		var left, rest []*session
		for _, s := range f.sessions {
			switch {
			case s.gone:
			case s.leases.len() == 0 && s.closing:
				l.forget(s)
			case s.closing:
				left = append(left, s)
			default:
				rest = append(rest, s)
			}
		}
		l.expire(left)
		f = &inflight{sessions: rest}
	}
	if err == nil && result.GetError() != nil {
		f.refused()
	}
	if f.open() {
		l.at(l.now.Add(l.cfg.RetryAfter), &timer{kind: timerRetry, of: f})
		return
	}
	l.keep(f)
}

// open reports whether a command has work left.
func (f *inflight) open() bool {
	switch {
	case f.lease != nil:
		return !f.lease.gone && (f.end || !f.lease.revoked && (!f.lease.moving || f.lease.partition.draining))
	case f.waiter != nil:
		return !f.waiter.gone
	case f.delay != nil:
		return !f.delay.gone
	case f.settle != nil:
		return f.settle.unsettled && f.settle.live && f.settle.epoch == f.epoch
	}
	for _, s := range f.sessions {
		if !s.gone {
			return true
		}
	}
	return false
}

// again proposes a failed command once more.
func (l *Lessor) again(f *inflight) {
	switch {
	case !f.open():
		l.keep(f)
	case f.end:
		l.endRevocation(f.lease)
	case f.lease != nil && f.lease.moving:
		l.revokeFor(f.lease, MovesTo+f.lease.partition.successor)
	case f.lease != nil:
		l.revoke(f.lease)
	case f.waiter != nil:
		l.endWait(f.waiter)
	case f.delay != nil:
		l.endDelay(f.delay)
	case f.settle != nil:
		l.settle(f.settle)
	default:
		var left []*session
		for _, s := range f.sessions {
			if !s.gone {
				left = append(left, s)
			}
		}
		l.expire(left)
	}
}

func (l *Lessor) String() string {
	return fmt.Sprintf("lessor of term %d: %d sessions, %d streams", l.term, len(l.sessions), len(l.streams))
}
