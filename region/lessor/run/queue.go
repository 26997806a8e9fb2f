package run

import (
	"context"
	"sync"

	"github.com/headlease/headlease/internal/wake"
	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	// maxQueued bounds the messages that wait for a slow client, maxQueuedHeld
	// the leases that their acks name, of which there are some 100 bytes each.
	maxQueued     = 4096
	maxQueuedHeld = 1 << 18
)

// Queue is a bounded queue of one stream's messages, in their order: the Sink of
// a stream whose client is connected here. It is safe for concurrent use.
type Queue struct {
	mu    sync.Mutex
	queue []*pb.AttachResponse
	held  int
	err   error
	more  chan struct{}
	done  chan struct{} // closed when err is set
}

// NewQueue returns an empty queue.
func NewQueue() *Queue {
	return &Queue{more: make(chan struct{}, 1), done: make(chan struct{})}
}

// Push adds a message; false if there is no room, or the queue has ended.
func (q *Queue) Push(m *pb.AttachResponse) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(m.GetAck().GetHeld())
	if q.err != nil || len(q.queue) >= maxQueued || q.held > 0 && q.held+n > maxQueuedHeld {
		return false
	}
	q.queue = append(q.queue, m)
	q.held += n
	wake.Up(q.more)
	return true
}

// End ends the queue: what is in it still comes, and then err. The first one
// counts.
func (q *Queue) End(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.err = err
		close(q.done)
	}
	wake.Up(q.more)
}

// Next returns the next messages, waiting for the first; what was queued before
// the end still comes. One goroutine calls it.
func (q *Queue) Next(ctx context.Context) ([]*pb.AttachResponse, error) {
	for {
		q.mu.Lock()
		queue, err := q.queue, q.err
		q.queue, q.held = nil, 0
		q.mu.Unlock()
		if len(queue) > 0 {
			return queue, nil
		}
		if err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-q.more:
		}
	}
}

// Done is closed when the queue has ended.
func (q *Queue) Done() <-chan struct{} { return q.done }
