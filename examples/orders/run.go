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
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/fence/pgguard"
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
	f.BoolVar(&o.unguarded, "without-guard", false, "control run: tokens are not compared, and violations are what is expected")
	f.DurationVar(&o.timeout, "timeout", 10*time.Minute, "give up after this time")
	f.BoolVar(&o.keep, "keep", false, "keep the directory")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 || o.messages < 1 || o.users < 1 || o.rounds < 1 {
		return o, fmt.Errorf("run: %q; give flags only, and at least one order, account and round", f.Args())
	}
	return o, nil
}

// theatre is all that runs.
type theatre struct {
	o        options
	dir      string
	began    time.Time
	cluster  *devcluster.Cluster
	redis    *redisserver.Server
	postgres *pgserver.Server
	group    *devcluster.Group
	store    *redis.Client
	db       *pgxpool.Pool
	stage    string

	mu      sync.Mutex
	workers map[string]*process
	late    map[string]int // writes attempted after a freeze, by store
	refused map[string]int
}

// process is a worker or a producer.
type process struct {
	*devcluster.Child
	mu     sync.Mutex
	events map[string]int // last N by event, at least 1
}

func (p *process) heard(event string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.events[event]
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
	t := &theatre{o: o, dir: dir, began: time.Now(), workers: map[string]*process{}, late: map[string]int{}, refused: map[string]int{}}
	guard := "on"
	if o.unguarded {
		guard = "OFF (control run)"
	}
	fmt.Printf("orders: real redis-server, PostgreSQL and headlease processes; guard %s; %d orders of %d accounts, seed %d\n", guard, o.messages, o.users, o.seed)
	err = t.open(ctx)
	if err == nil {
		err = t.play(ctx)
	}
	err = errors.Join(err, t.close(context.WithoutCancel(ctx)))
	if err == nil && !o.keep && o.dir == "" {
		return os.RemoveAll(dir)
	}
	fmt.Printf("data and logs are in %s\n", dir)
	return err
}

func (t *theatre) open(ctx context.Context) (err error) {
	if t.redis, err = redisserver.New(filepath.Join(t.dir, "redis"), redisserver.Durable()...); err != nil {
		return err
	}
	if t.postgres, err = pgserver.New(ctx, filepath.Join(t.dir, "postgres"), "max_connections=200", "max_locks_per_transaction=512"); err != nil {
		return err
	}
	t.store = redis.NewClient(&redis.Options{Network: "unix", Addr: t.redis.Socket(), ContextTimeoutEnabled: true})
	if t.db, err = pgxpool.New(ctx, t.postgres.DSN()); err != nil {
		return err
	}
	if _, err := t.db.Exec(ctx, pgguard.Migration+schema); err != nil {
		return fmt.Errorf("schema: %w", err)
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
	b, err := json.Marshal(stage{
		ClusterFile: t.cluster.State().Config, Certs: filepath.Join(t.cluster.Dir(), "certs"),
		Redis: t.redis.Socket(), Postgres: t.postgres.DSN(), Users: t.o.users, TTL: 3 * time.Second, Unguarded: t.o.unguarded,
	})
	if err != nil {
		return err
	}
	t.stage = filepath.Join(t.dir, "stage.json")
	t.group = devcluster.NewGroup()
	return os.WriteFile(t.stage, b, 0o600)
}

// ready initialises the cluster and waits until every partition has an owner.
func ready(ctx context.Context, c *devcluster.Cluster) (err error) {
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
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("the cluster is not ready after 2 minutes"))
	defer cancel()
	if _, err := a.Init(ctx, func(string) {}); err != nil {
		return err
	}
	return a.WaitOwned(ctx)
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
	if t.db != nil {
		t.db.Close()
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
	p := &process{events: map[string]int{}}
	p.Child, err = t.group.Start(devcluster.Spec{
		Name: name, Binary: self, Args: append(args, "--stage", t.stage), Dir: t.dir, Log: filepath.Join(t.dir, name+".log"),
		Stdout: devcluster.NewLines(func(line []byte) {
			var r report
			if json.Unmarshal(line, &r) != nil {
				return
			}
			p.mu.Lock()
			p.events[r.Event] = max(r.N, 1)
			p.mu.Unlock()
			if r.Event != eventLate {
				return
			}
			t.mu.Lock()
			defer t.mu.Unlock()
			t.late[r.Store]++
			if r.Refused {
				t.refused[r.Store]++
			}
		}),
	})
	return p, err
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

func summary(counts map[string]int) string {
	return fmt.Sprintf("%d at PostgreSQL, %d at Redis", counts["postgres"], counts["redis"])
}

func list(v []string, most int) string {
	if len(v) > most {
		v = append(v[:most:most], fmt.Sprintf("… and %d more", len(v)-most))
	}
	return strings.Join(v, "\n  ")
}
