package group

import (
	"context"
	"errors"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/pause"
	"github.com/headlease/headlease/internal/wake"
)

// holder has one assigned shard: it waits for the lease, works, and begins
// again when the lease is lost, until it is stopped.
type holder struct {
	shard uint32
	drain chan struct{}
	// waiting ends when the shard is to move, working a drain limit later.
	waiting, working context.Context
	stopWaiting      context.CancelFunc
	stopWorking      context.CancelCauseFunc
	limit            time.Duration
	stopped          bool
	timer            *time.Timer
}

// start begins to hold a shard; m.mu is held.
func (m *member) start(ctx context.Context, shard uint32) {
	h := &holder{shard: shard, drain: make(chan struct{}), limit: m.cfg.DrainLimit}
	h.working, h.stopWorking = context.WithCancelCause(ctx)
	h.waiting, h.stopWaiting = context.WithCancel(h.working)
	m.holders[shard] = h
	m.work.Go(func() {
		m.hold(ctx, h)
		m.mu.Lock()
		h.stop()
		h.timer.Stop()
		delete(m.holders, shard)
		m.mu.Unlock()
		h.stopWorking(nil)
		wake.Up(m.heard)
		wake.Up(m.told)
	})
}

// stop asks for the shard to be given up; the member's mu is held.
func (h *holder) stop() {
	if h.stopped {
		return
	}
	h.stopped = true
	close(h.drain)
	h.stopWaiting()
	h.timer = time.AfterFunc(h.limit, func() { h.stopWorking(ErrDrainLimit) })
}

func (m *member) hold(ctx context.Context, h *holder) {
	resource := m.cfg.Resource(h.shard)
	for h.waiting.Err() == nil {
		lease, err := m.session.Acquire(h.waiting, resource, client.Wait(), client.WithValue([]byte(m.cfg.Member)))
		if err != nil {
			if h.waiting.Err() == nil {
				m.cfg.Logger.Warn("group: could not acquire a shard", "resource", resource, "error", err)
			}
			_ = pause.For(h.waiting, retryPause) // ends with ctx, as the loop does
			continue
		}
		err = m.serve(h, lease)
		lost := lease.Context().Err() != nil
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), tellLimit)
		if err := lease.Release(release); err != nil {
			m.cfg.Logger.Warn("group: a release is still under way", "resource", resource, "error", err)
		}
		cancel()
		if h.waiting.Err() != nil || lost || errors.Is(err, ErrNewLease) {
			continue
		}
		if err != nil {
			m.cfg.Logger.Warn("group: the work on a shard failed, and begins again", "resource", resource, "error", err)
		}
		_ = pause.For(h.waiting, retryPause) // ends with ctx, as the loop does
	}
}

// serve works on a shard under a lease.
func (m *member) serve(h *holder, lease *client.Lease) error {
	ctx, cancel := context.WithCancelCause(lease.Context())
	defer cancel(nil)
	defer context.AfterFunc(h.working, func() { cancel(context.Cause(h.working)) })()
	err := m.cfg.Work(ctx, &Shard{Number: h.shard, Lease: lease, drain: h.drain})
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
