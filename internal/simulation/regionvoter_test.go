package simulation

import (
	"time"

	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// sameVersion reports whether a voter and a message are under one
// configuration; if not, whoever is behind learns the newer one, and the
// message is used up.
func (w *world) sameVersion(have *configuration, m *message, at int, teach func(*configuration)) bool {
	if have == m.conf {
		return true
	}
	theirs, ld := m.conf, m.ld
	w.done(m)
	back, forth := w.link(at, ld.region.at), w.link(ld.region.at, at)
	switch {
	case back.downs > 0, have == nil:
	case have.version > theirs.version:
		w.after(back.base+back.extra, func() { w.teachRegion(ld, have) })
	case forth.downs == 0:
		w.after(back.base+back.extra+forth.base+forth.extra, func() { teach(theirs) })
	}
	return false
}

// teachRegion has a region store a newer configuration.
func (w *world) teachRegion(ld *leader, c *configuration) {
	if ld.leads() && (ld.conf == nil || ld.conf.version < c.version) {
		w.propose(ld, configure(c.pb), func(*pb.CommandResult) {})
	}
}

func configure(c *pb.ClusterConfiguration) *pb.Command {
	return &pb.Command{Kind: &pb.Command_Configure{Configure: &pb.ConfigureCommand{Configuration: c}}}
}

// teachWitness has a witness store a newer configuration, as it does itself.
func (w *world) teachWitness(v *witness, c *configuration) {
	if v.down || v.busy > w.now {
		return
	}
	next, stored, err := v.voter().Learn(&pb.Voter{Id: v.id, Incarnation: uint64(v.inc)}, c.pb)
	if err != nil || !stored {
		return
	}
	conf := w.learn(next.Decided)
	w.witnessWrites(v, func() { v.configure(w, conf); w.upsetting() }, func() {})
}

// answers says which leader of a region a message reaches: its own always the
// sender itself [H2]; others the current one, or now and then a deposed one.
func (w *world) answers(r *region, m *message) *leader {
	if m.ld.region == r {
		return m.ld
	}
	if len(r.stale) > 0 && w.chance(15) {
		return r.stale[w.rnd.IntN(len(r.stale))]
	}
	return r.cur
}

// atRegion is a vote message's arrival at a region, as package region/vote
// judges it.
func (w *world) atRegion(r *region, m *message) {
	ld := w.answers(r, m)
	if ld == nil || ld.gone || r.down > 0 && ld.region.cur == ld && m.ld != ld {
		w.count.lost++
		w.done(m)
		return
	}
	if ld.frozen > w.now {
		w.at(ld.frozen, event{kind: evMessage, msg: m})
		return
	}
	have := ld.conf
	if !w.sameVersion(have, m, r.at, func(c *configuration) { w.teachRegion(ld, c) }) {
		return
	}
	if m.kind == msgPrepare {
		w.regionPrepare(ld, m)
	} else {
		w.regionAccept(ld, m)
	}
}

func (ld *leader) verdict(w *world, r *register.Register) register.Verdict {
	owner := r.Value.Owner.Name
	if owner == "" || owner == ld.region.name {
		return register.VerdictUnknown
	}
	return ld.region.heard.verdict(w, owner)
}

// stamp is the version that goes into commands.
func (ld *leader) stamp() uint64 {
	if v := ld.conf.version; v > 1 {
		return v
	}
	return 0
}

func (w *world) regionPrepare(ld *leader, m *message) {
	now := ld.clock.read(w.now)
	in := register.PrepareInput{Candidate: m.ld.self(), Ballot: m.ballot, Dry: m.dry}
	a := w.reply(m, ld.region.inc)
	a.prepared = a.prepared[:0]
	var promises []*pb.PromiseItem
	var pending []int // places among the answers
	for k, name := range m.partitions {
		i := partitionOf(name)
		r := &ld.regs[i]
		in.Verdict = ld.verdict(w, r)
		d := r.Prepare(now, in)
		if d.Action == register.Write {
			r.Pending = true
			promises = append(promises, &pb.PromiseItem{Partition: name, Guard: d.Change.Guard.Proto(), Ballot: m.ballot.Proto()})
			pending = append(pending, k)
		}
		a.prepared = append(a.prepared, campaign.PrepareAnswer{Partition: name, Rule: d.Rule, Record: r.Record, Remaining: r.Remaining(now), Verdict: in.Verdict})
	}
	if len(promises) == 0 {
		w.answer(m, a)
		return
	}
	cmd := &pb.Command{Term: ld.term, Kind: &pb.Command_Promise{Promise: &pb.PromiseCommand{Items: promises, ConfigVersion: ld.stamp()}}}
	conf, names := ld.conf, m.partitions
	w.propose(ld, cmd, func(res *pb.CommandResult) {
		for _, k := range pending {
			ld.regs[partitionOf(names[k])].Pending = false
		}
		if res.GetError() != nil || ld.conf != conf {
			return
		}
		now := ld.clock.read(w.now)
		for n, k := range pending {
			item, p := res.GetItems().GetItems()[n], &a.prepared[k]
			r := ld.regs[partitionOf(names[k])]
			r.Record = register.RecordOf(item.GetRegister())
			p.Record, p.Remaining = r.Record, r.Remaining(now)
			if !item.GetDone() {
				p.Rule = register.RuleRetry
			}
		}
		w.answer(m, a)
	})
}

func (w *world) regionAccept(ld *leader, m *message) {
	a := w.reply(m, ld.region.inc)
	a.accepted, a.renewals = a.accepted[:0], a.renewals[:0]
	var accepts []*pb.AcceptedItem
	var writing []int
	for k := range m.items {
		it := &m.items[k]
		r := &ld.regs[partitionOf(it.Partition)]
		d := r.Accept(it.Ballot, it.Value)
		switch d.Action {
		case register.Renew:
			a.renewals = append(a.renewals, int32(k))
		case register.WriteAlarm:
			w.fail("one ballot with two values at region %s: %s", ld.region.name, d.Change.Alarm)
		case register.Write:
			accepts = append(accepts, &pb.AcceptedItem{Partition: it.Partition, Guard: d.Change.Guard.Proto(), Ballot: it.Ballot.Proto(), Value: it.Value.Proto()})
			writing = append(writing, k)
		}
		a.accepted = append(a.accepted, campaign.AcceptAnswer{Partition: it.Partition, Rule: d.Rule, Record: r.Record})
	}
	a.items = m.items
	if a != m {
		w.done(m)
	}
	if len(accepts) == 0 {
		w.renew(ld, a)
		return
	}
	cmd := &pb.Command{Term: ld.term, Kind: &pb.Command_Accepted{Accepted: &pb.AcceptedCommand{Items: accepts, ConfigVersion: ld.stamp()}}}
	w.propose(ld, cmd, func(res *pb.CommandResult) {
		if res.GetError() != nil {
			return
		}
		for n, k := range writing {
			item, p := res.GetItems().GetItems()[n], &a.accepted[k]
			p.Record = register.RecordOf(item.GetRegister())
			if !item.GetDone() || p.Record.Accepted != a.items[k].Ballot {
				p.Rule = register.RuleRetry
			}
		}
		w.renew(ld, a)
	})
}

// renew answers what needs no commit, after a leadership check that begins
// now.
func (w *world) renew(ld *leader, a *message) {
	if len(a.renewals) == 0 {
		a.copies = 1
		w.send(a.voter, a.ld.region.at, a)
		return
	}
	a.conf = ld.conf
	w.at(w.now+w.between(500*time.Microsecond, 4*time.Millisecond), event{kind: evCheck, ld: ld, msg: a})
}

// checked is the end of a leadership check.
func (w *world) checked(ld *leader, a *message) {
	if ld.gone || ld.conf != a.conf || ld.region.cur != ld || ld.region.down > 0 {
		w.done(a)
		return
	}
	if ld.frozen > w.now { // it passed, and the frozen process hears of it later
		w.at(ld.frozen, event{kind: evDo, do: func() { w.renewed(ld, a) }})
		return
	}
	if w.late > 0 && w.rnd.IntN(100) < w.late { // as if the goroutine had not been run
		w.after(w.upTo(time.Second), func() { w.renewed(ld, a) })
		return
	}
	w.renewed(ld, a)
}

func (w *world) renewed(ld *leader, a *message) {
	if ld.gone || ld.conf != a.conf || !ld.pulse {
		w.done(a)
		return
	}
	now := ld.clock.read(w.now)
	for _, k := range a.renewals {
		it := &a.items[k]
		r := &ld.regs[partitionOf(it.Partition)]
		p := &a.accepted[k]
		if next, ok := r.Renewed(now, it.Ballot, it.Value); ok {
			*r = next
			p.Rule = register.RuleNone
		} else if p.Rule = r.Accept(it.Ballot, it.Value).Rule; p.Rule == register.RuleNone {
			p.Rule = register.RuleRetry
		}
		p.Record = r.Record
	}
	a.copies = 1
	w.send(a.voter, a.ld.region.at, a)
}
