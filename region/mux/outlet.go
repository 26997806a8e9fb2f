package mux

import (
	"context"
	"errors"
	"sync"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// maxWaiting messages per client stream wait for a mux; with the leases that
	// acks name counted too, maxWaitingHeld per stream and maxWaitingInAll per mux.
	maxWaiting      = 4096
	maxWaitingHeld  = 1 << 18
	maxWaitingInAll = 1 << 20
	// maxBatch messages go out at once, or named leases.
	maxBatch = 2048
	// maxServed messages of one stream, then it is the next one's turn.
	maxServed = 64
)

var errMuxSlow = errors.New("the mux is read too slowly; begin another one")

// outlet gathers the messages of a mux's client streams for its writer. It never
// waits. It is safe for concurrent use.
type outlet struct {
	more chan struct{}

	mu      sync.Mutex
	waiting int
	ready   []*virtual
	pong    uint64
	err     error
}

func newOutlet() *outlet { return &outlet{more: make(chan struct{}, 1)} }

// virtual is one client stream on the leader's side: the Sink of its messages.
type virtual struct {
	outlet    *outlet
	id        uint64
	attendant *attendant // the reader's

	// Under the outlet's lock:

	queue   []*pb.AttachResponse
	waiting int
	queued  bool
	ended   *pb.MuxEnded
	over    bool // nothing more is said of it
}

func weight(m *pb.AttachResponse) int { return 1 + len(m.GetAck().GetHeld()) }

// Push queues a message; false if this stream has too many.
func (v *virtual) Push(m *pb.AttachResponse) bool {
	o, w := v.outlet, weight(m)
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case v.over || o.err != nil:
		return true
	case o.waiting+w > maxWaitingInAll && o.waiting > 0:
		o.fail(errMuxSlow)
		return true
	case len(v.queue) >= maxWaiting, v.waiting+w > maxWaitingHeld && v.waiting > 0:
		return false
	}
	v.queue = append(v.queue, m)
	v.waiting += w
	o.waiting += w
	o.enqueue(v)
	return true
}

// End ends the stream after what is queued; the end of the term ends the mux.
func (v *virtual) End(err error) {
	over, told := ofShell(err)
	o := v.outlet
	o.mu.Lock()
	defer o.mu.Unlock()
	if over {
		o.fail(err)
		return
	}
	if v.ended == nil {
		v.ended = pack(told)
		o.enqueue(v)
	}
}

// drop: the client has left; nothing more is said of it.
func (v *virtual) drop() {
	o := v.outlet
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waiting -= v.waiting
	v.queue, v.waiting, v.over = nil, 0, true
}

// enqueue and fail are called with o.mu held.
func (o *outlet) enqueue(v *virtual) {
	if !v.queued {
		v.queued = true
		o.ready = append(o.ready, v)
	}
	o.poke()
}

func (o *outlet) fail(err error) {
	if o.err == nil {
		o.err = err
	}
	o.poke()
}

func (o *outlet) poke() {
	select {
	case o.more <- struct{}{}:
	default:
	}
}

// ping has a pong sent.
func (o *outlet) ping(n uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.pong = n
	o.poke()
}

// next returns the next message of the mux, waiting for one. Streams take
// turns; one push for many streams goes out once.
func (o *outlet) next(ctx context.Context) (*pb.CarryResponse, error) {
	for {
		o.mu.Lock()
		resp, err := o.collect(), o.err
		o.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if resp != nil {
			return resp, nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-o.more:
		}
	}
}

// collect takes a batch; nil if there is nothing. o.mu is held.
func (o *outlet) collect() *pb.CarryResponse {
	if len(o.ready) == 0 && o.pong == 0 {
		o.ready = nil
		return nil
	}
	resp := &pb.CarryResponse{Pong: o.pong}
	o.pong = 0
	var last *pb.MuxDown
	for room := maxBatch; len(o.ready) > 0 && room > 0; {
		v := o.ready[0]
		o.ready[0] = nil
		o.ready = o.ready[1:]
		v.queued = false
		if v.over {
			continue
		}
		n := 0
		for n < len(v.queue) && n < maxServed && room > 0 {
			m := v.queue[n]
			v.queue[n] = nil
			n++
			w := weight(m)
			room -= w
			v.waiting -= w
			o.waiting -= w
			if last != nil && last.GetResponse() == m {
				last.Streams = append(last.Streams, v.id)
				continue
			}
			last = &pb.MuxDown{Streams: []uint64{v.id}, Kind: &pb.MuxDown_Response{Response: m}}
			resp.Frames = append(resp.Frames, last)
		}
		v.queue = v.queue[n:]
		switch {
		case len(v.queue) > 0:
			v.queued = true
			o.ready = append(o.ready, v)
		case v.ended != nil:
			v.over = true
			resp.Frames = append(resp.Frames, &pb.MuxDown{Streams: []uint64{v.id}, Kind: &pb.MuxDown_Ended{Ended: v.ended}})
			last = nil
		default:
			v.queue = nil
		}
	}
	return resp
}
