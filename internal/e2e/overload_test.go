package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/link"
	"github.com/headlease/headlease/internal/pki"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// TestAFloodIsOneIdentitys: one identity asks for far more than the region can do. It is
// told so, with the time to ask again; another identity goes on, no lease is lost
// meanwhile, and latency is back soon after.
func TestAFloodIsOneIdentitys(t *testing.T) {
	c := start(t, oneRegion())
	leases := hold(t, c.client("", 10*time.Second), 5)
	calm := c.newClient(client.Config{TTL: 10 * time.Second, Links: c.links}) // the admin's certificate: another identity
	before := median(t, calm, "before")

	// More than the region admits at once, and few enough that this process, which the
	// other identity shares, is not itself what is overloaded.
	const floods = 2000
	region := c.File().Regions[0].Name
	links := c.clientLinks()
	var conns []*grpc.ClientConn
	for _, p := range c.File().RegionProcesses(region) {
		conn, err := links.DialGRPC(link.PlaneAPI, link.Peer{Name: p.Name, Region: region, Role: pki.RoleRegion, Address: p.API})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conns = append(conns, conn)
	}
	flood, stop := context.WithTimeout(t.Context(), 4*time.Second)
	defer stop()
	var opened, overloaded, untyped atomic.Int64
	var work sync.WaitGroup
	for i := range floods {
		work.Go(func() {
			sessions := pb.NewSessionServiceClient(conns[i%len(conns)])
			for flood.Err() == nil {
				_, err := sessions.OpenSession(flood, &pb.OpenSessionRequest{TtlMs: 500})
				switch {
				case err == nil:
					opened.Add(1)
				case status.Code(err) == codes.ResourceExhausted:
					overloaded.Add(1)
					if !slices.ContainsFunc(status.Convert(err).Details(), func(d any) bool {
						detail, ok := d.(*pb.ErrorDetail)
						return ok && detail.GetOverloaded().GetRetryNs() > 0
					}) {
						untyped.Add(1)
					}
				}
			}
		})
	}
	served := 0
	for i := 0; flood.Err() == nil; i++ {
		ctx, cancel := context.WithTimeout(flood, 2*time.Second)
		// A lock of its own: a release that takes longer goes on in the background.
		lease, err := calm.Acquire(ctx, fmt.Sprintf("lock/calm-%d", i))
		if err == nil {
			served++
			err = lease.Release(ctx)
		}
		cancel()
		if err != nil && flood.Err() == nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, client.ErrOverloaded) {
			t.Errorf("another identity: %v", err)
		}
	}
	work.Wait()
	t.Logf("flood of %d callers: %d sessions opened, %d times OVERLOADED; another identity had %d leases meanwhile", floods, opened.Load(), overloaded.Load(), served)
	if overloaded.Load() == 0 || untyped.Load() > 0 || served == 0 {
		t.Errorf("%d times OVERLOADED, %d of them without a time to ask again; %d leases of another identity", overloaded.Load(), untyped.Load(), served)
	}
	stillHeld(t, "after the flood", leases)
	began := time.Now()
	for {
		now := median(t, calm, "after")
		if now <= 3*before {
			t.Logf("median acquire and release: %v before, %v again %v after the flood", before, now, time.Since(began).Round(time.Millisecond))
			break
		}
		if time.Since(began) > stepTimeout {
			t.Fatalf("median acquire and release: %v before, still %v", before, now)
		}
	}
	stillHeld(t, "at the end", leases)
}

// median time of an acquire and its release.
func median(t *testing.T, c *client.Client, name string) time.Duration {
	t.Helper()
	var times []time.Duration
	for i := range 50 {
		began := time.Now()
		lease, err := c.Acquire(within(t, stepTimeout), fmt.Sprintf("lock/%s-%d", name, i))
		if err != nil {
			t.Fatal(err)
		}
		if err := lease.Release(within(t, stepTimeout)); err != nil {
			t.Fatal(err)
		}
		times = append(times, time.Since(began))
	}
	slices.Sort(times)
	return times[len(times)/2]
}
