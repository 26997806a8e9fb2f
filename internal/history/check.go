package history

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/anishathalye/porcupine"
)

// offerWithin is how long an offer may stay unconfirmed, if the session's TTL
// is not shorter (docs/design.md §3).
const offerWithin = 5 * time.Second

// Config of a Check.
type Config struct {
	// Clocks convert the leaders' instants; nil: the clocks of the history were
	// beyond all bounds, and only what rests on no clock is checked.
	Clocks Clocks
	// Share of a validity's length, on the clock of the server that gave it, for
	// which a client may use it, 0 means 1. Where clock rates differ by ρ it is
	// (1-2ρ)/(1-ρ): clients take 2ρ off, and count on clocks that may be slow.
	Share float64
	// Timeout bounds the search for an order of each lock's history; 0 means
	// none.
	Timeout time.Duration
	// Steps bounds it by its work, whatever else the machine does: so many
	// operations are tried; 0 means no bound.
	Steps uint64
	// Partition of a resource: tokens are unique within one. Nil: all are in
	// one partition.
	Partition func(resource string) string
	// apart: requests that nobody speaks of keep their names. For tests.
	apart bool
}

// Verdict on a history.
type Verdict struct {
	// Violations of rules, as text.
	Violations []string
	// Undecided are the locks whose search took too long.
	Undecided []string
	// Disordered are the locks whose history has no order, and Stuck says where
	// the search ended.
	Disordered []string
	Stuck      map[string]string
	info       map[string]porcupine.LinearizationInfo
	slots      map[string]int
}

// OK reports that nothing was found and nothing left undecided.
func (v *Verdict) OK() bool {
	return len(v.Violations) == 0 && len(v.Undecided) == 0 && len(v.Disordered) == 0
}

func (v *Verdict) String() string {
	if v.OK() {
		return "no violation"
	}
	s := ""
	for _, x := range v.Violations[:min(10, len(v.Violations))] {
		s += x + "\n"
	}
	if n := len(v.Violations) - 10; n > 0 {
		s += fmt.Sprintf("and %d more\n", n)
	}
	for _, x := range v.Disordered {
		s += fmt.Sprintf("%s: no order of its operations fits the answers\n%s", x, v.Stuck[x])
	}
	for _, x := range v.Undecided {
		s += fmt.Sprintf("%s: no order was found in time, nor that there is none\n%s", x, v.Stuck[x])
	}
	return s
}

// Check judges a history.
func Check(h History, cfg Config) *Verdict {
	if cfg.Share == 0 {
		cfg.Share = 1
	}
	v := &Verdict{Stuck: map[string]string{}, info: map[string]porcupine.LinearizationInfo{}, slots: map[string]int{}}
	timed := cfg.Clocks != nil
	p := listen(h, cfg.Clocks, cfg.Share)
	if timed {
		v.Violations = append(v.Violations, p.overlaps()...)
		v.Violations = append(v.Violations, p.unfounded(h.Beliefs)...)
	}
	v.Violations = append(v.Violations, tokensOnce(h, cfg.Partition)...)
	parts, slots, unexplained := compile(h, p, timed, cfg.apart)
	v.Violations = append(v.Violations, unexplained...)
	for _, resource := range slices.Sorted(maps.Keys(parts)) {
		model, tired := patient(Model(slots[resource]), cfg.Steps)
		result, info := porcupine.CheckOperationsVerbose(model, parts[resource], cfg.Timeout)
		if result == porcupine.Illegal && tired() {
			result = porcupine.Unknown
		}
		switch result {
		case porcupine.Ok:
			continue
		case porcupine.Illegal:
			v.Disordered = append(v.Disordered, resource)
		case porcupine.Unknown:
			v.Undecided = append(v.Undecided, resource)
		}
		v.info[resource], v.slots[resource] = info, slots[resource]
		v.Stuck[resource] = explain(slots[resource], parts[resource], info)
	}
	return v
}

// patient returns a model which allows nothing any more after so many steps, and
// whether it came to that. The search ends then, as it cannot be told to.
func patient(m porcupine.Model, steps uint64) (_ porcupine.Model, tired func() bool) {
	var taken atomic.Uint64
	over := func() bool { return steps > 0 && taken.Load() > steps }
	step := m.Step
	m.Step = func(state, in, out any) (bool, any) {
		if taken.Add(1); over() {
			return false, state
		}
		return step(state, in, out)
	}
	return m, over
}

