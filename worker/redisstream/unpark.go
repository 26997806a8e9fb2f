package redisstream

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/shard"
)

// KEYS: parked, dead. ARGV: key.
var unparkScript = redis.NewScript(`
for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '-', '+')) do
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'key' and entry[2][i + 1] == ARGV[1] then
      return redis.error_reply('PARKED message ' .. entry[1] .. ' of ' .. KEYS[2] .. ' is of this key; deal with it and XDEL it first')
    end
  end
end
return redis.call('HDEL', KEYS[1], ARGV[1])
`)

// Unpark lets messages of a key be handled again, after an operator has dealt
// with the parked ones, in their order, and deleted them from the stream of
// parked messages: while one is left there it is refused. It returns whether the
// key was parked, in its hash shard or the one that it was moved to. It needs no
// token: a holder that has read a message of the key before it parks that too,
// and the key is parked again (docs/decisions/0131).
func Unpark(ctx context.Context, client redis.UniversalClient, stream Stream, key string) (bool, error) {
	if client == nil {
		return false, errors.New("client of unpark: is nil; give that of the stream's server")
	}
	if err := stream.Validate(); err != nil {
		return false, err
	}
	home := shard.HashShard(key, stream.Shards)
	k, err := stream.keysOf(home)
	if err != nil {
		return false, err
	}
	reply, err := lookScript.Run(ctx, client, []string{k.moves}, key, home, home).StringSlice()
	if err != nil {
		return false, fmt.Errorf("unpark %s of stream %s: %w", key, stream.Name, err)
	}
	at, err := decodeAnswer(reply)
	if err != nil {
		return false, err
	}
	was := false
	for _, n := range slices.Compact([]uint32{home, at.other}) {
		if k, err = stream.keysOf(n); err != nil {
			return was, err
		}
		ended, err := unparkScript.Run(ctx, client, []string{k.parked, k.dead}, key).Int()
		if err != nil {
			return was, fmt.Errorf("unpark %s of %s: %w", key, k.stream, err)
		}
		was = was || ended > 0
	}
	return was, nil
}
