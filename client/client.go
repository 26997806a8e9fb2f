package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/link"
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

// Links makes the connections; package internal/link's do.
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
	// Clock defaults to the machine's lease clock.
	Clock  clock.Clock
	Logger *slog.Logger
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
	if c.TTL != 0 && (c.TTL < MinTTL || c.TTL > MaxTTL) {
		errs = append(errs, fmt.Errorf("ttl: %v is out of range; choose %v to %v", c.TTL, MinTTL, MaxTTL))
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

	mu      sync.Mutex
	closing bool
	hints   map[string]string // resource to region
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
	if cfg.TTL < CautiousTTL {
		cfg.Logger.Warn("a session with this ttl may not survive a change of leader", "ttl", cfg.TTL, "advised", CautiousTTL)
	}
	ctx, stop := context.WithCancelCause(context.Background())
	c := &Client{cfg: cfg, ctx: ctx, stop: stop, regions: map[string]*region{}, hints: map[string]string{}}
	for _, r := range cfg.Regions {
		c.regions[r.Name] = newRegion(c, r)
		if r.Name == cfg.Home {
			c.order = append([]string{r.Name}, c.order...)
		} else {
			c.order = append(c.order, r.Name)
		}
	}
	c.spawn(func() {
		err := clock.Watch(ctx, clock.WatchConfig{Clock: cfg.Clock, Restarted: func(reason string) {
			cfg.Logger.Warn("this process or its clock stood still; leases are trusted again after the next keepalive", "reason", reason)
			for _, r := range c.regions {
				r.clockGap()
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
	return c.end(func(r *region) error { return r.closeSession(ctx) })
}

// Leave ends the client but not its sessions: they live for their TTL from
// here on, and their leases can be ended with ReleaseHandle. Before that it
// sends one more keepalive, so that the TTL starts now and everything granted
// is confirmed; the error says where that did not work before ctx ended.
func (c *Client) Leave(ctx context.Context) error {
	return c.end(func(r *region) error { return r.leaveSession(ctx) })
}

func (c *Client) end(how func(*region) error) error {
	errs := make([]error, len(c.order))
	var wg sync.WaitGroup
	for i, name := range c.order {
		wg.Go(func() { errs[i] = how(c.regions[name]) })
	}
	wg.Wait()
	c.mu.Lock()
	c.closing = true
	c.mu.Unlock()
	c.stop(ErrClosed)
	for _, r := range c.regions {
		r.abandon() // one that was opened meanwhile
	}
	c.work.Wait()
	for _, r := range c.regions {
		errs = append(errs, r.conns.close())
	}
	return errors.Join(errs...)
}

// Option of Acquire.
type Option func(*acquireOptions)

type acquireOptions struct {
	wait bool
}

// Wait takes a place in the queue when the resource is held, until ctx ends.
func Wait() Option { return func(o *acquireOptions) { o.wait = true } }

// Acquire takes a lease on a resource: shard/N or lock/NAME. Without Wait it
// fails with ErrBusy when somebody else holds it. It looks for the region that
// owns the resource's partition, waits out lapses and promotions, and gives up
// when ctx does.
func (c *Client) Acquire(ctx context.Context, resource string, options ...Option) (*Lease, error) {
	if _, err := shard.Parse(resource); err != nil {
		return nil, invalidResource(err)
	}
	var o acquireOptions
	for _, f := range options {
		f(&o)
	}
	var lease *Lease
	err := c.route(ctx, resource, func(ctx context.Context, r *region) (err error) {
		lease, err = r.acquire(ctx, resource, o)
		return err
	})
	return lease, err
}

// Get returns who holds a resource; nil if nobody does.
func (c *Client) Get(ctx context.Context, resource string) (lease *pb.LeaseInfo, err error) {
	if _, err := shard.Parse(resource); err != nil {
		return nil, invalidResource(err)
	}
	err = c.route(ctx, resource, func(ctx context.Context, r *region) error { return r.get(ctx, resource, &lease) })
	return lease, err
}

// List returns a page of a region's leases; region "" is the home region.
func (c *Client) List(ctx context.Context, region string, req *pb.ListLeasesRequest) (res *pb.ListLeasesResponse, err error) {
	r, err := c.region(region)
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
