package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/headlease/headlease/fence"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// maxWatchRetry bounds the pause before a watch is asked for again.
	maxWatchRetry = time.Second
	// ownerEvery is about how often a watch of one resource makes sure that its
	// region still owns the partition: one that is cut off goes on telling.
	ownerEvery = 15 * time.Second
	// staleAfter progresses without progress a server is left for another one.
	staleAfter = 2
)

// told is what a region tells: an event, or (partition) that it owns one.
type told struct {
	WatchEvent
	partition *pb.WatchPartition
}

// feed follows one region's watch, over its servers, from where it was.
type feed struct {
	region  *region
	options watchOptions
	request *pb.WatchRequest
	// resource that is watched; empty for a prefix, which no region ever ends.
	resource string
	// reason of the next reset.
	reason string
	take   func(context.Context, told) error

	// revision and position of the last event that was taken; whole is the
	// revision up to which all was, 0: begin with a snapshot.
	revision, whole uint64
	position        uint32
	incarnation     uint64
	// inside: between the first and the last part of a snapshot.
	inside bool
	// stale counts the progresses in a row that made none.
	stale int
}

// run follows the region until ctx ends, or with an error of the region's that
// asking it again cannot help.
func (f *feed) run(ctx context.Context) error {
	r := f.region
	var elsewhere *lookup
	defer func() { elsewhere.leave() }()
	for pause := minRetry; ; pause = min(2*pause, maxWatchRetry) {
		conn, err := r.conns.current()
		if err != nil {
			return err
		}
		useful, err := f.follow(ctx, conn.ClientConn)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if useful {
			pause = minRetry
			elsewhere.leave()
			elsewhere = nil
		}
		if !retryable(err) {
			return err
		}
		r.client.cfg.Logger.Debug("watch ended", "region", r.name, "server", r.conns.servers[conn.at].Name, "error", err)
		r.conns.leave(conn, false)
		if f.resource != "" && elsewhere == nil && !useful {
			elsewhere = r.client.lookAround(f.resource, r)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-elsewhere.found():
			return elsewhere.notOwner(f.resource)
		case <-time.After(r.client.cfg.random.about(pause)):
		}
	}
}

// watchMessage is what the reader of a watch hands over.
type watchMessage struct {
	msg *pb.WatchResponse
	err error
}

