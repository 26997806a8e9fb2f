package api_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/policy"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/region/api"
)

// TestACallToAHungLeaderEndsWithTheNextOne: the follower that has passed it on
// answers as soon as another server leads, and takes the same request again.
func TestACallToAHungLeaderEndsWithTheNextOne(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		s := open(t, w.leader)
		w.region.Server(0).Freeze()
		call := pb.NewLeaseServiceClient(w.follower)
		failed := make(chan error, 1)
		go func() {
			_, err := call.Acquire(t.Context(), acquire(s, "lock/x", 1))
			failed <- err
		}()
		time.Sleep(300 * time.Millisecond) // virtual
		select {
		case err := <-failed:
			t.Fatalf("while nobody else leads: %v", err)
		default:
		}
		elected := time.Now()
		w.region.Elect(2)
		err := <-failed
		if status.Code(err) != codes.Unavailable || detail(err).GetWrongTerm() == nil || time.Since(elected) > 10*time.Millisecond {
			t.Fatalf("%v after another server leads: %v", time.Since(elected), err)
		}
		res, err := call.Acquire(t.Context(), acquire(s, "lock/x", 1))
		if err != nil || res.GetGranted() == nil {
			t.Errorf("asked again: %v, %v", res, err)
		}
		w.region.Server(0).Thaw()
	})
}

// TestACallThatMissesTheNextLeader: another server begins to lead between the
// question for the leader and the call to it.
func TestACallThatMissesTheNextLeader(t *testing.T) {
	hung, err := grpc.NewClient("passthrough:///eu-1", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = hung.Close() }()
	leader := "eu-1"
	f := &api.Forwarder{
		Leader:   func() (string, bool) { return leader, false },
		Identify: func(context.Context) (policy.Caller, bool) { return policy.Caller{Name: "client/a"}, true },
	}
	f.Conn = func(string) (*grpc.ClientConn, error) {
		leader = "eu-2"
		f.LedBy(leader)
		return hung, nil
	}
	_, err = f.Unary(t.Context(), &pb.AcquireRequest{}, &grpc.UnaryServerInfo{FullMethod: pb.LeaseService_Acquire_FullMethodName}, nil)
	if detail(err).GetWrongTerm() == nil {
		t.Errorf("answered %v", err)
	}
}

// TestAServerThatStopsSaysWhy: its store failed and nobody leads that it knows of;
// once another server does, that one answers.
func TestAServerThatStopsSaysWhy(t *testing.T) {
	leader, failed := "", error(nil)
	sent := errors.New("sent on")
	f := &api.Forwarder{
		Leader:   func() (string, bool) { return leader, false },
		Failed:   func() error { return failed },
		Identify: func(context.Context) (policy.Caller, bool) { return policy.Caller{Name: "client/a"}, true },
		Conn:     func(string) (*grpc.ClientConn, error) { return nil, sent },
	}
	ask := func() error {
		_, err := f.Unary(t.Context(), &pb.AcquireRequest{}, &grpc.UnaryServerInfo{FullMethod: pb.LeaseService_Acquire_FullMethodName}, nil)
		return err
	}
	if err := ask(); detail(err).GetNotLeader() == nil || detail(err).GetNotLeader().GetReason() != "" {
		t.Errorf("no leader: %v", err)
	}
	failed = syscall.EIO
	if err := ask(); detail(err).GetNotLeader().GetReason() != failed.Error() || !strings.Contains(err.Error(), failed.Error()) {
		t.Errorf("a broken disk: %v", err)
	}
	leader = "eu-2"
	if err := ask(); !strings.Contains(err.Error(), sent.Error()) {
		t.Errorf("another server leads: %v", err)
	}
}
