package api_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/api"
	"github.com/headlease/headlease/region/replica"
)

// groupRaft is the leader eu-1 of a group, in term 4, at entry 1000.
type groupRaft struct {
	mu       sync.Mutex
	servers  []replica.Server
	did      []string
	proposed []*pb.Command
	// deposed during the next change.
	deposed bool
}

func (r *groupRaft) RaftID() string { return "eu-1/u" }
func (r *groupRaft) Servers() []replica.Server {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]replica.Server(nil), r.servers...)
}
func (r *groupRaft) Stats() replica.Stats {
	return replica.Stats{Servers: r.Servers(), Last: 1002, Commit: 1000, Applied: 1000}
}
func (r *groupRaft) Leading() (uint64, bool) { return 4, true }

func (r *groupRaft) change(what string, f func()) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.did = append(r.did, what)
	if r.deposed {
		return replica.ErrUnknown
	}
	f()
	return nil
}

func (r *groupRaft) AddNonvoter(_ context.Context, name, id string) error {
	return r.change("non-voter "+id, func() { r.servers = append(r.servers, replica.Server{Name: name, RaftID: id}) })
}

func (r *groupRaft) AddVoter(_ context.Context, _, id string) error {
	return r.change("voter "+id, func() {
		for i := range r.servers {
			if r.servers[i].RaftID == id {
				r.servers[i].Voter = true
			}
		}
	})
}

func (r *groupRaft) RemoveServer(_ context.Context, id string) error {
	return r.change("remove "+id, func() {
		for i := range r.servers {
			if r.servers[i].RaftID == id {
				r.servers = append(r.servers[:i], r.servers[i+1:]...)
				return
			}
		}
	})
}

func (r *groupRaft) TransferLeadership(_ context.Context, id string) error {
	return r.change("transfer to "+id, func() {})
}

func (r *groupRaft) Propose(_ context.Context, cmd *pb.Command) (*pb.CommandResult, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.proposed = append(r.proposed, cmd)
	return &pb.CommandResult{}, nil
}

// groupWorld is the service on a leader, and what the other servers answer.
type groupWorld struct {
	raft    *groupRaft
	answers map[string]*pb.CurrentTermResponse // nil: silent
	caller  policy.Caller
	level   uint32
	service *api.Members
}

func newGroupWorld() *groupWorld {
	w := &groupWorld{
		raft: &groupRaft{servers: []replica.Server{{Name: "eu-1", RaftID: "eu-1/u", Voter: true}, {Name: "eu-2", RaftID: "eu-2/u", Voter: true}, {Name: "eu-3", RaftID: "eu-3/u", Voter: true}}},
		answers: map[string]*pb.CurrentTermResponse{
			"eu-2": {Term: 4, RaftId: "eu-2/u", LastIndex: 1001, AppliedIndex: 999, FeatureLevel: 2},
			"eu-3": {Term: 4, RaftId: "eu-3/u", LastIndex: 998, AppliedIndex: 998, FeatureLevel: 2},
		},
		level: 1,
	}
	w.service = &api.Members{
		Identify: func(context.Context) (policy.Caller, bool) { return w.caller, true },
		Group: &api.Group{
			Region: "eu", Raft: w.raft, Known: func(s string) bool { return s != "eu-9" }, Level: func() uint32 { return w.level }, MaxLevel: 2,
			Logger: slog.New(slog.DiscardHandler),
			Ask: func(ctx context.Context, server string) (*pb.CurrentTermResponse, error) {
				w.raft.mu.Lock()
				res := w.answers[server]
				w.raft.mu.Unlock()
				if res != nil {
					return res, nil
				}
				<-ctx.Done()
				return nil, ctx.Err()
			},
		},
	}
	return w
}

func inGroup(t *testing.T, f func(t *testing.T, w *groupWorld)) {
	synctest.Test(t, func(t *testing.T) { f(t, newGroupWorld()) })
}

