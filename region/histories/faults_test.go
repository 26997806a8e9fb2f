package histories

import (
	"context"
	"math/rand/v2"
	"time"
)

// nemesis breaks things.
type nemesis struct {
	w     *world
	rng   *rand.Rand
	locks []string
	kinds []kind
	// clients are the places from which clients call.
	clients []string
	// reader asks who holds what, at the very server that a fault is about.
	reader *rawClient
}

// kind of a fault; one call is one fault, from its beginning to its end.
type kind struct {
	name   string
	weight int
	do     func(*nemesis)
}

var (
	kills   = kind{"kill", 2, (*nemesis).kill}
	pauses  = kind{"pause", 2, (*nemesis).pause}
	cuts    = kind{"cut", 4, (*nemesis).cut}
	away    = kind{"client cut", 2, (*nemesis).clientCut}
	lates   = kind{"late answers", 3, (*nemesis).lateAnswers}
	stall   = kind{"stall", 2, (*nemesis).stall}
	blind   = kind{"leader that does not know", 4, (*nemesis).blindLeader}
	afar    = kind{"transfer from afar", 5, (*nemesis).transferFromAfar}
	flaps   = kind{"flap", 2, (*nemesis).flap}
	lags    = kind{"lag", 3, (*nemesis).lag}
	tardy   = kind{"late expiry", 2, (*nemesis).lateExpiry}
	revokes = kind{"revocation", 3, (*nemesis).revoke}
	loses   = kind{"revocation, and then a cut", 2, (*nemesis).revokeThenCut}
	drains  = kind{"drain", 3, (*nemesis).drain}
	behind  = kind{"crash of a leader that is behind", 1, (*nemesis).crashBehind}
	steps   = kind{"clock step", 3, (*nemesis).step}
)

// longestFault is more than any takes, and less than what would let a history
// run on without faults.
const longestFault = 15 * time.Second

// run makes one fault after the other, some at the same time, until ctx ends,
// and returns when all are over.
func (n *nemesis) run(ctx context.Context) {
	total := 0
	for _, k := range n.kinds {
		total += k.weight
	}
	for ctx.Err() == nil {
		at := n.rng.IntN(total)
		for _, k := range n.kinds {
			if at -= k.weight; at >= 0 {
				continue
			}
			own := *n
			own.rng = rand.New(rand.NewPCG(n.rng.Uint64(), 1))
			n.w.work.Go(func() {
				began := time.Now()
				k.do(&own)
				if d := time.Since(began); d > longestFault {
					n.w.t.Errorf("seed %d: fault %q took %v", n.w.seed, k.name, d)
				}
			})
			break
		}
		pause(ctx, 400*time.Millisecond+n.upTo(1200*time.Millisecond))
	}
	n.w.work.Wait()
}

func (n *nemesis) upTo(d time.Duration) time.Duration { return time.Duration(n.rng.Int64N(int64(d))) }

func (n *nemesis) between(a, b time.Duration) time.Duration { return a + n.upTo(b-a) }

// victim is the leader, more often than not.
func (n *nemesis) victim() *server {
	if p := n.w.leader(); p != nil && n.rng.IntN(3) > 0 {
		return p.s
	}
	return n.w.servers[n.rng.IntN(3)]
}

func (n *nemesis) others(s *server) []string {
	var out []string
	for _, o := range n.w.servers {
		if o != s {
			out = append(out, o.name)
		}
	}
	return out
}

// kill, now and then with writes under way, which are lost.
func (n *nemesis) kill() {
	s := n.victim()
	if p := s.running(); p != nil && n.rng.IntN(2) == 0 {
		p.disk.stall(true)
		time.Sleep(n.upTo(50 * time.Millisecond)) // virtual
	}
	s.bounce(n.between(200*time.Millisecond, 2*time.Second))
}

