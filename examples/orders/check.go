package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/redisguard"
	"github.com/headlease/headlease/internal/pause"
)

// The checker reads PostgreSQL and the streams, and goes by no worker's word, but
// for how many late writes it attempted.

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

// progress waits until so many orders are in the table.
func (t *theatre) progress(ctx context.Context, want int) error {
	for {
		n, err := t.book.Orders(ctx)
		if err != nil || n >= want {
			return err
		}
		if err := pause.For(ctx, 200*time.Millisecond); err != nil {
			return fmt.Errorf("%d orders of %d are handled: %w", n, want, err)
		}
	}
}

// errStalled is of orders that nobody handles any more.
var errStalled = errors.New("nothing was written for a minute")

// drained waits until nothing is left to read or to acknowledge, for as long as
// there is progress.
func (t *theatre) drained(ctx context.Context) error {
	last, since := -1, time.Now()
	for {
		pending, behind := int64(0), 0
		err := t.eachShard(ctx, "orders", func(key string) error {
			info, err := t.store.XInfoStream(ctx, key).Result()
			if redis.HasErrorPrefix(err, "no such key") {
				return nil
			}
			if err != nil {
				return err
			}
			groups, err := t.store.XInfoGroups(ctx, key).Result()
			for _, g := range groups {
				// Not the lag: Redis 7.0 counts it wrong after it has read its log again.
				pending += g.Pending
				if beginning(g.LastDeliveredID) != beginning(info.LastGeneratedID) {
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
		rows, err := t.book.Writes(ctx)
		if err != nil {
			return err
		}
		if rows != last {
			last, since = rows, time.Now()
		}
		left := fmt.Sprintf("%d orders are not acknowledged and %d shards not read to the end", pending, behind)
		if time.Since(since) > time.Minute {
			return fmt.Errorf("%s, and %w", left, errStalled)
		}
		if err := pause.For(ctx, 300*time.Millisecond); err != nil {
			return fmt.Errorf("%s: %w", left, err)
		}
	}
}

// beginning is the id before the first entry in the form of Redis, of which
// the stand-in has others.
func beginning(id string) string {
	if id == "" || id == "0" {
		return "0-0"
	}
	return id
}

// check reads the stores, into the result.
func (t *theatre) check(ctx context.Context) error {
	produced, err := t.produced(ctx)
	if err != nil {
		return err
	}
	t.countRefusals(ctx)
	refused, err := t.book.Refused()
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.res.Counted[inPostgres] = refused
	t.res.Accounts, t.res.Orders = len(produced), 0
	for _, n := range produced {
		t.res.Orders += n
	}
	if t.res.Orders < uint64(t.res.Sent) {
		t.res.Disorder = append(t.res.Disorder, fmt.Sprintf("redis: %d orders were acknowledged to their producers, and there are %d", t.res.Sent, t.res.Orders))
	}
	return errors.Join(t.checkTable(ctx, produced, &t.res), t.checkLedger(ctx, produced, &t.res))
}

// countRefusals adds what Redis has counted since it started.
func (t *theatre) countRefusals(ctx context.Context) {
	info, err := t.store.Info(ctx, "errorstats").Result()
	if err != nil {
		return // a stand-in counts nothing
	}
	_, text, found := strings.Cut(info, "errorstat_HLSTALE:count=")
	n := 0
	if found {
		n, _ = strconv.Atoi(text[:strings.IndexFunc(text, func(r rune) bool { return r < '0' || r > '9' })])
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.res.Counted[inRedis] += n
}

// checkTable: tokens of a shard never fall in the order of writes, each
// account has 1, 2, 3 … once, first written in that order, and nothing misses.
func (t *theatre) checkTable(ctx context.Context, produced map[string]uint64, r *result) (err error) {
	if r.Rows, err = t.book.Orders(ctx); err != nil {
		return err
	}
	have := map[string]uint64{}
	if err := t.book.Accounts(ctx, func(account string, count, last uint64) {
		if have[account] = count; count != last {
			r.Disorder = append(r.Disorder, fmt.Sprintf("postgres: %s has %d orders, the last one is %d", account, count, last))
		}
	}); err != nil {
		return err
	}
	for account, n := range produced {
		if have[account] != n {
			r.Disorder = append(r.Disorder, fmt.Sprintf("postgres: %s has %d orders of %d", account, have[account], n))
		}
	}
	j := newJournal(inPostgres, true, r)
	return t.book.Journal(ctx, j.write)
}

// checkLedger is the same of Redis, where nothing is written twice.
func (t *theatre) checkLedger(ctx context.Context, produced map[string]uint64, r *result) error {
	j := newJournal(inRedis, false, r)
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
				r.Entries++
				j.write(strings.TrimSuffix(key, ":"+ledger), fence.Token(token), fmt.Sprint(e.Values["account"]), seq)
			}
			if len(entries) < 5000 {
				return nil
			}
			from = "(" + entries[len(entries)-1].ID
		}
	})
	for account, n := range produced {
		if j.last[account] != n {
			r.Disorder = append(r.Disorder, fmt.Sprintf("redis: the last order of %s is %d of %d", account, j.last[account], n))
		}
	}
	return err
}

func number(v any) (uint64, error) { return strconv.ParseUint(fmt.Sprint(v), 10, 64) }

// journal judges the accepted writes of a store, in their order.
type journal struct {
	res   *result
	store string
	// repeats: the store takes a batch again whose acknowledgement was lost, as
	// long as nothing newer came between.
	repeats bool
	tokens  map[string]fence.Token // highest by resource
	last    map[string]uint64      // number of the last order by account
}

func newJournal(store string, repeats bool, r *result) *journal {
	return &journal{r, store, repeats, map[string]fence.Token{}, map[string]uint64{}}
}

func (j *journal) write(resource string, token fence.Token, account string, seq uint64) {
	if token < j.tokens[resource] {
		j.res.Stale = append(j.res.Stale, fmt.Sprintf("%s: %s took order %d of %s with token %d after %d", j.store, resource, seq, account, token, j.tokens[resource]))
	}
	j.tokens[resource] = max(j.tokens[resource], token)
	switch {
	case seq == j.last[account]+1:
		j.last[account] = seq
	case j.repeats && seq <= j.last[account]:
	default:
		j.res.Disorder = append(j.res.Disorder, fmt.Sprintf("%s: order %d of %s after %d", j.store, seq, account, j.last[account]))
		j.last[account] = max(j.last[account], seq)
	}
}
