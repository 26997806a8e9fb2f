package config

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/internal/clusterfile"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// Next returns a copy of c as the version after it, in which nothing else has
// changed yet.
func Next(c *pb.ClusterConfiguration) *pb.ClusterConfiguration {
	next := proto.CloneOf(c)
	next.Version++
	next.PreviousVoters = proto.CloneOf(c).GetVoters()
	return next
}

// Member reports whether c has that voter under that incarnation.
func Member(c *pb.ClusterConfiguration, v *pb.Voter) bool {
	return v.GetIncarnation() != 0 && VoterIncarnation(c, v.GetId()) == v.GetIncarnation()
}

// WithVoter is the step that adds a voter.
func WithVoter(c *pb.ClusterConfiguration, v *pb.Voter) *pb.ClusterConfiguration {
	next := Next(c)
	next.Voters = append(next.Voters, proto.CloneOf(v))
	next.DestroyedVoters = slices.DeleteFunc(next.DestroyedVoters, func(d *pb.Voter) bool { return d.GetId() == v.GetId() })
	return next
}

// WithoutVoter is the step that removes the voter of that id.
func WithoutVoter(c *pb.ClusterConfiguration, id string) *pb.ClusterConfiguration {
	next := Next(c)
	next.Voters = slices.DeleteFunc(next.Voters, func(v *pb.Voter) bool { return v.GetId() == id })
	return next
}

// CheckChange checks that next may follow prev: it is good by itself, and
// either one member was added or removed, or something else has changed that
// may change while the cluster runs. The error is an *InvalidError with all
// faults.
func CheckChange(prev, next *pb.ClusterConfiguration) error {
	if err := Check(next); err != nil {
		return err
	}
	var faults []string
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	if next.GetClusterId() != prev.GetClusterId() || next.GetClusterName() != prev.GetClusterName() {
		fault("cluster is %s (%q), was %s (%q); it never changes", next.GetClusterId(), next.GetClusterName(), prev.GetClusterId(), prev.GetClusterName())
	}
	if EraOf(next) != EraOf(prev) {
		fault("era is %v, was %v; only force-quorum begins one", EraOf(next), EraOf(prev))
	}
	if next.GetVersion() != prev.GetVersion()+1 {
		fault("version is %d; the one after %d is %d", next.GetVersion(), prev.GetVersion(), prev.GetVersion()+1)
	}
	if next.GetShards() != prev.GetShards() {
		fault("shards is %d, was %d; the number of shards is fixed when a cluster is made: another one would give keys to other shards while they are held", next.GetShards(), prev.GetShards())
	}
	if !slices.EqualFunc(next.GetPreviousVoters(), prev.GetVoters(), func(a, b *pb.Voter) bool { return proto.Equal(a, b) }) {
		fault("previous_voters must be those of version %d", prev.GetVersion())
	}
	if next.GetDNs() < prev.GetDNs() {
		fault("d is %v, was %v; it can only grow while the cluster runs: what was promised to clients under the longer one may still run when a leader comes that knows the shorter one only", durationOf(next), durationOf(prev))
	}
	added, removed := memberDiff(prev, next)
	if len(added)+len(removed) > 1 {
		fault("members: %d added and %d removed; one step adds or removes one member, since the majorities of two steps at once need not meet", len(added), len(removed))
	}
	if len(added)+len(removed) > 0 && !sameSettings(prev, next) {
		fault("a step that changes the members changes nothing else")
	}
	checkPartitionChange(prev, next, fault)
	checkExceptionChange(prev, next, fault)
	if len(faults) > 0 {
		return &InvalidError{Faults: faults}
	}
	return nil
}

// memberDiff compares the members by id and incarnation.
func memberDiff(prev, next *pb.ClusterConfiguration) (added, removed []*pb.Voter) {
	for _, v := range next.GetVoters() {
		if !Member(prev, v) {
			added = append(added, v)
		}
	}
	for _, v := range prev.GetVoters() {
		if !Member(next, v) {
			removed = append(removed, v)
		}
	}
	return added, removed
}

// sameSettings reports whether all but the members is as before.
func sameSettings(prev, next *pb.ClusterConfiguration) bool {
	bare := func(c *pb.ClusterConfiguration) *pb.ClusterConfiguration {
		b := proto.CloneOf(c)
		b.Version, b.Voters, b.PreviousVoters, b.DestroyedVoters = 0, nil, nil, nil
		return b
	}
	return proto.Equal(bare(prev), bare(next))
}

