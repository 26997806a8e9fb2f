package history

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// facts puts in what the log says took effect and no answered call accounts
// for: a call without an answer that must have been it, an expiry, a lapse. A
// fact that nothing can have caused, or that came before its time, is a
// violation.
func (c *compiler) facts(touched map[string]map[string]bool) {
	ends := map[string]Fact{} // of sessions
	for _, f := range c.h.Facts {
		if f.Kind == SessionClosed {
			ends[f.Session] = f
		}
	}
	for _, f := range ends {
		if f.Reason != ByExpiry {
			c.sessionEnd(f, touched)
		}
	}
	c.expiries(touched)
	for resource, sessions := range touched {
		for _, op := range c.h.Ops {
			if op.Kind == Close && op.Answer.Code != Refused && !op.Unknown() && sessions[op.Session] {
				c.add(resource, op.Client, &input{Op: op}, op.Call, op.Return)
			}
		}
	}
	for _, f := range c.h.Facts {
		switch f.Kind {
		case Granted:
			if f.Offered {
				c.force(f, Op{Kind: holds, Session: f.Session, Request: f.Request, Token: f.Token}, false)
				continue
			}
			c.asked(f, func(o *Op) bool { return o.Kind == Acquire && o.Session == f.Session && o.Request == f.Request })
		case Queued:
			c.asked(f, func(o *Op) bool { return o.Kind == Acquire && o.Session == f.Session && o.Request == f.Request })
		case LeftQueue:
			c.leftQueue(f, ends)
		case Revoked:
			c.revoked(f)
		case Ended:
			switch f.Reason {
			case ByRelease:
				c.asked(f, func(o *Op) bool {
					return o.Kind == Release && o.Session == f.Session && o.Resource == f.Resource && o.Token == f.Token
				})
			case ByRevocation:
				h := hold{f.Session, f.Resource, f.Token}
				if last := c.p.last(h); c.timed && f.At < last {
					c.wrong(f, "I4: the revoked token passed on, but was promised until %v", last)
				}
				c.force(f, Op{Kind: passes, Session: f.Session, Token: f.Token}, true)
			}
		case DelayEnded:
			c.delayEnded(f)
		case DrainBegun, DrainEnded:
			kind := drains
			if f.Kind == DrainEnded {
				kind = aborts
			}
			for resource := range touched {
				f.Resource = resource
				c.force(f, Op{Kind: kind}, false)
			}
		}
	}
}

// draining tells whether the partition drained when a fact came about.
func (c *compiler) draining(f Fact) bool {
	on := false
	for _, d := range c.h.Facts {
		if d.Index > f.Index {
			break
		}
		on = d.Kind == DrainBegun || on && d.Kind != DrainEnded
	}
	return on
}

// lateOfDrain tells whether a token's revocation may be one that was on its way
// when a drain was taken back: its leader proposed it in that drain, and it has no
// effect in a later term.
func (c *compiler) lateOfDrain(f Fact) bool {
	held, drained, late := false, false, false
	for _, d := range c.h.Facts {
		if d.Index > f.Index {
			break
		}
		switch {
		case d.Kind == Granted && d.Resource == f.Resource && d.Token == f.Token:
			held = true
		case d.Kind == DrainBegun:
			drained = held
		case d.Kind == DrainEnded:
			late, drained = late || drained, false
		case d.Kind == TermBegun:
			late = false
		}
	}
	return late
}

// delayEnded: no sooner than the holder had asked for.
func (c *compiler) delayEnded(f Fact) {
	for _, d := range c.h.Facts {
		if d.Kind != DelayBegun || d.Resource != f.Resource || d.Token != f.Token {
			continue
		}
		if early := d.At + time.Duration(float64(d.Delay)*c.p.share); c.timed && f.At < early {
			c.wrong(f, "I6: the lock delay of %v that began at %v was over before %v", d.Delay, d.At, early)
		}
	}
	c.force(f, Op{Kind: resumes}, true)
}

func (c *compiler) wrong(f Fact, format string, args ...any) {
	c.found = append(c.found, fmt.Sprintf("entry %d at %v (%s %s, session %s, request %d, token %d): %s",
		f.Index, f.At, f.Resource, f.Kind, short(f.Session), f.Request, f.Token, fmt.Sprintf(format, args...)))
}

// force puts an operation in at the very instant of a fact.
func (c *compiler) force(f Fact, op Op, effect bool) {
	c.put(f, &input{Op: &op, forced: effect})
}

func (c *compiler) put(f Fact, in *input) {
	if in.Resource == "" {
		in.Resource = f.Resource
	}
	c.add(f.Resource, string(in.Kind), in, f.At, f.At)
}

// asked looks for the call that caused a fact. If none that was answered is
// there, one without an answer must have been it. An Acquire says in its answer
// how things stood, which a repeated try learns only some time after an earlier
// one without an answer took effect: where both may have been it, the effect
// goes in alone at its instant, and the answer finds it there.
func (c *compiler) asked(f Fact, matches func(*Op) bool) {
	op, lost := c.cause(f, matches), c.unanswered(f, matches)
	if op == nil {
		c.wrong(f, "nobody has asked for that")
		return
	}
	if op.Kind == Acquire && lost != nil {
		op = lost
	}
	if op.Unknown() {
		forced := *op
		forced.Answer = Answer{Code: Unknown, Token: 0}
		if f.Kind == Granted {
			forced.Answer.Token, forced.Answer.Resource = f.Token, f.Resource
		}
		c.force(f, forced, true)
	}
}

