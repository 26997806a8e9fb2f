package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headlease/headlease/client/group"
	"github.com/headlease/headlease/fence"
)

// Defaults.
const (
	DefaultBatch      = 32
	DefaultParallel   = 64
	DefaultStallAfter = 30 * time.Second
)

// Message of a shard.
type Message struct {
	// ID of the source, rising within the shard.
	ID string
	// Key whose messages keep their order, for example a user.
	Key string
	// Seq counts the key's messages, from 1; 0: the source does not count.
	Seq  uint64
	Body []byte
	// Parked: messages of this key before it are parked, so this one is too.
	Parked bool
}

// Source has the messages of shards.
type Source interface {
	// Open claims the shard: no holder of a lower token reads or acknowledges
	// from then on. It returns the shard's messages from the first one that is
	// not acknowledged.
	Open(ctx context.Context, resource string, token fence.Token) (Feed, error)
}

// Feed is a shard's messages in order. It is used by one goroutine.
type Feed interface {
	// Next waits for messages and returns 1 to limit of them. With
	// group.ErrNewLease the chain ends and begins again under a new lease.
	Next(ctx context.Context, limit int) ([]Message, error)
	// Ack says that messages of Next are handled. To repeat it is no error.
	Ack(ctx context.Context, messages []Message) error
	// Park puts a message aside, with the reason, and acknowledges it; those of
	// its key that follow are Parked.
	Park(ctx context.Context, m Message, reason string) error
	// Close ends the feed, and keeps what it read and did not acknowledge.
	Close()
}

// Shard that is held.
type Shard struct {
	*group.Shard
	resource string
}

// Resource of the shard's lease, and of the marks at its stores.
func (s *Shard) Resource() string { return s.resource }

// Token of the shard's lease: it goes with every write.
func (s *Shard) Token() fence.Token { return s.Lease.Token() }

// Check returns an error, which wraps ErrNotValid, unless the shard's lease is
// valid now. Call it right before a write; what Handle returns then ends the
// chain and acknowledges nothing. The lease's context may end a moment later than
// its validity, as after a freeze: its cause is nil then, which is no error.
func (s *Shard) Check() error {
	if s.Lease.Valid() {
		return nil
	}
	return fmt.Errorf("%s: %w", s.resource, ErrNotValid)
}

// Batch is consecutive messages of a shard to handle.
type Batch struct {
	*Shard
	Messages []Message
	// Feed that they came from.
	Feed Feed
	// Attempt counts from 1.
	Attempt int

	acked bool
}

// Acked says that the handler has acknowledged the batch itself, in one step
// with its write.
func (b *Batch) Acked() { b.acked = true }

// Config of a worker.
type Config struct {
	// Group that divides the shards; its Work is the worker's own.
	Group  group.Config
	Source Source
	// Claim, if set, claims the shard at the stores to which Handle writes
	// besides the source's. It is repeated until it succeeds or the lease ends.
	Claim func(ctx context.Context, s *Shard) error
	// Handle handles a batch: all of it, or nothing that a repetition would
	// spoil. A batch that fails is handled again message by message, so that one
	// bad message does not fail its neighbours. An error that is a
	// *fence.StaleError ends the shard's chain: another worker has the shard.
	Handle func(ctx context.Context, b *Batch) error
	// Batch is the most messages handled at once, and so the most in flight of a
	// shard; default DefaultBatch. 1 handles each by itself.
	Batch int
	// Parallel is the most batches in Handle at once; default DefaultParallel.
	Parallel int
	// MaxAttempts of a message before it is parked; 0: it is tried for ever, and
	// holds up its shard.
	MaxAttempts int
	// RetryPause after the first failure, doubled with each one up to 100 times;
	// default 100 ms.
	RetryPause time.Duration
	// StallAfter is how long a batch may be in work before its shard counts as
	// stalled; default DefaultStallAfter.
	StallAfter time.Duration
	Registerer prometheus.Registerer
	Logger     *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Batch == 0 {
		c.Batch = DefaultBatch
	}
	if c.Parallel == 0 {
		c.Parallel = DefaultParallel
	}
	if c.RetryPause == 0 {
		c.RetryPause = 100 * time.Millisecond
	}
	if c.StallAfter == 0 {
		c.StallAfter = DefaultStallAfter
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Group.Logger == nil {
		c.Group.Logger = c.Logger
	}
	return c
}

// Validate reports all faults at once, but for those of Group, which group.Run
// reports.
func (c Config) Validate() error {
	var errs []error
	fault := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	fault(c.Source == nil, "source: missing; see worker/redisstream")
	fault(c.Handle == nil, "handle: missing; give the function that handles messages")
	fault(c.Group.Work != nil, "group.work: is set; it is the worker's own, use handle")
	fault(c.Batch < 0 || c.Batch > 10_000, "batch: %d is out of range; choose 1 to 10000", c.Batch)
	fault(c.Parallel < 0, "parallel: %d is negative; leave it out for %d", c.Parallel, DefaultParallel)
	fault(c.MaxAttempts < 0, "max_attempts: %d is negative; 0 is for ever", c.MaxAttempts)
	fault(c.RetryPause < 0 || c.StallAfter < 0, "retry_pause, stall_after: negative; leave them out for the defaults")
	return errors.Join(errs...)
}
