package simulation

import (
	"slices"
	"time"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/reconfigure"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

func (o *operator) acceptAgain(s *reconfigure.Settling, req *pb.AcceptAgainRequest, then func()) {
	if req == nil {
		then()
		return
	}
	o.every(o.conf.GetVoters(), func(at int, answer func(func())) {
		o.w.acceptAgain(o, at, req, func(a *pb.AcceptAgainResponse) { answer(func() { s.Accepted(a) }) })
	}, func() bool { return len(s.Open()) == 0 }, then)
}

func (o *operator) prepareAgain(s *reconfigure.Settling, req *pb.PrepareAgainRequest, then func()) {
	if req == nil {
		then()
		return
	}
	o.every(o.conf.GetVoters(), func(at int, answer func(func())) {
		o.w.prepareAgain(o, at, req, func(a *pb.PrepareAgainResponse) { answer(func() { s.Promised(a) }) })
	}, nil, then)
}

// every asks all voters (nil: all sites) at once and goes on when all have
// answered, or enough did and a moment has passed, or a second has.
func (o *operator) every(voters []*pb.Voter, ask func(at int, answer func(take func())), enough func() bool, then func()) {
	w := o.w
	var sites []int
	if voters == nil {
		for _, s := range w.sites {
			sites = append(sites, s.at)
		}
	}
	for _, v := range voters {
		if at := w.newest.site[v.GetId()]; !slices.Contains(sites, at) {
			sites = append(sites, at)
		}
	}
	over, left := false, len(sites)
	end := func() {
		if !over {
			over = true
			then()
		}
	}
	for _, at := range sites {
		there, ok := o.way(o.at, at)
		if !ok {
			continue
		}
		w.after(there, func() {
			ask(at, func(take func()) {
				back, ok := o.way(at, o.at)
				if !ok {
					return
				}
				w.after(back, func() {
					if over {
						return
					}
					take()
					if left--; left == 0 {
						end()
					} else if enough != nil && enough() {
						w.after(200*time.Millisecond, end)
					}
				})
			})
		})
	}
	w.after(time.Second+2*w.roundTrip(), end)
}

// way is how long a message takes, and whether it arrives.
func (o *operator) way(from, to int) (time.Duration, bool) {
	if from == to {
		return 0, true
	}
	l := o.w.link(from, to)
	return l.base + l.extra + o.w.upTo(l.jitter+l.noise), l.downs == 0 && !o.w.chance(l.loss)
}

// witnessAt returns the witness at a site if it answers now; busy ones do not.
func (w *world) witnessAt(at int) *witness {
	v := w.sites[at].witness
	if v == nil || v.down || v.frozen > w.now || v.busy > w.now {
		return nil
	}
	return v
}

// leaderAt returns the leader of the region at a site if it answers now.
func (w *world) leaderAt(at int) *leader {
	r := w.sites[at].region
	if r == nil || r.cur == nil || r.cur.gone || r.cur.frozen > w.now || !r.works() {
		return nil
	}
	return r.cur
}

func (v *witness) pb() *pb.Voter { return &pb.Voter{Id: v.id, Incarnation: uint64(v.inc)} }

func (ld *leader) pb() *pb.Voter {
	return &pb.Voter{Id: config.RegionVoter(ld.region.name), Incarnation: uint64(ld.region.inc)}
}

// under reports whether a voter answers under a version; the operator learns
// from one that is ahead.
func (o *operator) under(conf *configuration, cluster string, version uint64) bool {
	if conf == nil {
		return false
	}
	err := config.CheckVersion(conf.pb, cluster, register.Era{}, version)
	if err != nil {
		o.newer = newerOf(o.newer, conf.pb)
	}
	return err == nil
}

func (o *operator) describe(at int, answer func(*pb.DescribeVoterResponse)) {
	d := &pb.DescribeVoterResponse{}
	var regs []register.Register
	if v := o.w.witnessAt(at); v != nil {
		regs = v.regs
		if v.conf != nil {
			d.Configuration = v.conf.pb
		}
	} else if ld := o.w.leaderAt(at); ld != nil {
		regs, d.Configuration = ld.regs, ld.region.m.View().Configuration()
	} else {
		return
	}
	for i, r := range regs {
		d.Registers = append(d.Registers, &pb.RegisterStatus{Partition: o.w.names[i], Register: r.Proto()})
	}
	answer(d)
}

func (o *operator) configure(at int, conf *pb.ClusterConfiguration, answer func(*pb.Voter)) {
	w := o.w
	if v := w.witnessAt(at); v != nil {
		next, stored, err := v.voter().Learn(v.pb(), conf)
		switch {
		case err != nil:
		case !stored:
			o.newer = newerOf(o.newer, v.conf.pb)
			answer(v.pb())
		default:
			w.witnessWrites(v, func() { v.configure(w, w.learn(next.Decided)); w.upsetting() }, func() { answer(v.pb()) })
		}
	} else if ld := w.leaderAt(at); ld != nil {
		w.propose(ld, configure(conf), func(res *pb.CommandResult) {
			if res.GetError() == nil {
				o.newer = newerOf(o.newer, ld.region.m.View().Configuration())
				answer(ld.pb())
			}
		})
	}
}

func (w *world) prepareConfig(o *operator, at int, req *pb.PrepareConfigRequest, answer func(*pb.PrepareConfigResponse)) {
	if v := w.witnessAt(at); v != nil && o.under(v.conf, req.GetClusterId(), req.GetVersion()) {
		next, promised, err := v.voter().Prepare(req.GetClusterId(), register.Era{}, req.GetVersion(), config.BallotOf(req.GetBallot()))
		if err == nil {
			w.witnessWrites(v, func() { v.confReg = next }, func() {
				answer(&pb.PrepareConfigResponse{Voter: v.pb(), Promised: promised, Register: next.Proto()})
			})
		}
	} else if ld := w.leaderAt(at); ld != nil && o.under(ld.conf, req.GetClusterId(), req.GetVersion()) {
		w.propose(ld, &pb.Command{Kind: &pb.Command_ConfigPromise{ConfigPromise: &pb.ConfigPromiseCommand{
			ClusterId: req.GetClusterId(), Version: req.GetVersion(), Ballot: req.GetBallot(),
		}}}, func(res *pb.CommandResult) {
			if c := res.GetConfigVote(); c != nil {
				answer(&pb.PrepareConfigResponse{Voter: ld.pb(), Promised: c.GetDone(), Register: c.GetRegister()})
			}
		})
	}
}

func (w *world) acceptConfig(o *operator, at int, req *pb.AcceptConfigRequest, answer func(*pb.AcceptConfigResponse)) {
	if v := w.witnessAt(at); v != nil && o.under(v.conf, req.GetClusterId(), req.GetVersion()) {
		next, accepted, err := v.voter().Accept(req.GetClusterId(), register.Era{}, req.GetVersion(), config.BallotOf(req.GetBallot()), req.GetProposed())
		if err == nil {
			w.witnessWrites(v, func() { v.confReg = next }, func() {
				answer(&pb.AcceptConfigResponse{Voter: v.pb(), Accepted: accepted, Register: next.Proto()})
			})
		}
	} else if ld := w.leaderAt(at); ld != nil && o.under(ld.conf, req.GetClusterId(), req.GetVersion()) {
		w.propose(ld, &pb.Command{Kind: &pb.Command_ConfigAccept{ConfigAccept: &pb.ConfigAcceptCommand{
			ClusterId: req.GetClusterId(), Version: req.GetVersion(), Ballot: req.GetBallot(), Proposed: req.GetProposed(),
		}}}, func(res *pb.CommandResult) {
			if c := res.GetConfigVote(); c != nil {
				answer(&pb.AcceptConfigResponse{Voter: ld.pb(), Accepted: c.GetDone(), Register: c.GetRegister()})
			}
		})
	}
}

// acceptAgain and prepareAgain go the way of a proposer's messages, so that
// what holds there holds here: one turn at a witness, commits and checks at a
// region.
func (w *world) acceptAgain(o *operator, at int, req *pb.AcceptAgainRequest, answer func(*pb.AcceptAgainResponse)) {
	resp := &pb.AcceptAgainResponse{}
	tell := func(name string, rule register.Rule, r register.Register) {
		resp.Answers = append(resp.Answers, register.AcceptAnswerOf(name, r, 0, rule))
	}
	if v := w.witnessAt(at); v != nil && o.under(v.conf, req.GetClusterId(), req.GetVersion()) {
		now := v.clock.read(w.now)
		resp.Voter = v.pb()
		var changes []change
		for _, it := range req.GetItems() {
			i := partitionOf(it.GetPartition())
			r := &v.regs[i]
			b, val := register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue())
			d := r.Accept(b, val)
			switch d.Action {
			case register.Renew:
				*r, _ = r.Renewed(now, b, val)
			case register.Write:
				rec, _ := register.Update(r.Record, d.Change)
				changes = append(changes, change{i, rec})
			case register.WriteAlarm:
				w.fail("one ballot with two values at %s: %s", v.id, d.Change.Alarm)
			}
			tell(it.GetPartition(), d.Rule, *r)
		}
		if len(changes) == 0 {
			answer(resp)
			return
		}
		w.witnessChanges(v, changes, func() { answer(resp) })
		return
	}
	ld := w.leaderAt(at)
	if ld == nil || !o.under(ld.conf, req.GetClusterId(), req.GetVersion()) {
		return
	}
	resp.Voter = ld.pb()
	cmd, conf := &pb.AcceptedCommand{ConfigVersion: ld.stamp()}, ld.conf
	var renewals []*pb.AcceptItem
	for _, it := range req.GetItems() {
		r := ld.regs[partitionOf(it.GetPartition())]
		d := r.Accept(register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue()))
		switch d.Action {
		case register.Renew:
			renewals = append(renewals, it)
		case register.Write:
			cmd.Items = append(cmd.Items, &pb.AcceptedItem{Partition: it.GetPartition(), Guard: d.Change.Guard.Proto(), Ballot: it.GetBallot(), Value: it.GetValue()})
		default:
			tell(it.GetPartition(), d.Rule, r)
		}
	}
	renew := func() {
		w.after(w.between(500*time.Microsecond, 4*time.Millisecond), func() { // a leadership check
			if !ld.leads() || ld.region.down > 0 || ld.conf != conf || !ld.pulse || ld.frozen > w.now {
				return
			}
			now := ld.clock.read(w.now)
			for _, it := range renewals {
				r := &ld.regs[partitionOf(it.GetPartition())]
				b, v := register.BallotOf(it.GetBallot()), register.ValueOf(it.GetValue())
				next, ok := r.Renewed(now, b, v)
				rule := register.RuleNone
				if ok {
					*r = next
				} else if rule = r.Accept(b, v).Rule; rule == register.RuleNone {
					rule = register.RuleRetry
				}
				tell(it.GetPartition(), rule, *r)
			}
			answer(resp)
		})
	}
	if len(cmd.Items) == 0 {
		renew()
		return
	}
	w.propose(ld, &pb.Command{Term: ld.term, Kind: &pb.Command_Accepted{Accepted: cmd}}, func(res *pb.CommandResult) {
		if res.GetError() != nil {
			return
		}
		for n, it := range res.GetItems().GetItems() {
			rec := register.RecordOf(it.GetRegister())
			rule := register.RuleNone
			if !it.GetDone() || rec.Accepted != register.BallotOf(cmd.Items[n].GetBallot()) {
				rule = register.RuleRetry
			}
			tell(it.GetPartition(), rule, register.Register{Record: rec})
		}
		renew()
	})
}

