package redisguard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
)

// DefaultKeyPrefix begins the keys of marks.
const DefaultKeyPrefix = "headlease:mark:"

// Options of a guard.
type Options struct {
	// KeyPrefix begins the keys of marks; default DefaultKeyPrefix. All
	// guards of the same data must have the same. No braces.
	KeyPrefix string
	// Replicas must have each claim and write before it returns (WAIT); 0: none. It
	// narrows what a failover loses, and does not close it: see [ReplicationError].
	Replicas int
	// ReplicasWithin is how long to wait for them; default 1 s. The client's ReadTimeout
	// must be longer.
	ReplicasWithin time.Duration
	// CheckEvery is the pace at which Watch looks whether a server is another one;
	// default 1 s.
	CheckEvery time.Duration
	// Logger defaults to slog.Default().
	Logger *slog.Logger
}

// Validate reports all faults of the options at once.
func (o Options) Validate() error {
	var errs []error
	if strings.ContainsAny(o.KeyPrefix, "{}") {
		errs = append(errs, fmt.Errorf("key prefix of marks: %q has braces, which would decide the mark's slot; leave them out", o.KeyPrefix))
	}
	if o.Replicas < 0 || o.ReplicasWithin < 0 || o.CheckEvery < 0 {
		errs = append(errs, errors.New("replicas, replicas within, check every: must not be negative"))
	}
	return errors.Join(errs...)
}

