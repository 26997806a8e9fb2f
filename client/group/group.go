package group

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/group/plan"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/pause"
	"github.com/headlease/headlease/internal/wake"
)

const (
	// retryPause is between tries that failed.
	retryPause = time.Second
	// tellLimit bounds one write of a value.
	tellLimit = 5 * time.Second
	// leaveWait is how long a member that leaves waits for an assignment without
	// it, before it releases all the same.
	leaveWait = 2 * time.Second
	// comeAgain is how long members have, at least, to register again after the
	// group's region was lost: the slowest of them waits for servers that hang.
	comeAgain = 10 * time.Second
	// partLimit bounds the end of the session.
	partLimit = 5 * time.Second
)

// Run is a member of the group until ctx ends, and then stops in order: it says
// that it goes, drains its shards and releases them. That ends within
// DrainLimit and a few seconds. It fails with ErrReplaced when another process
// takes its name, or when the configuration is wrong.
func Run(ctx context.Context, cfg Config) error {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return fmt.Errorf("group: %w", err)
	}
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("group: %w", err)
	}
	session, err := cfg.Client.NewSession(client.SessionOptions{TTL: cfg.TTL})
	if err != nil {
		return fmt.Errorf("group %s: %w", cfg.Name, err)
	}
	m := &member{
		cfg: cfg, session: session, resource: resourceOf(cfg.Name),
		planner: plan.NewPlanner(cfg.plan(), nil), holders: map[uint32]*holder{}, state: plan.Active,
		heard: make(chan struct{}, 1), told: make(chan struct{}, 1),
	}
	return m.run(ctx)
}

// member is one process in the group.
type member struct {
	cfg      Config
	session  *client.Session
	resource string
	planner  *plan.Planner // of decide alone

	mu sync.Mutex
	// view is what the watch has told last; ok once it is complete.
	view view
	// state that this member tells, and the leases of its slot and of the
	// assigner's lock; nil while it has none.
	state plan.State
	slot  *client.Lease
	lead  *client.Lease
	// table of dedicated shards, as the assigner heard of it last.
	table client.ShardTable

	// desired shards and their holders: changed by decide, the end of a holder by
	// itself.
	desired map[uint32]bool
	holders map[uint32]*holder
	work    sync.WaitGroup

	heard chan struct{} // wakes decide
	told  chan struct{} // wakes leave
}

// view is a group as the watch tells of it.
type view struct {
	ok      bool
	members []plan.Seen
	// assigner's token; 0: there is none.
	assigner   fence.Token
	version    uint64
	assignment plan.Assignment
}

func (m *member) run(ctx context.Context) error {
	// inner lives over ctx until the member has left.
	inner, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	var loops sync.WaitGroup
	loops.Go(func() { m.watch(inner) })
	loops.Go(func() { m.keepSlot(inner) })
	loops.Go(func() { m.keepLead(inner) })
	loops.Go(func() { m.decide(inner, cancel) })
	if cfg := m.cfg; cfg.dedicated {
		loops.Go(func() { m.followTable(inner) })
	}
	select {
	case <-ctx.Done():
		m.leave(inner)
	case <-inner.Done():
	}
	err := context.Cause(inner)
	cancel(nil)
	loops.Wait()
	m.work.Wait()
	part, done := context.WithTimeout(context.WithoutCancel(ctx), partLimit)
	defer done()
	if closed := m.session.Close(part); closed != nil && err == nil {
		m.cfg.Logger.Warn("group: the session could not be closed and will expire", "group", m.cfg.Name, "error", closed)
	}
	if err != nil {
		return fmt.Errorf("group %s, member %s: %w", m.cfg.Name, m.cfg.Member, err)
	}
	return nil
}

// leave says that this member goes, waits until its shards are assigned to
// others, unless it comes back, and until the work on them has ended.
func (m *member) leave(ctx context.Context) {
	state := plan.Leaving
	if m.cfg.Return {
		state = plan.Returning
	}
	began := m.cfg.Clock.Now()
	m.mu.Lock()
	m.state = state
	m.mu.Unlock()
	if err := m.tellState(ctx); err != nil {
		m.cfg.Logger.Warn("group: could not say that this member goes", "group", m.cfg.Name, "error", err)
	}
	wake.Up(m.heard)
	limit := time.NewTimer(leaveWait)
	defer limit.Stop()
	for !m.cfg.Return && m.wanted() {
		select {
		case <-m.told:
			continue
		case <-ctx.Done():
		case <-limit.C:
		}
		break
	}
	m.mu.Lock()
	m.state = 0 // decide drains everything
	m.mu.Unlock()
	wake.Up(m.heard)
	for {
		m.mu.Lock()
		left := len(m.holders)
		m.mu.Unlock()
		if left == 0 {
			m.cfg.Logger.Info("group: all shards are given up", "group", m.cfg.Name, "took", m.cfg.Clock.Now().Sub(began))
			return
		}
		select {
		case <-m.told:
		case <-ctx.Done():
			return
		}
	}
}

