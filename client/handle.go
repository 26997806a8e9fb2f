package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

// Handle is what another process needs to release a lease. It has the
// session's secret: keep it where only the owner of the lease can read.
type Handle struct {
	Cluster  string      `json:"cluster,omitempty"`
	Region   string      `json:"region"`
	Session  string      `json:"session"`
	Secret   []byte      `json:"secret"` // base64 in JSON
	Resource string      `json:"resource"`
	Token    fence.Token `json:"token"`
	// Expires is when the session ends at the region, at the earliest, unless
	// it is kept alive: on the wall clock, for people.
	Expires time.Time `json:"expires"`
}

// Handle of the lease, as of now.
func (l *Lease) Handle() Handle {
	r, s := l.region, l.session
	r.mu.Lock()
	left := max(0, s.acked.Add(s.ttl).Sub(r.now()))
	r.mu.Unlock()
	return Handle{
		Cluster: r.client.cfg.Cluster, Region: r.name, Session: s.id, Secret: s.secret,
		Resource: l.resource, Token: l.token, Expires: time.Now().Add(left).Round(time.Millisecond),
	}
}

// Validate reports all faults of a handle at once.
func (h Handle) Validate() error {
	var errs []error
	if h.Region == "" {
		errs = append(errs, errors.New("region: is missing"))
	}
	if h.Session == "" {
		errs = append(errs, errors.New("session: is missing"))
	}
	if len(h.Secret) == 0 {
		errs = append(errs, errors.New("secret: is missing"))
	}
	if _, err := shard.Parse(h.Resource); err != nil {
		errs = append(errs, err)
	}
	if _, err := fence.NewToken(h.Token.Epoch(), h.Token.Seq()); err != nil || h.Token == 0 {
		errs = append(errs, fmt.Errorf("token: %d is not a fencing token", uint64(h.Token)))
	}
	return errors.Join(errs...)
}

// ReleaseHandle releases the lease of a handle, trying again until ctx ends.
// It fails with ErrNotHolder or ErrSessionExpired when the lease has ended
// already. Of the configuration it uses Cluster, Regions and Links.
func ReleaseHandle(ctx context.Context, cfg Config, h Handle) (err error) {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("client: %w", err)
	}
	if err := h.Validate(); err != nil {
		return fmt.Errorf("handle: %w", err)
	}
	if cfg.Cluster != "" && h.Cluster != "" && cfg.Cluster != h.Cluster {
		return fmt.Errorf("handle: it is of cluster %q and this is %q; use the other cluster's file", h.Cluster, cfg.Cluster)
	}
	var conns *conns
	for _, r := range cfg.Regions {
		if r.Name == h.Region {
			conns = newConns(cfg.Links, r, fairDice)
		}
	}
	if conns == nil {
		return fmt.Errorf("handle: region %q is not configured; use the cluster file that the lease was acquired with", h.Region)
	}
	defer func() { err = errors.Join(err, conns.close()) }()
	for pause := minRetry; ; pause = min(2*pause, maxRetry) {
		err := conns.do(ctx, func(ctx context.Context, cc *grpc.ClientConn) error {
			_, err := pb.NewLeaseServiceClient(cc).Release(ctx, &pb.ReleaseRequest{
				SessionId: h.Session, Secret: h.Secret, Resource: h.Resource, Token: uint64(h.Token),
			})
			return err
		})
		if err == nil || !(errors.Is(err, ErrUnavailable) || errors.Is(err, ErrOverloaded) || errors.Is(err, ErrLapsed)) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (last: %w)", context.Cause(ctx), err)
		case <-time.After(dice(fairDice).spread(pause, askedToWait(err))):
		}
	}
}
