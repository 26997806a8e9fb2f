package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pgserver"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/internal/redisserver"
)

// options of a run.
type options struct {
	binary    string
	dir       string
	messages  int
	users     int
	over      time.Duration
	rounds    int
	seed      uint64
	late      int
	unguarded bool
	embedded  bool
	report    string
	timeout   time.Duration
	keep      bool
}

func parseRun(args []string) (o options, err error) {
	f := flag.NewFlagSet("orders run", flag.ContinueOnError)
	f.StringVar(&o.binary, "headlease", "bin/headlease", "the headlease executable")
	f.StringVar(&o.dir, "dir", "", "directory for data and logs, which must not exist (default a temporary one)")
	f.IntVar(&o.messages, "messages", 20_000, "orders to produce, at least")
	f.IntVar(&o.users, "accounts", 500, "accounts that orders are for")
	f.DurationVar(&o.over, "over", 30*time.Second, "produce them over this time")
	f.IntVar(&o.rounds, "rounds", 1, "how often everything is broken")
	f.Uint64Var(&o.seed, "seed", 1, "of orders and faults")
	f.IntVar(&o.late, "late", 1, "late writes that must have been attempted at each store")
	f.BoolVar(&o.embedded, "embedded", false, "stand-ins in this process for Redis and PostgreSQL, which need not be installed")
	f.StringVar(&o.report, "report", "", "file to write what was broken and found to, as JSON")
	f.BoolVar(&o.unguarded, "without-guard", false, "control run: tokens are not compared, and violations are what is expected")
	f.DurationVar(&o.timeout, "timeout", 10*time.Minute, "give up after this time")
	f.BoolVar(&o.keep, "keep", false, "keep the directory")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	switch {
	case f.NArg() > 0:
		return o, fmt.Errorf("run: %q: give flags only", f.Args())
	case o.users < 1 || o.rounds < 1 || o.messages < producers*o.users:
		return o, fmt.Errorf("run: --messages %d, --accounts %d, --rounds %d: at least one account and round, and %d orders of each account, are needed", o.messages, o.users, o.rounds, producers)
	}
	return o, nil
}

// streams is the server of the streams: Redis, or its stand-in.
type streams interface {
	// where go-redis finds it.
	where() string
	// Kill ends it as kill -9 does, Start starts it again with its data.
	Kill()
	Start() error
	Close() error
}

type realRedis struct{ *redisserver.Server }

func (r realRedis) where() string { return r.Socket() }

// theatre is all that runs.
type theatre struct {
	o        options
	dir      string
	began    time.Time
	cluster  *devcluster.Cluster
	redis    streams
	postgres *pgserver.Server // nil: embedded
	group    *devcluster.Group
	store    *redis.Client
	marks    *redisguard.Guard
	book     book
	stage    string
	workers  map[string]*process
	lost     []string // servers of the region that is down

	mu  sync.Mutex
	res result
}

// process is a worker or a producer.
type process struct {
	*devcluster.Child
	mu     sync.Mutex
	events map[string]report // the last one by event
}

// heard returns the last report of an event; ok: there was one.
func (p *process) heard(event string) (r report, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r, ok = p.events[event]
	return r, ok
}

// forget takes back what was heard of an event.
func (p *process) forget(event string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.events, event)
}

func (p *process) sent() int {
	r, _ := p.heard(eventSent)
	return r.N
}

func (t *theatre) say(format string, args ...any) {
	fmt.Printf("%7.1f s  %s\n", time.Since(t.began).Seconds(), fmt.Sprintf(format, args...))
}

func run(ctx context.Context, o options) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("not done after %v", o.timeout))
	defer cancel()
	dir := o.dir
	if dir == "" {
		if dir, err = os.MkdirTemp("", "orders-"); err != nil {
			return err
		}
	} else if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	t := &theatre{o: o, dir: dir, began: time.Now(), workers: map[string]*process{}, res: newResult(o)}
	servers, guard := "real redis-server, PostgreSQL and headlease processes", "on"
	if o.embedded {
		servers = "EMBEDDED: stand-ins in this process for Redis (miniredis) and PostgreSQL (a table in memory behind fence/httpguard), nothing is on disk; real headlease processes"
	}
	if o.unguarded {
		guard = "OFF (control run)"
	}
	fmt.Printf("orders: %s; guard %s; %d orders of %d accounts, seed %d\n", servers, guard, o.messages, o.users, o.seed)
	err = t.open(ctx)
	if err == nil {
		err = t.play(ctx)
	}
	err = errors.Join(err, t.close(context.WithoutCancel(ctx)))
	if o.report != "" {
		err = errors.Join(err, t.res.write(o.report, time.Since(t.began), err))
	}
	if err == nil && !o.keep && o.dir == "" {
		return os.RemoveAll(dir)
	}
	fmt.Printf("data and logs are in %s\n", dir)
	return err
}