// cause is the call that a fact comes from, one that was answered before one
// that was not; nil if there is none.
func (c *compiler) cause(f Fact, matches func(*Op) bool) *Op {
	for _, o := range c.h.Ops {
		if o.Call <= f.At && o.Return >= f.At && !o.Unknown() && matches(o) && o.Answer.Code != Refused && causes(o, f) {
			return o
		}
	}
	return c.unanswered(f, matches)
}

// unanswered is the last call without an answer that a fact may come from.
func (c *compiler) unanswered(f Fact, matches func(*Op) bool) *Op {
	var last *Op
	for _, o := range c.h.Ops {
		if o.Call <= f.At && o.Unknown() && matches(o) && o.Answer.Code != Refused {
			last = o
		}
	}
	return last
}

// causes tells whether an answer admits that the call did it.
func causes(o *Op, f Fact) bool {
	switch o.Kind {
	case Acquire:
		return o.Answer.Granted && (f.Kind == Queued || o.Answer.Token == f.Token) || o.Answer.Queued && f.Kind == Queued
	default:
		return o.Answer.Code == OK
	}
}

// sessionEnd puts the end of a session into the history of every lock that it
// touched.
func (c *compiler) sessionEnd(f Fact, touched map[string]map[string]bool) {
	asked := c.cause(f, func(o *Op) bool { return o.Kind == Close && o.Session == f.Session })
	if asked != nil && !asked.Unknown() {
		return
	}
	if asked == nil {
		c.expired([]Fact{f}, touched)
		return
	}
	for _, resource := range slices.Sorted(maps.Keys(touched)) {
		if touched[resource][f.Session] {
			f.Resource = resource
			c.force(f, Op{Kind: ends, Session: f.Session}, true)
		}
	}
}

// expiries puts in the sessions that expired, those of one command together,
// however late a Close of them came: one session's end follows the other's there,
// with nothing between them but requests that leave their queues.
func (c *compiler) expiries(touched map[string]map[string]bool) {
	var together []Fact
	flush := func() {
		if len(together) > 0 {
			c.expired(together, touched)
		}
		together = nil
	}
	for _, f := range c.h.Facts {
		switch {
		case len(together) > 0 && together[0].Index != f.Index:
			flush()
		case f.Kind == LeftQueue:
			continue
		}
		if f.Kind == SessionClosed && f.Reason == ByExpiry {
			together = append(together, f)
		} else {
			flush()
		}
	}
	flush()
}

func (c *compiler) expired(together []Fact, touched map[string]map[string]bool) {
	for _, f := range together {
		if until := c.p.session[f.Session]; c.timed && f.At < until {
			c.wrong(f, "I3: the session expired, but was promised to live until %v", until)
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(touched)) {
		var sessions []string
		for _, f := range together {
			if touched[resource][f.Session] {
				sessions = append(sessions, f.Session)
			}
		}
		if len(sessions) > 0 {
			f := together[0]
			f.Resource = resource
			c.put(f, &input{Op: &Op{Kind: expires}, sessions: sessions, forced: true})
		}
	}
}

// leftQueue: by a Cancel, with its session, for a drain, or because the session
// has said that the request is not open any more.
func (c *compiler) leftQueue(f Fact, ends map[string]Fact) {
	if e, ok := ends[f.Session]; ok && e.Index == f.Index {
		return
	}
	if part, ok := c.part[request{f.Session, f.Request}]; ok {
		f.Resource = part
	}
	op := c.cause(f, func(o *Op) bool { return o.Kind == Cancel && o.Session == f.Session && o.Request == f.Request })
	switch {
	case op != nil && !op.Unknown():
		return
	case op != nil:
		c.force(f, *op, true)
		return
	}
	for _, o := range c.acquires[f.Session] {
		if o.Lowest > f.Request && o.Call <= f.At {
			c.force(f, Op{Kind: drops, Session: f.Session, Request: f.Request}, true)
			return
		}
	}
	if c.draining(f) {
		c.force(f, Op{Kind: drops, Session: f.Session, Request: f.Request}, true)
		return
	}
	c.wrong(f, "nobody has asked for that")
}

// revoked: by an operator, for a drain, or because an offer was not confirmed in
// time.
func (c *compiler) revoked(f Fact) {
	op := c.cause(f, func(o *Op) bool { return o.Kind == Revoke && o.Resource == f.Resource && o.Token == f.Token })
	switch {
	case op != nil && !op.Unknown():
		return
	case op != nil:
		c.force(f, Op{Kind: Revoke, Token: f.Token}, true)
		return
	}
	if c.draining(f) || c.lateOfDrain(f) {
		c.force(f, Op{Kind: Revoke, Token: f.Token}, true)
		return
	}
	h := hold{f.Session, f.Resource, f.Token}
	if c.p.confirmed[h] {
		c.wrong(f, "F23: the offer was taken back, but its confirmation had been acknowledged")
	}
	var offered time.Duration
	for _, g := range c.h.Facts {
		if g.Kind == Granted && g.Session == f.Session && g.Resource == f.Resource && g.Token == f.Token {
			offered = g.At
			if !g.Offered {
				c.wrong(f, "the lease was taken back, but nobody revoked it, and it was no offer")
			}
		}
	}
	ttl := c.ttl[f.Session]
	if ttl == 0 || ttl > offerWithin {
		ttl = offerWithin
	}
	if early := offered + time.Duration(float64(ttl)*c.p.share); c.timed && f.At < early {
		c.wrong(f, "F23: the offer of %v was taken back before %v", offered, early)
	}
	c.force(f, Op{Kind: Revoke, Token: f.Token}, true)
}
