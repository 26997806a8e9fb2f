package simulation

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/detector/phi"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// witness is a witness's process and data, as package witness keeps them.
type witness struct {
	at   int
	id   string
	name string
	// Durable.
	inc     register.Incarnation
	conf    *configuration // nil: none yet
	confReg config.Register
	// regs are by partition; the records are durable, the rest is not.
	regs []register.Register

	clock clock
	down  bool
	// busy is when the write under way is done: the voter takes one message at
	// a time. life tells one start of the process from the next.
	busy time.Duration
	life int
	slow time.Duration
	// frozen is when a frozen process goes on.
	frozen time.Duration
	heard  *ears
}

func (w *world) addWitness(name string) *witness {
	v := &witness{id: config.WitnessVoter(name), name: name, inc: w.incarnation(), regs: make([]register.Register, w.partitions)}
	w.addSite(&site{id: v.id, witness: v})
	v.at = len(w.sites) - 1
	w.witnesses = append(w.witnesses, v)
	v.start(w)
	return v
}

// start is the start of the process.
func (v *witness) start(w *world) {
	v.life++
	v.down, v.busy, v.frozen = false, 0, 0
	v.clock = w.clock()
	v.heard = w.ears(v.at, v.clock)
	v.restart(w)
}

// restart makes all clocks count from now: at a start, and after a clock gap.
func (v *witness) restart(w *world) {
	now := v.clock.read(w.now)
	for i, r := range v.regs {
		v.regs[i] = register.Restart(r.Record, now)
	}
}

func (v *witness) configure(w *world, c *configuration) {
	v.conf, v.confReg = c, config.Register{}
}

// voter is what the witness keeps of the configuration.
func (v *witness) voter() config.Voter {
	cv := config.Voter{Register: v.confReg}
	if v.conf != nil {
		cv.Decided = v.conf.pb
	}
	return cv
}

// atWitness is a vote message's arrival.
func (w *world) atWitness(v *witness, m *message) {
	switch at := max(v.frozen, v.busy); {
	case v.down:
		w.count.lost++
		w.done(m)
		return
	case at > w.now:
		w.at(at, event{kind: evMessage, msg: m})
		return
	case v.slow > 0 && !m.slowed: // slow, not dead: it takes its time over each
		m.slowed = true
		w.at(w.now+w.upTo(v.slow), event{kind: evMessage, msg: m})
		return
	}
	if !w.sameVersion(v.conf, m, v.at, func(c *configuration) { w.teachWitness(v, c) }) {
		return
	}
	if m.kind == msgPrepare {
		w.witnessPrepare(v, m)
	} else {
		w.witnessAccept(v, m)
	}
}

func (v *witness) verdict(w *world, r *register.Register) register.Verdict {
	if r.Accepted.IsZero() || r.Value.Released() {
		return register.VerdictUnknown
	}
	return v.heard.verdict(w, r.Value.Owner.Name)
}

func (w *world) witnessPrepare(v *witness, m *message) {
	now := v.clock.read(w.now)
	in := register.PrepareInput{Candidate: m.ld.self(), Ballot: m.ballot, Dry: m.dry}
	a := w.reply(m, v.inc)
	a.prepared = a.prepared[:0]
	var changes []change
	for _, name := range m.partitions {
		i := partitionOf(name)
		r := &v.regs[i]
		in.Verdict = v.verdict(w, r)
		d := r.Prepare(now, in)
		a.prepared = append(a.prepared, campaign.PrepareAnswer{
			Partition: name, Rule: d.Rule, Record: r.Record, Remaining: r.Remaining(now), Verdict: in.Verdict,
		})
		if d.Action == register.Write {
			rec, ok := register.Update(r.Record, d.Change)
			if !ok {
				w.fail("a change that was judged in this very turn does not apply: %v", d.Change.Guard)
			}
			changes = append(changes, change{i, rec})
			a.prepared[len(a.prepared)-1].Record = rec
		}
	}
	if len(changes) == 0 {
		w.answer(m, a)
		return
	}
	w.witnessChanges(v, changes, func() { w.answer(m, a) })
}

