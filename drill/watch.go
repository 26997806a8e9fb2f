package drill

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/headlease/headlease/client/admin"
	"github.com/headlease/headlease/internal/clock"
	"github.com/headlease/headlease/internal/instant"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// watchEvery is the pause between two questions to a region, and with it
	// the error of the times at which a change is seen.
	watchEvery = 25 * time.Millisecond
	// watchLost is the pause after a region did not answer.
	watchLost = 250 * time.Millisecond
)

// watch asks every region for its status all the time. Safe for concurrent
// use; close it.
type watch struct {
	clock  clock.Clock
	admin  *admin.Cluster
	log    *slog.Logger
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu      sync.Mutex
	ledger  ledger
	latest  map[string]*pb.StatusResponse // of the regions that answered last
	said    map[[2]string]string          // what a region did about a partition
	changed chan struct{}                 // closed at the next answer
}

func newWatch(c clock.Clock, adm *admin.Cluster, log *slog.Logger) *watch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &watch{
		clock: c, admin: adm, log: log, cancel: cancel,
		latest: map[string]*pb.StatusResponse{}, said: map[[2]string]string{}, changed: make(chan struct{}),
	}
	for _, region := range adm.File().RegionNames() {
		w.work.Go(func() { w.ask(ctx, region) })
	}
	return w
}

func (w *watch) close() {
	w.cancel()
	w.work.Wait()
}

func (w *watch) ask(ctx context.Context, region string) {
	for ctx.Err() == nil {
		asked := w.clock.Now()
		st, err := w.admin.RegionStatus(ctx, region)
		w.take(region, asked, w.clock.Now(), st, err)
		pause := watchEvery
		if err != nil {
			pause = watchLost
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

func (w *watch) take(region string, asked, answered instant.Instant, st *pb.StatusResponse, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		delete(w.latest, region)
	} else {
		w.latest[region] = st
		var says []held
		for _, p := range st.GetPartitions() {
			says = append(says, held{p.GetName(), uint64(p.GetEpoch()), time.Duration(p.GetHeldNs())})
			w.trace(region, p)
		}
		w.ledger.observe(region, asked, answered, says)
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

// owner returns the newest claim to a partition.
func (w *watch) owner(partition string) (claim, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c, ok := w.ledger.owners[partition]
	return c, ok
}

// records returns all that was collected.
func (w *watch) records() ledger {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.ledger
	l.claims, l.lapses = append([]claim(nil), l.claims...), append([]lapse(nil), l.lapses...)
	l.owners = maps.Clone(l.owners)
	return l
}

// await waits until good is true of what is known; it is called with every
// answer and must not block.
func (w *watch) await(ctx context.Context, limit time.Duration, what string, good func(l *ledger, latest map[string]*pb.StatusResponse) bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not within %v", limit))
	defer cancel()
	for {
		w.mu.Lock()
		ok, changed := good(&w.ledger, w.latest), w.changed
		w.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, errors.Join(errNotSeen, context.Cause(ctx)))
		case <-changed:
		}
	}
}

// errNotSeen: what a drill waits for did not happen in time.
var errNotSeen = errors.New("not seen")

// trace logs what a region that holds a partition not does about it, for whoever
// wonders why a promotion took long. Called under mu.
func (w *watch) trace(region string, p *pb.PartitionStatus) {
	key := [2]string{region, p.GetName()}
	if said := p.GetActivity(); p.GetHeldNs() == 0 && said != w.said[key] {
		w.said[key] = said
		w.log.Debug("activity", "region", region, "partition", p.GetName(), "epoch", p.GetEpoch(), "says", said,
			"promised", p.GetRegister().GetPromised(), "accepted", p.GetRegister().GetAccepted())
	}
}
