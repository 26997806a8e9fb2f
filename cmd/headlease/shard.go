package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	cluster "github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/global/config"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

func newShardCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "shard",
		Aliases: []string{"shards"},
		Short:   "Say which shard a key belongs to, and give hot keys their own",
		Long:    "Shard is about the shards of the key space.",
		Example: `  headlease shard of account/1042
  headlease shard pin account/whale --stream orders --redis 10.1.0.9:6379
  headlease shard list`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newShardOfCmd(a), newShardListCmd(a), newShardPinCmd(a), newShardUnpinCmd(a), newShardUnparkCmd(a))
	return cmd
}

func newShardOfCmd(a *app) *cobra.Command {
	var offline, asJSON bool
	cmd := &cobra.Command{
		Use:   "of KEY",
		Short: "Show the shard and the partition of a key",
		Long: `Of prints which shard a key belongs to, by the configuration that the voters have
decided: the shard that the exception table gives the key, else its hash shard,
xxhash64(key, seed 0) & (shards-1).

With --offline it goes by the cluster file and asks nobody; that file has no
exception table. Test vectors for other languages, and references in Python and
TypeScript, are in the directory shard of the source.`,
		Example: `  headlease shard of account/1042
  headlease shard of account/1042 --offline
  headlease shard of account/1042 --json | jq .shard`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkKey(args[0]); err != nil {
				return err
			}
			conf, err := a.shardConfiguration(cmd, offline)
			if err != nil {
				return err
			}
			s, err := summariseShard(args[0], conf)
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(a.stdout).Encode(s)
			}
			how := ""
			if s.Dedicated {
				how = fmt.Sprintf(" (dedicated; its hash shard is %d)", s.HashShard)
			}
			return a.printf("shard/%d of %d%s, partition %s\n", s.Shard, conf.GetShards(), how, s.Partition)
		},
	}
	cmd.Flags().BoolVar(&offline, "offline", false, "go by the cluster file and ask nobody")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) shardConfiguration(cmd *cobra.Command, offline bool) (conf *pb.ClusterConfiguration, err error) {
	if offline {
		f, err := a.clusterFile()
		if err != nil {
			return nil, err
		}
		return config.FromFile(f, ""), nil
	}
	err = a.withCluster(func(c *cluster.Cluster) error {
		conf, _, err = c.Configuration(cmd.Context())
		return err
	})
	return conf, err
}

// shardSummary is the JSON form of shard of.
type shardSummary struct {
	Key       string `json:"key"`
	Shard     uint32 `json:"shard"`
	HashShard uint32 `json:"hash_shard"`
	Dedicated bool   `json:"dedicated"`
	Partition string `json:"partition"`
}

func summariseShard(key string, conf *pb.ClusterConfiguration) (shardSummary, error) {
	m, err := config.NewMap(conf)
	if err != nil {
		return shardSummary{}, err
	}
	hash, at := shard.HashShard(key, conf.GetShards()), shard.Of(key, conf.GetShards(), m.Exceptions())
	return shardSummary{Key: key, Shard: at, HashShard: hash, Dedicated: at >= shard.FirstDedicated, Partition: m.OfShard(hash).GetName()}, nil
}
