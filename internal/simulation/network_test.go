package simulation

import (
	"time"

	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/register"
)

type messageKind uint8

const (
	msgPrepare messageKind = iota
	msgAccept
	msgPrepareAnswer
	msgAcceptAnswer
)

// message is a vote message or its answer. It is used again once its last copy
// is delivered.
type message struct {
	kind   messageKind
	copies int
	// ld and l are who asked; the answer counts for that very proposer.
	ld    *leader
	l     *campaign.Leader
	conf  *configuration
	voter int // site asked
	inc   register.Incarnation
	round uint64

	ballot     register.Ballot
	dry        bool
	partitions []string
	items      []campaign.Item

	prepared []campaign.PrepareAnswer
	accepted []campaign.AcceptAnswer
	// renewals are the places of items that wait for a leadership check.
	renewals []int32
	// slowed says that a slow voter has let it wait.
	slowed bool
}

func (w *world) message() *message {
	if n := len(w.free); n > 0 {
		m := w.free[n-1]
		w.free = w.free[:n-1]
		return m
	}
	return &message{}
}

// done gives a message back that nobody will look at again.
func (w *world) done(m *message) {
	if m.copies--; m.copies > 0 {
		return
	}
	*m = message{prepared: m.prepared[:0], accepted: m.accepted[:0], renewals: m.renewals[:0]}
	w.free = append(w.free, m)
}

// send carries a message from one site to another; within a site it takes no
// time worth mentioning.
func (w *world) send(from, to int, m *message) {
	w.count.messages++
	m.copies = 1
	if from == to {
		w.at(w.now+10*time.Microsecond, event{kind: evMessage, msg: m})
		return
	}
	l := w.link(from, to)
	// Votes go over connections: where no acknowledgement comes back, a message
	// or two pass, and then a round goes out on a fresh connection, which cannot
	// be made [F50]. Heartbeats are datagrams and pass all the same.
	if back := w.link(to, from); back.downs > 0 && w.now-back.since > 2*time.Second {
		w.lose(m)
		return
	}
	if l.downs > 0 || l.loss > 0 && w.chance(l.loss) {
		// What a cut holds back comes late at times, when it heals soon.
		if l.downs > 0 && w.late > 0 && w.chance(w.late) {
			w.at(w.now+w.upTo(2*w.d), event{kind: evMessage, msg: m})
			return
		}
		w.lose(m)
		return
	}
	n := 1
	if w.dup > 0 && w.chance(w.dup) {
		n = 2
	}
	m.copies = n
	for range n {
		d := l.base + l.extra
		if j := l.jitter + l.noise; j > 0 {
			d += w.upTo(j)
		}
		if w.late > 0 && w.rnd.IntN(400) < w.late {
			d += w.upTo(2 * w.d)
		}
		w.at(w.now+d, event{kind: evMessage, msg: m})
	}
}

// patience is after how long a round goes out again, on a fresh connection
// [F50].
const patience = 1500 * time.Millisecond

// lose is what becomes of a message that does not arrive, or whose answer does
// not: its sender asks again, as long as the round is open.
func (w *world) lose(m *message) {
	w.count.lost++
	if m.partitions == nil && m.items == nil {
		w.done(m)
		return
	}
	w.after(patience, func() {
		ld := m.ld
		if ld.gone || ld.l == nil || ld.l != m.l || ld.conf != m.conf || ld.frozen > w.now || !ld.l.Open(m.round) {
			w.done(m)
			return
		}
		m.kind &= 1
		m.slowed = false
		w.send(ld.region.at, m.voter, m)
	})
}

// deliver is a message's arrival.
func (w *world) deliver(m *message) {
	switch m.kind {
	case msgPrepareAnswer, msgAcceptAnswer:
		w.answered(m)
		return
	}
	s := w.sites[m.voter]
	if s.witness != nil {
		w.atWitness(s.witness, m)
		return
	}
	w.atRegion(s.region, m)
}

// reply turns a message into its answer, on the way back. A message that came
// twice is answered twice, each by an answer of its own.
func (w *world) reply(m *message, inc register.Incarnation) *message {
	a := m
	if m.copies > 1 {
		a = w.message()
		*a = message{ld: m.ld, l: m.l, conf: m.conf, voter: m.voter, round: m.round, dry: m.dry, prepared: a.prepared, accepted: a.accepted}
	}
	a.kind, a.inc = m.kind+2, inc
	return a
}

func (w *world) answer(m *message, a *message) {
	if a != m {
		w.done(m)
	}
	w.send(a.voter, a.ld.region.at, a)
}

// answered is an answer's arrival at the proposer.
func (w *world) answered(m *message) {
	ld := m.ld
	if ld.gone || ld.l == nil || ld.l != m.l {
		w.done(m)
		return
	}
	if ld.frozen > w.now {
		w.at(ld.frozen, event{kind: evMessage, msg: m})
		return
	}
	if m.conf != ld.conf { // a newer configuration came meanwhile: no old answer counts
		w.done(m)
		return
	}
	id := w.sites[m.voter].id
	now := ld.clock.read(w.now)
	if m.kind == msgPrepareAnswer {
		w.checkDry(ld, m)
		if *flagAnswers {
			for _, a := range m.prepared {
				w.note("%s: %s says of %s, ballot %v (dry %v): %v, %v left, %v", ld.region.name, id, a.Partition, m.ballot, m.dry, a.Rule, a.Remaining, a.Verdict)
			}
		}
		w.perform(ld, ld.l.PrepareAnswered(now, id, m.inc, m.round, m.prepared))
	} else {
		w.perform(ld, ld.l.AcceptAnswered(now, id, m.inc, m.round, m.accepted))
	}
	w.done(m)
	w.wake(ld)
}
