package simulation

import (
	"fmt"
	"slices"
	"time"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/reconfigure"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// operator is one run of a command that changes the configuration, as package
// client/admin takes its steps. It sits at a site and shares its links. It may
// die at any point; another run goes on from what the voters have.
type operator struct {
	w        *world
	at       int
	proposer string
	goal     reconfigure.Goal
	above    uint64
	conf     *pb.ClusterConfiguration
	newer    *pb.ClusterConfiguration
	tries    int
}

// maxWitnesses bounds those that a world ever has, replaced ones included.
const maxWitnesses = 12

// operate begins a change of the configuration: the replacement of a voter that
// was wiped, if there is one, else one of the others.
func (w *world) operate() {
	if w.changing == 2 { // two at once may compete
		return
	}
	w.changing++
	o := &operator{w: w, at: w.rnd.IntN(len(w.sites)), proposer: fmt.Sprintf("run-%d", w.incarnation())}
	o.goal = o.choose()
	w.after(0, o.begin)
}

// choose picks a goal. It is called with a fixed choice each time a step is
// taken, so it depends on nothing that changes.
func (o *operator) choose() reconfigure.Goal {
	w := o.w
	members := w.newest.pb
	for _, v := range w.witnesses {
		if have := config.VoterIncarnation(members, v.id); have != 0 && have != uint64(v.inc) {
			return reconfigure.Replace(v.id, &pb.Voter{Id: v.id, Incarnation: uint64(v.inc)})
		}
	}
	for _, r := range w.regions {
		if !w.member(r) {
			id := config.RegionVoter(r.name)
			return reconfigure.Replace(id, &pb.Voter{Id: id, Incarnation: uint64(r.inc)})
		}
	}
	var in []*witness
	for _, v := range w.witnesses {
		if config.VoterIncarnation(members, v.id) == uint64(v.inc) {
			in = append(in, v)
		}
	}
	fresh := func() *pb.Voter {
		v := w.addWitness(fmt.Sprintf("w%d", len(w.witnesses)+1))
		for _, c := range w.confs { // sites are looked up by configuration
			c.site[v.id] = v.at
		}
		return &pb.Voter{Id: v.id, Incarnation: uint64(v.inc)}
	}
	switch n := w.rnd.IntN(4); {
	case n == 0 && len(w.witnesses) < maxWitnesses && len(in) > 0:
		return reconfigure.Replace(in[w.rnd.IntN(len(in))].id, fresh())
	case n == 1 && len(w.witnesses) < maxWitnesses && len(in) < 5:
		return reconfigure.Add(fresh())
	case n == 2 && len(in) > 2:
		return reconfigure.Remove(in[w.rnd.IntN(len(in))].id)
	}
	d := []time.Duration{w.d, w.d / 2, 2 * w.d}[w.rnd.IntN(3)]
	d = max(d, time.Second)
	return func(c *pb.ClusterConfiguration) (*reconfigure.Step, error) {
		if c.GetDNs() == int64(d) {
			return nil, nil
		}
		next := config.Next(c)
		next.DNs = int64(d)
		return &reconfigure.Step{Next: next, What: fmt.Sprintf("D %v", d)}, nil
	}
}

func (o *operator) end() {
	o.w.changing--
	o.w.upsetting()
}

// again begins anew after a while, or the operator's machine dies.
func (o *operator) again() {
	w := o.w
	if o.tries++; w.chance(10) || o.tries > 200 {
		w.note("the operator's machine dies")
		w.after(w.upTo(4*w.d), func() { o.end(); w.operate() })
		return
	}
	w.after(w.between(150*time.Millisecond, 450*time.Millisecond), o.begin)
}

// begin finds the configuration in force and takes the next step from there.
func (o *operator) begin() {
	conf := o.newer
	o.every(nil, func(at int, answer func(func())) {
		o.describe(at, func(d *pb.DescribeVoterResponse) { answer(func() { conf = newerOf(conf, d.GetConfiguration()) }) })
	}, nil, func() {
		if conf == nil {
			o.again()
			return
		}
		o.conf = conf
		step, err := o.goal(conf)
		if err != nil {
			o.w.note("the operator gives up: %v", err)
			o.end()
			return
		}
		o.settle(func() {
			if step == nil {
				o.w.note("the operator is done: configuration %d", conf.GetVersion())
				o.end()
				return
			}
			if err := config.CheckChange(conf, step.Next); err != nil {
				o.w.note("the operator gives up: %v", err)
				o.end()
				return
			}
			o.decide(step)
		})
	})
}

func newerOf(a, b *pb.ClusterConfiguration) *pb.ClusterConfiguration {
	if b.GetVersion() > a.GetVersion() {
		return b
	}
	return a
}

// settle is what must be before the next version is decided [H8 H10].
func (o *operator) settle(then func()) {
	if o.conf.GetVersion() == 1 {
		then()
		return
	}
	o.store(o.conf, func() {
		s := reconfigure.NewSettling(o.conf, uint64(o.w.incarnation()))
		o.every(o.conf.GetVoters(), func(at int, answer func(func())) {
			o.describe(at, func(d *pb.DescribeVoterResponse) { answer(func() { s.Found(d) }) })
		}, nil, func() {
			o.acceptAgain(s, s.Resend(), func() {
				if len(s.Open()) == 0 {
					o.settled(s, then)
					return
				}
				o.prepareAgain(s, s.Prepare(), func() {
					o.acceptAgain(s, s.Accept(), func() { o.settled(s, then) })
				})
			})
		})
	})
}

func (o *operator) settled(s *reconfigure.Settling, then func()) {
	switch {
	case o.newer.GetVersion() > o.conf.GetVersion():
		o.begin()
	case len(s.Open()) > 0:
		o.again()
	default:
		o.w.count.settled++
		then()
	}
}

func (o *operator) store(conf *pb.ClusterConfiguration, then func()) {
	var by []*pb.Voter
	voters := slices.Concat(conf.GetVoters(), conf.GetPreviousVoters())
	o.every(voters, func(at int, answer func(func())) {
		o.configure(at, conf, func(v *pb.Voter) { answer(func() { by = append(by, v) }) })
	}, func() bool { return reconfigure.Stored(conf, by) }, func() {
		switch {
		case o.newer.GetVersion() > conf.GetVersion():
			o.begin()
		case reconfigure.Stored(conf, by):
			then()
		default:
			o.again()
		}
	})
}

func (o *operator) decide(step *reconfigure.Step) {
	w := o.w
	d := reconfigure.NewDecision(o.conf, config.Ballot{Round: o.above + 1, Proposer: o.proposer}, step.Next)
	need := config.QuorumOf(o.conf).Voters
	o.every(o.conf.GetVoters(), func(at int, answer func(func())) {
		w.prepareConfig(o, at, d.Prepare(), func(a *pb.PrepareConfigResponse) { answer(func() { d.Promised(a) }) })
	}, func() bool { return d.Promising() >= need }, func() {
		finish := func() {
			o.above = d.Above()
			decided, ok := d.Decided()
			switch {
			case ok:
				w.count.configurations++
				conf := w.learn(decided)
				w.note("configuration %d is decided: %v", conf.version, config.Diff(o.conf, decided))
				o.newer = decided
				if w.chance(10) {
					o.again()
					return
				}
				o.store(decided, o.begin)
			case o.newer.GetVersion() > o.conf.GetVersion():
				o.begin()
			default:
				o.again()
			}
		}
		req := d.Accept()
		if req == nil {
			finish()
			return
		}
		o.every(o.conf.GetVoters(), func(at int, answer func(func())) {
			w.acceptConfig(o, at, req, func(a *pb.AcceptConfigResponse) { answer(func() { d.Accepted(a) }) })
		}, func() bool { return d.Accepting() >= need }, finish)
	})
}
