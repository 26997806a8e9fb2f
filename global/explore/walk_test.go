package explore

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/global/campaign"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/instant"
)

// The walks' world: 2 regions and 3 witnesses in continuous time, with the
// shipped timers, witness majorities, every clock at a random rate within rho,
// and messages that are lost, doubled, late and out of order. A region's Raft
// group is atomic: what the current leader proposes commits a little later, if
// it still leads then; what was pending at a change of leader commits just
// before it or never.
const (
	walkD   = time.Second
	walkRho = 0.3
)

type event struct {
	at  time.Duration // real time
	seq int
	do  func()
}

type events []event

func (h events) Len() int { return len(h) }
func (h events) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].seq < h[j].seq
}
func (h events) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *events) Push(e any)   { *h = append(*h, e.(event)) }
func (h *events) Pop() any     { old := *h; e := old[len(old)-1]; *h = old[:len(old)-1]; return e }

// clockOf is a process's clock: a rate within the bound, and an origin.
type clockOf struct {
	rate   float64
	origin instant.Instant
}

func (c clockOf) now(real time.Duration) instant.Instant {
	return c.origin.Add(time.Duration(float64(real) * c.rate))
}

func (c clockOf) real(i instant.Instant) time.Duration {
	return time.Duration(float64(i.Sub(c.origin)) / c.rate)
}

// voterNode is a voter in one life: a witness, or one term of a region's leader.
type voterNode struct {
	clock clockOf
	reg   register.Register
}

// leaderNode is one term of a region's leader.
type leaderNode struct {
	region int
	voterNode
	l       *campaign.Leader
	gone    bool          // it has noticed, or crashed
	pausing time.Duration // real time until which it does nothing
	cut     time.Duration // real time until which nobody else hears it
	timer   time.Duration
	held    fence.Epoch
	until   time.Duration // real time
}

type regionNode struct {
	cur *leaderNode
	machine
	rec     register.Record
	round   uint64
	dropped fence.Epoch
	// fate settles what is pending at the change of leader.
	fate func(commit bool)
}

type walk struct {
	rnd       *rand.Rand
	rho       float64 // what the leaders believe
	real      time.Duration
	seq       int
	queue     events
	regions   [regions]*regionNode
	witnesses [3]*voterNode
	all       []*leaderNode
	lastEpoch fence.Epoch
	lastOwner int
	bad       string
	log       []string
	holds     int
	changes   int
	drops     int
	resumes   int
	raises    int
}

func (w *walk) after(d time.Duration, do func()) {
	w.seq++
	heap.Push(&w.queue, event{w.real + d, w.seq, do})
}

func (w *walk) chance(percent int) bool { return w.rnd.IntN(100) < percent }

func (w *walk) upTo(d time.Duration) time.Duration { return time.Duration(w.rnd.Int64N(int64(d))) }

func (w *walk) clock() clockOf {
	rate := []float64{1 - walkRho, 1 + walkRho, 1 - walkRho + 2*walkRho*w.rnd.Float64()}[w.rnd.IntN(3)]
	return clockOf{rate, instant.Instant(1<<50 + w.rnd.Int64N(1<<40))}
}

// send carries a message, or an answer.
func (w *walk) send(do func()) {
	n := 1
	switch {
	case w.chance(10):
		n = 0
	case w.chance(10):
		n = 2
	}
	for range n {
		d := w.upTo(40 * time.Millisecond)
		if w.chance(8) {
			d = w.upTo(2 * walkD)
		}
		w.after(d, do)
	}
}

func (w *walk) note(format string, a ...any) {
	w.log = append(w.log, fmt.Sprintf("%9.3fs ", w.real.Seconds())+fmt.Sprintf(format, a...))
}

func (w *walk) config(r int) campaign.Config {
	c := campaign.Config{
		Self: region(r), OwnVoter: voterID(r), Partitions: []campaign.Partition{{Name: "p", Prefer: []string{"a", "b"}}},
		D: walkD, Rho: w.rho, GiveUp: walkD / 2, Rand: w.rnd,
	}
	for i := range regions {
		c.Voters = append(c.Voters, campaign.Voter{ID: voterID(i), Incarnation: 1})
	}
	for i := range w.witnesses {
		c.Voters = append(c.Voters, campaign.Voter{ID: fmt.Sprintf("witness/%d", i), Incarnation: 1, Witness: true})
	}
	return c
}

