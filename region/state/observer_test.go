package state

import (
	"maps"
	"slices"

	"pgregory.net/rapid"

	"github.com/headlease/headlease/fence"
)

// observer knows only the events. It checks the invariants that no agreement
// of two implementations can excuse, and that events alone tell the state, as
// the leader's tables and the watchers need.
type observer struct {
	t    *rapid.T
	last map[string]fence.Token
	// holders by resource, and what a Drop ended and no LeaseEnded has named.
	holders, dropped map[string]LeaseGranted
	delays           map[string]DelayBegun
	queues           map[queueKey][]WaiterEnqueued
	over             []WaiterEnqueued
	open             map[string]bool
	parts            map[string]observedPartition
}

type queueKey struct {
	resource  string
	semaphore bool
}

type observedPartition struct {
	epoch               fence.Epoch
	draining, unsettled bool
}

func newObserver(t *rapid.T) *observer {
	return &observer{
		t: t, last: map[string]fence.Token{}, holders: map[string]LeaseGranted{}, dropped: map[string]LeaseGranted{},
		delays: map[string]DelayBegun{}, queues: map[queueKey][]WaiterEnqueued{}, open: map[string]bool{}, parts: map[string]observedPartition{},
	}
}

func keyOf(w WaiterEnqueued) queueKey { return queueKey{w.Resource, w.Slots > 0} }

func (o *observer) observe(events []Event) {
	for _, e := range events {
		switch e := e.(type) {
		case SessionOpened:
			o.open[e.Session.ID] = true
		case SessionClosed:
			delete(o.open, e.ID)
		case LeaseGranted:
			o.granted(e)
		case LeaseEnded:
			o.ended(e)
		case ValueChanged:
			h := o.holders[e.Resource]
			if h.Token != e.Token || e.Revision <= h.Revision {
				o.t.Fatalf("%+v on %+v", e, h)
			}
			h.Value, h.Revision = e.Value, e.Revision
			o.holders[e.Resource] = h
		case DelayBegun:
			if h, held := o.holders[e.Resource]; held {
				o.t.Fatalf("%+v while %+v holds", e, h)
			}
			o.delays[e.Resource] = e
		case DelayEnded:
			if o.delays[e.Resource].Token != e.Token {
				o.t.Fatalf("%+v does not run", e)
			}
			delete(o.delays, e.Resource)
		case WaiterEnqueued:
			o.queues[keyOf(e)] = append(o.queues[keyOf(e)], e)
		case WaiterEnded:
			o.left(e)
		default:
			o.partition(e)
		}
	}
}

func (o *observer) partition(e Event) {
	switch e := e.(type) {
	case PartitionAdopted:
		if !e.Resumed && e.Epoch <= o.last[e.Partition].Epoch() {
			o.t.Fatalf("%+v: tokens were given in epoch %d before", e, o.last[e.Partition].Epoch())
		}
		o.parts[e.Partition] = observedPartition{epoch: e.Epoch, unsettled: e.Unsettled, draining: e.Resumed && o.parts[e.Partition].draining}
	case PartitionSettled:
		p := o.parts[e.Partition]
		p.unsettled = false
		o.parts[e.Partition] = p
	case PartitionDraining:
		p := o.parts[e.Partition]
		p.draining = true
		o.parts[e.Partition] = p
	case DrainAborted:
		p := o.parts[e.Partition]
		p.draining = false
		o.parts[e.Partition] = p
	case PartitionDropped:
		delete(o.parts, e.Partition)
		for name, h := range o.holders {
			if h.Partition == e.Partition {
				o.dropped[name] = h
				delete(o.holders, name)
			}
		}
		for _, key := range slices.Collect(maps.Keys(o.queues)) {
			if q := o.queues[key]; len(q) > 0 && q[0].Partition == e.Partition {
				o.over = append(o.over, q...)
				delete(o.queues, key)
			}
		}
	}
}

func (o *observer) ended(e LeaseEnded) {
	of := o.holders
	if _, ok := of[e.Resource]; !ok {
		of = o.dropped
	}
	if h, ok := of[e.Resource]; !ok || h.Token != e.Token || h.Session != e.Session {
		o.t.Fatalf("%+v ended what was not held", e)
	}
	delete(of, e.Resource)
}

