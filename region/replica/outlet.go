package replica

import (
	"errors"
	"io"
	"os"
	"sync"
	"time"
)

const (
	// outletWait is how long a follower's replication waits for its turn before it
	// looks again.
	outletWait = 30 * time.Second
	// outletIdle is how long a receiver may take nothing before the next one gets
	// its turn; outletLast how long it may take to restore what it has received.
	outletIdle = 10 * time.Second
	outletLast = time.Minute
)

// outlet lets one snapshot at a time go out: several would halve each other's
// bandwidth and double the memory [F37].
type outlet struct{ slot chan struct{} }

func newOutlet() *outlet { return &outlet{slot: make(chan struct{}, 1)} }

var errOutletBusy = errors.New("another follower is being sent a snapshot; this one is next")

// take waits for the turn and returns what gives it back, which may be called
// again.
func (o *outlet) take(stop <-chan struct{}) (release func(), err error) {
	timer := time.NewTimer(outletWait)
	defer timer.Stop()
	select {
	case o.slot <- struct{}{}:
		return sync.OnceFunc(func() { <-o.slot }), nil
	case <-stop:
		return nil, errStopping
	case <-timer.C:
		return nil, errOutletBusy
	}
}

// errReceiverSlow ends the reading of a snapshot whose receiver took nothing for
// so long that another got its turn.
var errReceiverSlow = errors.New("the receiver of the snapshot took nothing for too long")

// outgoing is a snapshot's state on its way out. One goroutine reads it.
type outgoing struct {
	file    *os.File
	stop    <-chan struct{}
	release func() // the turn
	done    func() // once, when closed

	mu      sync.Mutex
	timer   *time.Timer
	expired bool
	closed  bool
}

func newOutgoing(f *os.File, stop <-chan struct{}, release, done func()) *outgoing {
	o := &outgoing{file: f, stop: stop, release: release, done: done}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.timer = time.AfterFunc(outletIdle, o.expire)
	return o
}

// expire gives the turn to the next, although the file is still open: whoever
// holds it may hang in a write to a dead receiver.
func (o *outgoing) expire() {
	o.mu.Lock()
	if o.closed {
		o.mu.Unlock()
		return
	}
	o.expired = true
	o.mu.Unlock()
	o.release()
}

// Read is io.Reader.
func (o *outgoing) Read(b []byte) (int, error) {
	select {
	case <-o.stop:
		return 0, errStopping
	default:
	}
	n, err := o.file.Read(b)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.expired {
		return 0, errReceiverSlow
	}
	if errors.Is(err, io.EOF) {
		o.timer.Reset(outletLast)
	} else {
		o.timer.Reset(outletIdle)
	}
	return n, err
}

// Close is io.Closer; it may be called again.
func (o *outgoing) Close() error {
	o.mu.Lock()
	if o.closed {
		o.mu.Unlock()
		return nil
	}
	o.closed = true
	o.timer.Stop()
	o.mu.Unlock()
	o.release()
	defer o.done()
	return o.file.Close()
}