// tokensOnce finds tokens that two sessions, or two resources of a partition,
// were given (I2).
func tokensOnce(h History, partition func(string) string) []string {
	type key struct {
		partition string
		token     uint64
	}
	var found []string
	given := map[key]hold{}
	give := func(x hold) {
		if x.token == 0 {
			return
		}
		k := key{token: x.token}
		if partition != nil {
			k.partition = partition(x.resource)
		}
		if y, ok := given[k]; ok && y != x {
			found = append(found, fmt.Sprintf("I2: token %d was given to session %s for %s and to session %s for %s",
				x.token, short(y.session), y.resource, short(x.session), x.resource))
			return
		}
		given[k] = x
	}
	for _, op := range h.Ops {
		if op.Answer.Granted {
			give(op.granted())
		}
	}
	for _, m := range h.Messages {
		if g := m.Heard.GetGrant(); g != nil {
			give(hold{g.GetSessionId(), g.GetHeld().GetResource(), g.GetHeld().GetToken()})
		}
		for _, x := range m.Heard.GetAck().GetHeld() {
			give(hold{m.Heard.GetAck().GetSessionId(), x.GetResource(), x.GetToken()})
		}
	}
	return found
}

// compiler makes the operations of each lock.
type compiler struct {
	h     History
	p     *promises
	timed bool
	apart bool

	part     map[request]string
	again    map[request]bool
	terms    map[request]terms
	ttl      map[string]time.Duration
	opened   map[string]time.Duration
	acquires map[string][]*Op // by session
	unknown  map[request][]*Op
	clients  map[string]int
	end      time.Duration
	noticed  map[request]bool
	// unnoticed requests so far, of a session for a resource.
	unnoticed map[hold]int
	out       map[string][]porcupine.Operation
	// slots of each part.
	slots map[string]int
	// found are facts that nothing explains, or that came too early.
	found []string
}

// compile makes each lock's operations, and returns what it finds wrong
// already.
func compile(h History, p *promises, timed, apart bool) (parts map[string][]porcupine.Operation, slots map[string]int, found []string) {
	c := &compiler{
		h: h, p: p, timed: timed, apart: apart, part: map[request]string{}, again: map[request]bool{}, terms: map[request]terms{}, ttl: map[string]time.Duration{},
		opened: map[string]time.Duration{}, acquires: map[string][]*Op{}, unknown: map[request][]*Op{}, clients: map[string]int{}, noticed: map[request]bool{}, unnoticed: map[hold]int{}, out: map[string][]porcupine.Operation{}, slots: map[string]int{},
	}
	c.index()
	touched := map[string]map[string]bool{} // sessions by resource
	for _, op := range h.Ops {
		c.call(op)
		if op.Kind == Acquire {
			if touched[op.part()] == nil {
				touched[op.part()] = map[string]bool{}
			}
			touched[op.part()][op.Session] = true
		}
	}
	c.heard()
	for resource, sessions := range touched {
		if len(h.Facts) == 0 {
			c.endings(resource, sessions)
			c.lapses(resource)
		}
		c.add(resource, "", &input{Op: &Op{Kind: finishes}}, c.end, c.end+1)
	}
	if len(h.Facts) > 0 {
		c.facts(touched)
	}
	return c.out, c.slots, c.found
}

func (c *compiler) index() {
	seen := map[request]bool{}
	for _, op := range c.h.Ops {
		c.end = max(c.end, op.Call)
		if !op.Unknown() {
			c.end = max(c.end, op.Return)
		}
		switch op.Kind {
		case Open:
			if op.Answer.Code == OK {
				c.ttl[op.Answer.Session], c.opened[op.Answer.Session] = op.Answer.TTL, op.Call
			}
		case Acquire, Cancel:
			r := request{op.Session, op.Request}
			if op.Kind == Acquire {
				c.part[r] = op.part()
				c.terms[r] = terms{value: op.Value, delay: op.Delay, slots: int(op.Slots)}
				c.acquires[op.Session] = append(c.acquires[op.Session], op)
			}
			if op.Unknown() {
				c.unknown[r] = append(c.unknown[r], op)
			}
			if seen[r] {
				c.again[r] = true
			}
			seen[r] = true
		}
	}
	for _, m := range c.h.Messages {
		c.end = max(c.end, m.At)
	}
	for _, f := range c.h.Facts {
		c.end = max(c.end, f.At)
	}
	c.end += 2
	c.noticedRequests()
}

