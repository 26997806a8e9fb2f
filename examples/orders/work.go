package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/connect"
	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/internal/devcluster"
	"github.com/headlease/headlease/worker"
	"github.com/headlease/headlease/worker/redisstream"
)

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
	table  table
	ledger *redisstream.ApplyScript
	gate   *gate // of runs that break things
}

// compared is the token that guards compare: the lease's, or in a control run
// the same for all.
func (o *orders) compared(t fence.Token) fence.Token {
	if o.stage.Unguarded {
		return fence.Token(1<<32 | 1)
	}
	return t
}

func (o *orders) claim(ctx context.Context, s *worker.Shard) error {
	return o.table.Claim(ctx, s.Resource(), o.compared(s.Token()))
}

// handle writes a batch to PostgreSQL, idempotent by account and number, and
// then to the ledger in one step with the acknowledgement.
func (o *orders) handle(ctx context.Context, b *worker.Batch) error {
	w := write{Resource: b.Resource(), Compared: o.compared(b.Token()), Token: b.Token(), Orders: make([]order, len(b.Messages))}
	args := []any{uint64(b.Token())}
	for i, m := range b.Messages {
		w.Orders[i] = order{m.Key, m.Seq, string(m.Body)}
		args = append(args, m.Key, m.Seq)
	}
	held := heldShard{b.Resource(), b.Token()}
	if err := b.Check(); err != nil {
		return err
	}
	err := o.gate.send(ctx, b.Number, held, inPostgres, func(ctx context.Context) error { return o.table.Write(ctx, w) })
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
	err = o.gate.send(ctx, b.Number, held, inRedis, func(ctx context.Context) error {
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
	c, err := connect.Open(connect.Options{
		File: s.ClusterFile, Certs: s.Certs, Name: devcluster.DefaultClient, Client: client.Config{TTL: s.TTL, Logger: log},
	})
	if err != nil {
		return err
	}
	defer func() { log.Info("all connections are closed") }()
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if closed := c.Close(end); closed != nil {
			log.Info("sessions expire", "error", closed)
		}
	}()

	o := &orders{stage: s, gate: newGate()}
	if o.table, err = openTable(ctx, s); err != nil {
		return err
	}
	defer o.table.Close()
	store := redis.NewClient(&redis.Options{Addr: s.Redis, ContextTimeoutEnabled: true, MaxRetries: -1, PoolSize: 30})
	defer func() { err = errors.Join(err, store.Close()) }()
	if o.ledger, err = redisstream.NewApplyScript(luaLedger); err != nil {
		return err
	}
	guard, err := redisguard.New(store, redisguard.Options{Logger: log})
	if err != nil {
		return err
	}
	source, err := redisstream.NewSource(redisstream.Config{Client: store, Guard: tokens{guard, o.compared}, Stream: stream, Poll: s.Poll, Logger: log})
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

// openTable opens what the stage has.
func openTable(ctx context.Context, s stage) (table, error) {
	if s.Postgres == "" {
		return newRemote(s.StandIn), nil
	}
	return openPostgres(ctx, s.Postgres, "")
}

// tokens is a guard that compares what compared makes of a lease's token.
type tokens struct {
	*redisguard.Guard
	compared func(fence.Token) fence.Token
}

// Claim is redisstream.Guard.
func (t tokens) Claim(ctx context.Context, resource string, token fence.Token) error {
	return t.Guard.Claim(ctx, resource, t.compared(token))
}

// Run is redisstream.Guard.
func (t tokens) Run(ctx context.Context, resource string, token fence.Token, script *redisguard.Script, keys []string, args ...any) (any, error) {
	return t.Guard.Run(ctx, resource, t.compared(token), script, keys, args...)
}
