package callstream

import "sync"

// maxBatch bounds the calls of one message.
const maxBatch = 64

// outbox gathers messages while one is being sent, and sends them together: no
// goroutine of its own, and nobody waits for his turn.
type outbox[T any] struct {
	// send may wait for the other end. What fails is told to whoever reads the
	// stream.
	send func([]T) error
	// patient: whoever sends goes on with what others put meanwhile. Otherwise he
	// sends his own and leaves the rest to a new goroutine, which ends with the
	// stream.
	patient bool

	mu      sync.Mutex
	waiting []T
	sending bool
	failed  bool
}

// put sends m, or leaves it to the goroutine that is sending.
func (o *outbox[T]) put(m T) {
	o.mu.Lock()
	o.waiting = append(o.waiting, m)
	if o.sending {
		o.mu.Unlock()
		return
	}
	o.sending = true
	o.one()
	switch {
	case o.failed, len(o.waiting) == 0:
		o.sending = false
		o.mu.Unlock()
	case o.patient:
		o.rest()
	default:
		o.mu.Unlock()
		go func() {
			o.mu.Lock()
			o.rest()
		}()
	}
}

// rest sends until nothing waits. o.mu is held at first.
func (o *outbox[T]) rest() {
	for len(o.waiting) > 0 && !o.failed {
		o.one()
	}
	o.sending = false
	o.mu.Unlock()
}

// one sends a batch, without the lock, which is held before and after.
func (o *outbox[T]) one() {
	batch := o.waiting
	if len(batch) > maxBatch {
		batch, o.waiting = batch[:maxBatch:maxBatch], batch[maxBatch:]
	} else {
		o.waiting = nil
	}
	o.mu.Unlock()
	err := o.send(batch)
	o.mu.Lock()
	if err != nil {
		o.failed, o.waiting = true, nil
	}
}
