package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/global/reconfigure"
	"github.com/headlease/headlease/global/register"
	"github.com/headlease/headlease/internal/clusterfile"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// AddWitness makes a witness of the cluster file a voter. Its process must run,
// with an empty data directory.
func (c *Cluster) AddWitness(ctx context.Context, name string, progress func(string)) (*pb.ClusterConfiguration, error) {
	v, err := c.witness(ctx, name, progress)
	if err != nil {
		return nil, err
	}
	return c.Change(ctx, Change{Goal: reconfigure.Add(v), Progress: progress})
}

// RemoveWitness ends the membership of a witness, which need neither run nor be
// in the cluster file.
func (c *Cluster) RemoveWitness(ctx context.Context, name string, progress func(string)) (*pb.ClusterConfiguration, error) {
	return c.Change(ctx, Change{Goal: reconfigure.Remove(config.WitnessVoter(name)), Progress: progress})
}

// ReplaceWitness makes one witness a voter instead of another; both names are
// the same when its data was wiped.
func (c *Cluster) ReplaceWitness(ctx context.Context, old, name string, progress func(string)) (*pb.ClusterConfiguration, error) {
	v, err := c.witness(ctx, name, progress)
	if err != nil {
		return nil, err
	}
	return c.Change(ctx, Change{Goal: reconfigure.Replace(config.WitnessVoter(old), v), Progress: progress})
}

// AddRegion makes a region of the cluster file a voter: first its Raft group,
// if it has none. Its servers must run. It owns nothing until a partition
// prefers it.
func (c *Cluster) AddRegion(ctx context.Context, name string, progress func(string)) (*pb.ClusterConfiguration, error) {
	v, err := c.region(ctx, name, progress)
	if err != nil {
		return nil, err
	}
	return c.Change(ctx, Change{Goal: reconfigure.Add(v), Progress: progress})
}

// ReplaceRegion makes a region a voter under the new incarnation of its data,
// which was wiped or restored, instead of the one before.
func (c *Cluster) ReplaceRegion(ctx context.Context, name string, progress func(string)) (*pb.ClusterConfiguration, error) {
	v, err := c.region(ctx, name, progress)
	if err != nil {
		return nil, err
	}
	return c.Change(ctx, Change{Goal: reconfigure.Replace(config.RegionVoter(name), v), Progress: progress})
}

// RemoveRegion ends the membership of a region. It is refused while the region, or
// any partition's register as another region knows it, says that it owns one, and
// while a partition prefers it: else it could become the owner at any time.
func (c *Cluster) RemoveRegion(ctx context.Context, name string, progress func(string)) (*pb.ClusterConfiguration, error) {
	goal := reconfigure.Remove(config.RegionVoter(name))
	checked := func(conf *pb.ClusterConfiguration) (*reconfigure.Step, error) {
		step, err := goal(conf)
		if err != nil || step == nil {
			return step, err
		}
		for _, p := range conf.GetPartitions() {
			if slices.Contains(p.GetPrefer(), name) {
				return nil, fmt.Errorf("partition %s prefers region %s; take it out of its list first with 'headlease config apply', and drain it", p.GetName(), name)
			}
		}
		return step, c.ownsNothing(ctx, name)
	}
	return c.Change(ctx, Change{Goal: checked, Progress: progress})
}

// ownsNothing checks that a region says of no partition that it owns it, nor does the
// newest value that any region that answers has accepted. A lost region cannot be
// asked itself.
func (c *Cluster) ownsNothing(ctx context.Context, name string) error {
	answered := 0
	newest := map[string]register.Record{}
	for _, r := range c.Look(ctx).Regions {
		if r.Err != nil {
			continue
		}
		answered++
		for _, p := range r.Status.GetPartitions() {
			if r.Name == name && (p.GetHeldNs() > 0 || p.GetEpoch() != 0) {
				return ownsStill(name, p.GetName())
			}
			if rec := register.RecordOf(p.GetRegister()); newest[p.GetName()].Accepted.Less(rec.Accepted) {
				newest[p.GetName()] = rec
			}
		}
	}
	for partition, rec := range newest {
		if rec.Value.Owner.Name == name {
			return ownsStill(name, partition)
		}
	}
	if answered == 0 {
		return fmt.Errorf("no region answers, so it is not known whether region %s owns a partition", name)
	}
	return nil
}

