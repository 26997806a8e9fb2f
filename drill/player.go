package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/pause"
)

const (
	// faultSlack is how much of a cut a detector may have heard: what was on
	// its way, the pause of heartbeats and of the questions.
	faultSlack = 1200 * time.Millisecond
	// healAfter is when a process that was stopped or killed goes on by
	// itself after the time at which the drill would have it, should the drill
	// be gone.
	healAfter = 30 * time.Second
	// retell is the pause between tries to tell a process that has started
	// which faults it carries.
	retell = 100 * time.Millisecond
)

// player plays one scenario once.
type player struct {
	rig     *rig
	plan    plan.Scenario
	d, rtt  time.Duration
	carried carried
	chosen  int
	began   instant.Instant
	ended   instant.Instant
	owners  map[string]string // when the steps began
	load    *workload
	looks   *lookups
	pair    *pair
	store   *resource.Process

	work   sync.WaitGroup
	cancel context.CancelCauseFunc

	mu     sync.Mutex
	faults []check.Fault
	active map[int]string // steps in progress, for the live view
	down   map[string]bool
	paused map[string]bool
	mayEnd map[string]bool // processes whose disk is broken

	journal   []resource.Entry
	stalls    []check.Stall
	pressure  []check.Pressure
	settledAt instant.Instant
	unsettled string
}

// once plays the scenario once, with the resource's guard on or off.
func (r *rig) once(ctx context.Context, s plan.Scenario, unguarded bool) (*player, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p := &player{
		rig: r, plan: s, d: r.file().D, rtt: r.rtt(), cancel: cancel, active: map[int]string{}, down: map[string]bool{}, paused: map[string]bool{}, mayEnd: map[string]bool{},
	}
	if n := len(r.file().Witnesses); n > 0 {
		p.chosen = r.rand.IntN(n)
	}
	err := p.play(ctx, unguarded)
	// Whatever happened: nothing stays stopped or cut.
	if mendErr := p.mend(context.WithoutCancel(ctx)); err == nil {
		err = mendErr
	}
	p.work.Wait()
	return p, err
}

func (p *player) play(ctx context.Context, unguarded bool) (err error) {
	if err := p.prepare(ctx, unguarded); err != nil {
		return err
	}
	defer p.load.stop(ctx)
	defer p.looks.stop(ctx)
	live := p.watchLive()
	defer live()
	stalls := watchStalls(p.rig.clock)
	defer func() { p.stalls, p.pressure = stalls.close() }()
	p.began = p.rig.clock.Now()
	if err := p.steps(ctx); err != nil {
		return err
	}
	if err := p.mend(ctx); err != nil {
		return err
	}
	if err := p.rig.settled(ctx, stepLimit); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		p.unsettled = err.Error()
	} else {
		p.settledAt = p.rig.clock.Now()
	}
	if err := pause.For(ctx, p.plan.After.Of(p.d, p.rtt)); err != nil {
		return err
	}
	p.ended = p.rig.clock.Now()
	p.looks.stop(ctx)
	p.load.stop(ctx)
	return p.finish(ctx)
}

// prepare starts the resource and the workers, and lets them work.
func (p *player) prepare(ctx context.Context, unguarded bool) error {
	r := p.rig
	name := "resource"
	if unguarded {
		name += "-unguarded"
	}
	var err error
	if p.store, err = r.startResource(ctx, name, unguarded); err != nil {
		return err
	}
	taken := map[string]bool{}
	if i := slices.IndexFunc(p.plan.Steps, func(s plan.Step) bool { return s.Do == plan.Freeze }); i >= 0 {
		if p.pair, err = r.startPair(ctx, p.world(), p.plan.Steps[i].Partition, p.store.Address, taken); err != nil {
			return err
		}
	}
	if p.load, err = r.startWorkload(p.plan.Workload, p.store.Address, taken); err != nil {
		return err
	}
	// Each lock has had a holder before anything breaks.
	limited, cancel := context.WithTimeoutCause(ctx, stepLimit, fmt.Errorf("not within %v", stepLimit))
	defer cancel()
	for !p.load.working() {
		if err := pause.For(limited, 20*time.Millisecond); err != nil {
			p.load.stop(ctx)
			return fmt.Errorf("wait for every lock to be held and written under: %w", err)
		}
	}
	if p.looks, err = r.startLookups(p.load); err != nil {
		p.load.stop(ctx)
	}
	return err
}

// world is how roles are resolved now.
func (p *player) world() world {
	w := world{
		file: p.rig.file(), owners: map[string]string{}, leaders: map[string]string{}, chosen: p.chosen, pick: p.rig.rand.IntN,
	}
	for part, c := range p.rig.watch.owners() {
		w.owners[part] = c.By
	}
	for _, r := range w.file.RegionNames() {
		w.leaders[r] = p.rig.watch.leader(r)
	}
	return w
}

