package simulation

import (
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/lessor"
	"github.com/headlease/headlease/region/state"
)

// region is a region's Raft group: what is committed, by the shipped state
// machine, and who leads.
type region struct {
	at   int
	name string
	inc  register.Incarnation

	m           *state.Machine
	index, term uint64
	cur         *leader
	// stale are deposed leaders that have not noticed.
	stale []*leader
	// outstanding are proposals of the current leader whose fate is open, in
	// the order of the log; stalled those that wait for a quorum or its disks.
	outstanding []*proposal
	// down counts faults that keep a quorum from being there, hung those that
	// keep its disks from moving.
	down, hung int
	dropped    []fence.Epoch // by partition; for the checks alone
	// draining are the partitions that drain, a bit each; for the checks alone.
	draining uint64
	// heldUntil is the newest hold of any of its leaders, by partition.
	heldUntil []hold

	// heard is the failure detector, of whoever leads.
	heard *ears
	beats uint64
}

// proposal is a command on its way.
type proposal struct {
	ld   *leader
	cmd  *pb.Command
	done func(*pb.CommandResult)
	over bool
}

// leader is one term of a region's leader: its tables, its proposer, its clock.
type leader struct {
	region *region
	term   uint64
	clock  clock
	l      *campaign.Leader // nil: none yet, or given up
	conf   *configuration
	regs   []register.Register
	lessor *lessor.Lessor
	// checking: a leadership check for the lessor is under way; lessorAt is its
	// timer.
	checking bool
	lessorAt time.Duration
	// view is what a deposed leader had applied.
	view     *state.View
	gone     bool
	frozen   time.Duration
	timer    time.Duration
	commands int
	pulse    bool
	verdicts []register.Verdict
	holds    []*hold // by partition
	// drains are the planned transfers under way, by partition; draining is how
	// many there are.
	drains   []*drain
	draining int
	// lies is real time until which a clock that stood still has not been
	// noticed: what is believed meanwhile, clocks cannot tell.
	lies time.Duration
	// asks are its dry Prepares of late, asked the newest one's round.
	asks  []asks
	asked uint64
	// dry is who said yes to a dry Prepare, by partition; for the checks alone.
	dry []uint64
}

func (ld *leader) self() register.Region {
	return register.Region{Name: ld.region.name, Incarnation: ld.region.inc}
}

func (ld *leader) leads() bool { return !ld.gone && ld.region.cur == ld }

func (w *world) addRegion(name string) {
	r := &region{name: name, inc: w.incarnation(), m: state.New(), dropped: make([]fence.Epoch, w.partitions), heldUntil: make([]hold, w.partitions)}
	w.addSite(&site{id: config.RegionVoter(name), region: r})
	r.at = len(w.sites) - 1
	w.regions = append(w.regions, r)
}

// init is what init does to a region.
func (r *region) init(w *world) { r.make(w.newest.pb) }

// make gives new data of a region its incarnation, and a configuration, if there
// is one.
func (r *region) make(conf *pb.ClusterConfiguration) {
	commands := []*pb.Command{
		{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: r.name, Incarnation: uint64(r.inc)}}},
		{Kind: &pb.Command_RaiseLevel{RaiseLevel: &pb.RaiseLevelCommand{Level: state.MaxLevel}}},
	}
	if conf != nil {
		commands = append(commands, configure(conf))
	}
	for _, cmd := range commands {
		r.index++
		if res, _ := r.m.Apply(r.index, 0, cmd); res.GetError() != nil {
			panic(res.GetError().String())
		}
	}
}

// works reports whether the region can commit.
func (r *region) works() bool { return r.down == 0 && r.hung == 0 }

