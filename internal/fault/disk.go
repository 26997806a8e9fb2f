package fault

import (
	"fmt"
	"strings"
	"syscall"
	"time"
)

// Disk is the seam of stores: what wraps a store asks it before every
// operation that touches the disk.
type Disk interface {
	// Before stalls as long as a fault says, and returns the error that the
	// operation is to fail with. op is "STORE/OPERATION", such as "log/append".
	// It may be held as long as a rule lasts and takes no context: neither does
	// a disk.
	Before(op string) error
}

var _ Disk = (*Table)(nil)

// Before is Disk; a nil Table never fails or stalls.
func (t *Table) Before(op string) error {
	for {
		if t == nil {
			return nil
		}
		s := t.current.Load()
		var delay time.Duration
		var stall bool
		var err error
		for _, e := range s.entries {
			r := e.disk
			if r == nil || !matchStore(r.Store, op) {
				continue
			}
			stall = stall || r.Stall
			delay += r.Delay
			switch {
			case r.Error:
				err = fmt.Errorf("drill fault %q on %s: %w", r.ID, op, syscall.EIO)
			case r.Full:
				err = fmt.Errorf("drill fault %q on %s: %w", r.ID, op, syscall.ENOSPC)
			}
		}
		if stall {
			<-s.changed
			continue
		}
		if delay > 0 {
			time.Sleep(delay)
		}
		return err
	}
}

func matchStore(store, op string) bool {
	if store == "" || store == op {
		return true
	}
	rest, ok := strings.CutPrefix(op, store)
	return ok && strings.HasPrefix(rest, "/")
}

// Clock tells what a faulted clock has to do: steps maps each rule in force
// that moves the clock, by a number never given twice, to its step; rate is
// the sum of the rates in force. It returns nil and 0 without allocating when
// there is none.
func (t *Table) Clock() (steps map[uint64]time.Duration, rate float64) {
	if t == nil {
		return nil, 0
	}
	for _, e := range t.current.Load().entries {
		if e.clock == nil {
			continue
		}
		rate += e.clock.Rate
		if e.clock.Step != 0 {
			if steps == nil {
				steps = map[uint64]time.Duration{}
			}
			steps[e.seq] = e.clock.Step
		}
	}
	return steps, rate
}

// WallStep is how far ahead the wall clock is set, the sum of the rules in force.
func (t *Table) WallStep() (step time.Duration) {
	if t == nil {
		return 0
	}
	for _, e := range t.current.Load().entries {
		if e.clock != nil {
			step += e.clock.WallStep
		}
	}
	return step
}
