package devcluster

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/redis/go-redis/v9"
)

// A lease cache per region: a redis-server each that is started, killed, paused
// and listed as every other process, and comes back empty.
func TestRedisOfEachRegion(t *testing.T) {
	o, _ := small(t, t.TempDir())
	o.Redis = true
	c := started(t, o)
	ctx := within(t)
	for _, r := range c.File().Regions {
		p, ok := c.Process(RedisName(r.Name))
		if !ok || p.Role != RoleRedis || p.Region != r.Name || !p.alive() || len(r.Cache.Addresses) != 1 || r.Cache.Addresses[0] != p.Redis {
			t.Fatalf("%s: %+v, cache %+v", r.Name, p, r.Cache)
		}
	}
	name := RedisName(c.File().Regions[0].Name)
	p, _ := c.Process(name)
	client := redis.NewClient(&redis.Options{Addr: p.Redis, ContextTimeoutEnabled: true, MaxRetries: 50})
	t.Cleanup(func() { _ = client.Close() })
	if err := client.Set(ctx, "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if err := c.Signal(name, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := c.Signal(name, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if got, err := client.Get(ctx, "k").Result(); got != "v" || err != nil {
		t.Errorf("after a pause: %q, %v", got, err)
	}
	if err := c.Kill(ctx, name); err != nil {
		t.Fatal(err)
	}
	if err := c.StartProcess(name); err != nil {
		t.Fatal(err)
	}
	if n, err := client.Exists(ctx, "k").Result(); n != 0 || err != nil {
		t.Errorf("after a kill it has %d keys, %v", n, err)
	}
}

func TestRedisThatIsNotThereIsRefused(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	o, _ := small(t, t.TempDir())
	o.Redis = true
	_, err := New(o)
	if err == nil || !strings.Contains(err.Error(), "apt-get install redis-server") {
		t.Errorf("%v", err)
	}
	if entries, err := os.ReadDir(o.Dir); err != nil || len(entries) > 0 {
		t.Errorf("refused, but made %v, %v", entries, err)
	}
}