// TestF3OnlyTheServerItselfJoinsUnderItsName, of this region, with its own id.
func TestF3OnlyTheServerItselfJoinsUnderItsName(t *testing.T) {
	inGroup(t, func(t *testing.T, w *groupWorld) {
		for _, c := range []struct {
			caller   policy.Caller
			name, id string
			level    uint32
			code     codes.Code
			text     string
		}{
			{policy.Caller{Role: policy.Region, Name: "region/eu/eu-5"}, "eu-4", "eu-4/n", 2, codes.PermissionDenied, "a server joins its own region for itself"},
			{policy.Caller{Role: policy.Region, Name: "region/us/eu-4"}, "eu-4", "eu-4/n", 2, codes.PermissionDenied, "not of region eu"},
			{policy.Caller{Role: policy.Admin, Name: "admin"}, "eu-4", "eu-4/n", 2, codes.PermissionDenied, "a server joins its own region for itself"},
			{policy.Caller{Role: policy.Region, Name: "region/eu/eu-2"}, "eu-2", "eu-2/new", 2, codes.FailedPrecondition, "headlease server replace eu-2 eu-2"},
			{policy.Caller{Role: policy.Region, Name: "region/eu/eu-4"}, "eu-4", "eu-2/u", 2, codes.FailedPrecondition, "is not"},
			{policy.Caller{Role: policy.Region, Name: "region/eu/eu-9"}, "eu-9", "eu-9/n", 2, codes.FailedPrecondition, "is not in the leader's cluster file"},
		} {
			w.caller = c.caller
			_, err := w.service.Join(t.Context(), &pb.JoinRequest{Name: c.name, RaftId: c.id, FeatureLevel: c.level})
			if status.Code(err) != c.code || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%s as %s: %v", c.caller.Name, c.id, err)
			}
		}
		if len(w.raft.did) != 0 {
			t.Fatalf("did %q", w.raft.did)
		}
		w.caller = policy.Caller{Role: policy.Region, Name: "region/eu/eu-4"}
		w.level = 2
		res, err := w.service.Join(t.Context(), &pb.JoinRequest{Name: "eu-4", RaftId: "eu-4/n", FeatureLevel: 1})
		if err != nil || res.GetFeatureLevel() != 2 || len(w.raft.did) != 0 {
			t.Errorf("an older program: %v, %v, did %q", res, err, w.raft.did)
		}
		for _, already := range []bool{false, true} {
			res, err := w.service.Join(t.Context(), &pb.JoinRequest{Name: "eu-4", RaftId: "eu-4/n", FeatureLevel: 2})
			if err != nil || res.GetAlready() != already {
				t.Errorf("%v, %v; want already %v", res, err, already)
			}
		}
		if len(w.raft.did) != 1 || w.raft.did[0] != "non-voter eu-4/n" {
			t.Errorf("did %q", w.raft.did)
		}
	})
}

// TestWhoCountsAsLive: an answer, as that very member, in the leader's term.
func TestWhoCountsAsLive(t *testing.T) {
	inGroup(t, func(t *testing.T, w *groupWorld) {
		look := func() map[string]*pb.Member {
			t.Helper()
			began := time.Now()
			res, err := w.service.ListMembers(t.Context(), &pb.ListMembersRequest{})
			if err != nil || time.Since(began) > time.Second {
				t.Fatalf("%v after %v", err, time.Since(began))
			}
			out := map[string]*pb.Member{}
			for _, m := range res.GetMembers() {
				out[m.GetName()] = m
			}
			return out
		}
		all := look()
		if m := all["eu-1"]; !m.GetLeader() || !m.GetLive() || m.GetBehind() != 0 || m.GetFeatureLevel() != 2 {
			t.Errorf("the leader: %v", m)
		}
		if m := all["eu-3"]; !m.GetLive() || m.GetBehind() != 2 {
			t.Errorf("a follower: %v", m)
		}
		w.answers["eu-2"].Term = 3
		w.answers["eu-3"].RaftId = "eu-3/new"
		all = look()
		if m := all["eu-2"]; m.GetLive() || !strings.Contains(m.GetProblem(), "does not hear the leader") {
			t.Errorf("in another term: %v", m)
		}
		if m := all["eu-3"]; m.GetLive() || m.GetLastIndex() != 0 || !strings.Contains(m.GetProblem(), "another data directory answers (eu-3/new)") {
			t.Errorf("another data directory: %v", m)
		}
		w.answers["eu-2"] = nil
		if m := look()["eu-2"]; m.GetLive() || !strings.Contains(m.GetProblem(), "no answer") {
			t.Errorf("silent: %v", m)
		}
	})
}

func TestPromoteAndRemove(t *testing.T) {
	inGroup(t, func(t *testing.T, w *groupWorld) {
		w.raft.servers = append(w.raft.servers, replica.Server{Name: "eu-4", RaftID: "eu-4/n"})
		w.answers["eu-4"] = &pb.CurrentTermResponse{Term: 4, RaftId: "eu-4/n", LastIndex: 100, FeatureLevel: 2}
		promote := func() (*pb.PromoteMemberResponse, error) {
			return w.service.PromoteMember(t.Context(), &pb.PromoteMemberRequest{Name: "eu-4"})
		}
		if res, err := promote(); err != nil || res.GetVoter() || res.GetBehind() != 900 || res.GetCommitIndex() != 1000 {
			t.Errorf("far behind: %v, %v", res, err)
		}
		w.answers["eu-4"].LastIndex = 900
		w.raft.deposed = true
		if _, err := promote(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "ask again") {
			t.Errorf("deposed meanwhile: %v", err)
		}
		w.raft.deposed = false
		if res, err := promote(); err != nil || !res.GetVoter() || res.GetAlready() {
			t.Errorf("caught up: %v, %v", res, err)
		}
		if res, err := promote(); err != nil || !res.GetVoter() || !res.GetAlready() {
			t.Errorf("again: %v, %v", res, err)
		}
		remove := func(name, id string) (*pb.RemoveMemberResponse, error) {
			return w.service.RemoveMember(t.Context(), &pb.RemoveMemberRequest{Name: name, RaftId: id})
		}
		w.raft.did = nil
		if res, err := remove("eu-1", ""); err != nil || res.GetRemoved() || res.GetNewLeader() != "eu-2" {
			t.Errorf("the leader: %v, %v", res, err)
		}
		if _, err := remove("eu-2", "eu-2/before"); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("under another id: %v", err)
		}
		if res, err := remove("eu-3", "eu-3/u"); err != nil || !res.GetRemoved() {
			t.Errorf("%v, %v", res, err)
		}
		if res, err := remove("eu-3", "eu-3/u"); err != nil || !res.GetRemoved() || !res.GetAlready() {
			t.Errorf("again: %v, %v", res, err)
		}
		w.answers["eu-2"] = nil
		if _, err := remove("eu-4", ""); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "eu-2 (no answer") {
			t.Errorf("without a quorum left: %v", err)
		}
		if got := strings.Join(w.raft.did, ", "); got != "transfer to eu-2/u, remove eu-3/u" {
			t.Errorf("did %s", got)
		}
	})
}

