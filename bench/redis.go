package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redsync/redsync/v4"
	rsredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

func init() {
	registerSystem("redis", func() System { return &redisSystem{name: "redis", base: 16300, n: 1} })
	registerSystem("redisaof", func() System { return &redisSystem{name: "redisaof", base: 16310, n: 1, aof: true} })
	registerSystem("redlock", func() System { return &redisSystem{name: "redlock", base: 16320, n: 5, aof: true} })
	open := func(ctx context.Context, s System, o Opts) (Driver, error) {
		return openRedis(s.(*redisSystem), o), nil
	}
	register(&Spec{Name: "redis", System: "redis", Workloads: "W1 W2 W3 W4 W5 W6 W7", Share: 100, Open: open,
		Note: "single server, NO persistence; SET NX PX + INCR token in one Lua script; queue = pub/sub wake-up + retry"})
	register(&Spec{Name: "redis-aof", System: "redisaof", Workloads: "W1 W2 W3 W4 W5 W6 W7", Share: 100, Open: open,
		Note: "as redis, appendfsync always"})
	register(&Spec{Name: "redlock5", System: "redlock", Workloads: "W1 W2 W3 W5 W7", Share: 1,
		Note: "redsync over 5 servers, appendfsync always; NO fencing token; queue = redsync's own random 50-250 ms polling",
		Open: func(ctx context.Context, s System, o Opts) (Driver, error) {
			return openRedlock(s.(*redisSystem), o), nil
		}})
}

type redisSystem struct {
	name  string
	base  int
	n     int
	aof   bool
	env   *Env
	procs []*Proc
}

func (s *redisSystem) addr(i int) string { return fmt.Sprintf("%s:%d", s.env.host(i), s.base+i) }

func (s *redisSystem) Start(ctx context.Context, env *Env) error {
	s.env = env
	root := filepath.Join(env.Root, s.name+env.Tag)
	if err := os.RemoveAll(root); err != nil {
		return err
	}
	for i := 0; i < s.n; i++ {
		dir := filepath.Join(root, fmt.Sprintf("n%d", i))
		if err := os.MkdirAll(filepath.Join(dir, "d"), 0o755); err != nil {
			return err
		}
		if err := portFree(env.ns(i), s.addr(i)); err != nil {
			return err
		}
		ao := "no"
		if s.aof {
			ao = "yes"
		}
		p, err := startProc(fmt.Sprintf("%s-n%d", s.name, i), filepath.Join(dir, "log"), env.ns(i), "/usr/bin/redis-server",
			"--port", strconv.Itoa(s.base+i), "--bind", env.host(i), "--dir", filepath.Join(dir, "d"), "--save", "",
			"--appendonly", ao, "--appendfsync", "always", "--maxclients", "20000", "--tcp-backlog", "4096", "--loglevel", "warning")
		if err != nil {
			return err
		}
		s.procs = append(s.procs, p)
	}
	return poll(ctx, 50*time.Millisecond, 20*time.Second, s.Ready)
}

func (s *redisSystem) Stop() {
	for _, p := range s.procs {
		p.resume()
		p.kill()
	}
	s.procs = nil
}

func (s *redisSystem) Procs() []*Proc                           { return s.procs }
func (s *redisSystem) Leader(ctx context.Context) (int, error)  { return 0, nil }
func (s *redisSystem) Restart(ctx context.Context, i int) error { return s.procs[i].start() }
func (s *redisSystem) Info() string {
	d := "no persistence"
	if s.aof {
		d = "appendfsync always"
	}
	return fmt.Sprintf("Redis 7.0.15 (Debian), %d server(s), %s", s.n, d)
}

func (s *redisSystem) Ready(ctx context.Context) error {
	for i := range s.procs {
		c := s.client(i, nil, 1)
		err := c.Ping(ctx).Err()
		_ = c.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *redisSystem) client(i int, dial DialCtx, pool int) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: s.addr(i), Dialer: dial, PoolSize: pool, Protocol: 2, MaxRetries: -1,
		ContextTimeoutEnabled: true, DisableIdentity: true, DialTimeout: 2 * time.Second,
		ReadTimeout: 5 * time.Second, ReadBufferSize: 4096, WriteBufferSize: 4096, DialerRetries: 1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}})
}

// The pool may hold more connections than the one a sequential client uses:
// go-redis stops dialing for a second after as many failed dials as the pool is
// large, which would hide how soon a restarted server serves again (W5).
const redisPool = 200

// One script per operation; the owner string makes release and renew safe.
var (
	luaAcquire = redis.NewScript(`if redis.call('set',KEYS[1],ARGV[1],'NX','PX',ARGV[2]) then return redis.call('incr',KEYS[2]) end return 0`)
	luaRelease = redis.NewScript(`if redis.call('get',KEYS[1])==ARGV[1] then redis.call('del',KEYS[1]) redis.call('publish',KEYS[2],'1') return 1 end return 0`)
	luaRenew   = redis.NewScript(`for i=1,#KEYS do if redis.call('get',KEYS[i])~=ARGV[1] then return 0 end redis.call('pexpire',KEYS[i],ARGV[2]) end return 1`)
	luaHeld    = redis.NewScript(`local n=0 for i=ARGV[2],ARGV[3] do n=n+redis.call('exists','k:'..ARGV[1]..string.format('%d',i)) end return n`)
)

