package link

import (
	"container/list"
	"context"
	"runtime"
	"sync"
	"time"
)

const (
	// turnsPerProcessor bounds the handshakes of clients that are computed at a time:
	// a herd of ten thousand, each with a ten thousandth of the processors, would all
	// be given up by their clients and begun anew.
	turnsPerProcessor = 32
	// turnFor is how long one of them counts at most, while its client may be far
	// away, or say nothing.
	turnFor = 100 * time.Millisecond
)

// turns are had by the newest first: the others' clients are closer to giving up,
// and do so for nothing if they are served last of all. It is safe for concurrent
// use.
type turns struct {
	mu      sync.Mutex
	free    int
	waiting list.List // of chan struct{}, with room for one; the newest at the front
}

func newTurns() *turns {
	return &turns{free: turnsPerProcessor * runtime.GOMAXPROCS(0)}
}

// take waits for a turn. done, which may be called more than once, ends it, as does
// turnFor.
func (t *turns) take(ctx context.Context) (done func(), err error) {
	t.mu.Lock()
	if t.free > 0 {
		t.free--
		t.mu.Unlock()
		return t.begun(), nil
	}
	mine := make(chan struct{}, 1)
	place := t.waiting.PushFront(mine)
	t.mu.Unlock()
	select {
	case <-mine:
		return t.begun(), nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-mine: // it has come meanwhile, and is another one's
		t.pass()
	default:
		t.waiting.Remove(place)
	}
	return nil, context.Cause(ctx)
}

func (t *turns) begun() (done func()) {
	end := sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.pass()
	})
	late := time.AfterFunc(turnFor, end)
	return func() {
		late.Stop()
		end()
	}
}

// pass a turn on. t.mu is held.
func (t *turns) pass() {
	first := t.waiting.Front()
	if first == nil {
		t.free++
		return
	}
	t.waiting.Remove(first)
	first.Value.(chan struct{}) <- struct{}{} //nolint:forcetypeassert // nothing else is in it
}
