package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

// Bounds of a session's TTL.
const (
	DefaultTTL = 10 * time.Second
	MinTTL     = 500 * time.Millisecond
	MaxTTL     = 10 * time.Minute
	// CautiousTTL is below what surely survives a change of leader.
	CautiousTTL = 3 * time.Second
)

// Region is where a region's servers are.
type Region struct {
	Name    string
	Servers []Server
}

// Server is one region server.
type Server struct {
	Name string
	// API address, host:port.
	API string
}

// Links makes the connections, under the client's certificate. Package connect
// makes them from a cluster's files.
type Links interface {
	DialGRPC(plane link.Plane, peer link.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error)
}

// Config of a Client.
type Config struct {
	// Cluster is the cluster's name. It is kept in handles, so that one is not
	// taken to another cluster; it may be empty.
	Cluster string
	Regions []Region
	// Home is asked first; default the first of Regions.
	Home  string
	Links Links
	// TTL of sessions, MinTTL to MaxTTL; default DefaultTTL.
	TTL    time.Duration
	Labels map[string]string
	// Cache is read first by Lookup; nil: the region is asked.
	Cache LeaseCache
	// Clock defaults to the machine's lease clock.
	Clock  clock.Clock
	Logger *slog.Logger
	// Ended, if set, is called when Close or Leave has ended everything else: what
	// the client had for itself alone is closed there. Its error is joined to theirs.
	Ended func() error

	// random defaults to fair dice; tests load them.
	random dice
}

func (c Config) withDefaults() (Config, error) {
	if c.TTL == 0 {
		c.TTL = DefaultTTL
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Home == "" && len(c.Regions) > 0 {
		c.Home = c.Regions[0].Name
	}
	if c.random == nil {
		c.random = fairDice
	}
	if c.Clock == nil {
		sys, err := clock.NewSystem()
		if err != nil {
			return c, err
		}
		c.Clock = sys
	}
	return c, nil
}

// Validate reports all faults at once.
func (c Config) Validate() error {
	var errs []error
	if len(c.Regions) == 0 {
		errs = append(errs, errors.New("regions: none given; name at least one region with its servers"))
	}
	for _, r := range c.Regions {
		if len(r.Servers) == 0 {
			errs = append(errs, fmt.Errorf("regions: %q has no servers; give at least one API address", r.Name))
		}
	}
	if c.Home != "" && !slices.ContainsFunc(c.Regions, func(r Region) bool { return r.Name == c.Home }) {
		errs = append(errs, fmt.Errorf("home: region %q is not among the regions", c.Home))
	}
	if c.Links == nil {
		errs = append(errs, errors.New("links: missing; connections need certificates"))
	}
	if c.TTL != 0 {
		if err := checkTTL(c.TTL); err != nil {
			errs = append(errs, err)
		}
	}
	if err := checkLabels(c.Labels); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Client holds sessions and leases. It is safe for concurrent use.
type Client struct {
	cfg  Config
	ctx  context.Context
	stop context.CancelCauseFunc
	work sync.WaitGroup

	regions map[string]*region
	order   []string // home first
	// own is the session of the Client's own methods.
	own *Session
	// cautious warns once of a short TTL.
	cautious sync.Once

	mu       sync.Mutex
	closing  bool
	opened   int                   // sessions, ever
	phase    float64               // see phase
	sessions map[*Session]struct{} // but the own one
	hints    map[string]string     // resource to region
	// partitions of resources; lookups by what they look for.
	partitions map[string]string
	lookups    map[lookupKey]*lookup
}

// New returns a client. It connects when it is first used.
func New(cfg Config) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	if cfg.Ended != nil {
		cfg.Ended = sync.OnceValue(cfg.Ended)
	}
	ctx, stop := context.WithCancelCause(context.Background())
	c := &Client{
		cfg: cfg, ctx: ctx, stop: stop, regions: map[string]*region{},
		sessions: map[*Session]struct{}{}, hints: map[string]string{},
		partitions: map[string]string{}, lookups: map[lookupKey]*lookup{}, phase: rand.Float64(),
	}
	for _, r := range cfg.Regions {
		c.regions[r.Name] = newRegion(c, r)
		if r.Name == cfg.Home {
			c.order = append([]string{r.Name}, c.order...)
		} else {
			c.order = append(c.order, r.Name)
		}
	}
	c.own = c.newSession(cfg.TTL, cfg.Labels)
	c.spawn(func() {
		err := clock.Watch(ctx, clock.WatchConfig{Clock: cfg.Clock, Restarted: func(reason string) {
			cfg.Logger.Warn("this process or its clock stood still; leases are trusted again after the next keepalive", "reason", reason)
			for _, r := range c.regions {
				r.clockGap()
			}
		}, Slept: func() {
			for _, r := range c.regions {
				wake.Up(r.wake)
				wake.Up(r.tick)
			}
		}})
		if err != nil && ctx.Err() == nil {
			cfg.Logger.Error("clock watch ended", "error", err)
		}
	})
	return c, nil
}

// spawn runs f in a goroutine that Close waits for; false once the client is
// being closed.
func (c *Client) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return false
	}
	c.work.Go(f)
	return true
}

