package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/pgguard"
	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/internal/clusterclient"
	"github.com/headlease/headlease/internal/clusterfile/load"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/worker"
	"github.com/headlease/headlease/worker/redisstream"
)

// schema of the outcome. journal is for the checker alone: who wrote what, in
// which order.
const schema = `
CREATE TABLE IF NOT EXISTS orders (
    account text NOT NULL,
    seq     bigint NOT NULL,
    body    text NOT NULL,
    UNIQUE (account, seq)
);
CREATE TABLE IF NOT EXISTS journal (
    n        bigserial PRIMARY KEY,
    resource text NOT NULL,
    token    bigint NOT NULL,
    account  text NOT NULL,
    seq      bigint NOT NULL
);`

var stream = redisstream.Stream{Name: "orders", Shards: 256}

// ledger is the outcome in Redis, one stream per shard, written in one step
// with the acknowledgement.
const ledger = "ledger"

const luaLedger = `
for i = 2, #ARGV, 2 do
  redis.call('XADD', KEYS[1], '*', 'token', ARGV[1], 'account', ARGV[i], 'seq', ARGV[i + 1])
end
return #ARGV`

// orders is the worker's part that is about orders.
type orders struct {
	stage  stage
	db     *pgxpool.Pool
	fence  *pgguard.Guard
	ledger *redisstream.ApplyScript
	gate   *gate // nil outside of runs that break things
}

// token is what is compared: the lease's, or in a control run the same for all.
func (o *orders) token(t fence.Token) fence.Token {
	if o.stage.Unguarded {
		return fence.Token(1<<32 | 1)
	}
	return t
}

func (o *orders) claim(ctx context.Context, s *worker.Shard) error {
	return o.fence.Claim(ctx, o.db, s.Resource(), o.token(s.Token()))
}

// handle writes a batch to PostgreSQL, idempotent by account and number, and
// then to the ledger in one step with the acknowledgement.
func (o *orders) handle(ctx context.Context, b *worker.Batch) error {
	accounts, seqs, bodies := make([]string, len(b.Messages)), make([]int64, len(b.Messages)), make([]string, len(b.Messages))
	args := []any{uint64(b.Token())}
	for i, m := range b.Messages {
		accounts[i], seqs[i], bodies[i] = m.Key, int64(m.Seq), string(m.Body)
		args = append(args, m.Key, m.Seq)
	}
	if err := b.Check(); err != nil {
		return err
	}
	err := o.gate.send(ctx, b.Number, "postgres", func(ctx context.Context) error {
		return o.fence.Do(ctx, o.db, b.Resource(), o.token(b.Token()), func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `INSERT INTO orders SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[]) ON CONFLICT DO NOTHING`, accounts, seqs, bodies); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `INSERT INTO journal (resource, token, account, seq) SELECT $1, $2, * FROM unnest($3::text[], $4::bigint[])`,
				b.Resource(), int64(b.Token()), accounts, seqs)
			return err
		})
	})
	if err != nil {
		return fmt.Errorf("postgres: %w", err)
	}
	key, err := redisguard.Key(b.Resource(), ledger)
	if err != nil {
		return err
	}
	if err := b.Check(); err != nil {
		return err
	}
	err = o.gate.send(ctx, b.Number, "redis", func(ctx context.Context) error {
		_, err := o.ledger.Apply(ctx, b, []string{key}, args...)
		return err
	})
	if err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	return nil
}

// work is one worker until ctx ends.
func work(ctx context.Context, s stage, name string) (err error) {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil)).With("worker", name)
	file, _, err := load.File(s.ClusterFile)
	if err != nil {
		return err
	}
	id := pki.Identity{Cluster: file.Cluster, Role: pki.RoleClient, Name: devcluster.DefaultClient}
	credentials, err := pki.Load(pki.LoadConfig{Dir: s.Certs, Want: id})
	if err != nil {
		return err
	}
	links, err := link.New(link.Config{Identity: id, Credentials: credentials, Logger: log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, links.Close()) }()
	defer func() { log.Info("all connections are to be closed") }()
	c, err := client.New(client.Config{Cluster: file.Cluster, Regions: clusterclient.Regions(file), Links: links, TTL: s.TTL, Logger: log})
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if closed := c.Close(end); closed != nil {
			log.Info("sessions expire", "error", closed)
		}
	}()

	db, err := pgxpool.New(ctx, s.Postgres+" pool_max_conns=30")
	if err != nil {
		return err
	}
	defer db.Close()
	store := redis.NewClient(&redis.Options{Network: "unix", Addr: s.Redis, ContextTimeoutEnabled: true, MaxRetries: -1, PoolSize: 30})
	defer func() { err = errors.Join(err, store.Close()) }()

	o := &orders{stage: s, db: db, fence: pgguard.New(), gate: newGate()}
	if o.ledger, err = redisstream.NewApplyScript(luaLedger); err != nil {
		return err
	}
	guard, err := redisguard.New(store, redisguard.Options{Logger: log})
	if err != nil {
		return err
	}
	source, err := redisstream.NewSource(redisstream.Config{Client: store, Guard: sameToken(guard, o.token), Stream: stream, Logger: log})
	if err != nil {
		return err
	}
	o.gate.run(ctx)
	print := json.NewEncoder(os.Stdout)
	if err := print.Encode(report{Event: eventJoined}); err != nil {
		return err
	}
	defer func() { log.Info("the worker has stopped", "error", err) }()
	return worker.Run(ctx, worker.Config{
		Group: group.Config{
			Client: c, Name: "orders", Member: name, Shards: group.Shards(stream.Shards),
			MinMembers: 3, Return: true, RejoinGrace: 20 * time.Second, DrainLimit: 10 * time.Second,
		},
		Source: source, Claim: o.claim, Handle: o.handle, Logger: log,
	})
}

