package validity

import (
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// The holder's context ends this much before the partition's end.
const (
	minMargin = 100 * time.Millisecond
	// marginShare of the span is the margin of long ones: 2 %.
	marginShare = 50
)

// Valid reports whether the client may still act on the token. Read the clock
// immediately before the act.
func (t *Table) Valid(now instant.Instant, id, resource string, token fence.Token) bool {
	end, _ := t.ends(id, resource, token)
	return now < end
}

// Until is when Valid turns false if nothing more is heard, zero if it is
// false already whatever the time.
func (t *Table) Until(id, resource string, token fence.Token) instant.Instant {
	end, _ := t.ends(id, resource, token)
	return end
}

// ContextEnd is when the holder must be told to stop if nothing more is heard:
// the earliest of two thirds of the TTL after the last acknowledged send (the
// self-kill rule), the partition's end less max(100 ms, 2 %), and at once
// (zero) for a revoked token. It is never after Until.
func (t *Table) ContextEnd(id, resource string, token fence.Token) instant.Instant {
	_, end := t.ends(id, resource, token)
	return end
}

// Lease returns the token that the client has on a resource, whether it is
// valid now or not.
func (t *Table) Lease(id, resource string) (fence.Token, bool) {
	s, ok := t.sessions[id]
	if !ok {
		return 0, false
	}
	l, ok := s.leases[resource]
	if !ok {
		return 0, false
	}
	return l.token, true
}

// ends returns the token's hard end and its context's end.
func (t *Table) ends(id, resource string, token fence.Token) (hard, soft instant.Instant) {
	s, ok := t.sessions[id]
	if !ok {
		return 0, 0
	}
	l, ok := s.leases[resource]
	if !ok || l.token != token {
		return 0, 0
	}
	for _, v := range s.views {
		h, f := t.viewEnds(s, v, resource, token)
		hard, soft = max(hard, h), max(soft, f)
	}
	if l.until > 0 {
		kill := l.sent.Add(s.ttl * 2 / 3)
		if s.acked {
			kill = max(kill, s.lastAcked.Add(s.ttl*2/3))
		}
		hard = max(hard, l.until)
		soft = max(soft, min(kill, l.until.Add(-margin(l.until.Sub(l.sent)))))
	}
	if l.revoked {
		soft = 0
	}
	return hard, min(hard, soft)
}

// viewEnds is what one stream's word is worth for a token.
func (t *Table) viewEnds(s *session, v *view, resource string, token fence.Token) (hard, soft instant.Instant) {
	n, ok := v.named[resource]
	if !ok || n.token != token || !v.st.paired {
		return 0, 0
	}
	leaderEnd, ok := v.st.ends[part{n.partition, token.Epoch()}]
	if !ok {
		return 0, 0 // a token of another epoch is dead [L6]
	}
	if n.until != 0 {
		leaderEnd = min(leaderEnd, n.until)
	}
	end := v.st.local(leaderEnd, t.drift)
	hard = min(v.st.local(v.until, t.drift), end)
	if s.acked {
		soft = min(s.lastAcked.Add(s.ttl*2/3), end.Add(-margin(end.Sub(v.st.c))))
	}
	return hard, soft
}

// local maps an instant of the leader's clock to ours: x is at c + (x-s)(1-2ρ).
func (st *stream) local(x instant.Instant, drift int64) instant.Instant {
	if !st.paired {
		return 0
	}
	return mapped(x, st.c, st.s, drift)
}

func mapped(x, c, s instant.Instant, drift int64) instant.Instant {
	span := min(x.Sub(s), maxSpan)
	if span <= 0 {
		// Over before we had the pair: c is in the past.
		return min(c, c.Add(span))
	}
	return c.Add(span / 1_000_000 * time.Duration(1_000_000-2*drift)).
		Add(span % 1_000_000 * time.Duration(1_000_000-2*drift) / 1_000_000)
}

func margin(span time.Duration) time.Duration { return max(minMargin, span/marginShare) }
