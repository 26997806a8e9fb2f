package redisguard

import (
	"context"
	"testing"

	"github.com/headlease/headlease/fence/fencetest"
	"github.com/headlease/headlease/internal/redisserver"
)

// A guarded SET beside a plain one; aim: 1.3x.
func BenchmarkSet(b *testing.B) {
	for name, test := range map[string]struct {
		settings []string
		callers  int
	}{
		"1":         {nil, 1},
		"16":        {nil, 16},
		"1, fsync":  {redisserver.Durable(), 1},
		"16, fsync": {redisserver.Durable(), 16},
	} {
		b.Run(name, func(b *testing.B) {
			s := startServer(b, test.settings...)
			g, c := s.guard(Options{})
			ctx, tok := context.Background(), token(b, 1, 1)
			if err := g.Claim(ctx, "r", tok); err != nil {
				b.Fatal(err)
			}
			fencetest.Ratio(b, test.callers,
				func() error { return c.Set(ctx, "{r}:k", "value", 0).Err() },
				func() error { return g.Set(ctx, "r", tok, "{r}:k", "value", 0) })
		})
	}
}
