package redisstream

import (
	"context"
	"slices"

	"github.com/headlease/headlease/fence"
)

// model is a stream's shards in Go: the second implementation of the scripts,
// for one hash shard and dedicated ones. without names rules that it leaves out,
// for tests of the tests.
type model struct {
	home    uint32
	shards  map[uint32]*modelShard
	without string
}

type modelShard struct {
	records map[string]record
	seq     map[string]uint64
	// entries of the stream; an entry's id is its index from 1.
	entries   []modelEntry
	delivered int
	pending   []int
	group     bool
	aside     map[string][]modelEntry
	parked    map[string]uint64
	mark      fence.Token
	// memory of producers: their last message.
	memory map[int]modelSent
}

type modelEntry struct {
	key  string
	seq  uint64
	body int
}

type modelSent struct{ number, seq uint64 }

func newModel(home uint32) *model { return &model{home: home, shards: map[uint32]*modelShard{}} }

func (m *model) at(n uint32) *modelShard {
	s := m.shards[n]
	if s == nil {
		s = &modelShard{records: map[string]record{}, seq: map[string]uint64{}, aside: map[string][]modelEntry{}, parked: map[string]uint64{}, memory: map[int]modelSent{}}
		m.shards[n] = s
	}
	return s
}

func (m *model) record(at uint32, key string) record {
	if r, ok := m.at(at).records[key]; ok {
		return r
	}
	if at == m.home {
		return record{place: here, other: m.home}
	}
	return record{place: away, other: m.home}
}

// send is sendScript; moved is nil if it was done.
func (m *model) send(at uint32, r route, producer int, number uint64, key string, body int) (seq uint64, moved *route, late bool) {
	s := m.at(at)
	switch last := s.memory[producer]; {
	case last.number == number:
		return last.seq, nil, false
	case last.number > number:
		return 0, nil, true
	}
	rec := m.record(at, key)
	switch {
	case r.generation > rec.generation:
		rec = m.arriving(at, key, r.generation, r.from, r.last)
	case m.without == "generation of a send" && rec.place != away:
	case rec.place == away && m.without != "seal":
		return 0, &route{shard: rec.other, generation: rec.generation, from: at, last: rec.last}, false
	case r.generation != rec.generation && m.without != "seal":
		return 0, &route{shard: at, generation: rec.generation}, false
	}
	s.seq[key]++
	e := modelEntry{key, s.seq[key], body}
	if rec.place == arriving {
		s.aside[key] = append(s.aside[key], e)
	} else {
		s.entries = append(s.entries, e)
	}
	s.memory[producer] = modelSent{number, e.seq}
	return e.seq, nil, false
}

func (m *model) arriving(at uint32, key string, generation uint64, from uint32, last uint64) record {
	r := record{generation: generation, place: arriving, other: from, last: last}
	s := m.at(at)
	s.records[key], s.seq[key] = r, last
	if m.without == "number carried" {
		s.seq[key] = 0
	}
	return r
}

// claim is the guard's.
func (m *model) claim(at uint32, token fence.Token) bool {
	s := m.at(at)
	if token < s.mark {
		return false
	}
	s.mark, s.group = token, true
	return true
}

// read returns pending entries above after, or new ones.
func (m *model) read(at uint32, token fence.Token, pending bool, after, limit int) (ids []int, ok bool) {
	s := m.at(at)
	if token < s.mark {
		return nil, false
	}
	if pending {
		for _, id := range s.pending {
			if id > after && len(ids) < limit {
				ids = append(ids, id)
			}
		}
		return ids, true
	}
	for s.delivered < len(s.entries) && len(ids) < limit {
		s.delivered++
		s.pending = append(s.pending, s.delivered)
		ids = append(ids, s.delivered)
	}
	return ids, true
}

func (m *model) ack(at uint32, token fence.Token, id int) bool {
	s := m.at(at)
	if token < s.mark {
		return false
	}
	s.pending = slices.DeleteFunc(s.pending, func(p int) bool { return p == id })
	return true
}

// open entries of the stream up to one: how many are not acknowledged.
func (s *modelShard) open(upTo int) (n int) {
	for _, id := range s.pending {
		if id <= upTo {
			n++
		}
	}
	return n + max(0, upTo-s.delivered)
}

