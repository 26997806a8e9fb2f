package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/internal/pause"
)

// The checker reads PostgreSQL and the streams, and no worker's word.

// produced is the number of each account's last order.
func (t *theatre) produced(ctx context.Context) (map[string]uint64, error) {
	out := map[string]uint64{}
	err := t.eachShard(ctx, "orders:seq", func(key string) error {
		all, err := t.store.HGetAll(ctx, key).Result()
		for account, text := range all {
			n, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				return fmt.Errorf("%s of %s: %w", account, key, err)
			}
			out[account] = n
		}
		return err
	})
	return out, err
}

func (t *theatre) eachShard(ctx context.Context, name string, do func(key string) error) error {
	for n := range stream.Shards {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		key, err := redisguard.Key(fmt.Sprintf("shard/%d", n), name)
		if err == nil {
			err = do(key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// progress waits until so many orders are in PostgreSQL.
func (t *theatre) progress(ctx context.Context, want int) error {
	for {
		var n int
		if err := t.db.QueryRow(ctx, `SELECT count(*) FROM orders`).Scan(&n); err != nil {
			return err
		}
		if n >= want {
			return nil
		}
		if err := pause.For(ctx, 200*time.Millisecond); err != nil {
			return fmt.Errorf("%d orders of %d are handled: %w", n, want, err)
		}
	}
}

// drained waits until nothing is left to read or to acknowledge, for as long as
// there is progress.
func (t *theatre) drained(ctx context.Context) error {
	last, since := -1, time.Now()
	for {
		pending, behind := int64(0), 0
		err := t.eachShard(ctx, "orders", func(key string) error {
			info, err := t.store.XInfoStream(ctx, key).Result()
			if redis.HasErrorPrefix(err, "ERR no such key") {
				return nil
			}
			if err != nil {
				return err
			}
			groups, err := t.store.XInfoGroups(ctx, key).Result()
			for _, g := range groups {
				// Not the lag: Redis 7.0 counts it wrong after it has read its log again.
				pending += g.Pending
				if g.LastDeliveredID != info.LastGeneratedID {
					behind++
				}
			}
			if err == nil && len(groups) == 0 {
				behind++
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("read the streams: %w", err)
		}
		if pending == 0 && behind == 0 {
			return nil
		}
		var rows int
		if err := t.db.QueryRow(ctx, `SELECT count(*) FROM journal`).Scan(&rows); err != nil {
			return err
		}
		if rows != last {
			last, since = rows, time.Now()
		}
		left := fmt.Sprintf("%d orders are not acknowledged and %d shards not read to the end", pending, behind)
		if time.Since(since) > time.Minute {
			return fmt.Errorf("%s, and nothing was written for a minute", left)
		}
		if err := pause.For(ctx, 300*time.Millisecond); err != nil {
			return fmt.Errorf("%s: %w", left, err)
		}
	}
}

// findings of a check.
type findings struct {
	orders, entries int
	// stale writes that were accepted, and what is missing, twice or out of order.
	stale, disorder []string
}

func (t *theatre) verdict(ctx context.Context) error {
	produced, err := t.produced(ctx)
	if err != nil {
		return err
	}
	total := uint64(0)
	for _, n := range produced {
		total += n
	}
	var f findings
	if err := errors.Join(t.checkPostgres(ctx, produced, &f), t.checkLedger(ctx, produced, &f)); err != nil {
		return err
	}
	t.say("%d orders of %d accounts produced; %d rows in PostgreSQL, %d entries in the ledger", total, len(produced), f.orders, f.entries)
	t.say("stale writes accepted: %d; orders missing, twice or out of order: %d", len(f.stale), len(f.disorder))
	t.mu.Lock()
	defer t.mu.Unlock()
	t.say("late writes attempted: %s; refused: %s", summary(t.late), summary(t.refused))
	bad := append(f.stale, f.disorder...)
	switch {
	case total < uint64(t.o.messages):
		return fmt.Errorf("only %d orders of %d were produced", total, t.o.messages)
	case min(t.late["postgres"], t.late["redis"]) < t.o.late:
		return fmt.Errorf("fewer than %d late writes were attempted at one of the stores: the run shows too little", t.o.late)
	case t.o.unguarded && len(bad) == 0:
		return errors.New("no violation without the guard: the run shows nothing")
	case t.o.unguarded:
		t.say("as expected without the guard, for example:\n  %s", list(bad, 3))
		return nil
	case len(bad) > 0:
		return fmt.Errorf("VIOLATIONS:\n  %s", list(bad, 20))
	case t.refused["postgres"] == 0 || t.refused["redis"] == 0:
		return errors.New("no late write was refused at one of the stores: the run shows nothing")
	}
	t.say("every account's orders are there, once, in order: ok")
	return nil
}

// checkPostgres: tokens of a shard never fall in the order of writes, each
// account has 1, 2, 3 … once, first written in that order, and nothing misses.
func (t *theatre) checkPostgres(ctx context.Context, produced map[string]uint64, f *findings) error {
	if err := t.db.QueryRow(ctx, `SELECT count(*) FROM orders`).Scan(&f.orders); err != nil {
		return err
	}
	rows, err := t.db.Query(ctx, `SELECT account, count(*), max(seq) FROM orders GROUP BY account`)
	if err != nil {
		return err
	}
	have := map[string]uint64{}
	var account string
	var count, most uint64
	if _, err := pgx.ForEachRow(rows, []any{&account, &count, &most}, func() error {
		if have[account] = count; count != most {
			f.disorder = append(f.disorder, fmt.Sprintf("postgres: %s has %d orders, the last one is %d", account, count, most))
		}
		return nil
	}); err != nil {
		return err
	}
	for account, n := range produced {
		if have[account] != n {
			f.disorder = append(f.disorder, fmt.Sprintf("postgres: %s has %d orders of %d", account, have[account], n))
		}
	}
	rows, err = t.db.Query(ctx, `SELECT resource, token, account, seq FROM journal ORDER BY n`)
	if err != nil {
		return err
	}
	j := journal{store: "postgres", repeats: true, findings: f, tokens: map[string]uint64{}, last: map[string]uint64{}}
	var resource string
	var token, seq uint64
	_, err = pgx.ForEachRow(rows, []any{&resource, &token, &account, &seq}, func() error {
		j.write(resource, token, account, seq)
		return nil
	})
	return err
}

// checkLedger is the same of Redis, where nothing is written twice.
func (t *theatre) checkLedger(ctx context.Context, produced map[string]uint64, f *findings) error {
	j := journal{store: "redis", findings: f, tokens: map[string]uint64{}, last: map[string]uint64{}}
	err := t.eachShard(ctx, ledger, func(key string) error {
		for from := "-"; ; {
			entries, err := t.store.XRangeN(ctx, key, from, "+", 5000).Result()
			if err != nil {
				return err
			}
			for _, e := range entries {
				token, err := number(e.Values["token"])
				if err != nil {
					return fmt.Errorf("%s: %w", key, err)
				}
				seq, err := number(e.Values["seq"])
				if err != nil {
					return fmt.Errorf("%s: %w", key, err)
				}
				f.entries++
				j.write(strings.TrimSuffix(key, ":"+ledger), token, fmt.Sprint(e.Values["account"]), seq)
			}
			if len(entries) < 5000 {
				return nil
			}
			from = "(" + entries[len(entries)-1].ID
		}
	})
	for account, n := range produced {
		if j.last[account] != n {
			f.disorder = append(f.disorder, fmt.Sprintf("redis: the last order of %s is %d of %d", account, j.last[account], n))
		}
	}
	return err
}

func number(v any) (uint64, error) { return strconv.ParseUint(fmt.Sprint(v), 10, 64) }

// journal judges the accepted writes of a store, in their order.
type journal struct {
	*findings
	store string
	// repeats: the store takes a batch again whose acknowledgement was lost, as
	// long as nothing newer came between.
	repeats bool
	tokens  map[string]uint64 // highest by resource
	last    map[string]uint64 // number of the last order by account
}

func (j *journal) write(resource string, token uint64, account string, seq uint64) {
	if token < j.tokens[resource] {
		j.stale = append(j.stale, fmt.Sprintf("%s: %s took order %d of %s with token %d after %d", j.store, resource, seq, account, token, j.tokens[resource]))
	}
	j.tokens[resource] = max(j.tokens[resource], token)
	switch {
	case seq == j.last[account]+1:
		j.last[account] = seq
	case j.repeats && seq <= j.last[account]:
	default:
		j.disorder = append(j.disorder, fmt.Sprintf("%s: order %d of %s after %d", j.store, seq, account, j.last[account]))
		j.last[account] = max(j.last[account], seq)
	}
}
