package lessor

import (
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// The state machine knows how long a request may wait, a lock delay lasts and a
// partition stays unsettled, but no time; the leader counts it, and a new leader
// anew in full.

// waiter is a queue place of a session.
type waiter struct {
	session   *session
	request   uint64
	partition *partition
	length    time.Duration
	timer     *timer // nil: it waits until it is cancelled
	gone      bool
}

// delay is a lock delay that runs.
type delay struct {
	resource  string
	partition string
	token     fence.Token // whose end began it; 0: of the partition's adoption
	length    time.Duration
	timer     *timer
	gone      bool
}

// settleAfter is when no lock delay of before an adoption can run any more.
const settleAfter = state.MaxLockDelayMillis * time.Millisecond

// stretched is d on a clock that may be fast by the rate ρ of 1 %: what others
// rely on must not be cut short.
func stretched(d time.Duration) time.Duration { return d + d/50 }

func (l *Lessor) wait(s *session, w state.Waiter) {
	if _, ok := s.waiting[w.Request]; ok {
		return
	}
	q := &waiter{session: s, request: w.Request, partition: l.partition(w.Partition)}
	if s.waiting == nil {
		s.waiting = map[uint64]*waiter{}
	}
	s.waiting[w.Request] = q
	l.refer(s, q.partition, 1)
	if w.WaitMillis > 0 {
		q.length = time.Duration(w.WaitMillis) * time.Millisecond
		q.timer = &timer{kind: timerWait, of: q}
		l.at(l.now.Add(q.length), q.timer)
	}
}

func (l *Lessor) unwait(s *session, request uint64) {
	if q, ok := s.waiting[request]; ok {
		delete(s.waiting, request)
		l.leaveWait(q)
		l.refer(s, q.partition, -1)
	}
}

func (l *Lessor) leaveWait(q *waiter) {
	q.gone = true
	l.stop(q.timer)
}

// endWait takes a request out of its queue, unless it is granted before.
func (l *Lessor) endWait(q *waiter) {
	l.propose(&pb.Command{Kind: &pb.Command_EndWait{EndWait: &pb.EndWaitCommand{
		SessionId: q.session.id, RequestId: q.request,
	}}}, &inflight{waiter: q})
}

// begin counts a lock delay from an instant.
func (l *Lessor) begin(resource, partition string, token fence.Token, length time.Duration, from instant.Instant) {
	l.endedDelay(resource)
	d := &delay{resource: resource, partition: partition, token: token, length: stretched(length)}
	d.timer = &timer{kind: timerDelay, of: d}
	l.delays[resource] = d
	l.at(from.Add(d.length), d.timer)
}

func (l *Lessor) endedDelay(resource string) {
	if d := l.delays[resource]; d != nil {
		d.gone = true
		l.stop(d.timer)
		delete(l.delays, resource)
	}
}

// endDelay hands a resource on.
func (l *Lessor) endDelay(d *delay) {
	l.propose(&pb.Command{Kind: &pb.Command_EndDelay{EndDelay: &pb.EndDelayCommand{
		Resource: d.resource, Token: uint64(d.token),
	}}}, &inflight{delay: d})
}

// adopted counts the time of an adoption; unsettled: delays of an owner before
// may run.
func (l *Lessor) adopted(p *partition, unsettled bool) {
	p.adopted, p.unsettled = l.now, unsettled
	if !unsettled {
		l.stop(p.timer)
		return
	}
	if p.timer == nil {
		p.timer = &timer{kind: timerSettle, of: p}
	}
	l.at(p.adopted.Add(stretched(settleAfter)), p.timer)
}

// settled: nothing is counted for the partition any more.
func (l *Lessor) settled(p *partition) {
	p.unsettled = false
	l.stop(p.timer)
}

func (l *Lessor) settle(p *partition) {
	l.propose(&pb.Command{Kind: &pb.Command_Settle{Settle: &pb.SettleCommand{
		Partition: p.name, Epoch: uint32(p.epoch),
	}}}, &inflight{settle: p, epoch: p.epoch})
}

// refused: the state says that there is nothing to end.
func (f *inflight) refused() {
	switch {
	case f.waiter != nil:
		f.waiter.gone = true
	case f.delay != nil:
		f.delay.gone = true
	case f.settle != nil && f.settle.epoch == f.epoch:
		f.settle.unsettled = false
	}
}
