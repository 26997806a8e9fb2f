package plan

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"
)

// Assignment is the member of each shard, by name.
type Assignment map[uint32]string

// Of returns the shards of a member, ascending.
func (a Assignment) Of(member string) []uint32 {
	var out []uint32
	for s, m := range a {
		if m == member {
			out = append(out, s)
		}
	}
	slices.Sort(out)
	return out
}

// Member is one that takes shards.
type Member struct {
	Name string
	// Capacity beside the others' capacities; 0 counts as 1.
	Capacity uint32
}

func (m Member) capacity() uint64 { return uint64(max(m.Capacity, 1)) }

// share is a member's part of an assignment that is being made.
type share struct {
	Member
	have      []uint32 // of before, ascending
	target    int
	remainder uint64
}

// Assign gives each shard to a member: to each one its exact share by capacity
// rounded down or up, with the fewest moves from before. Names of members, and
// shards, must not repeat. The result depends on nothing but the arguments.
//
// Who is rounded up is chosen first among those that hold more than their
// share rounded down: each keeps one shard more by that, and nobody else's
// moves change. So no choice moves fewer (the largest-remainder method, with
// remainders as second criterion only).
func Assign(shards []uint32, members []Member, before Assignment) Assignment {
	next := make(Assignment, len(shards))
	if len(members) == 0 {
		return next
	}
	shares := sharesOf(shards, members, before)
	// free are the shards of nobody and those over somebody's share, ascending.
	free := slices.Clone(shards)
	slices.Sort(free)
	for i := range shares {
		s := &shares[i]
		s.have = s.have[:min(len(s.have), s.target)]
		for _, shard := range s.have {
			next[shard] = s.Name
		}
	}
	free = slices.DeleteFunc(free, func(shard uint32) bool { _, taken := next[shard]; return taken })
	for _, s := range shares {
		n := s.target - len(s.have)
		for _, shard := range free[:n] {
			next[shard] = s.Name
		}
		free = free[n:]
	}
	return next
}

func sharesOf(shards []uint32, members []Member, before Assignment) []share {
	shares := make([]share, len(members))
	index := make(map[string]int, len(members))
	total := uint64(0)
	sorted := slices.SortedFunc(slices.Values(members), func(a, b Member) int { return cmp.Compare(a.Name, b.Name) })
	for i, m := range sorted {
		shares[i].Member, index[m.Name] = m, i
		total += m.capacity()
	}
	for _, shard := range slices.Sorted(slices.Values(shards)) {
		if i, ok := index[before[shard]]; ok {
			shares[i].have = append(shares[i].have, shard)
		}
	}
	left := len(shards)
	for i := range shares {
		hi, lo := bits.Mul64(uint64(len(shards)), shares[i].capacity())
		quotient, remainder := bits.Div64(hi, lo, total)
		shares[i].target, shares[i].remainder = int(quotient), remainder
		left -= int(quotient)
	}
	up := make([]*share, 0, len(shares))
	for i := range shares {
		if shares[i].remainder > 0 {
			up = append(up, &shares[i])
		}
	}
	slices.SortStableFunc(up, func(a, b *share) int {
		return cmp.Or(
			boolFirst(len(a.have) > a.target, len(b.have) > b.target),
			cmp.Compare(b.remainder, a.remainder),
		)
	})
	for _, s := range up[:left] {
		s.target++
	}
	return shares
}

func boolFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// Moves counts the shards that have another member in next than before.
func Moves(before, next Assignment) int {
	n := 0
	for s, m := range next {
		if old, ok := before[s]; ok && old != m {
			n++
		}
	}
	return n
}

// Equal reports whether two assignments are the same.
func (a Assignment) Equal(b Assignment) bool { return maps.Equal(a, b) }
