package redisguard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/wake"
)

// servers is what a guard knows of the servers behind its client.
type servers struct {
	// more wakes Watch.
	more chan struct{}
	// policySeen is set once a server has told its maxmemory-policy.
	policySeen atomic.Bool

	// keeping is the length of kept.
	keeping atomic.Int64

	mu    sync.Mutex
	nodes map[string]*node // by address; alone is the only one without a Redis Cluster
	kept  map[*Claim]struct{}
}

const alone = "redis"

// node is one server, or whoever is at its address.
type node struct {
	// dials counts new connections, each of which may lead to another server; checked is
	// dials as of the last look.
	dials, checked atomic.Uint64
	more           chan struct{}
	// asking is a lock held over round trips.
	asking chan struct{}
	// run id as last seen. Under asking.
	run string
}

func (s *servers) init(client redis.UniversalClient) {
	s.more, s.nodes, s.kept = make(chan struct{}, 1), map[string]*node{}, map[*Claim]struct{}{}
	if c, ok := client.(*redis.ClusterClient); ok {
		c.OnNewNode(func(n *redis.Client) { n.AddHook(dialed{s.node(n.Options().Addr)}) })
		return
	}
	client.AddHook(dialed{s.node(alone)})
}

func (s *servers) node(address string) *node {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nodes[address]
	if n == nil {
		n = &node{more: s.more, asking: make(chan struct{}, 1)}
		s.nodes[address] = n
	}
	return n
}

// dialed is a hook that counts connections and leaves everything else alone.
type dialed struct{ node *node }

// DialHook counts.
func (d dialed) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		d.node.dials.Add(1)
		wake.Up(d.node.more)
		return next(ctx, network, addr)
	}
}

// ProcessHook does nothing.
func (dialed) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

// ProcessPipelineHook does nothing.
func (dialed) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Claim is a claim that the guard keeps: see [Guard.Keep].
type Claim struct {
	guard    *Guard
	resource string
	token    fence.Token
	valid    func() bool
	refused  atomic.Pointer[fence.StaleError]
}

// Keep claims the resource, and claims it again whenever the server turns out to be
// another one, restarted or a replica that took over, which may have forgotten the mark
// or gone back to an older one. It does so as long as valid returns true, which is
// lease.Valid, and until Release. The look is made before the next guarded write on a
// new connection, and by [Guard.Watch]; run Watch so that a holder that does not write
// claims again too.
//
// It fails as Claim does, and then keeps nothing.
func (g *Guard) Keep(ctx context.Context, resource string, token fence.Token, valid func() bool) (*Claim, error) {
	if valid == nil {
		return nil, fmt.Errorf("claim of %s: valid is nil; give lease.Valid", resource)
	}
	c := &Claim{guard: g, resource: resource, token: token, valid: valid}
	// Kept before it is made: a server that changes in between is then noticed.
	g.servers.mu.Lock()
	g.servers.kept[c] = struct{}{}
	g.servers.keeping.Add(1)
	g.servers.mu.Unlock()
	if err := g.Claim(ctx, resource, token); err != nil {
		c.Release()
		return nil, err
	}
	return c, nil
}

// Release ends the keeping. The mark stays.
func (c *Claim) Release() {
	s := &c.guard.servers
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.kept[c]; ok {
		delete(s.kept, c)
		s.keeping.Add(-1)
	}
}

// Err is the *fence.StaleError of a later attempt to claim, after which nothing is kept
// any more; else nil.
func (c *Claim) Err() error {
	if stale := c.refused.Load(); stale != nil {
		return stale
	}
	return nil
}

// Watch looks at every new connection, and each Options.CheckEvery, whether a server is
// another one, and claims again what is kept there, until ctx ends, which is no error.
func (g *Guard) Watch(ctx context.Context) error {
	tick := time.NewTicker(g.opts.CheckEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-g.servers.more:
		}
		err := g.eachMaster(ctx, g.look)
		if err != nil && ctx.Err() == nil {
			g.opts.Logger.Debug("not every server of guarded data was looked at", "error", err)
		}
	}
}

// node is the server of a key.
func (g *Guard) node(ctx context.Context, key string) (c redis.Cmdable, address string, err error) {
	if c, ok := g.client.(*redis.ClusterClient); ok {
		n, err := c.MasterForKey(ctx, key)
		if err != nil {
			return nil, "", err
		}
		return n, n.Options().Addr, nil
	}
	return g.client, alone, nil
}

