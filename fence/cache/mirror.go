package cache

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"golang.org/x/time/rate"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/wake"
)

// Defaults of a Mirror.
const (
	DefaultMaxAge     = 15 * time.Second
	DefaultQueueLimit = 1 << 16
	DefaultTimeout    = time.Second
	// Tombstone is how long the end of a lease is told, and kept from older writes.
	Tombstone = time.Minute
	// WriteWithin is how old a write may be when the server executes it [F24].
	WriteWithin = 10 * time.Second
)

// The pace of the mirror.
const (
	passEvery = time.Second
	// missingEvery bounds rebuilds that a missing entry causes: an entry that was evicted is
	// written by the pass that missed it.
	missingEvery = 10 * time.Second
	maxEnds      = 1 << 16
	batchMax     = 256
	writesPerSec = 50_000
	minBackOff   = 100 * time.Millisecond
	maxBackOff   = 2 * time.Second
)

// Lease is one that a session holds.
type Lease struct {
	Resource string
	Holder   string
	Token    fence.Token
}

// Session is an open session and what it holds.
type Session struct {
	ID     string
	TTL    time.Duration
	Leases iter.Seq[Lease]
}

// Source is what the region's leader knows.
type Source struct {
	// Sessions of now; the sequence reads one state of the region, without locks.
	Sessions func() iter.Seq[Session]
	// Left of a session until it expires if it is not heard from; false if that is
	// not known here.
	Left func(session string) (time.Duration, bool)
}

// Config of a Mirror. Zero values stand for the defaults.
type Config struct {
	Server ServerConfig
	// Cluster and Region of the leases. Needed.
	Cluster, Region string
	// Prefix of the keys; default DefaultPrefix. A Reader must have the same.
	Prefix string
	// MaxAge bounds the expiry of a lease's entry, and so for how long one can be
	// wrong; default DefaultMaxAge.
	MaxAge time.Duration
	// QueueLimit bounds the resources of which something waits to be written; default
	// DefaultQueueLimit.
	QueueLimit int
	// Timeout of a round trip of up to 256 writes; default DefaultTimeout.
	Timeout time.Duration
	Source  Source
	// Registerer of the metrics; may be nil.
	Registerer prometheus.Registerer
	Logger     *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Prefix == "" {
		c.Prefix = DefaultPrefix
	}
	if c.MaxAge == 0 {
		c.MaxAge = DefaultMaxAge
	}
	if c.QueueLimit == 0 {
		c.QueueLimit = DefaultQueueLimit
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports all faults at once.
func (c Config) Validate() error {
	errs := []error{c.Server.Validate()}
	if c.Cluster == "" || c.Region == "" {
		errs = append(errs, errors.New("cluster and region: both are needed"))
	}
	if strings.Contains(c.Region, " ") {
		errs = append(errs, fmt.Errorf("region: %q has a space", c.Region))
	}
	if c.Source.Sessions == nil || c.Source.Left == nil {
		errs = append(errs, errors.New("source: is incomplete"))
	}
	if c.MaxAge < 0 || c.MaxAge > Tombstone {
		errs = append(errs, fmt.Errorf("max_age: %v is out of range; choose up to %v", c.MaxAge, Tombstone))
	}
	if c.QueueLimit < 0 || c.Timeout < 0 {
		errs = append(errs, errors.New("queue_limit, timeout: must not be negative"))
	}
	return errors.Join(errs...)
}

// change of a resource that waits to be written.
type change struct {
	token   fence.Token
	ended   bool
	session string
	holder  string
}

// ending is a lease that ended.
type ending struct {
	resource string
	token    fence.Token
	at       time.Time
}

// Mirror writes a region's leases to the cache.
type Mirror struct {
	cfg    Config
	key    keys
	client redis.UniversalClient
	metric *metrics
	more   chan struct{}
	pace   *rate.Limiter

	mu      sync.Mutex
	leads   bool
	pending map[string]change
	// why everything is to be written anew; empty: it is not.
	why string
	// ends of the last minute, oldest first from endsAt.
	ends   []ending
	endsAt int

	// What follows is Run's own.

	up    bool
	said  bool      // that it is down
	ahead time.Time // of the local clock at which the server's was asked
	// server is the server's clock at ahead, in milliseconds.
	server      int64
	pass        uint64
	rebuilt     time.Time
	lastMissing time.Time
}

// New returns a mirror, which does nothing before Run and writes nothing before
// Begin. It does not talk to the server.
func New(cfg Config) (*Mirror, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("lease cache: %w", err)
	}
	m := &Mirror{
		cfg: cfg.withDefaults(), more: make(chan struct{}, 1), pending: map[string]change{},
		pace: rate.NewLimiter(writesPerSec, 2*batchMax),
	}
	m.key = keys{m.cfg.Prefix, cfg.Cluster}
	var err error
	m.client, err = cfg.Server.Client(m.cfg.Timeout, func(ctx context.Context, cn *redis.Conn) error {
		m.rebuild("connect")
		return errors.Join(put.Load(ctx, cn).Err(), renew.Load(ctx, cn).Err())
	})
	if err != nil {
		return nil, fmt.Errorf("lease cache: %w", err)
	}
	m.metric = newMetrics(cfg.Registerer, m)
	return m, nil
}

// Begin: this server leads its region and tells the cache from now on.
func (m *Mirror) Begin() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leads, m.why = true, "term"
	wake.Up(m.more)
}

