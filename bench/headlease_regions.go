package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/clusterclient"
	"github.com/headlease/headlease/internal/pki"
	"github.com/headlease/headlease/shard"
)

func init() {
	registerSystem("headlease-regions", func() System { return &headleaseRegions{base: 15600} })
	register(&Spec{
		Name: "headlease-regions", System: "headlease-regions", Workloads: "W8", Share: 1,
		Open: func(_ context.Context, s System, o Opts) (Driver, error) {
			return openInRegion(s.(*headleaseRegions), o)
		},
		Note: "three regions of three servers, D = 2 s, a partition for each region; clients use locks of their own region's partition",
	})
}

// headleaseRegions is a cluster over three regions, each with three servers in
// its namespace and a partition that prefers it.
type headleaseRegions struct {
	headleaseCluster
	base int
	env  *Env
}

const benchShards = 256

func (s *headleaseRegions) region(i int) string { return strings.ToLower(wanNames[i]) }

func (s *headleaseRegions) address(region, server, port int) string {
	return net.JoinHostPort(s.env.host(region), strconv.Itoa(s.base+10*server+port))
}

// shards of the region's partition.
func (s *headleaseRegions) shards(region int) (first, last uint32) {
	n := uint32(len(wanNames))
	return uint32(region) * benchShards / n, uint32(region+1)*benchShards/n - 1
}

func (s *headleaseRegions) clusterYAML() string {
	var b, partitions strings.Builder
	fmt.Fprintf(&b, "cluster: bench\ntiming: %s\nd: 2s\nallow_even_witnesses: true\nregions:\n", *flagTiming)
	for r := range wanNames {
		fmt.Fprintf(&b, "  - name: %s\n    servers:\n", s.region(r))
		for i := range headleaseServers {
			fmt.Fprintf(&b, "      - {name: %s-%d, api: %q, votes: %q, raft: %q, gossip: %q, metrics: \"off\"}\n",
				s.region(r), i+1, s.address(r, i, 0), s.address(r, i, 1), s.address(r, i, 2), s.address(r, i, 3))
		}
		first, last := s.shards(r)
		fmt.Fprintf(&partitions, "  - {name: of-%s, shards: %d-%d, prefer: [%s]}\n", s.region(r), first, last, s.region(r))
	}
	return b.String() + "partitions:\n" + partitions.String()
}

func (s *headleaseRegions) Start(ctx context.Context, env *Env) error {
	s.env = env
	if err := s.prepare(ctx, env, s.clusterYAML()); err != nil {
		return err
	}
	for r := range wanNames {
		for i := range headleaseServers {
			if err := s.startServer(fmt.Sprintf("%s-%d", s.region(r), i+1), env.ns(r)); err != nil {
				return err
			}
		}
	}
	if err := s.initialise(ctx, env.dial(0), "ip", "netns", "exec", env.ns(0)); err != nil {
		return err
	}
	return poll(ctx, 200*time.Millisecond, time.Minute, s.Ready)
}

func (s *headleaseRegions) Info() string {
	return headleaseVersion() + "; three regions of 3 servers, no witness, D = 2 s, mutual TLS, fsync on"
}

// Leader: no region leads the others; the first one is cut off.
func (s *headleaseRegions) Leader(ctx context.Context) (int, error) { return 0, s.Ready(ctx) }

// Ready: each region owns its partition.
func (s *headleaseRegions) Ready(ctx context.Context) error {
	view := s.admin.Look(ctx)
	for i, o := range view.Owners(s.file) {
		if o.Region != s.region(i) {
			return fmt.Errorf("partition %s is owned by %q, not by %s", o.Partition, o.Region, s.region(i))
		}
	}
	return nil
}

// regionDriver is a client in a region, which uses locks of its partition.
type regionDriver struct {
	*headleaseDriver
	first, last uint32
}

func openInRegion(s *headleaseRegions, o Opts) (*regionDriver, error) {
	home := o.Nodes[0]
	d := &regionDriver{headleaseDriver: &headleaseDriver{held: map[string]*client.Lease{}}}
	d.first, d.last = s.shards(home)
	var err error
	if d.links, err = s.newLinks(pki.Identity{Role: pki.RoleClient, Name: headleaseClient}, o.Dial); err != nil {
		return nil, err
	}
	cfg := client.Config{Cluster: s.file.Cluster, Regions: clusterclient.Regions(s.file), Home: s.region(home), Links: d.links, TTL: 30 * time.Second}
	if d.cl, err = client.New(cfg); err != nil {
		return nil, errors.Join(err, d.links.Close())
	}
	return d, nil
}

// own makes of the key one that falls into the region's partition.
func (d *regionDriver) own(key string) string {
	for n := 0; ; n++ {
		own := fmt.Sprintf("%s.%d", key, n)
		r, err := shard.Parse("lock/" + own)
		if err != nil {
			return key // told by the call
		}
		if at, err := r.Shard(benchShards); err != nil || at >= d.first && at <= d.last {
			return own
		}
	}
}

func (d *regionDriver) Acquire(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	return d.headleaseDriver.Acquire(ctx, d.own(key), ttl)
}

func (d *regionDriver) AcquireWait(ctx context.Context, key string, ttl time.Duration) (uint64, error) {
	return d.headleaseDriver.AcquireWait(ctx, d.own(key), ttl)
}

func (d *regionDriver) Release(ctx context.Context, key string, token uint64) error {
	return d.headleaseDriver.Release(ctx, d.own(key), token)
}
