package admin

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/headlease/headlease/internal/clusterfile"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// View is the cluster as its processes tell it at one time.
type View struct {
	Regions   []RegionView
	Servers   []ServerView
	Witnesses []WitnessView
}

// RegionView is what a region's leader says; Err if none answered.
type RegionView struct {
	Name   string
	Status *pb.StatusResponse
	Err    error
}

// ServerView is what one region server says of itself.
type ServerView struct {
	Process  clusterfile.Process
	Describe *pb.DescribeServerResponse
	Err      error
}

// WitnessView is what a witness says.
type WitnessView struct {
	Process  clusterfile.Process
	Describe *pb.DescribeVoterResponse
	Err      error
}

// Look asks all processes at once.
func (c *Cluster) Look(ctx context.Context) View {
	var v View
	var wg sync.WaitGroup
	v.Regions = make([]RegionView, len(c.file.Regions))
	for i, r := range c.file.Regions {
		wg.Go(func() {
			st, err := c.RegionStatus(ctx, r.Name)
			v.Regions[i] = RegionView{r.Name, st, err}
		})
	}
	var servers, witnesses []clusterfile.Process
	for _, p := range c.file.Processes() {
		if p.Role == clusterfile.RoleRegion {
			servers = append(servers, p)
		} else {
			witnesses = append(witnesses, p)
		}
	}
	v.Servers, v.Witnesses = make([]ServerView, len(servers)), make([]WitnessView, len(witnesses))
	for i, p := range servers {
		wg.Go(func() {
			d, err := c.DescribeServer(ctx, p)
			v.Servers[i] = ServerView{p, d, err}
		})
	}
	for i, p := range witnesses {
		wg.Go(func() {
			d, err := c.DescribeVoter(ctx, p)
			v.Witnesses[i] = WitnessView{p, d, err}
		})
	}
	wg.Wait()
	return v
}

// Owner is who holds a partition by its own word.
type Owner struct {
	Partition string
	// Region is empty if nobody says that it holds the partition.
	Region string
	Epoch  uint32
	Held   time.Duration
}

// Owners returns the owner of each partition, from the regions' status.
func (v View) Owners(file clusterfile.File) []Owner {
	out := make([]Owner, len(file.Partitions))
	for i, p := range file.Partitions {
		out[i].Partition = p.Name
		for _, r := range v.Regions {
			j := slices.IndexFunc(r.Status.GetPartitions(), func(s *pb.PartitionStatus) bool { return s.GetName() == p.Name })
			if j < 0 {
				continue
			}
			if s := r.Status.GetPartitions()[j]; s.GetHeldNs() > 0 && s.GetEpoch() >= out[i].Epoch {
				out[i] = Owner{p.Name, r.Name, s.GetEpoch(), time.Duration(s.GetHeldNs())}
			}
		}
	}
	return out
}

// WaitOwned waits until every partition has an owner that holds it.
func (c *Cluster) WaitOwned(ctx context.Context) error {
	for {
		missing := ""
		v := c.Look(ctx)
		for _, o := range v.Owners(c.file) {
			if o.Region == "" {
				missing = o.Partition
			}
		}
		if missing == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("partition %s has no owner yet: %w", missing, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}
