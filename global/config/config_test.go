package config

import (
	"errors"
	"slices"
	"strconv"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/headlease/headlease/internal/clusterfile"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

func good(t *testing.T) *pb.ClusterConfiguration {
	t.Helper()
	f, _, err := clusterfile.Parse([]byte(clusterfile.Example()), nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg := FromFile(f, "id")
	for i, id := range []string{"region/eu", "region/us", "witness/w1", "witness/w2", "witness/w3"} {
		cfg.Voters = append(cfg.Voters, &pb.Voter{Id: id, Incarnation: uint64(100 + i)})
	}
	return cfg
}

func TestFromFileIsGoodOnceTheVotersAreKnown(t *testing.T) {
	cfg := good(t)
	if err := Check(cfg); err != nil {
		t.Fatal(err)
	}
	if cfg.GetVersion() != 1 || cfg.GetDNs() != 4e9 || cfg.GetShards() != 256 || cfg.GetClusterName() != "example" {
		t.Errorf("%v", cfg)
	}
	if q := QuorumOf(cfg); q != (Quorum{Voters: 3, Witnesses: 2}) {
		t.Errorf("quorum %+v", q)
	}
	cfg.Voters = nil
	if err := Check(cfg); err == nil {
		t.Error("a configuration without voters passed")
	}
}

func TestQuorums(t *testing.T) {
	for _, c := range []struct {
		regions, witnesses int
		want               Quorum
	}{{2, 1, Quorum{2, 1}}, {3, 3, Quorum{4, 2}}, {3, 0, Quorum{2, 0}}, {2, 2, Quorum{3, 2}}, {5, 7, Quorum{7, 4}}} {
		cfg := &pb.ClusterConfiguration{}
		for i := range c.regions {
			cfg.Voters = append(cfg.Voters, &pb.Voter{Id: RegionVoter("r" + strconv.Itoa(i))})
		}
		for i := range c.witnesses {
			cfg.Voters = append(cfg.Voters, &pb.Voter{Id: WitnessVoter("w" + strconv.Itoa(i))})
		}
		if got := QuorumOf(cfg); got != c.want {
			t.Errorf("%d regions, %d witnesses: %+v", c.regions, c.witnesses, got)
		}
	}
}

func TestCheckNamesEachFault(t *testing.T) {
	for name, c := range map[string]struct {
		bend func(*pb.ClusterConfiguration)
		want string
	}{
		"id":      {func(c *pb.ClusterConfiguration) { c.ClusterId = "" }, "cluster_id is empty; init makes it"},
		"version": {func(c *pb.ClusterConfiguration) { c.Version = 0 }, "version is 0; the first is 1"},
		"d":       {func(c *pb.ClusterConfiguration) { c.DNs = 5 }, "d_ns is 5ns; choose 1s to 60s"},
		"shards":  {func(c *pb.ClusterConfiguration) { c.Shards = 255 }, "shards is 255; choose a power of two up to 65536"},
		"voter":   {func(c *pb.ClusterConfiguration) { c.Voters[2].Id = "w1" }, `voter "w1" is neither region/NAME nor witness/NAME`},
		"twice":   {func(c *pb.ClusterConfiguration) { c.Voters[2].Id = "witness/w2" }, `voter "witness/w2" is listed twice`},
		"incarnation": {
			func(c *pb.ClusterConfiguration) { c.Voters[0].Incarnation = 0 },
			`voter "region/eu" has no incarnation; ask it with DescribeVoter or DescribeServer`,
		},
		"even": {func(c *pb.ClusterConfiguration) { c.Voters = c.Voters[:4] }, "voters has 2 witnesses, an even number; use an odd one or set allow_even_witnesses"},
		"stranger": {
			func(c *pb.ClusterConfiguration) { c.Partitions[0].Prefer[1] = "moon" },
			`partition "east" prefers "moon", which is no voter`,
		},
		"overlap": {
			func(c *pb.ClusterConfiguration) { c.Partitions[1].Shards[0].First = 127 },
			`shard 127 is in partition "east" and in "west"; every shard belongs to exactly one`,
		},
		"gap":    {func(c *pb.ClusterConfiguration) { c.Partitions[1].Shards[0].Last = 254 }, "shard 255 is in no partition; every shard belongs to exactly one"},
		"beyond": {func(c *pb.ClusterConfiguration) { c.Partitions[1].Shards[0].Last = 256 }, `partition "west" has shards 128-256 of 256`},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := good(t)
			c.bend(cfg)
			var e *InvalidError
			if err := Check(cfg); !errors.As(err, &e) || !slices.Contains(e.Faults, c.want) {
				t.Errorf("error %v\nwant %s", err, c.want)
			}
		})
	}
	if Check(nil) == nil || Check(&pb.ClusterConfiguration{}) == nil {
		t.Error("an empty configuration passed")
	}
}