// crashBehind kills a leader when one other server has what is not on its own
// disk yet, and keeps that one away until the leader is back, and goes on with the
// third. Nobody may have been told of what is lost so (docs/decisions/0175).
func (n *nemesis) crashBehind() {
	for _, s := range n.w.servers {
		if s.running() == nil {
			return // with two away there would be no leader for long, and little to see
		}
	}
	p := n.w.leader()
	if p == nil || !n.w.crashing.CompareAndSwap(false, true) {
		return
	}
	defer n.w.crashing.Store(false)
	s, others := p.s, n.others(p.s)
	i := n.rng.IntN(2)
	with, without := others[i], others[1-i]
	cut := func(a, b string, on bool) {
		n.w.net.cut(a, b, on)
		n.w.net.cut(b, a, on)
	}
	cut(s.name, without, true)
	time.Sleep(10 * time.Millisecond) // virtual: what was on its way has come
	p.disk.stall(true)
	time.Sleep(n.between(20*time.Millisecond, 100*time.Millisecond)) // virtual
	cut(with, s.name, true)
	cut(with, without, true)
	cut(s.name, without, false)
	s.bounce(n.between(20*time.Millisecond, 200*time.Millisecond))
	for began := time.Now(); time.Since(began) < 3*time.Second; time.Sleep(10 * time.Millisecond) { // virtual
		if p := n.w.leader(); p != nil && p.s.name != with {
			n.w.counts.add("leader that crashed was behind, and one without the rest leads")
			break
		}
	}
	time.Sleep(n.between(100*time.Millisecond, 300*time.Millisecond)) // virtual: those who asked before look again
	cut(with, s.name, false)
	cut(with, without, false)
}

// held counts bytes that had to wait meanwhile.
func (n *nemesis) held(what string, f func()) {
	n.w.net.mu.Lock()
	before := n.w.net.heldBytes
	n.w.net.mu.Unlock()
	f()
	n.w.net.mu.Lock()
	after := n.w.net.heldBytes
	n.w.net.mu.Unlock()
	if after > before {
		n.w.counts.add(what)
	}
}

func (n *nemesis) pause() {
	s := n.victim()
	n.held("pause that held bytes", func() {
		p := s.running()
		n.w.net.pause(s.name, true)
		s.clock.freeze(true)
		long := n.rng.IntN(3) == 0
		d := n.between(100*time.Millisecond, 1200*time.Millisecond)
		if p != nil {
			p.disk.stall(true)
		}
		time.Sleep(d) // virtual
		if p != nil { // before the watchdog, which a stopped process would not have run
			p.disk.stall(false)
		}
		if long {
			time.Sleep(n.between(time.Second, 2*time.Second)) // virtual
		}
		s.clock.freeze(false)
		n.w.net.pause(s.name, false)
	})
}

// cut cuts directions between servers: one, both of a pair, or all of one
// server.
func (n *nemesis) cut() {
	s := n.victim()
	others := n.others(s)
	type direction struct{ from, to string }
	var cut []direction
	what := "full cut between servers that held bytes"
	switch n.rng.IntN(4) {
	case 0:
		what = "one-way cut between servers that held bytes"
		cut = append(cut, direction{s.name, others[n.rng.IntN(2)]})
	case 1:
		what = "one-way cut between servers that held bytes"
		for _, o := range others {
			cut = append(cut, direction{o, s.name})
		}
	case 2:
		o := others[n.rng.IntN(2)]
		cut = append(cut, direction{s.name, o}, direction{o, s.name})
	case 3:
		for _, o := range others {
			cut = append(cut, direction{s.name, o}, direction{o, s.name})
		}
	}
	d := n.between(200*time.Millisecond, 2*time.Second)
	if n.rng.IntN(6) == 0 {
		d += resetAfter
	}
	n.held(what, func() {
		for _, c := range cut {
			n.w.net.cut(c.from, c.to, true)
		}
		time.Sleep(d) // virtual
		for _, c := range cut {
			n.w.net.cut(c.from, c.to, false)
		}
	})
}