func (w *world) prepareAgain(o *operator, at int, req *pb.PrepareAgainRequest, answer func(*pb.PrepareAgainResponse)) {
	b := register.BallotOf(req.GetBallot())
	resp := &pb.PrepareAgainResponse{}
	tell := func(name string, rule register.Rule, rec register.Record) {
		resp.Answers = append(resp.Answers, register.PrepareAnswerOf(name, register.Register{Record: rec}, 0, rule, register.VerdictUnknown))
	}
	if v := w.witnessAt(at); v != nil && o.under(v.conf, req.GetClusterId(), req.GetVersion()) {
		resp.Voter = v.pb()
		var changes []change
		for _, name := range req.GetPartitions() {
			i := partitionOf(name)
			d := v.regs[i].PrepareAgain(b)
			rec := v.regs[i].Record
			if d.Action == register.Write {
				rec, _ = register.Update(rec, d.Change)
				changes = append(changes, change{i, rec})
			}
			tell(name, d.Rule, rec)
		}
		w.witnessChanges(v, changes, func() { answer(resp) })
		return
	}
	ld := w.leaderAt(at)
	if ld == nil || !o.under(ld.conf, req.GetClusterId(), req.GetVersion()) {
		return
	}
	resp.Voter = ld.pb()
	cmd := &pb.PromiseCommand{ConfigVersion: ld.stamp()}
	for _, name := range req.GetPartitions() {
		r := &ld.regs[partitionOf(name)]
		d := r.PrepareAgain(b)
		if d.Action != register.Write {
			tell(name, d.Rule, r.Record)
			continue
		}
		r.Pending = true
		cmd.Items = append(cmd.Items, &pb.PromiseItem{Partition: name, Guard: d.Change.Guard.Proto(), Ballot: req.GetBallot()})
	}
	if len(cmd.Items) == 0 {
		answer(resp)
		return
	}
	w.propose(ld, &pb.Command{Term: ld.term, Kind: &pb.Command_Promise{Promise: cmd}}, func(res *pb.CommandResult) {
		for _, it := range cmd.Items {
			ld.regs[partitionOf(it.GetPartition())].Pending = false
		}
		if res.GetError() != nil {
			return
		}
		for _, it := range res.GetItems().GetItems() {
			rule := register.RuleNone
			if !it.GetDone() {
				rule = register.RuleRetry
			}
			tell(it.GetPartition(), rule, register.RecordOf(it.GetRegister()))
		}
		answer(resp)
	})
}
