package admin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	initTimeout  = 30 * time.Second
	retryAfter   = 250 * time.Millisecond
	configTimout = 10 * time.Second
)

// Init sets the cluster of the file up: each region's Raft group and
// incarnation, then configuration 1 at every voter. It is idempotent and may be
// run again after it was broken off at any point: what a voter has already is
// kept, and a configuration that one voter has becomes that of all. progress is
// told each step. Processes that do not answer are asked again until ctx ends;
// the error then names each of them and the plane.
func (c *Cluster) Init(ctx context.Context, progress func(string)) (*pb.ClusterConfiguration, error) {
	var regions, witnesses []clusterfile.Process
	for _, p := range c.file.Processes() {
		if p.Role == clusterfile.RoleRegion {
			regions = append(regions, p)
		} else {
			witnesses = append(witnesses, p)
		}
	}
	servers := make([]*pb.DescribeServerResponse, len(regions))
	zones := make([]*pb.DescribeVoterResponse, len(witnesses))
	err := retry(ctx, func() error {
		return errors.Join(
			each(regions, func(i int, p clusterfile.Process) (err error) {
				servers[i], err = c.DescribeServer(ctx, p)
				return err
			}),
			each(witnesses, func(i int, p clusterfile.Process) (err error) {
				zones[i], err = c.DescribeVoter(ctx, p)
				return err
			}))
	})
	if err != nil {
		return nil, err
	}
	progress(fmt.Sprintf("all %d processes answer", len(servers)+len(zones)))
	if err := checkData(regions, servers, zones); err != nil {
		return nil, err
	}

	voters := make([]*pb.Voter, len(c.file.Regions))
	for i, r := range c.file.Regions {
		inc, err := c.initRegion(ctx, r, regions, servers)
		if err != nil {
			return nil, err
		}
		voters[i] = &pb.Voter{Id: config.RegionVoter(r.Name), Incarnation: inc}
		progress(fmt.Sprintf("region %s: Raft group of %d servers, incarnation %x", r.Name, len(r.Servers), inc))
	}

	// One server of each region speaks for its voter.
	processes := make([]clusterfile.Process, 0, len(voters)+len(witnesses))
	for _, r := range c.file.Regions {
		processes = append(processes, c.file.RegionProcesses(r.Name)[0])
	}
	processes = append(processes, witnesses...)
	described := make([]*pb.DescribeVoterResponse, len(processes))
	err = retry(ctx, func() error {
		return each(processes, func(i int, p clusterfile.Process) (err error) {
			described[i], err = c.DescribeVoter(ctx, p)
			return err
		})
	})
	if err != nil {
		return nil, err
	}
	conf, err := c.configuration(described)
	if err != nil {
		return nil, err
	}
	err = retry(ctx, func() error {
		return each(processes, func(_ int, p clusterfile.Process) error {
			return c.ask(ctx, link.PlaneVotes, p, configTimout, func(ctx context.Context, conn *grpc.ClientConn) error {
				_, err := pb.NewVoteServiceClient(conn).Configure(ctx, &pb.ConfigureRequest{Configuration: conf})
				return err
			})
		})
	})
	if err != nil {
		return nil, err
	}
	progress(fmt.Sprintf("cluster %s (%s): configuration %d at all %d voters", conf.GetClusterName(), conf.GetClusterId(), conf.GetVersion(), len(processes)))
	c.reachability(ctx, progress)
	return conf, nil
}

// reachable is how long init waits for the processes to find each other.
const reachable = 5 * time.Second

// reachability tells who does not reach whom, and on which plane, once the
// processes have had a moment to find each other.
func (c *Cluster) reachability(ctx context.Context, progress func(string)) {
	ctx, cancel := context.WithTimeout(ctx, reachable)
	defer cancel()
	var problems []string
	for {
		problems = problems[:0]
		v := c.Look(ctx)
		heard := func(who, own string, reports []*pb.PeerReport) {
			for _, r := range reports {
				if r.GetSilentNs() < 0 && r.GetRegion() != own {
					problems = append(problems, fmt.Sprintf("%s has not heard of region %s on the gossip plane", who, r.GetRegion()))
				}
			}
		}
		for _, r := range v.Regions {
			if r.Err != nil {
				problems = append(problems, fmt.Sprintf("region %s has no leader that answers: %s", r.Name, firstLine(r.Err)))
			}
			for _, p := range r.Status.GetVoterProblems() {
				problems = append(problems, fmt.Sprintf("region %s has no answer from %s on the votes plane: %s", r.Name, p.GetVoter(), p.GetProblem()))
			}
			heard("region "+r.Name, r.Name, r.Status.GetPeers())
		}
		for _, w := range v.Witnesses {
			if w.Err != nil {
				problems = append(problems, firstLine(w.Err))
			}
			heard("witness "+w.Process.Name, "", w.Describe.GetPeers())
		}
		if len(problems) == 0 {
			progress("every region reaches every voter, and is heard by all")
			return
		}
		select {
		case <-ctx.Done():
			for _, p := range problems {
				progress("warning: " + p)
			}
			return
		case <-time.After(retryAfter):
		}
	}
}

