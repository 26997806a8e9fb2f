package e2e

import (
	"context"
	"fmt"
	"sync"

	"github.com/headlease/headlease/client"
)

// scaleWaits are the waiters of one process for locks of another, which is
// redeployed: each gives its lock on at once.
type scaleWaits struct {
	work sync.WaitGroup

	mu     sync.Mutex
	woken  int
	grants map[string]int // of the waited-for locks, as a watch tells them
	missed bool
	errs   []error
}

// waitersOf each process of sessions that waits for another.
func waitersOf(sessions int) int { return sessions / 5 }

// wait queues for the first locks of the process named Peer, and returns when a
// watch sees what becomes of them; the waiters are in the queues later.
func (p *scaleProcess) wait(ctx context.Context) error {
	w, c := &p.waits, p.clients[0]
	w.grants = map[string]int{}
	n := waitersOf(p.cfg.Sessions)
	name := func(i int) string { return fmt.Sprintf("lock/scale/%s/%d", p.cfg.Peer, i) }
	for i := range n {
		w.grants[name(i)] = 0
	}
	synced := make(chan error, 1)
	w.work.Go(func() {
		said := false
		for ev, err := range c.WatchPrefix(ctx, "lock/scale/"+p.cfg.Peer+"/") {
			if err == nil && ev.Kind == client.WatchSynced && !said {
				said = true
				synced <- nil
				continue
			}
			if err != nil && !said {
				synced <- err
				return
			}
			w.take(ev, said)
		}
	})
	if err := <-synced; err != nil {
		return err
	}
	for i := range n {
		s, err := c.NewSession(client.SessionOptions{})
		if err != nil {
			return err
		}
		w.work.Go(func() {
			l, err := s.Acquire(ctx, name(i), client.Wait())
			w.mu.Lock()
			if err == nil {
				w.woken++
			} else {
				w.errs = append(w.errs, err)
			}
			w.mu.Unlock()
			if err == nil {
				_ = l.Release(ctx)
			}
		})
	}
	return nil
}

func (w *scaleWaits) take(ev client.WatchEvent, begun bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch ev.Kind {
	case client.WatchGranted:
		if _, ours := w.grants[ev.Resource]; ours {
			w.grants[ev.Resource]++
		}
	case client.WatchReset:
		w.missed = w.missed || begun
	default:
	}
}

func (w *scaleWaits) report(r *scaleReport) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r.Woken, r.Missed, r.Grants = w.woken, w.missed, map[int]int{}
	for _, n := range w.grants {
		r.Grants[n]++
	}
	if len(w.errs) > 0 {
		r.Error = fmt.Sprintf("%d waiters failed, the first: %v", len(w.errs), w.errs[0])
	}
}
