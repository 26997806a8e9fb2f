package replica

import (
	"sync"
	"time"
)

// tally counts goroutines that end by themselves. Unlike a WaitGroup it may be
// waited for with a limit and while others still begin.
type tally struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when n falls to 0; nil if nobody waits
}

func (t *tally) run(f func()) {
	t.mu.Lock()
	t.n++
	t.mu.Unlock()
	go func() {
		defer t.end()
		f()
	}()
}

func (t *tally) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n--
	if t.n == 0 && t.idle != nil {
		close(t.idle)
		t.idle = nil
	}
}

// wait waits until none runs, at most d, and reports whether none does.
func (t *tally) wait(d time.Duration) bool {
	t.mu.Lock()
	if t.n == 0 {
		t.mu.Unlock()
		return true
	}
	if t.idle == nil {
		t.idle = make(chan struct{})
	}
	idle := t.idle
	t.mu.Unlock()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-idle:
		return true
	case <-timer.C:
		return false
	}
}
