package validity

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"
	"strings"

	"github.com/headlease/headlease/internal/instant"
)

// Clone returns an independent copy, for a model checker that follows both
// branches of a choice.
func (t *Table) Clone() *Table {
	c := *t
	c.open = maps.Clone(t.open)
	c.streams = make(map[key]*stream, len(t.streams))
	for k, st := range t.streams {
		n := *st
		n.ends = maps.Clone(st.ends)
		c.streams[k] = &n
	}
	c.sessions = make(map[string]*session, len(t.sessions))
	for id, s := range t.sessions {
		n := *s
		n.sent = slices.Clone(s.sent)
		n.views = make([]*view, len(s.views))
		for i, v := range s.views {
			st, ok := c.streams[v.st.key]
			if !ok {
				panic("validity: a view of a forgotten stream")
			}
			n.views[i] = &view{st: st, until: v.until, named: maps.Clone(v.named)}
		}
		n.leases = make(map[string]*lease, len(s.leases))
		for r, l := range s.leases {
			d := *l
			n.leases[r] = &d
		}
		n.floors = maps.Clone(s.floors)
		n.requests = maps.Clone(s.requests)
		c.sessions[id] = &n
	}
	return &c
}

// AppendBelief appends a canonical form of all that bears on Valid, now or
// after any further input: two Tables with the same form believe alike for
// ever. Instants are written relative to now, those of a leader as the client's
// clock has them; what is over is written as over. It is for a model checker in
// which time goes in steps much longer than what drift may cost, and every ack is
// stamped as its keepalive is sent; schedules (keepalives due, context ends) are
// left out.
func (t *Table) AppendBelief(b []byte, now instant.Instant) []byte {
	left := func(x instant.Instant) uint64 { return uint64(max(0, x.Sub(now))) }
	b = binary.AppendUvarint(b, t.term)
	for _, k := range slices.SortedFunc(maps.Keys(t.streams), compareKeys) {
		st := t.streams[k]
		b = binary.AppendUvarint(b, k.term)
		b = binary.AppendUvarint(b, uint64(k.id))
		if st.paired {
			b = binary.AppendVarint(b, int64(st.s.Sub(st.c)))
		} else {
			b = append(b, 0xfe)
		}
		for _, p := range slices.SortedFunc(maps.Keys(st.ends), compareParts) {
			if x := st.ends[p]; !st.paired || st.here(x) > now {
				b = append(append(b, p.name...), 0)
				b = binary.AppendUvarint(b, uint64(p.epoch))
				b = st.appendLeft(b, x, now)
			}
		}
		b = append(b, 0xff)
	}
	for _, id := range slices.Sorted(maps.Keys(t.sessions)) {
		s := t.sessions[id]
		b = append(append(b, id...), 0)
		b = binary.AppendUvarint(b, s.current.term)
		b = binary.AppendUvarint(b, uint64(s.current.id))
		for _, v := range s.views {
			b = binary.AppendUvarint(b, v.st.term)
			b = binary.AppendUvarint(b, uint64(v.st.id))
			b = v.st.appendLeft(b, v.until, now)
			for _, r := range slices.Sorted(maps.Keys(v.named)) {
				n := v.named[r]
				b = append(append(b, r...), 0, flag(n.withdrawn), flag(n.until != 0))
				b = binary.AppendUvarint(b, uint64(n.token))
				if n.until != 0 {
					b = v.st.appendLeft(b, n.until, now)
				}
			}
			b = append(b, 0xff)
		}
		b = append(b, 0xff)
		for _, r := range slices.Sorted(maps.Keys(s.leases)) {
			l := s.leases[r]
			b = append(append(b, r...), 0, flag(l.revoked))
			b = binary.AppendUvarint(b, uint64(l.token))
			b = binary.AppendUvarint(b, left(l.until))
		}
		b = append(b, 0xff)
		for _, r := range slices.Sorted(maps.Keys(s.floors)) {
			f := s.floors[r]
			b = append(append(b, r...), 0, byte(f.fate))
			b = binary.AppendUvarint(b, uint64(f.token))
		}
		b = append(b, 0xff)
		for _, q := range slices.Sorted(maps.Keys(s.requests)) {
			b = binary.AppendUvarint(b, q)
			b = append(append(b, s.requests[q].resource...), 0)
			b = binary.AppendUvarint(b, uint64(s.requests[q].slots))
		}
		b = append(b, 0xff)
	}
	return b
}

// here is an instant of the leader's clock on ours, as if both went at one rate.
func (st *stream) here(x instant.Instant) instant.Instant { return x.Add(st.c.Sub(st.s)) }

// appendLeft writes how long an instant of the leader's clock is off. Without a
// pair nobody knows yet what that is here, also of what seems to be over.
func (st *stream) appendLeft(b []byte, x, now instant.Instant) []byte {
	if !st.paired {
		return binary.AppendVarint(b, int64(x.Sub(now)))
	}
	return binary.AppendUvarint(b, uint64(max(0, st.here(x).Sub(now))))
}

func compareKeys(a, b key) int {
	switch {
	case a.less(b):
		return -1
	case b.less(a):
		return 1
	}
	return 0
}

func compareParts(a, b part) int {
	return cmp.Or(strings.Compare(a.name, b.name), cmp.Compare(a.epoch, b.epoch))
}

func flag(b bool) byte {
	if b {
		return 1
	}
	return 0
}