// elect begins a term of another leader, unless there is no quorum; then it
// begins when there is one.
func (w *world) elect(r *region) {
	if r.down > 0 {
		return
	}
	w.upsetting()
	w.count.elections++
	old := r.cur
	open := r.outstanding
	r.outstanding = nil
	var late []*proposal
	for _, p := range open {
		switch fate := w.rnd.IntN(3); {
		case p.over:
		case fate == 0: // committed by the next leader, as an entry of the old term
			w.apply(r, p, p.ld.term)
		case fate == 1: // a queue that outlived its term: the next one's log gets it
			late = append(late, p)
		}
		p.over = true
	}
	if old != nil && !old.gone {
		v := r.m.View()
		old.view = &v
		r.stale = append(r.stale, old)
		switch {
		case w.chance(40):
			w.retire(old)
		default: // it has not noticed for a while
			w.after(w.upTo(3*w.d), func() { w.retire(old) })
		}
	}
	r.term++
	ld := &leader{
		region: r, term: r.term, clock: w.clock(), pulse: true,
		verdicts: make([]register.Verdict, len(w.regions)), holds: make([]*hold, w.partitions), dry: make([]uint64, w.partitions), asks: make([]asks, w.partitions),
		regs: make([]register.Register, w.partitions),
	}
	r.cur = ld
	if r.heard == nil || w.chance(30) { // else this server has listened all the time
		r.heard = w.ears(r.at, w.clock())
	}
	begin := &pb.Command{Term: r.term, Kind: &pb.Command_BeginTerm{BeginTerm: &pb.BeginTermCommand{Server: r.name + "-1"}}}
	r.index++
	if res, _ := r.m.Apply(r.index, r.term, begin); res.GetError() != nil {
		w.fail("BeginTerm: %v", res.GetError())
	}
	now := ld.clock.read(w.now)
	view := r.m.View()
	for p := range view.Partitions() {
		ld.regs[partitionOf(p.Name)] = register.Restart(p.Register, now)
	}
	w.findDrains(ld, view)
	for _, p := range late {
		w.apply(r, p, r.term)
	}
	if w.clients != nil {
		ld.lessor = w.newLessor(ld, view)
	}
	w.build(ld)
	w.note("%s: leader of term %d", r.name, r.term)
}

// retire is when a deposed leader notices, or its process ends.
func (w *world) retire(ld *leader) {
	if ld.gone {
		return
	}
	ld.gone = true
	w.upsetting()
	r := ld.region
	for i, o := range r.stale {
		if o == ld {
			r.stale = append(r.stale[:i], r.stale[i+1:]...)
			break
		}
	}
	if ld.l != nil {
		for i := range ld.holds {
			w.letGo(ld, i)
		}
	}
	if ld.lessor != nil {
		w.lessorGone(ld)
	}
}

// build makes a term's proposer from what is applied.
func (w *world) build(ld *leader) {
	if ld.commands > 0 || ld.gone {
		return
	}
	view := ld.region.m.View()
	if ld.view != nil {
		view = *ld.view
	}
	if view.Configuration() == nil {
		ld.l, ld.conf = nil, nil // its data was made anew; nobody has added it yet
		return
	}
	conf := w.learn(view.Configuration())
	l, err := campaign.New(w.campaignOf(ld, conf), w.own(view, conf), ld.clock.read(w.now))
	if err != nil {
		ld.l, ld.conf = nil, conf // no member, or not under this incarnation
		return
	}
	ld.l, ld.conf = l, conf
	ld.verdicts = make([]register.Verdict, len(w.regions))
	clear(ld.dry)
	if !ld.pulse {
		w.perform(ld, l.PulseStale(ld.clock.read(w.now), true))
	}
	w.perform(ld, l.Tick(ld.clock.read(w.now)))
	w.wake(ld)
}

func (w *world) campaignOf(ld *leader, conf *configuration) campaign.Config {
	c := campaign.Config{
		Self: ld.self(), OwnVoter: w.sites[ld.region.at].id, Voters: conf.voters,
		D: time.Duration(conf.pb.GetDNs()), Rho: rho, Rand: w.rnd,
	}
	for _, spec := range conf.pb.GetPartitions() {
		c.Partitions = append(c.Partitions, campaign.Partition{Name: spec.GetName(), Prefer: spec.GetPrefer()})
	}
	return c
}

func (w *world) own(view state.View, conf *configuration) (own []campaign.Own) {
	for _, spec := range conf.pb.GetPartitions() {
		p, _ := view.Partition(spec.GetName())
		o := campaign.Own{Record: p.Register, Floor: max(p.Epoch, p.Dropped)}
		if p.Live() {
			o.Live = p.Epoch
		}
		own = append(own, o)
	}
	return own
}

// tick is a leader's timer.
func (w *world) tick(ld *leader) {
	if ld.timer != w.now {
		return // an earlier one was set, or a later one is enough
	}
	ld.timer = 0
	if ld.gone || ld.l == nil {
		return
	}
	if ld.frozen > w.now {
		ld.timer = ld.frozen
		w.at(ld.frozen, event{kind: evTick, ld: ld})
		return
	}
	w.releaseDrained(ld)
	w.perform(ld, ld.l.Tick(ld.clock.read(w.now)))
	w.wake(ld)
}

