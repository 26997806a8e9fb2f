package lessor

import "iter"

// small is a map for what is mostly one entry or two: a list while it has few,
// and a table beyond. What is yielded is in no order; it must not be changed
// meanwhile. The zero value is empty.
type small[K comparable, V any] struct {
	list  []entry[K, V]
	table map[K]V
}

type entry[K comparable, V any] struct {
	key   K
	value V
}

// listed is how many entries are searched one by one.
const listed = 8

func (m *small[K, V]) len() int { return len(m.list) + len(m.table) }

func (m *small[K, V]) get(k K) (v V, ok bool) {
	for i := range m.list {
		if m.list[i].key == k {
			return m.list[i].value, true
		}
	}
	v, ok = m.table[k]
	return v, ok
}

func (m *small[K, V]) set(k K, v V) {
	if m.table != nil {
		m.table[k] = v
		return
	}
	for i := range m.list {
		if m.list[i].key == k {
			m.list[i].value = v
			return
		}
	}
	switch n := len(m.list); n {
	case 0:
		m.list = []entry[K, V]{{k, v}} // append would make room for more
	case listed:
		m.table = make(map[K]V, 2*listed)
		for _, e := range m.list {
			m.table[e.key] = e.value
		}
		m.table[k], m.list = v, nil
	default:
		m.list = append(m.list, entry[K, V]{k, v})
	}
}

func (m *small[K, V]) remove(k K) {
	if m.table != nil {
		if delete(m.table, k); len(m.table) == 0 {
			m.table = nil
		}
		return
	}
	for i := range m.list {
		if m.list[i].key == k {
			last := len(m.list) - 1
			m.list[i] = m.list[last]
			m.list[last] = entry[K, V]{}
			m.list = m.list[:last]
			return
		}
	}
}

func (m *small[K, V]) all() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for _, e := range m.list {
			if !yield(e.key, e.value) {
				return
			}
		}
		for k, v := range m.table {
			if !yield(k, v) {
				return
			}
		}
	}
}

func (m *small[K, V]) keys() iter.Seq[K] {
	return func(yield func(K) bool) {
		for k := range m.all() {
			if !yield(k) {
				return
			}
		}
	}
}
