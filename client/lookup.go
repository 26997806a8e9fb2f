package client

import (
	"context"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/cache"
	"github.com/headlease/headlease/shard"
)

// LeaseCache is a region's lease cache; a [cache.Reader] is one.
type LeaseCache interface {
	// Lookup returns what the cache says of a resource; false: nothing.
	Lookup(ctx context.Context, resource string) (cache.Entry, bool, error)
}

// Holding is an answer of Lookup. It is a hint: somebody else may hold the resource by
// now, and only a token that the resource itself checks says so in time.
type Holding struct {
	Resource string
	// Held says whether somebody holds it. Holder is the identity of its client, Token its
	// token; of a resource that nobody holds, the cache may know the token that ended.
	Held   bool
	Holder string
	Token  fence.Token
	// Region that says so; empty if a region was asked and nobody holds it.
	Region string
	// Age bounds how old the answer is: how long ago the region said so.
	Age time.Duration
	// Cached: it comes out of the cache.
	Cached bool
}

// Lookup says who holds a resource and how old the answer is. It reads the lease
// cache first, and asks the region when that has no answer: it knows nothing of
// the resource, or is down, slow or full. Use [Client.Get] for an answer of now.
func (c *Client) Lookup(ctx context.Context, resource string) (Holding, error) {
	if _, err := shard.Parse(resource); err != nil {
		return Holding{}, invalidResource(err)
	}
	if c.cfg.Cache != nil {
		e, found, err := c.cfg.Cache.Lookup(ctx, resource)
		switch {
		case err != nil && ctx.Err() != nil:
			return Holding{}, err
		case err != nil:
			c.cfg.Logger.Debug("the lease cache has no answer; the region is asked", "resource", resource, "error", err)
		case found:
			return Holding{
				Resource: resource, Held: e.Held, Holder: e.Holder, Token: e.Token, Region: e.Region, Age: e.Age, Cached: true,
			}, nil
		}
	}
	asked := c.cfg.Clock.Now()
	lease, err := c.Get(ctx, resource)
	if err != nil {
		return Holding{}, err
	}
	h := Holding{Resource: resource, Age: c.cfg.Clock.Now().Sub(asked)}
	if lease != nil {
		h.Held, h.Holder, h.Token, h.Region = true, lease.GetHolder(), fence.Token(lease.GetToken()), lease.GetRegion()
	}
	return h, nil
}
