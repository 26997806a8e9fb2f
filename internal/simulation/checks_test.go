package simulation

import (
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/state"
)

// held is a leader's belief in a head lease, begun or prolonged: I1 and I2.
func (w *world) held(ld *leader, e campaign.Held) {
	i := partitionOf(e.Partition)
	p := w.parts[i]
	until := ld.clock.real(e.Until)
	for _, h := range p.holds {
		switch {
		case h.ld == ld || h.until <= w.now || h.ld.lies > w.now || ld.lies > w.now:
		case h.ld.region != ld.region:
			w.fail("I1: region %s (epoch %d, for %v more) and region %s (epoch %d) hold %s at once",
				h.ld.region.name, h.epoch, h.until-w.now, ld.region.name, e.Epoch, e.Partition)
		case h.epoch != e.Epoch:
			w.fail("I1: two leaders of region %s hold epochs %d and %d of %s", ld.region.name, h.epoch, e.Epoch, e.Partition)
		}
	}
	switch {
	case e.Epoch < p.lastEpoch || e.Epoch == p.lastEpoch && p.lastOwner != ld.region.name:
		if ld.lies <= w.now {
			w.fail("I2: region %s holds epoch %d of %s after epoch %d of region %s", ld.region.name, e.Epoch, e.Partition, p.lastEpoch, p.lastOwner)
		}
	case ld.region.dropped[i] >= e.Epoch:
		w.fail("H6: region %s holds epoch %d of %s after its Drop", ld.region.name, e.Epoch, e.Partition)
	}
	h := ld.holds[i]
	if h == nil {
		h = &hold{ld: ld}
		if !w.owned(i) && p.lastOwner != "" {
			p.unowned = max(p.unowned, w.now-p.lost)
		}
		ld.holds[i] = h
		p.holds = append(p.holds, h)
		switch {
		case e.Epoch > p.lastEpoch:
			w.count.promotions++
			p.promoted = w.now
			w.note("%s holds %s, epoch %d", ld.region.name, e.Partition, e.Epoch)
		default:
			w.count.resumes++
			w.note("%s resumes %s, epoch %d", ld.region.name, e.Partition, e.Epoch)
		}
	}
	h.epoch, h.until = e.Epoch, until
	if most := &ld.region.heldUntil[i]; most.epoch != e.Epoch || most.until < until {
		most.epoch, most.until = e.Epoch, until
	}
	p.lastEpoch, p.lastOwner = e.Epoch, ld.region.name
	if ld.lessor != nil {
		ld.lessor.HeadLease(ld.clock.read(w.now), e.Partition, e.Epoch, e.Until)
		w.lessorOut(ld)
	}
}

func (w *world) lapsed(ld *leader, e campaign.Lapsed) {
	w.count.lapses++
	w.note("%s lapses %s, epoch %d", ld.region.name, e.Partition, e.Epoch)
	w.letGo(ld, partitionOf(e.Partition))
}

func (w *world) letGo(ld *leader, i int) {
	h := ld.holds[i]
	if h == nil {
		return
	}
	ld.holds[i] = nil
	p := w.parts[i]
	for k := range p.holds {
		if p.holds[k] == h {
			p.holds = append(p.holds[:k], p.holds[k+1:]...)
			break
		}
	}
	p.lost = max(p.lost, min(w.now, h.until))
	if ld.lessor != nil && !ld.gone {
		ld.lessor.Lapsed(ld.clock.read(w.now), w.names[i], h.epoch)
		w.lessorOut(ld)
	}
}

// committed looks at what a command did.
func (w *world) committed(r *region, p *proposal, res *pb.CommandResult, events []state.Event) {
	for _, e := range events {
		if c, ok := e.(state.SessionClosed); ok {
			w.sessionClosed(c.ID, c.Reason)
		}
		w.watchDrains(r, e)
		d, ok := e.(state.PartitionDropped)
		if !ok {
			continue
		}
		w.count.drops++
		i := partitionOf(d.Partition)
		for _, h := range w.parts[i].holds {
			if h.ld.region == r && h.epoch == d.Epoch && h.until > w.now && h.ld.lies <= w.now {
				w.fail("H6: region %s drops epoch %d of %s while a leader of it holds", r.name, d.Epoch, d.Partition)
			}
		}
		r.dropped[i] = max(r.dropped[i], d.Epoch)
		w.note("%s drops %s, epoch %d", r.name, d.Partition, d.Epoch)
	}
	if p.cmd.GetReserveBallot() != nil && res.GetError() == nil {
		b := register.BallotOf(res.GetReserved().GetBallot())
		if b.Round > maxRound {
			w.fail("ballots run away: round %d", b.Round)
		}
	}
	if e := fence.Epoch(p.cmd.GetAdopt().GetEpoch()); e > 0 && res.GetError() == nil {
		w.note("%s adopts %s, epoch %d", r.name, p.cmd.GetAdopt().GetPartition(), e)
	}
}

// disturbsNobody: an owner's Prepare, for a release, passes V2 and V3 of every
// voter, and so does the one of the successor that a release names.
func disturbsNobody(ld *leader, partition string) bool {
	view := ld.region.m.View()
	if ld.view != nil {
		view = *ld.view
	}
	p, _ := view.Partition(partition)
	v, b := p.Register.Value, p.Register.Accepted
	return v.Owner.Name == ld.region.name || v.Released() && (v.Successor == ld.region.name || b.Region == ld.region.name)
}

// maxRound is more ballots than a world needs.
const maxRound = 1 << 20