// checkData finds servers whose data was made anew, before init gives them
// a group: a cluster has a configuration, and it names another incarnation of
// their region [F3].
func checkData(processes []clusterfile.Process, servers []*pb.DescribeServerResponse, witnesses []*pb.DescribeVoterResponse) error {
	var conf *pb.ClusterConfiguration
	newer := func(other *pb.ClusterConfiguration) {
		if config.Newer(other, conf) {
			conf = other
		}
	}
	held := map[string]bool{} // regions of which a server belongs to a group
	for i, s := range servers {
		newer(s.GetConfiguration())
		if s.GetInitialised() {
			held[processes[i].Region] = true
		}
	}
	for _, w := range witnesses {
		newer(w.GetConfiguration())
	}
	var errs []error
	reported := map[string]bool{}
	for _, p := range processes {
		inc := config.VoterIncarnation(conf, config.RegionVoter(p.Region))
		if inc != 0 && !held[p.Region] && !reported[p.Region] {
			reported[p.Region] = true
			errs = append(errs, fmt.Errorf("region %s (incarnation %x) is a member of the cluster's configuration %d, but none of its servers has any data: restore a data directory, or remove the old member and add the region as a new one",
				p.Region, inc, conf.GetVersion()))
		}
	}
	return errors.Join(errs...)
}

// initRegion makes one region's Raft group and returns its incarnation.
func (c *Cluster) initRegion(ctx context.Context, r clusterfile.Region, processes []clusterfile.Process, described []*pb.DescribeServerResponse) (uint64, error) {
	req := &pb.InitRegionRequest{Region: r.Name}
	var own, old, fresh []clusterfile.Process
	for i, p := range processes {
		if p.Region != r.Name {
			continue
		}
		if described[i].GetName() != p.Name || described[i].GetRegion() != p.Region {
			return 0, fmt.Errorf("the process at %s is %s/%s, not %s; correct the addresses in the cluster file",
				p.API, described[i].GetRegion(), described[i].GetName(), p.Identity())
		}
		own = append(own, p)
		if described[i].GetInitialised() {
			old = append(old, p)
		} else {
			fresh = append(fresh, p)
		}
		req.Servers = append(req.Servers, &pb.RaftServer{Name: p.Name, RaftId: described[i].GetRaftId()})
	}
	if len(old) == 0 && len(own)%2 == 0 {
		return 0, fmt.Errorf("region %s has %d servers, an even number, which survives no more losses than %d; begin with 1, 3 or 5", r.Name, len(own), len(own)-1)
	}
	ask := func(ctx context.Context, some []clusterfile.Process) ([]uint64, error) {
		got := make([]uint64, len(some))
		err := retry(ctx, func() error {
			return each(some, func(i int, p clusterfile.Process) error {
				return c.ask(ctx, link.PlaneAPI, p, initTimeout, func(ctx context.Context, conn *grpc.ClientConn) error {
					res, err := pb.NewClusterServiceClient(conn).InitRegion(ctx, req)
					got[i] = res.GetIncarnation()
					return err
				})
			})
		})
		return got, err
	}
	// Members of a group are asked first: they refuse a list that is not theirs,
	// and a server that lost its data is then given no group [F3]. Those of an
	// init that was broken off may have no quorum without the others.
	if len(old) > 0 && len(fresh) > 0 {
		short, cancel := context.WithTimeout(ctx, askTimeout)
		_, err := ask(short, old)
		cancel()
		if errors.As(err, new(*Refused)) {
			return 0, err
		}
	}
	incarnations, err := ask(ctx, own)
	if err != nil {
		return 0, err
	}
	for _, inc := range incarnations {
		if inc != incarnations[0] {
			return 0, fmt.Errorf("the servers of region %s belong to different groups (incarnations %x); wipe the ones that do not belong there and run init again", r.Name, incarnations)
		}
	}
	return incarnations[0], nil
}

// configuration is the one that a voter has, or a new one of all voters.
func (c *Cluster) configuration(described []*pb.DescribeVoterResponse) (*pb.ClusterConfiguration, error) {
	var have *pb.ClusterConfiguration
	for _, d := range described {
		conf := d.GetConfiguration()
		switch {
		case conf == nil:
		case have == nil:
			have = conf
		case have.GetClusterId() != conf.GetClusterId():
			return nil, fmt.Errorf("voters belong to different clusters (%s and %s); wipe the data directories of those that do not belong here", have.GetClusterId(), conf.GetClusterId())
		case config.Newer(conf, have):
			have = conf
		}
	}
	var voters []*pb.Voter
	for _, d := range described {
		voters = append(voters, d.GetState().GetVoter())
	}
	if have == nil {
		have = config.FromFile(c.file, uuid.NewString())
		have.Voters = voters
		return have, config.Check(have)
	}
	var errs []error
	for _, v := range voters {
		if config.VoterIncarnation(have, v.GetId()) != v.GetIncarnation() {
			errs = append(errs, fmt.Errorf("voter %s (incarnation %x) is not a member of the cluster's configuration %d: its data was made anew, or it joined later; add it, or replace the old member, with `headlease witness` or `headlease region`",
				v.GetId(), v.GetIncarnation(), have.GetVersion()))
		}
	}
	want := config.FromFile(c.file, have.GetClusterId())
	want.Voters, want.Version, want.PreviousVoters = have.GetVoters(), have.GetVersion(), have.GetPreviousVoters()
	want.Exceptions, want.LastDedicated, want.RetiredPartitions = have.GetExceptions(), have.GetLastDedicated(), have.GetRetiredPartitions()
	want.Era, want.DestroyedVoters = have.GetEra(), have.GetDestroyedVoters()
	if !proto.Equal(want, have) {
		errs = append(errs, fmt.Errorf("the cluster has other settings than the cluster file (%s); init changes nothing that exists: correct the file, or apply it with `headlease config apply`",
			strings.Join(config.Diff(have, want), "; ")))
	}
	return have, errors.Join(errs...)
}

// retry calls f until it succeeds or ctx ends; the last error is returned.
func retry(ctx context.Context, f func() error) error {
	for {
		err := f()
		if err == nil {
			return nil
		}
		var gone *Unreachable
		var refused *Refused
		if !errors.As(err, &gone) || errors.As(err, &refused) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(retryAfter):
		}
	}
}
