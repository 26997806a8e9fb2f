package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/members"
	"github.com/headlease/headlease/region/replica"
)

const (
	// memberTimeout bounds the question to one member how far it is.
	memberTimeout = time.Second
	// turnTimeout is how long a change waits for another one before it is
	// refused.
	turnTimeout = 2 * time.Second
	// levelEvery is how often the leader looks whether the feature level can
	// rise.
	levelEvery = 250 * time.Millisecond
)

// GroupRaft is what Group needs of this server's replica.
type GroupRaft interface {
	RaftID() string
	Servers() []replica.Server
	Stats() replica.Stats
	Leading() (term uint64, ok bool)
	AddNonvoter(ctx context.Context, name, raftID string) error
	AddVoter(ctx context.Context, name, raftID string) error
	RemoveServer(ctx context.Context, raftID string) error
	TransferLeadership(ctx context.Context, raftID string) error
	Propose(ctx context.Context, cmd *pb.Command) (*pb.CommandResult, error)
}

// Group is the region's Raft group as its leader sees and changes it. One change
// at a time is judged and made, the raise of the feature level included: a
// server that knows less must not slip in between the question and the raise.
// Safe for concurrent use.
type Group struct {
	Region string
	Raft   GroupRaft
	// Ask asks a server of the region, by name, how far it is.
	Ask func(ctx context.Context, server string) (*pb.CurrentTermResponse, error)
	// Known reports whether the cluster file has a server of that name in this
	// region, so that it can be reached.
	Known func(server string) bool
	// Level is the committed feature level, MaxLevel what this program knows.
	Level    func() uint32
	MaxLevel uint32
	Logger   *slog.Logger

	turn chan struct{}
	once sync.Once
}

// take waits for the turn to change the group; release gives it back.
func (g *Group) take(ctx context.Context) (release func(), err error) {
	g.once.Do(func() { g.turn = make(chan struct{}, 1) })
	t := time.NewTimer(turnTimeout)
	defer t.Stop()
	select {
	case g.turn <- struct{}{}:
		return func() { <-g.turn }, nil
	case <-t.C:
		return nil, refused("another change of region %s's group is running; wait for its end, then try again", g.Region)
	case <-ctx.Done():
		return nil, resultError(nil, ctx.Err())
	}
}

func refused(format string, args ...any) error {
	return fail(&pb.ErrorDetail{Kind: &pb.ErrorDetail_Refused{Refused: &pb.Refused{Reason: fmt.Sprintf(format, args...)}}})
}

// look asks every member at once how far it is. commit was committed before
// they were asked.
func (g *Group) look(ctx context.Context) (group []members.Member, term, commit uint64, err error) {
	term, ok := g.Raft.Leading()
	if !ok {
		return nil, 0, 0, notLeader("")
	}
	st := g.Raft.Stats()
	group = make([]members.Member, len(st.Servers))
	var wg sync.WaitGroup
	for i, s := range st.Servers {
		group[i] = members.Member{Name: s.Name, RaftID: s.RaftID, Voter: s.Voter}
		m := &group[i]
		if s.RaftID == g.Raft.RaftID() {
			m.Leader, m.Live, m.Level = true, true, g.MaxLevel
			m.LastIndex, m.AppliedIndex = st.Last, st.Applied
			continue
		}
		wg.Go(func() { g.ask(ctx, m, term) })
	}
	wg.Wait()
	if now, ok := g.Raft.Leading(); !ok || now != term {
		return nil, 0, 0, notLeader("")
	}
	return group, term, st.Commit, nil
}

func (g *Group) ask(ctx context.Context, m *members.Member, term uint64) {
	ctx, cancel := context.WithTimeout(ctx, memberTimeout)
	defer cancel()
	res, err := g.Ask(ctx, m.Name)
	switch {
	case err != nil:
		m.Problem = "no answer: " + link.Reason(err)
		return
	case res.GetRaftId() != m.RaftID:
		// Another data directory under a known name speaks for nobody [F3].
		m.Problem = fmt.Sprintf("another data directory answers (%s): the member's is lost or not started", res.GetRaftId())
		return
	}
	m.LastIndex, m.AppliedIndex, m.Level = res.GetLastIndex(), res.GetAppliedIndex(), res.GetFeatureLevel()
	if res.GetTerm() != term {
		m.Ahead = res.GetTerm() > term
		m.Problem = fmt.Sprintf("is in Raft term %d and the leader in %d: it does not hear the leader", res.GetTerm(), term)
		return
	}
	m.Live = true
}

