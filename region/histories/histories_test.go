package histories

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/history"
)

var (
	flagSeed = flag.Uint64("seed", 0, "the first seed; 0: the fixed ones of the test")
	flagRuns = flag.Int("runs", 4, "runs of each kind")
	flagSave = flag.String("save", filepath.Join(os.TempDir(), "headlease-histories"), "where failing histories are saved")
	flagWait = flag.Duration("undecided", 5*time.Minute, "how long an order of a lock's history is looked for, at most")
	flagFor  = flag.Duration("for", 8*time.Second, "virtual time under faults of each run, at least")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Bounds below which a run shows nothing.
const (
	minContended = 200
	minChanges   = 3
)

// maxSteps bounds the search for an order of a lock's history: a hundred seconds
// of a core, some tenth of which the hardest was seen to take.
const maxSteps = 100_000_000

// scenario is a kind of runs.
type scenario struct {
	name   string
	kinds  []kind
	locks  int
	clocks func(rng *rand.Rand) func(i int, began time.Time) *machineClock
	// check: what may be judged under these clocks.
	share float64
	timed bool
}

func exact(*rand.Rand) func(int, time.Time) *machineClock {
	return func(_ int, began time.Time) *machineClock { return newClock(began, 0, 1) }
}

// drifting clocks have any offset, and any rate within ρ.
func drifting(bound float64) func(*rand.Rand) func(int, time.Time) *machineClock {
	return func(rng *rand.Rand) func(int, time.Time) *machineClock {
		return func(_ int, began time.Time) *machineClock {
			rate := 1 + bound*(2*rng.Float64()-1)
			if rng.IntN(2) == 0 { // as far as may be
				rate = 1 - bound
				if rng.IntN(2) == 0 {
					rate = 1 + bound
				}
			}
			return newClock(began, time.Duration(rng.Int64N(int64(time.Hour))), rate)
		}
	}
}

var scenarios = []scenario{
	{name: "servers", kinds: []kind{kills, behind, pauses, cuts, stall, revokes, drains}, locks: 6, clocks: exact, share: 1, timed: true},
	{name: "stale-leaders", kinds: []kind{blind, afar, cuts, lags, away, lates}, locks: 6, clocks: exact, share: 1, timed: true},
	{name: "flapping", kinds: []kind{flaps, lags, away, tardy, kills, revokes, drains}, locks: 6, clocks: exact, share: 1, timed: true},
	{name: "everything", kinds: []kind{kills, pauses, cuts, away, lates, stall, blind, afar, tardy, flaps, lags, behind, revokes, loses, drains}, locks: 6, clocks: exact, share: 1, timed: true},
	{name: "drift", kinds: []kind{cuts, blind, kills, away, lates, flaps, drains}, locks: 6, clocks: drifting(rho), share: (1 - 2*rho) / (1 - rho), timed: true},
	{name: "clocks-beyond-bounds", kinds: []kind{steps, cuts, blind, kills, revokes}, locks: 6, clocks: drifting(0.2)},
}

// report of a run.
type report struct {
	operations, unknown, leaderChanges, contended, beliefs int
	faults                                                 string
}

func (r report) String() string {
	return fmt.Sprintf("%d operations, %d of unknown outcome, %d leader changes, %d contended grants, %d instants of belief; %s",
		r.operations, r.unknown, r.leaderChanges, r.contended, r.beliefs, r.faults)
}

func TestHistories(t *testing.T) {
	for _, sc := range scenarios {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			for i := range *flagRuns {
				seed := uint64(i + 1)
				if *flagSeed != 0 {
					seed = *flagSeed + uint64(i)
				}
				if !runSeed(t, sc, seed) {
					return
				}
			}
		})
	}
}

// runSeed makes one history and judges it.
func runSeed(t *testing.T, sc scenario, seed uint64) bool {
	var h history.History
	var r report
	var cfg history.Config
	synctest.Test(t, func(t *testing.T) { h, r, cfg = record(t, sc, seed) })
	began := time.Now()
	v := history.Check(h, cfg)
	t.Logf("SEED=%d %s: %v; judged in %v", seed, sc.name, r, time.Since(began).Round(time.Millisecond))
	if os.Getenv("HISTORIES_SAVE") != "" {
		if err := history.Save(os.Getenv("HISTORIES_SAVE"), h, v); err != nil {
			t.Error(err)
		}
	}
	if !v.OK() {
		dir := filepath.Join(*flagSave, fmt.Sprintf("%s-%d-%d", sc.name, seed, time.Now().Unix()))
		if err := history.Save(dir, h, v); err != nil {
			t.Errorf("save the history: %v", err)
		}
		t.Errorf("SEED=%d: VIOLATION: %v\nsaved in %s; again: go test ./region/histories -run 'TestHistories/%s$' -seed %d -runs 1", seed, v, dir, sc.name, seed)
	}
	if r.contended < minContended || r.leaderChanges < minChanges {
		t.Errorf("SEED=%d: too little happened to show anything: %d contended grants of %d needed, %d leader changes of %d",
			seed, r.contended, minContended, r.leaderChanges, minChanges)
	}
	return !t.Failed()
}

