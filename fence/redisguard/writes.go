package redisguard

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
)

// The writes below fail as Run does, and their arguments are go-redis' own.

// Set is a guarded SET. A ttl of 0 is none, redis.KeepTTL keeps the key's.
func (g *Guard) Set(ctx context.Context, resource string, token fence.Token, key string, value any, ttl time.Duration) error {
	_, err := write[string](ctx, g, resource, token, key, func(p redis.Pipeliner) redis.Cmder {
		return p.Set(ctx, key, value, ttl)
	})
	return err
}

// HSet is a guarded HSET; it returns how many fields are new.
func (g *Guard) HSet(ctx context.Context, resource string, token fence.Token, key string, values ...any) (int64, error) {
	return write[int64](ctx, g, resource, token, key, func(p redis.Pipeliner) redis.Cmder {
		return p.HSet(ctx, key, values...)
	})
}

// Incr is a guarded INCR; it returns the new value.
func (g *Guard) Incr(ctx context.Context, resource string, token fence.Token, key string) (int64, error) {
	return write[int64](ctx, g, resource, token, key, func(p redis.Pipeliner) redis.Cmder {
		return p.Incr(ctx, key)
	})
}

// XAdd is a guarded XADD; it returns the entry's ID, "" if args.NoMkStream is
// set and there is no stream.
func (g *Guard) XAdd(ctx context.Context, resource string, token fence.Token, args *redis.XAddArgs) (string, error) {
	return write[string](ctx, g, resource, token, args.Stream, func(p redis.Pipeliner) redis.Cmder {
		return p.XAdd(ctx, args)
	})
}

// XAck is a guarded XACK; it returns how many entries were pending.
func (g *Guard) XAck(ctx context.Context, resource string, token fence.Token, stream, group string, ids ...string) (int64, error) {
	return write[int64](ctx, g, resource, token, stream, func(p redis.Pipeliner) redis.Cmder {
		return p.XAck(ctx, stream, group, ids...)
	})
}

// Del is a guarded DEL of one key; it reports whether there was one.
func (g *Guard) Del(ctx context.Context, resource string, token fence.Token, key string) (bool, error) {
	n, err := write[int64](ctx, g, resource, token, key, func(p redis.Pipeliner) redis.Cmder {
		return p.Del(ctx, key)
	})
	return n > 0, err
}

// write runs the command that build queues, under the check. The pipeline only
// lends its spelling of commands; it is never sent.
func write[T any](ctx context.Context, g *Guard, resource string, token fence.Token, key string, build func(redis.Pipeliner) redis.Cmder) (T, error) {
	var none T
	pipeline := g.client.Pipeline()
	args := build(pipeline).Args()
	pipeline.Discard()
	if len(args) > maxCommandArgs {
		return none, fmt.Errorf("guarded write to %s: the command has %d arguments and %d are allowed; write in parts", resource, len(args), maxCommandArgs)
	}
	reply, err := g.write(ctx, g.command, resource, token, []string{key}, args)
	if err != nil {
		err = fmt.Errorf("guarded write to %s: %w", resource, err)
	}
	if reply == nil {
		return none, err
	}
	value, ok := reply.(T)
	if !ok {
		return none, fmt.Errorf("guarded write to %s: the server replied %T to %v, not %T", resource, reply, args[0], none)
	}
	return value, err
}
