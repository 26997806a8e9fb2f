package redisstream

import (
	"context"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/shard"
)

// place is what a key is to a shard.
type place string

const (
	// here: the shard takes its messages and has them handled.
	here place = "here"
	// arriving: it takes them, and keeps them aside until what was sent to the
	// other shard is handled.
	arriving place = "arriving"
	// away: it takes none; the other shard does.
	away place = "away"
)

// record of a key at a shard. Without one, a key is here in its hash shard, and
// in any other one away to that, at generation 0.
type record struct {
	// generation of the move that made it: the version of the configuration that
	// began it. A newer one never gives way to an older.
	generation uint64
	place      place
	// other shard: where it came from, or went.
	other uint32
	// last number that was given before the move.
	last uint64
	// upTo is the last entry of the stream that it left.
	upTo string
	// floor: no token up to it handles the key after the move; once what was sent
	// before it is handled.
	floor   fence.Token
	drained bool
}

// answer of a step at a shard: why it was not taken, if it was not, and how
// things stand there.
type answer struct {
	word string
	record
	// left is how many messages are in the way.
	left uint64
}

// Words of answers.
const (
	said     = "said"     // it is so, now or already
	newer    = "newer"    // a newer move of the key is known
	busy     = "busy"     // the move before it is not over, or messages are left
	parked   = "parked"   // messages of the key are parked
	unmarked = "unmarked" // the shard has no mark: no worker has it, or it was lost
	lease    = "lease"    // the token of the shard's holder is not above the floor
	more     = "more"     // some were carried over, others are left
)

// places are the shards of a stream, each of which takes a step atomically.
// Steps may be repeated, come late, and be taken by anybody.
type places interface {
	// look returns the record of a key.
	look(ctx context.Context, at uint32, key string) (answer, error)
	// claimed reports whether a worker has ever held the shard.
	claimed(ctx context.Context, at uint32) (bool, error)
	// stay gives a key that is here a newer generation, so that older moves of it
	// are over.
	stay(ctx context.Context, at uint32, key string, generation uint64) (answer, error)
	// seal ends that the shard takes messages of a key that is here.
	seal(ctx context.Context, at uint32, key string, generation uint64, to uint32) (answer, error)
	// drain notes that all that came before the seal is handled, and by which
	// tokens at most.
	drain(ctx context.Context, at uint32, key string, generation uint64) (answer, error)
	// arrive begins that the shard takes messages of a key, numbered from last+1.
	arrive(ctx context.Context, at uint32, key string, generation uint64, from uint32, last uint64) (answer, error)
	// open has the messages of an arriving key handled, once the shard's holder
	// has a token above the floor.
	open(ctx context.Context, at uint32, key string, generation uint64, floor fence.Token) (answer, error)
}

// redisPlaces are the shards in Redis.
type redisPlaces struct {
	client redis.UniversalClient
	guard  Guard
	stream Stream
}

// run runs a script over all keys of a shard that have to do with a key.
func (p redisPlaces) run(ctx context.Context, script *redis.Script, at uint32, key string, args ...any) (answer, error) {
	k, err := p.stream.keysOf(at)
	if err != nil {
		return answer{}, err
	}
	keys := []string{k.moves, k.stream, k.seq, k.parked, k.arriving, k.arrivals + key}
	mark, err := p.guard.MarkKey(k.resource, keys...)
	if err != nil {
		return answer{}, err
	}
	reply, err := script.Run(ctx, p.client, append(keys, mark),
		append([]any{key, at, shard.HashShard(key, p.stream.Shards)}, args...)...).StringSlice()
	if err != nil {
		return answer{}, fmt.Errorf("move of %s at %s: %w", key, k.stream, err)
	}
	return decodeAnswer(reply)
}

func decodeAnswer(reply []string) (a answer, err error) {
	if len(reply) != 8 {
		return a, fmt.Errorf("the server replied %q", reply)
	}
	numbers := [...]uint64{0, 0, 0, 0}
	for i, at := range [...]int{1, 3, 4, 7} {
		if numbers[i], err = strconv.ParseUint(reply[at], 10, 64); err != nil {
			return a, fmt.Errorf("the server replied %q: %w", reply, err)
		}
	}
	a = answer{word: reply[0], record: record{generation: numbers[0], place: place(reply[2]), other: uint32(numbers[1]), last: numbers[2], upTo: reply[5]}, left: numbers[3]}
	if reply[6] != "-" {
		floor, err := strconv.ParseUint(reply[6], 10, 64)
		if err != nil {
			return a, fmt.Errorf("the server replied %q: %w", reply, err)
		}
		a.floor, a.drained = fence.Token(floor), true
	}
	return a, nil
}

func (p redisPlaces) look(ctx context.Context, at uint32, key string) (answer, error) {
	return p.run(ctx, lookScript, at, key)
}

func (p redisPlaces) claimed(ctx context.Context, at uint32) (bool, error) {
	a, err := p.run(ctx, claimedScript, at, "any")
	return a.word == said, err
}

func (p redisPlaces) stay(ctx context.Context, at uint32, key string, generation uint64) (answer, error) {
	return p.run(ctx, stayScript, at, key, generation)
}

func (p redisPlaces) seal(ctx context.Context, at uint32, key string, generation uint64, to uint32) (answer, error) {
	return p.run(ctx, sealScript, at, key, generation, to)
}

func (p redisPlaces) drain(ctx context.Context, at uint32, key string, generation uint64) (answer, error) {
	return p.run(ctx, drainScript, at, key, generation)
}

func (p redisPlaces) arrive(ctx context.Context, at uint32, key string, generation uint64, from uint32, last uint64) (answer, error) {
	return p.run(ctx, arriveScript, at, key, generation, from, last)
}

func (p redisPlaces) open(ctx context.Context, at uint32, key string, generation uint64, floor fence.Token) (answer, error) {
	k, err := p.stream.keysOf(at)
	if err != nil {
		return answer{}, err
	}
	return p.run(ctx, openMoveScript, at, key, generation, uint64(floor), carried, p.stream.channel(), k.resource)
}