// add puts an operation into a lock's history.
func (c *compiler) add(resource, client string, in *input, call, ret time.Duration) {
	in.again, in.terms = c.again, c.terms
	part := partOf(resource)
	if in.place = placeOf(in.Resource); in.Slots > 0 {
		part, in.place = in.part(), anySlot
	}
	c.slots[part] = max(c.slots[part], in.place+1, int(in.Slots))
	id, ok := c.clients[client]
	if !ok {
		id = len(c.clients)
		c.clients[client] = id
	}
	c.out[part] = append(c.out[part], porcupine.Operation{ClientId: id, Input: in, Call: int64(call), Return: int64(ret)})
}

// maybe puts in what may happen at any time from then on, or never.
func (c *compiler) maybe(resource string, op Op, from time.Duration) {
	op.Resource = resource
	c.add(resource, string(op.Kind), &input{Op: &op, maybe: true}, min(from, c.end), math.MaxInt64)
}

// call puts a call into the histories that it concerns.
func (c *compiler) call(op *Op) {
	if op.Answer.Code == Refused {
		return
	}
	in := &input{Op: op, maybe: op.Unknown()}
	resource := op.Resource
	switch op.Kind {
	case Open, Close:
		return // sessions' ends are put in per lock
	case Get:
		if op.Unknown() {
			return
		}
	case Cancel:
		if resource = c.part[in.request()]; resource == "" {
			return
		}
	}
	if op.Kind == Acquire || op.Kind == Cancel {
		c.below(in)
		if in.maybe && in.surelyBelow {
			return // it does nothing, whenever it comes
		}
	}
	if in.maybe && len(c.h.Facts) > 0 {
		if op.Kind != Acquire {
			return // the facts tell
		}
		if in.quiet = true; c.unknown[in.request()][0] != op || !c.mayHold(op) {
			return
		}
		in.unnoticed = c.count(op)
	}
	ret := op.Return
	if in.maybe {
		ret = math.MaxInt64
	}
	c.add(resource, op.Client, in, op.Call, ret)
	if op.Kind == Revoke && op.Answer.Code != NotHolder && len(c.h.Facts) == 0 {
		// The holder is not said; any session may be.
		from := op.Call
		var of string
		for h := range c.p.spans {
			if h.resource == resource && h.token == op.Token {
				of = h.session
				if c.timed {
					from = max(from, c.p.last(h))
				}
			}
		}
		c.maybe(resource, Op{Kind: passes, Session: of, Token: op.Token}, from)
	}
}

// mayHold tells whether the session held the lock for another request when the
// call can have come: only then it had an effect that the facts do not show.
func (c *compiler) mayHold(op *Op) bool {
	if op.Slots > 0 {
		return false // it gets a slot of its own, if any
	}
	ended := map[uint64]time.Duration{}
	for _, f := range c.h.Facts {
		if f.Kind == Ended && f.Resource == op.Resource {
			ended[f.Token] = f.At
		}
	}
	for _, f := range c.h.Facts {
		if f.Kind == Granted && f.Resource == op.Resource && f.Session == op.Session && f.Request != op.Request {
			if at, ok := ended[f.Token]; !ok || at >= op.Call {
				return true
			}
		}
	}
	return false
}

// below finds what the session's other calls, on whatever lock, say of a
// request's place above the lowest open one.
func (c *compiler) below(in *input) {
	for _, o := range c.unknown[in.request()] {
		in.maybeClosed = in.maybeClosed || len(c.h.Facts) > 0 && o.Call <= in.Return
	}
	for _, o := range c.acquires[in.Session] {
		if o.Lowest <= in.Request {
			continue
		}
		if o.Call <= in.Return {
			in.maybeBelow = true
		}
		if !o.Unknown() && o.Return < in.Call && (o.Answer.Granted || o.Answer.Queued || o.Answer.Busy) {
			in.surelyBelow = true
		}
	}
}

