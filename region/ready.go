package region

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	globalconfig "github.com/headlease/headlease/global/config"
	"github.com/headlease/headlease/internal/link"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// leaderless is how long after its start a server without a known leader
// waits before it counts as ready.
const leaderless = 10 * time.Second

var errUninitialised = errors.New("this server is not initialised; run `headlease init`")

// readiness tells whether this server has caught up since it started: once it
// has, it stays ready. Any server takes any call and forwards it, so one that
// falls behind later loses nothing by being asked; and readiness that went with
// the quorum would take a whole region out of service, or keep an orchestrator
// from starting the very servers that would make a quorum again.
type readiness struct {
	started time.Time
	// leading, leader and applied are the replica's; ask is the applied index of
	// the named server now.
	initialised func() bool
	// stopped is why the region votes no more; nil: it votes.
	stopped func() error
	leading func() bool
	leader  func() string
	applied func() uint64
	ask     func(ctx context.Context, server string) (uint64, error)

	mu       sync.Mutex
	caughtUp bool
}

func (s *Server) readiness() *readiness {
	return &readiness{
		started: time.Now(), initialised: s.replica.Initialised,
		stopped: func() error {
			view := s.replica.View()
			if stop := view.EraStop(); stop != nil {
				return &globalconfig.StoppedError{Own: globalconfig.EraOf(view.Configuration()), Stop: stop}
			}
			return nil
		},
		leading: func() bool { _, ok := s.replica.Leading(); return ok },
		leader:  func() string { name, _, _ := s.replica.Leader(); return name },
		applied: func() uint64 { return s.replica.View().AppliedIndex() },
		ask: func(ctx context.Context, server string) (uint64, error) {
			c, err := s.peers.conn(link.PlaneAPI, server)
			if err != nil {
				return 0, err
			}
			res, err := pb.NewClusterServiceClient(c).DescribeServer(ctx, &pb.DescribeServerRequest{})
			if err == nil && !res.GetIsLeader() {
				err = errors.New("it does not lead yet")
			}
			return res.GetAppliedIndex(), err
		},
	}
}

// check returns nil if the server is ready, else why not.
func (r *readiness) check(ctx context.Context) error {
	if !r.initialised() {
		return errUninitialised
	}
	if err := r.stopped(); err != nil {
		return err
	}
	r.mu.Lock()
	done := r.caughtUp
	r.mu.Unlock()
	if done {
		return nil
	}
	if !r.leading() {
		leader := r.leader()
		if leader == "" {
			if time.Since(r.started) >= leaderless {
				return nil // there is nobody to catch up with; not for ever, though
			}
			return errors.New("no leader is known yet")
		}
		index, err := r.ask(ctx, leader)
		if err != nil {
			return fmt.Errorf("the leader %s does not say how far it is: %w", leader, err)
		}
		if applied := r.applied(); applied < index {
			return fmt.Errorf("catching up with the leader %s: %d of %d entries applied", leader, applied, index)
		}
	}
	r.mu.Lock()
	r.caughtUp = true
	r.mu.Unlock()
	return nil
}
