package group_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/internal/regiontest"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

// keyOf is a key of a hash shard.
func keyOf(t *testing.T, n uint32) string {
	t.Helper()
	for i := range 100_000 {
		if key := strconv.Itoa(i); shard.HashShard(key, 256) == n {
			return key
		}
	}
	t.Fatal("no key")
	return ""
}

// A group takes the dedicated shards of keys of its own hash shards, over changes
// of who assigns, and gives them up when the exception ends.
func TestGroupTakesDedicatedShards(t *testing.T) {
	inWorld(t, 4, func(w *world, eu *regiontest.Region) {
		a := w.member("a")
		w.member("b")
		w.even(10*time.Second, "a", "b")
		const mine, foreign = shard.FirstDedicated, shard.FirstDedicated + 1
		eu.Configure(func(c *pb.ClusterConfiguration) {
			c.Exceptions = []*pb.ShardException{
				{Key: keyOf(w.T, 2), Shard: mine, Since: c.GetVersion()}, {Key: keyOf(w.T, 200), Shard: foreign, Since: c.GetVersion()},
			}
			c.LastDedicated = foreign
		})
		w.until(10*time.Second, "the dedicated shard is worked on", func(by map[uint32]string) bool { return by[mine] != "" && len(by) == 5 })
		if err := a.stop(); err != nil {
			w.Error(err)
		}
		w.until(10*time.Second, "b has all", func(by map[uint32]string) bool { return by[mine] == "b" && len(by) == 5 })
		before := w.settled()
		<-time.After(10 * time.Second)
		if now := w.settled(); now[mine] != before[mine] {
			w.Errorf("it moved: %v, then %v", before, now)
		}
		eu.Configure(func(c *pb.ClusterConfiguration) {
			c.Exceptions[0].Leaving, c.Exceptions[0].Since = true, c.GetVersion()
		})
		eu.Configure(func(c *pb.ClusterConfiguration) { c.Exceptions = nil })
		w.until(10*time.Second, "it is given up", func(by map[uint32]string) bool { return by[mine] == "" && len(by) == 4 })
		if _, held := eu.View().Lease("shard/" + strconv.Itoa(mine)); held {
			w.Error("its lease is still held")
		}
	})
}

func (w *world) until(within time.Duration, what string, ok func(by map[uint32]string) bool) {
	w.Helper()
	for end := time.Now().Add(within); !ok(w.settled()); {
		if time.Now().After(end) {
			w.Fatalf("after %v not: %s: %v", within, what, w.settled())
		}
		<-time.After(20 * time.Millisecond)
	}
}

// ErrNewLease brings a higher token at once.
func TestWorkIsGivenANewLease(t *testing.T) {
	inWorld(t, 1, func(w *world, _ *regiontest.Region) {
		var tokens []uint64
		var took time.Duration
		var ended time.Time
		w.work = func(ctx context.Context, s *group.Shard) error {
			w.mu.Lock()
			tokens = append(tokens, uint64(s.Lease.Token()))
			n := len(tokens)
			if n == 1 {
				ended = time.Now()
			}
			took = time.Since(ended)
			w.mu.Unlock()
			if n == 1 {
				return group.ErrNewLease
			}
			<-s.Drain()
			return nil
		}
		a := w.member("a")
		w.until(10*time.Second, "the second lease", func(map[uint32]string) bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return len(tokens) == 2
		})
		if err := a.stop(); err != nil {
			w.Error(err)
		}
		if tokens[1] <= tokens[0] || took > 500*time.Millisecond {
			w.Errorf("tokens %v, %v between them", tokens, took)
		}
	})
}
