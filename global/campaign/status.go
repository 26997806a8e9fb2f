package campaign

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// Status is what a Leader does about one partition.
type Status struct {
	Partition string
	// Owner, Epoch and Accepted are what the own register says.
	Owner    string
	Epoch    fence.Epoch
	Accepted register.Ballot
	// Held is the epoch of a running hold until HeldUntil; zero: none.
	Held      fence.Epoch
	HeldUntil instant.Instant
	// Text says in words what goes on.
	Text string
}

// Explain returns the status of each partition at now, in the configuration's
// order.
func (l *Leader) Explain(now instant.Instant) []Status {
	out := make([]Status, len(l.parts))
	for i := range l.parts {
		p := &l.parts[i]
		v := p.own.Record.Value
		s := Status{Partition: l.cfg.Partitions[i].Name, Owner: v.Owner.Name, Epoch: v.Epoch, Accepted: p.own.Record.Accepted}
		if p.held != 0 && p.heldUntil > now {
			s.Held, s.HeldUntil = p.held, p.heldUntil
		}
		s.Text = l.explain(i, now)
		out[i] = s
	}
	return out
}

// Holds returns the partitions that are held at now, without words.
func (l *Leader) Holds(now instant.Instant) (out []Status) {
	for i := range l.parts {
		if p := &l.parts[i]; p.held != 0 && p.heldUntil > now {
			v := p.own.Record.Value
			out = append(out, Status{
				Partition: l.cfg.Partitions[i].Name, Owner: v.Owner.Name, Epoch: v.Epoch, Accepted: p.own.Record.Accepted,
				Held: p.held, HeldUntil: p.heldUntil,
			})
		}
	}
	return out
}

func (l *Leader) explain(i int, now instant.Instant) string {
	p := &l.parts[i]
	var say []string
	add := func(format string, a ...any) { say = append(say, fmt.Sprintf(format, a...)) }
	switch {
	case p.held != 0 && p.heldUntil > now:
		add("holding epoch %d for %v more", p.held, p.heldUntil.Sub(now).Round(time.Millisecond))
	case p.own.Live != 0:
		add("lapsed: epoch %d is kept, nothing is granted", p.own.Live)
	}
	if !p.ballot.IsZero() {
		switch {
		case p.spreading:
			add("released epoch %d, not known to region %s yet", p.value.Epoch, p.value.Successor)
		case p.value.Released():
			add("releasing epoch %d at ballot %v", p.value.Epoch, p.ballot)
		case p.won == 0:
			add("proposing epoch %d at ballot %v, no round complete yet", p.value.Epoch, p.ballot)
		case p.adopting:
			add("won epoch %d, adopting it", p.value.Epoch)
		case p.held == 0:
			add("renewing epoch %d at ballot %v, no round complete in time", p.value.Epoch, p.ballot)
		}
		if p.asks {
			add("no majority answers: asking before it renews")
		}
		if p.blocked != 0 {
			add("promised higher: %s", l.names(p.blocked))
		}
	}
	if p.release != nil {
		add("to be released")
	}
	if p.raise {
		add("epoch to be raised")
	}
	if p.dropping != 0 {
		add("dropping epoch %d", p.dropping)
	}
	for k := range l.runs {
		r := &l.runs[k]
		for j := range r.parts {
			if r.parts[j].part == i {
				add("%s%s", r.stage, l.explainTally(&r.parts[j], now))
			}
		}
	}
	if p.failedAt != 0 && (p.held == 0 || p.heldUntil <= now) {
		add("the last attempt, %v ago, failed%s", now.Sub(p.failedAt).Round(time.Millisecond), l.explainTally(&p.failed, p.failedAt))
		if silent := l.q.all &^ p.failed.answered(); silent != 0 {
			add("not heard by then: %s", l.names(silent))
		}
	}
	switch at := l.dueAt(i); {
	case p.own.Record.Alarm != "":
		add("register alarmed: %s; an operator must clear it", p.own.Record.Alarm)
	case p.own.Floor >= fence.MaxEpoch:
		add("epochs are used up at %d; the partition needs a new name", p.own.Floor)
	case l.stale:
		add("no disk progress here: nothing counts until a pulse commits")
	case l.cfg.prefers(i) < 0 && p.own.Live == 0:
		add("not in the preference list")
	case at != never && at > now:
		add("asking in %v (place %d)", at.Sub(now).Round(time.Millisecond), l.rank(i))
	}
	return strings.Join(say, "; ")
}

func (l *Leader) explainTally(t *tally, now instant.Instant) string {
	var b strings.Builder
	if yes := t.yes(); yes != 0 {
		fmt.Fprintf(&b, ", yes: %s", l.names(yes))
	}
	for i, a := range t.answers {
		if !a.given || a.rule == register.RuleNone {
			continue
		}
		fmt.Fprintf(&b, ", %s: %v", l.cfg.Voters[i].ID, a.rule)
		if a.rule == register.RuleV2Running {
			fmt.Fprintf(&b, " for %v", max(0, a.over.Sub(now)).Round(time.Millisecond))
		}
	}
	return b.String()
}

