package link

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
)

// rtts keeps a smoothed round-trip time per peer.
type rtts struct {
	mu sync.Mutex
	by map[string]time.Duration
}

// ObserveRTT takes one measured round trip to a peer into its smoothed value,
// with the gain of RFC 6298 (1/8). Every answered call on the votes plane is
// taken by itself; other owners of a measure (gossip's pings) may add theirs.
// Values that are not positive are dropped: memberlist's can be negative.
func (l *Links) ObserveRTT(peer string, d time.Duration) {
	if d <= 0 || peer == "" {
		return
	}
	l.rtts.mu.Lock()
	defer l.rtts.mu.Unlock()
	if l.rtts.by == nil {
		l.rtts.by = map[string]time.Duration{}
	}
	if old, ok := l.rtts.by[peer]; ok {
		d = old + (d-old)/8
	}
	l.rtts.by[peer] = d
}

// RTT is the smoothed round-trip time to a peer; false if none was measured.
// It includes what the peer does before it answers.
func (l *Links) RTT(peer string) (time.Duration, bool) {
	l.rtts.mu.Lock()
	defer l.rtts.mu.Unlock()
	d, ok := l.rtts.by[peer]
	return d, ok
}

func (l *Links) measure(peer string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		start := time.Now()
		err := invoke(ctx, method, req, reply, cc, opts...)
		if err == nil {
			l.ObserveRTT(peer, time.Since(start))
		}
		return err
	}
}
