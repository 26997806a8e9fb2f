// Package idempotency is for endpoints that cannot compare fencing tokens: a key of each
// message, the same whoever holds the resource, under which an effect is had once.
//
// Whoever receives a message twice, the second time perhaps as another holder, makes the same
// Key of it. A third party that takes idempotency keys gets it with the call. In front of one
// that does not, Do keeps in a store which keys are done, and with what result.
//
// What Do guarantees, as long as the store keeps its data for Keep:
//   - an effect that returned a result under a key is not had again: its result is
//     returned instead;
//   - two attempts at a key do not run beside each other, as long as an attempt heeds its
//     context, which ends within Attempt.
//
// What nothing but the third party can know is whether an attempt had its effect that ended in
// between: its process died, or its answer was lost. Then, after Attempt, the next
// one runs the effect again, and is told so (Again): it asks the third party first, or sends the
// same key. An effect in PostgreSQL itself has no such gap: Postgres.Once puts key and
// effect in one transaction.
//
// A stale holder that was refused nowhere may still be the first to have an effect; but it is
// the effect of the same message. What may not be done late at all needs a guard.
package idempotency

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// Defaults of Options.
const (
	DefaultKeep    = 7 * 24 * time.Hour
	DefaultAttempt = time.Minute
)

// MaxResult bounds a result that is kept, in bytes.
const MaxResult = 64 << 10

// Key of a message: 43 characters of A-Z, a-z, 0-9, - and _. It depends on the resource and the
// message's id within it, and on nothing that changes with the holder.
func Key(resource, messageID string) string {
	h := sha256.New()
	for _, part := range []string{resource, messageID} { // with lengths: "a","bc" is not "ab","c"
		_ = binary.Write(h, binary.BigEndian, uint64(len(part)))
		_, _ = h.Write([]byte(part))
	}
	return base64.RawURLEncoding.EncodeToString(h.Sum(nil))
}

// Options of a store.
type Options struct {
	// Keep is how long a key is remembered once it is done; default DefaultKeep. It must be longer than
	// a message can come again.
	Keep time.Duration
	// Attempt bounds one attempt at an effect; default DefaultAttempt. After it the next may begin.
	Attempt time.Duration
}

// Validate reports all faults at once.
func (o Options) Validate() error {
	o = o.withDefaults()
	var errs []error
	if o.Attempt < time.Second {
		errs = append(errs, fmt.Errorf("attempt: %v is below 1s; choose longer than an effect takes", o.Attempt))
	}
	if o.Keep < o.Attempt {
		errs = append(errs, fmt.Errorf("keep: %v is below attempt, %v; choose longer than a message can come again", o.Keep, o.Attempt))
	}
	return errors.Join(errs...)
}

func (o Options) withDefaults() Options {
	if o.Keep == 0 {
		o.Keep = DefaultKeep
	}
	if o.Attempt == 0 {
		o.Attempt = DefaultAttempt
	}
	return o
}

// BusyError says that another attempt at the key is under way.
type BusyError struct {
	Key string
	// For is until when it may run at most.
	For time.Duration
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("idempotency key %s: another attempt is under way; ask again within %v", e.Key, e.For)
}

// ErrOvertaken is returned when an attempt took longer than Options.Attempt and another one began. Its
// effect may have been had twice.
var ErrOvertaken = errors.New("the attempt took too long, and another one began")

// Begun is what a store says of a key.
type Begun struct {
	// Done: the effect was had, with this result.
	Done   bool
	Result []byte
	// Again: an earlier attempt began and did not end.
	Again bool
}

// Store remembers keys. It is safe for concurrent use.
type Store interface {
	// Begin begins an attempt, unless the key is done. It fails with a *BusyError while another
	// attempt may run.
	Begin(ctx context.Context, key, attempt string) (Begun, error)
	// Finish notes the attempt's result. It fails with ErrOvertaken if the attempt is not
	// the present one.
	Finish(ctx context.Context, key, attempt string, result []byte) error
	// Abandon notes that the attempt surely had no effect, so that the next may begin at once.
	Abandon(ctx context.Context, key, attempt string) error
	// AttemptWithin is Options.Attempt.
	AttemptWithin() time.Duration
}

// Nothing wraps an effect's error to say that surely there was no effect, so that the next attempt
// may begin at once.
func Nothing(err error) error { return &nothing{err} }

type nothing struct{ err error }

func (n *nothing) Error() string { return n.err.Error() }
func (n *nothing) Unwrap() error { return n.err }

// Do has the effect under the key, or returns the result of when it was had. again tells the effect
// that an attempt before it may have had it already. An error of the effect leaves the key as it was
// after an attempt that died, unless it is [Nothing].
func Do(ctx context.Context, s Store, key string, effect func(ctx context.Context, again bool) ([]byte, error)) ([]byte, error) {
	if key == "" {
		return nil, errors.New("idempotency key: is empty; make one with Key")
	}
	attempt := newAttempt()
	// Counted from before the store does.
	within, cancel := context.WithTimeout(ctx, s.AttemptWithin()*9/10)
	defer cancel()
	begun, err := s.Begin(within, key, attempt)
	if err != nil || begun.Done {
		return begun.Result, err
	}
	result, err := effect(within, begun.Again)
	after, stop := context.WithTimeout(context.WithoutCancel(ctx), s.AttemptWithin()/10)
	defer stop()
	var no *nothing
	switch {
	case errors.As(err, &no):
		if e := s.Abandon(after, key, attempt); e != nil {
			err = fmt.Errorf("%w (and the key is not free before the attempt's time is over: %w)", err, e)
		}
		return nil, err
	case err != nil:
		return nil, err
	case len(result) > MaxResult:
		return nil, fmt.Errorf("idempotency key %s: the result has %d bytes, and %d are kept", key, len(result), MaxResult)
	}
	if err := s.Finish(after, key, attempt, result); err != nil {
		return result, fmt.Errorf("idempotency key %s: the effect was had, and that is not noted: %w", key, err)
	}
	return result, nil
}
