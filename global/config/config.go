// Package config is the cluster configuration that the voters have decided: who
// votes, which partitions there are and who may own them. It checks
// configurations, finds a resource's partition, and checks the headers of
// vote messages against the configuration. Pure.
package config

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/headlease/headlease/internal/clusterfile"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

// Prefixes of voter ids.
const (
	RegionPrefix  = "region/"
	WitnessPrefix = "witness/"
)

// RegionVoter is the voter id of a region.
func RegionVoter(region string) string { return RegionPrefix + region }

// WitnessVoter is the voter id of a witness.
func WitnessVoter(name string) string { return WitnessPrefix + name }

// FromFile makes configuration 1 of a cluster from its file. The voters, which
// only the voters themselves know with their incarnations, and so the check
// (Check), are left to the caller.
func FromFile(f clusterfile.File, clusterID string) *pb.ClusterConfiguration {
	cfg := &pb.ClusterConfiguration{
		ClusterId: clusterID, ClusterName: f.Cluster, Version: 1,
		Shards: f.Shards, DNs: int64(f.D), AllowEvenWitnesses: f.AllowEvenWitnesses,
	}
	for _, p := range f.Partitions {
		spec := &pb.PartitionSpec{Name: p.Name, Prefer: slices.Clone(p.Prefer), AutoFailback: p.Failback == clusterfile.FailbackAuto}
		for _, r := range p.Shards {
			spec.Shards = append(spec.Shards, &pb.ShardRange{First: r.First, Last: r.Last})
		}
		cfg.Partitions = append(cfg.Partitions, spec)
	}
	return cfg
}

// InvalidError refuses a configuration with all its faults.
type InvalidError struct {
	Faults []string
}

func (e *InvalidError) Error() string {
	return "cluster configuration: " + strings.Join(e.Faults, "; ")
}

var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)

// Check checks a complete configuration: one that a voter is asked to store, or
// that came from disk. The first one must have an odd number of witnesses and
// prefer voters only; later ones may be between two steps of a replacement,
// and CheckChange judges what changes. The error is an *InvalidError with all
// faults.
func Check(cfg *pb.ClusterConfiguration) error {
	if cfg == nil {
		return &InvalidError{Faults: []string{"absent"}}
	}
	var faults []string
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	if cfg.GetClusterId() == "" {
		fault("cluster_id is empty; init makes it")
	}
	if cfg.GetVersion() == 0 {
		fault("version is 0; the first is 1")
	}
	if d := time.Duration(cfg.GetDNs()); d < clusterfile.MinD || d > clusterfile.MaxD {
		fault("d_ns is %v; choose 1s to 60s", d)
	}
	goodShards := powerOfTwo(cfg.GetShards()) && cfg.GetShards() <= shard.MaxCount
	if !goodShards {
		fault("shards is %d; choose a power of two up to %d", cfg.GetShards(), shard.MaxCount)
	}
	regions := checkVoters(cfg, fault)
	if cfg.GetVersion() > 1 {
		regions = nil
	}
	checkPartitions(cfg, regions, goodShards, fault)
	checkExceptions(cfg, fault)
	if len(faults) > 0 {
		return &InvalidError{Faults: faults}
	}
	return nil
}

func durationOf(cfg *pb.ClusterConfiguration) time.Duration { return time.Duration(cfg.GetDNs()) }

// rangesText is a partition's shards as the cluster file writes them.
func rangesText(p *pb.PartitionSpec) string {
	var parts []string
	for _, r := range p.GetShards() {
		parts = append(parts, clusterfile.ShardRange{First: r.GetFirst(), Last: r.GetLast()}.String())
	}
	return strings.Join(parts, ",")
}

func powerOfTwo(n uint32) bool { return n > 0 && n&(n-1) == 0 }

func checkVoters(cfg *pb.ClusterConfiguration, fault func(string, ...any)) (regions map[string]bool) {
	regions = map[string]bool{}
	seen := map[string]bool{}
	witnesses := 0
	for _, v := range cfg.GetVoters() {
		id := v.GetId()
		region, isRegion := strings.CutPrefix(id, RegionPrefix)
		witness, isWitness := strings.CutPrefix(id, WitnessPrefix)
		switch {
		case isRegion && namePattern.MatchString(region):
			regions[region] = true
		case isWitness && namePattern.MatchString(witness):
			witnesses++
		default:
			fault("voter %q is neither region/NAME nor witness/NAME", id)
		}
		if seen[id] {
			fault("voter %q is listed twice", id)
		}
		seen[id] = true
		if v.GetIncarnation() == 0 {
			fault("voter %q has no incarnation; ask it with DescribeVoter or DescribeServer", id)
		}
	}
	if len(regions) == 0 {
		fault("voters has no region")
	}
	if witnesses > clusterfile.MaxWitnesses {
		fault("voters has %d witnesses; use at most %d", witnesses, clusterfile.MaxWitnesses)
	}
	if witnesses%2 == 0 && !cfg.GetAllowEvenWitnesses() && cfg.GetVersion() <= 1 {
		fault("voters has %d witnesses, an even number; use an odd one or set allow_even_witnesses", witnesses)
	}
	return regions
}

