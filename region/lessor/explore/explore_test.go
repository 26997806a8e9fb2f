package explore

import (
	"cmp"
	"flag"
	"maps"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

var (
	factor = flag.Float64("explore.factor", 1, "multiplies the limits of states")
	budget = flag.Duration("explore.time", 0, "for the slices and the walks in all, instead of their limits")
	traces = flag.Bool("explore.trace", false, "print the counterexamples")
)

// base is what most slices share: TTL = D = 2 ticks, two terms.
func base() options {
	return options{ttl: 2 * tick, d: 2 * tick, terms: 2, grants: 2, epochs: 1, queue: 1, requests: 1}
}

func with(change func(*options)) options {
	o := base()
	change(&o)
	return o
}

func run(o options, b bug) result {
	o.bug = b.withDefaults()
	return search(held(&o))
}

// scaled is a slice with its limit as asked for. The seeded bugs' limit stays:
// each stops where it is caught.
func scaled(o options) options {
	o.limit = int(float64(o.limit) * *factor / raceCost)
	if *budget > 0 {
		o.limit, o.time = mostStates, share()
	}
	return o
}

// mostStates of a slice that is limited by time: some GB.
const mostStates = 1_000_000

// share of the budget for a slice, or for the walks.
func share() time.Duration { return *budget / time.Duration(len(slicesOf)+1) }

// slices of the world in which the shipped parts must hold.
var slicesOf = map[string]options{
	"session": with(func(o *options) { o.terms, o.limit = 3, 32_000 }),
	"split":   with(func(o *options) { o.terms, o.split, o.limit = 2, true, 32_000 }),
	"revoke":  with(func(o *options) { o.revoke, o.limit = true, 32_000 }),
	"ttl3":    with(func(o *options) { o.ttl, o.revoke, o.breaks, o.limit = 3*tick, true, 1, 32_000 }),
	"d3":      with(func(o *options) { o.d, o.revoke, o.limit = 3*tick, true, 24_000 }),
	"order": with(func(o *options) {
		o.terms, o.grants, o.queue, o.revoke, o.requests, o.acquire, o.limit = 1, 3, 2, true, 2, true, 32_000
	}),
	"drop":    with(func(o *options) { o.epochs, o.drop, o.acquire, o.requests, o.limit = 2, true, true, 2, 32_000 }),
	"replies": with(func(o *options) { o.revoke, o.release, o.replies, o.limit = true, true, true, 32_000 }),
	"mux": with(func(o *options) {
		o.terms, o.revoke, o.muxed, o.breaks, o.limit = 3, true, true, 1, 32_000
	}),
	"waits": with(func(o *options) { o.delay, o.wait, o.limit = tick, 3*tick, 32_000 }),
	"gap": with(func(o *options) {
		o.terms, o.gaps, o.revoke, o.quiet, o.limit = 1, 2, true, noOther, 32_000
	}),
	"gap wide": with(func(o *options) {
		o.ttl, o.gaps, o.revoke, o.breaks, o.limit = 3*tick, 1, true, 1, 32_000
	}),
	"gap d3": with(func(o *options) {
		o.d, o.terms, o.gaps, o.revoke, o.split, o.limit = 3*tick, 1, 1, true, true, 32_000
	}),
	"gap waits": with(func(o *options) { o.terms, o.gaps, o.delay, o.wait, o.limit = 1, 1, tick, 3*tick, 32_000 }),
	// Small enough to be completed with a larger factor.
	"one term": with(func(o *options) { o.terms, o.quiet, o.limit = 1, noOther, 32_000 }),
	"near": with(func(o *options) {
		o.terms, o.grants, o.epochs, o.queue, o.breaks, o.requests = 3, 3, 2, 2, 1, 3
		o.drop, o.replies, o.revoke, o.release, o.acquire, o.split, o.limit = true, true, true, true, true, true, 32_000
	}),
}

func TestMain(m *testing.M) {
	debug.SetGCPercent(400) // the frontier lives long
	debug.SetMemoryLimit(2 << 30)
	os.Exit(m.Run())
}

// TestShippedPartsHold: no slice has a violation.
func TestShippedPartsHold(t *testing.T) {
	total := 0
	for _, name := range slices.Sorted(maps.Keys(slicesOf)) {
		r := run(scaled(slicesOf[name]), bug{})
		total += r.states
		t.Logf("%-10s %v", name, r)
		if r.violation != "" {
			t.Errorf("%s: %s: %s", name, r.violation, r.path())
		}
	}
	t.Logf("%d states in all", total)
}

// TestRandomWalks goes deep where the search goes wide: seeded walks through
// the world with everything in it.
func TestRandomWalks(t *testing.T) {
	o := slicesOf["near"]
	o.bug = bug{}.withDefaults()
	o.terms, o.grants, o.epochs, o.requests, o.breaks, o.gaps = 6, 8, 4, 6, 4, 4
	walks := max(1, int(600**factor/raceCost))
	steps, believed, deepest := 0, 0, 0
	begin := time.Now()
	for seed := uint64(0); seed < uint64(walks) || *budget > 0 && time.Since(begin) < share(); seed++ {
		rng := rand.New(rand.NewPCG(seed, 3))
		if seed%3 == 1 {
			o.ttl, o.d = 3*tick, 2*tick
		} else if seed%3 == 2 {
			o.ttl, o.d = 2*tick, 3*tick
		}
		o.muxed = seed%2 == 1
		o.delay, o.wait = time.Duration(seed%5/3)*tick, time.Duration(seed%7/4*2)*tick
		w := held(&o)
		var trace []string
		for range 80 {
			var took step
			w, took = w.walk(rng)
			trace = append(trace, took.String())
			steps++
			if w.believes(0) || w.believes(1) {
				believed++
			}
			if v := w.violation(); v != "" {
				t.Fatalf("walk %d: %s: %s", seed, v, strings.Join(trace, " → "))
			}
		}
		deepest = max(deepest, len(trace))
	}
	t.Logf("%d steps in walks of up to %d; in %d of them somebody believes", steps, deepest, believed)
	if believed == 0 {
		t.Error("nobody ever believes: the walks show nothing")
	}
}

// rare steps end beliefs; the others make them.
var rare = map[string]float64{"tick": 0.4, "leader": 0.2, "revoke": 0.3, "taken": 0.3, "break": 0.1, "release": 0.3, "gap": 0.1}

// walk takes one random step.
func (w *world) walk(rng *rand.Rand) (*world, step) {
	var next *world
	var took step
	total := 0.0
	w.successors(func(s step, to *world) {
		weight := cmp.Or(rare[s.op], 1)
		if total += weight; rng.Float64()*total < weight {
			next, took = to, s
		}
	})
	next.normalise()
	return next, took
}

// where each bug shows: the smallest slice.
var where = map[string]options{
	"F1":            with(func(o *options) { o.d, o.split, o.quiet = 3*tick, true, noOther }),
	"F2":            with(func(o *options) { o.terms, o.quiet = 3, noOther }),
	"F7":            with(func(o *options) { o.terms = 1 }),
	"F8":            with(func(o *options) { o.terms = 1 }),
	"F9":            with(func(o *options) { o.terms, o.revoke = 1, true }),
	"F9 new leader": with(func(o *options) { o.revoke = true }),
	"F10":           with(func(o *options) { o.terms, o.replies = 1, true }),
	"F18":           with(func(o *options) { o.terms = 1 }),
	"L1":            with(func(o *options) { o.ttl, o.terms, o.revoke, o.breaks = 3*tick, 1, true, 1 }),
	"L2":            with(func(o *options) { o.d, o.split, o.quiet = 3*tick, true, noOther }),
	"L3":            with(func(o *options) { o.revoke, o.quiet = true, noOther }),
	"L3 anew":       with(func(o *options) { o.terms, o.gaps, o.revoke, o.quiet = 1, 1, true, noOther }),
	"L3 anew found": with(func(o *options) { o.terms, o.gaps, o.revoke, o.quiet = 1, 1, true, noOther }),
	"L3 anew mixed": with(func(o *options) { o.ttl, o.terms, o.gaps, o.quiet = 3*tick, 1, 1, noOther }),
	"L4":            with(passedOn),
	"L5 old term":   with(lateAck),
	"L5 reorder":    with(func(o *options) { o.ttl, o.terms, o.revoke, o.breaks, o.queue = 3*tick, 1, true, 1, 2 }),
	"L5 mux":        with(func(o *options) { o.ttl, o.terms, o.revoke, o.breaks, o.muxed = 3*tick, 1, true, 1, true }),
	"L6":            with(twoEpochs),
	"I6":            with(func(o *options) { o.delay, o.quiet = 2*tick, [2]bool{true, false} }),
	"flat client":   with(func(o *options) { lateAck(o); o.limit = 30_000 }),
	"drop unsaid":   with(func(o *options) { twoEpochs(o); o.limit = 30_000 }),
}

// noOther: session 1 only waits.
var noOther = [2]bool{false, true}

// passedOn: session 1 has been offered what 0 gave back, and 0 waits again.
func passedOn(o *options) {
	o.terms, o.grants, o.requests, o.queue = 1, 3, 2, 2
	o.quiet = [2]bool{true, false}
	o.start = func(w *world) {
		token, _ := w.clients[0].Lease(sessionIDs[0], resource)
		w.client(0).Releasing(w.now, sessionIDs[0], resource, token)
		w.apply(&pb.Command{Kind: &pb.Command_Release{Release: &pb.ReleaseCommand{
			SessionId: sessionIDs[0], Resource: resource, Token: uint64(token),
		}}}, true)
		w.acquireBy(0)
	}
}

// lateAck: an ack that names session 0's token is on its way.
func lateAck(o *options) {
	o.d, o.revoke, o.queue, o.quiet = 3*tick, true, 2, noOther
	o.start = func(w *world) {
		w.breakStream(0, 0)
		w.breaks = 0
		w.keepalive(0, 0)
		w.check(0)
	}
}

// twoEpochs: the partition is lost and won back.
func twoEpochs(o *options) {
	o.ttl, o.terms, o.epochs, o.requests, o.quiet = 3*tick, 1, 2, 2, noOther
	o.drop, o.acquire = true, true
}

// bugLimit of states: a bug not found by then is not caught.
const bugLimit = 150_000

// TestSeededBugsAreCaught: each broken rule shows.
func TestSeededBugsAreCaught(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(bugs)) {
		t.Run(name, func(t *testing.T) {
			o := where[name]
			o.limit = bugLimit
			r := run(o, bugs[name]())
			t.Logf("%v", r)
			if r.violation == "" {
				t.Errorf("the seeded bug %s is not caught", name)
			}
			if *traces {
				t.Log(r.path())
			}
		})
	}
	for _, name := range slices.Sorted(maps.Keys(controls)) {
		t.Run("control "+name, func(t *testing.T) {
			r := run(scaled(where[name]), controls[name]())
			t.Logf("%v", r)
			if r.violation != "" {
				t.Errorf("%s: %s: %s", name, r.violation, r.path())
			}
		})
	}
}
