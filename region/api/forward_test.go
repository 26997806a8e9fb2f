package api_test

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/headlease/headlease/proto/headlease/v1"
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
