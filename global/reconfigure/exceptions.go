package reconfigure

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Pin gives a key a dedicated shard, for the streams that are named: with that
// its lease can be granted. The move of the key's messages follows it.
func Pin(key string, streams []string) Goal {
	return func(c *pb.ClusterConfiguration) (*Step, error) {
		next := config.Next(c)
		e := config.Exception(next, key)
		switch {
		case e.GetLeaving():
			return nil, fmt.Errorf("key %s is on its way back from shard %d; finish that with `headlease shard unpin %s`, and pin it then", key, e.GetShard(), key)
		case e == nil:
			n, err := config.NextDedicated(c)
			if err != nil {
				return nil, err
			}
			if len(c.GetExceptions()) >= config.MaxExceptions {
				return nil, fmt.Errorf("%d keys have shards of their own, as many as there may be; unpin one with `headlease shard unpin`", len(c.GetExceptions()))
			}
			e = &pb.ShardException{Key: key, Shard: n, Since: next.GetVersion()}
			next.Exceptions, next.LastDedicated = append(next.Exceptions, e), n
		default:
			next.LastDedicated = max(next.GetLastDedicated(), e.GetShard())
		}
		had := len(e.GetStreams())
		for _, s := range streams {
			if !slices.Contains(e.GetStreams(), s) {
				e.Streams = append(e.Streams, s)
			}
		}
		slices.Sort(e.Streams)
		if e.GetSince() != next.GetVersion() && len(e.GetStreams()) == had {
			return nil, nil
		}
		return checked(c, next, fmt.Sprintf("pin %s to shard %d", key, e.GetShard()))
	}
}

// Unpin says that a key is to go back to its hash shard; its dedicated one can
// be held until it has.
func Unpin(key string) Goal {
	return func(c *pb.ClusterConfiguration) (*Step, error) {
		next := config.Next(c)
		e := config.Exception(next, key)
		if e == nil || e.GetLeaving() {
			return nil, nil
		}
		e.Leaving, e.Since = true, next.GetVersion()
		next.LastDedicated = max(next.GetLastDedicated(), e.GetShard())
		return checked(c, next, fmt.Sprintf("begin to unpin %s from shard %d", key, e.GetShard()))
	}
}

// Unpinned takes streams in which the key is back from its exception, and ends
// that with the last one. The move is named by the version that began it.
func Unpinned(key string, since uint64, streams []string) Goal {
	return func(c *pb.ClusterConfiguration) (*Step, error) {
		next := config.Next(c)
		e := config.Exception(next, key)
		if e == nil || e.GetSince() > since {
			return nil, nil // somebody else has finished it
		}
		if !e.GetLeaving() || e.GetSince() != since {
			return nil, fmt.Errorf("key %s does not leave shard %d in a move of version %d", key, e.GetShard(), since)
		}
		had := len(e.GetStreams())
		e.Streams = slices.DeleteFunc(e.Streams, func(s string) bool { return slices.Contains(streams, s) })
		if len(e.GetStreams()) > 0 {
			if len(e.GetStreams()) == had {
				return nil, nil
			}
			return checked(c, next, fmt.Sprintf("key %s is back in streams %v", key, streams))
		}
		next.Exceptions = slices.DeleteFunc(next.Exceptions, func(e *pb.ShardException) bool { return e.GetKey() == key })
		return checked(c, next, fmt.Sprintf("end the exception of %s, shard %d", key, e.GetShard()))
	}
}

func checked(c, next *pb.ClusterConfiguration, what string) (*Step, error) {
	if proto.Equal(asBefore(next, c), c) {
		return nil, nil
	}
	if err := config.CheckChange(c, next); err != nil {
		return nil, err
	}
	return &Step{next, what}, nil
}