func ownsStill(region, partition string) error {
	return fmt.Errorf("region %s owns partition %s; hand it over first with 'headlease region drain %s'", region, partition, region)
}

// witness asks a witness who it is, and checks that it may join.
func (c *Cluster) witness(ctx context.Context, name string, progress func(string)) (*pb.Voter, error) {
	w, ok := c.file.Witness(name)
	if !ok {
		return nil, fmt.Errorf("%q is not a witness of the cluster file; add it there, and to the files of all processes", name)
	}
	var d *pb.DescribeVoterResponse
	err := c.retryTold(ctx, progress, func() (err error) {
		d, err = c.DescribeVoter(ctx, clusterfile.Process{Name: w.Name, Role: clusterfile.RoleWitness, Votes: w.Votes, Gossip: w.Gossip})
		return err
	})
	if err != nil {
		return nil, err
	}
	return c.joining(ctx, d.GetState().GetVoter(), d.GetConfiguration())
}

// region makes a region's Raft group, if it has none, and returns the voter.
func (c *Cluster) region(ctx context.Context, name string, progress func(string)) (*pb.Voter, error) {
	r, ok := c.file.Region(name)
	if !ok {
		return nil, fmt.Errorf("%q is not a region of the cluster file; add it there, and to the files of all processes", name)
	}
	servers := c.file.RegionProcesses(name)
	described := make([]*pb.DescribeServerResponse, len(servers))
	err := c.retryTold(ctx, progress, func() error {
		return each(servers, func(i int, p clusterfile.Process) (err error) {
			described[i], err = c.DescribeServer(ctx, p)
			return err
		})
	})
	if err != nil {
		return nil, err
	}
	var have *pb.ClusterConfiguration
	for _, d := range described {
		if d.GetConfiguration().GetVersion() > have.GetVersion() {
			have = d.GetConfiguration()
		}
	}
	inc, err := c.initRegion(ctx, r, servers, described)
	if err != nil {
		return nil, err
	}
	progress(fmt.Sprintf("region %s: Raft group of %d servers, incarnation %x", name, len(servers), inc))
	return c.joining(ctx, &pb.Voter{Id: config.RegionVoter(name), Incarnation: inc}, have)
}

// joining checks that a voter may become a member: it has no configuration, and
// so has never voted, or it is a member already [rule 5]. One that was removed
// must not come back with its old data under the same incarnation.
func (c *Cluster) joining(ctx context.Context, v *pb.Voter, have *pb.ClusterConfiguration) (*pb.Voter, error) {
	if have == nil {
		return v, nil
	}
	conf, _, err := c.Configuration(ctx)
	if err != nil {
		return nil, err
	}
	if have.GetClusterId() != conf.GetClusterId() {
		return nil, fmt.Errorf("%s belongs to another cluster (%s); give it an empty data directory", v.GetId(), have.GetClusterId())
	}
	if config.Member(conf, v) {
		return v, nil
	}
	return nil, fmt.Errorf("%s (incarnation %x) was a member before and has voted; give it an empty data directory, with which it is a new one", v.GetId(), v.GetIncarnation())
}

// retryTold is retry that says once what it waits for.
func (c *Cluster) retryTold(ctx context.Context, progress func(string), f func() error) error {
	told := false
	return retry(ctx, func() error {
		err := f()
		if err != nil && errors.As(err, new(*Unreachable)) && !told {
			told = true
			progress("waiting: " + firstLine(err))
		}
		return err
	})
}
