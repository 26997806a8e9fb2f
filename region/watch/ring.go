package watch

import (
	"cmp"
	"slices"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// entry is what one log entry did to leases. It is not changed once made.
type entry struct {
	revision uint64
	events   []*pb.WatchEvent
	bytes    int
}

// blockEntries bounds a block. Blocks are dropped whole.
const blockEntries = 128

type block struct {
	entries []entry // only appended to: a reader's copy of the header stays true
	events  int
	bytes   int
}

// ring keeps the newest entries: all of a revision above floor.
type ring struct {
	maxEvents, maxBytes int

	blocks        []*block
	events, bytes int
	// floor: entries up to it are forgotten, or were never seen.
	floor uint64
	// last is the newest revision, also of an entry without events.
	last uint64
}

// restart empties the ring; what comes next is after the revision.
func (r *ring) restart(revision uint64) {
	r.blocks, r.events, r.bytes = nil, 0, 0
	r.floor, r.last = revision, revision
}

func (r *ring) add(e entry) {
	r.last = e.revision
	if len(e.events) == 0 {
		return
	}
	n := len(r.blocks)
	// Small blocks, so that little is forgotten at a time.
	if n == 0 || len(r.blocks[n-1].entries) >= blockEntries ||
		r.blocks[n-1].bytes >= r.maxBytes/16 || r.blocks[n-1].events >= max(1, r.maxEvents/16) {
		r.blocks = append(r.blocks, &block{})
		n++
	}
	b := r.blocks[n-1]
	b.entries = append(b.entries, e)
	b.events += len(e.events)
	b.bytes += e.bytes
	r.events += len(e.events)
	r.bytes += e.bytes
	drop := 0
	for ; drop < n-1 && (r.events > r.maxEvents || r.bytes > r.maxBytes); drop++ {
		old := r.blocks[drop]
		r.events -= old.events
		r.bytes -= old.bytes
		r.floor = old.entries[len(old.entries)-1].revision
	}
	r.blocks = slices.Delete(r.blocks, 0, drop)
}

// after returns the entries after a revision, in order, in blocks that nobody
// changes; false if some of them are forgotten.
func (r *ring) after(revision uint64) (parts [][]entry, ok bool) {
	if revision < r.floor {
		return nil, false
	}
	for i := len(r.blocks) - 1; i >= 0; i-- {
		entries := r.blocks[i].entries
		if entries[len(entries)-1].revision <= revision {
			break
		}
		at, _ := slices.BinarySearchFunc(entries, revision+1, func(e entry, to uint64) int { return cmp.Compare(e.revision, to) })
		parts = append(parts, entries[at:len(entries):len(entries)])
	}
	slices.Reverse(parts)
	return parts, true
}