// record makes one history.
func record(t *testing.T, sc scenario, seed uint64) (history.History, report, history.Config) {
	rng := rand.New(rand.NewPCG(seed, 5))
	clocks := sc.clocks(rng)
	w := newWorld(t, seed, clocks)
	locks := targets(sc.locks)

	ctx, cancel := context.WithCancel(context.Background())
	n := &nemesis{w: w, rng: rng, locks: allNames(locks), kinds: sc.kinds, reader: newRaw(w, "reader-9", locks, false)}
	for i := range 4 {
		n.clients = append(n.clients, fmt.Sprintf("sdk-%d", i), fmt.Sprintf("raw-%d", i))
	}
	b := &believers{leases: map[*client.Lease]string{}}
	clients := make(chan struct{})
	go func() { // ended by ctx
		defer close(clients)
		done := make(chan struct{}, 16)
		start := func(f func()) { go func() { f(); done <- struct{}{} }() }
		started := 0
		for i := range 4 {
			name := fmt.Sprintf("sdk-%d", i)
			c := clocks(3+i, w.began)
			start(func() { useSDK(ctx, w, b, name, locks, c) })
			started++
		}
		for i := range 5 {
			name := fmt.Sprintf("raw-%d", i)
			start(func() { newRaw(w, name, locks, i == 0).run(ctx) })
			started++
		}
		for i := range 3 {
			start(func() { newRaw(w, fmt.Sprintf("reader-%d", i), locks, false).read(ctx) })
			started++
		}
		for range started {
			<-done
		}
	}()
	watching, unwatch := context.WithCancel(context.Background())
	watched := make(chan struct{})
	go func() { defer close(watched); b.watch(watching, w) }()

	time.Sleep(500 * time.Millisecond) // virtual
	for longest := time.Now().Add(10 * *flagFor); ; {
		faults, heal := context.WithTimeout(ctx, *flagFor/4)
		n.run(faults)
		heal()
		enough := w.recorder.HandOvers() >= minContended+minContended/4 && w.leaderChanges() > minChanges && time.Since(w.began) > *flagFor
		if enough || time.Now().After(longest) {
			break
		}
		if w.leaderChanges() <= minChanges { // the draw of faults had few
			if p := w.leader(); p != nil {
				n.transfer(w.server(n.others(p.s)[rng.IntN(2)]))
			}
		}
	}
	time.Sleep(2 * time.Second) // virtual
	cancel()
	<-clients
	n.reader.close()
	time.Sleep(4 * time.Second) // virtual: beliefs run out
	unwatch()
	<-watched
	w.everyLockIsFree(locks, clocks(9, w.began))
	changes := w.leaderChanges()
	h := w.recorder.History()
	cfg := history.Config{Share: sc.share, Steps: maxSteps, Timeout: *flagWait}
	if sc.timed {
		cfg.Clocks = w.clocks
	}
	w.net.mu.Lock()
	broken := w.net.broken
	w.net.mu.Unlock()
	w.stop()
	w.counts.addN("connections broken", broken)
	r := report{operations: len(h.Ops), leaderChanges: changes, contended: history.Contended(h), beliefs: len(h.Beliefs), faults: w.counts.String()}
	for _, op := range h.Ops {
		if op.Unknown() {
			r.unknown++
		}
	}
	return h, r, cfg
}

// everyLockIsFree takes each lock once, of a semaphore all slots at once, after all faults: none may be lost to
// a session that has ended, or to an offer that nobody took.
func (w *world) everyLockIsFree(locks []target, c *machineClock) {
	cl := newSDK(w, "prober", 10*time.Second, c)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, lock := range locks {
		var all []*client.Lease
		for range lock.names() {
			l, err := acquire(ctx, cl, lock, client.Wait())
			if err != nil {
				w.t.Errorf("SEED=%d: VIOLATION: %s cannot be had a minute after all faults and clients have ended: %v", w.seed, lock.name, err)
				continue
			}
			all = append(all, l)
		}
		for _, l := range all {
			if err := l.Release(ctx); err != nil {
				w.t.Errorf("seed %d: release of %s: %v", w.seed, l.Resource(), err)
			}
		}
	}
	_ = cl.Close(ctx)
}
