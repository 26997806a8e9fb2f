package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/clusterfile"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// changeTimeout bounds one change of a group; catchUpEvery is how often a
// non-voter is looked at.
const (
	changeTimeout = 15 * time.Second
	catchUpEvery  = 500 * time.Millisecond
)

// Server is a region server: a member of its region's group as the leader knows
// it, a server of the cluster file as it says of itself, or both.
type Server struct {
	Region, Name string
	// Member is nil if the group has no server of that name.
	Member *pb.Member
	// InFile: the cluster file has it. Describe and Err are its own answer then.
	InFile   bool
	Describe *pb.DescribeServerResponse
	Err      error
}

// RegionServers are the servers of one region. Err says why the leader did not
// answer.
type RegionServers struct {
	Region  string
	List    *pb.ListMembersResponse
	Err     error
	Servers []Server
}

// ListServers asks the regions (all if none is named) for their servers.
func (c *Cluster) ListServers(ctx context.Context, regions ...string) []RegionServers {
	if len(regions) == 0 {
		regions = c.file.RegionNames()
	}
	out := make([]RegionServers, len(regions))
	for i, name := range regions {
		r := &out[i]
		r.Region = name
		r.List, r.Err = c.members(ctx, name)
		for _, m := range r.List.GetMembers() {
			r.Servers = append(r.Servers, Server{Region: name, Name: m.GetName(), Member: m})
		}
		for _, p := range c.file.RegionProcesses(name) {
			j := slices.IndexFunc(r.Servers, func(s Server) bool { return s.Name == p.Name })
			if j < 0 {
				j = len(r.Servers)
				r.Servers = append(r.Servers, Server{Region: name, Name: p.Name})
			}
			s := &r.Servers[j]
			s.InFile = true
			s.Describe, s.Err = c.DescribeServer(ctx, p)
		}
		slices.SortFunc(r.Servers, func(a, b Server) int { return strings.Compare(a.Name, b.Name) })
	}
	return out
}

func (c *Cluster) members(ctx context.Context, region string) (res *pb.ListMembersResponse, err error) {
	err = c.askRegion(ctx, region, askTimeout+time.Second, func(ctx context.Context, m pb.MemberServiceClient) (err error) {
		res, err = m.ListMembers(ctx, &pb.ListMembersRequest{})
		return err
	})
	return res, err
}

// askRegion asks a region's servers in turn, of which each passes the question
// on to the leader, until one answers or refuses.
func (c *Cluster) askRegion(ctx context.Context, region string, timeout time.Duration, call func(context.Context, pb.MemberServiceClient) error) error {
	var errs []error
	for _, p := range c.file.RegionProcesses(region) {
		err := c.ask(ctx, link.PlaneAPI, p, timeout, func(ctx context.Context, conn *grpc.ClientConn) error {
			return call(ctx, pb.NewMemberServiceClient(conn))
		})
		var no *Refused
		switch {
		case err == nil:
			return nil
		case errors.As(err, &no) && !uninitialised(no.Err):
			return err
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return fmt.Errorf("region %q is not in the cluster file, or has no servers there", region)
	}
	return errors.Join(errs...)
}

// uninitialised reports whether a server refused because it has no data: the
// others may have.
func uninitialised(err error) bool {
	for _, d := range status.Convert(err).Details() {
		if e, ok := d.(*pb.ErrorDetail); ok && e.GetUninitialised() != nil {
			return true
		}
	}
	return false
}

// decide asks until the region has answered or refused, or ctx ends: a region
// between two leaders is asked again.
func (c *Cluster) decide(ctx context.Context, region string, call func(context.Context, pb.MemberServiceClient) error) error {
	for {
		err := c.askRegion(ctx, region, changeTimeout, call)
		var no *Refused
		if err == nil || errors.As(err, &no) && !uninitialised(no.Err) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("region %s did not decide in time: %w", region, err)
		case <-time.After(retryAfter):
		}
	}
}

// RegionOf finds the region of a server, by the cluster file, or, for one that
// was taken out of it, by the regions' groups.
func (c *Cluster) RegionOf(ctx context.Context, server string) (string, error) {
	if _, region, ok := c.file.Server(server); ok {
		return region, nil
	}
	var errs []error
	for _, r := range c.ListServers(ctx) {
		for _, s := range r.Servers {
			if s.Name == server {
				return r.Region, nil
			}
		}
		errs = append(errs, r.Err)
	}
	return "", errors.Join(append(errs, fmt.Errorf("server %q is neither in the cluster file nor in a region's group; check the name", server))...)
}

