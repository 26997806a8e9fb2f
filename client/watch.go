package client

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
	"github.com/headlease/headlease/shard"
)

// WatchKind is what a WatchEvent says.
type WatchKind int

// Kinds.
const (
	// WatchReset: forget what the watch has told of the event's region, or with a
	// Resource all that it has told of that. What is held follows, and then
	// WatchSynced. A watch begins so.
	WatchReset WatchKind = iota + 1
	// WatchHeld: the lease is held; part of what follows a reset.
	WatchHeld
	// WatchSynced: all that follows a reset has been told.
	WatchSynced
	// WatchGranted: the lease was granted, and the one before it has ended.
	WatchGranted
	// WatchValue: the holder has set another value.
	WatchValue
	// WatchRevoked: the lease will end, and pass on.
	WatchRevoked
	// WatchEnded: nobody holds that token any more.
	WatchEnded
	// WatchProgress: nothing has happened up to the event's revision.
	WatchProgress
)

func (k WatchKind) String() string {
	switch k {
	case WatchReset:
		return "reset"
	case WatchHeld:
		return "held"
	case WatchSynced:
		return "synced"
	case WatchGranted:
		return "granted"
	case WatchValue:
		return "value"
	case WatchRevoked:
		return "revoked"
	case WatchEnded:
		return "ended"
	case WatchProgress:
		return "progress"
	}
	return "unknown"
}

// WatchEvent is told by a watch.
type WatchEvent struct {
	Kind WatchKind
	// Region that tells it, and its revision: the index of its log. Revisions of
	// different regions have nothing to do with each other.
	Region   string
	Revision uint64
	// Resource and Token of all kinds that are about a lease; a reset of a watch
	// of one resource names that, and has no token.
	Resource string
	Token    fence.Token
	// Holder is the identity of the holder's client, Session its session,
	// Partition that of the resource: of WatchHeld and WatchGranted.
	Holder, Session, Partition string
	// Value of WatchHeld, WatchGranted and WatchValue. It must not be changed.
	Value []byte
	// Reason of WatchRevoked and WatchEnded; of WatchReset why it begins again.
	Reason string
}

// WatchOption of Watch and WatchPrefix.
type WatchOption func(*watchOptions)

type watchOptions struct{ progress time.Duration }

// defaultProgress is how often a server shows that it is there.
const defaultProgress = 10 * time.Second

// WithProgress asks for a WatchProgress whenever nothing has happened for so
// long, 500 ms to a minute. A server that is silent for more than twice as long
// is left for another one; default 10 s.
func WithProgress(d time.Duration) WatchOption { return func(o *watchOptions) { o.progress = d } }

// watchBuffer events wait for a slow consumer here. Behind it the server's queue
// fills, and then the watch begins again.
const watchBuffer = 128

// Watch tells who holds a resource, and with which value, as it changes: for ev,
// err := range c.Watch(ctx, "lock/x"). It goes on over lost servers, changes of
// leader and moves to another region, and ends with ctx, or with an error that
// asking again cannot help. Nothing is left out, told twice or reordered but
// where a WatchReset says that it begins anew.
//
// It is a hint: told by any server of the region, from what that has applied.
// It never says that a lease is valid now.
func (c *Client) Watch(ctx context.Context, resource string, options ...WatchOption) iter.Seq2[WatchEvent, error] {
	_, err := shard.Parse(resource)
	if err != nil {
		err = invalidResource(err)
	}
	return c.watch(ctx, err, options, func(ctx context.Context, o watchOptions, out chan<- WatchEvent) error {
		return c.roam(ctx, resource, o, out)
	})
}

// WatchPrefix is Watch of all resources whose name begins with the prefix, in
// all regions at once. A region that cannot be reached, and whose partitions no
// other has, is as it was last heard of.
func (c *Client) WatchPrefix(ctx context.Context, prefix string, options ...WatchOption) iter.Seq2[WatchEvent, error] {
	return c.watch(ctx, checkPrefix(prefix), options, func(ctx context.Context, o watchOptions, out chan<- WatchEvent) error {
		return c.merge(ctx, prefix, o, out)
	})
}

