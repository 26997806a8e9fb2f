package lessor

import (
	"container/heap"
	"fmt"

	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

type timerKind int

const (
	timerExpiry timerKind = iota
	timerPush
	timerOffer
	timerRevocation
	timerRetry
)

// timer is due no later than what it waits for; one that is early is put back.
// So a keepalive costs no work on the heap.
type timer struct {
	due     instant.Instant
	kind    timerKind
	session *session
	stream  *stream
	lease   *lease
	retry   *inflight
}

// timers is a heap by due.
type timers []timer

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].due < t[j].due }
func (t timers) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }
func (t *timers) Push(x any)        { *t = append(*t, x.(timer)) }
func (t *timers) Pop() any {
	n := len(*t) - 1
	x := (*t)[n]
	(*t)[n] = timer{}
	*t = (*t)[:n]
	return x
}

// inflight is a proposed command whose outcome is not known.
type inflight struct {
	sessions []*session // Expire
	lease    *lease     // Revoke, EndRevocation
	end      bool       // EndRevocation
}

func (l *Lessor) at(due instant.Instant, t timer) {
	t.due = due
	heap.Push(&l.timers, t)
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
	for len(l.timers) > 0 && l.timers[0].due <= l.now {
		t := heap.Pop(&l.timers).(timer)
		switch t.kind {
		case timerExpiry:
			s := t.session
			switch {
			case s.gone || s.closing || s.expiring:
			case s.deadline > l.now:
				l.at(s.deadline, t)
			default:
				expired = append(expired, s)
			}
		case timerPush:
			if !t.stream.closed {
				l.push(t.stream, nil)
				l.at(l.now.Add(l.pushEvery()), t)
			}
		case timerOffer:
			if e := t.lease; !e.gone && !e.revoked && !e.proposed && e.offerEnd != 0 {
				l.revoke(e)
			}
		case timerRevocation:
			if e := t.lease; !e.gone && !e.proposed {
				l.endRevocation(e)
			}
		case timerRetry:
			l.again(t.retry)
		}
	}
	l.expire(expired)
}

// expire proposes the end of sessions, in batches of at most MaxRemovals
// leases and sessions; a session with more is alone in its command.
func (l *Lessor) expire(sessions []*session) {
	for len(sessions) > 0 {
		leases, n := 0, 0
		for n < len(sessions) && n < state.MaxRemovals {
			leases += len(sessions[n].leases)
			if n > 0 && leases > state.MaxRemovals {
				break
			}
			n++
		}
		batch := sessions[:n:n]
		sessions = sessions[n:]
		ids := make([]string, n)
		for i, s := range batch {
			s.expiring = true
			ids[i] = s.id
		}
		l.propose(&pb.Command{Kind: &pb.Command_Expire{Expire: &pb.ExpireCommand{SessionIds: ids}}}, &inflight{sessions: batch})
	}
}

// revoke takes back an offer that was not confirmed in time [F23 L4].
func (l *Lessor) revoke(e *lease) {
	e.proposed = true
	l.propose(&pb.Command{Kind: &pb.Command_Revoke{Revoke: &pb.RevokeCommand{
		Resource: e.resource, Token: uint64(e.token), Reason: OfferExpired,
	}}}, &inflight{lease: e})
}

// endRevocation passes on a lease whose last sent validity is over.
func (l *Lessor) endRevocation(e *lease) {
	e.proposed = true
	l.propose(&pb.Command{Kind: &pb.Command_EndRevocation{EndRevocation: &pb.EndRevocationCommand{
		Resource: e.resource, Token: uint64(e.token),
	}}}, &inflight{lease: e, end: true})
}

// propose stamps a command with the term: under another leader it must do
// nothing [F2].
func (l *Lessor) propose(c *pb.Command, f *inflight) {
	if l.over {
		return
	}
	c.Term = l.term
	l.commands++
	l.inflight[l.commands] = f
	l.out.Commands = append(l.out.Commands, Command{ID: l.commands, Command: c})
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
	if result.GetError().GetWrongTerm() != nil {
		l.over = true
		return
	}
	if err == nil && result.GetError() == nil && f.sessions != nil {
		// What was closed by this command is emptied by the next.
		var left, rest []*session
		for _, s := range f.sessions {
			switch {
			case s.gone:
			case len(s.leases) == 0 && s.closing:
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
	if f.open() {
		l.at(l.now.Add(l.cfg.RetryAfter), timer{kind: timerRetry, retry: f})
	}
}

// open reports whether a command has work left.
func (f *inflight) open() bool {
	if f.lease != nil {
		return !f.lease.gone && (f.end || !f.lease.revoked)
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
	case f.end:
		l.endRevocation(f.lease)
	case f.lease != nil:
		l.revoke(f.lease)
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
