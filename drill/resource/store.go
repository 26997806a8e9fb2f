// Package resource is what the drills write to: a small process of its own, as
// a database would be, that guards its data by fencing tokens (fence/filemark)
// and keeps a durable journal of every write that it accepted or refused. It is
// no part of a cluster and trusts no clock: the token is all it goes by.
//
// With the guard off (the control run of a drill) it accepts late writes, and
// the journal shows the violation; see Violations.
package resource

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/filemark"
)

const (
	marksName   = "marks"
	journalName = "journal.jsonl"
)

// Bounds of what is written.
const (
	MaxValue  = 64 << 10
	MaxWriter = 128
)

// Store is the resource's data with its guard. Safe for concurrent use.
type Store struct {
	guard   *filemark.Guard
	journal *journal
	now     func() time.Time
}

// OpenStore opens the data in a directory, made if its parent exists.
// unguarded lets late writes pass: for the control run of a drill only. now
// stamps the journal's entries.
func OpenStore(dir string, unguarded bool, now func() time.Time, logger *slog.Logger) (*Store, error) {
	if dir == "" {
		return nil, errors.New("dir: empty; name a directory for the resource's data")
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("dir of the resource: %w; make its parent first", err)
	}
	// First the guard: its lock keeps a second process away from the journal.
	guard, err := filemark.Open(filemark.Options{Dir: filepath.Join(dir, marksName), UnguardedForDrill: unguarded, Logger: logger})
	if err != nil {
		return nil, err
	}
	j, err := openJournal(filepath.Join(dir, journalName))
	if err != nil {
		return nil, errors.Join(err, guard.Close())
	}
	return &Store{guard: guard, journal: j, now: now}, nil
}

// Close waits for running operations and gives the directory free.
func (s *Store) Close() error { return errors.Join(s.guard.Close(), s.journal.close()) }

// Claim raises the resource's mark for a new holder; see filemark.Guard.Claim.
// The entry says how it was decided; a refusal is no error.
func (s *Store) Claim(ctx context.Context, resource string, token fence.Token, writer string) (Entry, error) {
	e := Entry{Op: OpClaim, Resource: resource, Token: token, Writer: writer}
	if err := e.check(); err != nil {
		return Entry{}, err
	}
	if err := s.guard.Claim(ctx, resource, token); err != nil {
		return s.refused(e, err)
	}
	// Journaled under the guard, so that the entry's place in the journal is
	// before every write of a higher token.
	return s.effect(ctx, e)
}

// Write sets the resource's value if the token allows it. The entry says how it
// was decided; a refusal is no error.
func (s *Store) Write(ctx context.Context, resource string, token fence.Token, writer, value string) (Entry, error) {
	e := Entry{Op: OpWrite, Resource: resource, Token: token, Writer: writer, Value: value}
	if err := e.check(); err != nil {
		return Entry{}, err
	}
	return s.effect(ctx, e)
}

func (s *Store) effect(ctx context.Context, e Entry) (Entry, error) {
	var done Entry
	err := s.guard.Do(ctx, e.Resource, e.Token, func(ctx context.Context) error {
		// A higher token that came meanwhile has cancelled this and waits.
		if err := context.Cause(ctx); err != nil {
			return err
		}
		e.Outcome, e.Mark = Accepted, s.guard.Mark(e.Resource)
		var err error
		done, err = s.stamp(e)
		return err
	})
	if err != nil {
		return s.refused(e, err)
	}
	return done, nil
}

// refused journals what the guard refused; other errors are returned.
func (s *Store) refused(e Entry, err error) (Entry, error) {
	var stale *fence.StaleError
	var unclaimed *fence.UnclaimedError
	switch {
	case errors.As(err, &stale):
		e.Outcome, e.Mark = Stale, stale.Seen
	case errors.As(err, &unclaimed):
		e.Outcome = Unclaimed
	default:
		return Entry{}, err
	}
	return s.stamp(e)
}

func (s *Store) stamp(e Entry) (Entry, error) {
	e.Time = s.now()
	return s.journal.append(e)
}

// Read returns the newest accepted write of a resource; false if there is none.
func (s *Store) Read(resource string) (Entry, bool) { return s.journal.last(resource) }

// Mark returns the highest token seen of a resource; 0 if nobody claimed it.
func (s *Store) Mark(resource string) fence.Token { return s.guard.Mark(resource) }

// Journal returns all entries, in order.
func (s *Store) Journal() []Entry { return s.journal.all() }

// ErrInvalid is wrapped by what is wrong with an operation by itself, whatever
// the marks say.
var ErrInvalid = errors.New("operation makes no sense")

func (e Entry) check() error {
	var errs []error
	within := func(field string, n, low, high int) {
		if n < low || n > high {
			errs = append(errs, fmt.Errorf("%s: has %d bytes; %d to %d are allowed", field, n, low, high))
		}
	}
	within("resource", len(e.Resource), 1, filemark.MaxResource)
	within("writer", len(e.Writer), 1, MaxWriter)
	within("value", len(e.Value), 0, MaxValue)
	if _, err := fence.TokenOf(uint64(e.Token)); err != nil {
		errs = append(errs, fmt.Errorf("token: %w; send the token of the grant", err))
	}
	if len(errs) > 0 {
		return fmt.Errorf("%w: %w", ErrInvalid, errors.Join(errs...))
	}
	return nil
}
