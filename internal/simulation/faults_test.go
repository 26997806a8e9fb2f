package simulation

import (
	"time"

	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// upset is the next fault of a world, and when the one after it comes: in
// bursts, with quiet times between in which I7 must hold.
func (w *world) upset() {
	if w.bad != "" {
		return
	}
	w.count.faults++
	w.fault()
	gap := w.upTo(4 * w.d)
	if w.chance(35) {
		gap = w.between(8*w.d, 16*w.d)
	}
	w.after(gap, w.upset)
}

// fault begins one fault; each ends by itself.
func (w *world) fault() {
	lasts := w.upTo(6 * w.d)
	if w.chance(20) {
		lasts = w.upTo(w.d / 2)
	}
	a, b := w.two()
	r := w.regions[w.rnd.IntN(len(w.regions))]
	var v *witness
	if n := len(w.witnesses); n > 0 {
		v = w.witnesses[w.rnd.IntN(n)]
	}
	switch n := w.rnd.IntN(30); {
	case n < 3:
		w.note("cut: %s - %s for %v", w.sites[a].id, w.sites[b].id, lasts)
		w.cut(lasts, [2]int{a, b}, [2]int{b, a})
	case n < 5:
		w.note("cut: %s -> %s for %v", w.sites[a].id, w.sites[b].id, lasts)
		w.cut(lasts, [2]int{a, b})
	case n < 6:
		w.note("cut: %s from all for %v", w.sites[a].id, lasts)
		w.cut(lasts, w.around(a, true, true)...)
	case n < 7:
		w.note("cut: %s is heard by nobody for %v", w.sites[a].id, lasts)
		w.cut(lasts, w.around(a, true, false)...)
	case n < 8:
		w.note("cut: %s hears nobody for %v", w.sites[a].id, lasts)
		w.cut(lasts, w.around(a, false, true)...)
	case n < 9:
		w.note("cut: %s sees only a minority for %v", r.name, lasts)
		w.cut(lasts, w.minority(r)...)
	case n < 10:
		w.note("cut: a chain for %v", lasts)
		w.cut(lasts, w.chain()...)
	case n < 11:
		times := 2 + w.rnd.IntN(6)
		w.note("flap: %s - %s, %d times", w.sites[a].id, w.sites[b].id, times)
		w.flap(a, b, times)
	case n < 12:
		w.slowLinks(lasts+w.d, w.upTo(2*time.Second), w.upTo(500*time.Millisecond))
	case n < 13:
		w.lossy(lasts, 5+w.rnd.IntN(60))
	case n < 15 && v != nil:
		w.note("%s: slow for %v", v.id, lasts)
		v.slow = w.upTo(w.d)
		w.upsetting()
		w.after(lasts, func() { v.slow = 0; w.upsetting() })
	case n < 17 && v != nil:
		w.crash(v, w.upTo(lasts))
	case n < 18 && v != nil:
		w.freezeWitness(v, lasts)
	case n < 21:
		w.elect(r)
	case n < 22:
		w.regionDown(r, lasts)
	case n < 23:
		w.hang(r, lasts)
	case n < 25:
		w.freeze(r.cur, lasts)
	case n < 26:
		w.pauseVM(r.cur, lasts)
	case n < 27:
		if w.clients == nil && w.chance(50) { // without a drain it would take leases from under them
			w.release(r)
		} else {
			w.transfer(r)
		}
	case n < 28:
		w.each(r, "a campaign is told to hurry", func(l *campaign.Leader, now instant.Instant, p string) []campaign.Effect { return l.Hurry(now, p) })
	case n < 29:
		w.deceive(lasts)
	default:
		switch {
		case !w.reconfigure:
		case w.chance(20):
			w.wipe(r, lasts)
		default:
			w.operate()
		}
	}
}

// two are two sites that differ.
func (w *world) two() (a, b int) {
	a = w.rnd.IntN(len(w.sites))
	b = w.rnd.IntN(len(w.sites) - 1)
	if b >= a {
		b++
	}
	return a, b
}

// cut takes directed links away for a while.
func (w *world) cut(lasts time.Duration, pairs ...[2]int) {
	for _, p := range pairs {
		l := w.link(p[0], p[1])
		if l.downs == 0 {
			l.since = w.now
		}
		l.downs++
	}
	w.upsetting()
	w.after(lasts, func() {
		for _, p := range pairs {
			w.link(p[0], p[1]).downs--
		}
		w.upsetting()
	})
}

// around are the links of one site: what it says, what it hears.
func (w *world) around(a int, says, hears bool) (pairs [][2]int) {
	for b := range w.sites {
		if b != a && says {
			pairs = append(pairs, [2]int{a, b})
		}
		if b != a && hears {
			pairs = append(pairs, [2]int{b, a})
		}
	}
	return pairs
}

// minority leaves a region with less than half of the others.
func (w *world) minority(r *region) (pairs [][2]int) {
	order := w.rnd.Perm(len(w.sites))
	left := (len(w.sites) - 1) / 2
	for _, b := range order {
		switch {
		case b == r.at:
		case left > 0 && w.chance(50):
			left--
		default:
			pairs = append(pairs, [2]int{r.at, b}, [2]int{b, r.at})
		}
	}
	return pairs
}

// chain leaves each site with its neighbours in some order alone: A - w1 - B.
func (w *world) chain() (pairs [][2]int) {
	order := w.rnd.Perm(len(w.sites))
	for i, a := range order {
		for j, b := range order {
			if i-j > 1 || j-i > 1 {
				pairs = append(pairs, [2]int{a, b})
			}
		}
	}
	return pairs
}

// flap cuts a link again and again, 2 s down and 2 s up.
func (w *world) flap(a, b, times int) {
	if times == 0 {
		return
	}
	w.cut(2*time.Second, [2]int{a, b}, [2]int{b, a})
	w.after(4*time.Second, func() { w.flap(a, b, times-1) })
}

// slowLinks adds delay to every link.
func (w *world) slowLinks(lasts, extra, noise time.Duration) {
	w.note("slow links: %v more, and up to %v, for %v", extra, noise, lasts)
	n := len(w.sites)
	for a := range n {
		for b := range n {
			l := w.link(a, b)
			l.extra, l.noise = extra, noise
		}
	}
	w.upsetting()
	w.after(lasts, func() {
		for a := range n {
			for b := range n {
				l := w.link(a, b)
				l.extra, l.noise = 0, 0
			}
		}
		w.upsetting()
	})
}

func (w *world) lossy(lasts time.Duration, percent int) {
	w.note("lossy links: %d %% for %v", percent, lasts)
	n := len(w.sites)
	set := func(percent int) {
		for a := range n {
			for b := range n {
				w.link(a, b).loss = percent
			}
		}
		w.upsetting()
	}
	set(percent)
	w.after(lasts, func() { set(0) })
}

// crash ends a witness's process; it starts again, at times with an empty disk
// and so as another voter.
func (w *world) crash(v *witness, lasts time.Duration) {
	if v.down {
		return
	}
	wiped := w.reconfigure && w.chance(15)
	w.note("%s: crashes for %v (wiped: %v)", v.id, lasts, wiped)
	v.down = true
	w.upsetting()
	w.after(lasts, func() {
		if wiped {
			v.inc = w.incarnation()
			v.configure(w, nil)
			v.regs = make([]register.Register, w.partitions)
		}
		v.start(w)
		w.upsetting()
		if wiped {
			w.operate()
		}
	})
}

// freezeWitness stops a witness's process; its clock runs on, and it notices.
func (w *world) freezeWitness(v *witness, lasts time.Duration) {
	if v.down || v.frozen > w.now {
		return
	}
	w.note("%s: frozen for %v", v.id, lasts)
	v.frozen = w.now + lasts
	life := v.life
	w.upsetting()
	w.after(lasts+w.upTo(100*time.Millisecond), func() {
		if v.life == life && lasts > time.Second {
			v.heard.resume(w)
			v.restart(w)
		}
		w.upsetting()
	})
}

// regionDown takes a region's quorum away.
func (w *world) regionDown(r *region, lasts time.Duration) {
	w.note("%s: loses its quorum for %v", r.name, lasts)
	r.down++
	w.stall(r)
	// Its leader notices within its lease, unless it is held up.
	if ld := r.cur; ld != nil {
		notices := w.between(100*time.Millisecond, 500*time.Millisecond)
		if w.chance(20) {
			notices = w.upTo(2 * w.d)
		}
		w.after(notices, func() {
			if r.down > 0 && r.cur == ld {
				w.retire(ld)
			}
		})
	}
	w.after(lasts, func() {
		r.down--
		if r.down == 0 {
			w.elect(r)
			w.moves(r)
		}
	})
}

// hang stops the disks of a region's quorum. A leader whose own disk hangs ends
// itself after 1.5 s, and another one leads as soon as the disks move.
func (w *world) hang(r *region, lasts time.Duration) {
	w.note("%s: its disks hang for %v", r.name, lasts)
	r.hung++
	w.stall(r)
	w.after(lasts, func() {
		r.hung--
		if r.hung > 0 || r.down > 0 {
			return
		}
		if lasts > 1500*time.Millisecond {
			w.elect(r)
		}
		w.moves(r)
	})
}

// stall makes the newest pulse stale, if nothing is committed for so long.
func (w *world) stall(r *region) {
	w.upsetting()
	w.after(min(w.d/2, 1500*time.Millisecond), func() {
		if ld := r.cur; !r.works() && ld != nil && !ld.gone {
			w.pulse(ld, false)
		}
	})
}

// moves lets a region commit what waited.
func (w *world) moves(r *region) {
	w.upsetting()
	w.commit(r)
	w.after(10*time.Millisecond, func() {
		if ld := r.cur; r.works() && ld != nil && !ld.gone {
			w.pulse(ld, true)
		}
	})
}

func (w *world) pulse(ld *leader, fresh bool) {
	if ld.pulse == fresh {
		return
	}
	ld.pulse = fresh
	now := ld.clock.read(w.now)
	if ld.l != nil {
		w.perform(ld, ld.l.PulseStale(now, !fresh))
		w.wake(ld)
	}
	if ld.lessor != nil {
		ld.lessor.PulseFresh(now, fresh)
		w.lessorOut(ld)
	}
}

// freeze stops a leader's process; its clock runs on. Its group elects another
// leader, unless it is short.
func (w *world) freeze(ld *leader, lasts time.Duration) {
	if ld == nil || ld.gone || ld.frozen > w.now {
		return
	}
	w.note("%s: the leader's process is frozen for %v", ld.region.name, lasts)
	ld.frozen = w.now + lasts
	w.upsetting()
	w.unfreeze(ld, lasts)
}

// unfreeze is what follows a freeze: an election, and the gap, noticed.
func (w *world) unfreeze(ld *leader, lasts time.Duration) {
	if lasts > 150*time.Millisecond {
		w.after(w.between(150*time.Millisecond, 600*time.Millisecond), func() {
			if ld.leads() && ld.region.works() {
				w.elect(ld.region)
			}
		})
	}
	w.after(lasts+w.upTo(100*time.Millisecond), func() {
		w.upsetting()
		if lasts > time.Second {
			w.gap(ld)
		}
	})
}

// gap is a clock gap, noticed: everything that rests on the clock begins
// anew [F19].
func (w *world) gap(ld *leader) {
	if ld.gone {
		return
	}
	now := ld.clock.read(w.now)
	for i := range ld.regs {
		ld.regs[i].Since = now
	}
	if ld.lessor != nil {
		ld.lessor.ClockGap(now)
		w.lessorOut(ld)
	}
	if ld.l != nil {
		w.giveUp(ld)
	}
}

// pauseVM stops a leader's machine and its clock with it, which rate bounds do
// not cover. From when the gap is noticed on, nothing of before is believed.
func (w *world) pauseVM(ld *leader, lasts time.Duration) {
	if ld == nil || ld.gone || ld.frozen > w.now || w.clients != nil {
		return
	}
	w.note("%s: the leader's machine stands still for %v, and so does its clock", ld.region.name, lasts)
	stood := ld.clock.read(w.now + lasts).Sub(ld.clock.read(w.now))
	ld.frozen = w.now + lasts
	seen := w.now + lasts + w.upTo(100*time.Millisecond)
	ld.clock.origin = ld.clock.origin.Add(-stood)
	ld.lies = seen
	for _, h := range ld.holds {
		if h != nil {
			h.until += lasts
		}
	}
	w.upsetting()
	// Its group elects another one, unless all of its machines stand still.
	if lasts > 150*time.Millisecond && w.chance(50) {
		w.after(w.between(150*time.Millisecond, 600*time.Millisecond), func() {
			if ld.leads() && ld.region.works() {
				w.elect(ld.region)
			}
		})
	}
	w.at(seen, event{kind: evDo, do: func() { w.upsetting(); w.gap(ld) }})
}

// each does something to one partition of a region's leader.
func (w *world) each(r *region, what string, do func(*campaign.Leader, instant.Instant, string) []campaign.Effect) {
	ld := r.cur
	if ld == nil || ld.gone || ld.l == nil || ld.frozen > w.now {
		return
	}
	p := w.names[w.rnd.IntN(len(w.names))]
	w.note("%s: %s of %s", r.name, what, p)
	w.upsetting()
	w.perform(ld, do(ld.l, ld.clock.read(w.now), p))
	w.wake(ld)
}

// release gives a partition away, as a planned transfer does once it is
// drained.
func (w *world) release(r *region) {
	successor := ""
	if w.chance(70) {
		successor = w.regions[w.rnd.IntN(len(w.regions))].name
	}
	if successor == r.name {
		successor = ""
	}
	w.each(r, "release to "+successor, func(l *campaign.Leader, now instant.Instant, p string) []campaign.Effect {
		return l.Release(now, p, successor, "sim")
	})
}

// deceive makes one observer's detector say something wrong for a while:
// whatever it says, it is a hint.
func (w *world) deceive(lasts time.Duration) {
	s := w.sites[w.rnd.IntN(len(w.sites))]
	e := (*ears)(nil)
	if s.witness != nil {
		e = s.witness.heard
	} else {
		e = s.region.heard
	}
	r := w.rnd.IntN(len(e.wrong))
	e.wrong[r] = register.Verdict(1 + w.rnd.IntN(3))
	w.note("%s: its detector says of %s: %v, for %v", s.id, w.regions[r].name, e.wrong[r], lasts)
	w.upsetting()
	w.after(lasts, func() { e.wrong[r] = register.VerdictUnknown; w.upsetting() })
}
