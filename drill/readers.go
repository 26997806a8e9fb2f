package drill

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/headlease/headlease/internal/clusterfile"
	lnk "github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pause"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// readLimit bounds one read.
	readLimit = time.Second
	// readsAtOnce bounds the reads under way at one server, so that one that
	// hangs keeps none from being asked.
	readsAtOnce = 8
)

// startReaders asks every server of each region, by connections of their own,
// who holds the locks of the region's partitions. The histories judge the
// answers: a leader that was deposed and does not know must not give any.
func (l *workload) startReaders(ctx context.Context) error {
	if l.plan.Reads == 0 {
		return nil
	}
	locks := map[string][]string{} // by partition
	for _, a := range l.actors {
		if !a.probes {
			locks[a.partition] = append(locks[a.partition], a.lock)
		}
	}
	for _, p := range l.rig.file().Processes() {
		if p.Role != clusterfile.RoleRegion {
			continue
		}
		peer := lnk.Peer{Name: p.Name, Region: p.Region, Role: pki.RoleRegion, Address: p.API}
		conn, err := recording{l.rig.links, l.recorders, fmt.Sprintf("reader %s.%d", p.Name, l.lives)}.DialGRPC(lnk.PlaneAPI, peer)
		if err != nil {
			return fmt.Errorf("reader of %s: %w", p.Name, err)
		}
		l.work.Go(func() {
			defer func() { _ = conn.Close() }() // nothing is left to send
			l.read(ctx, p.Region, pb.NewLeaseServiceClient(conn), locks)
		})
	}
	return nil
}

// read asks one server until ctx ends.
func (l *workload) read(ctx context.Context, region string, server pb.LeaseServiceClient, locks map[string][]string) {
	var under sync.WaitGroup
	defer under.Wait()
	pace := rate.NewLimiter(rate.Limit(l.plan.Reads), 1)
	slots := make(chan struct{}, readsAtOnce)
	for n := 0; pace.Wait(ctx) == nil; n++ {
		var own []string
		for _, q := range l.rig.file().Partitions {
			if owner, ok := l.rig.watch.owner(q.Name); ok && owner.By == region {
				own = append(own, locks[q.Name]...)
			}
		}
		if len(own) == 0 {
			_ = pause.For(ctx, afterLoss) // ends with ctx, as the loop does
			continue
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		under.Go(func() {
			defer func() { <-slots }()
			limited, cancel := context.WithTimeout(ctx, readLimit)
			defer cancel()
			// The recorder has the answer; one that fails says nothing.
			_, _ = server.GetLease(limited, &pb.GetLeaseRequest{Resource: own[n%len(own)]})
		})
	}
}
