package config

import (
	"errors"
	"strings"
	"testing"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// A number is given once, and an exception ends only by way of leaving: no
// message is left where nobody looks for it, no token goes down.
func TestExceptionsChangeByDrainedMovesOnly(t *testing.T) {
	prev := good(t)
	prev.Version, prev.LastDedicated = 7, FirstException+5
	prev.Exceptions = []*pb.ShardException{
		{Key: "pinned", Shard: FirstException + 1, Since: 3, Streams: []string{"orders"}},
		{Key: "leaving", Shard: FirstException + 2, Since: 5, Leaving: true, Streams: []string{"orders", "payments"}},
	}
	type table = []*pb.ShardException
	for name, c := range map[string]struct {
		bend func(n *pb.ClusterConfiguration)
		want string
	}{
		"new": {func(n *pb.ClusterConfiguration) {
			n.LastDedicated++
			n.Exceptions = append(n.Exceptions, &pb.ShardException{Key: "new", Shard: n.LastDedicated, Since: n.Version})
		}, ""},
		"more streams":  {func(n *pb.ClusterConfiguration) { n.Exceptions[0].Streams = []string{"a", "orders"} }, ""},
		"unpinned":      {func(n *pb.ClusterConfiguration) { n.Exceptions[0].Leaving, n.Exceptions[0].Since = true, n.Version }, ""},
		"a stream back": {func(n *pb.ClusterConfiguration) { n.Exceptions[1].Streams = []string{"orders"} }, ""},
		"ended":         {func(n *pb.ClusterConfiguration) { n.Exceptions = n.Exceptions[:1] }, ""},

		"number again": {func(n *pb.ClusterConfiguration) {
			n.Exceptions = append(n.Exceptions, &pb.ShardException{Key: "new", Shard: FirstException + 4, Since: n.Version})
		}, "a number that was given before; the next is 16777222"},
		"born old": {func(n *pb.ClusterConfiguration) {
			n.LastDedicated++
			n.Exceptions = append(n.Exceptions, &pb.ShardException{Key: "new", Shard: n.LastDedicated, Since: 2})
		}, "must begin with this version, 8"},
		"gone at once": {func(n *pb.ClusterConfiguration) { n.Exceptions = n.Exceptions[1:] }, "headlease shard unpin"},
		"other shard": {func(n *pb.ClusterConfiguration) {
			n.Exceptions[0].Shard, n.LastDedicated = FirstException+6, FirstException+6
		}, "unpin it first"},
		"comes back":         {func(n *pb.ClusterConfiguration) { n.Exceptions[1].Leaving = false }, "was leaving"},
		"another generation": {func(n *pb.ClusterConfiguration) { n.Exceptions[0].Since = n.Version }, "is of version 8, was of 3"},
		"leaves unmarked":    {func(n *pb.ClusterConfiguration) { n.Exceptions[0].Leaving = true }, "is of version 3, was of 3"},
		"to come":            {func(n *pb.ClusterConfiguration) { n.Exceptions[0].Since = 99 }, "which is to come"},
		"stream lost":        {func(n *pb.ClusterConfiguration) { n.Exceptions[0].Streams = nil }, "has lost a stream"},
		"memory lost":        {func(n *pb.ClusterConfiguration) { n.LastDedicated = 0 }, "last_dedicated is 0"},
		"not remembered": {func(n *pb.ClusterConfiguration) {
			n.Exceptions = append(n.Exceptions, &pb.ShardException{Key: "new", Shard: FirstException + 6, Since: n.Version})
		}, "last_dedicated is"},
	} {
		n := Next(prev)
		n.Exceptions = append(table{}, n.Exceptions...)
		c.bend(n)
		err := CheckChange(prev, n)
		var e *InvalidError
		if c.want == "" && err != nil || c.want != "" && (!errors.As(err, &e) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if c.want == "" && len(Diff(prev, n)) != 1 {
			t.Errorf("%s: diff %q", name, Diff(prev, n))
		}
	}
}