// Progress is how far a server is that catches up.
type Progress struct {
	Server string
	// Waiting: it has not asked to be added yet; Reason is why, in words.
	Waiting bool
	Reason  string
	// Behind is how many entries it lacks, of Commit.
	Behind, Commit uint64
}

// AddServer waits until the named server of the cluster file, which runs with
// --join, is a non-voter of its region's group and has caught up, and makes it a
// voter. It may be repeated. progress is told at each look. It returns what an
// operator should know of the new number of voters.
func (c *Cluster) AddServer(ctx context.Context, name string, progress func(Progress)) (warning string, err error) {
	p, ok := c.file.Process(name)
	if !ok || p.Role != clusterfile.RoleRegion {
		return "", fmt.Errorf("server %q is not a region server of the cluster file; add it there, in the file of every process", name)
	}
	for {
		list, err := c.members(ctx, p.Region)
		var no *Refused
		switch {
		case errors.As(err, &no):
			return "", err
		case err != nil:
			progress(Progress{Server: name, Waiting: true, Reason: err.Error()})
		default:
			done, err := c.promote(ctx, p, list, progress)
			if err != nil || done {
				return c.warning(ctx, p.Region), err
			}
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("server %s is not a voter yet (%w); run the same command again to go on", name, context.Cause(ctx))
		case <-time.After(catchUpEvery):
		}
	}
}

// promote takes one step towards a voter.
func (c *Cluster) promote(ctx context.Context, p clusterfile.Process, list *pb.ListMembersResponse, progress func(Progress)) (done bool, err error) {
	i := slices.IndexFunc(list.GetMembers(), func(m *pb.Member) bool { return m.GetName() == p.Name })
	d, err := c.DescribeServer(ctx, p)
	if i < 0 {
		var reason string
		switch {
		case err != nil:
			reason = err.Error()
		case d.GetInitialised():
			return false, fmt.Errorf("server %s has data of a group (%s) that it is no member of; start it with an empty data directory and --join", p.Name, d.GetRaftId())
		default:
			reason = "it has not asked to be added; start it with --join, and add it to the cluster file of the running servers"
		}
		progress(Progress{Server: p.Name, Waiting: true, Reason: reason})
		return false, nil
	}
	m := list.GetMembers()[i]
	silent := ""
	if err != nil {
		silent = err.Error()
	}
	if silent != "" { // it may run on another data directory than the member's [F3]
		progress(Progress{Server: p.Name, Waiting: true, Reason: silent})
		return false, nil
	}
	if d.GetRaftId() != m.GetRaftId() {
		return false, fmt.Errorf("server %s is a member with another data directory (%s) than it runs on (%s) [F3]; if that data is lost, run `headlease server replace %s %s`",
			p.Name, m.GetRaftId(), d.GetRaftId(), p.Name, p.Name)
	}
	if !m.GetVoter() && !m.GetLive() {
		progress(Progress{Server: p.Name, Waiting: true, Reason: m.GetProblem()})
		return false, nil
	}
	var res *pb.PromoteMemberResponse
	err = c.decide(ctx, p.Region, func(ctx context.Context, s pb.MemberServiceClient) (err error) {
		res, err = s.PromoteMember(ctx, &pb.PromoteMemberRequest{Name: p.Name})
		return err
	})
	if err != nil {
		return false, err
	}
	progress(Progress{Server: p.Name, Behind: res.GetBehind(), Commit: res.GetCommitIndex()})
	return res.GetVoter(), nil
}

// warning is what an operator should know of a region's number of voters.
func (c *Cluster) warning(ctx context.Context, region string) string {
	list, err := c.members(ctx, region)
	if err != nil || list.GetWarning() == "" {
		return "" // the change is made; whether it has a drawback may stay unsaid
	}
	return "region " + region + " has " + list.GetWarning()
}

// RemoveServer takes a server out of its region's group; one that is no member
// is no error. With a raftID it removes that very member only.
func (c *Cluster) RemoveServer(ctx context.Context, region, name, raftID string, force bool, progress func(string)) (already bool, warning string, err error) {
	for {
		var res *pb.RemoveMemberResponse
		err := c.decide(ctx, region, func(ctx context.Context, s pb.MemberServiceClient) (err error) {
			res, err = s.RemoveMember(ctx, &pb.RemoveMemberRequest{Name: name, RaftId: raftID, Force: force})
			return err
		})
		switch {
		case err != nil:
			return false, "", err
		case res.GetRemoved():
			return res.GetAlready(), c.warning(ctx, region), nil
		}
		progress(fmt.Sprintf("%s leads; leadership goes to %s", name, res.GetNewLeader()))
		select {
		case <-ctx.Done():
			return false, "", fmt.Errorf("server %s is not removed yet (%w); run the same command again", name, context.Cause(ctx))
		case <-time.After(retryAfter):
		}
	}
}