// elect begins a term in region r.
func (w *walk) elect(r int) {
	g := w.regions[r]
	if g.fate != nil {
		g.fate(w.chance(50))
		g.fate = nil
	}
	if old := g.cur; old != nil {
		switch {
		case w.chance(30):
			old.gone = true
		default: // it has not noticed for a while
			w.after(w.upTo(3*walkD), func() { old.gone = true })
		}
	}
	n := &leaderNode{region: r, voterNode: voterNode{clock: w.clock()}}
	now := n.clock.now(w.real)
	n.reg = register.Restart(g.rec, now)
	var err error
	if n.l, err = campaign.New(w.config(r), []campaign.Own{{Record: g.rec, Live: g.live, Floor: g.floor}}, now); err != nil {
		panic(err)
	}
	g.cur = n
	w.all = append(w.all, n)
	w.note("%s: new leader, live %d", regionName[r], g.live)
	w.input(n, func(now instant.Instant) []campaign.Effect { return n.l.Tick(now) })
	w.after(walkD/2+w.upTo(6*walkD), func() { w.elect(r) })
}

// input runs a leader, unless it is gone; while it is paused, later.
func (w *walk) input(n *leaderNode, f func(instant.Instant) []campaign.Effect) {
	if n.gone || w.bad != "" {
		return
	}
	if n.pausing > w.real {
		w.after(n.pausing-w.real, func() { w.input(n, f) })
		return
	}
	w.effects(n, f(n.clock.now(w.real)))
	if next := n.l.Next(); next < 1<<62 {
		at := max(n.clock.real(next)+time.Microsecond, w.real+time.Microsecond)
		if n.timer <= w.real || at < n.timer {
			n.timer = at
			w.after(at-w.real, func() {
				if n.timer == at {
					n.timer = 0
					w.input(n, func(now instant.Instant) []campaign.Effect { return n.l.Tick(now) })
				}
			})
		}
	}
}

func (w *walk) effects(n *leaderNode, effects []campaign.Effect) {
	g := w.regions[n.region]
	for _, e := range effects {
		switch e := e.(type) {
		case campaign.SendPrepare:
			if n.cut > w.real && e.Voter.ID != voterID(n.region) {
				continue
			}
			w.send(func() { w.prepare(n, e) })
		case campaign.SendAccept:
			if n.cut > w.real && e.Voter.ID != voterID(n.region) {
				continue
			}
			w.send(func() { w.accept(n, e) })
		case campaign.Reserve:
			w.commit(n, func() {
				g.round = max(g.round, e.Above) + 1
				b := register.Ballot{Round: g.round, Region: regionName[n.region], Incarnation: 1}
				w.input(n, func(now instant.Instant) []campaign.Effect { return n.l.Reserved(now, e.ID, b) })
			})
		case campaign.Adopt:
			w.commit(n, func() {
				live := g.live
				if !g.adopt(g.rec, e.Epoch, e.Ballot) {
					w.input(n, func(now instant.Instant) []campaign.Effect { return n.l.AdoptFailed(now, "p", e.Epoch) })
					return
				}
				if live != 0 && e.Epoch == live+1 {
					w.raises++
				}
				w.note("%s adopts %d", regionName[n.region], e.Epoch)
				w.input(n, func(now instant.Instant) []campaign.Effect { return n.l.Adopted(now, "p", e.Epoch) })
			})
		case campaign.Drop:
			w.commit(n, func() {
				for _, o := range w.all {
					if o.region == n.region && o.held == e.Epoch && o.until > w.real {
						w.fail("region %s drops epoch %d while a leader of it holds", regionName[n.region], e.Epoch)
					}
				}
				g.drop(e.Epoch)
				g.dropped = max(g.dropped, e.Epoch)
				w.drops++
				w.note("%s drops %d", regionName[n.region], e.Epoch)
				w.input(n, func(now instant.Instant) []campaign.Effect { return n.l.Dropped(now, "p", e.Epoch) })
			})
		case campaign.Held:
			w.held(n, e)
		case campaign.Lapsed:
			n.held = 0
			w.note("%s lapses %d", regionName[n.region], e.Epoch)
		}
	}
}

// commit applies what the current leader proposes a little later, if it still
// leads then.
func (w *walk) commit(n *leaderNode, do func()) {
	w.after(w.upTo(20*time.Millisecond), func() {
		if w.regions[n.region].cur == n && !n.gone {
			do()
		}
	})
}

func (w *walk) fail(format string, a ...any) {
	if w.bad == "" {
		w.bad = fmt.Sprintf(format, a...)
		w.note("VIOLATION: %s", w.bad)
	}
}