// clientCut cuts a client off from one server, or from all.
func (n *nemesis) clientCut() {
	c := n.clients[n.rng.IntN(len(n.clients))]
	var at []string
	for _, s := range n.w.servers {
		at = append(at, s.name)
	}
	if n.rng.IntN(2) == 0 {
		at = at[:1]
	}
	oneWay := n.rng.IntN(3) == 0 // the client hears nothing, but is heard
	d := n.between(300*time.Millisecond, 4*time.Second)
	n.held("client cut that held bytes", func() {
		set := func(on bool) {
			for _, s := range at {
				n.w.net.cut(s, c, on)
				if !oneWay {
					n.w.net.cut(c, s, on)
				}
			}
		}
		set(true)
		time.Sleep(d) // virtual
		set(false)
	})
}

// lateAnswers lets a client be heard and not hear, then hear all at once, late,
// and then nothing any more: it must not take late news for fresh [F8].
func (n *nemesis) lateAnswers() {
	c := n.clients[n.rng.IntN(len(n.clients))]
	set := func(away, back bool) {
		for _, s := range n.w.servers {
			n.w.net.cut(s.name, c, away)
			if back {
				n.w.net.cut(c, s.name, away)
			}
		}
	}
	n.held("client that heard late and then nothing", func() {
		set(true, false)
		time.Sleep(n.between(200*time.Millisecond, 900*time.Millisecond)) // virtual
		set(false, false)
		time.Sleep(time.Millisecond / 4) // virtual: what was held is read, and nothing new has come back
		set(true, true)
		time.Sleep(n.between(2*time.Second, 4*time.Second)) // virtual
		set(false, true)
	})
}

func (n *nemesis) stall() {
	p := n.victim().running()
	if p == nil {
		return
	}
	d := n.between(100*time.Millisecond, 1400*time.Millisecond)
	if n.rng.IntN(4) == 0 {
		d = n.between(1600*time.Millisecond, 2500*time.Millisecond)
	}
	p.disk.stall(true)
	time.Sleep(d) // virtual
	p.disk.stall(false)
}

// blindLeader hangs a leader's main loop in a write, so that it does not find
// out that it has lost the others, who elect another; where it sends first, the
// others have what it wrote last, and it finds out.
func (n *nemesis) blindLeader() {
	p := n.w.leader()
	if p == nil {
		return
	}
	s := p.s
	n.held("cut around a leader with a stalled disk", func() {
		p.disk.stall(true)
		time.Sleep(n.upTo(100 * time.Millisecond)) // virtual: for a write to begin
		// The others hear nothing of it; it may go on hearing them.
		deaf := n.rng.IntN(2) == 0
		set := func(on bool) {
			for _, o := range n.others(s) {
				n.w.net.cut(s.name, o, on)
				if deaf {
					n.w.net.cut(o, s.name, on)
				}
			}
		}
		set(true)
		time.Sleep(n.between(900*time.Millisecond, 1350*time.Millisecond)) // virtual
		p.disk.stall(false)
		time.Sleep(n.upTo(300 * time.Millisecond)) // virtual
		set(false)
	})
}

// transferFromAfar hands leadership on from a leader that hears the others late
// and is not heard any more once another one campaigns: for a while it goes on
// getting answers to what it sent before, and does not know that there is another
// [F1].
func (n *nemesis) transferFromAfar() {
	p := n.w.leader()
	if p == nil {
		return
	}
	others := n.others(p.s)
	to := n.w.server(others[n.rng.IntN(2)]).running()
	if to == nil {
		return
	}
	late := n.between(80*time.Millisecond, 130*time.Millisecond)
	for _, o := range others {
		n.w.net.slower(o, p.s.name, late)
	}
	time.Sleep(500 * time.Millisecond) // virtual
	if term, leads := p.replica.Leading(); leads {
		n.w.work.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_ = p.replica.TransferLeadership(ctx, to.replica.RaftID())
		})
		// The request goes out when the answers to all before it have come, late.
		if campaigns(to, term) {
			n.w.counts.add("transfer by a leader that hears late")
		}
		for _, o := range others {
			n.w.net.cut(p.s.name, o, true)
		}
		for range 25 + n.rng.IntN(50) {
			time.Sleep(5 * time.Millisecond) // virtual
			at, lock := p.s.name, n.locks[n.rng.IntN(len(n.locks))]
			n.reader.late.Go(func() { n.reader.get(at, lock) })
		}
		for _, o := range others {
			n.w.net.cut(p.s.name, o, false)
		}
	}
	for _, o := range others {
		n.w.net.slower(o, p.s.name, 0)
	}
}

