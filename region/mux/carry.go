package mux

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// maxFrames of one message to the leader; each is at most what a client may
	// send at once.
	maxFrames = 128
	// maxTurn is what one client may say before it is the next one's turn.
	maxTurn = 32
	// maxResponse is the largest message from the leader, in bytes: an ack may name
	// ten thousand leases.
	maxResponse = 16 << 20
)

var (
	errSilent = errors.New("nothing is heard from the leader")
	errLeft   = errors.New("the leader has changed")
)

// carrier is the upstream over one mux to a leader in one term.
type carrier struct {
	edge   *Edge
	server string
	t      uint64 // set by the hello, before any client has it
	heard  atomic.Int64
	more   chan struct{}

	mu      sync.Mutex
	dead    bool
	clients map[uint64]*carried
	queue   []*carried
}

// carried is one client of it.
type carried struct {
	client         *Client
	queued, opened bool
}

func (x *carrier) term() uint64 { return x.t }

// ready queues the client for the writer.
func (x *carrier) ready(c *Client) {
	x.mu.Lock()
	if x.dead {
		x.mu.Unlock()
		c.leave(x)
		return
	}
	k := x.clients[c.id]
	if k == nil {
		k = &carried{client: c}
		x.clients[c.id] = k
	}
	x.enqueue(k)
	x.mu.Unlock()
}

// enqueue is called with x.mu held.
func (x *carrier) enqueue(k *carried) {
	if !k.queued {
		k.queued = true
		x.queue = append(x.queue, k)
	}
	select {
	case x.more <- struct{}{}:
	default:
	}
}

// carry starts a mux to a leader.
func (e *Edge) carry(ctx context.Context, server string) *way {
	ctx, cancel := context.WithCancelCause(ctx)
	x := &carrier{edge: e, server: server, more: make(chan struct{}, 1), clients: map[uint64]*carried{}}
	done := make(chan struct{})
	var helloed atomic.Bool
	e.work.Go(func() {
		defer close(done)
		err := x.run(ctx, cancel, &helloed)
		cancel(err)
		e.cfg.Logger.Debug("mux to the leader ended", "leader", server, "term", x.t, "error", err)
		if helloed.Load() && !errors.Is(context.Cause(ctx), errLeft) {
			e.metric.broken.Inc()
		}
		x.mu.Lock()
		x.dead, x.clients, x.queue = true, map[uint64]*carried{}, nil
		x.mu.Unlock()
		e.leave(x)
	})
	return &way{server: server, over: done, used: helloed.Load, stop: func() {
		cancel(errLeft)
		<-done
	}}
}

// run is the mux, until it breaks or ctx ends.
func (x *carrier) run(ctx context.Context, cancel context.CancelCauseFunc, helloed *atomic.Bool) error {
	conn, err := x.edge.cfg.Conn(x.server)
	if err != nil {
		return err
	}
	begin := time.Now()
	x.heard.Store(0)
	watched := make(chan struct{})
	defer func() {
		cancel(errLeft)
		<-watched
	}()
	go func() { // ended by ctx
		defer close(watched)
		x.watch(ctx, cancel, begin)
	}()
	stream, err := pb.NewMuxServiceClient(conn).Carry(ctx, grpc.MaxCallRecvMsgSize(maxResponse))
	if err != nil {
		return err
	}
	hello, err := stream.Recv()
	if err != nil {
		return err
	}
	if x.t = hello.GetHello().GetTerm(); x.t == 0 {
		return fmt.Errorf("server %s began a mux without a term", x.server)
	}
	x.heard.Store(int64(time.Since(begin)))
	helloed.Store(true)
	written := make(chan struct{})
	go func() { // ended by ctx, which this function's return ends
		defer close(written)
		cancel(x.write(ctx, begin, stream))
	}()
	x.edge.use(ctx, x)
	err = x.read(stream, begin)
	cancel(err)
	<-written
	return err
}

// watch ends a mux that is silent.
func (x *carrier) watch(ctx context.Context, cancel context.CancelCauseFunc, begin time.Time) {
	limit := x.edge.cfg.Silence
	ticker := time.NewTicker(limit / 5)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if time.Since(begin)-time.Duration(x.heard.Load()) > limit {
				cancel(errSilent)
				return
			}
		}
	}
}

// write sends what the clients say, and pings while nothing is heard.
func (x *carrier) write(ctx context.Context, begin time.Time, stream grpc.BidiStreamingClient[pb.CarryRequest, pb.CarryResponse]) error {
	ping := time.NewTicker(x.edge.cfg.Silence / 5)
	defer ping.Stop()
	pings := uint64(0)
	for {
		req := &pb.CarryRequest{Frames: x.collect()}
		if len(req.GetFrames()) == 0 {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-x.more:
				continue
			case <-ping.C:
				if time.Since(begin)-time.Duration(x.heard.Load()) < x.edge.cfg.Silence/10 {
					continue // the leader is heard from anyway
				}
				pings++
				req.Ping = pings
			}
		}
		if err := stream.Send(req); err != nil {
			return err
		}
	}
}

// collect takes what the clients have said, a few from each in turn.
func (x *carrier) collect() []*pb.MuxUp {
	var frames []*pb.MuxUp
	var reqs []*pb.AttachRequest
	for len(frames) < maxFrames {
		x.mu.Lock()
		if len(x.queue) == 0 {
			x.queue = nil
			x.mu.Unlock()
			break
		}
		k := x.queue[0]
		x.queue[0] = nil
		x.queue = x.queue[1:]
		k.queued = false
		x.mu.Unlock()

		c := k.client
		if c.over() {
			if k.opened {
				frames = append(frames, &pb.MuxUp{Stream: c.id, Kind: &pb.MuxUp_Close{Close: &pb.MuxClose{}}})
			}
			x.mu.Lock()
			delete(x.clients, c.id)
			x.mu.Unlock()
			continue
		}
		var more bool
		reqs, more = c.take(x, reqs[:0], maxTurn)
		if len(reqs) > 0 && !k.opened {
			k.opened = true
			frames = append(frames, &pb.MuxUp{Stream: c.id, Kind: &pb.MuxUp_Open{Open: &pb.MuxOpen{
				Role: string(c.caller.Role), Name: c.caller.Name,
			}}})
		}
		for _, req := range reqs {
			frames = append(frames, &pb.MuxUp{Stream: c.id, Kind: &pb.MuxUp_Request{Request: req}})
		}
		if more {
			x.mu.Lock()
			x.enqueue(k)
			x.mu.Unlock()
		}
	}
	return frames
}

// read passes on what the leader says. It waits for no client.
func (x *carrier) read(stream grpc.BidiStreamingClient[pb.CarryRequest, pb.CarryResponse], begin time.Time) error {
	var slow []*Client
	for {
		resp, err := stream.Recv()
		if err != nil {
			return err
		}
		x.heard.Store(int64(time.Since(begin)))
		for _, f := range resp.GetFrames() {
			for _, id := range f.GetStreams() {
				x.mu.Lock()
				k := x.clients[id]
				x.mu.Unlock()
				switch {
				case k == nil: // the client has left
				case f.GetEnded() != nil:
					k.client.refuse(unpack(f.GetEnded())) // and the leader hears of it
				case f.GetResponse() != nil && !k.client.deliver(x, f.GetResponse()):
					slow = append(slow, k.client)
				}
			}
		}
		for _, c := range slow {
			x.edge.cfg.Logger.Warn("a client reads too slowly; closing its stream")
			x.edge.metric.slow.Inc()
			c.refuse(errSlow)
		}
		slow = slow[:0]
	}
}
