package idempotency

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// DefaultPrefix begins the keys of a Redis store.
const DefaultPrefix = "headlease:done:"

func newAttempt() string { return rand.Text() }

// Redis is a Store in Redis. A server that evicts under allkeys-*, or loses writes, forgets
// keys: use appendonly yes, and noeviction or volatile-ttl with memory to spare.
type Redis struct {
	client redis.UniversalClient
	opts   Options
}

// NewRedis returns a store on the client's server.
func NewRedis(client redis.UniversalClient, opts Options) (*Redis, error) {
	if client == nil {
		return nil, errors.New("idempotency keys: client is nil")
	}
	if err := opts.Validate(); err != nil {
		return nil, fmt.Errorf("idempotency keys: %w", err)
	}
	return &Redis{client, opts.withDefaults()}, nil
}

// The value of a key is "B ATTEMPT UNTIL", of an attempt that began, until when on the server's
// clock in milliseconds, or "D RESULT".
var (
	redisBegin = redis.NewScript(`
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local was = redis.call('GET', KEYS[1])
if was and string.sub(was, 1, 2) == 'D ' then return {'done', string.sub(was, 3)} end
local holder, ends = string.match(was or '', '^B (%S+) (%d+)$')
if holder and holder ~= ARGV[1] and tonumber(ends) > now then return {'busy', tostring(tonumber(ends) - now)} end
redis.call('SET', KEYS[1], 'B ' .. ARGV[1] .. ' ' .. string.format('%.0f', now + tonumber(ARGV[2])), 'PX', tonumber(ARGV[3]))
if holder and holder ~= ARGV[1] then return {'again'} end
return {'first'}
`)
	redisEnd = redis.NewScript(`
local was = redis.call('GET', KEYS[1])
if not was or string.match(was, '^B (%S+) %d+$') ~= ARGV[1] then return 'overtaken' end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', tonumber(ARGV[3]))
end
return 'ok'
`)
)

// AttemptWithin is Options.Attempt.
func (r *Redis) AttemptWithin() time.Duration { return r.opts.Attempt }

// Begin begins an attempt.
func (r *Redis) Begin(ctx context.Context, key, attempt string) (Begun, error) {
	reply, err := redisBegin.Run(ctx, r.client, []string{DefaultPrefix + key}, attempt, r.opts.Attempt.Milliseconds(), r.opts.Keep.Milliseconds()).StringSlice()
	if err != nil {
		return Begun{}, fmt.Errorf("idempotency key %s: %w", key, err)
	}
	switch reply[0] {
	case "done":
		return Begun{Done: true, Result: []byte(reply[1])}, nil
	case "busy":
		ms, _ := strconv.ParseInt(reply[1], 10, 64)
		return Begun{}, &BusyError{Key: key, For: time.Duration(ms) * time.Millisecond}
	case "again":
		return Begun{Again: true}, nil
	}
	return Begun{}, nil
}

// Finish notes the attempt's result.
func (r *Redis) Finish(ctx context.Context, key, attempt string, result []byte) error {
	var value strings.Builder
	value.WriteString("D ")
	value.Write(result)
	return r.end(ctx, key, attempt, value.String())
}

// Abandon forgets the attempt. An earlier one that did not end is forgotten with it: the
// effect that says Nothing has looked.
func (r *Redis) Abandon(ctx context.Context, key, attempt string) error {
	return r.end(ctx, key, attempt, "")
}

func (r *Redis) end(ctx context.Context, key, attempt, value string) error {
	reply, err := redisEnd.Run(ctx, r.client, []string{DefaultPrefix + key}, attempt, value, r.opts.Keep.Milliseconds()).Text()
	switch {
	case err != nil:
		return err
	case reply != "ok":
		return ErrOvertaken
	}
	return nil
}