// eachMaster calls f for each master, concurrently if there are several, and returns
// their errors.
func (g *Guard) eachMaster(ctx context.Context, f func(ctx context.Context, address string, c redis.Cmdable) error) error {
	c, ok := g.client.(*redis.ClusterClient)
	if !ok {
		return f(ctx, alone, g.client)
	}
	return c.ForEachMaster(ctx, func(ctx context.Context, n *redis.Client) error { return f(ctx, n.Options().Addr, n) })
}

// keeps reports whether the claim is kept, and its lease valid.
func (g *Guard) keeps(resource string, token fence.Token) bool {
	for _, c := range g.allKept() {
		if c.resource == resource && c.token == token && c.valid() {
			return true
		}
	}
	return false
}

func (g *Guard) allKept() (all []*Claim) {
	g.servers.mu.Lock()
	defer g.servers.mu.Unlock()
	for c := range g.servers.kept {
		all = append(all, c)
	}
	return all
}

// reclaimIfNew looks at the resource's server if there was a new connection to it since
// the last look, and something is kept.
func (g *Guard) reclaimIfNew(ctx context.Context, resource string) error {
	if g.servers.keeping.Load() == 0 {
		return nil
	}
	key, err := g.MarkKey(resource)
	if err != nil {
		return err
	}
	c, address, err := g.node(ctx, key)
	if err != nil {
		return err
	}
	if n := g.servers.node(address); n.checked.Load() == n.dials.Load() {
		return nil
	}
	return g.look(ctx, address, c)
}

// look asks a server for its run id and, if it is new or another, claims what is kept
// there again.
func (g *Guard) look(ctx context.Context, address string, c redis.Cmdable) error {
	n := g.servers.node(address)
	select {
	case n.asking <- struct{}{}:
		defer func() { <-n.asking }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	dials := n.dials.Load()
	run, err := infoField(ctx, c, "server", "run_id")
	if err != nil {
		return err
	}
	if run != n.run {
		if n.run != "" {
			g.opts.Logger.Warn("the redis server of guarded data is another one than before, and may have lost fencing marks; what is held is claimed again",
				"server", address)
		}
		if err := g.reclaim(ctx, address); err != nil {
			return err // what is known stays as it was: tried again
		}
	}
	n.run = run
	n.checked.Store(dials)
	return nil
}

// reclaim claims what is kept on a server.
func (g *Guard) reclaim(ctx context.Context, address string) error {
	var errs []error
	for _, c := range g.allKept() {
		key, err := g.MarkKey(c.resource)
		if err != nil {
			continue // it was refused when it was made
		}
		if _, at, err := g.node(ctx, key); err != nil || at != address || !c.valid() {
			continue // elsewhere, or nothing is promised any more
		}
		_, err = g.run(ctx, g.claim, c.resource, c.token, nil, nil)
		var stale *fence.StaleError
		switch {
		case errors.As(err, &stale):
			c.refused.Store(stale)
			c.Release()
		case err != nil:
			errs = append(errs, fmt.Errorf("claim %s again: %w", c.resource, err))
		}
	}
	return errors.Join(errs...)
}

// infoField reads one line of INFO.
func infoField(ctx context.Context, c redis.Cmdable, section, field string) (string, error) {
	info, err := c.Info(ctx, section).Result()
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(value), nil
		}
	}
	return "", fmt.Errorf("the server's INFO %s has no %s", section, field)
}

// warnOfEviction looks once at what the servers do when their memory is full. It
// decides nothing, so servers that will not tell are asked again.
func (g *Guard) warnOfEviction(ctx context.Context) {
	if g.servers.policySeen.Load() {
		return
	}
	var worst atomic.Value
	err := g.eachMaster(ctx, func(ctx context.Context, _ string, c redis.Cmdable) error {
		policy, err := infoField(ctx, c, "memory", "maxmemory_policy")
		if err == nil && strings.HasPrefix(policy, "allkeys-") {
			worst.Store(policy)
		}
		return err
	})
	if err != nil {
		g.opts.Logger.Debug("the server's maxmemory-policy is not known", "err", err)
		return
	}
	if g.servers.policySeen.Swap(true) {
		return
	}
	if policy := worst.Load(); policy != nil {
		g.opts.Logger.Warn("redis may evict fencing marks, and a resource without one takes no writes until it is claimed again; set maxmemory-policy to noeviction or volatile-*",
			"maxmemory_policy", policy)
	}
}