func (o *observer) left(e WaiterEnded) {
	is := func(w WaiterEnqueued) bool {
		return w.Session == e.Session && w.Request == e.Request && w.Resource == e.Resource
	}
	for _, key := range []queueKey{{e.Resource, false}, {e.Resource, true}} {
		if i := slices.IndexFunc(o.queues[key], is); i >= 0 {
			o.queues[key] = slices.Delete(slices.Clone(o.queues[key]), i, i+1)
			return
		}
	}
	i := slices.IndexFunc(o.over, is)
	if i < 0 {
		o.t.Fatalf("%+v did not wait", e)
	}
	o.over = slices.Delete(o.over, i, i+1)
}

func (o *observer) granted(e LeaseGranted) {
	if h, held := o.holders[e.Resource]; held {
		o.t.Fatalf("%+v granted while %+v holds", e, h)
	}
	if h, held := o.dropped[e.Resource]; held {
		o.t.Fatalf("%+v granted before %+v was told to end", e, h)
	}
	if d, ok := o.delays[e.Resource]; ok {
		o.t.Fatalf("%+v granted in %+v [I6]", e, d)
	}
	if e.Token <= o.last[e.Partition] {
		o.t.Fatalf("token %v after %v: not rising [I2]", e.Token, o.last[e.Partition])
	}
	p, ok := o.parts[e.Partition]
	if !ok || p.epoch != e.Token.Epoch() {
		o.t.Fatalf("%+v granted outside its live epoch [H7]", e)
	}
	if p.draining {
		o.t.Fatalf("%+v granted in a drain [F26]", e)
	}
	if p.unsettled && !e.Offered && e.LockDelayMillis > 0 {
		o.t.Fatalf("%+v granted at once after a promotion without a release [I6]", e)
	}
	if !o.open[e.Session] {
		o.t.Fatalf("%+v granted to an ended session [F22]", e)
	}
	if own := (queueKey{e.Resource, false}); !e.Offered && len(o.queues[own]) > 0 {
		o.t.Fatalf("%+v passed over %+v", e, o.queues[own])
	} else if e.Offered {
		o.served(e, own)
	}
	o.last[e.Partition] = e.Token
	o.holders[e.Resource] = e
}

// served takes out of its queue who must be first: of the resource itself, or
// of its semaphore for whom the slot would do.
func (o *observer) served(e LeaseGranted, own queueKey) {
	key, i := own, 0
	if base, slot, ok := slotOf(e.Resource); ok && len(o.queues[own]) == 0 {
		key = queueKey{base, true}
		i = slices.IndexFunc(o.queues[key], func(w WaiterEnqueued) bool { return int(w.Slots) > slot })
	}
	q := o.queues[key]
	if i < 0 || i >= len(q) || q[i].Session != e.Session || q[i].Request != e.Request {
		// A wait behind a lock delay after a promotion is not yet eligible.
		later := o.parts[e.Partition].unsettled && slices.ContainsFunc(q, func(w WaiterEnqueued) bool { return w.Session == e.Session && w.Request == e.Request })
		if !later {
			o.t.Fatalf("%+v offered out of turn: %+v", e, q)
		}
		i = slices.IndexFunc(q, func(w WaiterEnqueued) bool { return w.Session == e.Session && w.Request == e.Request })
	}
	o.queues[key] = slices.Delete(slices.Clone(q), i, i+1)
}

// compare checks that who knows only the events knows the state.
func (o *observer) compare(v View) {
	n := 0
	for l := range v.Leases() {
		n++
		h := o.holders[l.Resource]
		if h.Token != l.Token || h.Session != l.Session || h.Value != l.Value || h.Holder != l.Holder || h.Revision != l.Revision {
			o.t.Fatalf("lease %+v, the events say %+v", l, h)
		}
	}
	waiting := 0
	for key, q := range o.queues {
		got := v.Waiters(key.resource)
		if key.semaphore {
			got = v.SemaphoreWaiters(key.resource)
		}
		if !slices.EqualFunc(slices.Collect(got), q, func(w Waiter, e WaiterEnqueued) bool { return WaiterEnqueued(w) == e }) {
			o.t.Fatalf("queue of %+v differs from the events", key)
		}
		waiting += len(q)
	}
	if c := v.Counts(); n != len(o.holders) || waiting+len(o.over) != c.Waiters || len(o.delays) != c.Delays || n+len(o.dropped) != c.Leases {
		o.t.Fatalf("%+v, %d leases; the events say %d and %d more, %d and %d waiters, %d delays", c, n, len(o.holders), len(o.dropped), waiting, len(o.over), len(o.delays))
	}
}
