package cache

import (
	"context"
	"testing"
	"time"

	"github.com/headlease/headlease/fence/fencetest"
)

// A look-up in the cache beside a plain GET; aim: 0.8 times the rate, so 1.25x.
func BenchmarkLookup(b *testing.B) {
	m, r := still(b, unix(start(b)))
	ctx := context.Background()
	if err := m.put(ctx, []write{{resource: "lock/a", token: token(b, 1, 1), holder: "client/a", left: time.Hour}}); err != nil {
		b.Fatal(err)
	}
	key := m.key.of("lock/a")
	if err := m.client.Persist(ctx, key).Err(); err != nil {
		b.Fatal(err)
	}
	if err := m.client.PExpire(ctx, key, time.Hour).Err(); err != nil {
		b.Fatal(err)
	}
	for name, callers := range map[string]int{"1": 1, "16": 16} {
		b.Run(name, func(b *testing.B) {
			fencetest.Ratio(b, callers,
				func() error { return m.client.Get(ctx, key).Err() },
				func() error {
					_, found, err := r.Lookup(ctx, "lock/a")
					if !found {
						b.Error("no entry")
					}
					return err
				})
		})
	}
}