func (w *walk) held(n *leaderNode, e campaign.Held) {
	for _, o := range w.all {
		switch {
		case o == n || o.held == 0 || o.until <= w.real:
		case o.region != n.region:
			w.fail("I1: region %s (epoch %d) and region %s (epoch %d) hold at once", regionName[o.region], o.held, regionName[n.region], e.Epoch)
		case o.held != e.Epoch:
			w.fail("I1e: two leaders of region %s hold epochs %d and %d", regionName[n.region], o.held, e.Epoch)
		}
	}
	switch {
	case e.Epoch < w.lastEpoch || e.Epoch == w.lastEpoch && w.lastOwner != n.region:
		w.fail("I2: region %s holds epoch %d after epoch %d of region %s", regionName[n.region], e.Epoch, w.lastEpoch, regionName[w.lastOwner])
	case w.regions[n.region].dropped >= e.Epoch:
		w.fail("region %s holds epoch %d after its Drop", regionName[n.region], e.Epoch)
	}
	if e.Epoch > w.lastEpoch {
		w.changes++
	}
	if n.held == 0 {
		w.note("%s holds %d", regionName[n.region], e.Epoch)
		if e.Epoch == w.lastEpoch {
			w.resumes++
		}
	}
	w.holds++
	w.lastEpoch, w.lastOwner = e.Epoch, n.region
	n.held, n.until = e.Epoch, n.clock.real(e.Until)
}

func (w *walk) upset() {
	if w.bad != "" {
		return
	}
	switch w.rnd.IntN(9) {
	case 6, 7:
		n := w.regions[w.rnd.IntN(regions)].cur
		n.cut = w.real + w.upTo(3*walkD)
		other := w.regions[1-n.region].cur
		w.input(other, func(now instant.Instant) []campaign.Effect {
			return other.l.Suspicion(now, regionName[n.region], register.VerdictCrashed)
		})
	case 0:
		v := w.witnesses[w.rnd.IntN(len(w.witnesses))]
		v.clock = w.clock()
		v.reg = register.Restart(v.reg.Record, v.clock.now(w.real))
	case 1:
		n := w.regions[w.rnd.IntN(regions)].cur
		n.pausing = w.real + w.upTo(2*walkD)
	case 2:
		n := w.regions[w.rnd.IntN(regions)].cur
		w.input(n, func(now instant.Instant) []campaign.Effect {
			return n.l.Release(now, "p", []string{"", "a", "b"}[w.rnd.IntN(3)], "walk")
		})
	case 8:
		n := w.regions[w.rnd.IntN(regions)].cur
		w.input(n, func(now instant.Instant) []campaign.Effect { return n.l.Raise(now, "p") })
	case 3:
		n := w.regions[w.rnd.IntN(regions)].cur
		w.input(n, func(now instant.Instant) []campaign.Effect { return n.l.Hurry(now, "p") })
	default:
		n := w.regions[w.rnd.IntN(regions)].cur
		other, verdict := regionName[1-n.region], register.Verdict(w.rnd.IntN(4))
		w.input(n, func(now instant.Instant) []campaign.Effect { return n.l.Suspicion(now, other, verdict) })
	}
	w.after(w.upTo(walkD), w.upset)
}

func newWalk(seed uint64, rho float64) *walk {
	w := &walk{rnd: rand.New(rand.NewPCG(seed, 2)), rho: rho}
	for i := range w.witnesses {
		w.witnesses[i] = &voterNode{clock: w.clock()}
	}
	for r := range regions {
		w.regions[r] = &regionNode{}
	}
	for r := range regions {
		w.elect(r)
	}
	w.after(walkD, w.upset)
	return w
}

func (w *walk) run(length time.Duration) {
	for len(w.queue) > 0 && w.bad == "" && w.real < length {
		e := heap.Pop(&w.queue).(event)
		w.real = e.at
		e.do()
	}
}

func TestRandomWalksOfFiveVoters(t *testing.T) {
	n := 1000 / raceShare
	if *exploreTime > 0 {
		n = 1 << 30
	}
	began := time.Now()
	var holds, changes, drops, resumes, raises int
	walks := 0
	for seed := range uint64(n) {
		if *exploreTime > 0 && time.Since(began) > *exploreTime*8/100 {
			break
		}
		w := newWalk(seed, walkRho)
		w.run(60 * walkD)
		if w.bad != "" {
			t.Fatalf("seed %d: %s\n%s", seed, w.bad, strings.Join(w.log, "\n"))
		}
		walks++
		holds, changes, drops, resumes, raises = holds+w.holds, changes+w.changes, drops+w.drops, resumes+w.resumes, raises+w.raises
	}
	t.Logf("%d walks of %v: %d complete rounds, %d epochs, %d drops, %d resumptions, %d raises", walks, 60*walkD, holds, changes, drops, resumes, raises)
	if changes < walks || drops == 0 || resumes == 0 || raises == 0 {
		t.Error("the walks see too little of the protocol")
	}
}

// TestWalksFindClocksOutOfBound shows that the walks have teeth: the same with
// leaders that believe in exact clocks.
func TestWalksFindClocksOutOfBound(t *testing.T) {
	for seed := range uint64(2000) {
		w := newWalk(seed, 0)
		w.run(60 * walkD)
		if strings.HasPrefix(w.bad, "I1") {
			t.Logf("seed %d: %s", seed, w.bad)
			return
		}
	}
	t.Error("no walk found two holders, although clocks differ by more than the leaders believe")
}
