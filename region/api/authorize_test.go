package api

import (
	"context"
	"errors"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/replica"
	"github.com/headlease/headlease/region/state"
)

// behind is a server that believes that it leads, and learns the truth by a
// leadership check: the check's error, or the newer state.
type behind struct {
	Raft
	view, newer state.View
	err         error
	checks      int
}

func (b *behind) View() state.View { return b.view }

func (b *behind) Check(context.Context) (uint64, error) {
	b.checks++
	if b.err == nil {
		b.view = b.newer
	}
	return 1, b.err
}

// A deposed leader that does not know it must not tell a client that its
// session, opened under the next leader, has ended.
func TestF1ASessionIsSaidToHaveEndedOnlyAfterACheck(t *testing.T) {
	m := state.New()
	for i, c := range []*pb.Command{
		{Kind: &pb.Command_InitRegion{InitRegion: &pb.InitRegionCommand{Region: "eu", Incarnation: 1}}},
		{Kind: &pb.Command_OpenSession{OpenSession: &pb.OpenSessionCommand{SessionId: "s", SecretHash: make([]byte, 32), TtlMs: 1000, Identity: "client/a"}}},
	} {
		if res, _ := m.Apply(uint64(i+1), 1, c); res.GetError() != nil {
			t.Fatal(res.GetError())
		}
	}
	alice := func(context.Context) (policy.Caller, bool) {
		return policy.Caller{Role: policy.Client, Name: "client/a"}, true
	}
	ask := func(b *behind) error { return authorize(t.Context(), alice, b, "s", nil) }

	stale := &behind{view: state.New().View(), err: replica.ErrCheckFailed}
	if err := ask(stale); status.Code(err) != codes.Unavailable {
		t.Errorf("a deposed leader says %v", err)
	}
	if err := ask(&behind{view: state.New().View(), newer: m.View()}); err != nil {
		t.Errorf("a leader that was behind says %v", err)
	}
	gone := &behind{view: state.New().View(), newer: state.New().View()}
	var d *DetailError
	if err := ask(gone); !errors.As(err, &d) || d.Detail.GetSessionExpired() == nil || gone.checks != 1 {
		t.Errorf("after %d checks: %v", gone.checks, err)
	}
	known := &behind{view: m.View()}
	if err := ask(known); err != nil || known.checks != 0 {
		t.Errorf("%d checks for a known session: %v", known.checks, err)
	}
}
