package histories

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/history"
	"github.com/headlease/headlease/internal/link"
)

// links connects package client through the fabric, recorded.
type links struct {
	w    *world
	name string
}

func (l links) DialGRPC(_ link.Plane, peer link.Peer, extra ...grpc.DialOption) (*grpc.ClientConn, error) {
	return dialGRPC(l.w.net, l.name, peer.Address, append(extra,
		grpc.WithChainUnaryInterceptor(l.w.recorder.Unary(l.name)), grpc.WithChainStreamInterceptor(l.w.recorder.Stream(l.name)))...)
}

// believers are the leases of package client that are looked at.
type believers struct {
	mu     sync.Mutex
	leases map[*client.Lease]string
}

func (b *believers) add(l *client.Lease, name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.leases[l] = name
}

// watch notes which leases are valid, all at the same instant, until ctx ends.
func (b *believers) watch(ctx context.Context, w *world) {
	tick := time.NewTicker(7 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		b.mu.Lock()
		for l, name := range b.leases {
			if l.Valid() {
				w.recorder.Believe(history.Belief{Client: name, Session: l.Session(), Resource: l.Resource(), Token: uint64(l.Token())})
			} else if l.Context().Err() != nil {
				delete(b.leases, l)
			}
		}
		b.mu.Unlock()
	}
}

func newSDK(w *world, name string, ttl time.Duration, c *machineClock) *client.Client {
	var servers []client.Server
	for _, s := range w.servers {
		servers = append(servers, client.Server{Name: s.name, API: s.name})
	}
	out, err := client.New(client.Config{
		Regions: []client.Region{{Name: regionName, Servers: servers}}, Links: links{w, name}, TTL: ttl, Clock: c,
	})
	if err != nil {
		panic(err)
	}
	return out
}

// useSDK takes locks through package client until ctx ends.
func useSDK(ctx context.Context, w *world, b *believers, name string, locks []target, c *machineClock) {
	rng := rand.New(rand.NewPCG(w.seed, uint64(name[len(name)-1])*31))
	cl := newSDK(w, name, time.Duration(1200+rng.IntN(2000))*time.Millisecond, c)
	var busy sync.WaitGroup
	for range 3 { // some goroutines of one process
		own := rand.New(rand.NewPCG(rng.Uint64(), 1))
		busy.Go(func() {
			for ctx.Err() == nil {
				useLock(ctx, b, cl, name, locks[own.IntN(len(locks))], own)
			}
		})
	}
	busy.Wait()
	end, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = cl.Close(end)
}

func acquire(ctx context.Context, cl *client.Client, lock target, options ...client.Option) (*client.Lease, error) {
	if lock.slots > 0 {
		return cl.AcquireSlot(ctx, lock.name, int(lock.slots), options...)
	}
	return cl.Acquire(ctx, lock.name, options...)
}

func useLock(ctx context.Context, b *believers, cl *client.Client, name string, lock target, rng *rand.Rand) {
	patience, cancel := context.WithTimeout(ctx, time.Duration(200+rng.IntN(4000))*time.Millisecond)
	defer cancel()
	var options []client.Option
	if rng.IntN(4) > 0 {
		options = append(options, client.Wait())
	}
	l, err := acquire(patience, cl, lock, options...)
	if err != nil {
		pause(ctx, time.Duration(rng.IntN(50))*time.Millisecond)
		return
	}
	b.add(l, name)
	work := time.Duration(rng.IntN(30)) * time.Millisecond
	if rng.IntN(30) == 0 {
		work = 3 * time.Second // past many a TTL
	}
	select {
	case <-time.After(work):
	case <-l.Context().Done():
	case <-ctx.Done():
	}
	done, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = l.Release(done)
	pause(ctx, time.Duration(rng.IntN(40))*time.Millisecond)
}