func TestLocate(t *testing.T) {
	m, err := NewMap(good(t))
	if err != nil {
		t.Fatal(err)
	}
	for resource, want := range map[string]string{
		"shard/0": "east", "shard/127": "east", "shard/128": "west", "shard/255": "west",
	} {
		if p, err := m.Locate(resource); err != nil || p.Partition != want {
			t.Errorf("%s: %+v, %v", resource, p, err)
		}
	}
	a, errA := m.Locate("lock/nightly#1")
	b, errB := m.Locate("lock/nightly#2")
	if errA != nil || errB != nil || a.Shard != b.Shard || a.Shard != shard.HashShard("nightly", 256) {
		t.Errorf("slots of a semaphore are apart: %+v %+v", a, b)
	}
	for _, bad := range []string{"shard/256", "nightly", "lock/", "zoo/x"} {
		if _, err := m.Locate(bad); err == nil {
			t.Errorf("%s was found", bad)
		}
	}
	if m.Rank("west", "us") != 0 || m.Rank("west", "eu") != 1 || m.Rank("west", "moon") != -1 || m.Rank("none", "eu") != -1 {
		t.Error("ranks")
	}
	if m.Partition("east") != m.Partitions()[0] || m.Partition("none") != nil || m.OfShard(200).GetName() != "west" {
		t.Error("partitions")
	}
}

// The table says of every resource what a search through the ranges says.
func TestLocateAgreesWithASearch(t *testing.T) {
	cfg := good(t)
	m, err := NewMap(cfg)
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(rt *rapid.T) {
		name := "lock/" + rapid.StringMatching(`[a-z0-9._:/-]{1,40}`).Draw(rt, "key")
		got, err := m.Locate(name)
		if err != nil {
			rt.Fatal(err)
		}
		for _, p := range cfg.GetPartitions() {
			in := slices.ContainsFunc(p.GetShards(), func(r *pb.ShardRange) bool { return r.GetFirst() <= got.Shard && got.Shard <= r.GetLast() })
			if in != (p.GetName() == got.Partition) {
				rt.Fatalf("%s in shard %d: %s, but %s has it: %v", name, got.Shard, got.Partition, p.GetName(), in)
			}
		}
		if p, s, err := PartitionOf(cfg, name); err != nil || p != got.Partition || s != got.Shard {
			rt.Fatalf("PartitionOf: %s %d %v", p, s, err)
		}
	})
}

func TestCheckHeader(t *testing.T) {
	cfg := good(t)
	header := &pb.VoteHeader{ClusterId: "id", ConfigVersion: 1, Candidate: "eu", CandidateIncarnation: 100}
	if err := CheckHeader(cfg, header); err != nil {
		t.Fatal(err)
	}
	bend := func(f func(*pb.VoteHeader)) error {
		h := proto.CloneOf(header)
		f(h)
		return CheckHeader(cfg, h)
	}
	if err := CheckHeader(nil, header); !errors.Is(err, ErrUninitialised) {
		t.Errorf("no configuration: %v", err)
	}
	var cluster *OtherClusterError
	if err := bend(func(h *pb.VoteHeader) { h.ClusterId = "x" }); !errors.As(err, &cluster) || cluster.Theirs != "x" || cluster.Own != "id" {
		t.Errorf("other cluster: %v", err)
	}
	var version *VersionError
	if err := bend(func(h *pb.VoteHeader) { h.ConfigVersion = 2 }); !errors.As(err, &version) || version.Theirs != 2 {
		t.Errorf("other version: %v", err)
	}
	for name, f := range map[string]func(*pb.VoteHeader){
		"stranger":    func(h *pb.VoteHeader) { h.Candidate = "moon" },
		"none":        func(h *pb.VoteHeader) { h.Candidate = "" },
		"incarnation": func(h *pb.VoteHeader) { h.CandidateIncarnation = 7 },
		"witness":     func(h *pb.VoteHeader) { h.Candidate, h.CandidateIncarnation = "w1", 102 },
		"zero":        func(h *pb.VoteHeader) { h.Candidate, h.CandidateIncarnation = "moon", 0 },
	} {
		var c *CandidateError
		if err := bend(f); !errors.As(err, &c) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
