package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/drill/resource"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/pause"
	pb "github.com/headlease/headlease/proto/headlease/v1"
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
	pair    *pair
	store   *resource.Process

	work   sync.WaitGroup
	cancel context.CancelCauseFunc

	mu     sync.Mutex
	faults []check.Fault
	active map[int]string // steps in progress, for the live view
	down   map[string]bool
	paused map[string]bool

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
		rig: r, plan: s, d: r.file().D, rtt: r.rtt(), cancel: cancel, active: map[int]string{}, down: map[string]bool{}, paused: map[string]bool{},
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
	return nil
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
	case plan.DiskHang, plan.DiskFull, plan.ClockStep:
		return p.breakProcess(ctx, i, s, lasts)
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
	case plan.Await:
		return p.await(ctx, i, s)
	default:
		return errors.ErrUnsupported
	}
}

func (p *player) herd(ctx context.Context, i int, s plan.Step) error {
	part := plan.Part{Number: 1}
	if !s.Partition.IsZero() {
		part = s.Partition
	}
	partition, err := p.world().partition(part)
	if err != nil {
		return err
	}
	f := p.begin(i, s, []string{partition.Name}, nil)
	p.background(ctx, f, func(ctx context.Context) error {
		served, err := p.load.herd(ctx, s.Clients, partition.Name)
		f.Effect = fmt.Sprintf("%d of %d clients had the lock after %.1f s", served, s.Clients, p.rig.clock.Now().Sub(f.From).Seconds())
		if served < s.Clients {
			f.NoEffect = f.Effect
		}
		return err
	})
	return nil
}

// transfer hands a partition over on purpose, and returns when that is done.
func (p *player) transfer(ctx context.Context, i int, s plan.Step) error {
	w := p.world()
	partition, err := w.partition(s.Partition)
	if err != nil {
		return err
	}
	to, err := w.region(s.To)
	if err != nil {
		return err
	}
	f := p.begin(i, s, []string{partition.Name}, nil)
	defer p.end(f)
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	done, err := p.rig.admin.Transfer(limited, admin.Transfer{Partition: partition.Name, To: to, Drain: p.d})
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		f.NoEffect = err.Error()
	case done.Already:
		f.NoEffect = fmt.Sprintf("%s owned it already", to)
	default:
		f.Effect = fmt.Sprintf("%s has it with epoch %d; it was without an owner for %d ms at most", to, done.Epoch, done.Unowned.Milliseconds())
	}
	return nil
}

