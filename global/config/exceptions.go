package config

import (
	"fmt"
	"math"
	"slices"
	"strings"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

const (
	// FirstException is the number of the first dedicated shard.
	FirstException = shard.FirstDedicated
	// MaxExceptions bounds the table: every voter keeps it, every group of workers
	// divides its shards.
	MaxExceptions = 1000
	// MaxStreams that an exception names.
	MaxStreams = 64
)

// Exception returns a key's entry of the exception table, nil if it has none. Do
// not change it.
func Exception(c *pb.ClusterConfiguration, key string) *pb.ShardException {
	for _, e := range c.GetExceptions() {
		if e.GetKey() == key {
			return e
		}
	}
	return nil
}

// NextDedicated is the number that the next dedicated shard gets: one that none
// ever had.
func NextDedicated(c *pb.ClusterConfiguration) (uint32, error) {
	last := lastDedicated(c)
	if last == math.MaxUint32 {
		return 0, fmt.Errorf("all numbers of dedicated shards up to %d have been given", uint32(math.MaxUint32))
	}
	return last + 1, nil
}

func lastDedicated(c *pb.ClusterConfiguration) uint32 {
	last := max(c.GetLastDedicated(), FirstException-1)
	for _, e := range c.GetExceptions() {
		last = max(last, e.GetShard())
	}
	return last
}

func checkExceptions(cfg *pb.ClusterConfiguration, fault func(string, ...any)) {
	keys, shards := map[string]bool{}, map[uint32]bool{}
	if n := len(cfg.GetExceptions()); n > MaxExceptions {
		fault("exceptions has %d keys; at most %d have shards of their own, unpin some", n, MaxExceptions)
	}
	for _, e := range cfg.GetExceptions() {
		r, err := shard.Parse("lock/" + e.GetKey())
		if err != nil || r.Key != e.GetKey() {
			fault("exception %q is not a key of 1 to %d characters of A-Z, a-z, 0-9 and ._:/-", e.GetKey(), shard.MaxKey)
		}
		if keys[e.GetKey()] {
			fault("exception %q is listed twice", e.GetKey())
		}
		if e.GetShard() < FirstException {
			fault("exception %q has shard %d; dedicated shards are numbered from %d", e.GetKey(), e.GetShard(), FirstException)
		}
		if shards[e.GetShard()] {
			fault("exception %q has shard %d, which is another key's; each has its own", e.GetKey(), e.GetShard())
		}
		if e.GetSince() > cfg.GetVersion() {
			fault("exception %q is of version %d, which is to come", e.GetKey(), e.GetSince())
		}
		if n := len(e.GetStreams()); n > MaxStreams {
			fault("exception %q names %d streams; at most %d", e.GetKey(), n, MaxStreams)
		}
		keys[e.GetKey()], shards[e.GetShard()] = true, true
	}
}

// checkExceptionChange holds the table to its drained moves: a number is given
// once; an entry ends only after it was leaving; and the version that began a
// move, by which streams tell a newer move from an older one, is the one that is
// decided.
func checkExceptionChange(prev, next *pb.ClusterConfiguration, fault func(string, ...any)) {
	last := lastDedicated(prev)
	for _, e := range next.GetExceptions() {
		key := e.GetKey()
		switch was := Exception(prev, key); {
		case was == nil && e.GetShard() <= last:
			fault("exception %q has shard %d, a number that was given before; the next is %d", key, e.GetShard(), last+1)
		case was == nil && (e.GetLeaving() || e.GetSince() != next.GetVersion()):
			fault("exception %q is new and must begin with this version, %d", key, next.GetVersion())
		case was == nil:
		case was.GetShard() != e.GetShard():
			fault("exception %q has shard %d, had %d; unpin it first", key, e.GetShard(), was.GetShard())
		case was.GetLeaving() && !e.GetLeaving():
			fault("exception %q was leaving; it ends before the key is pinned again", key)
		case was.GetLeaving() == e.GetLeaving() && was.GetSince() != e.GetSince(),
			!was.GetLeaving() && e.GetLeaving() && e.GetSince() != next.GetVersion():
			fault("exception %q is of version %d, was of %d; it changes when the key is unpinned, to this version", key, e.GetSince(), was.GetSince())
		case !e.GetLeaving() && slices.ContainsFunc(was.GetStreams(), func(s string) bool { return !slices.Contains(e.GetStreams(), s) }):
			fault("exception %q has lost a stream in which its key is moved", key)
		}
	}
	for _, e := range prev.GetExceptions() {
		if Exception(next, e.GetKey()) == nil && !e.GetLeaving() {
			fault("exception %q is gone, and its key's messages in shard %d would stay there; move it back with `headlease shard unpin`", e.GetKey(), e.GetShard())
		}
	}
	if len(next.GetExceptions()) > 0 && next.GetLastDedicated() < lastDedicated(next) || next.GetLastDedicated() < prev.GetLastDedicated() {
		fault("last_dedicated is %d, and shard %d was given", next.GetLastDedicated(), max(lastDedicated(next), prev.GetLastDedicated()))
	}
}

func exceptionDiff(prev, next *pb.ClusterConfiguration) (out []string) {
	for _, e := range prev.GetExceptions() {
		if now := Exception(next, e.GetKey()); now.GetShard() != e.GetShard() {
			out = append(out, fmt.Sprintf("- exception %s: shard %d", e.GetKey(), e.GetShard()))
		}
	}
	for _, e := range next.GetExceptions() {
		was := Exception(prev, e.GetKey())
		switch {
		case was.GetShard() != e.GetShard():
			out = append(out, fmt.Sprintf("+ exception %s: shard %d", e.GetKey(), e.GetShard()))
		case !was.GetLeaving() && e.GetLeaving():
			out = append(out, fmt.Sprintf("~ exception %s: leaves shard %d", e.GetKey(), e.GetShard()))
		case !slices.Equal(was.GetStreams(), e.GetStreams()):
			out = append(out, fmt.Sprintf("~ exception %s: streams %s -> %s", e.GetKey(), strings.Join(was.GetStreams(), ","), strings.Join(e.GetStreams(), ",")))
		}
	}
	return out
}
