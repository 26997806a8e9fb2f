package simulation

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// rho is the bound on clock rates that the cluster believes in, and at which
// its clocks run.
const (
	rho    = 0.01
	rhoPPM = 10_000
)

// shape is what one world is made of.
type shape struct {
	regions, witnesses, partitions int
	d                              time.Duration
	// spread gives each partition another first preference, so that all
	// regions own some.
	spread bool
	// reach is the longest one-way delay between two sites.
	reach time.Duration
	// calm is a world without faults of its own; scenarios add theirs.
	calm bool
	// reconfigure adds changes of the configuration.
	reconfigure bool
	// dup and late are percentages of messages that arrive twice, or much later.
	dup, late int
	// believers adds clients with leases.
	believers int
}

func (s shape) String() string {
	return fmt.Sprintf("%d regions, %d witnesses, %d partitions, D %v", s.regions, s.witnesses, s.partitions, s.d)
}

// world is one cluster in virtual time. Everything in it comes from its seed.
type world struct {
	shape
	seed uint64
	rnd  *rand.Rand
	now  time.Duration
	seq  uint64
	q    queue

	// sites are all that ever voted; regions come first. links is a matrix of
	// directed links between them.
	sites     []*site
	regions   []*region
	witnesses []*witness
	links     []link

	names  []string
	parts  []*watched
	confs  map[uint64]*configuration
	newest *configuration
	free   []*message
	// changing counts the changes of the configuration under way.
	changing int
	lastInc  register.Incarnation
	clients  *clients

	// generation counts changes of what I7 depends on.
	generation uint32
	hash       uint64
	events     int
	bad        string
	notes      []note
	noted      int
	count      counts
}

// counts are what a world has seen.
type counts struct {
	messages, lost              int
	promotions, resumes, lapses int
	drops, elections, faults    int
	configurations, settled     int
	i7                          int
	grants, believed, releases  int
	drains, aborts, wipes       int
	leasesLost                  int
}

func (c *counts) add(o counts) {
	c.messages += o.messages
	c.lost += o.lost
	c.promotions += o.promotions
	c.resumes += o.resumes
	c.lapses += o.lapses
	c.drops += o.drops
	c.elections += o.elections
	c.faults += o.faults
	c.configurations += o.configurations
	c.settled += o.settled
	c.i7 += o.i7
	c.grants += o.grants
	c.believed += o.believed
	c.releases += o.releases
	c.drains += o.drains
	c.aborts += o.aborts
	c.wipes += o.wipes
	c.leasesLost += o.leasesLost
}

// site is a place: a region or a witness, by its place in the matrix of links.
type site struct {
	at      int
	id      string
	region  *region
	witness *witness
}

// link is one direction between two sites.
type link struct {
	base, jitter time.Duration
	// What faults add; downs counts those that cut it, since when the first did.
	downs        int
	since        time.Duration
	extra, noise time.Duration
	loss         int
}

// clean reports whether a link has no fault.
func (l *link) clean() bool { return l.downs == 0 && l.extra == 0 && l.loss == 0 }

// clock is a process's clock: a rate within the bound, in parts per million
// off, and an origin. Integers, so that a replay is exact.
type clock struct {
	ppm    int64
	origin instant.Instant
	// since is when it began to run, in real time; stood is what it lost
	// since, standing still.
	since time.Duration
}

func (c clock) read(real time.Duration) instant.Instant {
	hi, lo := bits.Mul64(uint64(max(0, real-c.since)), uint64(1e6+c.ppm))
	d, _ := bits.Div64(hi, lo, 1e6)
	return c.origin + instant.Instant(d)
}

// real is the first instant of real time at which the clock has reached i.
func (c clock) real(i instant.Instant) time.Duration {
	hi, lo := bits.Mul64(uint64(max(0, i-c.origin)), 1e6)
	d, rest := bits.Div64(hi, lo, uint64(1e6+c.ppm))
	if rest > 0 {
		d++
	}
	return c.since + time.Duration(d)
}