// watch runs a watch beside the loop that consumes it.
func (c *Client) watch(ctx context.Context, invalid error, options []WatchOption, run func(context.Context, watchOptions, chan<- WatchEvent) error) iter.Seq2[WatchEvent, error] {
	o := watchOptions{progress: defaultProgress}
	for _, f := range options {
		f(&o)
	}
	return func(yield func(WatchEvent, error) bool) {
		if invalid != nil {
			yield(WatchEvent{}, invalid)
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		defer context.AfterFunc(c.ctx, cancel)()
		out := make(chan WatchEvent, watchBuffer)
		ended := make(chan error, 1)
		if !c.spawn(func() { ended <- run(ctx, o, out) }) {
			cancel()
			yield(WatchEvent{}, ErrClosed)
			return
		}
		var err error
		over := false
		defer func() {
			cancel()
			if !over {
				<-ended //nolint:errcheck // nobody asks why any more
			}
		}()
		for !over {
			select {
			case e := <-out:
				if !yield(e, nil) {
					return
				}
			case err = <-ended:
				over = true
			}
		}
		for len(out) > 0 {
			if !yield(<-out, nil) {
				return
			}
		}
		switch {
		case c.ctx.Err() != nil:
			yield(WatchEvent{}, ErrClosed)
		case ctx.Err() == nil:
			yield(WatchEvent{}, err)
		}
	}
}

// send gives the consumer an event, waiting for room.
func send(ctx context.Context, out chan<- WatchEvent, e WatchEvent) error {
	select {
	case out <- e:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// roam follows one resource from region to region.
func (c *Client) roam(ctx context.Context, resource string, o watchOptions, out chan<- WatchEvent) error {
	var f *feed
	err := c.route(ctx, resource, func(ctx context.Context, r *region) error {
		if f == nil || f.region != r {
			reason := "the watch begins"
			if f != nil {
				reason = "the resource is in region " + r.name + " now"
			}
			f = &feed{
				region: r, options: o, reason: reason, resource: resource,
				request: &pb.WatchRequest{What: &pb.WatchRequest_Resource{Resource: resource}},
				take:    func(ctx context.Context, t told) error { return sendTold(ctx, out, t) },
			}
		}
		return f.run(ctx)
	})
	if err == nil || ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("watch %s: %w", resource, err)
}

// sendTold passes on what is about leases.
func sendTold(ctx context.Context, out chan<- WatchEvent, t told) error {
	if t.partition != nil {
		return nil
	}
	return send(ctx, out, t.WatchEvent)
}

// WatchView is what a watch has told so far: which leases are held, by resource.
// The zero value is ready. It is not safe for concurrent use.
type WatchView struct {
	held map[string]WatchEvent
	// syncing are the regions between a reset and what follows it.
	syncing map[string]bool
}

// Apply takes the next event of a watch.
func (v *WatchView) Apply(e WatchEvent) {
	if v.held == nil {
		v.held, v.syncing = map[string]WatchEvent{}, map[string]bool{}
	}
	switch e.Kind {
	case WatchReset:
		for r, l := range v.held {
			if l.Region == e.Region {
				delete(v.held, r)
			}
		}
		if e.Resource != "" {
			delete(v.held, e.Resource)
			clear(v.syncing) // by whatever region it was told
		}
		v.syncing[e.Region] = true
	case WatchSynced:
		delete(v.syncing, e.Region)
	case WatchHeld, WatchGranted:
		v.held[e.Resource] = e
	case WatchValue:
		if l, ok := v.held[e.Resource]; ok && l.Token == e.Token {
			l.Value, l.Revision = e.Value, e.Revision
			v.held[e.Resource] = l
		}
	case WatchEnded:
		if v.held[e.Resource].Token == e.Token {
			delete(v.held, e.Resource)
		}
	case WatchRevoked, WatchProgress:
	}
}

// Complete reports whether all that was begun by resets has been told.
func (v *WatchView) Complete() bool { return v.held != nil && len(v.syncing) == 0 }

// Lease returns the lease on a resource, as the WatchHeld or WatchGranted that
// told of it, with the newest value.
func (v *WatchView) Lease(resource string) (WatchEvent, bool) {
	l, ok := v.held[resource]
	return l, ok
}

// Leases yields all of them, in no order.
func (v *WatchView) Leases() iter.Seq[WatchEvent] {
	return func(yield func(WatchEvent) bool) {
		for _, l := range v.held {
			if !yield(l) {
				return
			}
		}
	}
}

// retryable reports whether a watch may be asked for again after an error.
func retryable(err error) bool {
	return errors.Is(err, ErrUnavailable) || errors.Is(err, ErrOverloaded) || withoutData(err)
}