// campaigns waits until a server is beyond a term, and reports whether it came to
// that.
func campaigns(p *process, term uint64) bool {
	for range 600 {
		if _, in, _ := p.replica.Leader(); in > term {
			return true
		}
		time.Sleep(time.Millisecond) // virtual
	}
	return false
}

// transfer makes a server the leader, if it can be.
func (n *nemesis) transfer(to *server) bool {
	for range 20 {
		p, q := n.w.leader(), to.running()
		switch {
		case q == nil:
			return false
		case p == q:
			return true
		case p != nil:
			ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
			_ = p.replica.TransferLeadership(ctx, q.replica.RaftID())
			cancel()
		}
		time.Sleep(20 * time.Millisecond) // virtual
	}
	return false
}

// lateExpiry holds the goroutine that is about to propose a session's expiry,
// while another leads and the client comes back, until its own server leads
// again [F2].
func (n *nemesis) lateExpiry() {
	p := n.w.leader()
	if p == nil {
		return
	}
	c := n.clients[n.rng.IntN(len(n.clients))]
	set := func(on bool) {
		for _, s := range n.w.servers {
			n.w.net.cut(s.name, c, on)
			n.w.net.cut(c, s.name, on)
		}
	}
	r := &rendezvous{make(chan struct{}), make(chan struct{})}
	defer close(r.release)
	p.seam.expiry.Store(r)
	set(true)
	reached := false
	select {
	case <-r.reached:
		reached = true
	case <-time.After(4 * time.Second):
		reached = !p.seam.expiry.CompareAndSwap(r, nil)
	}
	away := reached && n.transfer(n.w.server(n.others(p.s)[n.rng.IntN(2)]))
	set(false)
	if !away {
		return
	}
	time.Sleep(n.between(300*time.Millisecond, 900*time.Millisecond)) // virtual: the client comes back
	if n.transfer(p.s) && p.s.running() == p {
		n.w.counts.add("expiry proposed two terms late")
	}
}

// flap transfers leadership every 100 ms.
func (n *nemesis) flap() {
	for range 5 + n.rng.IntN(10) {
		if p := n.w.leader(); p != nil {
			to := n.w.server(n.others(p.s)[n.rng.IntN(2)]).running()
			if to != nil {
				ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
				if p.replica.TransferLeadership(ctx, to.replica.RaftID()) == nil {
					n.w.counts.add("leadership transferred")
				}
				cancel()
			}
		}
		time.Sleep(100 * time.Millisecond) // virtual
	}
}

// lag makes proposals and checks late, at all servers.
func (n *nemesis) lag() {
	longest := n.between(50*time.Millisecond, 900*time.Millisecond)
	var set []*process
	for _, s := range n.w.servers {
		if p := s.running(); p != nil {
			p.seam.lag.Store(int64(longest))
			set = append(set, p)
		}
	}
	time.Sleep(n.between(500*time.Millisecond, 2*time.Second)) // virtual
	for _, p := range set {
		p.seam.lag.Store(0)
	}
}

// step steps a clock forward, beyond what ρ allows.
func (n *nemesis) step() {
	n.victim().clock.step(n.between(50*time.Millisecond, 5*time.Second))
	n.w.counts.add("clock stepped")
}