func (w *world) clock() clock {
	ppm := []int64{-rhoPPM, rhoPPM, w.rnd.Int64N(2*rhoPPM+1) - rhoPPM}[w.rnd.IntN(3)]
	return clock{ppm: ppm, origin: instant.Instant(1<<50 + w.rnd.Int64N(1<<40)), since: w.now}
}

// watched is what the checks know of a partition.
type watched struct {
	name      string
	holds     []*hold
	lastEpoch fence.Epoch
	lastOwner string
	// lost is when the last hold ended, promoted when its last epoch began; unowned
	// is the longest time between two holds.
	lost, promoted, unowned time.Duration
}

// hold is what one leader believes.
type hold struct {
	ld    *leader
	epoch fence.Epoch
	until time.Duration // real time
}

// configuration is a decided one, as the proposers and checks want it.
type configuration struct {
	pb      *pb.ClusterConfiguration
	version uint64
	voters  []campaign.Voter
	site    map[string]int
}

func (w *world) after(d time.Duration, do func()) { w.at(w.now+d, event{kind: evDo, do: do}) }

func (w *world) at(at time.Duration, e event) {
	w.seq++
	w.q.push(at, w.seq, e)
}

func (w *world) chance(percent int) bool { return w.rnd.IntN(100) < percent }

func (w *world) upTo(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return time.Duration(w.rnd.Int64N(int64(d)))
}

func (w *world) between(a, b time.Duration) time.Duration { return a + w.upTo(b-a) }

func (w *world) incarnation() register.Incarnation {
	w.lastInc++
	return w.lastInc
}

// maxNotes is how much of the past a failure shows.
const maxNotes = 600

type note struct {
	at   time.Duration
	what string
}

func (w *world) note(format string, a ...any) {
	n := note{w.now, fmt.Sprintf(format, a...)}
	if len(w.notes) < maxNotes {
		w.notes = append(w.notes, n)
	} else {
		w.notes[w.noted%maxNotes] = n
	}
	w.noted++
}

// tail is the newest notes, oldest first.
func (w *world) tail() string {
	var b strings.Builder
	for i := range w.notes {
		n := w.notes[(w.noted+i)%len(w.notes)]
		fmt.Fprintf(&b, "%14.6fs %s\n", n.at.Seconds(), n.what)
	}
	return b.String()
}

func (w *world) fail(format string, a ...any) {
	if w.bad == "" {
		w.bad = fmt.Sprintf(format, a...)
		w.note("VIOLATION: %s", w.bad)
	}
}

// mix folds a number into the hash of all that happened.
func (w *world) mix(v uint64) { w.hash = (w.hash ^ v) * 0x100000001b3 }

func partitionName(i int) string { return fmt.Sprintf("p%02d", i) }

// partitionOf is the reverse, without a map.
func partitionOf(name string) int { return int(name[1]-'0')*10 + int(name[2]-'0') }

func newWorld(s shape, seed uint64) *world {
	w := &world{shape: s, seed: seed, rnd: rand.New(rand.NewPCG(seed, 7)), confs: map[uint64]*configuration{}, hash: 0xcbf29ce484222325}
	for i := range s.partitions {
		w.names = append(w.names, partitionName(i))
		w.parts = append(w.parts, &watched{name: w.names[i]})
	}
	for i := range s.regions {
		w.addRegion(string(rune('a' + i)))
	}
	for i := range s.witnesses {
		w.addWitness(fmt.Sprintf("w%d", i+1))
	}
	w.learn(w.first())
	for _, v := range w.witnesses {
		v.configure(w, w.newest)
	}
	for _, r := range w.regions {
		r.init(w)
	}
	for _, r := range w.regions {
		w.elect(r)
		w.at(w.upTo(250*time.Millisecond), event{kind: evBeat, who: int32(r.at)})
	}
	if s.believers > 0 {
		w.clients = newClients(w)
	}
	if !s.calm {
		w.after(3*s.d, w.upset)
	}
	return w
}