// Close ends all leases and sessions. Sessions are closed at the regions as
// far as that works before ctx ends; the rest expire.
func (c *Client) Close(ctx context.Context) error {
	return c.end(func(s *Session) error { return s.Close(ctx) })
}

// Leave ends the client but not its sessions: see [Session.Leave].
func (c *Client) Leave(ctx context.Context) error {
	return c.end(func(s *Session) error { return s.Leave(ctx) })
}

func (c *Client) end(how func(*Session) error) error {
	err := c.endAll(how)
	c.mu.Lock()
	c.closing = true
	late := slices.Collect(maps.Keys(c.sessions)) // opened meanwhile
	c.mu.Unlock()
	c.stop(ErrClosed)
	for _, s := range late {
		for _, p := range s.seats {
			p.abandon()
		}
	}
	c.work.Wait()
	errs := []error{err}
	for _, r := range c.regions {
		errs = append(errs, r.conns.close())
	}
	if c.cfg.Ended != nil {
		errs = append(errs, c.cfg.Ended())
	}
	return errors.Join(errs...)
}

// Session is the one of the Client's own methods.
func (c *Client) Session() *Session { return c.own }

// Acquire is [Session.Acquire] of the Client's own session.
func (c *Client) Acquire(ctx context.Context, resource string, options ...Option) (*Lease, error) {
	return c.own.Acquire(ctx, resource, options...)
}

// AcquireSlot is [Session.AcquireSlot] of the Client's own session.
func (c *Client) AcquireSlot(ctx context.Context, resource string, slots int, options ...Option) (*Lease, error) {
	return c.own.AcquireSlot(ctx, resource, slots, options...)
}

// Get returns who holds a resource; nil if nobody does.
func (c *Client) Get(ctx context.Context, resource string) (lease *pb.LeaseInfo, err error) {
	if _, err := shard.Parse(resource); err != nil {
		return nil, invalidResource(err)
	}
	err = c.route(ctx, resource, func(ctx context.Context, r *region) (err error) {
		lease, err = r.get(ctx, resource)
		return err
	})
	return lease, err
}

// List returns a page of a region's leases; region "" is the home region.
func (c *Client) List(ctx context.Context, region string, req *pb.ListLeasesRequest) (res *pb.ListLeasesResponse, err error) {
	r, err := c.region(region)
	if err == nil {
		err = checkPrefix(req.GetPrefix())
	}
	if err != nil {
		return nil, err
	}
	err = r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) error {
		res, err = pb.NewLeaseServiceClient(cc).ListLeases(ctx, req)
		return err
	})
	return res, err
}

// Call makes a call to any server of a region ("" is the home region), the
// next one if one fails.
func (c *Client) Call(ctx context.Context, region string, do func(ctx context.Context, cc grpc.ClientConnInterface) error) error {
	r, err := c.region(region)
	if err != nil {
		return err
	}
	return r.conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) error { return do(ctx, cc) })
}

func (c *Client) region(name string) (*region, error) {
	if name == "" {
		name = c.cfg.Home
	}
	r, ok := c.regions[name]
	if !ok {
		return nil, fmt.Errorf("region: %q is not configured; use one of %v", name, c.order)
	}
	return r, nil
}
