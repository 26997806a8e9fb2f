package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/drill/check"
	"github.com/headlease/headlease/fence/cache"
	"github.com/headlease/headlease/internal/clusterclient"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/pause"
)

const (
	// lookEvery is the pause between two look-ups in one region.
	lookEvery = 100 * time.Millisecond
	// lookLimit bounds one, of a lease cache and then of a region.
	lookLimit = 5 * time.Second
	// cacheTimeout of one connection's dial, read and write; the reader has a
	// shorter one for a whole look-up.
	cacheTimeout = time.Second
)

// lookups look up the locks of the workload through each region's lease cache.
// Close them.
type lookups struct {
	rig    *rig
	cancel context.CancelFunc
	work   sync.WaitGroup
	close  []func(context.Context) error

	mu  sync.Mutex
	all []check.Lookup
}

// caches are the regions that have a lease cache.
func caches(f clusterfile.File) []clusterfile.Region {
	return slices.DeleteFunc(slices.Clone(f.Regions), func(r clusterfile.Region) bool { return len(r.Cache.Addresses) == 0 })
}

// startLookups starts one client in each region that has a lease cache.
func (r *rig) startLookups(load *workload) (*lookups, error) {
	ctx, cancel := context.WithCancel(context.Background())
	l := &lookups{rig: r, cancel: cancel}
	locks := map[string][]string{} // by partition
	for _, a := range load.records() {
		if !a.Probes && !slices.Contains(locks[a.Partition], a.Lock) {
			locks[a.Partition] = append(locks[a.Partition], a.Lock)
		}
	}
	for _, region := range caches(r.file()) {
		c, err := l.client(region)
		if err != nil {
			l.stop(ctx)
			return nil, fmt.Errorf("look-ups in %s: %w", region.Name, err)
		}
		l.work.Go(func() { l.run(ctx, region.Name, c, locks) })
	}
	return l, nil
}

func (l *lookups) client(region clusterfile.Region) (*client.Client, error) {
	redis, err := cache.ServerConfig(region.Cache).Client(cacheTimeout, nil)
	if err != nil {
		return nil, err
	}
	l.close = append(l.close, func(context.Context) error { return redis.Close() })
	reader, err := cache.NewReader(redis, cache.ReaderConfig{Cluster: l.rig.file().Cluster})
	if err != nil {
		return nil, err
	}
	c, err := client.New(client.Config{
		Cluster: l.rig.file().Cluster, Regions: clusterclient.Regions(l.rig.file()), Home: region.Name, Links: l.rig.links,
		Clock: l.rig.clock, Cache: reader, Logger: l.rig.log.With("client", "look-ups "+region.Name),
	})
	if err == nil {
		l.close = append(l.close, c.Close)
	}
	return c, err
}

// run looks up what the region owns: its cache knows nothing of the rest.
func (l *lookups) run(ctx context.Context, home string, c *client.Client, locks map[string][]string) {
	for n := 0; ctx.Err() == nil; n++ {
		var own []string
		for partition, owner := range l.rig.watch.owners() {
			if owner.By == home {
				own = append(own, locks[partition]...)
			}
		}
		if len(own) > 0 {
			slices.Sort(own)
			l.look(ctx, home, c, own[n%len(own)])
		}
		_ = pause.For(ctx, lookEvery) // ends with ctx, as the loop does
	}
}

func (l *lookups) look(ctx context.Context, home string, c *client.Client, lock string) {
	limited, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	x := check.Lookup{Home: home, Lock: lock, Sent: l.rig.clock.Now()}
	h, err := c.Lookup(limited, lock)
	x.At = l.rig.clock.Now()
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		x.Failed = err.Error()
	default:
		x.Held, x.Token, x.Age, x.Cached = h.Held, h.Token, h.Age, h.Cached
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.all) < maxKept {
		l.all = append(l.all, x)
	}
}

// record returns what was looked up so far.
func (l *lookups) record() []check.Lookup {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

// cached counts the answers that came out of a region's cache in a span.
func (l *lookups) cached(home string, from, until instant.Instant) (n int) {
	for _, x := range l.record() {
		if x.Home == home && x.Cached && x.Sent > from && x.At <= until {
			n++
		}
	}
	return n
}

// stop ends the look-ups and their clients; it may be called again.
func (l *lookups) stop(ctx context.Context) {
	l.cancel()
	l.work.Wait()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
	defer cancel()
	var errs []error
	for _, f := range slices.Backward(l.close) {
		errs = append(errs, f(ctx))
	}
	l.close = nil
	if err := errors.Join(errs...); err != nil {
		l.rig.log.Info("look-ups not closed in order", "error", err)
	}
}
