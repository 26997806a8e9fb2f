// Package fault is the fault table of one process: what drills break in its
// links, its disk and its clock. Faults are applied by the sender, per peer
// name; a cut between two processes is two rules in two tables.
//
// A rule that an admin sets ends by itself: a drill whose driver dies heals. A
// rule of the start-up table (the WAN delays of `headlease dev`) may last as
// long as the process. A nil *Table has no faults and can never get any; that
// is what a process started without --drills uses.
package fault

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Plane is one kind of traffic between processes.
type Plane uint8

// The planes; PlaneAll is for rules only.
const (
	PlaneAll Plane = iota
	PlaneAPI
	PlaneVotes
	PlaneRaft
	PlaneGossip
)

func (p Plane) String() string {
	switch p {
	case PlaneAll:
		return "all"
	case PlaneAPI:
		return "API"
	case PlaneVotes:
		return "votes"
	case PlaneRaft:
		return "Raft"
	case PlaneGossip:
		return "gossip"
	default:
		return fmt.Sprintf("plane %d", uint8(p))
	}
}

// Link is what happens to what is sent to one peer on one plane; of several
// rules the delays and jitters add up and the losses compound.
type Link struct {
	// Drop lets nothing pass: datagrams are lost, streams hold their bytes.
	Drop bool
	// Delay of everything sent.
	Delay time.Duration
	// Jitter is added to the delay, uniform in [0, Jitter).
	Jitter time.Duration
	// Loss is the share of datagrams lost, or of stream writes delayed by a
	// retransmission; 0 to 1.
	Loss float64
}

// Clean reports whether the link is as if there were no table.
func (l Link) Clean() bool { return l == Link{} }

// LinkRule is a fault of links.
type LinkRule struct {
	ID string
	// Peer is a process's name, "region/NAME" for all servers of a region, or
	// "*" for all peers.
	Peer  string
	Plane Plane
	Link
	// Expires ends the rule; 0 is allowed in a start-up table only.
	Expires time.Duration
}

// DiskRule is a fault of stores.
type DiskRule struct {
	ID string
	// Store names the stores meant ("log", "register"); empty for all.
	Store string
	// Stall holds every operation until the rule ends.
	Stall bool
	// Delay of every operation.
	Delay time.Duration
	// Error fails every operation as a broken disk does (EIO).
	Error bool
	// Full fails every operation as a full disk does (ENOSPC).
	Full    bool
	Expires time.Duration
}

// ClockRule is a fault of the clocks. What the lease clock has gained or lost
// stays when the rule ends: correcting it would be a second fault.
type ClockRule struct {
	ID string
	// Step moves the clock once. Since a lease clock never goes back, a
	// negative step stops it for that long.
	Step time.Duration
	// Rate makes the clock fast (0.01: by 1 %) or slow (-0.01).
	Rate float64
	// WallStep sets the wall clock so far ahead, or back, while the rule lasts.
	WallStep time.Duration
	Expires  time.Duration
}

// Rules is a set of faults of all kinds.
type Rules struct {
	Links  []LinkRule
	Disks  []DiskRule
	Clocks []ClockRule
}

// entry is a rule in force.
type entry struct {
	id      string
	seq     uint64
	link    *LinkRule
	disk    *DiskRule
	clock   *ClockRule
	ends    time.Time // zero: with the process
	timer   *time.Timer
	startup bool
}

// snapshot is immutable but for changed, which is closed when it is replaced.
type snapshot struct {
	version uint64
	entries []*entry
	changed chan struct{}
}

// Table holds the faults of one process. All methods are safe for concurrent
// use, and on a nil Table, which never has faults.
type Table struct {
	current atomic.Pointer[snapshot]

	mu     sync.Mutex // serialises changes
	seq    uint64
	closed bool
}

// NewTable makes a table with the rules of the process's start, which may last
// as long as the process.
func NewTable(startup Rules) (*Table, error) {
	if err := startup.validate(true); err != nil {
		return nil, fmt.Errorf("start-up fault table: %w", err)
	}
	t := &Table{}
	t.current.Store(&snapshot{version: 1, changed: make(chan struct{})})
	t.add(startup, true)
	return t, nil
}

// Set puts rules in force, each in place of the one with its id, all at once.
// Every rule must expire; ids of the start-up table cannot be replaced.
func (t *Table) Set(rules Rules) error {
	if t == nil {
		return ErrOff
	}
	if err := rules.validate(false); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return ErrClosed
	}
	for _, id := range rules.ids() {
		for _, e := range t.current.Load().entries {
			if e.id == id && e.startup {
				return fmt.Errorf("fault %q: is a rule of the start-up table; choose another id", id)
			}
		}
	}
	t.addLocked(rules, false)
	return nil
}

