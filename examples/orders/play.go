package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/pause"
)

// producers run at a time.
const producers = 3

const (
	// frozenFor is longer than a session and a head lease, and frozenMore how much
	// longer a slow machine may take to give the shards to others.
	frozenFor  = 7 * time.Second
	frozenMore = time.Minute
)

// play produces, breaks everything meanwhile, and checks.
func (t *theatre) play(ctx context.Context) error {
	t.say("the cluster is ready; three workers and %d producers start", producers)
	for i := range 3 {
		if err := t.startWorker(workerName(i)); err != nil {
			return err
		}
	}
	producing := make(chan error, 1)
	produced, cancel := context.WithCancel(ctx)
	defer cancel()
	go t.tell(produced)
	broken := make(chan struct{})
	go func() {
		err := t.produce(produced)
		for life := 0; err == nil; life++ {
			// Whatever is broken late has orders under way too.
			select {
			case <-broken:
				producing <- nil
				return
			default:
				err = t.trickle(produced, life)
			}
		}
		producing <- err
	}()
	if err := t.progress(ctx, t.o.messages/100); err != nil {
		return err
	}
	for round := range t.o.rounds {
		if err := t.breakThings(ctx, round); err != nil {
			return err
		}
	}
	for round := 0; round < 3*t.o.rounds && t.fewLate(); round++ {
		t.say("fewer late writes than %d at one of the stores: once more", t.o.late)
		if err := t.freeze(ctx, workerName(round), nil); err != nil {
			return err
		}
		if err := pause.For(ctx, 2*time.Second); err != nil {
			return err
		}
	}
	close(broken)
	if err := <-producing; err != nil {
		return err
	}
	t.say("all orders are produced and everything has been broken; the rest is handled")
	if err := t.drained(ctx); t.o.unguarded && errors.Is(err, errStalled) {
		// A stale holder took them from the stream, and no newer one knows.
		t.say("%v", err)
	} else if err != nil {
		return err
	}
	if err := t.check(ctx); err != nil {
		return err
	}
	t.res.print(t.say)
	if err := t.res.judge(t.o); err != nil {
		return err
	}
	if t.o.unguarded {
		t.say("as expected without the guard, for example:\n  %s", list(append(t.res.Stale, t.res.Disorder...), 3))
		return nil
	}
	t.say("every account's orders are there, once, in order: ok")
	return nil
}

// workerName is the name of the i-th of three, counted on from any i.
func workerName(i int) string { return fmt.Sprintf("worker-%d", i%3+1) }

func (t *theatre) fewLate() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return min(t.res.Late[inPostgres], t.res.Late[inRedis]) < t.o.late
}

// count adds to one of the result's numbers.
func (t *theatre) count(n *int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	*n++
}

// breakThings breaks workers, Redis and a region: in even rounds one is lost and
// another worker is killed while one is frozen; in odd ones the region
// comes back, and one worker is broken at a time.
func (t *theatre) breakThings(ctx context.Context, round int) error {
	first := int(t.o.seed)%3 + round
	crash := func() error { return t.crash(ctx, workerName(first)) }
	steps := []func() error{
		func() error { return t.freeze(ctx, workerName(first+1), crash) },
		func() error { return t.loseRegion(ctx) },
	}
	if round%2 == 1 {
		steps = []func() error{
			crash,
			func() error { return t.freeze(ctx, workerName(first+1), nil) },
			func() error { return t.regainRegion(ctx) },
		}
	}
	steps = append(steps, func() error { return t.restartRedis(ctx) }, func() error { return t.redeploy(ctx) })
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
		if err := pause.For(ctx, time.Second); err != nil {
			return err
		}
	}
	return nil
}

func (t *theatre) crash(ctx context.Context, name string) error {
	t.say("kill -9 of %s", name)
	if err := t.kill(ctx, t.workers[name]); err != nil {
		return err
	}
	t.count(&t.res.Killed)
	if err := pause.For(ctx, 4*time.Second); err != nil {
		return err
	}
	t.say("%s starts again", name)
	return t.startWorker(name)
}

// freeze stops a worker between its checks and its sends, until others have its
// shards. meanwhile, unless nil, is done while it is stopped.
func (t *theatre) freeze(ctx context.Context, name string, meanwhile func() error) error {
	w := t.workers[name]
	w.forget(eventFreezing)
	if err := w.Signal(syscall.SIGUSR1); err != nil {
		return err
	}
	limited, cancel := context.WithTimeoutCause(ctx, 30*time.Second, fmt.Errorf("%s did not stop itself", name))
	defer cancel()
	if err := w.WaitStopped(limited); err != nil {
		return err
	}
	began := time.Now()
	t.count(&t.res.Frozen)
	r, ok := w.heard(eventFreezing)
	for ; !ok; r, ok = w.heard(eventFreezing) { // it is on its way
		if err := pause.For(limited, 10*time.Millisecond); err != nil {
			return err
		}
	}
	t.say("%s is frozen between check and send, with %d writes on their way", name, len(r.Held))
	if meanwhile != nil {
		if err := meanwhile(); err != nil {
			return err
		}
	}
	if err := pause.For(ctx, frozenFor-time.Since(began)); err != nil {
		return err
	}
	moved := t.moved(ctx, r.Held)
	for time.Since(began) < frozenFor+frozenMore && moved < len(r.Held) && !t.o.unguarded {
		if err := pause.For(ctx, 200*time.Millisecond); err != nil {
			return err
		}
		moved = t.moved(ctx, r.Held)
	}
	t.say("%s goes on, after %.1f s; of the writes' shards %d have new holders", name, time.Since(began).Seconds(), moved)
	return w.Signal(syscall.SIGCONT)
}

