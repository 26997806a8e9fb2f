package history

import (
	"math"
	"slices"
)

// Requests of a session that nobody speaks of but the session, and that were never
// answered, cannot be told from each other: with each of them the session may have
// asked again for what it holds, and then the lease counts as that request's. A
// search that tries them in every order does not end when there are dozens. Here
// they have one name, and come in the order of their calls: whichever of them took
// effect, the ones called before it could have in its stead.

// unnoticed is the one name: the id is no client's.
const unnoticed = math.MaxUint64

// asks are how many of a session's unnoticed requests have come to a place.
type asks struct {
	session string
	place   int
	n       int
}

func (l *lock) askedUnnoticed(session string, place int) int {
	for _, a := range l.unnoticed {
		if a.session == session && a.place == place {
			return a.n
		}
	}
	return 0
}

// askUnnoticed is the next unnoticed request of a session for what it holds.
func (l *lock) askUnnoticed(in *input) (*lock, bool) {
	p := &l.places[in.place]
	n := l.askedUnnoticed(in.Session, in.place)
	if l.draining || p.revoked || p.by.session != in.Session || p.by.id == unnoticed || n != in.unnoticed-1 {
		return l, false
	}
	return l.edit(func(c *lock) {
		p := &c.places[in.place]
		c.close(p.by, in)
		p.by.id = unnoticed
		c.unnoticed = slices.DeleteFunc(slices.Clone(c.unnoticed), func(a asks) bool { return a.session == in.Session && a.place == in.place })
		c.unnoticed = append(c.unnoticed, asks{in.Session, in.place, n + 1})
		slices.SortFunc(c.unnoticed, func(a, b asks) int {
			return compare(request{a.session, uint64(a.place)}, request{b.session, uint64(b.place)})
		})
	}), true
}

// count numbers the requests that nobody speaks of, of each session for each lock
// or slot, in the order of their calls; 0 is any other.
func (c *compiler) count(op *Op) int {
	r := request{op.Session, op.Request}
	if c.apart || c.noticed[r] || c.terms[r].value != "" || c.terms[r].delay != 0 {
		return 0
	}
	of := hold{session: op.Session, resource: op.Resource}
	c.unnoticed[of]++
	return c.unnoticed[of]
}

// noticedRequests are those that an answer, the log, a message or a call of
// another kind speaks of.
func (c *compiler) noticedRequests() {
	for _, op := range c.h.Ops {
		if op.Kind == Cancel || op.Kind == Acquire && !op.Unknown() {
			c.noticed[request{op.Session, op.Request}] = true
		}
	}
	for _, f := range c.h.Facts {
		c.noticed[request{f.Session, f.Request}] = true
	}
	for _, m := range c.h.Messages {
		if g := m.Heard.GetGrant(); g != nil {
			c.noticed[request{g.GetSessionId(), g.GetRequestId()}] = true
		}
	}
}
