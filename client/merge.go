package client

import (
	"context"
	"fmt"
	"sync"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

// merged is a watch of a prefix in all regions: what each of them tells, less
// what another one knows to be over.
type merged struct {
	out chan<- WatchEvent

	mu sync.Mutex
	// held is what the consumer was told is held.
	held map[string]mergedLease
	// owners of partitions, by the highest epoch told.
	owners map[string]mergedOwner
}

type mergedLease struct {
	region, partition string
	token             fence.Token
}

type mergedOwner struct {
	region string
	epoch  fence.Epoch
}

// merge follows a prefix in all regions, until ctx ends or one of them refuses.
func (c *Client) merge(ctx context.Context, prefix string, o watchOptions, out chan<- WatchEvent) error {
	m := &merged{out: out, held: map[string]mergedLease{}, owners: map[string]mergedOwner{}}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var feeds sync.WaitGroup
	for _, name := range c.order {
		f := &feed{
			region: c.regions[name], options: o, reason: "the watch begins",
			request: &pb.WatchRequest{What: &pb.WatchRequest_Prefix{Prefix: prefix}}, take: m.take,
		}
		feeds.Go(func() {
			if err := f.run(ctx); ctx.Err() == nil {
				cancel(fmt.Errorf("watch %s in region %s: %w", prefix, name, err))
			}
		})
	}
	feeds.Wait()
	return context.Cause(ctx)
}

// take passes on what a region tells, unless it is over. The lock is held while
// the consumer is waited for: what it is told and what is remembered stay one.
func (m *merged) take(ctx context.Context, t told) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if t.partition != nil {
		return m.own(ctx, t)
	}
	e := t.WatchEvent
	switch e.Kind {
	case WatchReset:
		for r, l := range m.held {
			if l.region == e.Region {
				delete(m.held, r)
			}
		}
	case WatchHeld, WatchGranted:
		owner := m.owners[e.Partition]
		if e.Token.Epoch() < owner.epoch && owner.region != e.Region {
			return nil // of a region that does not know yet that it has lost the partition
		}
		if l, ok := m.held[e.Resource]; ok && l.region != e.Region {
			if l.token > e.Token {
				return nil
			}
			if err := m.end(ctx, e, e.Resource, l); err != nil {
				return err
			}
		}
		m.held[e.Resource] = mergedLease{e.Region, e.Partition, e.Token}
	case WatchValue, WatchRevoked, WatchEnded:
		if l := m.held[e.Resource]; l.region != e.Region || l.token != e.Token {
			return nil // it was said to be over
		}
		if e.Kind == WatchEnded {
			delete(m.held, e.Resource)
		}
	case WatchSynced, WatchProgress:
	}
	return send(ctx, m.out, e)
}

// own takes that a region owns a partition: what others said of its leases is
// over.
func (m *merged) own(ctx context.Context, t told) error {
	p, epoch := t.partition.GetPartition(), fence.Epoch(t.partition.GetEpoch())
	if !t.partition.GetLive() || epoch <= m.owners[p].epoch {
		return nil
	}
	m.owners[p] = mergedOwner{t.Region, epoch}
	for resource, l := range m.held {
		if l.partition == p && l.region != t.Region {
			if err := m.end(ctx, t.WatchEvent, resource, l); err != nil {
				return err
			}
		}
	}
	return nil
}

// end tells that a lease of a region that has lost its partition is over.
func (m *merged) end(ctx context.Context, by WatchEvent, resource string, l mergedLease) error {
	delete(m.held, resource)
	return send(ctx, m.out, WatchEvent{
		Kind: WatchEnded, Region: l.region, Revision: by.Revision, Resource: resource, Token: l.token,
		Reason: "the partition has moved to region " + by.Region,
	})
}