// moved is how many of the shards a newer holder has claimed at Redis, which
// is the last store that it claims at. Without the guard none can be told.
func (t *theatre) moved(ctx context.Context, held []heldShard) (n int) {
	for _, h := range held {
		if mark, err := t.marks.Mark(ctx, h.Resource); err == nil && mark > h.Token {
			n++
		}
	}
	return n
}

func (t *theatre) restartRedis(ctx context.Context) error {
	t.say("kill -9 of Redis, which starts again after a second")
	t.countRefusals(ctx)
	t.redis.Kill()
	t.count(&t.res.Redis)
	if err := pause.For(ctx, time.Second); err != nil {
		return err
	}
	return t.redis.Start()
}

// redeploy stops and starts the workers one after the other.
func (t *theatre) redeploy(ctx context.Context) error {
	t.say("rolling redeployment of the workers")
	for i := range 3 {
		w := t.workers[workerName(i)]
		if err := w.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		limited, cancel := context.WithTimeoutCause(ctx, 40*time.Second, fmt.Errorf("%s did not stop", workerName(i)))
		err := w.Wait(limited)
		cancel()
		if err != nil {
			return err
		}
		if err := t.startWorker(workerName(i)); err != nil {
			return err
		}
		if err := pause.For(ctx, 2*time.Second); err != nil {
			return err
		}
	}
	t.count(&t.res.Redeploys)
	return nil
}

// loseRegion kills all servers of the region that owns most, and waits until its partitions
// have other owners.
func (t *theatre) loseRegion(ctx context.Context) error {
	return asAdmin(t.cluster, func(a *admin.Cluster) error {
		owned := map[string]int{}
		for _, o := range a.Look(ctx).Owners(a.File()) {
			owned[o.Region]++
		}
		lost := slices.MaxFunc(a.File().Regions, func(x, y clusterfile.Region) int { return owned[x.Name] - owned[y.Name] })
		if owned[lost.Name] == 0 {
			return inconclusive("no region owns a partition")
		}
		t.say("kill -9 of region %s, which owns %d of %d partitions", lost.Name, owned[lost.Name], len(a.File().Partitions))
		began := time.Now()
		names := make([]string, len(lost.Servers))
		for i, s := range lost.Servers {
			names[i] = s.Name
		}
		if err := t.cluster.Kill(ctx, names...); err != nil {
			return err
		}
		t.lost = names
		limited, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("the lost region's partitions have no owner after 2 minutes"))
		defer cancel()
		if err := a.WaitOwned(limited); err != nil {
			return err
		}
		took := time.Since(began)
		t.say("all partitions have owners again, after %.1f s", took.Seconds())
		t.mu.Lock()
		defer t.mu.Unlock()
		t.res.Regions++
		t.res.Failover = max(t.res.Failover, took)
		return nil
	})
}

// regainRegion starts what was lost, with its data; it owns nothing any more.
func (t *theatre) regainRegion(ctx context.Context) error {
	t.say("the lost region comes back: %v", t.lost)
	for _, name := range t.lost {
		if err := t.cluster.StartProcess(name); err != nil {
			return err
		}
	}
	return nil
}

// produce has the orders produced; the first producer is killed half way, and
// another takes over what is left of its part.
func (t *theatre) produce(ctx context.Context) error {
	each := (t.o.messages + producers - 1) / producers
	all := make(chan error, producers)
	for i := range producers {
		go func() { all <- t.produceOne(ctx, i, each) }()
	}
	var errs []error
	for range producers {
		errs = append(errs, <-all)
	}
	return errors.Join(errs...)
}

// trickle has a few more orders produced.
func (t *theatre) trickle(ctx context.Context, life int) error {
	p, err := t.start("producer-4", "produce", "--seed", fmt.Sprint(t.o.seed*1000+uint64(100+life)), "--count", "400", "--over", "1s")
	if err != nil {
		return err
	}
	return p.Wait(ctx)
}

func (t *theatre) produceOne(ctx context.Context, i, count int) error {
	over := t.o.over
	for life := 0; ; life++ {
		name := fmt.Sprintf("producer-%d", i+1)
		p, err := t.start(name, "produce", "--seed", fmt.Sprint(t.o.seed*1000+uint64(i*10+life)), "--count", fmt.Sprint(count), "--over", over.String(), fmt.Sprintf("--each=%v", i == 1))
		if err != nil {
			return err
		}
		if i == 0 && life == 0 {
			for p.sent() < count/2 && p.Running() {
				if err := pause.For(ctx, 20*time.Millisecond); err != nil {
					return err
				}
			}
			if p.Running() {
				t.say("kill -9 of %s, half way", name)
				if err := t.kill(ctx, p); err != nil && !errors.Is(err, os.ErrProcessDone) {
					return err
				}
				t.count(&t.res.Producers)
				count, over = count-p.sent(), over/2
				continue
			}
		}
		if err := p.Wait(ctx); err != nil {
			return err
		}
		if sent := p.sent(); sent != count {
			return fmt.Errorf("%s: %d of %d sent; %s\n%s", name, sent, count, p.Exit(), p.LogTail())
		}
		return nil
	}
}
