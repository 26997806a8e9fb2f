package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// lookEvery bounds the pause between two questions to a region that answers,
	// while nobody is known to own a partition.
	lookEvery = 100 * time.Millisecond
	// lookTimeout bounds one question when they are not repeated.
	lookTimeout = time.Second
)

// lookup is a search for the region that owns a resource's partition, among
// all regions at once. Those who look for the same share it.
type lookup struct {
	client *Client
	key    lookupKey
	stop   context.CancelFunc
	done   chan struct{} // closed when owner is set
	owner  string
	users  int // under the client's lock
}

// lookupKey is what is looked for: a partition, or a resource of which it is
// not known, and the region that is not asked.
type lookupKey struct{ what, beside string }

// lookAround begins, or joins, a search; beside is not asked, if given. The
// caller leaves it.
func (c *Client) lookAround(resource string, beside *region) *lookup {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := lookupKey{what: resource}
	if p := c.partitions[resource]; p != "" {
		key.what = p
	}
	if beside != nil {
		key.beside = beside.name
	}
	l := c.lookups[key]
	if l == nil {
		ctx, stop := context.WithCancel(c.ctx)
		l = &lookup{client: c, key: key, stop: stop, done: make(chan struct{})}
		if c.closing {
			stop()
			return l // found by nobody; whoever waits for it is told of the closing
		}
		c.lookups[key] = l
		c.work.Go(func() { l.run(ctx, resource) })
	}
	l.users++
	return l
}

// leave ends the search when nobody waits for it any more.
func (l *lookup) leave() {
	if l == nil {
		return
	}
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	if l.users--; l.users <= 0 {
		l.stop()
		l.client.forgetLookup(l)
	}
}

// forgetLookup: who looks from now on begins anew. c.mu is held.
func (c *Client) forgetLookup(l *lookup) {
	if c.lookups[l.key] == l {
		delete(c.lookups, l.key)
	}
}

// found is closed when owner says who it is.
func (l *lookup) found() <-chan struct{} {
	if l == nil {
		return nil
	}
	return l.done
}

// notOwner is the error of a region that was waited in, once another is found.
func (l *lookup) notOwner(resource string) error { return notOwner(resource, l.owner) }

func notOwner(resource, owner string) error {
	return &Error{Text: fmt.Sprintf("region %s owns %s now", owner, resource), Detail: &pb.ErrorDetail{
		Kind: &pb.ErrorDetail_NotOwner{NotOwner: &pb.NotOwner{Owner: owner}},
	}}
}

// run asks each region until one holds the partition: none waits for another.
func (l *lookup) run(ctx context.Context, resource string) {
	var once sync.Once
	var asking sync.WaitGroup
	for _, name := range l.client.order {
		if name == l.key.beside {
			continue
		}
		r := l.client.regions[name]
		asking.Go(func() {
			for pause := minRetry; ctx.Err() == nil; pause = min(2*pause, maxRetry) {
				_, err := r.get(ctx, resource)
				if err == nil {
					once.Do(func() { l.find(name) })
					return
				}
				if !errors.Is(err, ErrUnavailable) {
					pause = min(pause, lookEvery)
				}
				select {
				case <-ctx.Done():
				case <-time.After(l.client.cfg.random.about(pause)):
				}
			}
		})
	}
	asking.Wait()
}

func (l *lookup) find(name string) {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	l.owner = name
	close(l.done)
	l.stop()
	l.client.forgetLookup(l)
}

// ownerBeside asks all regions but one, once, which of them owns the resource's
// partition; empty: none says so.
func (c *Client) ownerBeside(ctx context.Context, resource string, beside *region) string {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	owners := make(chan string, len(c.order))
	asked := 0
	for _, name := range c.order {
		r := c.regions[name]
		if r == beside {
			continue
		}
		if !c.spawn(func() {
			if _, err := r.get(ctx, resource); err != nil {
				name = ""
			}
			owners <- name // has room for all
		}) {
			return ""
		}
		asked++
	}
	for range asked {
		if name := <-owners; name != "" {
			return name
		}
	}
	return ""
}

// setPartition remembers the partition of a resource.
func (c *Client) setPartition(resource, partition string) {
	if partition == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.partitions[resource] == partition {
		return
	}
	if len(c.partitions) >= maxHints {
		clear(c.partitions)
	}
	c.partitions[resource] = partition
}