func (w *world) witnessAccept(v *witness, m *message) {
	now := v.clock.read(w.now)
	a := w.reply(m, v.inc)
	a.accepted = a.accepted[:0]
	var changes []change
	for k := range m.items {
		it := &m.items[k]
		i := partitionOf(it.Partition)
		r := &v.regs[i]
		d := r.Accept(it.Ballot, it.Value)
		rule, rec := d.Rule, r.Record
		switch d.Action {
		case register.Renew:
			renewed, ok := r.Renewed(now, it.Ballot, it.Value)
			if !ok {
				rule = register.RuleRetry
				break
			}
			*r = renewed
		case register.Write, register.WriteAlarm:
			rec, _ = register.Update(r.Record, d.Change)
			changes = append(changes, change{i, rec})
			if rec.Alarm != "" {
				w.fail("one ballot with two values at %s: %s", v.id, rec.Alarm)
			}
		}
		a.accepted = append(a.accepted, campaign.AcceptAnswer{Partition: it.Partition, Rule: rule, Record: rec})
	}
	if len(changes) == 0 {
		w.answer(m, a)
		return
	}
	w.witnessChanges(v, changes, func() { w.answer(m, a) })
}

// change of a register.
type change struct {
	partition int
	rec       register.Record
}

// witnessChanges is a transaction of registers.
func (w *world) witnessChanges(v *witness, changes []change, answer func()) {
	w.witnessWrites(v, func() {
		now := v.clock.read(w.now)
		for _, c := range changes {
			v.regs[c.partition] = v.regs[c.partition].Written(now, c.rec)
		}
	}, answer)
}

// witnessWrites is one disk transaction: until it is done the witness takes no
// other message. If the process dies in the middle the change is on the disk
// or is not, and nobody is answered.
func (w *world) witnessWrites(v *witness, install, answer func()) {
	took := w.between(500*time.Microsecond, 8*time.Millisecond) + v.slow/4
	v.busy = w.now + took
	life := v.life
	w.after(took, func() {
		if v.life != life {
			return
		}
		if v.down {
			if w.chance(50) {
				install()
			}
			return
		}
		v.busy = 0
		install()
		answer()
	})
}

// ears is the failure detector of one observer: phi per region.
type ears struct {
	at    int
	clock clock
	det   []*phi.Detector
	// wrong, while set, are verdicts that a fault made up: suspicion is never
	// authority.
	wrong []register.Verdict
}

func (w *world) ears(at int, c clock) *ears {
	e := &ears{at: at, clock: c, wrong: make([]register.Verdict, len(w.regions))}
	for range w.shape.regions {
		d, err := phi.New(phi.Params{D: w.d}, c.read(w.now))
		if err != nil {
			panic(err)
		}
		e.det = append(e.det, d)
	}
	return e
}

func (e *ears) verdict(w *world, region string) register.Verdict {
	r := int(region[0] - 'a')
	if r < len(e.wrong) && e.wrong[r] != register.VerdictUnknown {
		return e.wrong[r]
	}
	return e.det[r].Judge(e.clock.read(w.now)).Verdict
}

// resume empties the windows: the observer itself was paused.
func (e *ears) resume(w *world) {
	for _, d := range e.det {
		d.Resume(e.clock.read(w.now))
	}
}

// hear takes a heartbeat that was sent just now and arrives a little later.
// It counts from its arrival; that it is taken before is of no consequence,
// since silence is never negative.
func (w *world) hear(e *ears, r *region, term, seq uint64) {
	l := w.link(r.at, e.at)
	if l.downs > 0 || l.loss > 0 && w.chance(l.loss) {
		return
	}
	d := l.base + l.extra + w.upTo(l.jitter+l.noise)
	if d < 100*time.Millisecond {
		e.det[r.at].Heard(e.clock.read(w.now+d), term, seq)
		return
	}
	w.after(d, func() { e.det[r.at].Heard(e.clock.read(w.now), term, seq) })
}

func sameConfiguration(a, b *pb.ClusterConfiguration) bool { return a == b || proto.Equal(a, b) }
