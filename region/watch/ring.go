package watch

import (
	"cmp"
	"slices"
)

// entry is what one log entry did to leases: a piece of its block's data.
type entry struct {
	revision  uint64
	from, end int
}

// blockEntries bounds a block. Blocks are dropped whole.
const blockEntries = 128

// block has its events encoded, so that a ring full of them is a few objects
// without pointers to the garbage collector.
type block struct {
	// Both are only appended to: a reader's copies of the headers stay true.
	entries []entry
	data    []byte
	events  int
}

// part of a ring, which nobody changes.
type part struct {
	entries []entry
	data    []byte
}

// ring keeps the newest entries: all of a revision above floor.
type ring struct {
	maxEvents, maxBytes int

	blocks        []*block
	events, bytes int // bytes of the data
	// next is the block that the first entry after a full one begins.
	next *block
	// floor: entries up to it are forgotten, or were never seen.
	floor uint64
	// last is the newest revision, also of an entry without events.
	last uint64
}

// restart empties the ring; what comes next is after the revision.
func (r *ring) restart(revision uint64) {
	r.blocks, r.next, r.events, r.bytes = nil, nil, 0, 0
	r.floor, r.last = revision, revision
}

// add an entry. encode appends its events to data and says how many there are.
func (r *ring) add(revision uint64, encode func(data []byte) ([]byte, int)) {
	r.last = revision
	n := len(r.blocks)
	// Small blocks, so that little is forgotten at a time.
	full := n == 0 || len(r.blocks[n-1].entries) >= blockEntries ||
		len(r.blocks[n-1].data) >= r.maxBytes/16 || r.blocks[n-1].events >= max(1, r.maxEvents/16)
	if full && r.next == nil {
		r.next = &block{}
		if n > 0 { // as long as the one before
			r.next.data = make([]byte, 0, len(r.blocks[n-1].data))
		}
	}
	b := r.next
	if !full {
		b = r.blocks[n-1]
	}
	from := len(b.data)
	data, events := encode(b.data)
	if events == 0 {
		return
	}
	if full {
		r.blocks, r.next = append(r.blocks, b), nil
		n++
	}
	b.data = data
	b.entries = append(b.entries, entry{revision, from, len(data)})
	b.events += events
	r.events += events
	r.bytes += len(data) - from
	drop := 0
	for ; drop < n-1 && (r.events > r.maxEvents || r.bytes > r.maxBytes); drop++ {
		old := r.blocks[drop]
		r.events -= old.events
		r.bytes -= len(old.data)
		r.floor = old.entries[len(old.entries)-1].revision
	}
	r.blocks = slices.Delete(r.blocks, 0, drop)
}

// after returns the entries after a revision, in order, in blocks that nobody
// changes; false if some of them are forgotten.
func (r *ring) after(revision uint64) (parts []part, ok bool) {
	if revision < r.floor {
		return nil, false
	}
	for i := len(r.blocks) - 1; i >= 0; i-- {
		entries := r.blocks[i].entries
		if entries[len(entries)-1].revision <= revision {
			break
		}
		at, _ := slices.BinarySearchFunc(entries, revision+1, func(e entry, to uint64) int { return cmp.Compare(e.revision, to) })
		parts = append(parts, part{entries[at:len(entries):len(entries)], r.blocks[i].data})
	}
	slices.Reverse(parts)
	return parts, true
}