// first is configuration 1.
func (w *world) first() *pb.ClusterConfiguration {
	c := &pb.ClusterConfiguration{
		ClusterId: "sim", ClusterName: "sim", Version: 1, Shards: 64, DNs: int64(w.d),
		AllowEvenWitnesses: w.shape.witnesses%2 == 0,
	}
	for _, s := range w.sites {
		c.Voters = append(c.Voters, &pb.Voter{Id: s.id, Incarnation: uint64(w.incarnationOf(s))})
	}
	for i, name := range w.names {
		spec := &pb.PartitionSpec{Name: name}
		for k := range w.regions {
			at := k
			if w.spread {
				at = (k + i) % len(w.regions)
			}
			spec.Prefer = append(spec.Prefer, w.regions[at].name)
		}
		n := 64 / w.partitions
		last := (i+1)*n - 1
		if i == w.partitions-1 {
			last = 63
		}
		spec.Shards = []*pb.ShardRange{{First: uint32(i * n), Last: uint32(last)}}
		c.Partitions = append(c.Partitions, spec)
	}
	if err := config.Check(c); err != nil {
		panic(err)
	}
	return c
}

func (w *world) incarnationOf(s *site) register.Incarnation {
	if s.region != nil {
		return s.region.inc
	}
	return s.witness.inc
}

// learn makes the simulator's own form of a decided configuration, once.
func (w *world) learn(c *pb.ClusterConfiguration) *configuration {
	if have, ok := w.confs[c.GetVersion()]; ok {
		if !sameConfiguration(have.pb, c) {
			w.fail("F20: two configurations are decided under version %d", c.GetVersion())
		}
		return have
	}
	conf := &configuration{pb: c, version: c.GetVersion(), site: map[string]int{}}
	for _, v := range c.GetVoters() {
		conf.voters = append(conf.voters, campaign.Voter{ID: v.GetId(), Incarnation: register.Incarnation(v.GetIncarnation()), Witness: config.IsWitness(v.GetId())})
	}
	for _, s := range w.sites {
		conf.site[s.id] = s.at // a voter made anew takes the place of the old one
	}
	w.confs[conf.version] = conf
	if w.newest == nil || conf.version > w.newest.version {
		w.newest = conf
	}
	return conf
}

// addSite gives a new place its links to all others.
func (w *world) addSite(s *site) {
	s.at = len(w.sites)
	w.sites = append(w.sites, s)
	n := len(w.sites)
	links := make([]link, n*n)
	for a := range n - 1 {
		for b := range n - 1 {
			links[a*n+b] = w.links[a*(n-1)+b]
		}
	}
	for b := range n - 1 {
		there := w.between(time.Millisecond, max(w.reach, 2*time.Millisecond))
		l := link{base: there, jitter: there / 5}
		links[s.at*n+b], links[b*n+s.at] = l, l
	}
	w.links = links
}

func (w *world) link(from, to int) *link { return &w.links[from*len(w.sites)+to] }

// run goes on until length, or a violation.
func (w *world) run(length time.Duration) {
	for len(w.q.heap) > 0 && w.bad == "" && w.q.heap[0].at <= length {
		at, e := w.q.pop()
		w.now = at
		w.events++
		w.mix(uint64(at)<<8 | uint64(e.kind))
		switch e.kind {
		case evDo:
			e.do()
		case evMessage:
			w.deliver(e.msg)
		case evTick:
			w.tick(e.ld)
		case evBeat:
			w.beat(w.regions[e.who])
		case evCheck:
			w.checked(e.ld, e.msg)
		case evHolders:
			w.checkOwners(e.gen)
		}
	}
	w.now = max(w.now, length)
}