// Clear ends the rules of these ids, or without ids all that were set by Set.
// Unknown ids (the rule may have expired) are passed over.
func (t *Table) Clear(ids ...string) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.remove(func(e *entry) bool {
		return !e.startup && (len(ids) == 0 || slices.Contains(ids, e.id))
	})
}

// Close ends all rules and releases every operation that they hold.
func (t *Table) Close() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	t.remove(func(*entry) bool { return true })
}

// Rules lists what is in force, Expires being the time left.
func (t *Table) Rules() Rules {
	var out Rules
	if t == nil {
		return out
	}
	for _, e := range t.current.Load().entries {
		var left time.Duration
		if !e.ends.IsZero() {
			left = max(time.Until(e.ends), time.Nanosecond)
		}
		switch {
		case e.link != nil:
			r := *e.link
			r.Expires = left
			out.Links = append(out.Links, r)
		case e.disk != nil:
			r := *e.disk
			r.Expires = left
			out.Disks = append(out.Disks, r)
		case e.clock != nil:
			r := *e.clock
			r.Expires = left
			out.Clocks = append(out.Clocks, r)
		}
	}
	return out
}

// Version changes whenever the rules do.
func (t *Table) Version() uint64 {
	if t == nil {
		return 0
	}
	return t.current.Load().version
}

// Changed is closed at the next change after the call. Take it before reading
// what may change.
func (t *Table) Changed() <-chan struct{} {
	if t == nil {
		return nil
	}
	return t.current.Load().changed
}

// Link tells what applies to a peer on a plane. region is the peer's region,
// empty for a witness or a client; name may be empty while it is not known.
func (t *Table) Link(plane Plane, name, region string) Link {
	var out Link
	if t == nil {
		return out
	}
	pass := 1.0
	for _, e := range t.current.Load().entries {
		r := e.link
		if r == nil || r.Plane != PlaneAll && r.Plane != plane || !matchPeer(r.Peer, name, region) {
			continue
		}
		out.Drop = out.Drop || r.Drop
		out.Delay += r.Delay
		out.Jitter += r.Jitter
		pass *= 1 - r.Loss
	}
	out.Loss = 1 - pass
	return out
}

func matchPeer(rule, name, region string) bool {
	switch {
	case rule == "*":
		return true
	case name != "" && rule == name:
		return true
	default:
		return region != "" && rule == regionPrefix+region
	}
}

func (t *Table) add(rules Rules, startup bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.addLocked(rules, startup)
}

func (t *Table) addLocked(rules Rules, startup bool) {
	var fresh []*entry
	for _, r := range rules.Links {
		fresh = append(fresh, t.entry(r.ID, r.Expires, startup, entry{link: &r}))
	}
	for _, r := range rules.Disks {
		fresh = append(fresh, t.entry(r.ID, r.Expires, startup, entry{disk: &r}))
	}
	for _, r := range rules.Clocks {
		fresh = append(fresh, t.entry(r.ID, r.Expires, startup, entry{clock: &r}))
	}
	if len(fresh) == 0 {
		return
	}
	var next []*entry
	for _, e := range t.current.Load().entries {
		if slices.ContainsFunc(fresh, func(f *entry) bool { return f.id == e.id }) {
			e.stop()
			continue
		}
		next = append(next, e)
	}
	t.replace(append(next, fresh...))
}

func (t *Table) entry(id string, expires time.Duration, startup bool, e entry) *entry {
	t.seq++
	e.id, e.seq, e.startup = id, t.seq, startup
	out := &e
	if expires > 0 {
		out.ends = time.Now().Add(expires)
		out.timer = time.AfterFunc(expires, func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.remove(func(other *entry) bool { return other == out })
		})
	}
	return out
}

func (e *entry) stop() {
	if e.timer != nil {
		e.timer.Stop()
	}
}

// remove is called with mu held.
func (t *Table) remove(gone func(*entry) bool) {
	old := t.current.Load().entries
	var next []*entry
	for _, e := range old {
		if gone(e) {
			e.stop()
			continue
		}
		next = append(next, e)
	}
	if len(next) != len(old) {
		t.replace(next)
	}
}

// replace is called with mu held.
func (t *Table) replace(entries []*entry) {
	old := t.current.Load()
	t.current.Store(&snapshot{version: old.version + 1, entries: entries, changed: make(chan struct{})})
	close(old.changed)
}