// tokens is a guard that compares what token makes of a lease's token.
type tokens struct {
	*redisguard.Guard
	token func(fence.Token) fence.Token
}

func sameToken(g *redisguard.Guard, token func(fence.Token) fence.Token) redisstream.Guard {
	return tokens{g, token}
}

func (t tokens) Claim(ctx context.Context, resource string, token fence.Token) error {
	return t.Guard.Claim(ctx, resource, t.token(token))
}

func (t tokens) Run(ctx context.Context, resource string, token fence.Token, script *redisguard.Script, keys []string, args ...any) (any, error) {
	return t.Guard.Run(ctx, resource, t.token(token), script, keys, args...)
}

// gate is the worst place to be frozen at, between the check of a lease and
// the send: told by SIGUSR1, it gathers the chains that come there, stops the
// process, and lets them go when it is continued, whatever has become of their
// leases meanwhile.
type gate struct {
	mu     sync.Mutex
	closed chan struct{} // not nil: gathering; closed when the process goes on
	inside map[string]int
}

const (
	// gatherFor is how long chains are gathered, longer while there is none of
	// one of the stores, and gatherMost how many of each.
	gatherFor    = 400 * time.Millisecond
	gatherAtMost = 10 * time.Second
	gatherMost   = 20
	// lateLimit bounds a write that passed the gate.
	lateLimit = 10 * time.Second
)

func newGate() *gate { return &gate{} }

// send does a write that was checked. Chains of even shards are gathered before
// one store, those of odd ones before the other.
func (g *gate) send(ctx context.Context, shard uint32, store string, write func(ctx context.Context) error) error {
	g.mu.Lock()
	closed := g.closed
	if closed == nil || g.inside[store] >= gatherMost || (shard%2 == 0) != (store == "postgres") {
		g.mu.Unlock()
		return write(ctx)
	}
	g.inside[store]++
	g.mu.Unlock()
	<-closed
	// As a packet on its way does, it knows nothing of the lease's end.
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), lateLimit)
	defer cancel()
	err := write(late)
	var stale *fence.StaleError
	say(report{Event: eventLate, Store: store, Refused: errors.As(err, &stale)})
	return err
}

var sayLock sync.Mutex

func say(r report) {
	sayLock.Lock()
	defer sayLock.Unlock()
	// It fails if the run has gone; then nobody needs it.
	_ = json.NewEncoder(os.Stdout).Encode(r)
}

// run waits for SIGUSR1 until ctx ends.
func (g *gate) run(ctx context.Context) {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	go func() {
		defer signal.Stop(asked)
		for {
			select {
			case <-ctx.Done():
				return
			case <-asked:
				g.freeze()
			}
		}
	}()
}

func (g *gate) freeze() {
	g.mu.Lock()
	g.closed, g.inside = make(chan struct{}), map[string]int{}
	g.mu.Unlock()
	gather := time.NewTicker(gatherFor)
	defer gather.Stop()
	n := 0
	for began := time.Now(); ; {
		<-gather.C
		g.mu.Lock()
		n = g.inside["postgres"] + g.inside["redis"]
		enough := min(g.inside["postgres"], g.inside["redis"]) > 0
		g.mu.Unlock()
		if enough || time.Since(began) > gatherAtMost {
			break
		}
	}
	say(report{Event: eventFreezing, N: n})
	if err := freezeProcess(); err != nil {
		fmt.Fprintln(os.Stderr, "freeze:", err)
	}
	g.mu.Lock()
	close(g.closed)
	g.closed = nil
	g.mu.Unlock()
}