// heard puts in what streams said: who holds what, and which sessions have
// ended.
func (c *compiler) heard() {
	sent := map[[2]uint64]time.Duration{} // by stream and sequence
	last := map[hold]time.Duration{}
	for _, m := range c.h.Messages {
		if k := m.Sent; k != nil {
			sent[[2]uint64{uint64(m.Stream), k.GetSequence()<<16 ^ uint64(fold(k.GetSessionId()))}] = m.At
			continue
		}
		switch {
		case m.Heard.GetGrant() != nil:
			g := m.Heard.GetGrant()
			r := request{g.GetSessionId(), g.GetRequestId()}
			from := c.opened[r.session]
			for _, o := range c.acquires[r.session] {
				if o.Request == r.id {
					from = o.Call
					break
				}
			}
			c.add(g.GetHeld().GetResource(), m.Client, &input{Op: &Op{
				Kind: holds, Session: r.session, Resource: g.GetHeld().GetResource(), Request: r.id, Token: g.GetHeld().GetToken(),
			}}, from, m.At)
		case m.Heard.GetAck() != nil:
			a := m.Heard.GetAck()
			from := sent[[2]uint64{uint64(m.Stream), a.GetSequence()<<16 ^ uint64(fold(a.GetSessionId()))}]
			for _, x := range a.GetHeld() {
				h := hold{a.GetSessionId(), x.GetResource(), x.GetToken()}
				if m.At-last[h] < time.Second && last[h] != 0 {
					continue // said just now
				}
				last[h] = m.At
				c.add(h.resource, m.Client, &input{Op: &Op{Kind: holds, Session: h.session, Resource: h.resource, Token: h.token}}, from, m.At)
			}
		case m.Heard.GetEnded() != nil:
			id := m.Heard.GetEnded().GetSessionId()
			resources := map[string]bool{}
			for _, o := range c.acquires[id] {
				resources[o.part()] = true
			}
			for resource := range resources {
				c.add(resource, m.Client, &input{Op: &Op{Kind: ended, Session: id}}, c.opened[id], m.At)
			}
		}
	}
}

// fold makes a small number of a session's id, to tell sessions of one stream
// apart.
func fold(s string) uint16 {
	var n uint16
	for i := range len(s) {
		n = n*31 + uint16(s[i])
	}
	return n
}

// endings puts in how sessions and offers of a lock may end.
func (c *compiler) endings(resource string, sessions map[string]bool) {
	for _, session := range slices.Sorted(maps.Keys(sessions)) {
		from := c.opened[session]
		if c.timed {
			from = max(from, c.p.session[session])
		}
		c.maybe(resource, Op{Kind: expires, Session: session}, from)
	}
	for _, op := range c.h.Ops {
		if op.Kind != Close || !sessions[op.Session] || op.Answer.Code == Refused {
			continue
		}
		if op.Unknown() {
			c.maybe(resource, Op{Kind: ends, Session: op.Session}, op.Call)
			continue
		}
		c.add(resource, op.Client, &input{Op: op}, op.Call, op.Return)
	}
}

// lapses puts in that an offer may be revoked and pass on.
func (c *compiler) lapses(resource string) {
	granted := map[request]hold{}
	for _, m := range c.h.Messages {
		if g := m.Heard.GetGrant(); g != nil {
			granted[request{g.GetSessionId(), g.GetRequestId()}] = hold{g.GetSessionId(), g.GetHeld().GetResource(), g.GetHeld().GetToken()}
		}
	}
	for _, op := range c.h.Ops {
		if op.Kind == Acquire && op.Answer.Granted {
			granted[request{op.Session, op.Request}] = op.granted()
		}
	}
	queued := map[request]time.Duration{}
	for _, op := range c.h.Ops {
		if op.Kind != Acquire || op.part() != resource || !op.Wait || !op.Unknown() && !op.Answer.Queued {
			continue
		}
		r := request{op.Session, op.Request}
		if _, ok := queued[r]; !ok {
			queued[r] = op.Call
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(queued), func(a, b request) int {
		return cmp.Or(cmp.Compare(queued[a], queued[b]), compare(a, b))
	}) {
		c.drops(resource, r)
		if h, ok := granted[r]; ok && c.p.confirmed[h] {
			continue
		}
		from := queued[r]
		if c.timed {
			ttl := c.ttl[r.session]
			if ttl == 0 || ttl > offerWithin {
				ttl = offerWithin
			}
			from = max(from+time.Duration(float64(ttl)*c.p.share), c.p.offered[r])
		}
		c.maybe(resource, Op{Kind: lapses, Session: r.session, Request: r.id}, from)
		if h, ok := granted[r]; c.timed && ok {
			from = max(from, c.p.last(h))
		}
		c.maybe(resource, Op{Kind: passes, Session: r.session, Request: r.id}, from)
	}
}

// drops puts in that a waiting request leaves the queue when its session says,
// in a request for whatever lock, that it is not open any more.
func (c *compiler) drops(resource string, r request) {
	for _, o := range c.acquires[r.session] {
		if o.Lowest > r.id {
			c.maybe(resource, Op{Kind: drops, Session: r.session, Request: r.id}, o.Call)
			return
		}
	}
}