// End: it does not lead any more.
func (m *Mirror) End() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leads, m.why = false, ""
	m.metric.up.Set(0)
	clear(m.pending)
}

// Granted tells of a grant; on the leader it is written.
func (m *Mirror) Granted(session string, l Lease) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.enqueue(l.Resource, change{token: l.Token, session: session, holder: l.Holder})
}

// Ended tells of a lease's end, on every server of the region.
func (m *Mirror) Ended(resource string, token fence.Token) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := ending{resource, token, time.Now()}
	if len(m.ends) < maxEnds {
		m.ends = append(m.ends, e)
	} else {
		m.ends[m.endsAt] = e
		m.endsAt = (m.endsAt + 1) % maxEnds
	}
	m.enqueue(resource, change{token: token, ended: true})
}

// enqueue keeps the newest change of each resource. m.mu is held.
func (m *Mirror) enqueue(resource string, c change) {
	if !m.leads {
		return
	}
	was, known := m.pending[resource]
	if known && (was.token > c.token || was.token == c.token && was.ended) {
		return
	}
	if !known && len(m.pending) >= m.cfg.QueueLimit {
		m.metric.dropped.Add(float64(len(m.pending)))
		clear(m.pending)
		m.why = "overflow"
	}
	m.pending[resource] = c
	wake.Up(m.more)
}

// rebuild asks for everything to be written anew.
func (m *Mirror) rebuild(why string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.leads && m.why == "" {
		m.why = why
	}
}

// Close closes the client; Run does it too.
func (m *Mirror) Close() error {
	if err := m.client.Close(); !errors.Is(err, redis.ErrClosed) {
		return err
	}
	return nil
}

// Run writes until ctx ends, and closes the client. What the server does is no
// error.
func (m *Mirror) Run(ctx context.Context) error {
	defer func() { _ = m.Close() }()
	pass := time.NewTicker(passEvery)
	defer pass.Stop()
	var retry <-chan time.Time // set while the server is left alone
	backOff := minBackOff
	for {
		due := false
		select {
		case <-ctx.Done():
			return nil
		case <-retry:
			retry = nil
		case <-pass.C:
			due = true
		case <-m.more:
		}
		if retry != nil || !m.leading() {
			continue
		}
		if err := m.work(ctx, due); err != nil && ctx.Err() == nil {
			m.failed(err)
			retry = time.After(backOff)
			backOff = min(2*backOff, maxBackOff)
			continue
		}
		m.said = false
		backOff = minBackOff
	}
}

func (m *Mirror) leading() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.leads
}

// failed leaves the server alone for a while; then everything is written anew.
func (m *Mirror) failed(err error) {
	m.metric.failures.Inc()
	m.metric.up.Set(0)
	m.up = false
	m.rebuild("failure")
	if !m.said {
		m.said = true
		m.cfg.Logger.Warn("the lease cache is not written; grants and keepalives do not need it, and look-ups ask the region", "error", err)
	}
}

// work does what there is to do. An error means that the server cannot do its part
// now.
func (m *Mirror) work(ctx context.Context, due bool) error {
	if due || !m.up {
		if err := m.ask(ctx); err != nil {
			return err
		}
		m.up = true
		m.metric.up.Set(1)
	}
	if err := m.flush(ctx); err != nil {
		return err
	}
	if why := m.takeRebuild(); why != "" {
		m.metric.rebuilds.WithLabelValues(why).Inc()
		m.cfg.Logger.Debug("the lease cache is written anew", "reason", why)
		return m.everything(ctx)
	}
	if due {
		m.pass++
		return m.renewDue(ctx)
	}
	return nil
}

// ask learns the server's clock.
func (m *Mirror) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Timeout)
	defer cancel()
	at, err := m.client.Time(ctx).Result()
	if err != nil {
		return err
	}
	m.server, m.ahead = at.UnixMilli(), time.Now()
	return nil
}

// takeRebuild returns why everything is due to be written, at most once a second.
func (m *Mirror) takeRebuild() (why string) {
	if time.Since(m.rebuilt) < passEvery {
		return ""
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if why, m.why = m.why, ""; why != "" {
		m.rebuilt = time.Now()
	}
	return why
}

// flush writes what waits.
func (m *Mirror) flush(ctx context.Context) error {
	for {
		changes := m.take()
		if len(changes) == 0 {
			return nil
		}
		writes := make([]write, 0, len(changes))
		for resource, c := range changes {
			if c.ended {
				writes = append(writes, write{resource: resource, token: c.token})
				continue
			}
			if left, ok := m.cfg.Source.Left(c.session); ok && left > 0 {
				writes = append(writes, write{resource: resource, token: c.token, holder: c.holder, left: left})
			}
		}
		if err := m.put(ctx, writes); err != nil {
			return err
		}
	}
}

func (m *Mirror) take() map[string]change {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make(map[string]change, min(len(m.pending), batchMax))
	for resource, c := range m.pending {
		if len(out) == batchMax {
			break
		}
		out[resource] = c
		delete(m.pending, resource)
	}
	return out
}

// serverWide reports whether an error is the server's state and not one key's, at
// which something else is kept.
func serverWide(err error) bool {
	var reply redis.Error
	return !errors.As(err, &reply) || !strings.Contains(reply.Error(), "WRONGTYPE")
}
