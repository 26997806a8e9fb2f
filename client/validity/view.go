package validity

import (
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
)

// stream is what one Attach call said in one term.
type stream struct {
	key
	broken bool
	// The newest pair: sent at c on our clock, stamped s on the leader's.
	paired bool
	c, s   instant.Instant
	// ends of partitions on the leader's clock, per epoch [L6].
	ends map[part]instant.Instant
	// views counts the sessions that this stream speaks for.
	views int
}

type part struct {
	name  string
	epoch fence.Epoch
}

// view is what one stream said of one session in one term.
type view struct {
	st *stream
	// until is the session's end on the leader's clock.
	until instant.Instant
	named map[string]naming
}

// naming is a token that the stream has named as held, also one that we have
// let go of: the leader compares the hash of this set.
type naming struct {
	token     fence.Token
	partition string
	// until is the token's own end on the leader's clock; 0: none.
	until     instant.Instant
	withdrawn bool
}

// newest view of the session; nil: no stream has spoken for it yet.
func (s *session) newest() *view {
	var v *view
	for _, w := range s.views {
		if v == nil || v.st.less(w.st.key) {
			v = w
		}
	}
	return v
}

// hash of the tokens that the newest stream has named and not withdrawn.
func (s *session) hash() uint64 {
	v := s.newest()
	if v == nil {
		return 0
	}
	var sum uint64
	for resource, n := range v.named {
		if !n.withdrawn {
			sum += TokenHash(resource, n.token)
		}
	}
	return sum
}

func (s *session) view(k key) *view {
	for _, v := range s.views {
		if v.st.key == k {
			return v
		}
	}
	return nil
}

func (s *session) isNamed(resource string, token fence.Token) bool {
	for _, v := range s.views {
		if n, ok := v.named[resource]; ok && n.token == token {
			return true
		}
	}
	return false
}

// dropViews forgets what was said of the session on streams that keep does not
// hold on to.
func (t *Table) dropViews(s *session, keep func(*view) bool) {
	left := s.views[:0]
	for _, v := range s.views {
		if keep(v) {
			left = append(left, v)
			continue
		}
		v.st.views--
		t.collect(v.st)
	}
	clear(s.views[len(left):])
	s.views = left
}

// speaks reports whether a view still gives a token validity.
func (t *Table) speaks(now instant.Instant, s *session, v *view) bool {
	for resource, n := range v.named {
		if end, _ := t.viewEnds(s, v, resource, n.token); end > now {
			return true
		}
	}
	return false
}

// collect forgets a stream that can say nothing more and speaks for nobody.
func (t *Table) collect(st *stream) {
	if st.views == 0 && (st.broken || st.term < t.term) {
		delete(t.streams, st.key)
	}
}
