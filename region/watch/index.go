package watch

import (
	"slices"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Query is what a watcher follows: one resource, or all that begin with the
// prefix.
type Query struct {
	// Resource, and the partition that it is in; empty: Prefix counts.
	Resource, Partition string
	Prefix              string
}

// matches reports whether an event is for the query's watchers.
func (q Query) matches(e *pb.WatchEvent) bool {
	if p := e.GetPartition(); p != nil {
		return q.Resource == "" || q.Partition == p.GetPartition()
	}
	r := resourceOf(e)
	if q.Resource != "" {
		return r == q.Resource
	}
	return len(r) >= len(q.Prefix) && r[:len(q.Prefix)] == q.Prefix
}

// resourceOf an event; empty for a partition's.
func resourceOf(e *pb.WatchEvent) string {
	switch k := e.GetKind().(type) {
	case *pb.WatchEvent_Granted:
		return k.Granted.GetResource()
	case *pb.WatchEvent_Value:
		return k.Value.GetResource()
	case *pb.WatchEvent_Revoked:
		return k.Revoked.GetResource()
	case *pb.WatchEvent_Ended:
		return k.Ended.GetResource()
	}
	return ""
}

type group map[*Watcher]struct{}

// index finds the watchers of an event without looking at the others.
type index struct {
	resources  map[string]group
	partitions map[string]group // watchers of single resources, by partition
	prefixes   map[string]group
	// lengths of the prefixes that are watched, ascending, and how many
	// different prefixes of each length.
	lengths []int
	ofLen   map[int]int
	all     group
}

func newIndex() *index {
	return &index{
		resources: map[string]group{}, partitions: map[string]group{}, prefixes: map[string]group{},
		ofLen: map[int]int{}, all: group{},
	}
}

func join(m map[string]group, key string, w *Watcher) (first bool) {
	g := m[key]
	if g == nil {
		g, first = group{}, true
		m[key] = g
	}
	g[w] = struct{}{}
	return first
}

func leave(m map[string]group, key string, w *Watcher) (last bool) {
	g := m[key]
	delete(g, w)
	if len(g) > 0 {
		return false
	}
	delete(m, key)
	return true
}

func (x *index) add(w *Watcher) {
	x.all[w] = struct{}{}
	if w.query.Resource != "" {
		join(x.resources, w.query.Resource, w)
		join(x.partitions, w.query.Partition, w)
		return
	}
	if n := len(w.query.Prefix); join(x.prefixes, w.query.Prefix, w) {
		if x.ofLen[n]++; x.ofLen[n] == 1 {
			at, _ := slices.BinarySearch(x.lengths, n)
			x.lengths = slices.Insert(x.lengths, at, n)
		}
	}
}

func (x *index) remove(w *Watcher) {
	delete(x.all, w)
	if w.query.Resource != "" {
		leave(x.resources, w.query.Resource, w)
		leave(x.partitions, w.query.Partition, w)
		return
	}
	if n := len(w.query.Prefix); leave(x.prefixes, w.query.Prefix, w) {
		if x.ofLen[n]--; x.ofLen[n] == 0 {
			delete(x.ofLen, n)
			at, _ := slices.BinarySearch(x.lengths, n)
			x.lengths = slices.Delete(x.lengths, at, at+1)
		}
	}
}

// each calls do with each watcher of an event.
func (x *index) each(e *pb.WatchEvent, do func(*Watcher)) {
	if p := e.GetPartition(); p != nil {
		for w := range x.partitions[p.GetPartition()] {
			do(w)
		}
		for _, g := range x.prefixes {
			for w := range g {
				do(w)
			}
		}
		return
	}
	r := resourceOf(e)
	for w := range x.resources[r] {
		do(w)
	}
	for _, n := range x.lengths {
		if n > len(r) {
			break
		}
		for w := range x.prefixes[r[:n]] {
			do(w)
		}
	}
}
