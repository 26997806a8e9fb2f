package simulation

import (
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// drain is a planned transfer as a leader knows it: one that is committed. It
// goes on in every term until the partition is dropped or the drain is aborted.
type drain struct {
	epoch     fence.Epoch
	successor string
	// keeping: an abort is under way, so that nothing is released; told: the
	// proposer knows that it has drained.
	keeping, told bool
}

// transfer begins a planned transfer of a partition that a region holds, and now
// and then aborts it.
func (w *world) transfer(r *region) {
	ld, i := r.cur, w.rnd.IntN(len(w.names))
	if ld == nil || ld.gone || ld.l == nil || ld.frozen > w.now {
		return
	}
	for n := 0; n < len(w.names) && ld.holds[i] == nil; n++ {
		i = (i + 1) % len(w.names)
	}
	if ld.holds[i] == nil || ld.drains[i] != nil {
		return
	}
	to := w.regions[(r.at+1+w.rnd.IntN(len(w.regions)-1))%len(w.regions)].name
	grace := w.upTo(2 * w.d)
	w.note("%s: drains %s for %s, %v", r.name, w.names[i], to, grace)
	if ld.lessor != nil {
		ld.lessor.Grace(ld.clock.read(w.now), w.names[i], grace)
	}
	w.propose(ld, &pb.Command{Term: ld.term, Kind: &pb.Command_StartDrain{StartDrain: &pb.StartDrainCommand{
		Partition: w.names[i], Epoch: uint32(ld.holds[i].epoch), Successor: to, By: "sim",
	}}}, func(*pb.CommandResult) {})
	if w.chance(50) {
		w.after(w.upTo(w.d/2), func() { w.abort(r, i) }) // soon, for few drains last long
	}
}

// abort returns a draining partition to active, if it is not too late.
func (w *world) abort(r *region, i int) {
	ld := r.cur
	if ld == nil || ld.gone || ld.l == nil || ld.frozen > w.now || ld.drains[i] == nil {
		return
	}
	d := ld.drains[i]
	effects, ok := ld.l.KeepOn(ld.clock.read(w.now), w.names[i])
	w.perform(ld, effects)
	w.wake(ld)
	if !ok {
		return
	}
	w.note("%s: aborts the drain of %s", r.name, w.names[i])
	d.keeping = true
	w.propose(ld, &pb.Command{Term: ld.term, Kind: &pb.Command_AbortDrain{AbortDrain: &pb.AbortDrainCommand{
		Partition: w.names[i], Epoch: uint32(d.epoch), By: "sim",
	}}}, func(res *pb.CommandResult) {
		if res.GetError() != nil {
			d.keeping = false
		}
	})
}

// findDrains takes what a leader's View says of drains.
func (w *world) findDrains(ld *leader, view state.View) {
	ld.drains = make([]*drain, w.partitions)
	ld.draining = 0
	for p := range view.Partitions() {
		if p.Draining() {
			w.drains(ld, partitionOf(p.Name), &drain{epoch: p.Epoch, successor: p.Successor})
		}
	}
}

func (w *world) drains(ld *leader, i int, d *drain) {
	if ld.drains[i] != nil {
		ld.draining--
	}
	if ld.drains[i] = d; d != nil {
		ld.draining++
	}
}

// followDrain takes an event that bears on a drain.
func (w *world) followDrain(ld *leader, e state.Event) {
	switch e := e.(type) {
	case state.PartitionDraining:
		w.drains(ld, partitionOf(e.Partition), &drain{epoch: e.Epoch, successor: e.Successor})
		w.after(0, func() { w.releaseDrained(ld) })
	case state.DrainAborted:
		w.drains(ld, partitionOf(e.Partition), nil)
	case state.PartitionDropped:
		w.drains(ld, partitionOf(e.Partition), nil)
	case state.PartitionAdopted:
		if !e.Resumed {
			w.drains(ld, partitionOf(e.Partition), nil)
		}
	}
}

// releaseDrained releases what has drained: as the shell does, at each tick,
// since the proposer may not be ready for it, or have had to give it up.
func (w *world) releaseDrained(ld *leader) {
	if ld.draining == 0 || ld.gone || ld.l == nil || ld.frozen > w.now {
		return
	}
	for i, d := range ld.drains {
		if d == nil || d.keeping {
			continue
		}
		now := ld.clock.read(w.now)
		settled, drained := true, true // without sessions there is nothing to wait for
		if ld.lessor != nil {
			settled, drained = ld.lessor.Drained(now, w.names[i], d.epoch)
		}
		if !drained {
			continue
		}
		if !d.told {
			d.told = true
			w.upsetting()
			w.note("%s: %s, epoch %d, has drained for %s", ld.region.name, w.names[i], d.epoch, d.successor)
			w.nobodyBelieves(ld.region, i, d.epoch)
		}
		reason := register.ReasonDelayed
		if settled {
			reason = register.ReasonDrained
		}
		w.perform(ld, ld.l.Release(now, w.names[i], d.successor, reason))
	}
	w.wake(ld)
}

// nobodyBelieves: when a partition has drained, no client believes in a lease of
// that epoch any more [F26].
func (w *world) nobodyBelieves(r *region, i int, epoch fence.Epoch) {
	if w.clients == nil || i >= contended {
		return
	}
	for _, c := range w.clients.all {
		now := c.clock.read(w.now)
		for _, h := range c.homes {
			if t, ok := h.table.Lease(h.session, lockName(i)); ok && h.r == r && t.Epoch() == epoch && h.table.Valid(now, h.session, lockName(i), t) {
				w.fail("F26: %s, epoch %d of region %s, has drained, and %s believes in token %d.%d", w.names[i], epoch, r.name, c.name, t.Epoch(), t.Seq())
			}
		}
	}
}

// watchDrains looks at what a command did to a region that drains: F26.
func (w *world) watchDrains(r *region, e state.Event) {
	switch e := e.(type) {
	case state.PartitionDraining:
		w.count.drains++
		r.draining |= 1 << partitionOf(e.Partition)
	case state.DrainAborted:
		w.count.aborts++
		r.draining &^= 1 << partitionOf(e.Partition)
	case state.PartitionDropped:
		r.draining &^= 1 << partitionOf(e.Partition)
	case state.PartitionAdopted:
		if !e.Resumed {
			r.draining &^= 1 << partitionOf(e.Partition)
		}
	case state.LeaseGranted:
		if r.draining>>partitionOf(e.Partition)&1 == 1 {
			w.fail("F26: region %s grants token %d.%d of %s, which drains", r.name, e.Token.Epoch(), e.Token.Seq(), e.Partition)
		}
	}
}

// wipe takes the data of all servers of a region away. It begins anew after a
// while, as another incarnation, which is no member until an operator replaces
// the old one by it.
func (w *world) wipe(r *region, lasts time.Duration) {
	for _, o := range w.regions {
		if !w.member(o) { // one at a time: the others must decide on it
			return
		}
	}
	w.note("%s: loses the data of all its servers, for %v", r.name, lasts)
	w.count.wipes++
	r.down++
	for _, p := range r.outstanding {
		p.over = true
	}
	r.outstanding = nil
	for len(r.stale) > 0 {
		w.retire(r.stale[0])
	}
	if r.cur != nil {
		w.retire(r.cur)
	}
	w.after(lasts, func() {
		r.inc, r.m, r.index, r.draining = w.incarnation(), state.New(), 0, 0
		r.make(nil)
		r.down--
		w.elect(r)
		w.operate()
	})
	w.upsetting()
}

// member reports whether a region is a member under its present incarnation.
func (w *world) member(r *region) bool {
	for _, v := range w.newest.pb.GetVoters() {
		if v.GetId() == w.sites[r.at].id {
			return register.Incarnation(v.GetIncarnation()) == r.inc
		}
	}
	return false
}