// checkPartitions checks the partitions; regions, if not nil, are all that they
// may prefer.
func checkPartitions(cfg *pb.ClusterConfiguration, regions map[string]bool, goodShards bool, fault func(string, ...any)) {
	names := map[string]bool{}
	var owners []string
	if goodShards {
		owners = make([]string, cfg.GetShards())
	}
	inRange := true
	for _, p := range cfg.GetPartitions() {
		name := p.GetName()
		if !namePattern.MatchString(name) {
			fault("partition %q is not a name of a-z, 0-9 and -", name)
		}
		if names[name] {
			fault("partition %q is listed twice", name)
		}
		names[name] = true
		if len(p.GetPrefer()) == 0 {
			fault("partition %q prefers no region; list at least one", name)
		}
		for i, region := range p.GetPrefer() {
			if regions != nil && !regions[region] {
				fault("partition %q prefers %q, which is no voter", name, region)
			}
			if slices.Index(p.GetPrefer(), region) < i {
				fault("partition %q prefers %q twice", name, region)
			}
		}
		for _, r := range p.GetShards() {
			if r.GetFirst() > r.GetLast() || goodShards && r.GetLast() >= cfg.GetShards() {
				fault("partition %q has shards %d-%d of %d", name, r.GetFirst(), r.GetLast(), cfg.GetShards())
				inRange = false
				continue
			}
			claim(owners, name, r, fault)
		}
	}
	if len(names) == 0 {
		fault("partitions is empty; list at least one")
		return
	}
	if i := slices.Index(owners, ""); i >= 0 && inRange {
		fault("shard %d is in no partition; every shard belongs to exactly one", i)
	}
}

// claim enters a range's shards under name; it reports the first shard taken.
func claim(owners []string, name string, r *pb.ShardRange, fault func(string, ...any)) {
	reported := false
	for s := r.GetFirst(); s <= r.GetLast() && int(s) < len(owners); s++ {
		if owners[s] != "" && !reported {
			fault("shard %d is in partition %q and in %q; every shard belongs to exactly one", s, owners[s], name)
			reported = true
		}
		owners[s] = name
	}
}

// Place is where a resource belongs.
type Place struct {
	Resource  shard.Resource
	Shard     uint32
	Partition string
}

// Map finds the partition of a resource in constant time. It does not change;
// make a new one for a new configuration.
type Map struct {
	shards []int32 // shard → partition
	specs  []*pb.PartitionSpec
	byName map[string]int
	// dedicated are the exceptions' shards by key, home the hash shards of
	// their keys, in whose partitions they are.
	dedicated shard.Exceptions
	home      map[uint32]uint32
}

// NewMap makes the table of a configuration that has passed Check, or, before
// the voters are known, of one from FromFile.
func NewMap(cfg *pb.ClusterConfiguration) (*Map, error) {
	var faults []string
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	good := powerOfTwo(cfg.GetShards()) && cfg.GetShards() <= shard.MaxCount
	if !good {
		return nil, &InvalidError{Faults: []string{fmt.Sprintf("shards is %d; choose a power of two up to %d", cfg.GetShards(), shard.MaxCount)}}
	}
	checkPartitions(cfg, nil, good, fault)
	if len(faults) > 0 {
		return nil, &InvalidError{Faults: faults}
	}
	m := &Map{
		shards: make([]int32, cfg.GetShards()), byName: map[string]int{},
		dedicated: shard.Exceptions{}, home: map[uint32]uint32{},
	}
	for _, e := range cfg.GetExceptions() {
		m.dedicated[e.GetKey()] = e.GetShard()
		m.home[e.GetShard()] = shard.HashShard(e.GetKey(), cfg.GetShards())
	}
	for i, p := range cfg.GetPartitions() {
		m.specs = append(m.specs, p)
		m.byName[p.GetName()] = i
		for _, r := range p.GetShards() {
			for s := r.GetFirst(); s <= r.GetLast(); s++ {
				m.shards[s] = int32(i)
			}
		}
	}
	return m, nil
}

// Shards returns the number of shards.
func (m *Map) Shards() uint32 { return uint32(len(m.shards)) }

// Exceptions are the dedicated shards by key. Do not change them.
func (m *Map) Exceptions() shard.Exceptions { return m.dedicated }

// Locate parses a resource's name and returns where it belongs. The error names
// the part of the name that is wrong and the remedy.
func (m *Map) Locate(resource string) (Place, error) {
	r, err := shard.Parse(resource)
	if err != nil {
		return Place{}, err
	}
	if home, ok := m.home[r.Number]; ok && r.Kind == shard.KindShard {
		return Place{Resource: r, Shard: r.Number, Partition: m.specs[m.shards[home]].GetName()}, nil
	}
	s, err := r.Shard(m.Shards())
	if err != nil {
		return Place{}, err
	}
	p := Place{Resource: r, Shard: s, Partition: m.specs[m.shards[s]].GetName()}
	if dedicated, ok := m.dedicated[r.Key]; ok && r.Kind == shard.KindLock {
		p.Shard = dedicated // in the same partition
	}
	return p, nil
}

// OfShard returns the partition of a shard below Shards.
func (m *Map) OfShard(s uint32) *pb.PartitionSpec { return m.specs[m.shards[s]] }

// Partition returns the partition of that name, nil if there is none. Do not
// change it.
func (m *Map) Partition(name string) *pb.PartitionSpec {
	i, ok := m.byName[name]
	if !ok {
		return nil
	}
	return m.specs[i]
}

// Partitions returns all partitions in the configuration's order. Do not change
// them.
func (m *Map) Partitions() []*pb.PartitionSpec { return m.specs }

// Rank is a region's place in a partition's list of preferred regions, from 0;
// -1 if it may not own it.
func (m *Map) Rank(partition, region string) int {
	return slices.Index(m.Partition(partition).GetPrefer(), region)
}

// PartitionOf is NewMap and Locate in one, for callers that ask once.
func PartitionOf(cfg *pb.ClusterConfiguration, resource string) (partition string, s uint32, err error) {
	m, err := NewMap(cfg)
	if err != nil {
		return "", 0, err
	}
	p, err := m.Locate(resource)
	return p.Partition, p.Shard, err
}
