package client

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// byName makes connections that are never used and carry the server's name.
type byName struct{}

func (byName) DialGRPC(_ link.Plane, peer link.Peer, _ ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+peer.Name, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// TestF3AServerWithoutDataIsPassedOver: one that is wiped, or waits to be added,
// is in the cluster file like the others, and they serve.
func TestF3AServerWithoutDataIsPassedOver(t *testing.T) {
	st, err := status.New(codes.FailedPrecondition, "not initialised").WithDetails(&pb.ErrorDetail{
		Kind: &pb.ErrorDetail_Uninitialised{Uninitialised: &pb.Uninitialised{Server: "eu-1"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	c := newConns(byName{}, Region{Name: "eu", Servers: []Server{{Name: "eu-1"}, {Name: "eu-2"}, {Name: "eu-3"}}}, fairDice)
	defer func() { _ = c.close() }()
	var asked []string
	down := ""
	do := func(without ...string) error {
		asked = nil
		return c.do(t.Context(), func(_ context.Context, cc *grpc.ClientConn) error {
			asked = append(asked, cc.Target())
			if cc.Target() == "passthrough:///"+down {
				return status.Error(codes.Unavailable, "down")
			}
			for _, name := range without {
				if cc.Target() == "passthrough:///"+name {
					return st.Err()
				}
			}
			return nil
		})
	}
	if err := do("eu-1"); err != nil || len(asked) != 2 {
		t.Errorf("asked %q: %v", asked, err)
	}
	if err := do("eu-1"); err != nil || len(asked) != 1 {
		t.Errorf("asked %q again: %v", asked, err)
	}
	// The region may come back: nothing that the caller did is wrong.
	for _, down = range []string{"eu-1", "eu-2", "eu-3"} {
		if err := do("eu-1", "eu-2", "eu-3"); !errors.Is(err, ErrUnavailable) || len(asked) != 3 {
			t.Errorf("%s is down: asked %q, %v", down, asked, err)
		}
	}
	down = ""
	if err := do("eu-1", "eu-2", "eu-3"); !errors.Is(err, ErrInvalid) || len(asked) != 3 {
		t.Errorf("a region without data: asked %q, %v", asked, err)
	}
}

// TestAClosedConnectionCountsAsNoTry: whoever finds a server hung closes the
// connection under the others' calls.
func TestAClosedConnectionCountsAsNoTry(t *testing.T) {
	c := newConns(byName{}, Region{Name: "eu", Servers: []Server{{Name: "eu-1"}, {Name: "eu-2"}, {Name: "eu-3"}}}, fairDice)
	defer func() { _ = c.close() }()
	calls := 0
	closing := func(n int) error {
		calls = 0
		return c.do(t.Context(), func(_ context.Context, cc *grpc.ClientConn) error {
			if calls++; calls > n {
				return nil
			}
			x, err := c.current()
			if err != nil || x.ClientConn != cc {
				t.Errorf("another connection is in use: %v", err)
			}
			c.leave(x, true)
			return status.Error(codes.Canceled, "grpc: the client connection is closing")
		})
	}
	if err := closing(5); err != nil || calls != 6 {
		t.Errorf("%d calls: %v", calls, err)
	}
	if err := closing(1000); !errors.Is(err, ErrUnavailable) || calls != maxInterrupted+3 {
		t.Errorf("%d calls: %v; want an end", calls, err)
	}
}

// TestAHungServersConnectionIsClosed: at once, or with the region's stream on it
// when that has ended, however it did.
func TestAHungServersConnectionIsClosed(t *testing.T) {
	for _, streams := range []bool{false, true} {
		c := newConns(byName{}, Region{Name: "eu", Servers: []Server{{Name: "eu-1"}, {Name: "eu-2"}}}, fairDice)
		defer func() { _ = c.close() }()
		x, err := c.current()
		if err != nil {
			t.Fatal(err)
		}
		x.streams(streams)
		c.leave(x, false)
		x.doubted = true
		if err := c.do(t.Context(), func(context.Context, *grpc.ClientConn) error { return nil }); err != nil {
			t.Fatal(err)
		}
		if kept := c.open[x.at] == x; !x.hung || kept != streams {
			t.Errorf("with a stream (%v): hung %v, kept %v", streams, x.hung, kept)
		}
		x.streams(false)
		if c.open[x.at] != nil {
			t.Errorf("with a stream (%v): kept when that has ended", streams)
		}
	}
}

// TestAskedAgainOfTheNewLeaderAfterAPause: a follower tells all whose calls were at
// the leader of before in the same moment that there is another one.
func TestAskedAgainOfTheNewLeaderAfterAPause(t *testing.T) {
	st, err := status.New(codes.Unavailable, "another leader").WithDetails(&pb.ErrorDetail{Kind: &pb.ErrorDetail_WrongTerm{WrongTerm: &pb.WrongTerm{}}})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		random := []time.Duration{7 * time.Millisecond, 19 * time.Millisecond, 3 * time.Millisecond}
		rolled := 0
		c := newConns(byName{}, Region{Name: "eu", Servers: []Server{{Name: "eu-1"}, {Name: "eu-2"}, {Name: "eu-3"}}}, func(n time.Duration) time.Duration {
			if n != minRetry {
				t.Errorf("a pause of up to %v", n)
			}
			rolled++
			return random[rolled-1]
		})
		defer func() { _ = c.close() }()
		var asked []time.Duration
		do := func(ctx context.Context) error {
			asked, rolled = nil, 0
			began := time.Now()
			return c.do(ctx, func(_ context.Context, cc *grpc.ClientConn) error {
				if asked = append(asked, time.Since(began)); cc.Target() != "passthrough:///eu-1" {
					t.Errorf("asked %s, which may be the leader of before", cc.Target())
				}
				return st.Err()
			})
		}
		if err := do(t.Context()); !errors.Is(err, ErrUnavailable) || len(asked) != 3 ||
			asked[0] != 0 || asked[1] != 7*time.Millisecond || asked[2] != 26*time.Millisecond {
			t.Errorf("asked at %v: %v", asked, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		began := time.Now()
		if err := do(ctx); err == nil || len(asked) != 2 || time.Since(began) != 10*time.Millisecond {
			t.Errorf("asked at %v, ended after %v: %v", asked, time.Since(began), err)
		}
	})
}