// wake sets a leader's timer.
func (w *world) wake(ld *leader) {
	if ld.gone || ld.l == nil {
		return
	}
	next := ld.l.Next()
	if next > 1<<62 {
		return
	}
	at := max(ld.clock.real(next), w.now+time.Microsecond)
	if ld.timer == 0 || ld.timer < w.now || at < ld.timer {
		ld.timer = at
		w.at(at, event{kind: evTick, ld: ld})
	}
}

// perform carries out a proposer's effects.
func (w *world) perform(ld *leader, effects []campaign.Effect) {
	if len(effects) == 0 {
		return
	}
	w.checkEffects(ld, effects)
	for _, e := range effects {
		switch e := e.(type) {
		case campaign.SendAccept:
			m := w.message()
			m.kind, m.ld, m.l, m.conf, m.voter, m.round, m.items = msgAccept, ld, ld.l, ld.conf, ld.conf.site[e.Voter.ID], e.Round, e.Items
			w.send(ld.region.at, m.voter, m)
		case campaign.SendPrepare:
			m := w.message()
			m.kind, m.ld, m.l, m.conf, m.voter, m.round = msgPrepare, ld, ld.l, ld.conf, ld.conf.site[e.Voter.ID], e.Round
			m.ballot, m.dry, m.partitions = e.Ballot, e.Dry, e.Partitions
			w.send(ld.region.at, m.voter, m)
		case campaign.Held:
			w.held(ld, e)
		case campaign.Lapsed:
			w.lapsed(ld, e)
		case campaign.Reserve:
			w.command(ld, &pb.Command{Kind: &pb.Command_ReserveBallot{ReserveBallot: &pb.ReserveBallotCommand{Above: e.Above}}}, func(l *campaign.Leader, now instant.Instant, res *pb.CommandResult) []campaign.Effect {
				if res.GetError() != nil {
					return l.ReserveFailed(now, e.ID)
				}
				return l.Reserved(now, e.ID, register.BallotOf(res.GetReserved().GetBallot()))
			})
		case campaign.Adopt:
			w.command(ld, &pb.Command{Kind: &pb.Command_Adopt{Adopt: &pb.AdoptCommand{Partition: e.Partition, Epoch: uint32(e.Epoch), Ballot: e.Ballot.Proto(), Planned: e.Planned}}}, func(l *campaign.Leader, now instant.Instant, res *pb.CommandResult) []campaign.Effect {
				if res.GetError() != nil {
					return l.AdoptFailed(now, e.Partition, e.Epoch)
				}
				return l.Adopted(now, e.Partition, e.Epoch)
			})
		case campaign.Drop:
			w.command(ld, &pb.Command{Kind: &pb.Command_Drop{Drop: &pb.DropCommand{Partition: e.Partition, Epoch: uint32(e.Epoch)}}}, func(l *campaign.Leader, now instant.Instant, res *pb.CommandResult) []campaign.Effect {
				if res.GetError() != nil {
					return l.DropFailed(now, e.Partition, e.Epoch)
				}
				return l.Dropped(now, e.Partition, e.Epoch)
			})
		case campaign.Released:
			w.count.releases++
			w.note("%s: release of %s, epoch %d, is chosen", ld.region.name, e.Partition, e.Epoch)
		}
	}
}

// command proposes for the proposer, and tells it the outcome.
func (w *world) command(ld *leader, cmd *pb.Command, tell func(*campaign.Leader, instant.Instant, *pb.CommandResult) []campaign.Effect) {
	l := ld.l
	ld.commands++
	cmd.Term = ld.term
	w.propose(ld, cmd, func(res *pb.CommandResult) {
		ld.commands--
		if ld.l != l {
			if ld.l == nil {
				w.build(ld)
			}
			return
		}
		w.perform(ld, tell(l, ld.clock.read(w.now), res))
		w.wake(ld)
	})
}

