package redisguard

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
)

// DefaultRunning is how long an effect of Handlers counts as running when nothing more is
// heard of its process.
const DefaultRunning = 10 * time.Second

// Pauses between two questions whether lower effects have ended.
const (
	minPoll = 10 * time.Millisecond
	maxPoll = 200 * time.Millisecond
)

// Handlers is a store of marks for effects that are not writes to Redis: handlers of
// several processes, which claim and wait for each other through the server
// (markstore.Store). It is safe for concurrent use.
//
// Running effects are in a sorted set beside the mark, each with its end on the server's
// clock, which its process moves on at a third of the time. An effect's ctx ends when a higher
// token came, or when its process could not move the end on in time. Claim waits for
// lower effects until they have left the set or their time has passed; so the effect of a
// process that was frozen for longer than that is not waited for. Where that matters,
// use PostgreSQL, whose locks end with the connection.
type Handlers struct {
	guard   *Guard
	running time.Duration

	claim, enter, stay, leave *redis.Script
}

// KEYS are the mark and the set, ARGV the token, the member and the time in milliseconds.
const (
	luaNow = `
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', '(' .. string.format('%.0f', now))
`
	luaLower = `
for _, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  if tonumber(string.match(member, '^%d+')) < tonumber(ARGV[1]) then return 'busy' end
end
`
	luaEnter = luaHeld + luaNow + luaLower + `
redis.call('ZADD', KEYS[2], string.format('%.0f', now + tonumber(ARGV[3])), ARGV[2])
return 'ok'
`
	luaClaimIdle = luaSeen + `
redis.call('SET', KEYS[1], ARGV[1])
` + luaNow + luaLower + `
return 'ok'
`
	// The end moves on whatever the mark is: an effect that was told to stop is waited for
	// until it has.
	luaStay = luaNow + `
redis.call('ZADD', KEYS[2], string.format('%.0f', now + tonumber(ARGV[3])), ARGV[2])
` + luaSeen + `
return 'ok'
`
	luaLeave = `
redis.call('ZREM', KEYS[2], ARGV[2])
return 'ok'
`
)

const statusBusy = "busy"

// errBusy: an effect of a lower token is running.
var errBusy = errors.New("an effect of a lower token is still running")

// Handlers returns a store of marks on the guard's server. running is how long an effect
// counts as running when nothing more is heard of its process; 0: DefaultRunning. It must be
// longer than any pause of a process that is to be waited for.
func (g *Guard) Handlers(running time.Duration) (*Handlers, error) {
	if running == 0 {
		running = DefaultRunning
	}
	if running < time.Second {
		return nil, fmt.Errorf("handlers: running: %v is below 1s, and a short pause would let a claim pass a running effect", running)
	}
	return &Handlers{
		guard: g, running: running,
		claim: redis.NewScript(luaClaimIdle), enter: redis.NewScript(luaEnter), stay: redis.NewScript(luaStay), leave: redis.NewScript(luaLeave),
	}, nil
}

// Shared is true: all processes on the server's data see the same marks.
func (h *Handlers) Shared() bool { return true }

// Claim raises the mark and waits until no effect of a lower token runs.
func (h *Handlers) Claim(ctx context.Context, resource string, token fence.Token) error {
	if err := h.wait(ctx, resource, token, h.claim, token.String()); err != nil {
		return fmt.Errorf("claim of %s: %w", resource, err)
	}
	h.guard.warnOfEviction(ctx)
	return nil
}

// Do runs the effect under the mark; see [Handlers].
func (h *Handlers) Do(ctx context.Context, resource string, token fence.Token, effect func(context.Context) error) error {
	member := token.String() + ":" + rand.Text()
	began := time.Now()
	if err := h.wait(ctx, resource, token, h.enter, member); err != nil {
		return fmt.Errorf("write to %s: %w", resource, err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		h.keepOn(context.WithoutCancel(ctx), stop, cancel, resource, token, member, began)
	}()
	defer func() {
		close(stop)
		<-done
		cancel(nil)
		// Its time passes if this fails.
		ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), h.running/3)
		defer stop()
		if err := h.run(ctx, resource, token, h.leave, member); err != nil {
			h.guard.opts.Logger.Debug("an effect that ended counts as running until its time has passed", "resource", resource, "error", err)
		}
	}()
	return effect(ctx)
}

// wait runs a script until no lower effect runs. Asked again each time: a higher token may
// have come meanwhile.
func (h *Handlers) wait(ctx context.Context, resource string, token fence.Token, script *redis.Script, member string) error {
	for pause := minPoll; ; pause = min(2*pause, maxPoll) {
		err := h.run(ctx, resource, token, script, member)
		if !errors.Is(err, errBusy) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, context.Cause(ctx))
		}
	}
}

// keepOn moves the end of a running effect on until stop, and cancels the effect when it may
// not go on.
func (h *Handlers) keepOn(ctx context.Context, stop <-chan struct{}, cancel context.CancelCauseFunc, resource string, token fence.Token, member string, last time.Time) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	go func() { // a question under way is not waited for
		select {
		case <-stop:
			end()
		case <-ctx.Done():
		}
	}()
	tick := time.NewTicker(h.running / 6)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		asked := time.Now()
		within, over := context.WithTimeout(ctx, h.running/3)
		err := h.run(within, resource, token, h.stay, member)
		over()
		var stale *fence.StaleError
		switch {
		case err == nil:
			last = asked
		case errors.As(err, &stale):
			last = asked
			cancel(stale)
		case time.Since(last) > h.running*2/3:
			cancel(fmt.Errorf("the marks of %s are out of reach, so that a new holder would not wait for this effect: %w", resource, err))
		}
	}
}

func (h *Handlers) run(ctx context.Context, resource string, token fence.Token, script *redis.Script, member string) error {
	mark, err := h.guard.MarkKey(resource)
	if err != nil {
		return err
	}
	if _, err := fence.TokenOf(uint64(token)); err != nil {
		return fmt.Errorf("token: %w", err)
	}
	set := strings.TrimSuffix(h.guard.opts.KeyPrefix, ":") + "-running:" + strings.TrimPrefix(mark, h.guard.opts.KeyPrefix)
	reply, err := script.Run(ctx, h.guard.client, []string{mark, set}, token.String(), member, h.running.Milliseconds()).Result()
	if reply == statusBusy {
		return errBusy
	}
	return h.guard.verdict(ctx, resource, mark, token, err)
}