// checkPartitionChange refuses what would let a token of a resource go back:
// tokens rise within a partition, so a shard never changes its partition, and a
// partition's name, under which registers and epochs are kept, is never used
// for another one.
func checkPartitionChange(prev, next *pb.ClusterConfiguration, fault func(string, ...any)) {
	old, now := specs(prev), specs(next)
	for _, p := range prev.GetPartitions() {
		name := p.GetName()
		switch n := now[name]; {
		case n == nil && len(p.GetShards()) > 0:
			fault("partition %q is gone, and its shards would pass to others, where their tokens could go back; keep it, and drain and release it if nobody should own it", name)
		case n == nil && !slices.Contains(next.GetRetiredPartitions(), name):
			fault("partition %q is gone and not in retired_partitions", name)
		case n != nil && !slices.EqualFunc(n.GetShards(), p.GetShards(), func(a, b *pb.ShardRange) bool { return proto.Equal(a, b) }):
			fault("partition %q has other shards than before; a shard keeps its partition, since its tokens rise within it", name)
		}
	}
	for _, name := range prev.GetRetiredPartitions() {
		if !slices.Contains(next.GetRetiredPartitions(), name) {
			fault("retired partition %q is forgotten", name)
		}
	}
	for _, name := range next.GetRetiredPartitions() {
		if old[name] == nil && !slices.Contains(prev.GetRetiredPartitions(), name) {
			fault("retired_partitions: there was no partition %q", name)
		}
	}
	for _, p := range next.GetPartitions() {
		for _, region := range p.GetPrefer() {
			known := old[p.GetName()] != nil && slices.Contains(old[p.GetName()].GetPrefer(), region)
			if !known && VoterIncarnation(next, RegionVoter(region)) == 0 {
				fault("partition %q prefers %q, which is no voter; add the region first", p.GetName(), region)
			}
		}
	}
}

func specs(c *pb.ClusterConfiguration) map[string]*pb.PartitionSpec {
	m := make(map[string]*pb.PartitionSpec, len(c.GetPartitions()))
	for _, p := range c.GetPartitions() {
		m[p.GetName()] = p
	}
	return m
}

// Diff says in words what changes from prev to next, one line each.
func Diff(prev, next *pb.ClusterConfiguration) []string {
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if EraOf(prev) != EraOf(next) {
		say("~ era: %v -> %v, by force-quorum", EraOf(prev), EraOf(next))
	}
	added, removed := memberDiff(prev, next)
	for _, v := range removed {
		say("- voter %s (incarnation %x)", v.GetId(), v.GetIncarnation())
	}
	for _, v := range added {
		say("+ voter %s (incarnation %x)", v.GetId(), v.GetIncarnation())
	}
	if prev.GetDNs() != next.GetDNs() {
		say("~ d: %v -> %v", durationOf(prev), durationOf(next))
	}
	if prev.GetShards() != next.GetShards() {
		say("~ shards: %d -> %d", prev.GetShards(), next.GetShards())
	}
	if prev.GetAllowEvenWitnesses() != next.GetAllowEvenWitnesses() {
		say("~ allow_even_witnesses: %v -> %v", prev.GetAllowEvenWitnesses(), next.GetAllowEvenWitnesses())
	}
	old, now := specs(prev), specs(next)
	for _, p := range prev.GetPartitions() {
		if now[p.GetName()] == nil {
			say("- partition %s", p.GetName())
		}
	}
	for _, p := range next.GetPartitions() {
		was := old[p.GetName()]
		if was == nil {
			say("+ partition %s, shards %s, prefer %v", p.GetName(), rangesText(p), p.GetPrefer())
			continue
		}
		if !slices.Equal(was.GetPrefer(), p.GetPrefer()) {
			say("~ partition %s: prefer %v -> %v", p.GetName(), was.GetPrefer(), p.GetPrefer())
		}
		if was.GetAutoFailback() != p.GetAutoFailback() {
			say("~ partition %s: failback %s -> %s", p.GetName(), failback(was), failback(p))
		}
		if a, b := rangesText(was), rangesText(p); a != b {
			say("~ partition %s: shards %s -> %s", p.GetName(), a, b)
		}
	}
	return append(out, exceptionDiff(prev, next)...)
}

func failback(p *pb.PartitionSpec) clusterfile.Failback {
	if p.GetAutoFailback() {
		return clusterfile.FailbackAuto
	}
	return clusterfile.FailbackManual
}