// RaiseLevels raises the feature level, while this server leads, to what every
// member's program knows. It ends with ctx.
func (g *Group) RaiseLevels(ctx context.Context) error {
	tick := time.NewTicker(levelEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if _, leads := g.Raft.Leading(); !leads || g.Level() >= g.MaxLevel {
			continue
		}
		if err := g.raiseLevel(ctx); err != nil && ctx.Err() == nil {
			g.Logger.Debug("feature level not raised", "error", err)
		}
	}
}

func (g *Group) raiseLevel(ctx context.Context) error {
	release, err := g.take(ctx)
	if err != nil {
		return err
	}
	defer release()
	group, term, _, err := g.look(ctx)
	if err != nil {
		return err
	}
	level, ok := members.Level(group, g.Level(), g.MaxLevel)
	if !ok {
		return nil
	}
	res, err := g.Raft.Propose(ctx, &pb.Command{
		// Of this term only: another leader may have let an older server in.
		Term: term, Kind: &pb.Command_RaiseLevel{RaiseLevel: &pb.RaiseLevelCommand{Level: level}},
	})
	if err := resultError(res, err); err != nil {
		return err
	}
	g.Logger.Info("feature level raised: every server of the region knows it", "level", level)
	return nil
}

// Members is the MemberService of a region on its leader.
type Members struct {
	pb.UnimplementedMemberServiceServer
	Group    *Group
	Identify func(context.Context) (policy.Caller, bool)
}