// await waits for what a step names. What does not come is for the
// expectations to judge.
func (p *player) await(ctx context.Context, i int, s plan.Step) error {
	f := p.begin(i, s, nil, nil)
	defer p.end(f)
	within := s.Within.Of(p.d, p.rtt)
	var err error
	if s.Until == plan.UntilSettled {
		p.work.Wait() // of a cluster that is still broken it would be no news
		err = p.rig.settled(ctx, within)
	} else {
		var part clusterfile.Partition
		if part, err = p.world().partition(s.Partition); err != nil {
			return err
		}
		was := p.owners[part.Name]
		err = p.rig.watch.await(ctx, within, s.Until, func(l *check.Ledger, _ map[string]*pb.StatusResponse) bool {
			c, ok := l.Owners[part.Name]
			return ok && c.By != was
		})
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if f.Effect = "it came"; err != nil {
		f.Effect = "it did not come: " + err.Error()
		p.rig.o.progress("%s: %v", s.Title(), err)
	}
	return nil
}

// breakLinks sets the rules of a step's links, which expire by themselves, and
// measures what they did.
func (p *player) breakLinks(ctx context.Context, i int, s plan.Step, lasts time.Duration) error {
	w := p.world()
	links, err := w.links(s)
	if err != nil {
		return err
	}
	var of []string
	for _, l := range links {
		for _, name := range []string{l.from.name, l.to.name} {
			if !slices.Contains(of, name) {
				of = append(of, name)
			}
		}
	}
	f := p.begin(i, s, of, nil)
	// A disturbance of over a round trip may cost a region's follower its
	// leader for a moment, but no site is cut from itself: nobody falls silent.
	if s.Do == plan.Flap {
		p.background(ctx, f, func(ctx context.Context) error { return p.flap(ctx, f, w, s, links, lasts) })
		return nil
	}
	inForce, err := p.putLinks(ctx, fmt.Sprintf("drill-%d", i+1), w, s, links, lasts)
	if err != nil {
		return err
	}
	f.Full = p.rig.clock.Now()
	p.background(ctx, f, func(ctx context.Context) error {
		if err := pause.For(ctx, max(lasts/2, lasts-time.Second)); err != nil {
			return err
		}
		effect, err := inForce(ctx)
		if err != nil && ctx.Err() == nil {
			f.NoEffect = err.Error()
		}
		if err := pause.For(ctx, p.until(f.From.Add(lasts))); err != nil {
			return err
		}
		f.Until = p.rig.clock.Now()
		p.measure(f, s, w, links, lasts)
		f.Effect += effect
		return nil
	})
	return nil
}

func (p *player) until(at instant.Instant) time.Duration { return max(0, at.Sub(p.rig.clock.Now())) }

// flap cuts the links again and again.
func (p *player) flap(ctx context.Context, f *check.Fault, w world, s plan.Step, links []link, lasts time.Duration) error {
	ends := f.From.Add(lasts)
	cuts, felt := 0, 0
	for n := 0; p.rig.clock.Now().Add(s.Down) <= ends; n++ {
		began := p.rig.clock.Now()
		if _, err := p.putLinks(ctx, fmt.Sprintf("drill-%d-%d", f.Step+1, n), w, s, links, s.Down); err != nil {
			return err
		}
		if f.Full == 0 {
			f.Full = p.rig.clock.Now()
		}
		if err := pause.For(ctx, s.Down); err != nil {
			return err
		}
		cuts++
		if silent, _ := p.silent(links, began, p.rig.clock.Now().Add(sampleEvery)); silent > s.Down/3 {
			felt++
		}
		if err := pause.For(ctx, s.Up); err != nil {
			return err
		}
	}
	f.Until = p.rig.clock.Now()
	f.Effect = fmt.Sprintf("%d cuts of %v, of which %d were felt", cuts, s.Down, felt)
	if felt < (cuts+1)/2 {
		f.NoEffect = f.Effect
	}
	return nil
}

// silent is how long, over the links that carry heartbeats, the receivers had
// not heard the senders: the least, and whether there was such a link.
func (p *player) silent(links []link, from, until instant.Instant) (least time.Duration, any bool) {
	for _, l := range links {
		if !l.from.region || p.isDown(l.to.name) {
			continue // only regions send heartbeats
		}
		s := p.rig.watch.silence(l.to.name, l.from.name, from, until)
		if !any || s < least {
			least = s
		}
		any = true
	}
	return least, any
}

// measure says what the links' fault did, by what others saw.
func (p *player) measure(f *check.Fault, s plan.Step, w world, links []link, lasts time.Duration) {
	heartbeats := len(s.Planes) == 0 || slices.Contains(s.Planes, "gossip")
	votes := len(s.Planes) == 0 || slices.Contains(s.Planes, "votes")
	switch {
	case s.Do == plan.Delay:
		p.measureDelay(f, s, w, links, heartbeats, votes)
	case s.Do != plan.Delay && s.Do != plan.Loss && heartbeats:
		silent, any := p.silent(links, f.From, f.Until.Add(sampleEvery))
		if !any {
			break
		}
		f.Effect = fmt.Sprintf("every receiver missed its sender's heartbeats for %.1f s or more", silent.Seconds())
		// Heartbeats that a region with no quorum does not send are missed as well.
		if want := max(lasts-faultSlack, lasts/3); silent < want {
			f.NoEffect = fmt.Sprintf("a receiver missed its sender for %.1f s only, of %.1f s", silent.Seconds(), lasts.Seconds())
		}
	}
	if f.Effect == "" && f.NoEffect == "" {
		f.Effect = "every sender listed the fault; nothing measures this one"
	}
}

// measureDelay looks for it in the round trips that owners measure (an answer
// that comes after its round counts for nothing, and is not measured), and in
// the silence with which a delay begins.
func (p *player) measureDelay(f *check.Fault, s plan.Step, w world, links []link, heartbeats, votes bool) {
	for _, l := range links {
		for _, ends := range []link{l, {l.to, l.from}} {
			if !votes || !ends.from.owns(w) {
				continue // only who renews measures
			}
			var names []string
			for _, q := range w.at(ends.to) {
				names = append(names, q.Name)
			}
			if got := p.rig.watch.rtt(ends.from.name, names, f.Full, f.Until); got >= s.Add*3/4 {
				f.Effect = fmt.Sprintf("%s measured round trips up to %d ms to %s", ends.from.name, got.Milliseconds(), ends.to.name)
				return
			}
		}
		if heartbeats && l.from.region {
			if silent := p.rig.watch.silence(l.to.name, l.from.name, f.From, f.Until); silent >= s.Add*3/4 {
				f.Effect = fmt.Sprintf("%s missed heartbeats of %s for %d ms when it began", l.to.name, l.from.name, silent.Milliseconds())
			}
		}
	}
	if f.Effect == "" && (votes || heartbeats) && s.Add >= faultSlack/2 {
		f.NoEffect = "no round trip and no heartbeat was late by as much"
	}
}

func (s site) owns(w world) bool {
	for _, owner := range w.owners {
		if s.region && owner == s.name {
			return true
		}
	}
	return false
}

// breakProcess sets a fault of a disk or a clock.
func (p *player) breakProcess(ctx context.Context, i int, s plan.Step, lasts time.Duration) error {
	processes, err := p.world().processes(s.Target)
	if err != nil {
		return err
	}
	names, silences := namesOf(processes)
	if s.Do == plan.ClockStep {
		silences = nil
		lasts = time.Second
	}
	f := p.begin(i, s, names, silences)
	id := fmt.Sprintf("drill-%d", i+1)
	rules := map[string]*pb.SetFaultsRequest{}
	for _, q := range processes {
		req := &pb.SetFaultsRequest{}
		if s.Do == plan.ClockStep {
			req.ClockFaults = []*pb.ClockFault{{Id: id, StepMs: s.Step.Milliseconds(), ExpiresMs: lasts.Milliseconds()}}
		} else {
			req.DiskFaults = []*pb.DiskFault{{
				Id: id, Store: s.Store, Stall: s.Do == plan.DiskHang, Full: s.Do == plan.DiskFull, ExpiresMs: lasts.Milliseconds(),
			}}
		}
		rules[q.Name] = req
	}
	if err := p.set(ctx, rules, lasts); err != nil {
		return err
	}
	f.Full = p.rig.clock.Now()
	if s.Do == plan.ClockStep {
		f.Effect = fmt.Sprintf("the clock stepped by %v", s.Step)
		p.end(f)
		return nil
	}
	p.background(ctx, f, func(ctx context.Context) error {
		var ended []string
		limited, cancel := context.WithTimeout(ctx, lasts)
		defer cancel()
		for _, q := range processes {
			if p.rig.processes.Ended(limited, q.Name) == nil {
				ended = append(ended, q.Name)
				p.setDown(q.Name, true)
			}
		}
		if f.Effect = fmt.Sprintf("ended by its own watch: %v", ended); len(ended) < len(processes) {
			f.NoEffect = fmt.Sprintf("of %v only %v ended; a process whose disk does that must", names, ended)
		}
		if err := pause.For(ctx, p.until(f.From.Add(lasts))); err != nil {
			return err
		}
		f.Until = p.rig.clock.Now()
		for _, name := range ended {
			if err := p.start(ctx, name); err != nil {
				return err
			}
		}
		return nil
	})
	return nil
}

// namesOf returns the processes' names, and whose words are missed when they
// are silent: theirs and their regions'.
func namesOf(processes []clusterfile.Process) (names, silences []string) {
	for _, q := range processes {
		names = append(names, q.Name)
		silences = append(silences, q.Name)
		if q.Region != "" && !slices.Contains(silences, q.Region) {
			silences = append(silences, q.Region)
		}
	}
	return names, silences
}

func (p *player) setDown(name string, down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down[name] = down
}

func (p *player) isDown(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.down[name]
}

// signal kills, stops or restarts processes.
func (p *player) signal(ctx context.Context, i int, s plan.Step, lasts time.Duration) error {
	processes, err := p.world().processes(s.Target)
	if err != nil {
		return err
	}
	p.rig.rand.Shuffle(len(processes), func(i, j int) { processes[i], processes[j] = processes[j], processes[i] })
	names, silences := namesOf(processes)
	f := p.begin(i, s, names, silences)
	f.Effect = fmt.Sprintf("%v", names)
	switch s.Do {
	case plan.Pause:
		for _, name := range names {
			if err := p.rig.processes.Signal(ctx, name, syscall.SIGSTOP, lasts+healAfter); err != nil {
				return err
			}
			p.mu.Lock()
			p.paused[name] = true
			p.mu.Unlock()
		}
		f.Full = p.rig.clock.Now()
		p.background(ctx, f, func(ctx context.Context) error {
			waited := pause.For(ctx, lasts)
			f.Until = p.rig.clock.Now()
			for _, name := range names {
				if n := p.rig.watch.heardIn(name, f.Full.Add(faultSlack/2), f.Until); n > 0 && lasts > faultSlack {
					f.NoEffect = fmt.Sprintf("%s answered while it was stopped", name)
				}
			}
			return errors.Join(waited, p.resume(context.WithoutCancel(ctx), names))
		})
		return nil
	case plan.Restart:
		defer p.end(f)
		return p.restart(ctx, names)
	default:
	}
	heals := healAfter + lasts
	if lasts == 0 {
		heals = time.Hour
	}
	for _, name := range names {
		if err := p.rig.processes.Signal(ctx, name, syscall.SIGKILL, heals); err != nil {
			return err
		}
		p.setDown(name, true)
	}
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	for _, name := range names {
		if err := p.rig.processes.Ended(limited, name); err != nil {
			return err
		}
	}
	f.Full = p.rig.clock.Now()
	if lasts == 0 {
		f.Until = instant.Instant(1<<62) - 1 // mend says when
		p.end(f)
		return nil
	}
	p.background(ctx, f, func(ctx context.Context) error {
		if err := pause.For(ctx, p.until(f.From.Add(lasts))); err != nil {
			return err
		}
		f.Until = p.rig.clock.Now()
		for _, name := range names {
			if err := p.start(ctx, name); err != nil {
				return err
			}
		}
		return nil
	})
	return nil
}

func (p *player) resume(ctx context.Context, names []string) error {
	var errs []error
	for _, name := range names {
		p.mu.Lock()
		paused := p.paused[name]
		delete(p.paused, name)
		p.mu.Unlock()
		if paused {
			errs = append(errs, p.rig.processes.Signal(ctx, name, syscall.SIGCONT, 0))
		}
	}
	return errors.Join(errs...)
}

// restart ends processes in order and starts them again.
func (p *player) restart(ctx context.Context, names []string) error {
	limited, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	for _, name := range names {
		if err := p.rig.processes.Signal(ctx, name, syscall.SIGTERM, healAfter); err != nil {
			return err
		}
		p.setDown(name, true)
	}
	for _, name := range names {
		if err := p.rig.processes.Ended(limited, name); err != nil {
			return err
		}
		if err := p.start(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// rolling restarts a region's servers, one after the other, each when the one
// before follows again.
func (p *player) rolling(ctx context.Context, i int, s plan.Step) error {
	processes, err := p.world().processes(s.Target)
	if err != nil {
		return err
	}
	names, silences := namesOf(processes)
	f := p.begin(i, s, names, silences)
	f.Effect = fmt.Sprintf("%v, one after the other", names)
	p.background(ctx, f, func(ctx context.Context) error {
		for _, q := range processes {
			if err := p.restart(ctx, []string{q.Name}); err != nil {
				return err
			}
			if err := p.following(ctx, q); err != nil {
				return err
			}
			if err := pause.For(ctx, s.Pause); err != nil {
				return err
			}
		}
		return nil
	})
	return nil
}

// following waits until a server follows its leader, or leads, and has applied
// what the others have.
func (p *player) following(ctx context.Context, q clusterfile.Process) error {
	limited, cancel := context.WithTimeoutCause(ctx, stepLimit, fmt.Errorf("%s does not follow within %v of its start", q.Name, stepLimit))
	defer cancel()
	for {
		own, err := p.rig.admin.DescribeServer(limited, q)
		st, errStatus := p.rig.admin.ServerStatus(limited, q)
		if err == nil && errStatus == nil && own.GetLeader() != "" && own.GetAppliedIndex()+100 > st.GetAppliedIndex() {
			return nil
		}
		if err := pause.For(limited, retell); err != nil {
			return err
		}
	}
}

// start starts a process, and tells it the faults that it has to carry still.
func (p *player) start(ctx context.Context, name string) error {
	limited, cancel := context.WithTimeoutCause(ctx, serveLimit, fmt.Errorf("%s: not started within %v", name, serveLimit))
	defer cancel()
	if err := p.rig.processes.Ended(limited, name); err != nil {
		return err
	}
	if err := p.rig.processes.Start(limited, name); err != nil {
		return err
	}
	p.setDown(name, false)
	process, _ := p.rig.file().Process(name)
	for {
		req := p.carried.left(name, p.rig.clock.Now())
		if len(req.GetFaults())+len(req.GetDiskFaults()) == 0 || p.rig.admin.SetFaults(limited, process, req) == nil {
			return nil
		}
		if err := pause.For(limited, retell); err != nil {
			return err
		}
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
			return errors.Join(errs...)
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

// working reports whether every lock has had a holder that has written.
func (l *workload) working() bool {
	wrote := map[string]bool{}
	for _, a := range l.records() {
		if a.Probes {
			continue
		}
		wrote[a.Lock] = wrote[a.Lock] || slices.ContainsFunc(a.Events, func(e check.Event) bool { return e.Kind == check.Wrote })
	}
	for _, ok := range wrote {
		if !ok {
			return false
		}
	}
	return true
}