// checkEffects looks at what a proposer sends.
func (w *world) checkEffects(ld *leader, effects []campaign.Effect) {
	sent := 0
	for _, e := range effects {
		switch e := e.(type) {
		case campaign.SendPrepare:
			sent++
			if e.Dry {
				for _, name := range e.Partitions {
					ld.dry[partitionOf(name)] = 0
				}
				if e.Round != ld.asked {
					ld.asked = e.Round
					w.checkAsks(ld, e.Partitions)
				}
				continue
			}
			for _, name := range e.Partitions {
				if !w.quorum(ld.conf, ld.dry[partitionOf(name)]) && !disturbsNobody(ld, name) {
					w.fail("F31: region %s prepares %s, and its dry Prepare had no majority", ld.region.name, name)
				}
			}
		case campaign.SendAccept:
			sent++
		}
	}
	// What is due at one time goes out as one message per voter: at most a
	// renewal, a dry Prepare, and a Prepare or an Accept of what was just won.
	if most := 4 * len(ld.conf.voters); sent > most {
		w.fail("F38: region %s sends %d messages at once to %d voters", ld.region.name, sent, len(ld.conf.voters))
	}
}

// maxAsks is how often a partition is asked for within D, at most: the back-off
// begins at D/32 and doubles three times, and news begin it anew.
const maxAsks = 60

// asks counts a partition's dry Prepares since an instant.
type asks struct {
	since time.Duration
	n     int
}

func (w *world) checkAsks(ld *leader, partitions []string) {
	for _, name := range partitions {
		a := &ld.asks[partitionOf(name)]
		if w.now-a.since > time.Duration(ld.conf.pb.GetDNs()) {
			*a = asks{since: w.now}
		}
		if a.n++; a.n > maxAsks {
			w.fail("F39: region %s has asked for %s %d times in %v", ld.region.name, name, a.n, w.now-a.since)
		}
	}
}

// checkDry notes who would promise.
func (w *world) checkDry(ld *leader, m *message) {
	if !m.dry {
		return
	}
	for k := range m.prepared {
		if a := &m.prepared[k]; a.Rule == register.RuleNone {
			ld.dry[partitionOf(a.Partition)] |= 1 << m.voter
		}
	}
}

// quorum reports whether sites are a majority of a configuration's voters.
func (w *world) quorum(c *configuration, sites uint64) bool {
	n := 0
	for _, v := range c.voters {
		if sites>>c.site[v.ID]&1 == 1 {
			n++
		}
	}
	return n > len(c.voters)/2
}

// upsetting says that something that I7 depends on has changed: from now on,
// if nothing else does, each partition that can have an owner must have one
// when the time that I7 gives is over.
func (w *world) upsetting() {
	w.generation++
	w.at(w.now+w.bound(), event{kind: evHolders, gen: w.generation})
}

// bound is what I7 promises of an owner that is heard, cannot renew and is in
// the way, with one restart at a needed voter; and the clocks' rates, and the
// places in the preference list. TestScenarios holds each case to its own.
func (w *world) bound() time.Duration {
	d := time.Duration(w.newest.pb.GetDNs())
	b := 5*d + 4*w.roundTrip() + time.Second + d/4*time.Duration(len(w.regions)-1)
	return b + b/50
}

// roundTrip is the longest between two sites, without faults.
func (w *world) roundTrip() time.Duration {
	longest := time.Duration(0)
	for i := range w.links {
		longest = max(longest, w.links[i].base+w.links[i].jitter)
	}
	return 2 * longest
}

// checkOwners is I7: nothing has changed for as long as it takes.
func (w *world) checkOwners(generation uint32) {
	if generation != w.generation || w.changing > 0 {
		return
	}
	for i, p := range w.parts {
		if w.owned(i) {
			continue
		}
		if c := w.able(i); c != "" {
			for _, r := range w.regions {
				if ld := r.cur; ld != nil && !ld.gone && ld.l != nil {
					w.note("%s: %s", r.name, ld.l.Explain(ld.clock.read(w.now))[i].Text)
				}
			}
			w.fail("I7: %s has no owner for %v, although region %s is connected to a majority and nothing has changed for %v",
				p.name, w.now-p.lost, c, w.bound())
		}
	}
	w.count.i7++
}

func (w *world) owned(i int) bool {
	for _, h := range w.parts[i].holds {
		if h.until > w.now {
			return true
		}
	}
	return false
}

// able names a region that can own the partition: it leads itself, prefers to,
// and is connected, by links without faults, to a majority.
func (w *world) able(i int) string {
	c := w.newest
	for _, name := range c.pb.GetPartitions()[i].GetPrefer() {
		r := w.regions[name[0]-'a']
		ld := r.cur
		if ld == nil || ld.gone || ld.l == nil || ld.frozen > w.now || !r.works() || ld.conf != c {
			continue
		}
		all, witnesses, ws := 0, 0, 0
		for _, v := range c.voters {
			if v.Witness {
				ws++
			}
			at := c.site[v.ID]
			if at != r.at && (!w.link(r.at, at).clean() || !w.link(at, r.at).clean()) || !w.voterWorks(c, v, at) {
				continue
			}
			all++
			if config.IsWitness(v.ID) {
				witnesses++
			}
		}
		if all > len(c.voters)/2 && (ws == 0 || witnesses > ws/2) {
			return name
		}
	}
	return ""
}

func (w *world) voterWorks(c *configuration, v campaign.Voter, at int) bool {
	s := w.sites[at]
	if r := s.region; r != nil {
		ld := r.cur
		return r.inc == v.Incarnation && ld != nil && !ld.gone && r.works() && ld.frozen <= w.now && ld.conf == c && len(r.stale) == 0
	}
	n := s.witness
	return n.inc == v.Incarnation && !n.down && n.conf == c && n.frozen <= w.now && n.slow == 0
}
