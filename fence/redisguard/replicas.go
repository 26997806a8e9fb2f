package redisguard

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
)

// maxMoves bounds how often a call follows a slot that moves to another master.
const maxMoves = 3

// runReplicated runs a script and, on the same connection, WAIT: that is about what
// the connection has written.
func (g *Guard) runReplicated(ctx context.Context, script *redis.Script, resource string, token fence.Token, keys []string, args []any) (any, error) {
	for moves := 0; ; moves++ {
		node, _, err := g.node(ctx, keys[0])
		if err != nil {
			return nil, err
		}
		reply, replicas, err := g.onNode(ctx, node, script, keys, args)
		if c, ok := g.client.(*redis.ClusterClient); ok && redis.HasErrorPrefix(err, "MOVED") && moves < maxMoves {
			c.ReloadState(ctx)
			continue
		}
		if err := g.verdict(ctx, resource, keys[0], token, err); err != nil {
			return nil, err
		}
		if replicas < g.opts.Replicas {
			err = &ReplicationError{Resource: resource, Want: g.opts.Replicas, Have: replicas}
		} else {
			err = nil
		}
		return reply, err
	}
}

func (g *Guard) onNode(ctx context.Context, node redis.Cmdable, script *redis.Script, keys []string, args []any) (reply any, replicas int, err error) {
	for _, whole := range []bool{false, true} {
		pipe := node.Pipeline()
		var run *redis.Cmd
		if whole {
			run = script.Eval(ctx, pipe, keys, args...)
		} else {
			run = pipe.EvalSha(ctx, script.Hash(), keys, args...)
		}
		wait := pipe.Do(ctx, "WAIT", g.opts.Replicas, g.opts.ReplicasWithin.Milliseconds())
		_, execErr := pipe.Exec(ctx)
		switch reply, err = run.Result(); {
		case redis.HasErrorPrefix(err, "NOSCRIPT") && !whole:
			continue
		case err != nil && !errors.Is(err, redis.Nil):
			return nil, 0, err
		}
		var waitErr error
		if replicas, waitErr = wait.Int(); waitErr != nil {
			return nil, 0, errors.Join(waitErr, execErr)
		}
		return reply, replicas, err
	}
	return nil, 0, err
}
