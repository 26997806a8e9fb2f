package group

import (
	"context"
	"slices"
	"time"

	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/client/group/plan"
	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/internal/instant"
	"github.com/headlease/headlease/internal/wake"
)

// decider is what decide remembers from one look to the next.
type decider struct {
	*member
	// assigner and version of the newest assignment that was told.
	assigner   fence.Token
	version    uint64
	assignment plan.Assignment
	// planned are the members by which the newest plan was made.
	planned []plan.Seen
	// lead under which planner plans, and whether its plan was told under it.
	lead   fence.Token
	spoken bool
	// settled is when members that join are waited for no more; 0: none has.
	settled instant.Instant
}

// decide acts on everything heard: what is assigned, and, as the assigner, to
// whom.
func (m *member) decide(ctx context.Context, stop context.CancelCauseFunc) {
	d := &decider{member: m}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
		case <-m.heard:
		case <-timer.C:
		}
		if ctx.Err() != nil {
			return
		}
		m.mu.Lock()
		v, lead, slot, state, table := m.view, m.lead, m.slot, m.state, m.table
		m.mu.Unlock()
		again := instant.Instant(0)
		if v.ok {
			m.planner.Serve(m.cfg.serve(table, d.assignment))
			if slot != nil && plan.Newest(v.members)[m.cfg.Member].Token > slot.Token() {
				stop(ErrReplaced)
				return
			}
			again = d.look(ctx, v, lead, slot, state)
		}
		m.reconcile(ctx, d.assignment, state)
		timer.Stop()
		if again != 0 {
			// Instants of the lease clock; the timer's may be off by less than it
			// matters, and each look reads the clock again.
			timer.Reset(max(again.Sub(m.cfg.Clock.Now()), time.Millisecond))
		}
	}
}

// look takes in a view, and assigns if this member is the one that does.
func (d *decider) look(ctx context.Context, v view, lead, slot *client.Lease, state plan.State) (again instant.Instant) {
	now := d.cfg.Clock.Now()
	again = d.planner.Observe(now, v.members)
	sooner := func(at instant.Instant) {
		if again == 0 || at.Before(again) {
			again = at
		}
	}
	before := d.assigner
	if v.version != 0 && (v.assigner > d.assigner || v.assigner == d.assigner && v.version > d.version) {
		d.assigner, d.version, d.assignment = v.assigner, v.version, v.assignment
	}
	if lead == nil || !lead.Valid() {
		d.lead, d.planned, d.settled = 0, membersOf(d.assignment), 0
		d.planner.Follow(d.assignment)
		if lead != nil {
			sooner(now.Add(retryPause)) // it may be prolonged yet
		}
		return again
	}
	if d.lead != lead.Token() {
		d.lead, d.spoken = lead.Token(), false
		if before != 0 && before.Epoch() != d.lead.Epoch() {
			// The region of before is lost, and all registrations with it: they
			// come again one by one.
			until := now.Add(max(d.session.TTL(), comeAgain))
			d.planner.Await(until)
			sooner(until)
		}
	}
	if state == plan.Active && (slot == nil || plan.Newest(v.members)[d.cfg.Member].Token != slot.Token()) {
		return again // it is not seen itself yet
	}
	if plan.Grows(d.planned, v.members) && !lost(d.planned, v.members) {
		if d.settled == 0 {
			d.settled = now.Add(d.cfg.JoinSettle)
		}
		if now.Before(d.settled) {
			sooner(d.settled)
			return again
		}
	}
	d.settled, d.planned = 0, v.members
	if (d.planner.Plan() || !d.spoken) && len(d.planner.Assignment()) > 0 {
		if d.spoken = d.tell(ctx, lead); !d.spoken {
			sooner(now.Add(retryPause))
		}
	}
	return again
}

// tell makes the planner's assignment the lease's value.
func (d *decider) tell(ctx context.Context, lead *client.Lease) bool {
	value, err := encodeAssignment(d.version+1, d.planner.Assignment())
	if err == nil {
		limited, cancel := context.WithTimeout(ctx, tellLimit)
		defer cancel()
		_, err = lead.SetValue(limited, value)
	}
	if err != nil {
		d.cfg.Logger.Warn("group: could not tell the assignment", "group", d.cfg.Name, "error", err)
		return false
	}
	d.assigner, d.version, d.assignment = lead.Token(), d.version+1, d.planner.Assignment()
	d.cfg.Logger.Info("group: shards are assigned", "group", d.cfg.Name, "version", d.version, "members", len(membersOf(d.assignment)))
	return true
}

// membersOf an assignment, as if they were all there.
func membersOf(a plan.Assignment) []plan.Seen {
	seen := map[string]bool{}
	for _, m := range a {
		seen[m] = true
	}
	out := make([]plan.Seen, 0, len(seen))
	for _, m := range sortedKeys(seen) {
		out = append(out, plan.Seen{Member: plan.Member{Name: m}, State: plan.Active})
	}
	return out
}

// lost reports whether an active member of before is not active any more.
func lost(before, now []plan.Seen) bool { return plan.Grows(now, before) }

// reconcile starts and drains holders, so that this member has what is assigned
// to it and nothing else.
func (m *member) reconcile(ctx context.Context, a plan.Assignment, state plan.State) {
	var mine []uint32
	if state != 0 {
		mine = a.Of(m.cfg.Member)
	}
	m.mu.Lock()
	changed := len(mine) != len(m.desired) || slices.ContainsFunc(mine, func(s uint32) bool { return !m.desired[s] })
	if changed {
		m.desired = make(map[uint32]bool, len(mine))
		for _, s := range mine {
			m.desired[s] = true
		}
	}
	for s, h := range m.holders {
		if !m.desired[s] {
			h.stop()
		}
	}
	for s := range m.desired {
		if m.holders[s] == nil {
			m.start(ctx, s)
		}
	}
	m.mu.Unlock()
	if changed {
		m.cfg.Changed(mine)
	}
	wake.Up(m.told)
}