func (o Options) withDefaults() Options {
	if o.KeyPrefix == "" {
		o.KeyPrefix = DefaultKeyPrefix
	}
	if o.ReplicasWithin == 0 {
		o.ReplicasWithin = time.Second
	}
	if o.CheckEvery == 0 {
		o.CheckEvery = time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return o
}

// CorruptError is returned for a mark that is not a token: something else
// wrote to its key. No write to the resource is let through until an operator
// has set the key to the highest token that may have been given out.
type CorruptError struct {
	Resource, Key, Value string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("mark of %s refused: key %q holds %q, which is no token; set it to the highest token given out",
		e.Resource, e.Key, e.Value)
}

// ReplicationError says that a claim or a write was executed, and that fewer replicas
// than Options.Replicas have it: a failover now may lose it. The holder claims again, or
// writes again, while lease.Valid().
type ReplicationError struct {
	Resource string
	// Want and Have are numbers of replicas.
	Want, Have int
}

func (e *ReplicationError) Error() string {
	return fmt.Sprintf("%s: written, but %d of %d replicas have it, and a failover may lose it; claim or write again", e.Resource, e.Have, e.Want)
}

// Guard is safe for concurrent use. The client stays the caller's to close.
type Guard struct {
	client redis.UniversalClient
	opts   Options

	claim, command *redis.Script
	servers        servers
}

// New returns a guard on the client's server, without talking to it. It adds a hook to
// the client, by which it sees new connections; make one guard per client. The
// client should have ContextTimeoutEnabled: without it go-redis keeps its own
// timeouts and not the deadline of a call's ctx.
func New(client redis.UniversalClient, opts Options) (*Guard, error) {
	var errs []error
	if client == nil {
		errs = append(errs, errors.New("client of a guard: is nil; give the client that the data is written with"))
	}
	if err := errors.Join(append(errs, opts.Validate())...); err != nil {
		return nil, err
	}
	g := &Guard{
		client:  client,
		opts:    opts.withDefaults(),
		claim:   redis.NewScript(luaClaim),
		command: redis.NewScript(luaCommand),
	}
	g.servers.init(client)
	return g, nil
}

// Claim raises the resource's mark to the token: after a nil return no write
// of a lower token is executed any more, so the new holder reads a state that
// no earlier one changes [F15]. It is repeatable. A holder calls it before its
// first read and after a *fence.UnclaimedError, and only while lease.Valid().
//
// It fails with a *fence.StaleError if a higher token was seen and with a
// *CorruptError if the mark is not a token. After any other error the mark may
// or may not be raised; claim again. [Guard.Keep] claims again by itself when the
// server may have forgotten.
func (g *Guard) Claim(ctx context.Context, resource string, token fence.Token) error {
	if _, err := g.run(ctx, g.claim, resource, token, nil, nil); err != nil {
		return fmt.Errorf("claim of %s: %w", resource, err)
	}
	g.warnOfEviction(ctx)
	return nil
}

// Mark returns the highest token seen of a resource; 0 if nobody claimed it.
func (g *Guard) Mark(ctx context.Context, resource string) (fence.Token, error) {
	key, err := g.MarkKey(resource)
	if err != nil {
		return 0, err
	}
	text, err := g.client.Get(ctx, key).Result()
	switch {
	case errors.Is(err, redis.Nil):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("mark of %s: %w", resource, err)
	}
	token, err := fence.ParseToken(text)
	if err != nil {
		return 0, &CorruptError{Resource: resource, Key: key, Value: text}
	}
	return token, nil
}

// Run runs the script if the token is not below the resource's mark, in the
// same atomic step, and returns its reply as go-redis reads it: nil, int64,
// string, []any. A higher token raises the mark first. All keys that the
// script reaches are in keys and have the resource's hash tag.
//
// It fails, the script not run, with a *fence.StaleError below the mark, a
// *fence.UnclaimedError without one, a *CorruptError if the mark is not a
// token, and a *SlotError for a key elsewhere. An error of the script itself
// is a redis.Error; what it did before stays. With a *ReplicationError the script was run,
// and its reply is returned too.
func (g *Guard) Run(ctx context.Context, resource string, token fence.Token, script *Script, keys []string, args ...any) (any, error) {
	if script == nil {
		return nil, fmt.Errorf("guarded write to %s: script is nil; make one with NewScript", resource)
	}
	reply, err := g.write(ctx, script.script, resource, token, keys, args)
	if err != nil {
		return reply, fmt.Errorf("guarded write to %s: %w", resource, err)
	}
	return reply, nil
}

// write is run for all but claims. If its server may be another one than before, what is
// kept is claimed there first; if the mark is gone all the same, and the claim kept, it is
// made again, and the write, which did nothing, tried again.
func (g *Guard) write(ctx context.Context, script *redis.Script, resource string, token fence.Token, keys []string, args []any) (any, error) {
	if err := g.reclaimIfNew(ctx, resource); err != nil {
		return nil, err
	}
	reply, err := g.run(ctx, script, resource, token, keys, args)
	var unclaimed *fence.UnclaimedError
	if errors.As(err, &unclaimed) && g.keeps(resource, token) {
		if _, err := g.run(ctx, g.claim, resource, token, nil, nil); err != nil {
			return nil, err
		}
		return g.run(ctx, script, resource, token, keys, args)
	}
	return reply, err
}

// run sends one of this package's scripts and reads what it says of the token.
func (g *Guard) run(ctx context.Context, script *redis.Script, resource string, token fence.Token, keys []string, args []any) (any, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if _, err := fence.TokenOf(uint64(token)); err != nil {
		return nil, fmt.Errorf("token: %w", err)
	}
	mark, err := g.MarkKey(resource, keys...)
	if err != nil {
		return nil, err
	}
	allKeys := append([]string{mark}, keys...)
	allArgs := append([]any{token.String()}, args...)
	if g.opts.Replicas > 0 {
		return g.runReplicated(ctx, script, resource, token, allKeys, allArgs)
	}
	reply, err := script.Run(ctx, g.client, allKeys, allArgs...).Result()
	return reply, g.verdict(ctx, resource, mark, token, err)
}

// verdict maps a script's error to the refusal that it is. No reply is none.
func (g *Guard) verdict(ctx context.Context, resource, mark string, token fence.Token, err error) error {
	switch {
	case err == nil, errors.Is(err, redis.Nil):
		return nil
	case redis.HasErrorPrefix(err, errUnclaimed):
		return &fence.UnclaimedError{Resource: resource}
	case redis.HasErrorPrefix(err, errStale):
		_, text, _ := strings.Cut(err.Error(), " ")
		if seen, err := fence.ParseToken(strings.TrimSpace(text)); err == nil {
			return &fence.StaleError{Resource: resource, Seen: seen, Given: token}
		}
		// Digits, and above every token.
		return g.corrupt(ctx, resource, mark)
	case redis.HasErrorPrefix(err, errCorrupt):
		return g.corrupt(ctx, resource, mark)
	}
	return err
}

// corrupt says what is in a mark that is no token.
func (g *Guard) corrupt(ctx context.Context, resource, mark string) error {
	value, err := g.client.Get(ctx, mark).Result()
	if err != nil {
		value = err.Error()
	}
	return &CorruptError{Resource: resource, Key: mark, Value: value}
}