func (m *model) answer(word string, at uint32, key string, left uint64) (answer, error) {
	return answer{word: word, record: m.record(at, key), left: left}, nil
}

func (m *model) look(_ context.Context, at uint32, key string) (answer, error) {
	return m.answer(said, at, key, 0)
}

func (m *model) claimed(_ context.Context, at uint32) (bool, error) { return m.at(at).mark != 0, nil }

func (m *model) stay(_ context.Context, at uint32, key string, generation uint64) (answer, error) {
	r := m.record(at, key)
	if r.generation >= generation {
		return m.answer(newer, at, key, 0)
	}
	if r.place != here {
		return m.answer(busy, at, key, 0)
	}
	if m.without != "stay" {
		r.generation = generation
		m.at(at).records[key] = r
	}
	return m.answer(said, at, key, 0)
}

func (m *model) seal(_ context.Context, at uint32, key string, generation uint64, to uint32) (answer, error) {
	r, s := m.record(at, key), m.at(at)
	switch {
	case r.generation > generation && m.without != "generation of a seal":
		return m.answer(newer, at, key, 0)
	case r.generation == generation && r.place == away:
		return m.answer(said, at, key, 0)
	case r.generation == generation:
		return m.answer(newer, at, key, 0)
	case r.place != here:
		return m.answer(busy, at, key, 0)
	case s.parked[key] > 0:
		return m.answer(parked, at, key, s.parked[key])
	}
	s.records[key] = record{generation: generation, place: away, other: to, last: s.seq[key], upTo: modelID(len(s.entries))}
	return m.answer(said, at, key, 0)
}

func (m *model) drain(_ context.Context, at uint32, key string, generation uint64) (answer, error) {
	r, s := m.record(at, key), m.at(at)
	switch {
	case r.generation != generation:
		return m.answer(newer, at, key, 0)
	case r.place != away:
		return m.answer(busy, at, key, 0)
	case r.drained:
		return m.answer(said, at, key, 0)
	case s.parked[key] > 0:
		return m.answer(parked, at, key, s.parked[key])
	}
	if r.last > 0 && m.without != "drain" {
		switch n := s.open(modelIndex(r.upTo)); {
		case !s.group && n > 0:
			return m.answer(busy, at, key, 0)
		case n > 0:
			return m.answer(busy, at, key, uint64(n))
		case s.mark == 0:
			return m.answer(unmarked, at, key, 0)
		}
	}
	if r.drained = true; r.last > 0 {
		r.floor = s.mark
	}
	s.records[key] = r
	return m.answer(said, at, key, 0)
}

func (m *model) arrive(_ context.Context, at uint32, key string, generation uint64, from uint32, last uint64) (answer, error) {
	r := m.record(at, key)
	if r.generation > generation {
		return m.answer(newer, at, key, 0)
	}
	if r.generation < generation {
		m.arriving(at, key, generation, from, last)
	}
	return m.answer(said, at, key, 0)
}

func (m *model) open(_ context.Context, at uint32, key string, generation uint64, floor fence.Token) (answer, error) {
	r, s := m.record(at, key), m.at(at)
	switch {
	case r.generation != generation:
		return m.answer(newer, at, key, 0)
	case r.place != arriving:
		return m.answer(said, at, key, 0)
	case floor > 0 && s.mark == 0:
		return m.answer(unmarked, at, key, 0)
	case floor > 0 && s.mark <= floor && m.without != "floor":
		return m.answer(lease, at, key, 0)
	}
	n := min(len(s.aside[key]), carried)
	s.entries = append(s.entries, s.aside[key][:n]...)
	s.aside[key] = s.aside[key][n:]
	if left := len(s.aside[key]); left > 0 {
		return m.answer(more, at, key, uint64(left))
	}
	delete(s.aside, key)
	r.place = here
	s.records[key] = r
	return m.answer(said, at, key, 0)
}

// arrivals of a shard, sorted.
func (m *model) arrivals(at uint32) (keys []string) {
	for key, r := range m.at(at).records {
		if r.place == arriving {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}