// TestOneChangeAtATime: the second one waits a little, and is refused.
// TestHandOver: to a live voter; one that leads is left alone, and a leader that
// sees a later term says that it leads no more, for then it may have happened.
func TestHandOver(t *testing.T) {
	inGroup(t, func(t *testing.T, w *groupWorld) {
		w.caller = policy.Caller{Role: policy.Admin, Name: "admin"}
		ask := func(name string) (*pb.HandOverResponse, error) {
			return w.service.HandOver(t.Context(), &pb.HandOverRequest{Name: name})
		}
		if res, err := ask("eu-1"); err != nil || !res.GetAlready() || len(w.raft.did) != 0 {
			t.Errorf("%v, %v, did %q", res, err, w.raft.did)
		}
		if _, err := ask("eu-9"); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "is not a member") {
			t.Errorf("%v", err)
		}
		if res, err := ask("eu-3"); err != nil || res.GetAlready() || len(w.raft.did) != 1 || w.raft.did[0] != "transfer to eu-3/u" {
			t.Errorf("%v, %v, did %q", res, err, w.raft.did)
		}
		w.raft.deposed = true
		if _, err := ask("eu-3"); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "ask again") {
			t.Errorf("%v", err)
		}
		w.raft.did = nil
		for _, name := range []string{"eu-2", "eu-3"} {
			w.answers["eu-3"].Term = 5
			if _, err := ask(name); status.Code(err) != codes.Unavailable || len(w.raft.did) != 0 {
				t.Errorf("%s, while eu-3 is in a later term: %v, did %q", name, err, w.raft.did)
			}
		}
	})
}

func TestOneChangeAtATime(t *testing.T) {
	inGroup(t, func(t *testing.T, w *groupWorld) {
		release := make(chan struct{})
		w.service.Group.Ask = func(context.Context, string) (*pb.CurrentTermResponse, error) {
			<-release
			return nil, errors.New("late")
		}
		first := make(chan error, 1)
		go func() {
			_, err := w.service.RemoveMember(t.Context(), &pb.RemoveMemberRequest{Name: "eu-2"})
			first <- err
		}()
		synctest.Wait()
		w.caller = policy.Caller{Role: policy.Region, Name: "region/eu/eu-4"}
		_, err := w.service.Join(t.Context(), &pb.JoinRequest{Name: "eu-4", RaftId: "eu-4/n", FeatureLevel: 2})
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "another change of region eu's group is running") {
			t.Errorf("beside another change: %v", err)
		}
		close(release)
		if err := <-first; status.Code(err) != codes.FailedPrecondition {
			t.Error(err)
		}
		if _, err := w.service.Join(t.Context(), &pb.JoinRequest{Name: "eu-4", RaftId: "eu-4/n", FeatureLevel: 2}); err != nil {
			t.Errorf("after it: %v", err)
		}
	})
}

// TestTheLevelIsRaisedInTheTermInWhichAllSaidSo, never on a partial answer.
func TestTheLevelIsRaisedInTheTermInWhichAllSaidSo(t *testing.T) {
	inGroup(t, func(t *testing.T, w *groupWorld) {
		silent := w.answers["eu-3"]
		w.answers["eu-3"] = nil
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- w.service.Group.RaiseLevels(ctx) }()
		time.Sleep(time.Minute) // virtual
		w.raft.mu.Lock()
		if n := len(w.raft.proposed); n != 0 {
			t.Errorf("%d proposals on a partial answer", n)
		}
		w.answers["eu-3"] = silent
		w.raft.mu.Unlock()
		time.Sleep(5 * time.Second) // virtual
		w.raft.mu.Lock()
		if len(w.raft.proposed) == 0 || w.raft.proposed[0].GetRaiseLevel().GetLevel() != 2 || w.raft.proposed[0].GetTerm() != 4 {
			t.Errorf("proposed %v", w.raft.proposed)
		}
		w.raft.mu.Unlock()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
