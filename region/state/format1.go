package state

import (
	"encoding/binary"
	"maps"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/headlease/headlease/global/register"
)

// format1Hash is the hash in the footer of a snapshot of format 1, which a
// region at feature level 1 writes so that servers of the version before can
// read it. It reads everything and covers what level 1 keeps.
//
// It is made of the fields one by one and not of encoded messages: their
// encoding may change with a library's version, and then servers of one state
// would seem to diverge.
func (r *root) format1Hash() uint64 {
	h := hasher{d: xxhash.New()}
	h.header(r)
	r.sessions.Scan(func(_ string, s *session) bool { h.session(s); return true })
	r.resources.Scan(func(_ string, r *resource) bool { h.resource(r); return true })
	return h.d.Sum64()
}

// hasher writes every field with its length, so that no two states write the
// same bytes.
type hasher struct {
	d   *xxhash.Digest
	buf [8]byte
}

func (h *hasher) num(n uint64) {
	binary.LittleEndian.PutUint64(h.buf[:], n)
	_, _ = h.d.Write(h.buf[:])
}

func (h *hasher) nums(ns ...uint64) {
	for _, n := range ns {
		h.num(n)
	}
}

func (h *hasher) str(s string) {
	h.num(uint64(len(s)))
	_, _ = h.d.WriteString(s)
}

func (h *hasher) strs(ss ...string) {
	for _, s := range ss {
		h.str(s)
	}
}

func (h *hasher) bool(b bool) {
	if b {
		h.num(1)
	} else {
		h.num(0)
	}
}

func (h *hasher) header(r *root) {
	h.str(r.region)
	h.nums(uint64(r.incarnation), r.ballotRound, r.applied, r.pulse)
	h.configuration(r.configuration)
	h.configRegister(r.configRegister)
	h.num(uint64(r.partitions.Len()))
	r.partitions.Scan(func(_ string, p *partition) bool {
		h.str(p.name)
		h.nums(uint64(p.epoch), uint64(p.seq), uint64(p.phase), uint64(p.dropped))
		h.record(p.record)
		return true
	})
	h.num(uint64(r.voters.Len()))
	r.voters.Scan(func(_ string, v VoterRecord) bool {
		h.str(v.ID)
		h.nums(uint64(v.Incarnation), v.Life, v.Writes)
		return true
	})
	h.nums(uint64(r.sessions.Len()), uint64(r.resources.Len()))
}

func (h *hasher) record(r register.Record) {
	for _, b := range [...]register.Ballot{r.Promised, r.Accepted} {
		h.num(b.Round)
		h.str(b.Region)
		h.num(uint64(b.Incarnation))
	}
	h.strs(r.Value.Owner.Name, r.Value.Successor, r.Value.Reason, r.Alarm)
	h.nums(uint64(r.Value.Owner.Incarnation), uint64(r.Value.Epoch), uint64(r.Value.D))
	if eras := [...]register.Era{r.Promised.Era, r.Accepted.Era, r.Value.Era}; eras != [3]register.Era{} {
		h.str("eras")
		for _, e := range eras {
			h.nums(e.Counter, e.ID)
		}
	}
}

func (h *hasher) session(s *session) {
	h.strs(s.id, string(s.secretHash[:]), s.identity)
	h.nums(uint64(s.ttlMillis), s.lowest, uint64(len(s.labels)))
	for _, k := range slices.Sorted(maps.Keys(s.labels)) {
		h.strs(k, s.labels[k])
	}
	h.bool(s.closing)
	h.num(uint64(s.seen.Len()))
	s.seen.Scan(func(first, last uint64) bool { h.nums(first, last); return true })
	h.num(uint64(s.open.Len()))
	s.open.Scan(func(id uint64, q request) bool {
		h.nums(id, uint64(q.token))
		h.str(q.resource)
		return true
	})
}

func (h *hasher) resource(r *resource) {
	h.strs(r.name, r.partition, r.session, r.revokeReason)
	h.nums(uint64(r.token), r.request)
	h.bool(r.offered)
	h.bool(r.revoked)
	h.num(uint64(r.queue.len()))
	r.queue.scan(func(_ uint64, w waiter) bool { // places count, their numbers do not
		h.str(w.session)
		h.num(w.request)
		return true
	})
}
