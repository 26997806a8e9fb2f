package region_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/fence/cache"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/internal/redisserver"
)

// While the region's Redis is killed, frozen, out of memory, or refuses the password, the
// region grants, hands back and keeps alive, and look-ups are answered; afterwards they are
// answered out of the cache again, rightly.
func TestF45GrantsAndKeepalivesDoNotNoticeTheCache(t *testing.T) {
	redisServer, err := redisserver.New(t.TempDir(), "--requirepass", "right")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { redisServer.Close() })
	password := filepath.Join(t.TempDir(), "password")
	setPassword := func(to string) {
		if err := os.WriteFile(password, []byte(to), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	setPassword("right")
	at := clusterfile.Cache{Addresses: []string{redisServer.Socket()}, PasswordFile: password}

	g := newGroup(t, 1)
	g.file.Regions[0].Cache = at
	g.file.D = 8 * time.Second // this test is not about a machine that stands still
	g.start("eu-1")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if _, err := g.admin.Init(ctx, func(string) {}); err != nil {
		t.Fatal(err)
	}
	if err := g.admin.WaitOwned(ctx); err != nil {
		t.Fatal(err)
	}

	fromCache, err := cache.ServerConfig(at).Client(time.Second, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer fromCache.Close()
	reader, err := cache.NewReader(fromCache, cache.ReaderConfig{Cluster: "test", Timeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	links, err := link.New(link.Config{Identity: pki.Identity{Cluster: "test", Role: pki.RoleClient, Name: "a"}, Insecure: true})
	if err != nil {
		t.Fatal(err)
	}
	defer links.Close()
	s := g.file.Regions[0].Servers[0]
	c, err := client.New(client.Config{
		Cluster: "test", Regions: []client.Region{{Name: "eu", Servers: []client.Server{{Name: s.Name, API: s.API}}}}, Links: links,
		TTL: 20 * time.Second, Cache: reader,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.WithoutCancel(ctx))

	acquire := func(resource string) *client.Lease {
		t.Helper()
		l, err := c.Acquire(ctx, resource)
		if err != nil {
			t.Fatalf("acquire %s: %v", resource, err)
		}
		return l
	}
	kept := acquire("lock/kept")
	// right waits until look-ups come out of the cache and are right.
	right := func(when string, held, free string, token *client.Lease) {
		t.Helper()
		for {
			h, err := c.Lookup(ctx, held)
			f, errF := c.Lookup(ctx, free)
			if err == nil && errF == nil && h.Cached && h.Held && h.Token == token.Token() && h.Holder == "client/a" && h.Region == "eu" &&
				f.Cached && !f.Held {
				return
			}
			if ctx.Err() != nil {
				t.Fatalf("%s: %+v, %v; %+v, %v", when, h, err, f, errF)
			}
			<-time.After(20 * time.Millisecond)
		}
	}
	// work grants and hands back, and looks up, while the cache is away.
	work := func(when string) {
		t.Helper()
		for i := range 30 {
			l := acquire(fmt.Sprintf("lock/%s-%d", when, i))
			h, err := c.Lookup(ctx, l.Resource())
			if err != nil || !h.Cached && (!h.Held || h.Token != l.Token()) {
				t.Fatalf("%s: %+v, %v", when, h, err)
			}
			if err := l.Release(ctx); err != nil {
				t.Fatalf("%s: %v", when, err)
			}
			if !kept.Valid() {
				t.Fatalf("%s: a lease is lost: %v", when, context.Cause(kept.Context()))
			}
		}
	}
	admin := redis.NewClient(&redis.Options{Addr: redisServer.Socket(), Password: "right"})
	defer admin.Close()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	steps := []struct {
		name       string
		begin, end func() error
	}{
		{"frozen", redisServer.Freeze, redisServer.Thaw},
		{"killed", func() error { redisServer.Kill(); return nil }, redisServer.Start},
		{"full", func() error {
			return errors.Join(admin.ConfigSet(ctx, "maxmemory-policy", "noeviction").Err(), admin.ConfigSet(ctx, "maxmemory", "1").Err())
		}, func() error { return admin.ConfigSet(ctx, "maxmemory", "0").Err() }},
		{"locked", func() error {
			setPassword("wrong")
			return errors.Join(admin.Do(ctx, "CLIENT", "KILL", "TYPE", "normal").Err())
		}, func() error { setPassword("right"); return nil }},
	}
	for _, step := range steps {
		before := acquire("lock/before-" + step.name)
		released := acquire("lock/released-" + step.name)
		check(released.Release(ctx))
		right("before it is "+step.name, before.Resource(), released.Resource(), before)
		check(step.begin())
		work(step.name)
		check(step.end())
		right("after it was "+step.name, before.Resource(), fmt.Sprintf("lock/%s-29", step.name), before)
	}
}
