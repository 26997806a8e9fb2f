package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/headlease/headlease/drill/plan"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/pause"
)

// redisSlack is how much of a cache's fault a look-up may not have felt: one
// that was under way.
const redisSlack = 200 * time.Millisecond

// cacheRegions are the regions whose lease caches a step takes down.
func (w world) cacheRegions(s plan.Step) ([]string, error) {
	have := []string{}
	for _, r := range caches(w.file) {
		have = append(have, r.Name)
	}
	if len(have) == 0 {
		return nil, errors.New("the cluster has no lease cache; a private one has them by 'redis: true', " +
			"a running one by a region's cache in its cluster file")
	}
	if s.Target.Who == plan.Nobody || s.Target.Who == plan.AllRegions {
		return have, nil
	}
	region, err := w.region(s.Target)
	if err == nil && !slices.Contains(have, region) {
		err = fmt.Errorf("region %s has no lease cache; %v have", region, have)
	}
	return []string{region}, err
}

// redisDown kills or stops the Redis of regions' lease caches for a while.
func (p *player) redisDown(ctx context.Context, i int, s plan.Step, lasts time.Duration) error {
	regions, err := p.world().cacheRegions(s)
	if err != nil {
		return err
	}
	f := p.begin(i, s, regions, nil)
	var names []string
	for _, region := range regions {
		name := devcluster.RedisName(region)
		names = append(names, name)
		sig := syscall.SIGKILL
		if s.How == plan.PauseIt {
			sig = syscall.SIGSTOP
		}
		if err := p.rig.processes.Signal(ctx, name, sig, lasts+healAfter); err != nil {
			return err
		}
		if s.How == plan.KillIt {
			p.setDown(name, true)
		} else {
			p.setPaused(name)
		}
	}
	f.Full = p.rig.clock.Now()
	p.background(ctx, f, func(ctx context.Context) error {
		waited := pause.For(ctx, p.until(f.From.Add(lasts)))
		f.Until = p.rig.clock.Now()
		var felt []string
		for _, region := range regions {
			if n := p.looks.cached(region, f.Full.Add(redisSlack), f.Until); n > 0 {
				f.NoEffect = fmt.Sprintf("%d look-ups came out of the cache of %s while it was down", n, region)
			} else if p.looks.cached(region, p.began, f.From) > 0 {
				felt = append(felt, region)
			}
		}
		switch {
		case f.NoEffect != "":
		case len(felt) == 0:
			f.NoEffect = "no look-up had come out of a cache before"
		default:
			f.Effect = "no look-up came out of the cache of " + strings.Join(felt, ", ")
		}
		if waited != nil || s.How == plan.PauseIt {
			// What was killed mend starts, if the drill is over.
			return errors.Join(waited, p.resume(context.WithoutCancel(ctx), names))
		}
		for _, name := range names {
			if err := p.start(ctx, name); err != nil {
				return err
			}
		}
		return nil
	})
	return nil
}