func (p *player) steps(ctx context.Context) error {
	p.owners = p.world().owners
	for i, s := range p.plan.Steps {
		if wait := p.began.Add(s.At.Of(p.d, p.rtt)).Sub(p.rig.clock.Now()); wait > 0 {
			if err := pause.For(ctx, wait); err != nil {
				return err
			}
		}
		p.rig.o.progress("%5.1f s  %s", p.rig.clock.Now().Sub(p.began).Seconds(), s.Title())
		if err := p.step(ctx, i, s); err != nil {
			return fmt.Errorf("step %d (%s, line %d): %w", i+1, s.Title(), s.Line, err)
		}
	}
	p.work.Wait()
	return context.Cause(ctx)
}

// begin notes that a step is in progress.
func (p *player) begin(i int, s plan.Step, of, silences []string) *check.Fault {
	now := p.rig.clock.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.active[i] = s.Title()
	return &check.Fault{Step: i, Title: s.Title(), Kind: s.Do, Of: of, Silences: silences, From: now}
}

// end notes that it is over.
func (p *player) end(f *check.Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.active, f.Step)
	if f.Until == 0 {
		f.Until = p.rig.clock.Now()
	}
	if f.Full == 0 {
		f.Full = f.From
	}
	p.faults = append(p.faults, *f)
}

// background does the rest of a step beside the next ones. An error ends the
// drill.
func (p *player) background(ctx context.Context, f *check.Fault, do func(ctx context.Context) error) {
	p.work.Go(func() {
		defer p.end(f)
		if err := do(ctx); err != nil && ctx.Err() == nil {
			p.cancel(fmt.Errorf("step %d (%s): %w", f.Step+1, f.Title, err))
		}
	})
}

func (p *player) step(ctx context.Context, i int, s plan.Step) error {
	lasts := s.For.Of(p.d, p.rtt)
	switch s.Do {
	case plan.Cut, plan.OneWay, plan.Isolate, plan.Delay, plan.Loss, plan.Flap:
		return p.breakLinks(ctx, i, s, lasts)
	case plan.DiskHang, plan.DiskFull:
		return p.breakDisk(ctx, i, s, lasts)
	case plan.ClockStep:
		return p.stepClock(ctx, i, s, lasts)
	case plan.RedisDown:
		return p.redisDown(ctx, i, s, lasts)
	case plan.Kill, plan.Pause, plan.Restart:
		return p.signal(ctx, i, s, lasts)
	case plan.RollingRestart:
		return p.rolling(ctx, i, s)
	case plan.MassRedeploy:
		f := p.begin(i, s, nil, nil)
		defer p.end(f)
		f.Effect = fmt.Sprintf("%d sessions were closed and opened", p.plan.Workload.Sessions)
		return p.load.redeploy(ctx)
	case plan.Herd:
		return p.herd(ctx, i, s)
	case plan.Freeze:
		f := p.begin(i, s, []string{oldWorker}, nil)
		defer p.end(f)
		f.Effect = "the old worker stopped between its check and its send"
		return p.pair.freeze(ctx)
	case plan.Thaw:
		f := p.begin(i, s, []string{oldWorker}, nil)
		defer p.end(f)
		without, err := p.pair.thaw(ctx)
		f.NoEffect, f.Effect = without, "the old worker woke up, and its write went out"
		return err
	case plan.Transfer:
		return p.transfer(ctx, i, s)
	case plan.HandOver:
		return p.handOver(ctx, i, s)
	case plan.Await:
		return p.await(ctx, i, s)
	default:
		return errors.ErrUnsupported
	}
}

// mend ends all faults: what is stopped goes on, what is dead starts, what is
// cut is whole. It may be called again.
func (p *player) mend(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	p.mu.Lock()
	var paused, down []string
	paused = sortedKeys(p.paused)
	for _, name := range sortedKeys(p.down) {
		if p.down[name] {
			down = append(down, name)
		}
	}
	mayEnd := sortedKeys(p.mayEnd)
	anything := len(p.faults)+len(p.active) > 0
	p.mu.Unlock()
	if !anything {
		return nil
	}
	p.carried = carried{}
	errs := []error{p.resume(ctx, paused)}
	now := p.rig.clock.Now()
	for _, name := range down {
		errs = append(errs, p.start(ctx, name))
	}
	p.mu.Lock()
	for i := range p.faults {
		p.faults[i].Until = min(p.faults[i].Until, now)
	}
	p.mu.Unlock()
	var last error
	for {
		if last = p.rig.heal(ctx); last == nil {
			return errors.Join(append(errs, p.startEnded(ctx, mayEnd))...)
		}
		if pause.For(ctx, retell) != nil {
			return errors.Join(append(errs, fmt.Errorf("faults were not ended everywhere; they expire by themselves: %w", last))...)
		}
	}
}

// finish reads the journal and ends what was started.
func (p *player) finish(ctx context.Context) error {
	var err error
	if p.journal, err = resource.NewClient(p.store.Address, "drill").Journal(ctx); err != nil {
		return err
	}
	var errs []error
	if p.pair != nil {
		errs = append(errs, p.pair.stop(ctx))
	}
	_ = p.store.Signal(syscall.SIGTERM) // one that has ended is found below
	limited, cancel := context.WithTimeout(ctx, serveLimit)
	defer cancel()
	return errors.Join(append(errs, p.store.Wait(limited))...)
}
