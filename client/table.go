package client

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"

	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

// ShardTable says which keys have shards of their own.
type ShardTable struct {
	// Version of the configuration that it is from. Regions learn of a new one at
	// different times: of two tables the one of the higher version counts.
	Version uint64
	// Shards is the number of hash shards.
	Shards uint32
	// Exceptions are the keys with dedicated shards. Those that are on their way
	// back are still among them, since somebody must hold their shards until then.
	Exceptions shard.Exceptions
}

// ShardTable asks for the table: the home region first, then the others.
func (c *Client) ShardTable(ctx context.Context) (ShardTable, error) {
	var errs []error
	for _, name := range c.order {
		var res *pb.ListPartitionsResponse
		err := c.Call(ctx, name, func(ctx context.Context, cc grpc.ClientConnInterface) (err error) {
			res, err = pb.NewClusterServiceClient(cc).ListPartitions(ctx, &pb.ListPartitionsRequest{})
			return err
		})
		if err == nil && res.GetConfigurationVersion() == 0 {
			err = errors.New("has no configuration, or is of a version that does not tell it")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("region %s: %w", name, err))
			continue
		}
		t := ShardTable{Version: res.GetConfigurationVersion(), Shards: res.GetShards(), Exceptions: shard.Exceptions{}}
		for _, e := range res.GetExceptions() {
			t.Exceptions[e.GetKey()] = e.GetShard()
		}
		return t, nil
	}
	return ShardTable{}, fmt.Errorf("ask for the dedicated shards: %w", errors.Join(errs...))
}