// HandOver has a voter of a region's group lead it, and returns when it does;
// already: it did. It may be repeated.
func (c *Cluster) HandOver(ctx context.Context, region, name string) (already bool, err error) {
	for asked := false; ; {
		var res *pb.HandOverResponse
		err := c.decide(ctx, region, func(ctx context.Context, s pb.MemberServiceClient) (err error) {
			res, err = s.HandOver(ctx, &pb.HandOverRequest{Name: name})
			// A server that passed the request on and then saw the leader go answers
			// that there is none: it may have been done.
			asked = asked || err != nil && !refusal(err) || err == nil && !res.GetAlready()
			return err
		})
		switch {
		case err != nil:
			return false, err
		case res.GetAlready():
			return !asked, nil
		}
		// Another one may have been elected: the leader of then is asked.
		select {
		case <-ctx.Done():
			return false, fmt.Errorf("server %s was handed leadership, and whether it leads is unknown (%w); run the same command again", name, context.Cause(ctx))
		case <-time.After(retryAfter):
		}
	}
}

// ReplaceServer puts one server in the place of another, of the same region:
// the new one is added, and then the old one removed, so that the group never
// has less spare than before. With one name for both, the data of which was lost
// or is to be left behind, the old member is removed first. It may be broken off
// at any point and repeated: steps that are done stay done.
func (c *Cluster) ReplaceServer(ctx context.Context, old, name string, force bool, say func(string), progress func(Progress)) (warning string, err error) {
	p, ok := c.file.Process(name)
	if !ok || p.Role != clusterfile.RoleRegion {
		return "", fmt.Errorf("server %q is not a region server of the cluster file; add it there, in the file of every process", name)
	}
	var list *pb.ListMembersResponse
	if err := retryAsk(ctx, func() (err error) { list, err = c.members(ctx, p.Region); return err }); err != nil {
		return "", err
	}
	find := func(name string) *pb.Member {
		i := slices.IndexFunc(list.GetMembers(), func(m *pb.Member) bool { return m.GetName() == name })
		if i < 0 {
			return nil
		}
		return list.GetMembers()[i]
	}
	before := find(old)
	if old != name {
		if before == nil && find(name) == nil {
			return "", fmt.Errorf("server %s is not in the group of region %s, and neither is %s; to add %s alone, run `headlease server add %s`", old, p.Region, name, name, name)
		}
		added, err := c.AddServer(ctx, name, progress)
		if err != nil {
			return "", err
		}
		say(name + " is a voter")
		already, warning, err := c.RemoveServer(ctx, p.Region, old, "", force, say)
		if err == nil && !already {
			say(old + " is removed")
		}
		if warning == "" {
			warning = added
		}
		return warning, err
	}
	if before != nil {
		// Which data it has now decides: the member's, or a new one.
		d, err := c.DescribeServer(ctx, p)
		switch {
		case err != nil:
			return "", fmt.Errorf("%w (start %s with an empty data directory and --join before the member is removed)", err, name)
		case d.GetRaftId() != before.GetRaftId():
			if _, _, err := c.RemoveServer(ctx, p.Region, name, before.GetRaftId(), force, say); err != nil {
				return "", err
			}
			say(fmt.Sprintf("the member %s is removed", before.GetRaftId()))
		case before.GetVoter():
			return "", fmt.Errorf("server %s runs on the data that it is a member with (%s): nothing is to be replaced; to move it to a new directory, start it there with --join first", name, d.GetRaftId())
		}
	}
	if warning, err = c.AddServer(ctx, name, progress); err != nil {
		return "", err
	}
	say(name + " is a voter")
	return warning, nil
}

// retryAsk calls f until it succeeds, is refused, or ctx ends.
func retryAsk(ctx context.Context, f func() error) error {
	for {
		err := f()
		var no *Refused
		if err == nil || errors.As(err, &no) && status.Code(no.Err) != codes.Unavailable {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(retryAfter):
		}
	}
}