// Join adds the calling server as a non-voter.
func (s *Members) Join(ctx context.Context, req *pb.JoinRequest) (*pb.JoinResponse, error) {
	g := s.Group
	if caller, ok := s.Identify(ctx); !ok || caller.Role != policy.Region || caller.Name != "region/"+g.Region+"/"+req.GetName() {
		return nil, status.Errorf(codes.PermissionDenied, "name: %q is not the caller %s, or not of region %s; a server joins its own region for itself", req.GetName(), caller.Name, g.Region)
	}
	release, err := g.take(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	if _, leads := g.Raft.Leading(); !leads {
		return nil, notLeader("")
	}
	out := &pb.JoinResponse{FeatureLevel: g.Level()}
	if req.GetFeatureLevel() < out.GetFeatureLevel() {
		return out, nil
	}
	var group []members.Member
	for _, m := range g.Raft.Servers() {
		group = append(group, members.Member{Name: m.Name, RaftID: m.RaftID, Voter: m.Voter})
	}
	already, refusal := members.MayJoin(group, req.GetName(), req.GetRaftId())
	switch {
	case refusal != nil:
		return nil, refused("%s", refusal.Reason)
	case already:
		out.Already = true
		return out, nil
	case !g.Known(req.GetName()):
		return nil, refused("server %s is not in the leader's cluster file under region %s; add it to the file of every process (a running one reads it again by itself, or at once on SIGHUP)", req.GetName(), g.Region)
	}
	if err := changed(g.Raft.AddNonvoter(ctx, req.GetName(), req.GetRaftId())); err != nil {
		return nil, err
	}
	g.Logger.Info("server added as a non-voter", "name", req.GetName(), "raft_id", req.GetRaftId())
	return out, nil
}

// ListMembers asks every member how far it is.
func (s *Members) ListMembers(ctx context.Context, _ *pb.ListMembersRequest) (*pb.ListMembersResponse, error) {
	group, term, commit, err := s.Group.look(ctx)
	if err != nil {
		return nil, err
	}
	out := &pb.ListMembersResponse{Region: s.Group.Region, Term: term, CommitIndex: commit, FeatureLevel: s.Group.Level()}
	voters := 0
	for _, m := range group {
		if m.Voter {
			voters++
		}
		out.Members = append(out.Members, &pb.Member{
			Name: m.Name, RaftId: m.RaftID, Voter: m.Voter, Leader: m.Leader, Live: m.Live, Problem: m.Problem,
			LastIndex: m.LastIndex, AppliedIndex: m.AppliedIndex, Behind: m.Behind(commit), FeatureLevel: m.Level,
		})
	}
	out.Warning = members.Warning(voters)
	return out, nil
}

// PromoteMember makes a voter of a non-voter that has caught up.
func (s *Members) PromoteMember(ctx context.Context, req *pb.PromoteMemberRequest) (*pb.PromoteMemberResponse, error) {
	g := s.Group
	release, err := g.take(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	group, _, commit, err := g.look(ctx)
	if err != nil {
		return nil, err
	}
	already, caught, refusal := members.MayPromote(group, req.GetName(), commit, g.Level())
	m, _ := members.Find(group, req.GetName())
	out := &pb.PromoteMemberResponse{Behind: m.Behind(commit), CommitIndex: commit, Voter: already, Already: already}
	switch {
	case refusal != nil:
		return nil, refused("%s", refusal.Reason)
	case already || !caught:
		return out, nil
	}
	if err := changed(g.Raft.AddVoter(ctx, m.Name, m.RaftID)); err != nil {
		return nil, err
	}
	g.Logger.Info("server made a voter", "name", m.Name, "raft_id", m.RaftID, "behind", out.GetBehind())
	out.Voter = true
	return out, nil
}

// RemoveMember takes a server out of the group.
func (s *Members) RemoveMember(ctx context.Context, req *pb.RemoveMemberRequest) (*pb.RemoveMemberResponse, error) {
	g := s.Group
	release, err := g.take(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	group, _, _, err := g.look(ctx)
	if err != nil {
		return nil, err
	}
	already, refusal := members.MayRemove(group, req.GetName(), req.GetRaftId(), req.GetForce())
	switch {
	case refusal != nil:
		return nil, refused("%s", refusal.Reason)
	case already:
		return &pb.RemoveMemberResponse{Removed: true, Already: true}, nil
	}
	m, _ := members.Find(group, req.GetName())
	if m.Leader {
		next, ok := members.Successor(group)
		if !ok {
			return nil, refused("server %s leads and no other voter answers to take over; bring one back first", m.Name)
		}
		if err := changed(g.Raft.TransferLeadership(ctx, next.RaftID)); err != nil {
			return nil, err
		}
		g.Logger.Info("leadership handed over, for this server to be removed", "to", next.Name)
		return &pb.RemoveMemberResponse{NewLeader: next.Name}, nil
	}
	if err := changed(g.Raft.RemoveServer(ctx, m.RaftID)); err != nil {
		return nil, err
	}
	g.Logger.Info("server removed from the group", "name", m.Name, "raft_id", m.RaftID)
	return &pb.RemoveMemberResponse{Removed: true}, nil
}

// HandOver hands leadership to the named voter.
func (s *Members) HandOver(ctx context.Context, req *pb.HandOverRequest) (*pb.HandOverResponse, error) {
	g := s.Group
	release, err := g.take(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	group, term, _, err := g.look(ctx)
	if err != nil {
		return nil, err
	}
	already, refusal := members.MayLead(group, req.GetName())
	switch {
	case slices.ContainsFunc(group, func(m members.Member) bool { return m.Ahead }):
		// Another one was elected, and this server has not heard it yet.
		return nil, notLeader("")
	case refusal != nil:
		return nil, refused("%s", refusal.Reason)
	case already:
		return &pb.HandOverResponse{Already: true}, nil
	}
	m, _ := members.Find(group, req.GetName())
	caller, _ := s.Identify(ctx)
	g.Logger.Info("leadership is handed over on request", "to", m.Name, "term", term, "by", caller.Name)
	if err := changed(g.Raft.TransferLeadership(ctx, m.RaftID)); err != nil {
		return nil, err
	}
	return &pb.HandOverResponse{}, nil
}

// changed is the outcome of a change of the group. Every change may be asked for
// again.
func changed(err error) error {
	if errors.Is(err, replica.ErrUnknown) {
		return status.Error(codes.Unavailable, "leadership changed meanwhile, and whether the change was made is unknown; ask again")
	}
	return resultError(nil, err)
}
