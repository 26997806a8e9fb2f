package redisstream

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/shard"
)

// Stage of a move that is not over: what it waits for.
type Stage string

// Stages.
const (
	// StageWorker: no worker has taken the shard that the key goes to yet.
	StageWorker Stage = "waits for a worker to take the shard"
	// StageParked: messages of the key are parked in the shard that it leaves.
	StageParked Stage = "waits for parked messages of the key"
	// StageDrain: messages that were sent before the move are not handled yet.
	StageDrain Stage = "waits for what was sent before"
	// StageMark: the store lost the mark of the shard that the key leaves; its
	// holder makes it anew.
	StageMark Stage = "waits for the holder of the shard to claim again"
	// StageLease: the holder of the shard that the key goes to has an older token
	// than one that handled the key; it takes a new lease.
	StageLease Stage = "waits for a new lease of the shard"
	// StageDone: the key is where it should be.
	StageDone Stage = "done"
)

// Progress of a move.
type Progress struct {
	Stage Stage
	// Shard that it waits for.
	Shard uint32
	// Left is how many messages it waits for, at least.
	Left uint64
	// Floor is what the token of StageLease must be above.
	Floor fence.Token
}

// ErrSuperseded: a newer move of the key has begun.
var ErrSuperseded = errors.New("a newer move of this key has begun")

// ErrNotMoved: the stream's server has no record that the key was ever moved in
// it.
var ErrNotMoved = errors.New("this server has no record that the key was ever moved in the stream")

// Move of a key in a stream, as the configuration has decided it.
type Move struct {
	Key string
	// Dedicated shard of the key.
	Dedicated uint32
	// Generation is the version of the configuration that began the move.
	Generation uint64
	// Back to the key's hash shard.
	Back bool
	// Unmoved takes a key to be back where there is no record of it: its move out
	// was broken off before it began in this stream. Without it that is ErrNotMoved,
	// since of another server it would be wrong: the exception would end, and what
	// is in the dedicated shard be handled never.
	Unmoved bool
}

// Mover moves keys between their hash shards and dedicated ones. It is safe for
// concurrent use, also on several machines.
type Mover struct {
	stream Stream
	places places
}