// follow runs one stream until it breaks, or says nothing for too long. useful:
// it has said something.
func (f *feed) follow(ctx context.Context, cc *grpc.ClientConn) (useful bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var reading sync.WaitGroup
	defer reading.Wait()
	defer cancel()
	f.request.AfterRevision, f.request.Incarnation = f.whole, f.incarnation
	f.request.ProgressMs = milliseconds(f.options.progress)
	f.inside, f.stale = false, 0
	stream, err := pb.NewWatchServiceClient(cc).Watch(ctx, f.request)
	if err != nil {
		return false, errorOf(err)
	}
	messages := make(chan watchMessage)
	reading.Go(func() {
		for {
			msg, err := stream.Recv()
			select {
			case messages <- watchMessage{msg, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	})
	// The first answer comes at once, unless the server has not applied as much
	// as was seen elsewhere.
	late := 2*f.options.progress + f.options.progress/2
	silence := time.NewTimer(late)
	defer silence.Stop()
	owner := time.NewTimer(f.region.client.cfg.random.about(ownerEvery))
	defer owner.Stop()
	moved := make(chan error, 1)
	for {
		select {
		case <-ctx.Done():
			return useful, context.Cause(ctx)
		case m := <-messages:
			if m.err != nil {
				return useful, errorOf(m.err)
			}
			useful = true
			if err := f.tell(ctx, m.msg); err != nil {
				return useful, err
			}
			if f.stale >= staleAfter {
				return useful, &Error{Text: "the server's state does not move on"}
			}
			silence.Reset(late)
		case <-silence.C:
			return useful, &Error{Text: fmt.Sprintf("the server has said nothing for %v", late)}
		case err := <-moved:
			if err != nil {
				return useful, err
			}
			owner.Reset(f.region.client.cfg.random.about(ownerEvery))
		case <-owner.C:
			if f.resource != "" {
				reading.Go(func() { moved <- f.stillOwner(ctx) })
			}
		}
	}
}

// stillOwner returns an error if another region owns the partition.
func (f *feed) stillOwner(ctx context.Context) error {
	_, err := f.region.get(ctx, f.resource)
	switch {
	case errors.Is(err, ErrNotOwner), errors.Is(err, ErrMoved):
		return err
	case errors.Is(err, ErrLapsed), errors.Is(err, ErrUnavailable):
		if other := f.region.client.ownerBeside(ctx, f.resource, f.region); other != "" {
			return notOwner(f.resource, other)
		}
	}
	return nil
}

// tell takes a response.
func (f *feed) tell(ctx context.Context, m *pb.WatchResponse) error {
	f.incarnation = m.GetIncarnation()
	about := func(kind WatchKind, revision uint64) WatchEvent {
		return WatchEvent{Kind: kind, Region: f.region.name, Revision: revision}
	}
	switch k := m.GetKind().(type) {
	case *pb.WatchResponse_Resync:
		f.reason, f.whole, f.inside = k.Resync.GetReason(), 0, false
		return nil
	case *pb.WatchResponse_Progress:
		if f.stale++; m.GetRevision() > f.whole {
			f.whole, f.stale = m.GetRevision(), 0
		}
		return f.take(ctx, told{WatchEvent: about(WatchProgress, m.GetRevision())})
	case *pb.WatchResponse_Snapshot:
		return f.tellSnapshot(ctx, m.GetRevision(), k.Snapshot, about)
	case *pb.WatchResponse_Events:
		f.stale = 0
		for _, e := range k.Events.GetEvents() {
			// What comes again after a reconnect was taken before.
			if e.GetRevision() < f.revision || e.GetRevision() == f.revision && e.GetPosition() <= f.position {
				continue
			}
			t := told{WatchEvent: about(0, e.GetRevision()), partition: e.GetPartition()}
			describe(&t.WatchEvent, e)
			if t.Kind != 0 || t.partition != nil {
				if err := f.take(ctx, t); err != nil {
					return err
				}
			}
			f.revision, f.position = e.GetRevision(), e.GetPosition()
		}
		f.whole = max(f.whole, m.GetRevision())
	}
	return nil
}

func (f *feed) tellSnapshot(ctx context.Context, revision uint64, s *pb.WatchSnapshot, about func(WatchKind, uint64) WatchEvent) error {
	if s.GetFirst() {
		f.inside, f.whole = true, 0
		reset := about(WatchReset, revision)
		reset.Resource, reset.Reason = f.resource, f.reason
		if err := f.take(ctx, told{WatchEvent: reset}); err != nil {
			return err
		}
		for _, p := range s.GetPartitions() {
			if err := f.take(ctx, told{WatchEvent: about(0, revision), partition: p}); err != nil {
				return err
			}
		}
	}
	if !f.inside {
		return nil // a later part of one that began on another stream
	}
	for _, l := range s.GetLeases() {
		e := about(WatchHeld, revision)
		e.lease(l)
		if err := f.take(ctx, told{WatchEvent: e}); err != nil {
			return err
		}
	}
	if !s.GetLast() {
		return nil
	}
	f.inside, f.whole, f.revision, f.position = false, revision, revision, ^uint32(0)
	f.reason = "the watch begins again"
	return f.take(ctx, told{WatchEvent: about(WatchSynced, revision)})
}

// describe completes an event; a kind that is not known leaves it without one.
func describe(e *WatchEvent, m *pb.WatchEvent) {
	switch k := m.GetKind().(type) {
	case *pb.WatchEvent_Granted:
		e.Kind = WatchGranted
		e.lease(k.Granted)
	case *pb.WatchEvent_Value:
		e.Kind, e.Resource, e.Token, e.Value = WatchValue, k.Value.GetResource(), fence.Token(k.Value.GetToken()), k.Value.GetValue()
	case *pb.WatchEvent_Revoked:
		e.Kind, e.Resource, e.Token, e.Reason = WatchRevoked, k.Revoked.GetResource(), fence.Token(k.Revoked.GetToken()), k.Revoked.GetReason()
	case *pb.WatchEvent_Ended:
		e.Kind, e.Resource, e.Token, e.Reason = WatchEnded, k.Ended.GetResource(), fence.Token(k.Ended.GetToken()), k.Ended.GetReason()
	}
}

func (e *WatchEvent) lease(l *pb.LeaseInfo) {
	e.Resource, e.Token, e.Holder = l.GetResource(), fence.Token(l.GetToken()), l.GetHolder()
	e.Session, e.Partition, e.Value = l.GetSessionId(), l.GetPartition(), l.GetValue()
}