// propose commits a command of a leader after a while, if it leads then and
// the region works; done hears of it in the leader's own term alone.
func (w *world) propose(ld *leader, cmd *pb.Command, done func(*pb.CommandResult)) {
	r := ld.region
	p := &proposal{ld: ld, cmd: cmd, done: done}
	if r.cur != ld {
		return // a deposed leader's: nobody replicates it
	}
	r.outstanding = append(r.outstanding, p)
	w.after(w.between(time.Millisecond, 8*time.Millisecond), func() { w.commit(r) })
}

// commit applies what is outstanding, in order, as far as the region works.
func (w *world) commit(r *region) {
	for r.works() && len(r.outstanding) > 0 {
		p := r.outstanding[0]
		r.outstanding = r.outstanding[1:]
		if p.over {
			continue
		}
		p.over = true
		res := w.apply(r, p, p.ld.term)
		if !p.ld.leads() {
			continue
		}
		tell := func() {
			if p.ld.leads() {
				p.done(res)
			}
		}
		if p.ld.frozen > w.now {
			w.at(p.ld.frozen, event{kind: evDo, do: tell})
			continue
		}
		tell()
	}
}

// apply applies one command in a term, and gives its events to the leader.
func (w *world) apply(r *region, p *proposal, term uint64) *pb.CommandResult {
	r.index++
	res, events := r.m.Apply(r.index, term, p.cmd)
	if err := r.m.Poisoned(); err != nil {
		w.fail("%s: the state machine stops: %v", r.name, err)
		return res
	}
	w.committed(r, p, res, events)
	ld := r.cur
	if ld == nil || ld.gone {
		return res
	}
	w.events4(ld, events)
	return res
}

// events4 feeds a leader's tables.
func (w *world) events4(ld *leader, events []state.Event) {
	now := ld.clock.read(w.now)
	for _, e := range events {
		switch e := e.(type) {
		case state.RegisterChanged:
			i := partitionOf(e.Partition)
			ld.regs[i] = ld.regs[i].Written(now, e.Record)
			if ld.l != nil {
				w.perform(ld, ld.l.RegisterChanged(now, e.Partition, e.Record))
				w.wake(ld)
			}
		case state.PartitionDraining, state.DrainAborted, state.PartitionDropped, state.PartitionAdopted:
			w.followDrain(ld, e)
		case state.Configured:
			w.reconfigured(ld, w.learn(e.Configuration))
		}
	}
	if ld.lessor != nil {
		ld.lessor.Applied(now, events)
		w.lessorOut(ld)
	}
}

// reconfigured lets a leader go on under a newer configuration.
func (w *world) reconfigured(ld *leader, conf *configuration) {
	w.note("%s: configuration %d", ld.region.name, conf.version)
	w.upsetting()
	if ld.l == nil {
		w.build(ld)
		return
	}
	view := ld.region.m.View()
	effects, err := ld.l.Reconfigure(ld.clock.read(w.now), w.campaignOf(ld, conf), w.own(view, conf))
	if err != nil {
		w.giveUp(ld)
		return
	}
	ld.conf = conf
	w.perform(ld, effects)
	w.wake(ld)
}

// giveUp ends the term's proposer and makes another one when no command of it
// is on its way any more: after a clock gap, and when the region is no member.
func (w *world) giveUp(ld *leader) {
	for i := range ld.holds {
		w.letGo(ld, i)
	}
	ld.l = nil
	w.build(ld)
}

// beat is a region's heartbeat, and its look at what it hears itself.
func (w *world) beat(r *region) {
	w.at(w.now+250*time.Millisecond, event{kind: evBeat, who: int32(r.at)})
	ld := r.cur
	if ld == nil || ld.gone || ld.frozen > w.now || !r.works() && !ld.pulse || r.down > 0 {
		return
	}
	r.beats++
	for _, o := range w.regions {
		if o != r && o.heard != nil {
			w.hear(o.heard, r, r.term, r.beats)
		}
	}
	for _, v := range w.witnesses {
		if !v.down && v.frozen <= w.now {
			w.hear(v.heard, r, r.term, r.beats)
		}
	}
	if ld.l == nil {
		return
	}
	changed := false
	for i, o := range w.regions {
		if o == r {
			continue
		}
		if v := r.heard.verdict(w, o.name); v != ld.verdicts[i] {
			ld.verdicts[i] = v
			w.perform(ld, ld.l.Suspicion(ld.clock.read(w.now), o.name, v))
			changed = true
		}
	}
	if changed {
		w.wake(ld)
	}
}
