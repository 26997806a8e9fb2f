package fault

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

const (
	regionPrefix = "region/"

	maxRules   = 1000
	maxIDLen   = 128
	maxPeerLen = 128
	// maxDelay is far above any link on earth; a longer silence is a drop.
	maxDelay   = time.Minute
	maxExpires = 24 * time.Hour
	maxStep    = 24 * time.Hour
)

// ErrOff is returned by a process without a fault table.
var ErrOff = errors.New("faults are off; start the process with --drills")

// ErrClosed is returned after Close.
var ErrClosed = errors.New("fault table is closed; the process is stopping")

// Validate reports all faults of rules that an admin sets, at once.
func (r Rules) Validate() error { return r.validate(false) }

func (r Rules) ids() []string {
	var ids []string
	for _, l := range r.Links {
		ids = append(ids, l.ID)
	}
	for _, d := range r.Disks {
		ids = append(ids, d.ID)
	}
	for _, c := range r.Clocks {
		ids = append(ids, c.ID)
	}
	return ids
}

func (r Rules) validate(startup bool) error {
	var errs []error
	ids := r.ids()
	if len(ids) > maxRules {
		return fmt.Errorf("faults: %d rules; at most %d", len(ids), maxRules)
	}
	seen := map[string]bool{}
	for _, id := range ids {
		switch {
		case id == "":
			errs = append(errs, errors.New("fault id: must not be empty; give each rule a name by which to clear it"))
		case len(id) > maxIDLen:
			errs = append(errs, fmt.Errorf("fault id %.20q…: is %d bytes long; at most %d", id, len(id), maxIDLen))
		case seen[id]:
			errs = append(errs, fmt.Errorf("fault id %q: given twice; each rule needs its own", id))
		}
		seen[id] = true
	}
	for _, l := range r.Links {
		errs = append(errs, prefixed(l.ID, l.validate(), expiry(l.Expires, startup)))
	}
	for _, d := range r.Disks {
		errs = append(errs, prefixed(d.ID, d.validate(), expiry(d.Expires, startup)))
	}
	for _, c := range r.Clocks {
		errs = append(errs, prefixed(c.ID, c.validate(), expiry(c.Expires, startup)))
	}
	return errors.Join(errs...)
}

func prefixed(id string, errs ...error) error {
	err := errors.Join(errs...)
	if err == nil {
		return nil
	}
	return fmt.Errorf("fault %q: %w", id, err)
}

func expiry(d time.Duration, startup bool) error {
	switch {
	case d == 0 && !startup:
		return errors.New("expires_ms: must be set; only a start-up table has rules that last")
	case d < 0 || d > maxExpires:
		return fmt.Errorf("expires_ms: %v is outside 1 ms to %v", d, maxExpires)
	}
	return nil
}

func between(field string, d, low, high time.Duration) error {
	if d < low || d > high {
		return fmt.Errorf("%s: %v is outside %v to %v", field, d, low, high)
	}
	return nil
}

func (l LinkRule) validate() error {
	errs := []error{
		between("delay_ms", l.Delay, 0, maxDelay),
		between("jitter_ms", l.Jitter, 0, maxDelay),
	}
	switch {
	case l.Peer == "":
		errs = append(errs, errors.New(`peer: must not be empty; name a process, "region/NAME" or "*"`))
	case len(l.Peer) > maxPeerLen:
		errs = append(errs, fmt.Errorf("peer: is %d bytes long; at most %d", len(l.Peer), maxPeerLen))
	case l.Peer == regionPrefix || strings.Contains(strings.TrimPrefix(l.Peer, regionPrefix), "/"):
		errs = append(errs, fmt.Errorf(`peer %q: name a process, "region/NAME" or "*"`, l.Peer))
	}
	if l.Plane > PlaneGossip {
		errs = append(errs, fmt.Errorf("plane: %d is unknown; use API, votes, Raft, gossip or none for all", uint8(l.Plane)))
	}
	if !(l.Loss >= 0 && l.Loss <= 1) { // also NaN
		errs = append(errs, fmt.Errorf("loss: %v is outside 0 to 1", l.Loss))
	}
	if l.Clean() {
		errs = append(errs, errors.New("has no effect; set drop, delay_ms, jitter_ms or loss"))
	}
	return errors.Join(errs...)
}

func (d DiskRule) validate() error {
	errs := []error{between("delay_ms", d.Delay, 0, maxDelay)}
	if len(d.Store) > maxPeerLen {
		errs = append(errs, fmt.Errorf("store: is %d bytes long; at most %d", len(d.Store), maxPeerLen))
	}
	if d.Error && d.Full {
		errs = append(errs, errors.New("error and full: an operation fails in one way; set one of them"))
	}
	if !d.Stall && d.Delay == 0 && !d.Error && !d.Full {
		errs = append(errs, errors.New("has no effect; set stall, delay_ms, error or full"))
	}
	return errors.Join(errs...)
}

func (c ClockRule) validate() error {
	errs := []error{between("step_ms", c.Step, -maxStep, maxStep), between("wall_step_ms", c.WallStep, -maxStep, maxStep)}
	if !(c.Rate >= -1 && c.Rate <= 10) {
		errs = append(errs, fmt.Errorf("rate: %v is outside -1 (stopped) to 10", c.Rate))
	}
	if c.Step == 0 && c.Rate == 0 && c.WallStep == 0 {
		errs = append(errs, errors.New("has no effect; set step_ms, rate or wall_step_ms"))
	}
	return errors.Join(errs...)
}
