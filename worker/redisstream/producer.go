package redisstream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/headlease/headlease/shard"
)

// MaxBody is the most bytes of a message.
const MaxBody = 1 << 20

// producerTTL is how long a producer's last message is remembered after it.
const producerTTL = 24 * time.Hour

// ErrUnknown: the message may have been sent; it is not sent later.
var ErrUnknown = errors.New("it is not known whether the message was sent")

// Number, entry and the producer's memory are one step. A send that arrives
// late, after a later one of its producer, is refused.
var sendScript = redis.NewScript(`
local last = redis.call('HMGET', KEYS[3], 'number', 'id', 'seq')
local number = tonumber(ARGV[3])
if last[1] and tonumber(last[1]) == number then
  return {last[2], last[3]}
end
if last[1] and tonumber(last[1]) > number then
  return redis.error_reply('LATE a later message of this producer was sent')
end
local seq = redis.call('HINCRBY', KEYS[2], ARGV[1], 1)
local id = redis.call('XADD', KEYS[1], '*', 'key', ARGV[1], 'seq', seq, 'body', ARGV[2])
redis.call('HSET', KEYS[3], 'number', ARGV[3], 'id', id, 'seq', seq)
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('PUBLISH', ARGV[5], ARGV[6])
return {id, tostring(seq)}
`)

// Sent is where a message is.
type Sent struct {
	Shard uint32
	ID    string
	// Seq counts the key's messages, from 1.
	Seq uint64
}

// Producer sends messages. It is safe for concurrent use; messages of one shard
// go one after the other.
type Producer struct {
	client redis.UniversalClient
	stream Stream
	id     string

	mu    sync.Mutex
	lines map[uint32]*line
}

// line is a producer's messages to one shard.
type line struct {
	turn   chan struct{} // has room for one
	number uint64        // of the last message; whoever has the turn
}

// NewProducer returns a producer with an id of its own.
func NewProducer(client redis.UniversalClient, stream Stream) (*Producer, error) {
	if client == nil {
		return nil, errors.New("client of a producer: is nil; give that of the stream's server")
	}
	if err := stream.Validate(); err != nil {
		return nil, err
	}
	return &Producer{client: client, stream: stream, id: uuid.NewString(), lines: map[uint32]*line{}}, nil
}

// Send appends a message, and tries again until it knows that this is done or
// ctx ends: then the error is ErrUnknown if it may have been done.
func (p *Producer) Send(ctx context.Context, key string, body []byte) (Sent, error) {
	if key == "" || len(body) > MaxBody {
		return Sent{}, fmt.Errorf("send to %s: the key has %d bytes and the body %d; give a key, and a body of at most %d", p.stream.Name, len(key), len(body), MaxBody)
	}
	n := shard.Of(key, p.stream.Shards, p.stream.Exceptions)
	k, err := p.stream.keys(p.stream.resource(n))
	if err != nil {
		return Sent{}, err
	}
	l := p.line(n)
	select {
	case l.turn <- struct{}{}:
	case <-ctx.Done():
		return Sent{}, fmt.Errorf("send to %s: %w", k.stream, context.Cause(ctx))
	}
	defer func() { <-l.turn }()
	l.number++
	pause := 10 * time.Millisecond
	for {
		sent, err := p.try(ctx, k, l.number, key, body)
		if err == nil {
			sent.Shard = n
			return sent, nil
		}
		var refused redis.Error
		if errors.As(err, &refused) && !retryable(refused) {
			return Sent{}, fmt.Errorf("send to %s: %w", k.stream, err)
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return Sent{}, fmt.Errorf("send to %s: %w: %w", k.stream, ErrUnknown, err)
		}
		pause = min(2*pause, time.Second)
	}
}

func (p *Producer) try(ctx context.Context, k keys, number uint64, key string, body []byte) (Sent, error) {
	reply, err := sendScript.Run(ctx, p.client, []string{k.stream, k.seq, k.producers + p.id},
		key, body, number, producerTTL.Milliseconds(), p.stream.channel(), k.resource).StringSlice()
	if err != nil {
		return Sent{}, err
	}
	if len(reply) != 2 {
		return Sent{}, fmt.Errorf("the server replied %q", reply)
	}
	seq, err := strconv.ParseUint(reply[1], 10, 64)
	if err != nil {
		return Sent{}, fmt.Errorf("the number of the message: %w", err)
	}
	return Sent{ID: reply[0], Seq: seq}, nil
}

func (p *Producer) line(n uint32) *line {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.lines[n]
	if l == nil {
		l = &line{turn: make(chan struct{}, 1)}
		p.lines[n] = l
	}
	return l
}

// retryable reports whether a server that refuses so may take it later.
func retryable(err redis.Error) bool {
	for _, prefix := range []string{"LOADING ", "BUSY ", "TRYAGAIN ", "CLUSTERDOWN ", "MASTERDOWN ", "READONLY ", "OOM ", "MISCONF "} {
		if redis.HasErrorPrefix(err, prefix) {
			return true
		}
	}
	return false
}