func (t *theatre) open(ctx context.Context) (err error) {
	s := stage{Certs: filepath.Join(t.dir, "cluster", "certs"), Users: t.o.users, TTL: 3 * time.Second, Unguarded: t.o.unguarded}
	if t.o.embedded {
		err = t.openStandIns(ctx, &s)
	} else {
		err = t.openServers(ctx, &s)
	}
	if err != nil {
		return err
	}
	s.Redis = t.redis.where()
	t.store = redis.NewClient(&redis.Options{Addr: s.Redis, ContextTimeoutEnabled: true})
	if t.marks, err = redisguard.New(t.store, redisguard.Options{}); err != nil {
		return err
	}
	binary, err := filepath.Abs(t.o.binary)
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(t.dir, "cluster.log"))
	if err != nil {
		return err
	}
	t.cluster, err = devcluster.New(devcluster.Options{
		Dir: filepath.Join(t.dir, "cluster"), Binary: binary, Regions: 2, Servers: 1, Witnesses: 3, D: 2 * time.Second,
		Ready: ready, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	if err != nil {
		return err
	}
	if err := t.cluster.Start(ctx); err != nil {
		return err
	}
	s.ClusterFile = t.cluster.State().Config
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	t.stage = filepath.Join(t.dir, "stage.json")
	t.group = devcluster.NewGroup()
	return os.WriteFile(t.stage, b, 0o600)
}

func (t *theatre) openServers(ctx context.Context, s *stage) error {
	r, err := redisserver.New(filepath.Join(t.dir, "redis"), redisserver.Durable()...)
	if err != nil {
		return err
	}
	t.redis = realRedis{r}
	if t.postgres, err = pgserver.New(ctx, filepath.Join(t.dir, "postgres"), "max_connections=200", "max_locks_per_transaction=512", sqlState); err != nil {
		return err
	}
	s.Postgres = t.postgres.DSN()
	p, err := openPostgres(ctx, s.Postgres, t.postgres.LogPath())
	if err != nil {
		return err
	}
	t.book = p
	if err := p.migrate(ctx); err != nil {
		return fmt.Errorf("schema: %w", err)
	}
	return nil
}

func (t *theatre) openStandIns(ctx context.Context, s *stage) error {
	r, err := newMiniRedis()
	if err != nil {
		return err
	}
	t.redis = r
	p, err := newStandIn(ctx)
	if err != nil {
		return err
	}
	t.book, s.StandIn = p, p.url
	s.Poll = 3 * time.Second // a script costs a stand-in many times what it costs Redis
	return nil
}

// ready initialises the cluster and waits until every partition has an owner.
func ready(ctx context.Context, c *devcluster.Cluster) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("the cluster is not ready after 2 minutes"))
	defer cancel()
	return asAdmin(c, func(a *admin.Cluster) error {
		if _, err := a.Init(ctx, func(string) {}); err != nil {
			return err
		}
		return a.WaitOwned(ctx)
	})
}

// asAdmin calls do with a connection to all processes.
func asAdmin(c *devcluster.Cluster, do func(a *admin.Cluster) error) (err error) {
	id := pki.Identity{Cluster: c.File().Cluster, Role: pki.RoleAdmin}
	credentials, err := pki.Load(pki.LoadConfig{Dir: filepath.Join(c.Dir(), "certs"), Want: id})
	if err != nil {
		return err
	}
	links, err := link.New(link.Config{Identity: id, Credentials: credentials})
	if err != nil {
		return err
	}
	a := admin.New(c.File(), links)
	defer func() { err = errors.Join(err, a.Close(), links.Close()) }()
	return do(a)
}

func (t *theatre) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var errs []error
	if t.group != nil {
		t.group.Stop(ctx, 5*time.Second)
	}
	if t.cluster != nil {
		errs = append(errs, t.cluster.Stop(ctx))
	}
	if t.store != nil {
		errs = append(errs, t.store.Close())
	}
	if t.book != nil {
		t.book.Close()
	}
	if t.redis != nil {
		errs = append(errs, t.redis.Close())
	}
	if t.postgres != nil {
		errs = append(errs, t.postgres.Close())
	}
	return errors.Join(errs...)
}

// start forks a process of this program.
func (t *theatre) start(name string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{events: map[string]report{}}
	p.Child, err = t.group.Start(devcluster.Spec{
		Name: name, Binary: self, Args: append(args, "--stage", t.stage), Dir: t.dir, Log: filepath.Join(t.dir, name+".log"),
		Stdout: devcluster.NewLines(func(line []byte) {
			var r report
			if json.Unmarshal(line, &r) == nil {
				t.note(p, r)
			}
		}),
	})
	return p, err
}

// note takes a process's report.
func (t *theatre) note(p *process, r report) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.events[r.Event]
	if r.Event == eventSent { // its lanes report out of turn
		r.N = max(r.N, before.N)
		t.res.Sent += r.N - before.N
	}
	p.events[r.Event] = r
	if r.Event == eventLate {
		t.res.Late[r.Store]++
		if r.Refused {
			t.res.Refused[r.Store]++
		}
	}
}

func (t *theatre) startWorker(name string) error {
	p, err := t.start(name, "work", "--name", name)
	if err != nil {
		return err
	}
	t.workers[name] = p
	return nil
}

// kill is kill -9 of a process, and returns when it is gone.
func (t *theatre) kill(ctx context.Context, p *process) error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	return p.Wait(ctx)
}