var redisOwner atomic.Uint64

type redisDriver struct {
	s     *redisSystem
	o     Opts
	c     *redis.Client
	owner string
	mu    sync.Mutex
	sub   *redis.PubSub
	notif atomic.Uint64
}

func openRedis(s *redisSystem, o Opts) *redisDriver {
	return &redisDriver{s: s, o: o, c: s.client(0, o.Dial, redisPool), owner: "c" + strconv.FormatUint(redisOwner.Add(1), 10)}
}

func (d *redisDriver) acquire(ctx context.Context, key, owner string, ttl time.Duration) (uint64, error) {
	n, err := luaAcquire.Run(ctx, d.c, []string{"k:" + key, "t:" + key}, owner, ttl.Milliseconds()).Uint64()
	if err == nil && n == 0 {
		err = ErrHeld
	}
	return n, err
}

func (d *redisDriver) Acquire(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	return d.acquire(ctx, key, d.owner, ttl)
}

// AcquireWait subscribes to the key's release channel, tries, and tries again at
// every message (every waiter is woken: that is what pub/sub gives) or after 1 s.
func (d *redisDriver) AcquireWait(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	d.mu.Lock()
	if d.sub == nil {
		d.sub = d.c.Subscribe(ctx, "r:"+key)
		if _, err := d.sub.Receive(ctx); err != nil {
			_ = d.sub.Close()
			d.sub = nil
			d.mu.Unlock()
			return 0, err
		}
	}
	ch := d.sub.Channel(redis.WithChannelSize(1000))
	d.mu.Unlock()
	for {
		n, err := d.acquire(ctx, key, d.owner, ttl)
		if err == nil || !errors.Is(err, ErrHeld) {
			return n, err
		}
		select {
		case <-ch:
			d.notif.Add(1)
			for more := true; more; { // one try answers all queued messages
				select {
				case <-ch:
					d.notif.Add(1)
				default:
					more = false
				}
			}
		case <-time.After(time.Second):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func (d *redisDriver) Release(ctx context.Context, key string, token uint64) error {
	n, err := luaRelease.Run(ctx, d.c, []string{"k:" + key, "r:" + key}, d.owner).Int()
	if err == nil && n == 0 {
		err = ErrLost
	}
	return err
}

func (d *redisDriver) Notifications() uint64 { return d.notif.Load() }

func (d *redisDriver) CountHeld(ctx context.Context, prefix string, n int) (int, error) {
	held := 0
	for i := 0; i < n; i += 1000 {
		x, err := luaHeld.Run(ctx, d.c, nil, prefix, i, min(i+999, n-1)).Int()
		if err != nil {
			return 0, err
		}
		held += x
	}
	return held, nil
}

func (d *redisDriver) Close() error {
	d.mu.Lock()
	if d.sub != nil {
		_ = d.sub.Close()
	}
	d.mu.Unlock()
	return d.c.Close()
}

// redisSession is a lease kept alive by its owner every TTL/3. The application's
// belief is a local timer: last successful renewal's start + TTL.
type redisSession struct {
	d     *redisDriver
	owner string
	ttl   time.Duration
	mu    sync.Mutex
	keys  []string
	until atomic.Int64
	lost  atomic.Bool
	n     atomic.Uint64
	stop  context.CancelFunc
}

func (d *redisDriver) OpenSession(ctx context.Context, ttl time.Duration) (Session, error) {
	s := &redisSession{d: d, ttl: ttl, owner: "s" + strconv.FormatUint(redisOwner.Add(1), 10)}
	start := time.Now()
	if err := d.c.Set(ctx, "s:"+s.owner, s.owner, ttl).Err(); err != nil {
		return nil, err
	}
	s.keys = []string{"s:" + s.owner}
	s.until.Store(start.Add(ttl).UnixNano())
	return s, nil
}

func (s *redisSession) Hold(ctx context.Context, key string) (uint64, error) {
	n, err := s.d.acquire(ctx, key, s.owner, s.ttl)
	if err == nil {
		s.mu.Lock()
		s.keys = append(s.keys, "k:"+key)
		s.mu.Unlock()
	}
	return n, err
}

func (s *redisSession) renew(ctx context.Context) error {
	s.mu.Lock()
	keys := s.keys
	s.mu.Unlock()
	start := time.Now()
	n, err := luaRenew.Run(ctx, s.d.c, keys, s.owner, s.ttl.Milliseconds()).Int()
	if err != nil {
		return err
	}
	if n == 0 {
		s.lost.Store(true)
		return ErrLost
	}
	s.n.Add(1)
	s.until.Store(start.Add(s.ttl).UnixNano())
	return nil
}

func (s *redisSession) StartKeepAlive() error {
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	go func() {
		t := time.NewTicker(s.ttl / 3)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			c, cancel := context.WithTimeout(ctx, s.ttl)
			err := s.renew(c)
			cancel()
			if errors.Is(err, ErrLost) {
				return
			}
		}
	}()
	return nil
}

func (s *redisSession) KeepAlives() uint64 { return s.n.Load() }
func (s *redisSession) Alive() bool {
	return !s.lost.Load() && time.Now().UnixNano() < s.until.Load()
}
func (s *redisSession) Abandon() {
	if s.stop != nil {
		s.stop()
	}
}
func (s *redisSession) Close(ctx context.Context) error {
	s.Abandon()
	return s.d.c.Del(ctx, s.keys...).Err()
}

// ---- Redlock

type redlockDriver struct {
	s    *redisSystem
	cs   []*redis.Client
	rs   *redsync.Redsync
	mu   sync.Mutex
	held map[string]*redsync.Mutex
}

func openRedlock(s *redisSystem, o Opts) *redlockDriver {
	d := &redlockDriver{s: s, held: map[string]*redsync.Mutex{}}
	var pools []rsredis.Pool
	for i := 0; i < s.n; i++ { // a Redlock client always needs all servers
		c := s.client(i, o.Dial, redisPool)
		d.cs = append(d.cs, c)
		pools = append(pools, goredis.NewPool(c))
	}
	d.rs = redsync.New(pools...)
	return d
}

func (d *redlockDriver) lock(ctx context.Context, key string, ttl time.Duration, tries int) (*redsync.Mutex, error) {
	m := d.rs.NewMutex(key, redsync.WithExpiry(ttl), redsync.WithTries(tries))
	if err := m.LockContext(ctx); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		var taken *redsync.ErrTaken
		if errors.Is(err, redsync.ErrFailed) || errors.As(err, &taken) {
			return nil, ErrHeld
		}
		return nil, err
	}
	return m, nil
}

func (d *redlockDriver) Acquire(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	m, err := d.lock(ctx, key, ttl, 1)
	if err != nil {
		return 0, err
	}
	d.mu.Lock()
	d.held[key] = m
	d.mu.Unlock()
	return 0, nil
}

func (d *redlockDriver) AcquireWait(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	m, err := d.lock(ctx, key, ttl, 1<<30)
	if err != nil {
		return 0, err
	}
	d.mu.Lock()
	d.held[key] = m
	d.mu.Unlock()
	return 0, nil
}

func (d *redlockDriver) Release(ctx context.Context, key string, token uint64) error {
	d.mu.Lock()
	m := d.held[key]
	delete(d.held, key)
	d.mu.Unlock()
	if m == nil {
		return ErrLost
	}
	ok, err := m.UnlockContext(ctx)
	if ok {
		return nil
	}
	if err == nil {
		err = ErrLost
	}
	return err
}

func (d *redlockDriver) Notifications() uint64 { return 0 }
func (d *redlockDriver) Close() error {
	for _, c := range d.cs {
		_ = c.Close()
	}
	return nil
}

type redlockSession struct {
	d    *redlockDriver
	ttl  time.Duration
	mu   sync.Mutex
	m    *redsync.Mutex
	lost atomic.Bool
	n    atomic.Uint64
	stop context.CancelFunc

	until atomic.Int64
}

func (d *redlockDriver) OpenSession(ctx context.Context, ttl time.Duration) (Session, error) {
	return &redlockSession{d: d, ttl: ttl}, nil
}

func (s *redlockSession) Hold(ctx context.Context, key string) (uint64, error) {
	m, err := s.d.lock(ctx, key, s.ttl, 1)
	if err == nil {
		s.mu.Lock()
		s.m = m
		s.mu.Unlock()
		s.until.Store(m.Until().UnixNano())
	}
	return 0, err
}

func (s *redlockSession) StartKeepAlive() error {
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	go func() {
		t := time.NewTicker(s.ttl / 3)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			s.mu.Lock()
			m := s.m
			s.mu.Unlock()
			if m == nil {
				continue
			}
			c, cancel := context.WithTimeout(ctx, s.ttl/3)
			ok, err := m.ExtendContext(c)
			cancel()
			if ok {
				s.until.Store(m.Until().UnixNano())
				s.n.Add(1)
			} else if err == nil {
				s.lost.Store(true)
			}
		}
	}()
	return nil
}

func (s *redlockSession) KeepAlives() uint64 { return s.n.Load() }
func (s *redlockSession) Alive() bool {
	return !s.lost.Load() && time.Now().UnixNano() < s.until.Load()
}
func (s *redlockSession) Abandon() {
	if s.stop != nil {
		s.stop()
	}
}
func (s *redlockSession) Close(ctx context.Context) error {
	s.Abandon()
	if s.m != nil {
		_, _ = s.m.UnlockContext(ctx)
	}
	return nil
}

type redisQuiet struct{}

func (redisQuiet) Printf(context.Context, string, ...interface{}) {}

func init() { redis.SetLogger(redisQuiet{}) }
