package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/redis/go-redis/v9"
)

// redisLog takes what go-redis would write to stderr by itself, at each failed dial, to
// the log for debugging: what it means is said by whoever uses the client.
type redisLog struct{ log *slog.Logger }

// Printf logs one line.
func (l redisLog) Printf(ctx context.Context, format string, v ...any) {
	l.log.DebugContext(ctx, "redis client", "message", fmt.Sprintf(format, v...))
}

func logRedis(log *slog.Logger) { redis.SetLogger(redisLog{log}) }
