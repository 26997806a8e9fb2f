package state

import (
	"cmp"
	"slices"

	"github.com/tidwall/btree"
)

// few is an ordered map for what is mostly one entry or two: a list while it
// has few, and a tree beyond. The zero value is empty. A list is never changed
// in place, so that a plain copy of a few that has one is another one; a tree
// needs Copy.
type few[K cmp.Ordered, V any] struct {
	list []pair[K, V]
	tree *btree.Map[K, V]
}

// pair has the value first, so that one of no size takes none.
type pair[K cmp.Ordered, V any] struct {
	value V
	key   K
}

// listed is how many entries a list has at most, each change of which copies it.
const listed = 8

// Copy returns another one with the same entries.
func (f *few[K, V]) Copy() few[K, V] {
	if f.tree == nil {
		return *f
	}
	return few[K, V]{tree: f.tree.Copy()}
}

// Len returns how many entries there are.
func (f *few[K, V]) Len() int {
	if f.tree != nil {
		return f.tree.Len()
	}
	return len(f.list)
}

// find returns the place of a key in the list, or where it belongs.
func (f *few[K, V]) find(k K) (at int, ok bool) {
	for at < len(f.list) && f.list[at].key < k {
		at++
	}
	return at, at < len(f.list) && f.list[at].key == k
}

// Get returns an entry.
func (f *few[K, V]) Get(k K) (v V, ok bool) {
	if f.tree != nil {
		return f.tree.Get(k)
	}
	if at, ok := f.find(k); ok {
		return f.list[at].value, true
	}
	return v, false
}

// Set adds an entry, or changes it and returns what it was.
func (f *few[K, V]) Set(k K, v V) (old V, changed bool) {
	if f.tree != nil {
		return f.tree.Set(k, v)
	}
	at, ok := f.find(k)
	switch {
	case ok:
		old = f.list[at].value
		f.list = slices.Clone(f.list)
		f.list[at].value = v
		return old, true
	case len(f.list) == listed:
		f.tree = btree.NewMap[K, V](degree)
		for _, p := range f.list {
			f.tree.Set(p.key, p.value)
		}
		f.list = nil
		return f.tree.Set(k, v)
	}
	list := make([]pair[K, V], len(f.list)+1)
	copy(list, f.list[:at])
	list[at] = pair[K, V]{v, k}
	copy(list[at+1:], f.list[at:])
	f.list = list
	return old, false
}

// Delete removes an entry and returns what it was.
func (f *few[K, V]) Delete(k K) (old V, ok bool) {
	if f.tree != nil {
		old, ok = f.tree.Delete(k)
		if f.tree.Len() == 0 {
			f.tree = nil
		}
		return old, ok
	}
	at, ok := f.find(k)
	if !ok {
		return old, false
	}
	old = f.list[at].value
	if len(f.list) == 1 {
		f.list = nil
		return old, true
	}
	list := make([]pair[K, V], len(f.list)-1)
	copy(list, f.list[:at])
	copy(list[at:], f.list[at+1:])
	f.list = list
	return old, true
}

// Min returns the first entry.
func (f *few[K, V]) Min() (k K, v V, ok bool) {
	if f.tree != nil {
		return f.tree.Min()
	}
	if len(f.list) == 0 {
		return k, v, false
	}
	return f.list[0].key, f.list[0].value, true
}

// Floor returns the last entry up to a key.
func (f *few[K, V]) Floor(k K) (at K, v V, ok bool) {
	if f.tree != nil {
		f.tree.Descend(k, func(key K, value V) bool {
			at, v, ok = key, value, true
			return false
		})
		return at, v, ok
	}
	for i := len(f.list) - 1; i >= 0; i-- {
		if p := f.list[i]; p.key <= k {
			return p.key, p.value, true
		}
	}
	return at, v, false
}

// Scan yields all entries in order, until it is told to stop.
func (f *few[K, V]) Scan(yield func(K, V) bool) {
	if f.tree != nil {
		f.tree.Scan(yield)
		return
	}
	for _, p := range f.list {
		if !yield(p.key, p.value) {
			return
		}
	}
}
