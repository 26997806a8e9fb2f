package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/headlease/headlease/internal/pause"
)

// producers run at a time.
const producers = 3

// frozenFor is longer than a session and a head lease.
const frozenFor = 7 * time.Second

// play produces, breaks everything meanwhile, and checks.
func (t *theatre) play(ctx context.Context) error {
	t.say("the cluster is ready; three workers and %d producers start", producers)
	for i := range 3 {
		if err := t.startWorker(fmt.Sprintf("worker-%d", i+1)); err != nil {
			return err
		}
	}
	producing := make(chan error, 1)
	produced, cancel := context.WithCancel(ctx)
	defer cancel()
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
	close(broken)
	if err := <-producing; err != nil {
		return err
	}
	t.say("all orders are produced and everything has been broken; the rest is handled")
	if err := t.drained(ctx); err != nil {
		return err
	}
	return t.verdict(ctx)
}

// breakThings breaks workers, Redis and, the first time, a region.
func (t *theatre) breakThings(ctx context.Context, round int) error {
	name := func(i int) string { return fmt.Sprintf("worker-%d", (int(t.o.seed)+round+i)%3+1) }
	steps := []func() error{
		func() error { return t.crash(ctx, name(0)) },
		func() error { return t.freeze(ctx, name(1)) },
		func() error { return t.loseRegion(ctx) },
		func() error { return t.restartRedis(ctx) },
		func() error { return t.redeploy(ctx) },
	}
	if round > 0 {
		steps = append(steps[:2:2], steps[3:]...) // there is one region left
	}
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
	if err := pause.For(ctx, 4*time.Second); err != nil {
		return err
	}
	t.say("%s starts again", name)
	return t.startWorker(name)
}

// freeze stops a worker between its checks and its sends, until others have its
// shards.
func (t *theatre) freeze(ctx context.Context, name string) error {
	w := t.workers[name]
	if err := w.Signal(syscall.SIGUSR1); err != nil {
		return err
	}
	limited, cancel := context.WithTimeoutCause(ctx, 20*time.Second, fmt.Errorf("%s did not stop itself", name))
	defer cancel()
	if err := w.WaitStopped(limited); err != nil {
		return err
	}
	t.say("%s is frozen between check and send, with %d writes on their way", name, w.heard(eventFreezing))
	if err := pause.For(ctx, frozenFor); err != nil {
		return err
	}
	t.say("%s goes on, after %v", name, frozenFor)
	return w.Signal(syscall.SIGCONT)
}

func (t *theatre) restartRedis(ctx context.Context) error {
	t.say("kill -9 of redis-server, which starts again after a second")
	t.redis.Kill()
	if err := pause.For(ctx, time.Second); err != nil {
		return err
	}
	return t.redis.Start()
}

// redeploy stops and starts the workers one after the other.
func (t *theatre) redeploy(ctx context.Context) error {
	t.say("rolling redeployment of the workers")
	for i := range 3 {
		name := fmt.Sprintf("worker-%d", i+1)
		w := t.workers[name]
		if err := w.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		limited, cancel := context.WithTimeoutCause(ctx, 40*time.Second, fmt.Errorf("%s did not stop", name))
		err := w.Wait(limited)
		cancel()
		if err != nil {
			return err
		}
		if err := t.startWorker(name); err != nil {
			return err
		}
		if err := pause.For(ctx, 2*time.Second); err != nil {
			return err
		}
	}
	return nil
}

func (t *theatre) loseRegion(ctx context.Context) error {
	region := t.cluster.File().Regions[0]
	t.say("kill -9 of region %s, which does not come back", region.Name)
	for _, s := range region.Servers {
		if err := t.cluster.Kill(ctx, s.Name); err != nil {
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
		p, err := t.start(name, "produce", "--seed", fmt.Sprint(t.o.seed*1000+uint64(i*10+life)), "--count", fmt.Sprint(count), "--over", over.String())
		if err != nil {
			return err
		}
		if i == 0 && life == 0 {
			for p.heard(eventSent) < count/2 && p.Running() {
				if err := pause.For(ctx, 20*time.Millisecond); err != nil {
					return err
				}
			}
			t.say("kill -9 of %s, half way", name)
			if err := t.kill(ctx, p); err != nil {
				return err
			}
			count, over = count-p.heard(eventSent), over/2
			continue
		}
		if err := p.Wait(ctx); err != nil {
			return err
		}
		if sent := p.heard(eventSent); sent != count {
			return fmt.Errorf("%s: %d of %d sent; %s\n%s", name, sent, count, p.Exit(), p.LogTail())
		}
		return nil
	}
}