// answered returns the voters that answered at all.
func (t *tally) answered() (v votes) {
	for i, a := range t.answers {
		if a.given {
			v |= 1 << i
		}
	}
	return v
}

func (l *Leader) names(v votes) string {
	var ids []string
	for i, m := range l.cfg.Voters {
		if v.has(i) {
			ids = append(ids, m.ID)
		}
	}
	return strings.Join(ids, ", ")
}

// Clone returns a Leader that shares nothing changeable with l, except Rand.
func (l *Leader) Clone() *Leader {
	c := *l
	c.out = slices.Clone(l.out)
	c.parts = slices.Clone(l.parts)
	c.verdicts = maps.Clone(l.verdicts)
	c.runs = slices.Clone(l.runs)
	for k := range c.runs {
		c.runs[k].parts = slices.Clone(l.runs[k].parts)
		for j := range c.runs[k].parts {
			t := &c.runs[k].parts[j]
			t.answers = slices.Clone(t.answers)
		}
	}
	c.rounds = slices.Clone(l.rounds)
	for k := range c.rounds {
		c.rounds[k].items = slices.Clone(l.rounds[k].items)
	}
	return &c
}

// AppendState appends a canonical form of all that decides what the Leader
// will do, with times relative to now: two Leaders of one configuration with
// equal forms behave alike, but that all times more than 16·D ahead are one. It is for state-space search and is no storage
// format.
func (l *Leader) AppendState(b []byte) []byte {
	u := func(v uint64) { b = binary.AppendUvarint(b, v) }
	at := func(t instant.Instant) {
		switch left := t.Sub(l.now); {
		case t == 0:
			u(0)
		case left > 16*l.cfg.D:
			u(1)
		default:
			u(2 + uint64(max(0, left)))
		}
	}
	flag := func(fs ...bool) {
		v := uint64(0)
		for i, f := range fs {
			if f {
				v |= 1 << i
			}
		}
		u(v)
	}
	ballot := func(x register.Ballot) {
		u(x.Era.Counter)
		u(x.Round)
		b = append(append(b, x.Region...), 0)
		u(uint64(x.Incarnation))
	}
	record := func(r register.Record) {
		ballot(r.Promised)
		ballot(r.Accepted)
		b = append(append(b, r.Value.Owner.Name...), 0)
		u(uint64(r.Value.Owner.Incarnation))
		u(uint64(r.Value.Epoch))
		u(uint64(r.Value.D))
		b = append(append(b, r.Value.Successor...), 0)
		b = append(append(b, r.Value.Reason...), 0)
		flag(r.Alarm != "")
	}
	u(uint64(min(l.now.Sub(l.start), l.cfg.D)))
	at(l.renewAt)
	flag(l.stale)
	for i := range l.parts {
		p := &l.parts[i]
		record(p.own.Record)
		u(uint64(p.own.Live))
		u(uint64(p.own.Floor))
		u(p.seen)
		flag(p.running, p.hurry, p.adopting, p.raise, p.planned, p.spreading)
		if !l.cfg.Manual { // else nothing begins by these
			at(p.base)
			at(p.healAt)
			at(p.renewUntil)
			flag(p.asks)
			u(uint64(min(p.fails, maxFails)))
		}
		ballot(p.ballot)
		record(register.Record{Value: p.value})
		at(p.won)
		u(uint64(p.blocked))
		if p.value.Released() {
			u(uint64(p.told))
			at(p.spreadUntil)
		}
		u(uint64(p.dropping))
		flag(p.release != nil)
		if p.release != nil {
			b = append(append(b, p.release.successor...), 0)
			b = append(append(b, p.release.reason...), 0)
		}
		u(uint64(p.held))
		at(p.heldUntil)
	}
	u(uint64(len(l.runs)))
	for k := range l.runs {
		r := &l.runs[k]
		u(uint64(r.stage))
		flag(r.sure)
		ballot(r.ballot)
		at(r.until)
		for j := range r.parts {
			t := &r.parts[j]
			u(uint64(t.part))
			for _, a := range t.answers {
				flag(a.given)
				if a.given {
					u(uint64(a.rule))
					record(a.record)
					at(a.over)
				}
			}
		}
	}
	for k := range l.rounds {
		r := &l.rounds[k]
		u(uint64(l.now.Sub(r.t0)))
		for _, it := range r.items {
			u(uint64(it.part))
			ballot(it.ballot)
			u(uint64(it.votes))
			flag(it.done)
		}
	}
	for _, region := range slices.Sorted(maps.Keys(l.verdicts)) {
		b = append(append(b, region...), 0, byte(l.verdicts[region]))
	}
	return b
}

const maxFails = 3 // after so many failures the back-off grows no more