// NewMover returns a mover of a stream's keys.
func NewMover(client redis.UniversalClient, guard Guard, stream Stream) (*Mover, error) {
	errs := []error{stream.Validate()}
	if client == nil || guard == nil {
		errs = append(errs, errors.New("client, guard of a mover: both are needed; see redisguard.New"))
	}
	if stream.Resource != nil {
		errs = append(errs, fmt.Errorf("resource of stream %s: a stream with resources of its own has no dedicated shards", stream.Name))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Mover{stream: stream, places: redisPlaces{client, guard, stream}}, nil
}

// Step takes a move as far as it goes now, and says what it waits for. All that
// it goes by is in the stream's server, so it may be broken off at any point and
// taken on by anybody; what was sealed ends without it too, by the worker that
// has the shard. The error is ErrSuperseded if the key was moved on meanwhile, and
// ErrNotMoved if it is not known here and to be brought back.
func (m *Mover) Step(ctx context.Context, mv Move) (Progress, error) {
	if mv.Key == "" || mv.Dedicated < shard.FirstDedicated || mv.Generation == 0 {
		return Progress{}, fmt.Errorf("move of key %q to shard %d, generation %d: give the exception that the configuration has", mv.Key, mv.Dedicated, mv.Generation)
	}
	home := shard.HashShard(mv.Key, m.stream.Shards)
	if !mv.Back {
		return stepOut(ctx, m.places, mv, home)
	}
	if !mv.Unmoved {
		moved, err := m.Moved(ctx, mv.Key)
		if err == nil && !moved {
			err = fmt.Errorf("move of %s back in stream %s: %w", mv.Key, m.stream.Name, ErrNotMoved)
		}
		if err != nil {
			return Progress{}, err
		}
	}
	return stepBack(ctx, m.places, mv, home)
}

// Moved reports whether the stream's server has a record of a move of the key.
func (m *Mover) Moved(ctx context.Context, key string) (bool, error) {
	a, err := m.places.look(ctx, shard.HashShard(key, m.stream.Shards), key)
	return a.generation > 0, err
}

// stepOut moves a key from its hash shard to its dedicated one.
func stepOut(ctx context.Context, p places, mv Move, home uint32) (Progress, error) {
	a, err := p.look(ctx, home, mv.Key)
	if err != nil {
		return Progress{}, err
	}
	if a.generation < mv.Generation {
		// Nothing would handle the key in a shard that no worker serves.
		if ok, err := p.claimed(ctx, mv.Dedicated); err != nil || !ok {
			return Progress{Stage: StageWorker, Shard: mv.Dedicated}, err
		}
		if a.place == arriving { // the move before
			if done, err := finish(ctx, p, home, mv.Key); err != nil || done.Stage != StageDone {
				return done, err
			}
		}
		if a, err = p.seal(ctx, home, mv.Key, mv.Generation, mv.Dedicated); err != nil {
			return Progress{}, err
		}
	}
	switch {
	case a.word == parked:
		return Progress{Stage: StageParked, Shard: home, Left: a.left}, nil
	case a.word == busy:
		return Progress{Stage: StageDrain, Shard: home}, nil
	case a.generation != mv.Generation || a.place != away || a.other != mv.Dedicated:
		return Progress{}, superseded(mv, a)
	}
	return carry(ctx, p, mv, home, mv.Dedicated, a.record)
}

// stepBack moves a key from its dedicated shard to its hash shard, after what
// was left to do to get it there.
func stepBack(ctx context.Context, p places, mv Move, home uint32) (Progress, error) {
	a, err := p.stay(ctx, home, mv.Key, mv.Generation)
	if err != nil {
		return Progress{}, err
	}
	switch {
	case a.generation > mv.Generation:
		return Progress{}, superseded(mv, a)
	case a.place == here:
		return Progress{Stage: StageDone, Shard: home}, nil
	case a.place == arriving:
		done, err := finish(ctx, p, home, mv.Key)
		if err == nil && done.Stage == StageDone && a.generation < mv.Generation {
			return stepBack(ctx, p, mv, home) // that was the move before
		}
		return done, err
	case a.other != mv.Dedicated:
		return Progress{}, fmt.Errorf("move of %s: shard %d says that the key went to shard %d, not to %d", mv.Key, home, a.other, mv.Dedicated)
	}
	if out, err := carry(ctx, p, Move{Key: mv.Key, Dedicated: mv.Dedicated, Generation: a.generation}, home, mv.Dedicated, a.record); !errors.Is(err, ErrSuperseded) && (err != nil || out.Stage != StageDone) {
		return out, err
	}
	if a, err = p.seal(ctx, mv.Dedicated, mv.Key, mv.Generation, home); err != nil {
		return Progress{}, err
	}
	switch {
	case a.word == parked:
		return Progress{Stage: StageParked, Shard: mv.Dedicated, Left: a.left}, nil
	case a.word == busy:
		return Progress{Stage: StageDrain, Shard: mv.Dedicated}, nil
	case a.generation != mv.Generation || a.place != away:
		return Progress{}, superseded(mv, a)
	}
	return carry(ctx, p, mv, mv.Dedicated, home, a.record)
}

func superseded(mv Move, a answer) error {
	return fmt.Errorf("move of %s, generation %d: %w, generation %d", mv.Key, mv.Generation, ErrSuperseded, a.generation)
}

// carry brings a key that one shard has sealed to the other.
func carry(ctx context.Context, p places, mv Move, from, to uint32, sealed record) (Progress, error) {
	a, err := p.arrive(ctx, to, mv.Key, mv.Generation, from, sealed.last)
	if err != nil {
		return Progress{}, err
	}
	if a.generation != mv.Generation {
		return Progress{}, superseded(mv, a)
	}
	return finish(ctx, p, to, mv.Key)
}

// finish opens a key at the shard that it is arriving at, if all that was sent
// before is handled and the shard's holder has a token above those that handled
// it.
func finish(ctx context.Context, p places, at uint32, key string) (Progress, error) {
	a, err := p.look(ctx, at, key)
	if err != nil {
		return Progress{}, err
	}
	if a.place != arriving {
		return Progress{Stage: StageDone, Shard: at}, nil
	}
	generation, from := a.generation, a.other
	if a, err = p.drain(ctx, from, key, generation); err != nil {
		return Progress{}, err
	}
	waits := Progress{Shard: from, Left: a.left}
	switch a.word {
	case parked:
		waits.Stage = StageParked
		return waits, nil
	case busy:
		waits.Stage = StageDrain
		return waits, nil
	case unmarked:
		waits.Stage = StageMark
		return waits, nil
	case newer:
		// The key has been here and gone on since, or its record at the shard
		// before is lost; the next look says which.
		return Progress{Stage: StageDrain, Shard: from}, nil
	}
	floor := a.floor
	for {
		if a, err = p.open(ctx, at, key, generation, floor); err != nil {
			return Progress{}, err
		}
		switch a.word {
		case more:
			if ctx.Err() != nil {
				return Progress{}, context.Cause(ctx)
			}
		case lease, unmarked:
			return Progress{Stage: StageLease, Shard: at, Floor: floor}, nil
		default:
			return Progress{Stage: StageDone, Shard: at}, nil
		}
	}
}