// wanted reports whether shards are assigned to this member that another one
// could take.
func (m *member) wanted() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.desired) > 0 && slices.ContainsFunc(m.view.members, func(s plan.Seen) bool {
		return s.State == plan.Active && s.Name != m.cfg.Member
	})
}

// tellState makes the slot's value what this member's state is.
func (m *member) tellState(ctx context.Context) error {
	m.mu.Lock()
	slot, state := m.slot, m.state
	m.mu.Unlock()
	if slot == nil {
		return errors.New("it has no slot")
	}
	value, err := encodeMember(m.cfg.Member, m.cfg.Capacity, state)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, tellLimit)
	defer cancel()
	_, err = slot.SetValue(ctx, value)
	return err
}

// watch keeps the view.
func (m *member) watch(ctx context.Context) {
	for ctx.Err() == nil {
		var told client.WatchView
		for e, err := range m.cfg.Client.WatchPrefix(ctx, m.resource) {
			if err != nil {
				m.cfg.Logger.Warn("group: the watch failed", "group", m.cfg.Name, "error", err)
				break
			}
			told.Apply(e)
			if told.Complete() {
				m.see(&told)
			}
		}
		_ = pause.For(ctx, retryPause) // ends with ctx, as the loop does
	}
}

// see takes what the watch has told.
func (m *member) see(told *client.WatchView) {
	v := view{ok: true}
	for l := range told.Leases() {
		if slot, ok := strings.CutPrefix(l.Resource, m.resource); !ok || slot != "" && slot[0] != '#' {
			continue // another group whose name begins with this one's
		} else if slot != "" {
			if seen, ok := decodeMember(l.Value); ok {
				seen.Token = l.Token
				v.members = append(v.members, seen)
			}
			continue
		}
		v.assigner = l.Token
		v.version, v.assignment, _ = decodeAssignment(l.Value)
	}
	m.mu.Lock()
	m.view = v
	m.mu.Unlock()
	wake.Up(m.heard)
}

// keepSlot is registered for as long as ctx lives.
func (m *member) keepSlot(ctx context.Context) {
	m.keep(ctx, "join the group", func(ctx context.Context) (*client.Lease, error) {
		m.mu.Lock()
		state := m.state
		m.mu.Unlock()
		if state != plan.Active {
			return nil, errors.New("this member is going")
		}
		value, err := encodeMember(m.cfg.Member, m.cfg.Capacity, state)
		if err != nil {
			return nil, err
		}
		return m.session.AcquireSlot(ctx, m.resource, MaxMembers, client.WithValue(value))
	}, func(l *client.Lease) { m.slot = l })
}

// keepLead waits to be the one that assigns, and is.
func (m *member) keepLead(ctx context.Context) {
	m.keep(ctx, "wait to assign", func(ctx context.Context) (*client.Lease, error) {
		return m.session.Acquire(ctx, m.resource, client.Wait())
	}, func(l *client.Lease) { m.lead = l })
}

// keep holds a lease, over losses, until ctx ends.
func (m *member) keep(ctx context.Context, what string, acquire func(context.Context) (*client.Lease, error), set func(*client.Lease)) {
	for ctx.Err() == nil {
		lease, err := acquire(ctx)
		if err != nil {
			if ctx.Err() == nil {
				m.cfg.Logger.Debug("group: could not "+what, "group", m.cfg.Name, "error", err)
			}
			_ = pause.For(ctx, retryPause) // ends with ctx, as the loop does
			continue
		}
		m.mu.Lock()
		set(lease)
		m.mu.Unlock()
		wake.Up(m.heard)
		select {
		case <-lease.Context().Done():
		case <-ctx.Done():
		}
		m.mu.Lock()
		set(nil)
		m.mu.Unlock()
		wake.Up(m.heard)
	}
}

func sortedKeys(set map[string]bool) []string { return slices.Sorted(maps.Keys(set)) }
